"""Throughput and latency of one load, resampled so that two loads can be compared, and the best load within limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from paceline.analysis.findings import HIGHER, LOWER
from paceline.analysis.served import latency_bounds, measurements
from paceline.analysis.served.loads import NS, Served
from paceline.analysis.served.token_times import first_token_ns
from paceline.analysis.statistics import intervals
from paceline.analysis.statistics.intervals import Array, Resampled
from paceline.experiment.serving import PERCENTILE
from paceline.results.served_samples import RequestSample
from paceline.serving import early_stopping

# A load is cut into time slices of two answers each, within these bounds.
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


def estimate(load: Served, metric: str) -> Resampled | None:
    """One metric of COMPARED with its spread; None if too little was answered.

    The rate of several launches has the spread of their totals, that of one launch the spread of time slices. A latency
    has the draws of the latency table, and none if that has no confidence interval.
    """
    if metric in LATENCIES:
        quantity, percent = LATENCIES[metric]
        return None if value(load, metric) is None else latency_bounds.estimates(load, quantity, (percent,))[0]
    if len(load.launches) > 1:
        return measurements.rates(load, (metric,))[metric]
    rows, seed = _slices(load), intervals.seed_of(load.cell, load.seed_text, metric)
    return intervals.ratio_of_sums([rows], intervals.resample_sums([rows], seed), 0, 1) if len(rows) else None


def value(load: Served, metric: str) -> float | None:
    """The same without its spread."""
    if metric == TOKENS_PER_S:
        seconds = load.wall_s()
        return load.output_tokens() / seconds if seconds > 0 else None
    quantity, percent = LATENCIES[metric]
    return latency_bounds.percentile([v for r in load.answered if (v := quantity(r)) is not None], percent)


def why_unbounded(found: Resampled, metric: str) -> str:
    """Why an estimate has no confidence interval."""
    return latency_bounds.why_unbounded(found.launches) if metric in LATENCIES else "launches were not repeated"


def _slices(launch: Served) -> Array:
    """Tokens and seconds of every slice of the load. The tokens of an answer are spread evenly between its first and
    last. Prefill and decode alternate, so slices differ by more than launches do."""
    if not launch.answered or launch.wall_s() <= 0:
        return np.empty((0, 2))
    count = min(max(len(launch.answered) // ANSWERS_PER_SLICE, FEWEST_SLICES), MOST_SLICES)
    slices = []
    for stretch in launch.stretches:
        answered = [request for request in stretch.requests if request.error is None]
        tokens = np.array([measurements.tokens_of(request) for request in answered], dtype=np.float64)
        last = np.array([request.last_ns or request.ended_ns or 0 for request in answered], dtype=np.float64)
        first = np.array([first_token_ns(request) or request.ended_ns or 0 for request in answered], dtype=np.float64)
        edges, made = np.linspace(stretch.started_ns, stretch.ended_ns, count + 1), []
        for edge in edges:
            # Tokens made until here: the first when it arrived, the others evenly until the last.
            share = np.clip((edge - first) / np.maximum(last - first, 1.0), 0.0, 1.0)
            made.append(
                float(((edge >= first) * np.minimum(tokens, 1.0) + share * np.maximum(tokens - 1.0, 0.0)).sum())
            )
        slices.append(np.column_stack([np.diff(made), np.diff(edges) / NS]))
    return np.vstack(slices)


# --- the best load within limits ---


class Kept(NamedTuple):
    """Whether a load met its limits, and the evidence. ok is None if it has no limits. proved: enough requests for the
    99th percentile."""

    ok: bool | None
    text: str
    proved: bool = False


def kept(load: Served) -> Kept:
    """By early stopping if there are enough requests; otherwise by the share that was late."""
    if not load.has_limits:
        return Kept(None, "no limits were set")
    late, count = load.late, len(load.requests)
    allowed = early_stopping.late_allowed(count, PERCENTILE)
    if allowed is not None:
        return Kept(late <= allowed, f"{late} of {count} requests were late or failed, {allowed} allowed", True)
    few = f"{late} of {count} requests were late or failed; too few requests to prove the 99th percentile"
    return Kept(late <= (1 - PERCENTILE) * count, few)


def at_limits(found: Sequence[Served]) -> tuple[Served, Kept] | None:
    """The load with the most tokens per second that met its limits, preferring proven ones. A cell with one load
    returns that load, whether it met them or not. None if several were applied and none met them."""
    judged = [(load, kept(load)) for load in found if not load.is_guess]
    if len(judged) == 1:
        return judged[0]
    within = [each for each in judged if each[1].ok is not False]
    return max(within, key=lambda each: (each[1].proved, value(each[0], TOKENS_PER_S) or 0.0), default=None)
