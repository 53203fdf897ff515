"""Cells that fine-tune: what learns, and rates by token that is no padding, by sample, and by learned token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from paceline.analysis.findings import Measurement, Report
from paceline.analysis.findings.cell_axes import axis_text, telling_axes
from paceline.report.tables.table import Cell, Column, Table
from paceline.report.text.cells import THROUGHPUT, cell_name, ranked_cells
from paceline.wording import MISSING, Scale, format_parts, scale_of

SETTINGS = ("method", "rank", "targets", "optimizer")
# Values that all rows share are listed once below the table.
SHARED = (*SETTINGS, "model", "world_size")
# Metric, heading, and how soon the column gives way where room is short.
NUMBERS = (
    (THROUGHPUT, "tokens/s", 0),
    ("samples_per_s", "samples/s", 0),
    ("padding_ratio", "padding", 1),
    ("label_tokens_per_s", "label tokens/s", 2),
    ("packing_efficiency_ratio", "packing", 3),
)
COUNTED = "Tokens are those that are no padding, label tokens those that are learned, samples documents."
DIFFERENT_SAMPLES = (
    "These cells read samples of different lengths or data: samples per second are not comparable between them, tokens "
    "per second are."
)
MOST_TOLD = 4

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
    """`9,548 tokens/s` of every certified cell that fine-tunes."""
    tuned = {cell: known for cell, known in ranked_cells(report).items() if known[THROUGHPUT].axes.get("method")}
    return {cell: f"{_shown(known, THROUGHPUT, _scale(known))[0]} tokens/s" for cell, known in tuned.items()}


def sentence(report: Report) -> str:
    """`Fine-tuning mistral-7b by qlora: ddp on 1 GPU 9,548 tokens/s.`, in the order of rates; nothing is compared."""
    told, cells = rates(report), ranked_cells(report)
    order = sorted(told, key=lambda cell: -(cells[cell][THROUGHPUT].value or 0.0))
    axes = [cells[cell][THROUGHPUT].axes for cell in order]
    if not order:
        return ""
    what = " and ".join(dict.fromkeys(f"{a['model']} by {a['method']}" for a in axes))
    named = [name for name in telling_axes(axes) if name not in ("model", "method", "world_size")]
    rows = [
        f"{cell_name(report, cell, a, named)} on {axis_text('world_size', a)} {told[cell]}"
        for cell, a in zip(order, axes, strict=True)
    ]
    rest = [f"and {len(rows) - MOST_TOLD} more"] if len(rows) > MOST_TOLD else []
    return f"Fine-tuning {what}: {'; '.join((*rows[:MOST_TOLD], *rest))}."


def _table(report: Report, tuned: Mapping[str, Known]) -> Table:
    axes = {cell: known[THROUGHPUT].axes for cell, known in tuned.items()}
    same = [name for name in SHARED if len({repr(a.get(name)) for a in axes.values()}) == 1]
    planned = all(any(cell in outcome.names for outcome in report.effects) for cell in tuned)
    # In a design, the name of a cell already says how it differs from the baseline.
    settings = [] if planned else [name for name in SETTINGS if name not in same]
    named = [name for name in telling_axes(list(axes.values())) if name not in {*SETTINGS, *same}]
    labelled = sorted((cell_name(report, cell, a, named), cell) for cell, a in axes.items())
    numbers = [n for n in NUMBERS if any(_value(known, n[0]) is not None for known in tuned.values())]
    scales = {metric: _scale_of_all(tuned.values(), metric) for metric, _, _ in numbers}
    rows = tuple(
        (
            Cell(label),
            *(Cell(_axis(tuned[cell], name)) for name in settings),
            *(Cell(*_shown(tuned[cell], metric, scales[metric])) for metric, _, _ in numbers),
        )
        for label, cell in labelled
    )
    columns = (
        Column("what", prose=True),
        *(Column(name, priority=4 if name == "targets" else 0) for name in settings),
        *(Column(_heading(words, scales[m].unit), numeric=True, priority=p) for m, words, p in numbers),
    )
    common = ", ".join(axis_text(n, a) for a in [next(iter(axes.values()))] for n in same if a.get(n) is not None)
    notes = (f"All rows: {common}.", COUNTED, *((DIFFERENT_SAMPLES,) if _samples_differ(tuned) else ()))
    return Table("Rates of fine-tuning", columns, rows, notes, tuple((cell,) for _, cell in labelled))


def _heading(words: str, unit: str) -> str:
    return words if not unit or words.endswith(unit) else f"{words}, {unit}"


def _axis(known: Known, name: str) -> str:
    value = known[THROUGHPUT].axes.get(name)
    return MISSING if value is None else str(value)


def _value(known: Known, metric: str) -> float | None:
    return known[metric].value if metric in known else None


def _scale(known: Known) -> Scale:
    return _scale_of_all((known,), THROUGHPUT)


def _scale_of_all(tuned: Iterable[Known], metric: str) -> Scale:
    found = [known[metric] for known in tuned if metric in known]
    values: Sequence[float | None] = [m.value for m in found]
    return scale_of(found[0].unit, metric, values)


def _shown(known: Known, metric: str, scale: Scale) -> tuple[str, str]:
    m = known.get(metric)
    if m is None or m.value is None:
        return MISSING, ""
    value, interval = format_parts(m.value, m.low, m.high, scale)
    # What was counted has no spread worth its room.
    return value, interval if metric == THROUGHPUT else ""


def _samples_differ(tuned: Mapping[str, Known]) -> bool:
    return (
        len({(k[THROUGHPUT].axes.get("sequence_length"), k[THROUGHPUT].axes.get("data")) for k in tuned.values()}) > 1
    )
