"""Cells that fine-tune: what is trained, and the rates of non-padding tokens, samples and learned tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from paceline.analysis.findings import SHARED_GPU, Measurement, Report
from paceline.analysis.findings.cell_axes import axis_text, distinguishing_axes
from paceline.report.tables.table import Cell, Column, Filled, Table, filled, numeric
from paceline.report.text.cells import THROUGHPUT, cell_name, ranked_cells
from paceline.wording import MISSING, Scale, format_parts, scale_of

SETTINGS = ("method", "rank", "targets", "optimizer")
# Values that all rows share are listed once below the table.
SHARED = (*SETTINGS, "model", "world_size")
# Metric, heading and column priority.
NUMBERS = (
    (THROUGHPUT, "tokens/s", 0),
    ("samples_per_s", "samples/s", 0),
    ("padding_ratio", "padding", 1),
    ("label_tokens_per_s", "label tokens/s", 2),
    ("packing_efficiency_ratio", "packing", 3),
)
COUNTED = "Tokens exclude padding, label tokens are those that are learned, samples are documents."
DIFFERENT_SAMPLES = (
    "These cells read samples of different lengths or data: samples per second are not comparable between them, tokens "
    "per second are."
)
MOST_LISTED = 4

Known = Mapping[str, Measurement]


def tables(report: Report) -> tuple[Table, ...]:
    """One row per cell that fine-tunes, by name; empty if none does."""
    found: dict[str, dict[str, Measurement]] = {}
    for m in report.measurements:
        if m.axes.get("method") is not None:
            found.setdefault(m.cell, {})[m.metric] = m
    tuned = {cell: known for cell, known in found.items() if THROUGHPUT in known}
    return (_table(report, tuned),) if tuned else ()


def rates(report: Report) -> dict[str, str]:
    """`9,548 tokens/s` of every certified cell that fine-tunes, on GPUs of its own."""
    shared = {run.cell for run in report.runs if SHARED_GPU in run.health}
    tuned = {
        cell: known
        for cell, known in ranked_cells(report).items()
        if known[THROUGHPUT].axes.get("method") and cell not in shared
    }
    scales = {cell: _scale_of_all([known], THROUGHPUT) for cell, known in tuned.items()}
    return {cell: f"{_shown(known, THROUGHPUT, scales[cell])[0]} tokens/s" for cell, known in tuned.items()}


def sentence(report: Report) -> str:
    """`Fine-tuning mistral-7b by qlora: ddp on 1 GPU 9,548 tokens/s.`, in the order of rates; nothing is compared."""
    by_cell, cells = rates(report), ranked_cells(report)
    order = sorted(by_cell, key=lambda cell: -(cells[cell][THROUGHPUT].value or 0.0))
    axes = [cells[cell][THROUGHPUT].axes for cell in order]
    if not order:
        return ""
    what = " and ".join(dict.fromkeys(f"{a['model']} by {a['method']}" for a in axes))
    named = [name for name in distinguishing_axes(axes) if name not in ("model", "method", "world_size")]
    rows = [
        f"{cell_name(report, cell, a, named)} on {axis_text('world_size', a)} {by_cell[cell]}"
        for cell, a in zip(order, axes, strict=True)
    ]
    rest = [f"and {len(rows) - MOST_LISTED} more"] if len(rows) > MOST_LISTED else []
    return f"Fine-tuning {what}: {'; '.join((*rows[:MOST_LISTED], *rest))}."


def _table(report: Report, tuned: Mapping[str, Known]) -> Table:
    axes = {cell: known[THROUGHPUT].axes for cell, known in tuned.items()}
    same = [name for name in SHARED if len({repr(a.get(name)) for a in axes.values()}) == 1]
    planned = all(any(cell in outcome.names for outcome in report.effects) for cell in tuned)
    # In a design, the name of a cell already says how it differs from the baseline.
    settings = [] if planned else [name for name in SETTINGS if name not in same]
    named = [name for name in distinguishing_axes(list(axes.values())) if name not in {*SETTINGS, *same}]
    names = {cell: cell_name(report, cell, a, named) for cell, a in axes.items()}

    def setting(name: str) -> Filled[str]:
        def text(cell: str) -> str:
            value = axes[cell].get(name)
            return MISSING if value is None else str(value)

        return Column(name, priority=4 if name == "targets" else 0), text

    def number(metric: str, words: str, priority: int) -> Filled[str]:
        scale = _scale_of_all(tuned.values(), metric)
        heading = words if not scale.unit or words.endswith(scale.unit) else f"{words}, {scale.unit}"
        column = numeric(heading, priority)
        return column, lambda cell: Cell(*_shown(tuned[cell], metric, scale))

    measured = {metric for known in tuned.values() for metric, m in known.items() if m.value is not None}
    columns: tuple[Filled[str], ...] = (
        (Column("what", prose=True), lambda cell: names[cell]),
        *map(setting, settings),
        *(number(*each) for each in NUMBERS if each[0] in measured),
    )
    first = next(iter(axes.values()))
    notes = [f"All rows: {', '.join(axis_text(n, first) for n in same if first.get(n) is not None)}.", COUNTED]
    if len({(a.get("sequence_length"), a.get("data")) for a in axes.values()}) > 1:
        notes.append(DIFFERENT_SAMPLES)
    ordered = sorted(tuned, key=lambda cell: (names[cell], cell))
    table = filled("Rates of fine-tuning", ordered, columns, notes, lambda cell: (cell,))
    assert table is not None
    return table


def _scale_of_all(tuned: Iterable[Known], metric: str) -> Scale:
    found = [known[metric] for known in tuned if metric in known]
    values: Sequence[float | None] = [m.value for m in found]
    return scale_of(found[0].unit, metric, values)


def _shown(known: Known, metric: str, scale: Scale) -> tuple[str, str]:
    m = known.get(metric)
    if m is None or m.value is None:
        return MISSING, ""
    value, interval = format_parts(m.value, m.low, m.high, scale)
    # Counted values hardly vary, so their intervals are not shown.
    return value, interval if metric == THROUGHPUT else ""
