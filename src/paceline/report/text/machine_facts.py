"""What a machine is, as lines: nested facts by dotted name, quantities in the units people use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.wording import MISSING, format_quantity, format_si

_UNITS = {"flops": "FLOP/s", "bytes_per_s": "B/s", "_hz": "Hz"}


def flatten(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Dotted names and readable values; devices that differ only in their index are listed once."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flatten(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping | list | tuple) for item in value):
        alike = len(value) > 1 and all(_but_index(item) == _but_index(value[0]) for item in value)
        for i, inner in enumerate(value[:1] if alike else value):
            shown = _but_index(inner) if alike else inner
            yield from flatten(f"{name} (each of {len(value)})" if alike else f"{name}[{i}]", shown)
    elif isinstance(value, list | tuple):
        yield name, ", ".join(map(str, value)) or MISSING
    else:
        yield name, _fact_text(name, value)


def _but_index(item: object) -> object:
    return {key: value for key, value in item.items() if key != "index"} if isinstance(item, Mapping) else item


def _fact_text(name: str, value: Any) -> str:
    if value is None or value == "":
        return MISSING
    if isinstance(value, bool) or not isinstance(value, int | float):
        return {True: "yes", False: "no"}.get(value, str(value))
    if name.endswith("_bytes"):
        return format_quantity(value, None, None, "bytes")
    unit = next((unit for mark, unit in _UNITS.items() if mark in name), None)
    return format_si(value, unit) if unit else str(value)
