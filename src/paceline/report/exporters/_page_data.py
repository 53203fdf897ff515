"""The data of the page's script: charts, the axes to filter by, and the value of each cell on them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.analysis.findings import Report, RunFinding
from paceline.analysis.findings.cell_axes import axis_text
from paceline.errors import Scalar
from paceline.report.charts import Chart, Point

DIGITS = 6  # far beyond what an axis shows


def text(report: Report, charts: Sequence[Chart]) -> str:
    """JSON without `<`, so that it cannot end its element."""
    words = Words()
    numbers = {run.run: i for i, run in enumerate(report.runs)}
    value = {"charts": [_chart(chart, words, numbers) for chart in charts], "runs": list(numbers), **_filters(report)}
    value["words"] = list(words.numbers)
    found = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return found.replace("<", "\\u003c")


class Words:
    """Texts by number: points of hundreds of cells share most of theirs, so each is written once."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


def _chart(chart: Chart, words: Words, numbers: Mapping[str, int]) -> dict[str, Any]:
    points = [_point(point, words, numbers) for point in chart.points]
    return _fields(chart) | {"points": points, "series": list(map(_fields, chart.series))}


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


def _filters(report: Report) -> dict[str, Any]:
    """Only axes that vary, and of those that divide the cells alike only the first."""
    cells = {run.cell: run for run in report.runs if not run.is_reference}
    names = dict.fromkeys(name for run in cells.values() for name in run.axes)
    axes, seen = [], set[tuple[int, ...]]()
    for name in names:
        values = _ordered(run.axes.get(name) for run in cells.values())
        places = tuple(values.index(run.axes.get(name)) for run in cells.values())
        if len(values) > 1 and places not in seen:
            seen.add(places)
            axes.append((name, values, places))
    return {
        "axes": [{"name": name.replace("_", " "), "values": _words(name, values, cells)} for name, values, _ in axes],
        "cells": {cell: [places[i] for _, _, places in axes] for i, cell in enumerate(cells)},
    }


def _ordered(values: Iterable[Scalar]) -> list[Scalar]:
    """Numbers by size, then texts, missing values last."""
    found = set(values)
    number = [v for v in found if isinstance(v, int | float) and not isinstance(v, bool)]
    words = [v for v in found if isinstance(v, str | bool)]
    return [*sorted(number), *sorted(words, key=str), *([None] if None in found else [])]


def _words(name: str, values: Sequence[Scalar], cells: Mapping[str, RunFinding]) -> list[str]:
    device = next(iter(cells.values())).axes.get("device")
    return [_word(name, value, device) for value in values]


def _word(name: str, value: Scalar, device: Scalar) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "on" if value else "off"
    return axis_text(name, {name: value, "device": device}) if name == "world_size" else str(value)
