"""Served models: latencies from the schedule, rates of what was completed, and whether any of it may be believed.

All of it from the raw requests of all launches of a cell, merged; never from percentiles of parts. A percentile has
95 % bounds by drawing launches and blocks of answers again (`shared_waits`). A rate has the bounds of its launches, so
that of one launch alone has none.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from paceline.analysis.findings import HIGHER, LOWER, Measurement
from paceline.analysis.findings.served import CLIENT
from paceline.analysis.served import client_share, latency_bounds
from paceline.analysis.served.exactly_once import exactly_once as exactly_once
from paceline.analysis.served.loads import Load as Load
from paceline.analysis.served.loads import Served as Served
from paceline.analysis.served.loads import first_answer_s, first_reasoning_s, is_scheduled
from paceline.analysis.served.loads import gather as gather
from paceline.analysis.served.loads import in_time as in_time
from paceline.analysis.served.loads import latency_s as latency_s
from paceline.analysis.served.loads import service_ttft_s as service_ttft_s
from paceline.analysis.served.loads import tpot_s as tpot_s
from paceline.analysis.served.loads import ttft_s as ttft_s
from paceline.analysis.served.token_times import Steady, gaps_between_tokens, steady
from paceline.analysis.served.token_times import tokens_of as tokens_of
from paceline.analysis.statistics.intervals import Bounded, Resampled, bounded, over_launches, quotient
from paceline.errors import Scalar
from paceline.experiment.serving import OPEN, PERCENTILE, STAGED_SCENARIOS
from paceline.results import client_audit
from paceline.results.records import RunRecord
from paceline.results.served_samples import ClientSample, RequestSample, StageSample
from paceline.serving import early_stopping

NS = 1e9
PERCENTILES = (50, 90, 95, 99)


# --- measured ---


Quantity = Callable[[RequestSample], float | None]
LATENCIES: dict[str, Quantity] = {
    "ttft": ttft_s,
    "service_ttft": service_ttft_s,
    "tpot": tpot_s,
    "latency": latency_s,
}
# Of a model that reasons before it answers, measured only where one did.
OF_REASONING: dict[str, Quantity] = {"first_reasoning": first_reasoning_s, "first_answer": first_answer_s}
# Columns of a launch: what is counted, and over what.
_COUNTED = ("tokens", "prompt_tokens", "answered", "good", "good_tokens", "wall_s", "requests", "failed")
RATES = {
    "output_tokens_per_s": ("tokens/s", HIGHER, "tokens", "wall_s"),
    "prompt_tokens_per_s": ("tokens/s", HIGHER, "prompt_tokens", "wall_s"),
    "requests_per_s": ("requests/s", HIGHER, "answered", "wall_s"),
    "goodput_requests_per_s": ("requests/s", HIGHER, "good", "wall_s"),
    "goodput_tokens_per_s": ("tokens/s", HIGHER, "good_tokens", "wall_s"),
    "goodput_ratio": ("ratio", HIGHER, "good", "requests"),
    "failed_ratio": ("ratio", LOWER, "failed", "requests"),
}
# Beside the percentiles and RATES: of tokens, of the full load, over replicas (axes tell them), and told ahead.
_OTHERS = {
    "itl_split_ratio": ("ratio", LOWER),
    "steady_output_tokens_per_s": ("tokens/s", HIGHER),
    "steady_ratio": ("ratio", HIGHER),
    "token_count_mismatch_ratio": ("ratio", LOWER),
    "client_ceiling_ratio": ("ratio", LOWER),
    "max_rate_per_s": ("requests/s", HIGHER),
    "replica_output_tokens_per_s": ("tokens/s", HIGHER),
    "replica_prompt_tokens_per_s": ("tokens/s", HIGHER),
    "replicas_speedup_ratio": ("ratio", HIGHER),
    "replicas_efficiency_ratio": ("ratio", HIGHER),
    "straggler_ratio": ("ratio", LOWER),
    "full_set_s": ("s", LOWER),
}
METRICS: dict[str, tuple[str, str]] = {
    **{f"{name}_p{p}_s": ("s", LOWER) for name in (*LATENCIES, *OF_REASONING, "itl") for p in PERCENTILES},
    **{name: (unit, better) for name, (unit, better, _, _) in RATES.items()},
    **_OTHERS,
}
OPEN_LOAD = "requests come by a schedule, so that no number of them in flight is planned"
TOKEN_AUDIT = (
    "the server's count against what was asked for where an answer ended by its length, else against the events with "
    "content (at least) and what was asked for (at most)"
)


def measure(served: Served) -> Iterator[Measurement]:
    """What requests show, whether or not they can be believed: `load_problems` tells."""
    reasons = any(request.first_reasoning_ns is not None for request in served.answered)
    for name, quantity in (LATENCIES | OF_REASONING if reasons else LATENCIES).items():
        count = sum(quantity(request) is not None for request in served.answered)
        note = latency_bounds.why_by_launches(served, quantity)
        for percent, found in zip(PERCENTILES, latency_bounds.of_answers(served, quantity, PERCENTILES), strict=True):
            yield measurement(served, f"{name}_p{percent}_s", found, n=count, note=note)
    yield from _gaps(served)
    yield from _rates(served)
    yield from _steady_rates(served)
    wrong, counted = mismatched(served.answered)
    share = wrong / counted if counted else None
    told = TOKEN_AUDIT if counted else "the server tells no count of tokens"
    yield measurement(served, "token_count_mismatch_ratio", (share, None, None), n=counted, note=told)
    used = client_share.use_of(served)
    yield measurement(served, "client_ceiling_ratio", (used.ratio, None, None), note=used.text)


def _gaps(served: Served) -> Iterator[Measurement]:
    gaps = [gaps_between_tokens(launch.answered) for launch in served.launches]
    count = sum(len(each.seconds) for each in gaps)
    for percent, found in zip(PERCENTILES, latency_bounds.of_gaps(served, gaps, PERCENTILES), strict=True):
        yield measurement(served, f"itl_p{percent}_s", found, n=count)
    split = sum(each.split for each in gaps) / count if count else None
    yield measurement(served, "itl_split_ratio", (split, None, None), n=count)


def _rates(served: Served) -> Iterator[Measurement]:
    for name, found in rates(served, RATES).items():
        known = served.has_limits or not name.startswith("goodput")
        yield measurement(served, name, bounded(found) if known else (None, None, None))


def rates(served: Served, names: Iterable[str]) -> dict[str, Resampled | None]:
    """Some of RATES, each over the totals of launches: the one way in which any part of a report tells them."""
    rows, found = [_counts(launch) for launch in served.launches], {}
    for name in names:
        _, _, counted, over = RATES[name]
        estimate = quotient(_COUNTED.index(counted), _COUNTED.index(over))
        found[name] = over_launches(rows, estimate, served.cell, served.words, name)
    return found


def _counts(launch: Served) -> list[float]:
    answered = launch.answered
    good = [request for request in answered if in_time(request, launch.limits)]
    told = launch.prompt_tokens() if answered else None
    asked = math.nan if told is None else float(told)
    tokens, good_tokens = (float(sum(map(tokens_of, each))) for each in (answered, good))
    count = len(launch.requests)
    return [tokens, asked, len(answered), len(good), good_tokens, launch.wall_s(), count, count - len(answered)]


def steady_parts(served: Served) -> list[Steady]:
    """Of each stretch by itself: nothing is in flight between them."""
    return [steady(stretch.requests, served.planned_in_flight) for stretch in served.stretches]


def _steady_rates(served: Served) -> Iterator[Measurement]:
    """Tokens that came while the load was full, over that time; None with the reason where it never was."""
    if served.is_open:
        found, reasons = [], [OPEN_LOAD]
    else:
        found = [_steady_counts(launch) for launch in served.launches]
        reasons = [part.reason for part in steady_parts(served) if part.reason]
    table = [row for row in found if row[1] > 0]
    rate = bounded(over_launches(table, quotient(0, 1), served.cell, "steady"))
    share = bounded(over_launches(table, quotient(1, 2), served.cell, "steady share"))
    note = None if table else next(iter(reasons), None)
    yield measurement(served, "steady_output_tokens_per_s", rate, note=note)
    yield measurement(served, "steady_ratio", share, note=note)


def _steady_counts(launch: Served) -> list[float]:
    """Tokens and seconds of the steady parts of one launch, and the whole time of the stretches they are of."""
    parts = zip(launch.stretches, steady_parts(launch), strict=True)
    sound = [(stretch.wall_s, part) for stretch, part in parts if part.reason is None]
    return [sum(p.total for _, p in sound), sum(p.seconds for _, p in sound), sum(wall for wall, _ in sound)]


def mismatched(requests: Sequence[RequestSample]) -> tuple[int, int]:
    """How many answers whose tokens the server counted cannot have had so many, and how many it counted at all. The
    token that ends an answer has no content, so that an event less than tokens is no mismatch."""
    told = [request for request in requests if request.tokens is not None]
    return sum(not _is_believed(request) for request in told), len(told)


def _is_believed(request: RequestSample) -> bool:
    assert request.tokens is not None
    if request.finish == "length":
        return request.tokens == request.asked_tokens
    return request.pieces <= request.tokens <= request.asked_tokens


def measurement(
    served: Served,
    metric: str,
    found: Bounded,
    *,
    n: int | None = None,
    note: str | None = None,
    axes: Mapping[str, Scalar] | None = None,
    about: tuple[str, str] | None = None,
) -> Measurement:
    """n counts requests unless it is told what else; axes stand beside those of the load. about is the unit and the
    direction of a metric that is none of METRICS."""
    value, low, high = found
    unit, better = about or METRICS[metric]
    return Measurement(
        metric=metric,
        unit=unit,
        better=better,
        cell=served.cell,
        value=value,
        low=low,
        high=high,
        n=len(served.requests) if n is None else n,
        launches=len(served.records),
        axes={**served.axes(), **(axes or {})},
        runs=served.runs,
        note=note,
    )


# --- may it be believed ---


def client_problems(clients: Sequence[ClientSample], requests: Sequence[RequestSample], scenario: str) -> list[str]:
    """Why the client itself may have been what was measured."""
    return [f"{CLIENT}: {text}" for text in client_audit.reasons(client_facts(clients, requests, scenario in OPEN))]


def client_facts(
    clients: Sequence[ClientSample], requests: Sequence[RequestSample], is_open: bool
) -> client_audit.ClientFacts:
    """Of the worst process. Of a closed loop nothing is due before it is sent."""
    first = [value for request in requests if (value := ttft_s(request)) is not None]
    early = max((r.due_ns - r.sent_ns for r in requests if r.sent_ns is not None), default=0)
    return client_audit.ClientFacts(
        ttft_p50_s=client_audit.median(first),
        schedule_lag_p99_s=_worst(client.schedule_lag_p99_ns for client in clients) if is_open else None,
        read_lag_p50_s=_worst((client.read_lag_p50_ns for client in clients), min),
        read_lag_p99_s=_worst(client.read_lag_p99_ns for client in clients),
        cpu_ratio=max((client.cpu_s / client.wall_s for client in clients if client.wall_s > 0), default=None),
        clock_drift_s=_worst(abs(client.clock_drift_ns) for client in clients) or 0.0,
        early_s=early / NS,
        lacking=sum(map(is_lacking, requests)),
        held_back=sum(client.waited_for_cap for client in clients) if is_open else 0,
    )


def is_lacking(request: RequestSample) -> bool:
    """Failed for want of the client's own files, ports or buffers: it says nothing about the server."""
    return request.error == client_audit.LACKING


def _worst(of_processes_ns: Iterable[float | None], choose: Callable[[list[float]], float] = max) -> float | None:
    known = [value for value in of_processes_ns if value is not None]
    return choose(known) / NS if known else None


def failure_problems(served: Served) -> list[str]:
    """Of a load without limits nothing else counts a request that failed: none may."""
    if served.has_limits:
        return []
    classes = Counter(str(r.error) for r in served.requests if r.error is not None and not is_lacking(r))
    told = ", ".join(f"{name} {count} times" for name, count in sorted(classes.items()))
    return [f"{classes.total()} of {len(served.requests)} requests failed ({told})"] if classes else []


def rule_problems(served: Served) -> list[str]:
    """Why the limits of the scenario do not count as kept, by early stopping; none where there are no limits."""
    if not served.has_limits:
        return []
    count = len(served.requests)
    # Those that the client had no means to ask are its own reason, and no late ones of the server.
    late = late_of(served) - sum(map(is_lacking, served.requests))
    allowed = early_stopping.late_allowed(count, PERCENTILE)
    if allowed is None:
        least = early_stopping.requests_needed(0, PERCENTILE)
        return [f"{count} requests tell nothing about the 99th percentile: at least {least} are needed"]
    return [f"{late} of {count} requests were late or failed; {allowed} may be"] if late > allowed else []


def late_of(served: Served) -> int:
    """Requests that failed or kept a limit not."""
    return sum(not in_time(request, served.limits) for request in served.requests)


def duration_problems(served: Served) -> list[str]:
    """A load that was to last for some time, and did not in every launch."""
    least = served.serving.least_s
    shortest = min((stretch.wall_s for stretch in served.stretches), default=0.0)
    return [f"lasted {shortest:.1f} s; at least {least:g} s were asked for"] if shortest < least else []


def problems(record: RunRecord) -> list[str]:
    """Why a run of this workload must not be believed. Limits that were not kept, or that too few requests tell of, are
    its answer, not a problem."""
    whole = run_problems(record)
    if whole and not _is_answered(record):
        return whole
    loads = gather([record])
    unsound = [found for load in loads if (found := load_problems(load))]
    # What was asked before the client was late, or the server refused, can be believed.
    partly = record.spec.serving and record.spec.serving.scenario in STAGED_SCENARIOS and len(unsound) < len(loads)
    return [*whole, *([] if partly else dict.fromkeys(itertools.chain.from_iterable(unsound)))]


def run_problems(record: RunRecord) -> list[str]:
    """Those of the run as a whole, whatever its loads say."""
    if not record.requests:
        return ["nothing was recorded"]
    if _is_answered(record):
        return exactly_once(record)
    classes = Counter(str(request.error) for request in record.requests)
    blamed = f"{CLIENT}: " if set(classes) == {client_audit.LACKING} else ""
    told = ", ".join(f"{name} {count} times" for name, count in classes.items())
    return [f"{blamed}no request was answered: {told}"]


def _is_answered(record: RunRecord) -> bool:
    return any(request.error is None for request in record.requests)


def load_problems(served: Served) -> list[str]:
    """Why the numbers of one load must not be believed: its client, or requests that failed where no limit counts
    them."""
    return [*doubts_of(served), *failure_problems(served)]


def doubts_of(served: Served) -> list[str]:
    """What speaks against the client in any launch of this load; other loads of these launches are not looked at."""
    found = (_doubts(s.record, s.stage, s.clients, s.requests) for s in served.stretches)
    return list(dict.fromkeys(problem for doubts in found for problem in doubts))


def _doubts(
    record: RunRecord, stage: StageSample | None, clients: Sequence[ClientSample], requests: Sequence[RequestSample]
) -> list[str]:
    """A load of which no client tells anything is doubted only where it says itself what the client lacked."""
    assert record.spec.serving is not None
    if not clients and not any(map(is_lacking, requests)):
        return []
    scheduled = stage is not None and is_scheduled(stage.scenario, stage.rate_per_s)
    return client_problems(clients, requests, OPEN[0] if scheduled else record.spec.serving.scenario)


def believed(records: Sequence[RunRecord]) -> list[Served]:
    """Every load of every cell that can be believed in all launches: a sweep or a search goes on until one cannot."""
    return [served for served in gather(records) if not load_problems(served)]
