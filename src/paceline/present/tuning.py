"""Cells that fine-tune: what learns, and rates by sample, by token that is no padding, and by learned token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.findings import Measurement, Report
from paceline.present.quantity import MISSING, Scale, format_parts, scale_of
from paceline.present.standing import THROUGHPUT, describe, varying_axes
from paceline.present.tables import Cell, Column, Table

SETTINGS = ("method", "rank", "targets", "optimizer")
# Metric, heading, and how soon the column gives way where room is short.
NUMBERS = (
    (THROUGHPUT, "tokens/s", 0),
    ("label_tokens_per_s", "label tokens/s", 1),
    ("samples_per_s", "samples/s", 2),
    ("padding_ratio", "padding", 1),
    ("packing_efficiency_ratio", "packing", 3),
)
COUNTED = "Tokens are those that are no padding, label tokens those that are learned, samples documents."
DIFFERENT_SAMPLES = (
    "These cells read samples of different lengths or data: samples per second are not comparable between them, tokens "
    "per second are."
)


def tables(report: Report) -> tuple[Table, ...]:
    """One row per cell that fine-tunes, by name; empty where none does."""
    found: dict[str, dict[str, Measurement]] = {}
    for m in report.measurements:
        if m.axes.get("method") is not None:
            found.setdefault(m.cell, {})[m.metric] = m
    tuned = {cell: known for cell, known in found.items() if THROUGHPUT in known}
    return (_table(report, tuned),) if tuned else ()


def _table(report: Report, tuned: Mapping[str, Mapping[str, Measurement]]) -> Table:
    settings = [name for name in SETTINGS if any(_axis(known, name) != MISSING for known in tuned.values())]
    numbers = [n for n in NUMBERS if any(_value(known, n[0]) is not None for known in tuned.values())]
    scales = {
        metric: scale_of(next(k[metric].unit for k in tuned.values() if metric in k), metric, _values(tuned, metric))
        for metric, _, _ in numbers
    }
    named = [name for name in varying_axes(report) if name not in SETTINGS]
    labelled = sorted((describe(known[THROUGHPUT].axes, named), cell) for cell, known in tuned.items())
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
    notes = (COUNTED, *((DIFFERENT_SAMPLES,) if _samples_differ(tuned) else ()))
    return Table("Fine-tuning", columns, rows, notes, tuple((cell,) for _, cell in labelled))


def _heading(words: str, unit: str) -> str:
    return words if not unit or words.endswith(unit) else f"{words}, {unit}"


def _axis(known: Mapping[str, Measurement], name: str) -> str:
    value = known[THROUGHPUT].axes.get(name)
    return MISSING if value is None else str(value)


def _value(known: Mapping[str, Measurement], metric: str) -> float | None:
    return known[metric].value if metric in known else None


def _values(tuned: Mapping[str, Mapping[str, Measurement]], metric: str) -> Sequence[float | None]:
    return [_value(known, metric) for known in tuned.values()]


def _shown(known: Mapping[str, Measurement], metric: str, scale: Scale) -> tuple[str, str]:
    m = known.get(metric)
    if m is None or m.value is None:
        return MISSING, ""
    value, interval = format_parts(m.value, m.low, m.high, scale)
    # What was counted has no spread worth its room.
    return value, interval if metric == THROUGHPUT else ""


def _samples_differ(tuned: Mapping[str, Mapping[str, Measurement]]) -> bool:
    return (
        len({(k[THROUGHPUT].axes.get("sequence_length"), k[THROUGHPUT].axes.get("data")) for k in tuned.values()}) > 1
    )
