"""Items by a key, in order of appearance."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
Key = TypeVar("Key")


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Lists of items by their key; keys and items keep their order.

    >>> grouped(["ddp", "zero3", "deepspeed"], lambda name: name[0])
    {'d': ['ddp', 'deepspeed'], 'z': ['zero3']}
    """
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
