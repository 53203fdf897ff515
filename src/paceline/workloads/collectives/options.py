"""Options of the workload collectives, and how sizes are read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import require
from paceline.workloads.collectives.operations import OPERATIONS, Operation

if TYPE_CHECKING:
    from collections.abc import Mapping


ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1}
PAIRS = "pairs"
SELECTABLE = (*OPERATIONS, PAIRS)
MODES = ("single", "batch", "graph")
WAYS: Mapping[str, tuple[bool, ...]] = {"both": (False, True), "out": (False,), "in": (True,)}
SMALLEST_BYTES = 8
EXCHANGED_BYTES = 4 << 20
_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


@dataclass(frozen=True)
class Options:
    """operations, dtypes: `all`, or names joined by `+`.

    min_bytes, max_bytes, factor: the sweep of sizes (8 or 64MiB); by default max_bytes depends on the free memory.
    warmup, iters: launches before the timed ones, and timed launches of each row.
    budget_s: seconds of timed launches per row; slow rows have fewer, but at least 5.
    mode: `single` times each launch, `batch` times `batch` launches back to back, `graph` replays them as a CUDA graph.
    in_place: `out`, `in`, or `both` where torch offers both.
    tournament: every pair of ranks exchanges pair_bytes pair_iters times, in two turns (also selected by the operation
    `pairs`). overlap: an all-reduce next to matrix products.
    """

    operations: str = "all"
    dtypes: str = "all"
    min_bytes: int | str | None = None
    max_bytes: int | str | None = None
    factor: int = 2
    warmup: int = 10
    iters: int = 100
    budget_s: float = 2.0
    mode: str = "single"
    batch: int = 20
    in_place: str = "both"
    tournament: bool = True
    overlap: bool = True
    pair_bytes: int | str | None = None
    pair_iters: int = 10

    def __post_init__(self) -> None:
        _selected("operations", self.operations, SELECTABLE)
        _selected("dtypes", self.dtypes, tuple(ELEMENT_BYTES))
        require(self.mode in MODES, "collectives.mode", self.mode, ", ".join(MODES))
        require(self.in_place in WAYS, "collectives.in_place", self.in_place, ", ".join(WAYS))
        require(self.factor >= 2, "collectives.factor", self.factor, "a whole number from 2")
        require(self.warmup >= 0, "collectives.warmup", self.warmup, "a whole number from 0")
        for name in ("iters", "batch", "pair_iters", "exchanged_bytes"):
            require(getattr(self, name) >= 1, f"collectives.{name}", getattr(self, name), "a whole number from 1")
        require(self.budget_s > 0, "collectives.budget_s", self.budget_s, "a positive number of seconds")

    @property
    def swept_operations(self) -> tuple[str, ...]:
        return tuple(name for name in _selected("operations", self.operations, SELECTABLE) if name != PAIRS)

    @property
    def has_tournament(self) -> bool:
        return self.tournament or PAIRS in self.operations.split("+")

    @property
    def chosen_dtypes(self) -> tuple[str, ...]:
        return _selected("dtypes", self.dtypes, tuple(ELEMENT_BYTES))

    @property
    def least_bytes(self) -> int:
        return read_bytes("collectives.min_bytes", self.min_bytes) or SMALLEST_BYTES

    @property
    def most_bytes(self) -> int | None:
        """As requested; None if the free memory decides."""
        return read_bytes("collectives.max_bytes", self.max_bytes)

    @property
    def exchanged_bytes(self) -> int:
        return read_bytes("collectives.pair_bytes", self.pair_bytes) or EXCHANGED_BYTES

    @property
    def launches_per_duration(self) -> int:
        return 1 if self.mode == "single" else self.batch

    def ways(self, operation: Operation) -> tuple[bool, ...]:
        return tuple(way for way in operation.in_place if way in WAYS[self.in_place])

    def refusal(self, operation: Operation, dtype: str, ranks: int, device: str) -> str | None:
        """Why this operation cannot be measured as requested, whatever the backend."""
        if ranks < operation.least_ranks:
            return f"{operation.name} needs {operation.least_ranks} ranks, this run has {ranks}"
        if operation.is_sum and dtype == "fp8":
            return "fp8 sums are rounded, so that results cannot be verified"
        if not self.ways(operation):
            return f"torch has {operation.name} {'in' if operation.in_place[0] else 'out of'} place only"
        if self.mode == "graph" and device != "cuda":
            return "a CUDA graph needs a CUDA device"
        if self.mode == "graph" and not operation.can_be_captured:
            return f"{operation.name} blocks the host, which a CUDA graph cannot capture"
        return None


def _selected(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The names in `a+b`, in the order of `known`."""
    if text == "all":
        return known
    requested = text.split("+")
    for name in requested:
        accepted = f"all, or {', '.join(known)} joined by +"
        require(name in known, f"collectives.{option}", name, accepted)
    return tuple(name for name in known if name in requested)


def read_bytes(where: str, given: int | str | None) -> int | None:
    """A size in bytes from a number or a text such as 64MiB; None stays None."""
    if given is None:
        return None
    accepted = "a positive number of bytes such as 8, 64KiB, 16MiB or 1GiB"
    match = _SIZE.fullmatch(str(given).strip())
    known = match is not None and match[2].lower() in _UNITS and not isinstance(given, bool)
    require(known, where, given, accepted)
    assert match is not None
    size = float(match[1]) * _UNITS[match[2].lower()] if len(match[1]) < 20 else float("nan")
    require(size >= 1 and size == int(size), where, given, accepted)
    return int(size)
