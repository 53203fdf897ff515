"""Checkpoints: what each one costs, and what goodput that gives if nodes fail or spot capacity is reclaimed.

Failures are taken as independent, with an exponential time between them (Young, 1974; Daly, 2006).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from paceline.analysis.compare.cells import key_without
from paceline.analysis.findings import CheckpointCost, ExpectedGoodput, SpotOffer
from paceline.analysis.grouping import grouped
from paceline.analysis.statistics.intervals import student_t
from paceline.analysis.training.metrics import Cell
from paceline.analysis.training.window import STEP_COLUMNS, Window

VARIES = ("checkpoint_every", "checkpoint_async")
# Interruptions per hour beyond which nobody trains.
MOST_INTERRUPTIONS_PER_H = 1000.0


def analyse(cells: Sequence[Cell]) -> tuple[CheckpointCost, ...]:
    """One row per cell that wrote checkpoints, beside the same cell without any where it was measured too."""
    found = []
    for members in grouped([c for c in cells if not c.spec.script], lambda c: key_without(c, VARIES)).values():
        without = [c for c in members if c.spec.checkpoint_every is None and not c.shared_gpu]
        step_s = statistics.fmean(map(_step_s, without[0].windows)) if without else None
        writing = [c for c in members if any(w.record.checkpoints for w in c.windows)]
        found += [_cost(cell, step_s) for cell in sorted(writing, key=lambda c: c.spec.checkpoint_async)]
    return tuple(found)


def _cost(cell: Cell, without_s: float | None) -> CheckpointCost:
    every, pauses, lost = cell.spec.checkpoint_every or 1, [], []
    for window in (w for w in cell.windows if w.record.checkpoints):
        pause = _pause_s(window)
        pauses.append(pause)
        lost.append(pause + (every * (_step_s(window) - without_s) if without_s is not None else 0.0))
    spent = [w.goodput for w in cell.windows if w.goodput]
    # A command that ended and was repeated costs the same: start, loading, and steps done again.
    restarts = sum(each.restarts + each.interruptions for each in spent)
    samples = [s for w in cell.windows for s in w.record.checkpoints]
    sizes = [sample.bytes for sample in samples if sample.bytes is not None]
    mean, low, high = _interval(lost)
    return CheckpointCost(
        cell=cell.id,
        axes=cell.axes,
        is_async=cell.spec.checkpoint_async,
        every=every,
        checkpoints=sum(len({(s.attempt, s.step) for s in w.record.checkpoints}) for w in cell.windows),
        step_s=statistics.fmean(map(_step_s, cell.windows)),
        pause_s=statistics.fmean(pauses),
        lost_s=mean,
        lost_low_s=low,
        lost_high_s=high,
        is_beside_none=without_s is not None,
        bytes=statistics.fmean(sizes) * cell.spec.topology.world_size if sizes else None,
        restarts=restarts,
        restart_s=sum(each.down_s for each in spent) / restarts if restarts else None,
        redone_s=sum(each.redone_s for each in spent) / restarts if restarts else None,
        goodput_ratio=sum(e.counted_s for e in spent) / sum(e.span_s for e in spent) if spent else None,
        runs=cell.runs,
    )


def _step_s(window: Window) -> float:
    steps = window.steps
    return float(steps[:, STEP_COLUMNS.index("wall")].sum()) / len(steps)


def _pause_s(window: Window) -> float:
    """Mean over checkpoints of the pause of the slowest rank."""
    by_checkpoint = grouped(window.record.checkpoints, lambda sample: (sample.attempt, sample.step))
    return statistics.fmean(max(s.duration_s for s in samples) for samples in by_checkpoint.values())


def _interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Mean, and Student's 95 % interval if there are several."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None, None
    reach = student_t(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - reach, mean + reach


# --- at a failure rate ---


def expected_goodput(interval_s: float, cost_s: float, restart_s: float, mtbf_s: float) -> float:
    """Share of the time in steps that count: t / (M e^(R/M) (e^((t + C)/M) - 1)) by Daly (2006).

    A checkpoint of 60 s every hour, failures once a day, restarts of 5 minutes:

    >>> round(expected_goodput(3600, 60, 300, 86400), 3)
    0.96
    """
    try:
        return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + cost_s) / mtbf_s))
    except OverflowError:
        return 0.0


def young_interval(cost_s: float, mtbf_s: float) -> float:
    """sqrt(2 C M).

    >>> round(young_interval(60, 86400))
    3220
    """
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_interval(cost_s: float, mtbf_s: float) -> float:
    """Young's interval with the next terms, for checkpoints that take a noticeable part of the time between failures.

    >>> round(daly_interval(60, 86400)), daly_interval(60, 20)
    (3180, 20)
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    share = cost_s / (2 * mtbf_s)
    return young_interval(cost_s, mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


def at_failure_rate(cost: CheckpointCost, mtbf_s: float, restart_s: float) -> ExpectedGoodput:
    """The chosen interval beside the best, for a job that fails once in `mtbf_s` on average."""
    lost_s = least_cost(cost)
    chosen_s, daly_s = cost.every * cost.step_s, max(daly_interval(lost_s, mtbf_s), cost.step_s)
    return ExpectedGoodput(
        cost=cost,
        mtbf_s=mtbf_s,
        restart_s=restart_s,
        chosen_s=chosen_s,
        chosen_ratio=expected_goodput(chosen_s, lost_s, restart_s, mtbf_s),
        young_s=young_interval(lost_s, mtbf_s),
        daly_s=daly_s,
        daly_ratio=expected_goodput(daly_s, lost_s, restart_s, mtbf_s),
    )


def least_cost(cost: CheckpointCost) -> float:
    """The lost time, but not less than the pause: noise of step times can exceed a small loss."""
    return max(cost.lost_s, cost.pause_s)


def spot_offer(
    cost: CheckpointCost, restart_s: float, mtbf_s: float, prices: tuple[float, float], interruptions_per_h: float
) -> SpotOffer:
    """On demand against spot; prices are (on demand, spot) per hour, mtbf_s applies to both."""
    usd, spot_usd = prices
    lost_s = least_cost(cost)

    def best(per_h: float) -> float:
        mean_s = 1 / (1 / mtbf_s + per_h / 3600)
        return expected_goodput(max(daly_interval(lost_s, mean_s), cost.step_s), lost_s, restart_s, mean_s)

    plain = best(0.0)
    low, high = 0.0, MOST_INTERRUPTIONS_PER_H
    even = None
    if spot_usd < usd:
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if spot_usd * plain < usd * best(middle) else (low, middle)
        even = low
    return SpotOffer(
        cost=cost,
        usd_per_h=usd,
        spot_usd_per_h=spot_usd,
        interruptions_per_h=interruptions_per_h,
        ratio=plain,
        spot_ratio=best(interruptions_per_h),
        break_even_per_h=even,
    )
