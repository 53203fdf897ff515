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

from paceline.analysis.findings import Certificate, Measurement, Report
from paceline.host.files import write_atomically


def export(report: Report, directory: Path) -> list[Path]:
    return [write_atomically(directory / "report.json", text(report))]


def text(report: Report) -> str:
    """One finding per line: tools for lines (diff, grep) see findings, and it is written by the fast encoder."""
    fields = (f"{_line(name)}: {_lines(getattr(report, name))}" for name in _order())
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _lines(value: object) -> str:
    if isinstance(value, list | tuple) and value:
        return "[\n" + ",\n".join(map(_line, value)) + "\n]"
    return _line(value)


def _line(value: object) -> str:
    try:
        return _encode(value)
    except (ValueError, TypeError):
        # A number that is not finite, or a key that JSON does not have.
        return _encode(plain(value))


def document(report: Report) -> dict[str, Any]:
    """The whole report as plain values; a number that is not finite is null, as any other that is missing."""
    return {name: plain(getattr(report, name)) for name in _order()}


def _order() -> list[str]:
    return list(dict.fromkeys(("schema", "title", "created_at", "paceline_version", *_names(Report))))


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
    if isinstance(value, str | int):
        return value
    if type(value) is dict and all(type(key) is str for key in value):
        # Most values need no call.
        return {key: inner if type(inner) in _LEAVES else plain(inner) for key, inner in value.items()}
    return plain(_opened(value))


def _opened(value: Any) -> Any:
    """What JSON has for a value that it does not have, one level of it: the members of a finding, for example."""
    if isinstance(value, Measurement):
        # One level: axes beside the numbers; on a name clash the measurement's own field wins.
        own = _members(value)
        axes: Mapping[str, Any] = own.pop("axes")
        return {"metric": own["metric"], **axes, **own}
    if isinstance(value, Certificate):
        return {"run": value.run, "valid": value.valid, "reasons": value.reasons} | _members(value)
    if dataclasses.is_dataclass(value):
        return _members(value)
    if isinstance(value, Mapping):
        return {str(key): inner for key, inner in value.items()}
    return list(value) if isinstance(value, set | frozenset) else str(value)


def _members(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in _names(value.__class__)}


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind) if field.metadata.get("exported", True))


# Not `plain` first, which copies every value.
_encode = json.JSONEncoder(allow_nan=False, ensure_ascii=False, default=_opened).encode
