"""Charts of cost: dollars per million tokens, on demand beside spot."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from paceline.exporters._arrangement import Arrangement, arrange
from paceline.exporters._bar_charts import Quantity, draw_bars
from paceline.findings import Measurement, Report
from paceline.present.quantity import Scale, format_brief
from paceline.present.standing import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
