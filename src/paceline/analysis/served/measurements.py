"""Latencies, rates and validity of a load test, from the raw requests of all launches of a cell.

Nothing is computed from percentiles of parts. A percentile has a 95 % confidence interval from resampling launches and
blocks of answers (`latency_bounds`). A rate has the spread of its launches, so one launch alone has no interval.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from paceline.analysis.findings import HIGHER, LOWER, Measurement
from paceline.analysis.findings.served import CLIENT
from paceline.analysis.served import client_share, latency_bounds
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
from paceline.experiment.serving import OPEN, PERCENTILE, PLAIN_SCENARIOS, STAGED_SCENARIOS
from paceline.results import client_audit
from paceline.results.records import RunRecord
from paceline.results.served_samples import ClientSample, RequestSample
from paceline.serving import early_stopping

NS = 1e9
PERCENTILES = (50, 90, 95, 99)


# --- measured ---


Quantity = Callable[[RequestSample], float | None]
LATENCIES: dict[str, Quantity] = {"ttft": ttft_s, "service_ttft": service_ttft_s, "tpot": tpot_s, "latency": latency_s}
# Only for a model that reasons before it answers.
OF_REASONING: dict[str, Quantity] = {"first_reasoning": first_reasoning_s, "first_answer": first_answer_s}
# Columns of a launch: what is counted, and the time.
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
# Besides the percentiles and RATES: metrics of tokens, of the full load, over replicas (see axes), and extrapolated.
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
OPEN_LOAD = "requests arrive on a schedule, so no concurrency is planned"
TOKEN_AUDIT = (
    "if an answer ended by its length, the server's count must equal the requested tokens; otherwise it must be "
    "between the events with content and the requested tokens"
)


def measure(served: Served) -> Iterator[Measurement]:
    """What the requests show, whether or not they are reliable (see `load_problems`)."""
    reasons = any(request.first_reasoning_ns is not None for request in served.answered)
    for name, quantity in (LATENCIES | OF_REASONING if reasons else LATENCIES).items():
        count = sum(quantity(request) is not None for request in served.answered)
        note = latency_bounds.why_by_launches(served, quantity)
        for percent, found in zip(PERCENTILES, latency_bounds.of_answers(served, quantity, PERCENTILES), strict=True):
            few = latency_bounds.why_missing(percent, count)
            yield measurement(served, f"{name}_p{percent}_s", found, n=count, note=few or note)
    gaps = [gaps_between_tokens(launch.answered) for launch in served.launches]
    count = sum(len(each.seconds) for each in gaps)
    for percent, found in zip(PERCENTILES, latency_bounds.of_gaps(served, gaps, PERCENTILES), strict=True):
        few = latency_bounds.why_missing(percent, count, "gaps between tokens")
        yield measurement(served, f"itl_p{percent}_s", found, n=count, note=few)
    split = sum(each.split for each in gaps) / count if count else None
    yield measurement(served, "itl_split_ratio", (split, None, None), n=count)
    for name, rate in rates(served, RATES).items():
        known = served.has_limits or not name.startswith("goodput")
        yield measurement(served, name, bounded(rate) if known else (None, None, None))
    yield from _steady_rates(served)
    wrong, counted = mismatched(served.answered)
    share = wrong / counted if counted else None
    note = TOKEN_AUDIT if counted else "the server reports no token counts"
    yield measurement(served, "token_count_mismatch_ratio", (share, None, None), n=counted, note=note)
    used = client_share.use_of(served)
    yield measurement(served, "client_ceiling_ratio", (used.ratio, None, None), note=used.text)


def rates(served: Served, names: Iterable[str]) -> dict[str, Resampled | None]:
    """Some of RATES, each over the totals of launches. Every part of a report gets its rates here."""
    rows, found = [_counts(launch) for launch in served.launches], {}
    for name in names:
        _, _, counted, over = RATES[name]
        estimate = quotient(_COUNTED.index(counted), _COUNTED.index(over))
        found[name] = over_launches(rows, estimate, served.cell, served.seed_text, name)
    return found


def _counts(launch: Served) -> list[float]:
    answered = launch.answered
    good = [request for request in answered if in_time(request, launch.limits)]
    counted = launch.prompt_tokens() if answered else None
    prompt_tokens = math.nan if counted is None else float(counted)
    tokens, good_tokens = (float(sum(map(tokens_of, each))) for each in (answered, good))
    count = len(launch.requests)
    return [tokens, prompt_tokens, len(answered), len(good), good_tokens, launch.wall_s(), count, count - len(answered)]


def steady_parts(served: Served) -> list[Steady]:
    """The steady part of each stretch: nothing is in flight between stretches."""
    return [steady(stretch.requests, served.planned_in_flight) for stretch in served.stretches]


def _steady_rates(served: Served) -> Iterator[Measurement]:
    """Tokens per second while the load was full, and the share of that time; None with the reason if it never was."""
    table: list[list[float]] = []
    reasons = [OPEN_LOAD] if served.is_open else []
    for launch in () if served.is_open else served.launches:
        parts = list(zip(launch.stretches, steady_parts(launch), strict=True))
        reasons += [part.reason for _, part in parts if part.reason]
        # Tokens and seconds of its steady parts, and the whole time of their stretches.
        sound = [(part.total, part.seconds, stretch.wall_s) for stretch, part in parts if part.reason is None]
        if sum(seconds for _, seconds, _ in sound) > 0:
            table.append([sum(column) for column in zip(*sound, strict=True)])
    rate = bounded(over_launches(table, quotient(0, 1), served.cell, "steady"))
    share = bounded(over_launches(table, quotient(1, 2), served.cell, "steady share"))
    note = None if table else next(iter(reasons), None)
    yield measurement(served, "steady_output_tokens_per_s", rate, note=note)
    yield measurement(served, "steady_ratio", share, note=note)


def mismatched(requests: Sequence[RequestSample]) -> tuple[int, int]:
    """How many answers have an impossible token count, and how many have a count at all. The token that ends an answer
    has no content, so one event fewer than tokens is no mismatch."""
    counted = [(request, request.tokens) for request in requests if request.tokens is not None]
    wrong = [
        not (r.asked_tokens if r.finish == "length" else r.pieces) <= tokens <= r.asked_tokens for r, tokens in counted
    ]
    return sum(wrong), len(counted)


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
    """n counts requests unless given; axes are added to those of the load. about: unit and direction of a metric that
    is not in METRICS."""
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


# --- is it reliable ---


def client_facts(
    clients: Sequence[ClientSample], requests: Sequence[RequestSample], is_open: bool
) -> client_audit.ClientFacts:
    """The worst process counts. In a closed loop nothing is due before it is sent."""
    first = [value for request in requests if (value := ttft_s(request)) is not None]
    early = max((r.due_ns - r.sent_ns for r in requests if r.sent_ns is not None), default=0)
    pieces = sum(request.pieces for request in requests)
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
        coalesced_ratio=sum(request.coalesced for request in requests) / pieces if pieces else None,
    )


def is_lacking(request: RequestSample) -> bool:
    """Whether it failed because the client ran out of files, ports or buffers: that says nothing about the server."""
    return request.error == client_audit.LACKING


def _worst(of_processes_ns: Iterable[float | None], choose: Callable[[list[float]], float] = max) -> float | None:
    known = [value for value in of_processes_ns if value is not None]
    return choose(known) / NS if known else None


def failure_problems(served: Served) -> list[str]:
    """Without limits no request may fail, because nothing else counts failures."""
    if served.has_limits:
        return []
    classes = Counter(str(r.error) for r in served.requests if r.error is not None and not is_lacking(r))
    counts = ", ".join(f"{name} {count} times" for name, count in sorted(classes.items()))
    return [f"{classes.total()} of {len(served.requests)} requests failed ({counts})"] if classes else []


def rule_problems(served: Served) -> list[str]:
    """Why the limits of the scenario are not proven to hold, by early stopping; empty without limits."""
    if not served.has_limits:
        return []
    count = len(served.requests)
    # Requests that the client could not send are its own problem, not late answers of the server.
    late = served.late - sum(map(is_lacking, served.requests))
    allowed = early_stopping.late_allowed(count, PERCENTILE)
    if allowed is None:
        least = early_stopping.requests_needed(0, PERCENTILE)
        return [f"{count} requests are too few for the 99th percentile: at least {least} are needed"]
    return [f"{late} of {count} requests were late or failed; {allowed} allowed"] if late > allowed else []


def duration_problems(served: Served) -> list[str]:
    """A load that was shorter than its minimum duration in some launch."""
    least = served.serving.least_s
    shortest = min((stretch.wall_s for stretch in served.stretches), default=0.0)
    return [f"it lasted {shortest:.1f} s; at least {least:g} s were requested"] if shortest < least else []


def problems(record: RunRecord) -> list[str]:
    """Why a run is unreliable. Limits that were exceeded, or that too few requests test, are its result, not a
    problem."""
    whole = run_problems(record)
    if whole and not _is_answered(record):
        return whole
    loads = gather([record])
    unsound = [found for load in loads if (found := load_problems(load))]
    # What was measured before the client was late, or the server refused, is reliable.
    partly = record.spec.serving and record.spec.serving.scenario in STAGED_SCENARIOS and len(unsound) < len(loads)
    return [*whole, *([] if partly else dict.fromkeys(itertools.chain.from_iterable(unsound)))]


def run_problems(record: RunRecord) -> list[str]:
    """Problems of the run as a whole, independent of its loads."""
    if not record.requests:
        return ["nothing was recorded"]
    if _is_answered(record):
        return exactly_once(record)
    classes = Counter(str(request.error) for request in record.requests)
    cause = f"{CLIENT}: " if set(classes) == {client_audit.LACKING} else ""
    counts = ", ".join(f"{name} {count} times" for name, count in classes.items())
    return [f"{cause}no request was answered: {counts}"]


def _is_answered(record: RunRecord) -> bool:
    return any(request.error is None for request in record.requests)


def load_problems(served: Served) -> list[str]:
    """Why the numbers of one load are unreliable: its client, or failed requests where no limit counts them."""
    return [*unreliable_client(served), *failure_problems(served)]


def unreliable_client(served: Served) -> list[str]:
    """Problems of the client in any launch of this load; other loads of these launches do not matter."""
    reasons = (f"{CLIENT}: {text}" for facts in _audited(served) for text in client_audit.reasons(facts))
    return list(dict.fromkeys(reasons))


def _audited(served: Served) -> Iterator[client_audit.ClientFacts]:
    """What the client recorded about itself in each launch of the load."""
    for stretch in served.stretches:
        # Without client samples, only the requests themselves can show what the client lacked.
        if stretch.clients or any(map(is_lacking, stretch.requests)):
            scheduled = stretch.stage is not None and is_scheduled(stretch.stage.scenario, stretch.stage.rate_per_s)
            yield client_facts(stretch.clients, stretch.requests, scheduled or served.serving.scenario in OPEN)


def advice(served: Served) -> list[str]:
    """What to do next about a load that does not count; empty if it does."""
    steps = [what for facts in _audited(served) for what in client_audit.advice(facts)]
    run = served.runs[0]
    if failure_problems(served):
        steps.append(f"`paceline show {run}` names each error; fix the server, or set limits that count failures")
    if served.has_limits and early_stopping.late_allowed(len(served.requests), PERCENTILE) is None:
        least = early_stopping.requests_needed(1, PERCENTILE)
        steps.append(f"send more requests (`--set requests={least}` allows one late request)")
    elif rule_problems(served):
        steps.append("lower the rate or concurrency; `paceline run inference-search` finds the highest rate")
    if duration_problems(served):
        steps.append("raise `requests`, so that the load lasts as long as `least_s`")
    if any(map(run_problems, served.records)):
        steps.append(f"`paceline show {run}`, the server's log, then repeat the run")
    return list(dict.fromkeys(steps))


def reliable_loads(records: Sequence[RunRecord]) -> list[Served]:
    """Every load of every cell that is reliable in all launches: a sweep or a search continues until one is not."""
    return [served for served in gather(records) if not load_problems(served)]


# --- is every request accounted for exactly once ---


def exactly_once(record: RunRecord) -> list[str]:
    """Requests or samples that were answered twice, or that are missing."""
    answered = Counter((r.stage, r.number) for r in record.requests if r.error is None)
    twice = sorted(number for (_, number), count in answered.items() if count > 1)
    problems = [f"requests {', '.join(map(str, twice[:5]))} were answered more than once"] if twice else []
    known = Counter(stage for stage, _ in {(request.stage, request.number) for request in record.requests})
    missing = [
        f"{stage.planned - known[stage.stage]} of {stage.planned} requests neither were answered nor failed"
        for stage in record.stages
        if known[stage.stage] < stage.planned
    ]
    return [*problems, *_repeated_samples(record), *missing[:3]]


def _repeated_samples(record: RunRecord) -> list[str]:
    """Samples may repeat only if the load has a minimum duration, searches for a rate, or has more requests than
    samples."""
    serving = record.spec.serving
    if serving is None or serving.least_s or serving.scenario not in PLAIN_SCENARIOS:
        return []
    available = record.evidence.settings.get("samples") if record.evidence else None
    if isinstance(available, int) and any(stage.planned > available for stage in record.stages):
        return []
    answered = {(r.stage, r.sample, r.number) for r in record.requests if r.error is None}
    answers = Counter((stage, sample) for stage, sample, _ in answered)
    again = sorted(sample for (_, sample), count in answers.items() if count > 1)
    return [f"samples {', '.join(map(str, again[:5]))} were answered by several requests"] if again else []
