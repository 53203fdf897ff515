"""The JSON Schema of report.json, from the findings' own types: the two cannot differ.

docs/report.schema.json is a copy for readers without Paceline.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

from paceline.analysis.findings import SCHEMA, Certificate, Measurement, Report

DIALECT = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, Any]
# Floats that are not finite are written as null.
_PLAIN: dict[object, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    bool: {"type": "boolean"},
    float: {"type": ["number", "null"]},
    type(None): {"type": "null"},
    Any: {},
}


def schema() -> Schema:
    """The schema of a report of this version, and of every earlier one with the same `schema` number.

    Later versions add fields without a new number, so unknown ones are allowed; a field that came later has a default
    in its type, so it is not required. A field that is removed or means something else makes a new number.
    """
    named: dict[str, Schema] = {}
    whole = _record(Report, named)
    whole["properties"]["schema"] = {"const": SCHEMA}
    whole["required"] = ["schema", *whole["required"]]
    head = {"$schema": DIALECT, "title": "Paceline report.json", "description": "SI units; null is missing, never 0."}
    return head | whole | {"$defs": dict(sorted(named.items()))}


def _record(kind: type, named: dict[str, Schema]) -> Schema:
    hints = get_type_hints(kind)
    exported = [f for f in dataclasses.fields(kind) if f.metadata.get("exported", True)]
    properties = {f.name: _of(hints[f.name], named) for f in exported}
    if kind is Measurement:  # its axes are fields beside its numbers
        properties.pop("axes")
    if kind is Certificate:
        properties |= {"valid": {"type": "boolean"}, "reasons": {"type": "array", "items": {"type": "string"}}}
    original = [
        f.name
        for f in dataclasses.fields(kind)
        if (f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING) and f.name in properties
    ]
    found: Schema = {"type": "object", "properties": properties, "required": original}
    if kind is Measurement:
        found["additionalProperties"] = {"type": ["string", "number", "boolean", "null"]}
    return found


def _of(kind: Any, named: dict[str, Schema]) -> Schema:
    """The schema of one annotation; an annotation this function does not know is our own mistake."""
    if kind in _PLAIN:
        return dict(_PLAIN[kind])
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if kind.__name__ not in named:
            named[kind.__name__] = {}  # a placeholder that ends the recursion of self-referencing types
            named[kind.__name__] = _record(kind, named)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        parts = [_of(part, named) for part in inner]
        if any(set(part) != {"type"} for part in parts):
            return {"anyOf": parts}
        words = [part["type"] if isinstance(part["type"], list) else [part["type"]] for part in parts]
        return {"type": list(dict.fromkeys(word for several in words for word in several))}
    if origin in (tuple, list, frozenset, set):
        if len(inner) == 2 and inner[1] is not Ellipsis:
            return {"type": "array", "prefixItems": [_of(part, named) for part in inner], "items": False}
        return {"type": "array", "items": _of(inner[0], named)}
    if origin in (Mapping, dict):
        return {"type": "object", "additionalProperties": _of(inner[1], named)}
    if origin is typing.Literal:
        return {"enum": list(inner)}
    raise AssertionError(f"no JSON Schema for {kind!r}")
