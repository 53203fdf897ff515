"""The rules of MLPerf LoadGen, one by one: what each requires, what the record shows, and whether it holds.

A rule that the record cannot decide is undecided, never met: Paceline cannot see inside an endpoint of others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from paceline.analysis.findings.served import (
    CLIENT,
    FAILED,
    KEPT,
    LOADGEN_LABEL,
    NOT_KEPT,
    PASSED,
    UNDECIDED,
    Accuracy,
    Rule,
)
from paceline.analysis.served import measurements as measured
from paceline.analysis.served.loads import Served, Stretch
from paceline.analysis.served.token_times import most_in_flight
from paceline.analysis.statistics.intervals import Array
from paceline.experiment.serving import LIMITS, PERCENTILE
from paceline.serving import early_stopping

NS = 1e9
SCENARIOS = ("offline", "server", "interactive", "single_stream")
LEAST_S = 600.0
MOST_TOKENS = 128
WHOLE_SET = 13_368
SET_NAME = "summaries"
# The share of true Poisson arrivals that would be rejected.
LEAST_PROBABILITY = 1e-3
# A single stream is judged by its 90th percentile; 64 requests allow one above it.
STREAM_PERCENTILE, STREAM_LATE = 0.9, 1


def label_of(served: Served) -> str | None:
    """The label of runs that were requested by these rules, whether or not they meet them."""
    serving = served.serving
    return LOADGEN_LABEL if serving.scenario in SCENARIOS and serving.least_s >= LEAST_S else None


def checklist(served: Served, accuracy: Rule | None = None) -> Iterator[Rule]:
    """All rules of the scenario, in reading order."""
    yield _arrivals(served)
    shortest = min(stretch.wall_s for stretch in served.stretches)
    yield _rule("minimum duration", f"{LEAST_S:g} s", f"{shortest:,.1f} s", shortest >= LEAST_S)
    yield from _counts_and_limits(served)
    wrong = [problem for record in served.records for problem in measured.exactly_once(record)]
    failed = len(served.requests) - len(served.answered)
    seen = "; ".join(wrong[:2]) or (f"{failed:,} failed" if failed else f"{len(served.answered):,} answered")
    yield _rule("each request answered once", "none twice, none lost", seen, not wrong and not failed)
    yield _rule("greedy", "temperature 0", "temperature 0 in every request", True)
    most = max(max(request.asked_tokens, request.tokens or 0) for request in served.requests)
    yield _rule("tokens of an answer", f"at most {MOST_TOKENS}", f"at most {most}", most <= MOST_TOKENS)
    form = "chat" if served.serving.api == "chat" else prompt_form(served)
    seen = form.replace("_", " ") if form else "not recorded"
    yield _rule("prompts", "token ids, no chat template", seen, form == "token_ids" if form else None)
    settings = [replica.settings.get("prefix_caching") for record in served.records for replica in record.replicas]
    known = [bool(value) for value in settings if value is not None]
    kept = False if any(known) else None if not settings or len(known) < len(settings) else True
    seen = "on" if kept is False else "off" if kept else "not reported by the endpoint"
    yield _rule("prefix caching", "off", seen, kept)
    # Each launch by itself: two halves are not a full set.
    name = served.records[0].spec.training.data.name
    distinct = min(len({r.sample for r in s.requests if r.error is None}) for s in served.stretches)
    is_whole = name == SET_NAME and distinct >= WHOLE_SET
    yield _rule("whole set", f"{WHOLE_SET:,} samples", f"{distinct:,} samples of {name}", is_whole)
    unscored = "no scores" if is_whole else "smoke: a subset can neither pass nor fail"
    yield accuracy or _rule("accuracy", "of the whole set", unscored, None)
    reasons = client_reasons(served)
    yield _rule("client", "does not limit the result", "; ".join(reasons[:2]) or "within its bounds", not reasons)


def _rule(name: str, asked: str, seen: str, kept: bool | None) -> Rule:
    outcome = UNDECIDED if kept is None else KEPT if kept else NOT_KEPT
    return Rule(name=name, asked=asked, seen=seen, outcome=outcome)


def _arrivals(served: Served) -> Rule:
    scenario = served.scenario
    if scenario in LIMITS:
        rate, gaps = served.rate_per_s, planned_gaps(served.stretches[0])
        required = f"{scenario}: Poisson arrivals"
        if rate is None or len(gaps) < 2:
            return _rule("scenario", required, "too few requests", None)
        distance, probability = kolmogorov_smirnov(gaps, rate)
        seen = f"{len(gaps):,} gaps at {rate:g}/s: K-S distance {distance:.3f}, p {probability:.2g}"
        return _rule("scenario", required, seen, probability >= LEAST_PROBABILITY)
    if scenario == "offline":
        at_once = all(len({request.due_ns for request in stretch.requests}) == 1 for stretch in served.stretches)
        seen = "all due at once" if at_once else "due one by one"
        return _rule("scenario", "offline: all due at once", seen, at_once)
    most = max(most_in_flight(stretch.requests) for stretch in served.stretches)
    return _rule("scenario", "single_stream: one at a time", f"{most} in flight at most", most <= 1)


def planned_gaps(stretch: Stretch) -> Array:
    """Seconds between the times at which requests were due."""
    return np.diff(np.sort(np.array([request.due_ns for request in stretch.requests], dtype=np.float64))) / NS


def kolmogorov_smirnov(gaps: Array, rate_per_s: float) -> tuple[float, float]:
    """The largest distance between the distribution of the gaps and the exponential one of the rate, and the
    probability of a larger one: Kolmogorov's series with Stephens' correction for small samples."""
    n = len(gaps)
    expected = 1 - np.exp(-rate_per_s * np.sort(gaps))
    steps = np.arange(n + 1) / n
    distance = float(max((steps[1:] - expected).max(), (expected - steps[:-1]).max()))
    scaled = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * distance
    terms = (2 * (-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return distance, min(1.0, max(0.0, math.fsum(terms))) if scaled > 0.2 else 1.0


def _counts_and_limits(served: Served) -> Iterator[Rule]:
    """By early stopping; offline has no percentile. Looser limits than the scenario's own do not satisfy its rule."""
    count = len(served.requests)
    if served.scenario == "single_stream":
        least = early_stopping.requests_needed(STREAM_LATE, STREAM_PERCENTILE)
        yield _rule("requests for p90", f"{least}", f"{count:,}", count >= least)
    elif served.has_limits:
        late = served.late
        needed = early_stopping.requests_needed(late, PERCENTILE)
        yield _rule("requests n(t) for p99", f"{needed:,} with {late:,} late", f"{count:,}", count >= needed)
    if served.scenario in LIMITS:
        ttft, tpot = LIMITS[served.scenario]
        late = sum(not measured.in_time(r, {"ttft_s": ttft, "tpot_s": tpot}) for r in served.requests)
        allowed = early_stopping.late_allowed(count, PERCENTILE)
        required = f"TTFT {ttft * 1e3:g} ms, TPOT {tpot * 1e3:g} ms"
        seen = f"{late:,} late or failed, " + ("too few to decide" if allowed is None else f"{allowed:,} allowed")
        yield _rule("limits at p99", required, seen, None if allowed is None else late <= allowed)


def prompt_form(served: Served) -> str | None:
    """token_ids, text or messages, as the run recorded it; None if it did not."""
    forms = {str(e.settings["prompts"]) for r in served.records if (e := r.evidence) and e.settings.get("prompts")}
    return forms.pop() if len(forms) == 1 else None


def accuracy_rules(scored: Sequence[Accuracy]) -> dict[str, Rule]:
    """By cell, for those that were scored; a smoke test can neither pass nor fail."""
    rules = {}
    for each in scored:
        if each.verdict is not None:
            kept = {PASSED: True, FAILED: False}.get(each.verdict)
            smoke = ": a subset can neither pass nor fail" if kept is None else ""
            seen = f"{each.verdict}, {each.scored:,} scored{smoke}"
            rules[each.cell] = _rule("accuracy", "of the whole set", seen, kept)
    return rules


def client_reasons(served: Served) -> Sequence[str]:
    return [problem.removeprefix(f"{CLIENT}: ") for problem in measured.unreliable_client(served)]
