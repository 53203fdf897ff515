"""Efficiency over the number of processes against the ideal 100 %."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from paceline.analysis.findings import Report, ScalingPoint
from paceline.analysis.findings.cell_axes import axis_text, describe
from paceline.report.exporters._matplotlib.arrangement import strategy_colours
from paceline.report.exporters._matplotlib.canvas import INK, End, canvas, entitle, name_ends
from paceline.report.tables.scaling import baseline_name
from paceline.report.text.measurements import format_brief
from paceline.wording import Scale, short_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_IN = 3.8
MOST_SERIES = 16  # names beside the ends of lines; more would stand on each other


def points(report: Report) -> list[ScalingPoint]:
    return [p for p in report.scaling if p.efficiency.value is not None]


def draw_efficiency(report: Report, found: Sequence[ScalingPoint]) -> Figure:
    """One panel per kind of scaling, the measured baseline in its title."""
    kinds = sorted({p.kind for p in found}, reverse=True)
    figure, panels = canvas("", "", *(PANEL_IN for _ in kinds))
    colours = strategy_colours(report)
    for axes, kind in zip(panels, kinds, strict=True):
        of_kind = [p for p in found if p.kind == kind]
        subtitle = "higher is better; whiskers are 95 % intervals; the baseline was measured in the same campaign"
        entitle(axes, f"{kind.capitalize()} scaling against {_baseline(report, of_kind)}", subtitle)
        _panel(axes, of_kind, colours)
    return figure


def _baseline(report: Report, found: Sequence[ScalingPoint]) -> str:
    names = {baseline_name(report, cell) for cell in {p.baseline for p in found}}
    if len(names) == 1:
        return names.pop()
    sizes = {axis_text("world_size", {**p.efficiency.axes, "world_size": p.baseline_world_size}) for p in found}
    return f"each series' own run on {sizes.pop()}" if len(sizes) == 1 else "each series' own smallest run"


def _panel(axes: Axes, found: Sequence[ScalingPoint], colours: Mapping[str, str]) -> None:
    by_series: dict[str, list[ScalingPoint]] = {}
    for p in sorted(found, key=lambda p: (p.series, p.world_size)):
        by_series.setdefault(p.series, []).append(p)
    names = short_names(list(by_series))
    ends = []
    for series, ours in by_series.items():
        colour = colours[describe(ours[0].efficiency.axes, ())]
        ends.append(_line(axes, ours, names[series], colour))
    axes.axhline(100, color=INK, linewidth=1.1, linestyle=(0, (4, 3)))
    _axes_of(axes, found)
    few = sorted(ends, key=lambda end: -end.y)[:MOST_SERIES]
    rest = [End(few[-1].y, f"and {len(ends) - len(few)} more", INK)] if len(ends) > len(few) else []
    name_ends(axes, [End(100.0, "ideal", INK), *few, *rest])


def _axes_of(axes: Axes, found: Sequence[ScalingPoint]) -> None:
    sizes = sorted({p.world_size for p in found} | {p.baseline_world_size for p in found})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlim(sizes[0] / 1.12, sizes[-1] * 1.12)
    axes.set_ylim(0, max(axes.get_ylim()[1], 108.0))
    axes.grid(axis="y")
    on_gpus = all(p.efficiency.axes.get("device") == "cuda" for p in found)
    axes.set(xlabel="GPUs" if on_gpus else "processes", ylabel="efficiency, %")


def _line(axes: Axes, ours: Sequence[ScalingPoint], name: str, colour: str) -> End:
    """Draws one series from its baseline on."""
    x, y = [float(p.world_size) for p in ours], [_percent(p.efficiency.value) for p in ours]
    whiskers = [
        [max(v - _percent(p.efficiency.low, v), 0.0) for p, v in zip(ours, y, strict=True)],
        [max(_percent(p.efficiency.high, v) - v, 0.0) for p, v in zip(ours, y, strict=True)],
    ]
    axes.errorbar(x, y, yerr=whiskers, fmt="none", ecolor=colour, elinewidth=1.3, capsize=3.5)
    first = float(ours[0].baseline_world_size)
    line = [*([] if first in x else [(first, 100.0)]), *zip(x, y, strict=True)]
    axes.plot(*zip(*line, strict=True), color=colour, linewidth=1.8, marker="o", markersize=5)
    return End(line[-1][1], f"{name}  {format_brief(ours[-1].efficiency, Scale('%', 100.0))} %", colour)


def _percent(ratio: float | None, otherwise: float = 0.0) -> float:
    return otherwise if ratio is None else ratio * 100
