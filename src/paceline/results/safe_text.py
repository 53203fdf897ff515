"""Text of foreign files made safe to print: no control character may move the cursor, set a colour or turn a line.

Records and specs pass through here when they are read, so no table, page or plot needs a rule of its own.
"""

from __future__ import annotations

import json
import re
from typing import Any

MARK = "\ufffd"
# C0 but tab and line feed, DEL, C1, the characters that change the direction of what follows, and half characters.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# Paceline writes nothing a tenth as deep; a limit for readers that recurse.
DEEPEST = 100


def text(given: str) -> str:
    """The text with every control character replaced by U+FFFD."""
    return _CONTROL.sub(MARK, given)


def document(parsed: Any, source: str) -> Any:
    """A parsed JSON document with safe texts; ValueError if it is nested too deeply."""
    shallow = source.count("[") + source.count("{") < DEEPEST
    return parsed if shallow and is_plain(source) else value(parsed)


def fast_loads(source: str) -> Any:
    """As `json.loads`, in half the time; worth its import where many documents are read."""
    from pydantic_core import from_json

    try:
        return from_json(source)
    except ValueError:
        return json.loads(source)  # accepts more, such as NaN, and says what is wrong


def is_plain(source: str) -> bool:
    """Whether the JSON certainly has no control character: it is ASCII without escapes. True for most files."""
    return source.isascii() and "\\" not in source and "\x7f" not in source


def value(parsed: Any, depth: int = DEEPEST) -> Any:
    """The same JSON value with safe texts and keys."""
    if isinstance(parsed, str):
        return text(parsed)
    if not isinstance(parsed, dict | list):
        return parsed
    if not depth:
        raise ValueError(f"nested deeper than {DEEPEST} levels")
    if isinstance(parsed, list):
        return [value(inner, depth - 1) for inner in parsed]
    return {text(name): value(inner, depth - 1) for name, inner in parsed.items()}
