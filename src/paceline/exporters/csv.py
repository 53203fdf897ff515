"""metrics.csv: one row per cell and metric in SI units; collectives.csv: every row of a sweep."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from pathlib import Path

from paceline.exporters import write_atomically
from paceline.findings import CollectiveRow, Measurement, Report
from paceline.present.standing import trusted_runs
from paceline.spec import Scalar

OWN = ("metric", "unit", "value", "low", "high", "n", "launches", "better", "certified", "cell", "runs", "note")


def export(report: Report, directory: Path) -> list[Path]:
    """collectives.csv only where there is a sweep."""
    files = {"metrics.csv": text(report)} | ({"collectives.csv": rows_text(report)} if report.collectives else {})
    return [write_atomically(directory / name, content) for name, content in files.items()]


def text(report: Report) -> str:
    """Axes first, then the measurement; empty is missing, and `certified` says whether the row may be ranked."""
    axes = list(dict.fromkeys(name for m in report.measurements for name in m.axes if name not in OWN))
    trusted = trusted_runs(report)
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow([*axes, *OWN])
    for m in report.measurements:
        certified = bool(m.runs) and trusted.issuperset(m.runs)
        writer.writerow([*(_text(m.axes.get(name)) for name in axes), *(_own(m, name, certified) for name in OWN)])
    return lines.getvalue()


def rows_text(report: Report) -> str:
    """As the findings have them: a column per field, the axes of the run first."""
    fields = [f.name for f in dataclasses.fields(CollectiveRow) if f.name != "axes"]
    axes = list(dict.fromkeys(name for row in report.collectives for name in row.axes if name not in fields))
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow([*axes, *fields])
    for row in report.collectives:
        values = (*(row.axes.get(name) for name in axes), *(getattr(row, name) for name in fields))
        writer.writerow(map(_text, values))
    return lines.getvalue()


def _own(m: Measurement, name: str, certified: bool) -> str:
    if name == "certified":
        return _text(certified)
    return " ".join(m.runs) if name == "runs" else _text(getattr(m, name))


def _text(value: Scalar) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)
