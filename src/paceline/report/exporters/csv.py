"""metrics.csv: one row per cell and metric; cells.csv: one row per cell; collectives.csv: every row of a sweep.

effects.csv: one row per effect of a design and metric.
RFC 4180, UTF-8, SI units, empty is missing. Rows and columns keep their order from report to report.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from paceline.analysis.findings import CollectiveRow, Measurement, Report, Response
from paceline.errors import Scalar
from paceline.host.files import write_atomically
from paceline.report.text.cells import THROUGHPUT, trusted_runs

OWN = (
    *("metric", "unit", "value", "low", "high", "n", "launches", "better", "certified", "cell", "runs", "note"),
    "believed",
)
# As a run's spec names them. Those of other workloads follow by name, whatever order they were met in.
AXES = (
    *("workload", "strategy", "model", "launcher", "device", "nodes", "world_size", "precision", "reduce_dtype"),
    *("sequence_length", "micro_batch", "accumulation", "global_batch", "checkpointing", "compile", "bucket_mb"),
    *("data", "method", "rank", "targets", "optimizer", "seed", "steps"),
)
# A spreadsheet runs a cell that begins so as a formula (OWASP, CSV injection).
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def export(report: Report, directory: Path) -> list[Path]:
    """cells.csv only if something was trained, collectives.csv where there is a sweep, effects.csv with a design."""
    files = {"metrics.csv": text(report)}
    if any(m.metric == THROUGHPUT for m in report.measurements):
        files["cells.csv"] = cells_text(report)
    if report.collectives:
        files["collectives.csv"] = rows_text(report)
    if report.effects:
        files["effects.csv"] = effects_text(report)
    return [write_atomically(directory / name, content) for name, content in files.items()]


def text(report: Report) -> str:
    """Axes first, then the measurement in the unit beside it; `certified` says whether the row may be ranked.
    `believed`, for served loads only, says whether the row may be compared."""
    found = [*((m, True) for m in report.measurements), *((m, False) for m in report.doubted)]
    axes = _ordered({name for m, _ in found for name in m.axes} - set(OWN))
    trusted = trusted_runs(report)
    rows = (
        [*(m.axes.get(name) for name in axes), *(_own(m, name, trusted, is_believed) for name in OWN)]
        for m, is_believed in found
    )
    return _table([*axes, *OWN], rows)


def cells_text(report: Report) -> str:
    """A trained cell per row; every metric has three columns: `name [unit]`, `name_low [unit]`, `name_high [unit]`."""
    own_axes = {m.cell: m.axes for m in report.measurements if m.metric == THROUGHPUT}
    found: dict[str, dict[str, Measurement]] = {cell: {} for cell in own_axes}
    columns: dict[str, str] = {}
    for m in report.measurements:
        if m.cell in own_axes:
            name = m.metric + _variant(m, own_axes[m.cell])
            found[m.cell][name] = m
            columns.setdefault(name, m.unit)
    axes = _ordered({name for known in own_axes.values() for name in known} - {"cell", "certified"})
    trusted = trusted_runs(report)
    heading = [f"{name}{bound} [{unit}]" for name, unit in columns.items() for bound in ("", "_low", "_high")]
    rows = (_cell_row(cell, own_axes[cell], axes, found[cell], columns, trusted) for cell in found)
    return _table([*axes, "cell", "certified", *heading], rows)


def _variant(m: Measurement, own: Mapping[str, Scalar]) -> str:
    """Distinguishes measurements of one metric and cell: ` (weak)`, ` (aws-h200, spot)`."""
    more = [str(value) for name, value in m.axes.items() if name not in own and value is not None]
    return f" ({', '.join(more)})" if more else ""


def _cell_row(
    cell: str,
    own: Mapping[str, Scalar],
    axes: Sequence[str],
    found: Mapping[str, Measurement],
    columns: Iterable[str],
    trusted: frozenset[str],
) -> list[Scalar]:
    numbers: list[Scalar] = []
    for name in columns:
        m = found.get(name)
        numbers += [m.value, m.low, m.high] if m else [None, None, None]
    return [*(own.get(name) for name in axes), cell, _is_certified(found[THROUGHPUT], trusted), *numbers]


def rows_text(report: Report) -> str:
    """As the findings have them: a column per field, the axes of the run first."""
    fields = [f.name for f in dataclasses.fields(CollectiveRow) if f.name != "axes"]
    axes = _ordered({name for row in report.collectives for name in row.axes} - set(fields))
    rows = (
        [*(row.axes.get(name) for name in axes), *(getattr(row, name) for name in fields)] for row in report.collectives
    )
    return _table([*axes, *fields], rows)


def effects_text(report: Report) -> str:
    """In the order of their rank; several aliases, cells or runs are parted by semicolons or spaces."""
    own = [f.name for f in dataclasses.fields(Response)]
    rows = (
        [
            *(outcome.kind, outcome.title, effect.kind, effect.name, effect.pairs, "; ".join(effect.aliases)),
            *(getattr(response, name) for name in own),
            " ".join(effect.cells),
            " ".join(effect.runs),
        ]
        for outcome in report.effects
        for effect in outcome.effects
        for response in effect.responses
    )
    return _table(["design", "title", "kind", "effect", "pairs", "aliases", *own, "cells", "runs"], rows)


def _ordered(names: set[str]) -> list[str]:
    return [*(name for name in AXES if name in names), *sorted(names - set(AXES))]


def _table(heading: Sequence[str], rows: Iterable[Sequence[Scalar]]) -> str:
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\r\n")
    writer.writerow(map(_text, heading))
    writer.writerows(map(_text, row) for row in rows)
    return lines.getvalue()


def _own(m: Measurement, name: str, trusted: frozenset[str], is_believed: bool) -> Scalar:
    if name == "certified":
        return _is_certified(m, trusted)
    if name == "believed":
        return is_believed if "scenario" in m.axes else None
    value: Scalar = " ".join(m.runs) if name == "runs" else getattr(m, name)
    return value


def _is_certified(m: Measurement, trusted: frozenset[str]) -> bool:
    return bool(m.runs) and trusted.issuperset(m.runs)


def _text(value: Scalar) -> str:
    """A text that a spreadsheet would run gets an apostrophe before it, which spreadsheets show as text."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if isinstance(value, str):
        return f"'{value}" if value.startswith(FORMULA_STARTS) else value
    return str(value).lower() if isinstance(value, bool) else str(value)
