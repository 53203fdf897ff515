"""Bars from zero with their intervals: throughput, memory and bytes moved, by strategy and number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.analysis.findings import Measurement, Report
from paceline.report.exporters._matplotlib.arrangement import Arrangement, Family, Lane, Mark, arrange, metric
from paceline.report.exporters._matplotlib.canvas import (
    CLEAR,
    INK,
    PAPER,
    QUIET,
    WIDTH_IN,
    brief,
    canvas,
    entitle,
    key,
    say,
    thousands,
)
from paceline.report.text.cells import WIRE, WIRE_FORMULA
from paceline.report.text.measurements import format_brief
from paceline.wording import MISSING, Scale, format_number, format_parts, scale_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_IN, LANE_IN = 2.7, 0.36
PLOT_IN = WIDTH_IN - 1.1  # about what is left beside ticks and labels
WIDEST_BAR_IN = 0.6
GROUP_WIDTH = 0.86  # of the distance between two sizes
PT_PER_CHARACTER = 4.6  # of a number over a bar
NUMBER_SIZE = 7.8
FAR = 8  # a capacity so many times the highest bar is told, not drawn
THOUSANDS_FROM = 1e5


@dataclass(frozen=True, slots=True)
class Quantity:
    """What the bars of one chart show. With `tick` what stands beside is a line across the bar, else a second bar."""

    unit: str
    scale: Scale
    number: Callable[[Measurement], str]
    tick: bool = True
    line: float | None = None
    line_text: str = ""


class Bar(NamedTuple):
    """Where a bar stands, how long it is, where its ink ends, and its number.

    interval is how far its whiskers reach to both sides, across where a line crosses it.
    """

    at: float
    value: float
    end: float
    text: str
    width: float
    colour: str
    interval: tuple[float, float] | None
    across: float | None = None
    hatched: bool = False


# --- frames: panels over sizes, then lanes -------------------------------------------------------------------------


def frame(
    found: Arrangement,
    title: str,
    subtitle: str,
    over_sizes: Callable[[Axes, Family], None],
    in_lanes: Callable[[Axes, list[tuple[float, Mark]]], None],
    unit: str,
) -> Figure:
    """One panel per family drawn by `over_sizes`, then the lanes by `in_lanes`; both find their axes named."""
    heights = [PANEL_IN] * len(found.families)
    if found.lanes:
        heights.append(0.4 + LANE_IN * (found.lanes[0].y - found.lanes[-1].y + 1))
    figure, axes = canvas("", "", *(h + (0.85 if i == 0 else 0.0) for i, h in enumerate(heights)))
    headings = [*(family.title for family in found.families), ""]
    for i, (place, heading) in enumerate(zip(axes, headings, strict=False)):
        entitle(place, title if i == 0 else "", subtitle, heading)
    for place, family in zip(axes, found.families, strict=False):
        _name_sizes(place, family, unit)
        over_sizes(place, family)
    if found.lanes:
        _name_lanes(axes[-1], found.lanes, unit)
        in_lanes(axes[-1], [(lane.y, lane.mark) for lane in found.lanes if lane.mark])
    if found.families:
        colours = {name: colour for family in found.families for name, colour in family.strategies.items()}
        key(figure, sorted(colours.items(), key=lambda item: (len(item[0]), item[0])))
    if found.left_out:
        text = f"and {found.left_out} more cells, in the tables only"
        say(axes[-1], text, (1, 0), (0, -34), "axes fraction", color=QUIET, ha="right")
    return figure


def _name_sizes(axes: Axes, family: Family, unit: str) -> None:
    axes.set_xticks(range(len(family.sizes)), [str(size) for size, _ in family.sizes])
    axes.set_xlim(-0.55, len(family.sizes) - 0.45)
    axes.set(xlabel="GPUs" if family.on_gpus else "processes", ylabel=unit)
    axes.grid(axis="y")
    thousands(axes.yaxis)


def _name_lanes(axes: Axes, lanes: Iterable[Lane], unit: str) -> None:
    lanes = list(lanes)
    cells = [lane for lane in lanes if lane.mark]
    axes.set_yticks([lane.y for lane in cells], [brief(lane.label) for lane in cells])
    for lane in lanes:
        if lane.mark is None:
            say(axes, lane.label, (0, lane.y), (0, -3), "side", color=QUIET, fontsize=9, bbox=CLEAR)
    axes.set_ylim(lanes[-1].y - 0.6, lanes[0].y + 0.5)
    axes.set_xlabel(unit)
    axes.grid(axis="x")
    thousands(axes.xaxis)


def slot(family: Family) -> float:
    """The width of one strategy's place, where the distance between two sizes is 1."""
    widest = WIDEST_BAR_IN * len(family.sizes) / PLOT_IN
    return min(GROUP_WIDTH / len(family.strategies), widest)


def slots(family: Family) -> list[tuple[float, Mark | None]]:
    """The middle of every strategy's place at every size; None where a cell was not measured."""
    left = -slot(family) * len(family.strategies) / 2
    return [
        (at + left + (i + 0.5) * slot(family), by_strategy.get(name))
        for at, (_, by_strategy) in enumerate(family.sizes)
        for i, name in enumerate(family.strategies)
    ]


def room_for(family: Family, texts: Iterable[str], share: int = 1) -> tuple[bool, bool]:
    """Whether such texts fit side by side over the bars, and whether they do at least turned upright."""
    room_pt = PLOT_IN * 72 / len(family.sizes) * slot(family) / share
    return max(map(len, texts)) * PT_PER_CHARACTER <= room_pt, room_pt >= NUMBER_SIZE + 1


def say_missing(axes: Axes, places: Iterable[tuple[float, Mark | None]]) -> None:
    """A dash where a cell holds no number: an empty place alone could be read as 0."""
    for at, mark in places:
        if mark is None:
            say(axes, MISSING, (at, 0), (0, 2), "foot", ha="center", va="bottom", color=QUIET)


# --- bars ----------------------------------------------------------------------------------------------------------


def draw_bars(found: Arrangement, title: str, subtitle: str, shown: Quantity) -> Figure:
    return frame(
        found,
        title,
        subtitle,
        lambda axes, family: _bars_over_sizes(axes, family, shown),
        lambda axes, lanes: _bars_in_lanes(axes, lanes, shown),
        shown.unit,
    )


def _bars_over_sizes(axes: Axes, family: Family, shown: Quantity) -> None:
    places = slots(family)
    bars = [bar for at, mark in places if mark for bar in _bars(at, mark, shown, 0.92 * slot(family), -1)]
    _paint(axes, bars, upright=True)
    fits, legible = room_for(family, [bar.text for bar in bars], 1 if shown.tick else 2)
    for bar in bars if legible else ():
        how: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": NUMBER_SIZE, "rotation": 0 if fits else 90}
        say(axes, bar.text, (bar.at, bar.end), (0, 3), in_layout=False, **how)
    say_missing(axes, places)
    reach = max(*(bar.end for bar in bars), shown.line or 0.0) * ((1.14 if fits else 1.3) if legible else 1.06)
    axes.set_ylim(0, reach or 1.0)
    if shown.line is not None:
        axes.axhline(shown.line, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
        say(axes, shown.line_text, (0, shown.line), (4, 3), "side", va="bottom", fontsize=9, bbox=CLEAR)


def _bars_in_lanes(axes: Axes, lanes: list[tuple[float, Mark]], shown: Quantity) -> None:
    bars = [bar for y, mark in lanes for bar in _bars(y, mark, shown, 0.62 if shown.tick else 0.8, 1)]
    _paint(axes, bars, upright=False)
    for bar in bars:
        say(axes, bar.text, (bar.end, bar.at), (7, 0), fontsize=9.5 if shown.tick else NUMBER_SIZE)
    axes.set_xlim(0, max(*(bar.end for bar in bars), shown.line or 0.0) * 1.16 or 1.0)
    if shown.line is not None:
        axes.axvline(shown.line, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
        say(axes, shown.line_text, (shown.line, axes.get_ylim()[0]), (-5, 6), ha="right", va="bottom", bbox=CLEAR)


def _bars(at: float, mark: Mark, shown: Quantity, width: float, first: int) -> list[Bar]:
    """One cell: a bar with a line across at the number beside it, or two bars; the cell's own on the side of first."""
    beside = mark.beside if mark.beside and mark.beside.value is not None else None
    if beside is None or shown.tick:
        across = shown.scale.apply(beside.value) if beside else None
        return [_bar(at, mark.measurement, shown, width, mark.colour, across)]
    away = first * 0.25 * width
    own = _bar(at + away, mark.measurement, shown, 0.46 * width, mark.colour)
    return [own, _bar(at - away, beside, shown, 0.46 * width, mark.colour)._replace(hatched=True)]


def _bar(at: float, m: Measurement, shown: Quantity, width: float, colour: str, across: float | None = None) -> Bar:
    value, low, high = (shown.scale.apply(number) for number in (m.value, m.low, m.high))
    value = value or 0.0
    interval = None if low is None or high is None else (max(value - low, 0.0), max(high - value, 0.0))
    end = max(value, high or value, across or 0.0)
    return Bar(at, value, end, shown.number(m), width, colour, interval, across)


def _paint(axes: Axes, bars: Sequence[Bar], *, upright: bool) -> None:
    """All of one look in one call: matplotlib takes milliseconds for each."""
    for hatched in (False, True):
        alike = [bar for bar in bars if bar.hatched == hatched]
        look: dict[str, Any] = {"alpha": 0.45, "hatch": "////", "edgecolor": PAPER} if hatched else {}
        places, values, widths = [bar.at for bar in alike], [bar.value for bar in alike], [bar.width for bar in alike]
        draw: Any = axes.bar if upright else axes.barh
        draw(places, values, widths, color=[bar.colour for bar in alike], linewidth=0, **look)
    known = [bar for bar in bars if bar.interval is not None]
    whiskers = [list(side) for side in zip(*(bar.interval for bar in known if bar.interval), strict=True)]
    if known:
        middle, ends = [bar.at for bar in known], [bar.value for bar in known]
        place: dict[str, Any] = {"x": middle, "y": ends, "yerr": whiskers}
        if not upright:
            place = {"x": ends, "y": middle, "xerr": whiskers}
        axes.errorbar(**place, fmt="none", ecolor=INK, elinewidth=1.2, capsize=2.5 if upright else 3.5)
    crossed = [bar for bar in bars if bar.across is not None]
    lines: Any = axes.hlines if upright else axes.vlines
    low, high = [bar.at - bar.width / 2 for bar in crossed], [bar.at + bar.width / 2 for bar in crossed]
    lines([bar.across for bar in crossed], low, high, color=INK, linewidth=1.8)


# --- the charts ----------------------------------------------------------------------------------------------------


def throughput(report: Report) -> Arrangement:
    return arrange(report, metric("tokens_per_s"))


def draw_throughput(report: Report, found: Arrangement) -> Figure:
    top = max(mark.measurement.value or 0.0 for mark in found.marks)
    # Over narrow bars six digits do not fit; in lanes they do, and agree with the tables.
    many = bool(found.families) and not found.lanes and top >= THOUSANDS_FROM
    scale = Scale("thousand tokens/s", 1e-3) if many else Scale("tokens/s")
    number = _brief(scale) if found.families else lambda m: format_parts(m.value, m.low, m.high)[0]
    subtitle = "tokens of all processes; whiskers are 95 % intervals"
    return draw_bars(found, "Throughput: higher is better", subtitle, Quantity(scale.unit, scale, number))


def _brief(scale: Scale) -> Callable[[Measurement], str]:
    return lambda m: format_brief(m, scale)


def peak_memory(report: Report) -> Arrangement:
    return arrange(report, metric("peak_memory_bytes"))


def draw_memory(report: Report, found: Arrangement) -> Figure:
    """Peaks against the capacity of the smallest device, or a word on how far away it is."""
    scale = Scale("GiB", 2.0**-30)
    capacity = scale.apply(_capacity_bytes(report))
    top = max(scale.apply(mark.measurement.value) or 0.0 for mark in found.marks)
    near = capacity is not None and capacity < FAR * top
    subtitle = "the highest process of each cell"
    if capacity is not None and not near:
        subtitle += f"; the device holds {format_number(capacity, 1)} GiB, beyond this axis"
    text = "" if capacity is None else f"device: {format_number(capacity, 1)} GiB"
    shown = Quantity("GiB", scale, _brief(scale), line=capacity if near else None, line_text=text)
    return draw_bars(found, "Peak memory: lower is better", subtitle, shown)


def _capacity_bytes(report: Report) -> float | None:
    """Memory of the smallest device of all machines; None where none is known."""
    known = [gpu.get("memory_bytes") for machine in report.machines for gpu in machine.get("gpus") or ()]
    return min((float(size) for size in known if size), default=None)


def wire(report: Report) -> Arrangement:
    """Nothing where nothing was sent: one process alone has no wire."""
    found = arrange(report, metric(WIRE, WIRE_FORMULA))
    return found if any(mark.measurement.value for mark in found.marks) else Arrangement((), ())


def draw_wire(report: Report, found: Arrangement) -> Figure:
    known = [m.value for mark in found.marks for m in (mark.measurement, mark.beside) if m]
    scale = scale_of("bytes/step", WIRE, known)
    subtitle = "sent by the busiest process in an optimizer step; bar: counted, line across: the formula"
    title = "Bytes on the wire: lower is better"
    return draw_bars(found, title, subtitle, Quantity(f"{scale.unit}", scale, _brief(scale)))


def host_to_device(report: Report) -> Arrangement:
    return arrange(report, metric("h2d_bytes_per_s"))


def draw_host_to_device(report: Report, found: Arrangement) -> Figure:
    scale = scale_of("bytes/s", "h2d", [mark.measurement.value for mark in found.marks])
    subtitle = "rate while token batches are copied, by the device's time line; whiskers are 95 % intervals"
    return draw_bars(found, "Host to device: higher is better", subtitle, Quantity(scale.unit, scale, _brief(scale)))
