"""How precisely each cell of a campaign is known, for campaigns that repeat until it is precise enough.

The width of a cell is that of the widest comparison it takes part in, as the verdict uses it, or of its own interval if
it is compared with nothing. Only widths decide about further launches, never which cell is ahead: otherwise launches
would go on until chance shows a difference.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.analysis.compare import cells as comparing
from paceline.analysis.compare.comparable import judge, quantities_of
from paceline.analysis.statistics.intervals import Resampled, ratio_between, sharing_of, student_t
from paceline.analysis.training import metrics
from paceline.analysis.training.window import open_window
from paceline.results.records import RunRecord

SPEED = "tokens_per_s"


@dataclass(frozen=True, slots=True)
class Precision:
    """One cell with valid launches. width is the half-width of an interval as a fraction, infinite without one; spread
    is the relative standard deviation of its launches, and seconds what one of them takes. freedom is that of the
    interval.
    """

    launches: int
    width: float
    spread: float
    seconds: float
    freedom: float = math.inf

    @property
    def gain(self) -> float:
        """How much one more launch reduces the variance of the mean, per second."""
        return self.spread**2 / (self.launches * (self.launches + 1)) / max(self.seconds, 1e-3)


def precision_of(records: Sequence[RunRecord]) -> dict[str, Precision]:
    """Every cell that has a valid launch, by its id."""
    judged = {cell: [run.record for run in runs if run.ok] for cell, runs in judge(records).items()}
    valid = {cell: runs for cell, runs in judged.items() if runs}
    trained = [run for runs in valid.values() for run in runs if run.spec.is_certified]
    widths = trained_widths(metrics.gather(map(open_window, trained)))
    found = {}
    for cell, runs in valid.items():
        if cell in widths:
            width, spread, freedom = widths[cell]
        else:
            # Half of the rows of a sweep are at least this precise.
            known = [own_width(quantity.resampled) for quantity in quantities_of(runs)]
            width = statistics.median(known) if known else 0.0
            spread, freedom = 0.0 if math.isinf(width) else width, max(len(runs) - 1, 1)
        seconds = statistics.fmean(run.ended_at - run.started_at for run in runs)
        found[cell] = Precision(len(runs), width, spread, seconds, freedom)
    return found


def trained_widths(cells: Sequence[metrics.Cell]) -> dict[str, tuple[float, float, float]]:
    """Width, spread and degrees of freedom of every training cell whose speed is measured."""
    speeds = {cell.id: found for cell in cells if not cell.shared_gpu and (found := metrics.estimate(cell, SPEED))}
    widths = {cell: own_width(found) for cell, found in speeds.items()}
    named = comparing.title_axes(cells)
    compared: dict[str, tuple[float, float]] = {}
    for axis in comparing.AXES:
        for group in comparing.groups_of(cells, axis, named):
            known = {cell.id: speeds[cell.id] for cell in group.cells if cell.id in speeds}
            pairs = list(itertools.combinations(known, 2))
            sharing = sharing_of(list(known.values()))
            for pair in pairs:
                over, under = (known[cell] for cell in pair)
                ratio = ratio_between([over], [under], sharing)
                half, freedom = math.inf, math.inf
                if ratio is not None and (ratio.launches or 0) > 1:
                    low, high = ratio.interval(len(pairs))
                    half, freedom = math.expm1(math.log(high / low) / 2), ratio.freedom
                for cell in pair:
                    compared[cell] = max(compared.get(cell, (0.0, 0.0)), (half, freedom))
    known_widths = {}
    for cell, own in speeds.items():
        width, freedom = compared.get(cell, (widths[cell], own.freedom))
        known_widths[cell] = width, _spread(own), freedom
    return known_widths


def own_width(found: Resampled) -> float:
    """Half of the 95 % interval, as a fraction of the value; infinite for a single launch."""
    low, high = found.interval
    if low is None or high is None or found.launches < 2 or not found.value:
        return math.inf
    return (high - low) / 2 / abs(found.value)


def _spread(found: Resampled) -> float:
    return 0.0 if found.error is None else found.error * math.sqrt(found.launches)


def launches_left(known: Mapping[str, Precision], until: float, most: int) -> dict[str, int]:
    """About how many more launches each cell needs for this width, at most `most` in all."""
    left = {}
    for cell, own in known.items():
        if own.width > until:
            counts = range(own.launches + 1, most) if math.isfinite(own.width) and own.launches > 1 else ()
            wanted = next((n for n in counts if _width_at(own, n) <= until), most)
            left[cell] = max(1, wanted - own.launches)
    return left


def _width_at(own: Precision, launches: int) -> float:
    """The width that so many launches of the same spread would have; more launches also know their spread better."""
    freedom = own.freedom * (launches - 1) / (own.launches - 1)
    return own.width * math.sqrt(own.launches / launches) * student_t(freedom) / student_t(own.freedom)
