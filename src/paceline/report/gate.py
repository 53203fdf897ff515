"""The gate of a build: which changes between two results directories must fail it, and what it could not judge."""

from __future__ import annotations

import math

from paceline.analysis.findings import HIGHER, WORSE, Between, Change, Regression
from paceline.analysis.served.estimates import LATENCIES
from paceline.errors import require
from paceline.report.tables.comparison import change_text


def checked_percent(percent: float) -> float:
    """The limit of a gate; RequestError if it is not valid."""
    accepted = "a number of percent from 0 to under 100"
    require(math.isfinite(percent) and 0 <= percent < 100, "--fail-on-regression", percent, accepted)
    return percent


def regressions(found: Between, percent: float) -> tuple[Regression, ...]:
    """Every change for the worse whose whole interval is beyond the limit, and every cell that was lost.

    The limit is relative to A: percent of a rate lost, or percent of time or memory added.
    """
    beyond = [
        c
        for c in gated(found)
        if c.verdict == WORSE
        and (0.0 if c.low is None or c.high is None else min(_loss(c, c.low), _loss(c, c.high))) > percent / 100
    ]
    slower = [Regression(cell=c.cell, text=change_text(c)) for c in beyond]
    gone = [Regression(cell=x.cell, text=f"{x.label}: ok in A, {x.status} in B ({x.reason})") for x in found.lost]
    return (*slower, *gone)


def undecided_losses(found: Between, percent: float) -> tuple[Change, ...]:
    """Changes for the worse beyond the limit that have no verdict, the largest loss first."""
    beyond = [c for c in gated(found) if c.verdict is None and _loss(c, c.ratio) > percent / 100]
    return tuple(sorted(beyond, key=lambda c: -_loss(c, c.ratio)))


def unseen_losses(found: Between, percent: float) -> tuple[Change, ...]:
    """Undecided losses that no other verdict could have revealed, so that passing them would mean nothing: all of them
    if nothing has a verdict, and latencies of a load whose latencies all have no verdict, because the rate of a
    scheduled load does not depend on how late its answers are."""
    losses = undecided_losses(found, percent)
    if all(c.verdict is None for c in gated(found)):
        return losses
    seen = {(c.cell, c.row) for c in found.changes if c.metric in LATENCIES and c.verdict is not None}
    return tuple(c for c in losses if c.metric in LATENCIES and (c.cell, c.row) not in seen)


def gated(found: Between) -> list[Change]:
    """The changes a gate looks at: training speed by tokens_per_s alone, as in the sentence.

    Step time is its inverse, of which the same slowdown is more percent: 10.5 % fewer tokens/s are 11.7 % more time.
    """
    return [c for c in found.changes if c.metric != "step_time_s"]


def _loss(c: Change, ratio: float) -> float:
    return 1 - ratio if c.better == HIGHER else ratio - 1
