"""How fast one load of a served cell was answered, resampled so that two of them can be compared, and which of the
loads of a cell is the highest that kept its limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from paceline.analysis.findings import HIGHER, LOWER
from paceline.analysis.served import latency_bounds, measurements
from paceline.analysis.served.loads import NS, Served, Stretch
from paceline.analysis.served.token_times import first_token_ns
from paceline.analysis.statistics import intervals
from paceline.analysis.statistics.intervals import Array, Resampled
from paceline.experiment.serving import PERCENTILE
from paceline.results.served_samples import RequestSample
from paceline.serving import early_stopping

# A load is cut into slices of time of two answers each: from the fewest that tell a spread to the most that tell more.
ANSWERS_PER_SLICE, FEWEST_SLICES, MOST_SLICES = 2, 8, 256
TOKENS_PER_S, JOULES = "output_tokens_per_s", "joules_per_output_token"
LATENCIES: Mapping[str, tuple[Callable[[RequestSample], float | None], float]] = {
    "ttft_p50_s": (measurements.ttft_s, 50),
    "ttft_p99_s": (measurements.ttft_s, 99),
    "tpot_p50_s": (measurements.tpot_s, 50),
    "tpot_p99_s": (measurements.tpot_s, 99),
}
# Metrics by which two loads are compared: unit, direction.
COMPARED = {TOKENS_PER_S: ("tokens/s", HIGHER), **dict.fromkeys(LATENCIES, ("s", LOWER))}


# --- how fast ---


def estimate(load: Served, metric: str) -> Resampled | None:
    """One of COMPARED with its spread; None where too little was answered to tell its value. The rate of several
    launches has the spread of their totals; slices of time tell it of a launch alone. A latency has the draws of the
    served table, and none where that has no bounds."""
    if metric in LATENCIES:
        quantity, percent = LATENCIES[metric]
        return None if value(load, metric) is None else latency_bounds.estimates(load, quantity, (percent,))[0]
    if len(load.launches) > 1:
        return measurements.rates(load, (metric,))[metric]
    rows, seed = _slices(load), intervals.seed_of(load.cell, load.words, metric)
    return intervals.ratio_of_sums([rows], intervals.resample_sums([rows], seed), 0, 1) if len(rows) else None


def value(load: Served, metric: str) -> float | None:
    """The same without its spread."""
    if metric == TOKENS_PER_S:
        seconds = load.wall_s()
        return load.output_tokens() / seconds if seconds > 0 else None
    quantity, percent = LATENCIES[metric]
    return intervals.percentile(_known(load, quantity), percent)


def why_unbounded(found: Resampled, metric: str) -> str:
    """Why an estimate has no spread, where it has none."""
    return latency_bounds.why_unbounded(found.launches) if metric in LATENCIES else "launches were not repeated"


def _known(load: Served, quantity: Callable[[RequestSample], float | None]) -> Array:
    return np.array([value for request in load.answered if (value := quantity(request)) is not None])


def _slices(launch: Served) -> Array:
    """Tokens and seconds of every slice of the load. Tokens of an answer lie evenly between its first and its last.
    Prefill and decode take turns, so that slices differ by more than launches do."""
    answered = launch.answered
    if not answered or launch.wall_s() <= 0:
        return np.empty((0, 2))
    count = min(max(len(answered) // ANSWERS_PER_SLICE, FEWEST_SLICES), MOST_SLICES)
    return np.vstack([_slices_of(stretch, count) for stretch in launch.stretches])


def _slices_of(stretch: Stretch, count: int) -> Array:
    answered = [request for request in stretch.requests if request.error is None]
    tokens = np.array([measurements.tokens_of(request) for request in answered], dtype=np.float64)
    last = np.array([request.last_ns or request.ended_ns or 0 for request in answered], dtype=np.float64)
    first = np.array([first_token_ns(request) or request.ended_ns or 0 for request in answered], dtype=np.float64)
    edges = np.linspace(stretch.started_ns, stretch.ended_ns, count + 1)
    made = np.array([_made_until(edge, tokens, first, last) for edge in edges])
    return np.column_stack([np.diff(made), np.diff(edges) / NS])


def _made_until(moment: float, tokens: Array, first: Array, last: Array) -> float:
    """The first token when it came; the others as time passes from it to the last."""
    length = np.maximum(last - first, 1.0)
    share = np.clip((moment - first) / length, 0.0, 1.0)
    return float(((moment >= first) * np.minimum(tokens, 1.0) + share * np.maximum(tokens - 1.0, 0.0)).sum())


# --- the load that limits allow ---


class Kept(NamedTuple):
    """Whether a load kept its limits, and by what this is known; ok is None where it has none. proved: requests were
    enough to tell it of the 99th percentile."""

    ok: bool | None
    text: str
    proved: bool = False


def kept(load: Served) -> Kept:
    """By early stopping where requests are enough; of fewer, by the share that was late."""
    if not load.has_limits:
        return Kept(None, "no limits were set")
    late, count = measurements.late_of(load), len(load.requests)
    allowed = early_stopping.late_allowed(count, PERCENTILE)
    if allowed is not None:
        return Kept(late <= allowed, f"{late} of {count} requests were late or failed, {allowed} may be", True)
    few = f"{late} of {count} requests were late or failed; so few prove nothing about the 99th percentile"
    return Kept(late <= (1 - PERCENTILE) * count, few)


def at_limits(found: Sequence[Served]) -> tuple[Served, Kept] | None:
    """Of the loads of one cell the one with the most tokens a second that kept its limits, by proof where any has it;
    of a cell with one load that one, kept or not. None where several were put on and none kept them, and where a search
    came no further than its guess."""
    judged = [(load, kept(load)) for load in found if not load.is_guess]
    if len(judged) == 1:
        return judged[0]
    standing = [each for each in judged if each[1].ok is not False]
    return max(standing, key=lambda each: (each[1].proved, value(each[0], TOKENS_PER_S) or 0.0), default=None)
