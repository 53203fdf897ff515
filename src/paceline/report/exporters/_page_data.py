"""The data of the page's script: charts, the axes to filter by, and the value of each cell on them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.analysis.findings import Report
from paceline.analysis.findings.cell_axes import axis_text
from paceline.errors import Scalar
from paceline.report.charts import Chart, Point

DIGITS = 6  # far beyond what an axis shows


def text(report: Report, charts: Sequence[Chart]) -> str:
    """JSON without `<`, so that it cannot end its element."""
    words = Words()
    numbers = {run.run: i for i, run in enumerate(report.runs)}
    drawn = [
        _fields(chart)
        | {
            "points": [_point(point, words, numbers) for point in chart.points],
            "series": list(map(_fields, chart.series)),
        }
        for chart in charts
    ]
    # Only axes that vary; of those that divide the cells alike only the first.
    cells = {run.cell: run for run in report.runs if not run.is_reference}
    axes, seen = [], set[tuple[int, ...]]()
    for name in dict.fromkeys(name for run in cells.values() for name in run.axes):
        # Numbers by size, then texts, missing values last.
        values = sorted({run.axes.get(name) for run in cells.values()}, key=_order)
        indexes = tuple(values.index(run.axes.get(name)) for run in cells.values())
        if len(values) > 1 and indexes not in seen:
            seen.add(indexes)
            axes.append((name, values, indexes))
    device = next((run.axes.get("device") for run in cells.values()), None)
    value = {
        "charts": drawn,
        "runs": list(numbers),
        "axes": [
            {"name": name.replace("_", " "), "values": [_value_text(name, value, device) for value in values]}
            for name, values, _ in axes
        ],
        "cells": {cell: [indexes[i] for _, _, indexes in axes] for i, cell in enumerate(cells)},
        "words": list(words.numbers),
    }
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _order(value: Scalar) -> tuple[int, float, str]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return 0, value, ""
    return (2, 0.0, "") if value is None else (1, 0.0, str(value))


def _value_text(name: str, value: Scalar, device: Scalar) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "on" if value else "off"
    return axis_text(name, {name: value, "device": device}) if name == "world_size" else str(value)


class Words:
    """Texts by number: points of hundreds of cells share most of theirs, so each is written once."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


def _point(point: Point, words: Words, numbers: Mapping[str, int]) -> dict[str, Any]:
    """Texts and runs as numbers; detail line by line."""
    fields = _fields(point)
    fields |= {name: words.number(fields[name]) for name in ("label", "group", "series") if name in fields}
    fields["cells"] = [words.number(cell) for cell in point.cells]
    if point.detail:
        fields["detail"] = [words.number(line) for line in point.detail.split("\n")]
    if point.runs:
        fields["runs"] = [numbers[run] for run in point.runs if run in numbers]
    return fields


def _fields(value: Any) -> dict[str, Any]:
    """Fields that differ from their defaults, which the script knows."""
    found = {field.name: (getattr(value, field.name), field.default) for field in dataclasses.fields(value)}
    return {name: _plain(inner) for name, (inner, default) in found.items() if inner != default}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _fields(value)
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
