"""The parts of a chart. Numbers are in the displayed unit; texts are rounded to their uncertainty."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from paceline.analysis.findings import Measurement, Report
from paceline.analysis.findings.cell_axes import describe
from paceline.report.text.cells import groups
from paceline.report.text.measurements import format_brief, format_measurement
from paceline.wording import Scale

# How a chart is drawn: lanes of bars, of parts on top of each other, of single samples, of intervals on both sides of
# a rule; curves; a matrix.
BARS, STACK, DOTS, SPANS, LINES, HEAT = "bars", "stack", "dots", "spans", "lines", "heat"
# How a point of a curve is drawn: joined dots, a curve without dots (a fit), dots alone, a ring (a prediction), a curve
# without dots whose points have details, an area between low and high, a large dot with its name and its interval.
JOINED, CURVE, LONE, RING, TRAIL, AREA, MARK = "joined", "curve", "lone", "ring", "trail", "area", "mark"
# nines: percent on which 90, 99 and 99.9 are equally far apart.
LINEAR, LOG, LOG2, NINES = "linear", "log", "log2", "nines"
# The section a chart belongs to.
EVERYWHERE, SERVED = "charts", "served"
# The first colours of the palette are for what is compared (a strategy has one in every chart), the others for parts of
# one thing (phases, components, levels), for what went wrong, and for lines to compare with: a colour has one meaning.
COLOURS, PARTS, WRONG, GREY = 8, 6, 14, 15
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """scale is linear, log, log2 or nines. ticks are at the points (`number`, `bytes`) or at `round` numbers. zero: the
    axis must include 0. shared: all panels have the same range."""

    label: str
    unit: str = ""
    scale: str = LINEAR
    ticks: str = "number"
    zero: bool = True
    shared: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One entry of the legend: colour is an index in the palette, the same for the same thing in every chart."""

    name: str
    colour: int
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One mark. y is the value, low and high its interval, expected a value to compare it with; x is its position on a
    curve or in a matrix.

    A lane is named by label below the heading group; on curves group is the panel, in a matrix the host of the row.
    text is shown beside the mark, detail on demand. A filter keeps the point as long as it keeps one of its cells.
    """

    y: float
    cells: tuple[str, ...]
    runs: tuple[str, ...] = ()
    x: float | str | None = None
    low: float | None = None
    high: float | None = None
    label: str = ""
    group: str = ""
    series: str = ""
    text: str = ""
    detail: str = ""
    drawn: str = JOINED
    faint: bool = False
    expected: float | None = None
    samples: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A line across the chart at one value of y: a capacity, an ideal. If upright, y is a value of x; group is
    the only panel that has it, empty for all."""

    y: float
    label: str
    group: str = ""
    upright: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A range of x that is shaded in one panel."""

    start: float
    end: float
    group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """x is None for lanes. panel_px is the minimum width of a panel."""

    name: str
    title: str
    subtitle: str
    kind: str
    y: Axis
    points: tuple[Point, ...]
    series: tuple[Series, ...]
    x: Axis | None = None
    rules: tuple[Rule, ...] = ()
    spans: tuple[Span, ...] = ()
    section: str = EVERYWHERE
    panel_px: int = 240


def numbered(names: Iterable[str]) -> tuple[Series, ...]:
    """Series in the order of the names; beyond the palette all share the last colour."""
    return tuple(Series(name=n, colour=min(i, COLOURS - 1)) for i, n in enumerate(dict.fromkeys(names)))


def parts(names: Iterable[str]) -> tuple[Series, ...]:
    """Series that are parts of one thing, in colours that no strategy has."""
    return tuple(Series(name=n, colour=COLOURS + min(i, PARTS - 1)) for i, n in enumerate(dict.fromkeys(names)))


def others(names: Iterable[str]) -> tuple[Series, ...]:
    """Series beside what is compared (replicas, number formats, gauges): colours of parts, the most different first,
    and every second line dashed, because tones alone are hard to tell apart on thin lines."""
    order = tuple(COLOURS + i for i in (0, 4, 2, 3, 1, 5))
    return tuple(
        Series(name=n, colour=order[min(i, PARTS - 1)], dashed=i % 2 == 1) for i, n in enumerate(dict.fromkeys(names))
    )


def strategies(report: Report) -> tuple[Series, ...]:
    """Strategies with their colours, the same in every chart; the shortest name is the first."""
    labels = {row.label for group in groups(report) for row in group.rows}
    labels |= {describe(p.efficiency.axes, ()) for p in report.scaling}
    labels |= {describe(row.axes, ()) for row in report.memory}
    labels |= {describe(point.axes, ()) for point in report.frontier}
    return numbered(sorted(labels, key=lambda label: (len(label), label)))


def used(series: Iterable[Series], points: Iterable[Point]) -> tuple[Series, ...]:
    """The series that have points."""
    shown = {point.series for point in points}
    return tuple(one for one in series if one.name in shown)


def thinned(values: Sequence[Item], most: int) -> list[Item]:
    """At most so many values, evenly spaced, including the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def measured_point(m: Measurement, scale: Scale) -> Point:
    """A mark at the value of a measurement, with its interval and details."""
    return Point(
        y=scale.apply(m.value) or 0.0,
        low=scale.apply(m.low),
        high=scale.apply(m.high),
        text=format_brief(m, scale),
        detail=in_full(m, scale),
        cells=(m.cell,),
        runs=m.runs,
    )


def in_full(m: Measurement, scale: Scale | None = None) -> str:
    """A measurement in full: value, interval, unit, and how many samples it comes from."""
    launches = f"{m.launches} launch{'' if m.launches == 1 else 'es'}"
    return "\n".join(filter(None, (format_measurement(m, scale), f"{m.n} samples of {launches}", m.note)))
