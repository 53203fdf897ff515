"""plots/*.png and *.svg: throughput, step time, memory, scaling and the fabric for documents."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.exporters import _ceiling_charts as ceilings
from paceline.exporters import _fabric_charts as fabric
from paceline.exporters import _history_chart as history
from paceline.exporters import _memory_charts as memory
from paceline.exporters import write_atomically
from paceline.exporters._canvas import CLEAR, INK, PALETTE, QUIET, STYLE, canvas, entitle, say, short_names
from paceline.findings import Measurement, Report, ScalingPoint
from paceline.present.quantity import Scale, format_brief, format_number, format_parts
from paceline.present.scaling import baseline_name
from paceline.present.standing import axis_text, describe, groups

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI, MOST_LANES, MOST_VECTOR_POINTS = 160, 60, 400
STRAGGLER_RATIO = 1.35  # steps slower than this many times the slowest cell's 95th percentile are counted, not drawn


@dataclass(frozen=True, slots=True)
class Lane:
    """One cell of a chart: where it is drawn (None for the heading of its group), what and how."""

    y: float
    label: str
    colour: str = INK
    measurement: Measurement | None = None
    samples: tuple[float, ...] = ()

    @property
    def heading(self) -> bool:
        return self.measurement is None


def export(report: Report, directory: Path) -> list[Path]:
    """A chart that would hold no data is not written."""
    wanted = [(name, form) for name in available(report) for form in ("png", "svg")]
    return [write_atomically(directory / "plots" / f"{n}.{form}", image(report, n, form)) for n, form in wanted]


def available(report: Report) -> tuple[str, ...]:
    """Charts for which there is data, known without drawing any."""
    return tuple(name for name, (collect, _) in CHARTS.items() if collect(report))


def image(report: Report, name: str, form: str) -> bytes:
    """One chart as the bytes of a file, the same for the same report."""
    import matplotlib

    style: Any = STYLE
    collect, draw = CHARTS[name]
    buffer = io.BytesIO()
    with matplotlib.rc_context(style):
        figure = draw(report, collect(report))
        figure.savefig(buffer, format=form, dpi=DPI, metadata={"Date": None} if form == "svg" else {"Software": None})
    return buffer.getvalue()


def lanes(report: Report, metric: str, needs_samples: bool = False) -> list[Lane]:
    """Ranked cells that hold the metric, downwards, under a heading per comparison group."""
    found: list[Lane] = []
    colours = _colours(report)
    y = 0.0
    for group in groups(report):
        rows = [r for r in group.rows if metric in r.measurements and r.measurements[metric].value is not None]
        rows = [r for r in rows if report.distributions.get(r.cell) or not needs_samples]
        if rows:
            found.append(Lane(y, ": ".join((group.title, *group.warnings))))
            for i, r in enumerate(rows, start=1):
                samples = tuple(report.distributions.get(r.cell, ()))
                found.append(Lane(y - i, r.label, colours[r.label], r.measurements[metric], samples))
            y -= len(rows) + 1.35
    return _shortened(found)


def _shortened(lanes: list[Lane]) -> list[Lane]:
    """As many as a reader can look through, and a word on how many are not drawn."""
    shown, rest = lanes[:MOST_LANES], [lane for lane in lanes[MOST_LANES:] if not lane.heading]
    while rest and shown[-1].heading:
        shown.pop()
    return [*shown, Lane(shown[-1].y - 1.2, f"and {len(rest)} more cells, in the tables only")] if rest else shown


def _colours(report: Report) -> dict[str, str]:
    """The same strategy has the same colour in every chart; past the palette all are grey, labels tell them apart."""
    labels = {row.label for group in groups(report) for row in group.rows}
    labels |= {describe(p.efficiency.axes, ()) for p in report.scaling}
    plainest_first = sorted(labels, key=lambda label: (len(label), label))
    return {label: PALETTE[min(i, len(PALETTE) - 1)] for i, label in enumerate(plainest_first)}


def _lane_chart(lanes: Sequence[Lane], title: str, subtitle: str) -> tuple[Figure, Axes]:
    """An empty chart with its lanes named on the left and its groups as headings above them."""
    figure, (axes,) = canvas(title, subtitle, 1.25 + 0.36 * (lanes[0].y - lanes[-1].y + 1))
    cells = [lane for lane in lanes if not lane.heading]
    axes.set_yticks([lane.y for lane in cells], [lane.label for lane in cells])
    for lane in lanes:
        if lane.heading:
            say(axes, lane.label, (0, lane.y), (0, -3), "side", color=QUIET, fontsize=9, bbox=CLEAR)
    axes.set_ylim(lanes[-1].y - 0.6, lanes[0].y + 0.5)
    axes.grid(axis="x")
    return figure, axes


def draw_throughput(report: Report, lanes: Sequence[Lane]) -> Figure:
    figure, axes = _lane_chart(lanes, "Throughput", "higher is better; whiskers are 95 % intervals")
    _bars(axes, lanes, Scale("tokens/s"), lambda m: format_parts(m.value, m.low, m.high)[0], 0.0)
    axes.set_xlabel("tokens/s")
    return figure


def draw_memory(report: Report, lanes: Sequence[Lane]) -> Figure:
    """Peaks against the capacity of the smallest device, or a word on how far away it is."""
    scale = Scale("GiB", 2.0**-30)
    capacity = scale.apply(_capacity_bytes(report))
    top = max(scale.apply(lane.measurement.value) or 0.0 for lane in lanes if lane.measurement)
    near = capacity is not None and capacity < 8 * top
    subtitle = "the highest process of each cell; lower is better"
    if capacity is not None and not near:
        subtitle += f"; the device holds {format_number(capacity, 1)} GiB, beyond this axis"
    figure, axes = _lane_chart(lanes, "Peak memory", subtitle)
    _bars(axes, lanes, scale, lambda m: format_brief(m, scale), capacity if capacity and near else 0.0)
    if capacity is not None and near:
        axes.axvline(capacity, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
        floor = (capacity, axes.get_ylim()[0])
        say(axes, f"device: {format_number(capacity, 1)} GiB", floor, (-5, 6), ha="right", va="bottom")
    axes.set_xlabel("GiB")
    return figure


def _bars(axes: Axes, lanes: Sequence[Lane], scale: Scale, number: Callable[[Measurement], str], reach: float) -> None:
    """Bars from zero with their interval and number; room is kept for the numbers."""
    ends = [reach]
    for lane, m in _measured(lanes):
        value, low, high = scale.apply(m.value) or 0.0, scale.apply(m.low), scale.apply(m.high)
        axes.barh(lane.y, value, height=0.62, color=lane.colour, linewidth=0)
        if low is not None and high is not None:
            whisker = [[max(value - low, 0)], [max(high - value, 0)]]
            axes.errorbar(value, lane.y, xerr=whisker, fmt="none", ecolor=INK, elinewidth=1.3, capsize=3.5)
        ends.append(max(value, high or value))
        say(axes, number(m), (ends[-1], lane.y), (7, 0))
    axes.set_xlim(0, max(ends) * 1.16 or 1.0)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.10g}")


def draw_step_time(report: Report, lanes: Sequence[Lane]) -> Figure:
    """Every measured step as a point under a box of its quartiles; the axis stops where only stragglers are left."""
    import numpy as np

    subtitle = "each dot is one step; box: middle half; whiskers: 5 to 95 %; right: median"
    figure, axes = _lane_chart(lanes, "Step time", subtitle)
    spread = {lane.y: np.asarray(lane.samples) * 1e3 for lane in lanes if not lane.heading}
    limit = STRAGGLER_RATIO * max(np.percentile(x, 95) for x in spread.values())
    right = max(x[x <= limit].max() for x in spread.values())
    left = min(x.min() for x in spread.values())
    room = (right - left) * 0.04 or right * 0.05
    axes.set_xlim(left - room, right + room)
    for lane, _ in _measured(lanes):
        _distribution(axes, lane, spread[lane.y], right)
    axes.set_xlabel("ms per optimizer step (the axis does not begin at 0)")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.10g}")
    return figure


def _distribution(axes: Axes, lane: Lane, x: Any, right: float) -> None:
    import numpy as np

    low, first, median, third, high = np.percentile(x, (5, 25, 50, 75, 95))
    shown = x[x <= right]
    jitter = (np.arange(len(shown)) * 0.618034) % 1.0
    dots = axes.scatter(shown, lane.y - 0.12 - 0.26 * jitter, s=7, color=lane.colour, alpha=0.45, linewidths=0)
    dots.set_rasterized(len(shown) > MOST_VECTOR_POINTS)
    top = lane.y + 0.16
    axes.hlines(top, low, high, color=INK, linewidth=1.1)
    axes.barh(top, third - first, left=first, height=0.22, color=lane.colour, edgecolor=INK, linewidth=0.8)
    axes.vlines(median, top - 0.17, top + 0.17, color=INK, linewidth=2.0)
    beyond = len(x) - len(shown)
    text = f"{format_number(median, 1 if median < 1000 else 0)} ms" + (f"\n+{beyond} slower" if beyond else "")
    say(axes, text, (1, lane.y), (6, 0), "side")


def draw_scaling(report: Report, points: Sequence[ScalingPoint]) -> Figure:
    """Efficiency against the ideal 100 %, one panel per kind of scaling, the measured baseline in its title."""
    kinds = sorted({p.kind for p in points}, reverse=True)
    figure, panels = canvas("", "", 3.6 * len(kinds), len(kinds))
    colours = _colours(report)
    for axes, kind in zip(panels, kinds, strict=True):
        of_kind = [p for p in points if p.kind == kind]
        subtitle = "efficiency; whiskers are 95 % intervals; the baseline was measured in the same campaign"
        entitle(axes, f"{kind.capitalize()} scaling against {_baseline(report, of_kind)}", subtitle)
        _efficiency(axes, of_kind, colours)
    return figure


def _baseline(report: Report, points: Sequence[ScalingPoint]) -> str:
    names = {baseline_name(report, p.baseline) for p in points}
    if len(names) == 1:
        return names.pop()
    sizes = {axis_text("world_size", {**p.efficiency.axes, "world_size": p.baseline_world_size}) for p in points}
    return f"each series' own run on {sizes.pop()}" if len(sizes) == 1 else "each series' own smallest run"


def _efficiency(axes: Axes, points: Sequence[ScalingPoint], colours: dict[str, str]) -> None:
    sizes = sorted({p.world_size for p in points} | {p.baseline_world_size for p in points})
    axes.axhline(100, color=INK, linewidth=1.1, linestyle=(0, (4, 3)))
    ends = [(float(sizes[-1]), 100.0, "ideal", INK)]
    names = short_names(sorted({p.series for p in points}))
    for series in names:
        ours = [p for p in points if p.series == series]
        colour = colours[describe(ours[0].efficiency.axes, ())]
        ends += [(*_series(axes, ours, names[series], colour), colour)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlim(sizes[0] / 1.12, sizes[-1] * 1.12)
    axes.set_ylim(0, max(axes.get_ylim()[1], 108.0))
    axes.grid(axis="y")
    on_gpus = all(p.efficiency.axes.get("device") == "cuda" for p in points)
    axes.set(xlabel="GPUs" if on_gpus else "processes", ylabel="efficiency, %")
    _end_labels(axes, ends)


def _series(axes: Axes, points: Sequence[ScalingPoint], name: str, colour: str) -> tuple[float, float, str]:
    """Draws one line from its baseline on; returns where it ends and how it is called there."""
    points = sorted(points, key=lambda p: p.world_size)
    x, y = [float(p.world_size) for p in points], [_percent(p.efficiency.value) for p in points]
    whiskers = [
        [v - _percent(p.efficiency.low, v) for p, v in zip(points, y, strict=True)],
        [_percent(p.efficiency.high, v) - v for p, v in zip(points, y, strict=True)],
    ]
    axes.errorbar(x, y, yerr=whiskers, fmt="none", ecolor=colour, elinewidth=1.3, capsize=3.5)
    first = float(points[0].baseline_world_size)
    line = [*([] if first in x else [(first, 100.0)]), *zip(x, y, strict=True)]
    axes.plot(*zip(*line, strict=True), color=colour, linewidth=1.8, marker="o", markersize=5)
    return (*line[-1], f"{name}  {format_brief(points[-1].efficiency, Scale('%', 100.0))} %")


def _percent(ratio: float | None, otherwise: float = 0.0) -> float:
    return otherwise if ratio is None else ratio * 100


def _end_labels(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Names at the end of their lines, pushed apart where they would touch."""
    low, high = axes.get_ylim()
    gap, floor = (high - low) * 0.07, float("inf")
    for _, y, text, colour in sorted(ends, key=lambda end: -end[1]):
        floor = min(y, floor - gap)
        say(axes, text, (1, floor), (6, 0), "side", color=colour)


def _measured(lanes: Sequence[Lane]) -> Iterator[tuple[Lane, Measurement]]:
    return ((lane, lane.measurement) for lane in lanes if lane.measurement is not None)


def _capacity_bytes(report: Report) -> float | None:
    """Memory of the smallest device of all machines; None where none is known."""
    known = [gpu.get("memory_bytes") for machine in report.machines for gpu in machine.get("gpus") or ()]
    return min((float(size) for size in known if size), default=None)


Collected = Sequence[Any]
CHARTS: dict[str, tuple[Callable[[Report], Collected], Callable[[Report, Any], Any]]] = {
    "throughput": (lambda report: lanes(report, "tokens_per_s"), draw_throughput),
    "step_time": (lambda report: lanes(report, "step_time_s", needs_samples=True), draw_step_time),
    "memory": (lambda report: lanes(report, "peak_memory_bytes"), draw_memory),
    "memory_components": (memory.rows, memory.draw_components),
    "frontier": (memory.points, memory.draw_frontier),
    "scaling": (lambda report: [p for p in report.scaling if p.efficiency.value is not None], draw_scaling),
    "scaling_loss": (lambda report: report.explanations, fabric.draw_scaling_loss),
    "collective_bandwidth": (fabric.panels, fabric.draw_bandwidth),
    "collective_latency": (fabric.lines, fabric.draw_latency),
    "pairs": (lambda report: report.pairs, fabric.draw_pairs),
    "history": (history.panels, history.draw),
    "ceilings_products": (ceilings.products, ceilings.draw_products),
    "ceilings_copies": (ceilings.copies, ceilings.draw_copies),
    "ceilings_attention": (ceilings.attention, ceilings.draw_attention),
}
