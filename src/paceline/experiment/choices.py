"""A choice as the user writes it: a name with options, `zero:stage=2,overlap=false`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import require

_JSON_CHARACTERS = frozenset('",[]{}\\')


@dataclass(frozen=True, slots=True)
class Choice:
    """A plugin by name with its options, written `zero:stage=2,overlap=false`."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Choice:
        """Read `name` or `name:key=value,key=value`; values are JSON, or else text.

        >>> Choice.parse("zero:stage=2")
        Choice(name='zero', options={'stage': 2})
        """
        name, _, rest = text.partition(":")
        options: dict[str, Any] = {}
        for part in filter(None, _outer_parts(rest)):
            key, equals, value = part.partition("=")
            key = key.strip()
            require(bool(equals and key), f"option of {name}", part, "key=value")
            require(key not in options, f"option of {name}", text, f"{key} once")
            options[key] = _value(value.strip())
        require(bool(name.strip()), "name of a choice", text, "name or name:key=value,...")
        return cls(name.strip(), options)

    def __str__(self) -> str:
        parts = (f"{key}={_text(value)}" for key, value in self.options.items())
        return ":".join(filter(None, (self.name, ",".join(parts))))


def _text(value: object) -> str:
    """The value as `parse` reads it back. Text is quoted if it looks like several options, a number or JSON."""
    plain = isinstance(value, str) and not _JSON_CHARACTERS & set(value) and _value(value.strip()) == value
    return str(value) if plain else json.dumps(value, ensure_ascii=False)


def _outer_parts(text: str) -> list[str]:
    """Split at commas, except inside a JSON list, object or string."""
    parts, depth, quoted, escaped, begin = [], 0, False, False, 0
    for position, character in enumerate(text):
        if escaped:
            escaped = False
        elif quoted and character == "\\":
            escaped = True
        elif character == '"':
            quoted = not quoted
        elif not quoted:
            depth += (character in "[{") - (character in "]}")
            if character == "," and depth <= 0:
                parts.append(text[begin:position])
                begin = position + 1
    return [*parts, text[begin:]]


def _value(text: str) -> Any:
    """The parsed JSON, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
