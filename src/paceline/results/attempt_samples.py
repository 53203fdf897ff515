"""Observed about runs that do not go through in one piece: where each attempt began, what checkpoints took, how the
attempts before the last one ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSample:
    """Where a rank began to step. step is 0, or that of the checkpoint it went on from; setup_s is what it did before:
    meeting the others, building, loading. at_s is `time.time()` of its host. attempt is told by the file's name."""

    kind: ClassVar[str] = "start"
    rank: int
    step: int
    setup_s: float
    at_s: float
    attempt: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSample:
    """A checkpoint as one rank saw it: after `step` steps, from the end of the last of them to the begin of the next,
    which is in no step's duration. bytes are of the files this rank answers for: ranks add up to the whole."""

    kind: ClassVar[str] = "checkpoint"
    rank: int
    step: int
    duration_s: float
    bytes: int
    attempt: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSample:
    """One attempt of a run that had several, by the controller's clock: when it was handed to the engine, when its
    first rank was seen (None: never), when it ended and how. `interrupted`: the controller itself went away."""

    kind: ClassVar[str] = "attempt"
    rank: int
    attempt: int
    submitted_at: float
    began_at: float | None
    ended_at: float
    status: str
    reason: str | None
