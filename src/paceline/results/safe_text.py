"""Text of a stranger's files made harmless to look at: nothing in it may move a cursor, colour or turn a line around.

Records and specs pass here when they are read, so that no table, page or plot needs a rule of its own.
"""

from __future__ import annotations

import re
from typing import Any

MARK = "\ufffd"
# C0 but tab and line feed, DEL, C1, and the characters that change the direction of what follows.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# Nothing that Paceline writes is nested a tenth as deep; readers that recurse must not be led further.
DEEPEST = 100


def text(given: str) -> str:
    """Every control character is shown as one that stands for what cannot be shown."""
    return _CONTROL.sub(MARK, given)


def document(parsed: Any, source: str) -> Any:
    """A parsed JSON document with harmless texts; ValueError where it is nested too deep."""
    shallow = source.count("[") + source.count("{") < DEEPEST
    return parsed if shallow and is_plain(source) else value(parsed)


def is_plain(source: str) -> bool:
    """Whether JSON can hold no control character, which most files need not be searched for: no escape stands in it
    and no other alphabet."""
    return source.isascii() and "\\" not in source and "\x7f" not in source


def value(parsed: Any, depth: int = DEEPEST) -> Any:
    """The same JSON value with harmless texts and names."""
    if isinstance(parsed, str):
        return text(parsed)
    if not isinstance(parsed, dict | list):
        return parsed
    if not depth:
        raise ValueError(f"nested deeper than {DEEPEST} levels")
    if isinstance(parsed, list):
        return [value(inner, depth - 1) for inner in parsed]
    return {text(name): value(inner, depth - 1) for name, inner in parsed.items()}
