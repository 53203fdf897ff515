"""Samples of a run that was restarted, joined to one trajectory: of every step the last attempt's stays.

Ranks write samples-<rank>.jsonl; when an attempt is lost the controller renames them to samples-<rank>.<attempt>.jsonl,
so the plain names are always those of the last attempt.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.results import sample_lines
from paceline.results.attempt_samples import AttemptSample, CheckpointSample, StartSample
from paceline.results.records import GaugeSample, Sample
from paceline.results.step_columns import StepSeries

_NUMBERED = re.compile(r"(samples-(?:gauges-)?\d+)\.(\d+)\.jsonl")
_STEP = StepSeries.FIELDS.index("step")


class Attempt(NamedTuple):
    """What the ranks of one attempt left: bare values of steps, and all other samples."""

    steps: list[Sequence[Any]]
    others: list[Sample]


class Joined(NamedTuple):
    """The trajectory, the steps that a later attempt did again, all other samples that still say something, and the
    attempts of which a step stands (none where there was one attempt)."""

    steps: list[Sequence[Any]]
    redone: list[Sequence[Any]]
    others: list[Sample]
    standing: tuple[int, ...] = ()


def number_of(path: Path) -> int | None:
    """The attempt whose samples a file holds; None is the last one."""
    found = _NUMBERED.fullmatch(path.name)
    return int(found[2]) if found else None


def read(paths: Iterable[Path]) -> Joined:
    attempts: dict[int | None, Attempt] = {None: Attempt([], [])}
    for path in paths:
        attempt = attempts.setdefault(number_of(path), Attempt([], []))
        sample_lines.collect(path, attempt.steps, attempt.others)
    last = attempts.pop(None)
    earlier = {number: attempt for number, attempt in attempts.items() if number is not None}
    # One that left no file is counted by the controller alone.
    told = [sample.attempt for sample in last.others if isinstance(sample, AttemptSample)]
    if not earlier and not told:
        return Joined(last.steps, [], last.others)
    return join({**dict(sorted(earlier.items())), max([*told, *(number + 1 for number in earlier)]): last})


def join(attempts: Mapping[int, Attempt]) -> Joined:
    """Attempts by number, in order. Backwards: what a later one began again is no longer an earlier one's."""
    steps: list[Sequence[Any]] = []
    redone: list[Sequence[Any]] = []
    others: list[Sample] = []
    standing: tuple[int, ...] = ()
    again_from = None
    last = max(attempts)
    for number, attempt in reversed(list(attempts.items())):
        kept = [row for row in attempt.steps if again_from is None or row[_STEP] < again_from]
        redone += [row for row in attempt.steps if again_from is not None and row[_STEP] >= again_from]
        steps = kept + steps
        standing = (number, *standing) if kept else standing
        others = [*_lasting(attempt.others, number, number == last), *others]
        began = min((row[_STEP] for row in attempt.steps), default=None)
        if began is not None:
            again_from = began if again_from is None else min(again_from, began)
    return Joined(steps, redone, others, standing)


def _lasting(found: Iterable[Sample], number: int, is_last: bool) -> list[Sample]:
    """Memory, bytes and profiles are the last attempt's; moments and times stay true of all."""
    lasting: list[Sample] = []
    for sample in found:
        if isinstance(sample, StartSample | CheckpointSample):
            lasting.append(dataclasses.replace(sample, attempt=number))
        elif is_last or isinstance(sample, GaugeSample):
            lasting.append(sample)
    return lasting
