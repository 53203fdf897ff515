"""A choice as the user writes it, and the one sentence for a value that cannot be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import require

_JSON_SIGNS = frozenset('",[]{}\\')


@dataclass(frozen=True, slots=True)
class Choice:
    """A plugin by name with its options, written `zero:stage=2,overlap=false`."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Choice:
        """`name` or `name:key=value,key=value`; values read as JSON where they are, else as text."""
        name, _, rest = text.partition(":")
        options: dict[str, Any] = {}
        for part in filter(None, _outer_parts(rest)):
            key, equals, value = part.partition("=")
            require(bool(equals and key.strip()), f"option of {name}", part, "key=value")
            options[key.strip()] = _value(value.strip())
        require(bool(name.strip()), "name of a choice", text, "name or name:key=value,...")
        return cls(name.strip(), options)

    def __str__(self) -> str:
        parts = (f"{key}={_text(value)}" for key, value in self.options.items())
        return ":".join(filter(None, (self.name, ",".join(parts))))


def _text(value: object) -> str:
    """As `parse` reads it back: text that would be taken for two options, or for a number, stands in quotes. So does
    text with a sign that opens or closes something in JSON, which would swallow the options behind it."""
    plain = isinstance(value, str) and not _JSON_SIGNS & set(value) and _value(value.strip()) == value
    return str(value) if plain else json.dumps(value, ensure_ascii=False)


def _outer_parts(text: str) -> list[str]:
    """Split at commas, but not at those within a JSON list, object or text."""
    parts, depth, quoted, escaped, begin = [], 0, False, False, 0
    for place, sign in enumerate(text):
        if escaped:
            escaped = False
        elif quoted and sign == "\\":
            escaped = True
        elif sign == '"':
            quoted = not quoted
        elif not quoted:
            depth += (sign in "[{") - (sign in "]}")
            if sign == "," and depth <= 0:
                parts.append(text[begin:place])
                begin = place + 1
    return [*parts, text[begin:]]


def _value(text: str) -> Any:
    """JSON where it is, else text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
