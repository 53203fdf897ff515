"""Charts of cost: dollars per million tokens, on demand beside spot; cost against time of a whole training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from paceline.analysis.findings import Measurement, Report
from paceline.report.charts import Chart, Point, money
from paceline.report.exporters._matplotlib.arrangement import Arrangement, arrange
from paceline.report.exporters._matplotlib.bar_charts import Quantity, draw_bars
from paceline.report.exporters._matplotlib.canvas import PALETTE, canvas, entitle, key, say
from paceline.report.text.cells import Row
from paceline.report.text.measurements import format_brief
from paceline.wording import Scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_IN = 3.6
METRIC = "usd_per_mtok"
SPOT = "spot"
LEAST_PER_MILLION = 0.1  # below it digits are mostly zeros, and a billion tokens is said instead


def prices(report: Report) -> Arrangement:
    """Each cell at its lowest price on demand, with the lowest spot price beside it; spot alone where no other is."""
    firm, spot = _lowest(report, spot=False), _lowest(report, spot=True)

    def pick(row: Row) -> tuple[Measurement | None, Measurement | None]:
        return (firm[row.cell], spot.get(row.cell)) if row.cell in firm else (spot.get(row.cell), None)

    return arrange(report, pick) if firm or spot else Arrangement((), ())


def _lowest(report: Report, *, spot: bool) -> dict[str, Measurement]:
    found: dict[str, Measurement] = {}
    for m in report.measurements:
        if m.metric == METRIC and m.value is not None and is_spot(m) == spot:
            other = found.get(m.cell)
            if other is None or m.value < (other.value or 0.0):
                found[m.cell] = m
    return found


def is_spot(m: Measurement) -> bool:
    """By the price's kind where the axes have it, else by its name."""
    return SPOT in str(m.axes.get("price_kind") or m.axes.get("price") or "").lower()


def price_names(found: Iterable[Measurement]) -> str:
    return ", ".join(dict.fromkeys(str(m.axes.get("price") or "unnamed price") for m in found))


def draw_cost(report: Report, found: Arrangement) -> Figure:
    firm = price_names(mark.measurement for mark in found.marks)
    spot = price_names(mark.beside for mark in found.marks if mark.beside)
    known = {str(m.axes.get("price")) for m in report.measurements if m.metric == METRIC}
    words = [f"solid: {firm}", *([f"hatched: {spot}"] if spot else []), "whiskers are 95 % intervals of throughput"]
    if len(known) > 2:
        words.insert(-1, f"the lowest of {len(known)} prices")
    dear = max(mark.measurement.value or 0.0 for mark in found.marks) >= LEAST_PER_MILLION
    scale = Scale("USD per million tokens") if dear else Scale("USD per billion tokens", 1e3)
    shown = Quantity(scale.unit, scale, lambda m: format_brief(m, scale), tick=False)
    return draw_bars(found, "Cost: lower is better", "; ".join(words), shown)


# --- cost against time ---


def budget(report: Report) -> Chart | None:
    return next(iter(money.budget(report)), None)


def draw_budget(_report: Report, chart: Chart) -> Figure:
    """One panel per kind of sample; a line joins the numbers of nodes of one series, the fewest first."""
    panels = list(dict.fromkeys(point.group for point in chart.points))
    figure, drawn = canvas("", "", *(PANEL_IN for _ in panels))
    for number, (axes, panel) in enumerate(zip(drawn, panels, strict=True)):
        words = "left is sooner, below is cheaper; each point was measured; dashed: spot; whiskers are 95 % intervals"
        entitle(axes, chart.title if number == 0 else "", words, panel)
        for series in chart.series:
            ours = [p for p in chart.points if p.group == panel and p.series == series.name]
            _trade(axes, ours, PALETTE[series.colour], dashed=series.dashed)
        axes.set_xlim(0, 1.08 * axes.get_xlim()[1])
        axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
        axes.grid(axis="both")
        axes.set(xlabel="time, h", ylabel="USD")
    key(figure, [(series.name, PALETTE[series.colour]) for series in chart.series if not series.dashed])
    return figure


def _trade(axes: Axes, ours: Sequence[Point], colour: str, *, dashed: bool) -> None:
    x, y = [float(p.x or 0) for p in ours], [p.y for p in ours]
    low = [p.y - p.low if p.low is not None else 0.0 for p in ours]
    high = [p.high - p.y if p.high is not None else 0.0 for p in ours]
    style = (0, (4, 3)) if dashed else "-"
    axes.errorbar(x, y, yerr=[low, high], fmt="none", ecolor=colour, elinewidth=1.3, capsize=3.5)
    axes.plot(x, y, color=colour, linewidth=1.8, linestyle=style, marker="o", markersize=5)
    # Spot points stand under those on demand, which say how many nodes they are.
    for point, at in zip(ours, zip(x, y, strict=True), strict=True):
        if not dashed:
            say(axes, point.text, at, (0, 8), ha="center", va="bottom", color=colour, fontsize=9)
