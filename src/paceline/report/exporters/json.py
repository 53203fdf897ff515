"""report.json: every finding with its numbers in SI units, for programs."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from paceline.analysis.findings import Certificate, Measurement, Report, ScalingPoint
from paceline.host.files import write_atomically


def export(report: Report, directory: Path) -> list[Path]:
    return [write_atomically(directory / "report.json", text(report))]


def text(report: Report) -> str:
    """One finding per line: tools for lines (diff, grep) see findings, and it is written by the fast encoder."""
    return "{\n" + ",\n".join(f"{_line(name)}: {_lines(value)}" for name, value in document(report).items()) + "\n}\n"


def _lines(value: object) -> str:
    return "[\n" + ",\n".join(map(_line, value)) + "\n]" if isinstance(value, list) and value else _line(value)


_line = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode


def document(report: Report) -> dict[str, Any]:
    """The whole report as plain values; a number that is not finite is null, as any other that is missing."""
    first = ("schema", "title", "created_at", "paceline_version")
    rest = (name for name in _names(Report) if name not in first)
    return {name: plain(getattr(report, name)) for name in (*first, *rest)}


_LEAVES = frozenset((str, int, bool, NoneType))


def plain(value: object) -> Any:
    if type(value) in _LEAVES:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple | set | frozenset):
        kinds = set(map(type, value))
        # A finite sum has finite terms.
        is_plain = kinds <= _LEAVES or (kinds == {float} and math.isfinite(sum(value)))
        return list(value) if is_plain else [plain(inner) for inner in value]
    if isinstance(value, Measurement):
        return flat(value)
    if isinstance(value, ScalingPoint):
        return _fields(value) | {"efficiency": flat(value.efficiency)}
    if isinstance(value, Certificate):
        return {"run": value.run, "valid": value.valid, "reasons": list(value.reasons)} | _fields(value)
    if dataclasses.is_dataclass(value):
        return _fields(value)
    if isinstance(value, Mapping):
        return {str(key): inner if type(inner) in _LEAVES else plain(inner) for key, inner in value.items()}
    return value if isinstance(value, str | int) else str(value)


def flat(m: Measurement) -> dict[str, Any]:
    """One level: axes beside the numbers; on a name clash the measurement's own field wins."""
    own = _fields(m)
    axes: dict[str, Any] = own.pop("axes")
    return {"metric": own["metric"]} | axes | own


def _fields(value: Any) -> dict[str, Any]:
    fields = {name: getattr(value, name) for name in _names(value.__class__)}
    # Most fields need no call.
    return {name: inner if type(inner) in _LEAVES else plain(inner) for name, inner in fields.items()}


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind) if field.metadata.get("exported", True))
