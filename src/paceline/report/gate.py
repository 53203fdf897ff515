"""The gate of a build: which changes between two results directories must fail it, and what it could have caught."""

from __future__ import annotations

import math

from paceline.analysis.findings import HIGHER, WORSE, Between, Change, Regression
from paceline.analysis.grouping import grouped
from paceline.analysis.served.estimates import LATENCIES
from paceline.errors import require
from paceline.report.tables.comparison import change_text


def checked_percent(percent: float, where: str = "--fail-on-regression") -> float:
    """The limit of a gate; RequestError if it is not valid."""
    require(math.isfinite(percent) and 0 <= percent < 100, where, percent, "a number of percent from 0 to under 100")
    return percent


def regressions(found: Between, percent: float) -> tuple[Regression, ...]:
    """Every change with the verdict worse by more than the limit, and every cell that was lost.

    The limit is relative to A: percent of a rate lost, or percent of time or memory added.
    """
    beyond = [c for c in gated(found) if c.verdict == WORSE and _loss(c) > percent / 100]
    slower = [(c.cell, change_text(c)) for c in beyond]
    gone = [(x.cell, f"{x.label}: ok in A, {x.status} in B ({x.reason})") for x in found.lost]
    # One line each, whatever names and reasons hold: a line of its own may be a command to the runner of a build.
    return tuple(Regression(cell=cell, text=" ".join(text.split())) for cell, text in (*slower, *gone))


def least_visible(found: Between) -> Change | None:
    """The change in whose cell, load or row a regression is hardest to see; None if nothing has a speed.

    Each of them counts with its clearest metric: a regression shows there first. The rate of a load with latencies does
    not count, because scheduled requests arrive at the same rate however late the answers are.
    """
    speeds = [c for c in gated(found) if c.metric != "peak_memory_bytes"]
    clearest = []
    for changes in grouped(speeds, lambda c: (c.cell, c.row)).values():
        latencies = [c for c in changes if c.metric in LATENCIES]
        clearest.append(min(latencies or changes, key=catchable))
    return max(clearest, key=catchable, default=None)


def catchable(c: Change) -> float:
    """The smallest regression, as a fraction, that this comparison shows four times out of five."""
    if c.low == c.high == 1 or (c.low is None and c.verdict is not None):
        return 0.0  # equal to the last digit
    if c.detectable_ratio is None:
        return math.inf
    # An effect is max(r, 1/r) - 1, a loss of a rate is 1 - r.
    return c.detectable_ratio / (1 + c.detectable_ratio) if c.better == HIGHER else c.detectable_ratio


def gated(found: Between) -> list[Change]:
    """The changes a gate looks at: training speed by tokens_per_s alone, as in the sentence.

    Step time is its inverse, of which the same slowdown is more percent: 10.5 % fewer tokens/s are 11.7 % more time.
    """
    return [c for c in found.changes if c.metric != "step_time_s"]


def _loss(c: Change) -> float:
    return 1 - c.ratio if c.better == HIGHER else c.ratio - 1
