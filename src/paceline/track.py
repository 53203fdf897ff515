"""Lines that make the measurement of a training script exact: `from paceline import track`.

Nothing here is needed: `paceline measure` observes a script without it. With it, the script says where its steps begin
and end, how many tokens they have and what their loss is. Outside of a measurement every function does nothing. The
names and signatures on this page are stable: they follow the semantic version of Paceline.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["batch", "begin_pause", "begin_step", "end_pause", "end_step", "is_measured", "loss", "pause", "step"]


def _observer() -> Any:
    module = sys.modules.get("paceline_observer")
    return None if module is None else module.observer


def is_measured() -> bool:
    """Whether Paceline observes this process."""
    return _observer() is not None


@contextlib.contextmanager
def step(tokens: int | None = None) -> Iterator[None]:
    """One optimizer step: everything inside counts, everything outside does not.

    tokens: those of this rank, without padding; None to let Paceline count them.
    """
    begin_step(tokens)
    try:
        yield
    finally:
        end_step()


def begin_step(tokens: int | None = None) -> None:
    """As entering `step`, where a callback has no block."""
    if (observer := _observer()) is not None:
        observer.begin_tracked(tokens)


def end_step() -> None:
    """As leaving `step`."""
    if (observer := _observer()) is not None:
        observer.end_tracked()


@contextlib.contextmanager
def pause() -> Iterator[None]:
    """Work that belongs to no step: writing a checkpoint, evaluating, logging."""
    begin_pause()
    try:
        yield
    finally:
        end_pause()


def begin_pause() -> None:
    """As entering `pause`. A pause that does not end is none."""
    if (observer := _observer()) is not None:
        observer.begin_pause()


def end_pause() -> None:
    """As leaving `pause`."""
    if (observer := _observer()) is not None:
        observer.end_pause()


def batch(data: Any) -> None:
    """The micro batch that comes next, as the model gets it: for forward passes inside compiled code, which Paceline
    cannot see. A dictionary, or tensors in any nesting. Ignored where it sees the forward pass itself."""
    if (observer := _observer()) is not None:
        observer.note_batch(data)


def loss(value: Any) -> None:
    """The loss of this step on this rank: a number, or a tensor, which is not waited for. Several make a mean."""
    if (observer := _observer()) is not None:
        observer.note_loss(value)
