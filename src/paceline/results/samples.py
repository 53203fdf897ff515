"""The samples of one run, read back: lines to samples, steps to columns, attempts joined to one series.

Ranks write samples-<rank>.jsonl. When an attempt is lost, the controller renames its files to
samples-<rank>.<attempt>.jsonl, so the plain names always belong to the last attempt.
"""

from __future__ import annotations

import dataclasses
import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter, eq, itemgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias, overload

from paceline.errors import StoreError
from paceline.results import safe_text
from paceline.results.machine_samples import (
    CollectiveSample,
    KernelSample,
    OverlapSample,
    ProductSample,
    TrajectorySample,
)
from paceline.results.records import (
    SAMPLE_TYPES,
    AttemptSample,
    CheckpointSample,
    GaugeSample,
    Sample,
    StartSample,
    StepSample,
)
from paceline.results.served_samples import LoadgenSample, RequestSample

Column: TypeAlias = "array[int] | array[float] | list[Any]"

# --- steps as columns ---


class StepSeries(Sequence[StepSample]):
    """The steps of one run as one column per field. It reads like a tuple of samples and takes a fifth of the memory.

    A column is an array if that represents every value exactly, else a list (for example if a value is missing).
    """

    FIELDS: ClassVar[tuple[str, ...]] = tuple(f.name for f in dataclasses.fields(StepSample))
    _CODES: ClassVar[tuple[str, ...]] = tuple(
        "d" if "float" in f.type else "iqQ" for f in dataclasses.fields(StepSample)
    )
    values_of: ClassVar[attrgetter[tuple[Any, ...]]] = attrgetter(*FIELDS)

    def __init__(self, rows: Sequence[Sequence[Any]] = ()) -> None:
        """One row of values per sample, in the order of FIELDS."""
        columns = zip(*rows, strict=True) if rows else ((),) * len(self.FIELDS)
        self._columns = {
            name: _column(values, codes) for name, codes, values in zip(self.FIELDS, self._CODES, columns, strict=True)
        }
        self._length = len(rows)

    @classmethod
    def of(cls, samples: Iterable[StepSample]) -> StepSeries:
        return samples if isinstance(samples, cls) else cls([cls.values_of(sample) for sample in samples])

    def column(self, name: str) -> Column:
        return self._columns[name]

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> StepSample: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[StepSample, ...]: ...

    def __getitem__(self, index: int | slice) -> StepSample | tuple[StepSample, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(self._length)))
        values: dict[str, Any] = {name: column[index] for name, column in self._columns.items()}
        return StepSample(**values)

    def __iter__(self) -> Iterator[StepSample]:
        for values in zip(*self._columns.values(), strict=True):
            yield StepSample(**dict(zip(self.FIELDS, values, strict=True)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]


def _column(values: Sequence[Any], codes: str) -> Column:
    """The narrowest array that represents all values, or a list."""
    for code in codes:
        with suppress(TypeError, OverflowError):
            return array(code, values)
    return list(values)


# --- lines ---

# Samples with a tuple, which JSON stores as a list.
_WITH_SERIES = (
    CollectiveSample,
    OverlapSample,
    KernelSample,
    GaugeSample,
    ProductSample,
    TrajectorySample,
    RequestSample,
    LoadgenSample,
)


def read_samples(path: Path) -> Iterator[Sample]:
    """Samples of one rank. A last line that a killed process cut off is dropped; any other damage is an error."""
    return map(_sample, _rows(path))


_WHOLE_STEP = len(StepSeries.FIELDS) + 1
_step_values = itemgetter(*StepSeries.FIELDS)


def collect(path: Path, steps: list[Sequence[Any]], others: list[Sample]) -> None:
    """Append the samples of one rank, steps as plain values: one object per step would take longer than reading."""
    rows = _rows(path)
    values = _values_of_steps(rows)
    if values is None:
        every = [_sample(row) for row in rows]
        steps += [StepSeries.values_of(sample) for sample in every if isinstance(sample, StepSample)]
        others += [sample for sample in every if not isinstance(sample, StepSample)]
    else:
        steps += values
        others += [_sample(row) for row in rows if row["kind"] != StepSample.kind]


def _values_of_steps(rows: Sequence[Any]) -> list[Sequence[Any]] | None:
    """None unless every row has a kind and every step exactly its fields; `_sample` then reports what is wrong."""
    try:
        own = [row for row in rows if row["kind"] == StepSample.kind]
        values = list(map(_step_values, own))
    except (KeyError, TypeError):
        return None
    return values if sum(map(len, own)) == _WHOLE_STEP * len(own) else None


def _sample(row: Any) -> Sample:
    sample = SAMPLE_TYPES[row.pop("kind")]
    if sample in _WITH_SERIES:
        row = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    return sample(**row)


def _rows(path: Path) -> list[Any]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{path.parent}: {path.name} cannot be read ({error})") from None
    # One parse of the joined lines is several times faster than one per line.
    whole = text[: max(text.rfind("\n"), 0)]
    try:
        rows = _parse("[" + whole.replace("\n", ",") + "]")
        return rows if safe_text.is_plain(whole) else list(map(safe_text.value, rows))
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path.parent}: {path.name} is damaged ({error})") from None


def _parse(text: str) -> list[Any]:
    """Parsed in half the time of the standard library, which parses what the faster parser rejects."""
    from pydantic_core import from_json

    try:
        rows: list[Any] = from_json(text)
    except ValueError:
        rows = json.loads(text)
    return rows


# --- attempts ---

_NUMBERED = re.compile(r"(samples-(?:gauges-)?\d+)\.(\d+)\.jsonl")
_STEP = StepSeries.FIELDS.index("step")


class Attempt(NamedTuple):
    """The samples of one attempt: steps as plain values, and all others."""

    steps: list[Sequence[Any]]
    others: list[Sample]


class Joined(NamedTuple):
    """The steps of all attempts, with the last measurement of each; the steps that a later attempt repeated; all other
    samples that are still valid; and the attempts that contributed steps (empty if there was only one attempt)."""

    steps: list[Sequence[Any]]
    redone: list[Sequence[Any]]
    others: list[Sample]
    contributing: tuple[int, ...] = ()


def number_of(path: Path) -> int | None:
    """The attempt that wrote a file of samples; None is the last attempt."""
    match = _NUMBERED.fullmatch(path.name)
    return int(match[2]) if match else None


def read(paths: Iterable[Path]) -> Joined:
    """The samples of a run from all its files."""
    attempts: dict[int | None, Attempt] = {None: Attempt([], [])}
    for path in paths:
        attempt = attempts.setdefault(number_of(path), Attempt([], []))
        collect(path, attempt.steps, attempt.others)
    last = attempts.pop(None)
    earlier = {number: attempt for number, attempt in attempts.items() if number is not None}
    # An attempt that left no file is known from the controller only.
    recorded = [sample.attempt for sample in last.others if isinstance(sample, AttemptSample)]
    if not earlier and not recorded:
        return Joined(last.steps, [], last.others)
    return join({**dict(sorted(earlier.items())), max([*recorded, *(number + 1 for number in earlier)]): last})


def join(attempts: Mapping[int, Attempt]) -> Joined:
    """Join attempts by number, from the last to the first. The last measurement of a step counts."""
    steps: list[Sequence[Any]] = []
    redone: list[Sequence[Any]] = []
    others: list[Sample] = []
    contributing: tuple[int, ...] = ()
    again_from = None
    last = max(attempts)
    for number, attempt in reversed(list(attempts.items())):
        kept = [row for row in attempt.steps if again_from is None or row[_STEP] < again_from]
        redone += [row for row in attempt.steps if again_from is not None and row[_STEP] >= again_from]
        steps = kept + steps
        contributing = (number, *contributing) if kept else contributing
        others = [*_still_valid(attempt.others, number, number == last), *others]
        began = min((row[_STEP] for row in attempt.steps), default=None)
        if began is not None:
            again_from = began if again_from is None else min(again_from, began)
    return Joined(steps, redone, others, contributing)


def _still_valid(samples: Iterable[Sample], number: int, is_last: bool) -> list[Sample]:
    """Starts, checkpoints and gauges of every attempt; memory, traffic and profiles of the last one only."""
    valid: list[Sample] = []
    for sample in samples:
        if isinstance(sample, StartSample | CheckpointSample):
            valid.append(dataclasses.replace(sample, attempt=number))
        elif is_last or isinstance(sample, GaugeSample):
            valid.append(sample)
    return valid
