"""Charts of memory: components stacked up to the peak, predicted beside measured, and the frontier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.analysis.findings import FrontierPoint, MemoryRow, Report
from paceline.report.exporters._matplotlib.canvas import INK, PALETTE, QUIET, End, brief, canvas, key, name_ends, say
from paceline.report.tables.memory import labels, scale
from paceline.results.memory_components import COMPONENTS
from paceline.wording import Scale, format_number, format_parts, short_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAR, GAP, PITCH = 0.34, 0.04, 1.0
MOST_ROWS = 40
WHAT = {"communication": "standing buffers", "other": "temporaries, gathered weights, workspaces"}
# A device much larger than every bar would leave nothing to see of them.
FAR = 2.5
# Longer names than this leave no room for bars; then the batch is written as numbers alone.
LONGEST_NAME = 44


def rows(report: Report) -> list[MemoryRow]:
    """Cells with a measured peak, in the order of the table."""
    known = [row for row in report.memory if row.measured.get("peak")]
    names = labels(known)
    return sorted(known, key=lambda row: names[row.cell])[:MOST_ROWS]


def draw_components(report: Report, rows: Sequence[MemoryRow]) -> Figure:
    """Two bars per cell: measured solid, predicted hatched. A stack ends at its peak."""
    unit, names = scale(rows), labels(rows)
    subtitle = "solid: measured; hatched: predicted from the shape alone"
    figure, (axes,) = canvas("Memory by component", subtitle, 2.0 + 0.46 * len(rows))
    for i, row in enumerate(rows):
        y = -i * PITCH
        ends = [_stack(axes, y + (BAR + GAP) / 2, row.measured, unit, hatched=False)]
        if row.predicted.get("peak"):
            ends.append(_stack(axes, y - (BAR + GAP) / 2, row.predicted, unit, hatched=True))
        say(axes, _numbers(row, unit), (max(ends), y), (7, 0), fontsize=9)
    axes.set_yticks([-i * PITCH for i in range(len(rows))], [brief(_name(row, names[row.cell])) for row in rows])
    axes.set_ylim(-(len(rows) - 1) * PITCH - 0.6, 0.6)
    _reach(axes, rows, unit)
    axes.grid(axis="x")
    axes.set_xlabel(unit.unit)
    shown = [name for name in COMPONENTS if any(row.measured.get(name) for row in rows)]
    key(figure, [(WHAT.get(name, name), _colours()[name]) for name in shown])
    return figure


def _name(row: MemoryRow, name: str) -> str:
    """The table's name, or `ddp, llama-1b, 4 x 2048 x 2, full` (micro batch, sequence, accumulation, checkpointing)."""
    if len(name) <= LONGEST_NAME:
        return name
    axes = row.axes
    batch = [
        axes["micro_batch"],
        axes["sequence_length"],
        *([axes["accumulation"]] if axes["accumulation"] != 1 else []),
    ]
    kept = [] if axes["checkpointing"] == "none" else [str(axes["checkpointing"])]
    return ", ".join([str(axes["strategy"]), str(axes["model"]), " x ".join(map(str, batch)), *kept])


def _stack(axes: Axes, y: float, sizes: Mapping[str, int | None], unit: Scale, *, hatched: bool) -> float:
    """One bar; components are cut where the peak is reached, because not all are there at one moment."""
    peak, left = sizes.get("peak") or 0, 0
    for name, colour in _colours().items():
        width = min(sizes.get(name) or 0, peak - left)
        how: dict[str, Any] = {"hatch": "/////", "alpha": 0.55} if hatched else {}
        axes.barh(
            y, width * unit.factor, BAR, left * unit.factor, color=colour, edgecolor="#ffffff", linewidth=0, **how
        )
        left += width
    return peak * unit.factor


def _colours() -> dict[str, str]:
    return dict(zip(COMPONENTS, (*PALETTE[:5], PALETTE[7]), strict=True))


def _numbers(row: MemoryRow, unit: Scale) -> str:
    measured = format_parts(row.measured.get("peak"), None, None, unit)[0]
    if row.error_ratio is None:
        return measured
    error = format_number(100 * row.error_ratio, 1)
    return f"{measured}, predicted {'+' if row.error_ratio > 0 and error != '0.0' else ''}{error} %"


def _reach(axes: Axes, rows: Sequence[MemoryRow], unit: Scale) -> None:
    """Room for the numbers, and the device's capacity as a line where it is near enough to matter."""
    top = max(max(row.measured.get("peak") or 0, row.predicted.get("peak") or 0) for row in rows)
    capacity = min((row.capacity_bytes for row in rows if row.capacity_bytes), default=None)
    near = capacity is not None and capacity < FAR * top
    axes.set_xlim(0, max(top * 1.42, capacity * 1.08 if capacity and near else 0) * unit.factor)
    if capacity is None:
        return
    text = f"device: {format_number(capacity * unit.factor, 1)} {unit.unit}"
    if near:
        axes.axvline(capacity * unit.factor, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
        floor = axes.get_ylim()[0] - 0.45  # a strip of its own under the last bar
        axes.set_ylim(bottom=floor)
        say(axes, text, (capacity * unit.factor, floor), (-5, 4), ha="right", va="bottom")
    else:
        say(axes, f"{text}, beyond this axis", (1, 0), (0, -22), "axes fraction", ha="right", color=QUIET)


# --- frontier ------------------------------------------------------------------------------------------------------


def points(report: Report) -> list[FrontierPoint]:
    return [point for point in report.frontier if point.largest_fitting]


def draw_frontier(report: Report, points: Sequence[FrontierPoint]) -> Figure:
    """Largest micro batch over the sequence length, one line per series; both axes double from mark to mark."""
    subtitle = "filled: the largest that ran, proved by a probe; ring: predicted before any probe"
    figure, (axes,) = canvas("Largest micro batch that fits", subtitle, 4.4)
    names = short_names(sorted({point.series for point in points}))
    ends = []
    numbered: set[tuple[float, float]] = set()
    for i, series in enumerate(names):
        colour = PALETTE[min(i, len(PALETTE) - 1)]
        ours = sorted((p for p in points if p.series == series), key=lambda p: p.sequence_length)
        ends.append(End(_line(axes, ours, colour, numbered), names[series], colour))
    lengths = sorted({p.sequence_length for p in points})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axes.minorticks_off()
    axes.set_xlim(lengths[0] / 1.15, lengths[-1] * 1.15)
    low, high = axes.get_ylim()
    axes.set_ylim(max(low / 1.3, 0.5), high * 1.3)
    axes.grid(axis="y")
    axes.set(xlabel="sequence length, tokens", ylabel="micro batch, sequences")
    name_ends(axes, ends)
    return figure


def _line(axes: Axes, points: Sequence[FrontierPoint], colour: str, numbered: set[tuple[float, float]]) -> float:
    """Draws one series, with its numbers where no other series' number stands; returns the height where it ends."""
    x, y = [p.sequence_length for p in points], [p.largest_fitting or 0 for p in points]
    axes.plot(x, y, color=colour, linewidth=1.8, marker="o", markersize=5.5)
    told = [(p.sequence_length, p.predicted) for p in points if p.predicted]
    if told:
        axes.plot(*zip(*told, strict=True), linestyle="none", marker="o", markersize=10, mfc="none", mec=colour)
    for at in zip(x, y, strict=True):
        if all(at[0] != other[0] or not 0.7 < at[1] / other[1] < 1.4 for other in numbered):
            numbered.add(at)
            say(axes, str(at[1]), at, (0, 9), ha="center", va="bottom", color=colour, fontsize=9)
    return float(y[-1])
