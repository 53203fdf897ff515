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
# As the spec of a run names them. Those of other workloads follow by name.
AXES = (
    *("workload", "strategy", "model", "launcher", "device", "nodes", "world_size", "precision", "reduce_dtype"),
    *("sequence_length", "micro_batch", "accumulation", "global_batch", "checkpointing", "compile", "bucket_mb"),
    *("data", "method", "rank", "targets", "optimizer", "seed", "steps"),
)
# A spreadsheet runs a cell that begins so as a formula (OWASP, CSV injection).
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def export(report: Report, directory: Path) -> list[Path]:
    """cells.csv only if something was trained, collectives.csv with a sweep, effects.csv with a design."""
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
    rows: list[list[str]] = []
    known: Mapping[str, Scalar] | None = None
    for m, is_believed in found:
        if m.axes is not known:
            # Measurements of one cell follow each other and share their axes and runs.
            known, of_axes = m.axes, _texts(map(m.axes.get, axes))
        own: dict[str, Scalar] = {name: getattr(m, name) for name in OWN if name in Measurement.__dataclass_fields__}
        own |= {"runs": " ".join(m.runs), "certified": _is_certified(m, trusted)}
        own["believed"] = is_believed if "scenario" in m.axes else None
        rows.append(of_axes + _texts(map(own.__getitem__, OWN)))
    return _table([*axes, *OWN], rows)


def cells_text(report: Report) -> str:
    """A trained cell per row; every metric has three columns: `name [unit]`, `name_low [unit]`, `name_high [unit]`.

    It has them for each unit, because scripts may count tokens or samples.
    """
    own_axes = {m.cell: m.axes for m in report.measurements if m.metric == THROUGHPUT}
    found: dict[str, dict[str, Measurement]] = {cell: {} for cell in own_axes}
    columns: dict[tuple[str, str], None] = {}
    for m in report.measurements:
        if m.cell in own_axes:
            # Other axes distinguish measurements of one metric and cell: ` (weak)`, ` (aws-h200, spot)`.
            own = own_axes[m.cell]
            more = ", ".join(str(v) for name, v in m.axes.items() if name not in own and v is not None)
            name = f"{m.metric} ({more})" if more else m.metric
            found[m.cell][name] = m
            columns[name, m.unit] = None
    axes = _ordered({name for known in own_axes.values() for name in known} - {"cell", "certified"})
    trusted = trusted_runs(report)
    heading = [f"{name}{bound} [{unit}]" for name, unit in columns for bound in ("", "_low", "_high")]
    rows = []
    for cell, by_name in found.items():
        numbers: list[Scalar] = []
        for name, unit in columns:
            known = by_name.get(name)
            is_given = known is not None and known.unit == unit
            numbers += [known.value, known.low, known.high] if known and is_given else [None, None, None]
        is_certified = _is_certified(by_name[THROUGHPUT], trusted)
        rows.append(_texts([*map(own_axes[cell].get, axes), cell, is_certified, *numbers]))
    return _table([*axes, "cell", "certified", *heading], rows)


def rows_text(report: Report) -> str:
    """Every row of a sweep: the axes of the run first, then a column per field."""
    fields = [f.name for f in dataclasses.fields(CollectiveRow) if f.name != "axes"]
    axes = _ordered({name for row in report.collectives for name in row.axes} - set(fields))
    rows = (_texts([*map(row.axes.get, axes), *(getattr(row, name) for name in fields)]) for row in report.collectives)
    return _table([*axes, *fields], rows)


def effects_text(report: Report) -> str:
    """Effects by rank; several aliases are separated by semicolons, cells and runs by spaces."""
    own = [f.name for f in dataclasses.fields(Response)]
    rows = (
        _texts(
            [
                *(outcome.kind, outcome.title, effect.kind, effect.name, effect.pairs, "; ".join(effect.aliases)),
                *(getattr(response, name) for name in own),
                " ".join(effect.cells),
                " ".join(effect.runs),
            ]
        )
        for outcome in report.effects
        for effect in outcome.effects
        for response in effect.responses
    )
    return _table(["design", "title", "kind", "effect", "pairs", "aliases", *own, "cells", "runs"], rows)


def _ordered(names: set[str]) -> list[str]:
    return [*(name for name in AXES if name in names), *sorted(names - set(AXES))]


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\r\n")
    writer.writerow(_texts(heading))
    writer.writerows(rows)
    return lines.getvalue()


def _is_certified(m: Measurement, trusted: frozenset[str]) -> bool:
    return bool(m.runs) and trusted.issuperset(m.runs)


def _texts(values: Iterable[Scalar]) -> list[str]:
    return list(map(_text, values))


def _text(value: Scalar) -> str:
    """A text that a spreadsheet would run gets an apostrophe before it, which spreadsheets show as text."""
    if isinstance(value, str):
        return f"'{value}" if value.startswith(FORMULA_STARTS) else value
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)
