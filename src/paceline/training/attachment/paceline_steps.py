"""What was seen of a step, and how its numbers come from the device to a line of the record.

    closed ── held with up to 31 others, or 0.5 s ── fetched by one copy ── arrived ── written

A number is one small operation on a device, or several: together they would be a noticeable part of a short step. So
the steps of a group are read at once, and only copies of the token ids and losses are made while the script trains.
The shorter the steps, the larger the group: what is done once for a group costs the same for all of them.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import paceline_digests as digests
from paceline_clocks import marks_on

# Steps that are fetched together, the longest that one waits for the next, and the most elements of copied rows.
GROUP_STEPS = 32
GROUP_S = 0.5
GROUP_ELEMENTS = 1 << 19
# The phases of a line, in its order.
PHASES = ("data_wait", "forward", "backward", "optimizer")
# Fetched groups that may be queued on a device before their numbers are waited for.
GROUPS_AHEAD = 4


@dataclass(slots=True)
class Batch:
    """One micro batch. tokens and labels: how many, may be on the device. is_text: whether it has token ids.

    predicted: of labels, those after the first of each row, if the loss was divided by such a count. shape: of a sample
    without token ids.
    rows: a copy of its rows, of which the digest is made. If stacked names them, of its token ids and of those
    (`labels`, `mask`) in one tensor: their counts are made later, too. layout: equal ones have rows of one shape and
    dtype.
    """

    samples: int
    positions: int
    tokens: Any
    labels: Any = None
    rows: Any = None
    stacked: tuple[str, ...] = ()
    predicted: Any = None
    is_text: bool = False
    shape: str | None = None
    layout: Any = None


@dataclass(slots=True)
class Step:
    """What was seen of one step. spans: phase, begin and end; pauses are evaluations inside it.

    Numbers are tensors of one element until they have arrived. adds_losses: each is a part of the whole. divisor: the
    number of labels on all ranks, by which each was divided. rates: learning rates. given_tokens: those that the script
    says. digest: the sum of those of the micro batches. source: the model that was given them. updates: 0 if a loss
    scaler skipped the update. has_other_loss: a backward pass began with something else than a loss of the model.
    """

    number: int
    begin: Any
    spans: list[tuple[str, Any, Any]] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    losses: list[Any] = field(default_factory=list)
    backward_losses: list[Any] = field(default_factory=list)
    rates: set[float] = field(default_factory=set)
    norm: Any = None
    end: Any = None
    adds_losses: bool = False
    divisor: Any = None
    given_tokens: int | None = None
    digest: int = 0
    source: Any = None
    updates: int = 1
    has_other_loss: bool = False

    def seconds(self, clock: Any) -> dict[str, float]:
        """Seconds by phase. The wait for data does not contain the pauses before the first forward pass."""
        found: dict[str, float] = {}
        for name, begin, end in self.spans:
            seconds = clock.elapsed_s(begin, end)
            if name == "data_wait" and "pause" in found:
                seconds = max(seconds - found["pause"], 0.0)
            found[name] = found[name] + seconds if name in found else seconds
        return found


class Group:
    """Steps whose numbers are fetched together."""

    def __init__(self, steps: list[Step], clock: Any) -> None:
        import torch

        self.steps = steps
        # Where numbers belong and the vectors that they are in, by dtype and device.
        homes, vectors = _vectors_of_batches(steps)
        for key, (places, scalars) in _scalars_of(steps).items():
            homes.setdefault(key, []).extend(places)
            vectors.setdefault(key, []).append(torch.stack(scalars))
        self._homes = list(homes.values())
        joined = (each[0] if len(each) == 1 else torch.cat(each) for each in vectors.values())
        self._copies = [each.to("cpu", non_blocking=True) for each in joined]
        self.copied = marks_on(clock.devices | {device for _, device in vectors})

    def arrive(self) -> None:
        """Put the numbers in their places."""
        for homes, copy in zip(self._homes, self._copies, strict=True):
            for (owner, name, index), value in zip(homes, copy.tolist(), strict=True):
                if index is not None:
                    getattr(owner, name)[index] = value
                elif name == "digest":
                    owner.digest += value
                else:
                    setattr(owner, name, value)
        self._homes, self._copies = [], []


# The step or batch that a number is of, the name of the field, and the index if that is a list.
Home = tuple[Any, str, int | None]
Key = tuple[Any, Any]
_PLAIN = NoneType, int, float


def _vectors_of_batches(steps: Iterable[Step]) -> tuple[dict[Key, list[Home]], dict[Key, list[Any]]]:
    """Digests and counts of all micro batches: those of one shape are computed together."""
    import torch

    alike: dict[Any, list[tuple[Step, Batch]]] = {}
    for step in steps:
        for batch in step.batches:
            rows, layout = batch.rows, batch.layout
            if rows is not None:
                known = (rows.shape, rows.dtype, batch.stacked) if layout is None else id(layout)
                key = known, rows.device
                if key in alike:
                    alike[key].append((step, batch))
                else:
                    alike[key] = [(step, batch)]
    homes: dict[Key, list[Home]] = {}
    vectors: dict[Key, list[Any]] = {}

    def add(vector: Any, places: list[Home]) -> None:
        key = vector.dtype, vector.device
        homes.setdefault(key, []).extend(places)
        vectors.setdefault(key, []).append(vector)

    for group in alike.values():
        stacked = group[0][1].stacked
        rows = torch.stack([batch.rows for _, batch in group])
        add(digests.digest_batches(rows[:, 0] if stacked else rows), [(step, "digest", None) for step, _ in group])
        for number, name in enumerate(stacked, 1):
            if name == "labels":
                counts = (rows[:, number] != digests.IGNORED_LABEL).sum((1, 2))
                add(counts, [(batch, "labels", None) for _, batch in group])
                if group[0][0].divisor is not None:
                    counts = (rows[:, number, :, 1:] != digests.IGNORED_LABEL).sum((1, 2))
                    add(counts, [(batch, "predicted", None) for _, batch in group])
            else:
                add(rows[:, number].sum((1, 2)), [(batch, "tokens", None) for _, batch in group])
    return homes, vectors


def _scalars_of(steps: Iterable[Step]) -> dict[Key, tuple[list[Home], list[Any]]]:
    """Tensors of one element and where they belong, by dtype and device."""
    import torch

    found: dict[Key, tuple[list[Home], list[Any]]] = {}

    def add(owner: Any, name: str, value: Any, index: int | None = None) -> None:
        key = value.dtype, value.device
        if key not in found:
            found[key] = [], []
        homes, scalars = found[key]
        homes.append((owner, name, index))
        scalars.append(value if value.dim() == 0 else value.reshape(()))

    for step in steps:
        fields: list[tuple[Any, str, Any]] = [(step, "norm", step.norm), (step, "divisor", step.divisor)]
        for batch in step.batches:
            fields += (batch, "tokens", batch.tokens), (batch, "labels", batch.labels)
            fields.append((batch, "predicted", batch.predicted))
        for owner, name, value in fields:
            # To ask whether a number is a tensor takes six times as long.
            if type(value) not in _PLAIN and isinstance(value, torch.Tensor):
                add(owner, name, value)
        for index, loss in enumerate(step.losses):
            if type(loss) not in _PLAIN and isinstance(loss, torch.Tensor):
                add(step, "losses", loss, index)
    return found


class Readout:
    """Holds closed steps until their numbers have arrived, and gives them to `write` in order."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self.write = write
        self.held: list[Step] = []
        self.groups: deque[Group] = deque()
        self.rank = 0
        # Steps that were closed, written or not.
        self.steps = 0
        self.written = 0
        self._held_since = 0.0
        self._held_elements = 0

    @property
    def waiting(self) -> int:
        return self.steps - self.written

    def add(self, step: Step, clock: Any) -> None:
        now = time.perf_counter()
        held = self.held
        if not held:
            self._held_since, self._held_elements = now, 0
        held.append(step)
        self.steps += 1
        for batch in step.batches:
            if batch.rows is not None:
                self._held_elements += batch.rows.numel()
        is_full = len(held) >= GROUP_STEPS or self._held_elements >= GROUP_ELEMENTS
        if is_full or now - self._held_since >= GROUP_S or step.number < 2:
            self._fetch(clock)
        if self.groups:
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
            for mark in group.copied:
                if not mark.query():
                    if not everything and len(self.groups) <= GROUPS_AHEAD:
                        return
                    mark.synchronize()
            self.groups.popleft()
            group.arrive()
            self.write("".join(line_of(step, self.rank, clock) for step in group.steps))
            self.written += len(group.steps)
            clock.reuse(group.steps)


def line_of(step: Step, rank: int, clock: Any) -> str:
    """The line of the record of one step whose numbers have arrived. Written by hand, it costs a third of
    `json.dumps`."""
    seconds = step.seconds(clock)
    waited, forward, backward, optimizer = [f"{seconds[name]:.9g}" if name in seconds else "null" for name in PHASES]
    losses, norm, tokens = step.losses, step.norm, step.given_tokens
    samples = positions = counted = labels = 0
    is_labelled = bool(step.batches)
    for batch in step.batches:
        samples += batch.samples
        positions += batch.positions
        counted += batch.tokens
        if batch.labels is None:
            is_labelled = False
        else:
            labels += batch.labels
    scale, parts = (_scale(step), 1) if step.adds_losses else (1.0, len(losses))
    duration = max(clock.elapsed_s(step.begin, step.end) - seconds.get("pause", 0.0), 1e-9)
    loss = _number(sum(losses) * scale / parts) if losses else "NaN"
    return (
        f'{{"kind": "step", "rank": {rank}, "step": {step.number}, "duration_s": {duration:.9g}, '
        f'"data_wait_s": {waited}, "h2d_s": null, "h2d_bytes": null, "forward_s": {forward}, "backward_s": {backward}, '
        f'"optimizer_s": {optimizer}, "tokens": {counted if tokens is None else tokens}, "samples": {samples}, '
        f'"micro_batches": {max(len(step.batches), 1)}, "updates": {step.updates}, "loss": {loss}, '
        f'"grad_norm": {"null" if norm is None or norm != norm else _number(norm)}, '
        f'"data_digest": {step.digest & digests.MASK64}, "variant": 0, "positions": {positions}, '
        f'"label_tokens": {labels if is_labelled else "null"}, "attended_keys": null}}\n'
    )


def _scale(step: Step) -> float:
    """To the mean over the labels that the model predicts on this rank, of a loss divided by those of all ranks."""
    predicted = [batch.predicted for batch in step.batches]
    own = sum(predicted) if step.divisor is not None and None not in predicted else 0
    return float(step.divisor / own) if own else 1.0


def _number(value: float) -> str:
    """A number with nine digits, which are all that fp32 has, as Python's JSON writes it, with NaN and infinities."""
    return "%.9g" % value if -math.inf < value < math.inf else json.dumps(value)  # noqa: UP031
