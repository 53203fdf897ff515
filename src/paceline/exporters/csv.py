"""metrics.csv: one row per cell and metric in SI units, for spreadsheets and data frames."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

from paceline.exporters import write_atomically
from paceline.findings import Measurement, Report
from paceline.present.standing import trusted_runs
from paceline.spec import Scalar

OWN = ("metric", "unit", "value", "low", "high", "n", "launches", "better", "certified", "cell", "runs", "note")


def export(report: Report, directory: Path) -> list[Path]:
    return [write_atomically(directory / "metrics.csv", text(report))]


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


def _own(m: Measurement, name: str, certified: bool) -> str:
    if name == "certified":
        return _text(certified)
    return " ".join(m.runs) if name == "runs" else _text(getattr(m, name))


def _text(value: Scalar) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)
