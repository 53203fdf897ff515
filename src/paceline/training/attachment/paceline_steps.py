"""What was seen of a step, and how its numbers come from the device to a line of the record.

    closed ── held with up to 7 others, or 0.1 s ── fetched by one copy ── arrived ── written

A number is one small operation on a device, or several: together they would be a noticeable part of a short step. So
the steps of a group are read at once, and only copies of the token ids and losses are made while the script trains.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import paceline_digests as digests

# Steps that are fetched together, and the longest that one waits for the next.
GROUP_STEPS = 8
GROUP_S = 0.1
# Fetched groups that may be queued on a device before their numbers are waited for.
GROUPS_AHEAD = 4


# The lists and indices that tensors came from.
Homes = list[tuple[list[Any], int]]


@dataclass(slots=True)
class Batch:
    """One micro batch. rows: a copy, of which the digest is made. tokens and labels may be on the device."""

    samples: int
    positions: int
    tokens: Any
    labels: Any = None
    rows: Any = None


@dataclass(slots=True)
class Step:
    """What was seen of one step. spans: phase, begin and end; pauses are evaluations inside it.

    Lists of numbers contain tensors of one element until they have arrived. adds_losses: each is a part of the whole.
    """

    number: int
    begin: Any
    spans: list[tuple[str, Any, Any]] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    losses: list[Any] = field(default_factory=list)
    backward_losses: list[Any] = field(default_factory=list)
    norm: Any = None
    end: Any = None
    adds_losses: bool = False
    tokens: list[Any] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    norms: list[Any] = field(default_factory=list)
    digests: list[Any] = field(default_factory=list)

    def seconds(self, clock: Any) -> dict[str, float]:
        """Seconds by phase."""
        found: dict[str, float] = {}
        for name, begin, end in self.spans:
            found[name] = found.get(name, 0.0) + clock.elapsed_s(begin, end)
        return found

    def paused_before_data(self, clock: Any) -> float:
        """Seconds of pauses before the first forward pass."""
        names = [name for name, _, _ in self.spans]
        before = self.spans[: names.index("data_wait")]
        return float(sum(clock.elapsed_s(begin, end) for name, begin, end in before if name == "pause"))


class Group:
    """Steps whose numbers are fetched together."""

    def __init__(self, steps: list[Step], clock: Any) -> None:
        self.steps = steps
        self._homes, self._copies = [], []
        for homes, tensors in _by_dtype(steps):
            stacked = tensors[0].reshape(1) if len(tensors) == 1 else _stack(tensors)
            self._homes.append(homes)
            self._copies.append(stacked.to("cpu", non_blocking=True))
        self.copied = clock.mark()

    def arrive(self) -> None:
        """Put the numbers in the places of their tensors."""
        for homes, copy in zip(self._homes, self._copies, strict=True):
            for (numbers, index), value in zip(homes, copy.tolist(), strict=True):
                numbers[index] = value
        self._homes, self._copies = [], []


def _by_dtype(steps: Iterable[Step]) -> Iterable[tuple[Homes, list[Any]]]:
    """Tensors of one element with the list and the index that each came from, by dtype and device."""
    found: dict[Any, tuple[Homes, list[Any]]] = {}
    _make_digests(steps)
    for step in steps:
        for numbers in (step.tokens, step.labels, step.losses, step.norms, step.digests):
            for index, value in enumerate(numbers):
                if hasattr(value, "detach"):
                    homes, tensors = found.setdefault((value.dtype, value.device), ([], []))
                    homes.append((numbers, index))
                    tensors.append(value)
    return found.values()


def _make_digests(steps: Iterable[Step]) -> None:
    """Give each step the digests of its micro batches; those of one shape are computed together."""
    batches = [(step, batch.rows) for step in steps for batch in step.batches if batch.rows is not None]
    by_shape: dict[Any, list[tuple[Step, Any]]] = {}
    for step, rows in batches:
        by_shape.setdefault((rows.shape, rows.dtype, rows.device), []).append((step, rows))
    for alike in by_shape.values():
        found = digests.digest_batches([rows for _, rows in alike])
        for (step, _), digest in zip(alike, found.unbind(), strict=True):
            step.digests.append(digest)


def _stack(tensors: list[Any]) -> Any:
    import torch

    return torch.stack([tensor if tensor.dim() == 0 else tensor.reshape(()) for tensor in tensors])


class Readout:
    """Holds closed steps until their numbers have arrived, and gives them to `write` in order."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self.write = write
        self.held: list[Step] = []
        self.groups: deque[Group] = deque()
        self.rank = 0
        self.written = 0
        self._held_since = 0.0

    @property
    def steps(self) -> int:
        """Steps that were closed, written or not."""
        return self.written + self.waiting

    @property
    def waiting(self) -> int:
        return len(self.held) + sum(len(group.steps) for group in self.groups)

    def add(self, step: Step, clock: Any) -> None:
        now = time.perf_counter()
        if not self.held:
            self._held_since = now
        self.held.append(step)
        if len(self.held) >= GROUP_STEPS or now - self._held_since >= GROUP_S or step.number < 2:
            self._fetch(clock)
        self._write_arrived(clock, everything=False)

    def finish(self, clock: Any) -> None:
        """Write all steps, and wait for those that the device has not finished."""
        self._fetch(clock)
        self._write_arrived(clock, everything=True)

    def _fetch(self, clock: Any) -> None:
        if self.held:
            self.groups.append(Group(self.held, clock))
            self.held = []

    def _write_arrived(self, clock: Any, everything: bool) -> None:
        while self.groups:
            group = self.groups[0]
            if not clock.passed(group.copied):
                if not everything and len(self.groups) <= GROUPS_AHEAD:
                    return
                group.copied.synchronize()
            self.groups.popleft()
            group.arrive()
            self.write("".join(line_of(step, self.rank, clock) for step in group.steps))
            self.written += len(group.steps)


def line_of(step: Step, rank: int, clock: Any) -> str:
    """The line of the record of one step whose numbers have arrived."""
    seconds = step.seconds(clock)
    waited = seconds.get("data_wait")
    parts = 1 if step.adds_losses else len(step.losses)
    known_labels = bool(step.labels) and all(count is not None for count in step.labels)
    line = {
        "kind": "step",
        "rank": rank,
        "step": step.number,
        "duration_s": max(clock.elapsed_s(step.begin, step.end) - seconds.get("pause", 0.0), 1e-9),
        "data_wait_s": None if waited is None else max(waited - step.paused_before_data(clock), 0.0),
        "h2d_s": None,
        "h2d_bytes": None,
        "forward_s": seconds.get("forward"),
        "backward_s": seconds.get("backward"),
        "optimizer_s": seconds.get("optimizer"),
        "tokens": sum(step.tokens),
        "samples": sum(b.samples for b in step.batches),
        "micro_batches": max(len(step.batches), 1),
        "updates": 1,
        "loss": sum(step.losses) / parts if step.losses else math.nan,
        "grad_norm": step.norms[0] if step.norms and not math.isnan(step.norms[0]) else None,
        "data_digest": sum(step.digests) & digests.MASK64,
        "variant": 0,
        "positions": sum(b.positions for b in step.batches),
        "label_tokens": sum(step.labels) if known_labels else None,
        "attended_keys": None,
    }
    return json.dumps(line) + "\n"
