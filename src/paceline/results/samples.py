"""The samples of one run, read back: lines to samples, steps to columns, attempts joined to one series.

Ranks write samples-<rank>.jsonl. When an attempt is lost, the controller renames its files to
samples-<rank>.<attempt>.jsonl, so the plain names always belong to the last attempt.
"""

from __future__ import annotations

import dataclasses
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from operator import attrgetter, eq, itemgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast, overload

from paceline.errors import DamagedRunError, damaged
from paceline.results import safe_text
from paceline.results.records import (
    SAMPLE_TYPES,
    AttemptSample,
    CheckpointSample,
    GaugeSample,
    RoutingSample,
    Sample,
    StartSample,
    StepSample,
)
from paceline.results.validity import Rule, rule_of

Column: TypeAlias = "array[int] | array[float] | list[Any]"
# The values of some steps: one sequence per field, in the order of `StepSeries.FIELDS`.
Columns: TypeAlias = Sequence[Sequence[Any]]

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

    def __init__(self, parts: Sequence[Columns] = ()) -> None:
        """Parts of the series, one after the other, each with one column per field in the order of FIELDS."""
        whole = zip(*parts, strict=True) if parts else ((),) * len(self.FIELDS)
        self._columns = {
            name: _column(values, codes) for name, codes, values in zip(self.FIELDS, self._CODES, whole, strict=True)
        }
        self._length = len(self._columns["step"])
        # What was computed from the columns and is needed again, by name.
        self.derived: dict[tuple[object, ...], Any] = {}

    @classmethod
    def from_columns(cls, columns: Mapping[str, Column]) -> StepSeries:
        """The series with these columns: one per field, all of one length."""
        series = cls.__new__(cls)
        series._columns = {name: columns[name] for name in cls.FIELDS}
        series._length = len(series._columns["step"])
        series.derived = {}
        return series

    @classmethod
    def of(cls, samples: Iterable[StepSample]) -> StepSeries:
        return samples if isinstance(samples, cls) else cls(columns_of([cls.values_of(sample) for sample in samples]))

    def __reduce__(self) -> tuple[Any, ...]:
        """Without what was derived: it is as large as the columns, and whoever receives a series rarely needs it."""
        return StepSeries.from_columns, (self._columns,)

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


def columns_of(rows: Iterable[Sequence[Any]]) -> list[Columns]:
    """The rows as parts of a series: one, or none if there are no rows."""
    columns = tuple(zip(*rows, strict=True))
    return [columns] if columns else []


def _column(parts: Sequence[Sequence[Any]], codes: str) -> Column:
    """The narrowest array that represents all values, or a list."""
    values = parts[0] if len(parts) == 1 else list(chain.from_iterable(parts))
    for code in codes:
        with suppress(TypeError, OverflowError):
            return array(code, values)
    return list(values)


# --- lines ---

# Samples with a tuple, which JSON stores as a list.
_SERIES = {
    sample: tuple(field.name for field in dataclasses.fields(sample) if "tuple[" in field.type)
    for sample in SAMPLE_TYPES.values()
}


def read_samples(path: Path) -> Iterator[Sample]:
    """Samples of one rank. A last line that a killed process cut off is dropped; any other damage is an error."""
    rows = _rows(path)
    if not _fit(rows):
        raise _damage(path, rows)
    return map(_sample, rows)


_WHOLE_STEP = len(StepSeries.FIELDS) + 1
_step_values = itemgetter(*StepSeries.FIELDS)


# How a line of a step begins, as ranks write it.
STEP_LINE = '{"kind": "step"'
_STEP_BEGIN = STEP_LINE.encode()
# Another line, after the end of the line before it. Cutting at line ends takes three times as long.
_OTHER_LINE = re.compile(rb"\n(?!%b)(.*)" % re.escape(_STEP_BEGIN))


def step_rules() -> Mapping[str, Rule]:
    """The rule of each field of a step."""
    return _rules()[StepSample.kind].fields or {}


def others_of(paths: Sequence[Path], kept: Mapping[str, bytes]) -> list[Sample]:
    """All samples of files without steps. kept: the content of files that were read already, by name."""
    try:
        # All files at once: most have a few such lines.
        contents = [kept[path.name] if path.name in kept else path.read_bytes() for path in paths]
        # What follows the last line end was cut off, or is empty.
        rows = _parsed(b"".join(content[: content.rfind(b"\n") + 1] for content in contents)[:-1].decode())
        fits = _fit(rows)
    except (OSError, ValueError, RecursionError, MemoryError):
        fits = False
    if not fits:
        for path in paths:
            if not _fit(own := _rows(path)):
                raise _damage(path, own)
    if not fits or any(row["kind"] == StepSample.kind for row in rows):
        raise damaged(paths[0].parent, f"{paths[0].name} and others: a step is not among the columns")
    return list(map(_sample, rows))


def without_steps(content: bytes) -> bytes:
    """The whole lines of a file that are not steps, joined."""
    # What follows the last line end was cut off, or is empty.
    end = max(content.rfind(b"\n"), 0)
    others = _OTHER_LINE.findall(content, 0, end)
    first = [] if content.startswith(_STEP_BEGIN, 0, end) else [content[:end].partition(b"\n")[0]]
    return b"\n".join([*first, *others])


def collect(path: Path, steps: list[Columns], others: list[Sample]) -> None:
    """Append the samples of one rank, steps as columns: one object per step would take longer than reading."""
    rows = _rows(path)
    try:
        own = [row for row in rows if row["kind"] == StepSample.kind]
        columns = _whole_steps(own)
        rest = rows if columns is None else [row for row in rows if row["kind"] != StepSample.kind]
        fits = _fit(rest)
    except (TypeError, KeyError):
        fits = False
    if not fits:
        raise _damage(path, rows)
    if columns is None:
        # Fields with a default may be missing.
        columns = tuple(zip(*(StepSeries.values_of(_sample(row)) for row in own), strict=True))
        rest = [row for row in rows if row.get("kind", StepSample.kind) != StepSample.kind]
    if columns:
        steps.append(columns)
    others += map(_sample, rest)


def _whole_steps(rows: Sequence[Mapping[str, Any]]) -> Columns | None:
    """The columns of steps that have every field and no other, if all their values can be; None otherwise."""
    if not all(len(row) == _WHOLE_STEP for row in rows):
        return None
    # KeyError: as many fields, but not these.
    columns = tuple(zip(*map(_step_values, rows), strict=True))
    rules = step_rules()
    fits = all(rules[name].fits(column) for name, column in zip(StepSeries.FIELDS, columns, strict=bool(columns)))
    return columns if fits else None


def _sample(row: dict[str, Any]) -> Sample:
    sample = SAMPLE_TYPES[row.pop("kind")]
    for name in _SERIES[sample]:
        if isinstance(row.get(name), list):
            row[name] = tuple(row[name])
    return sample(**row)


def _rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, not checked yet."""
    whole = _text(path)
    try:
        return _parsed(whole)
    except (ValueError, RecursionError) as error:
        raise damaged(path.parent, f"{path.name} is not valid JSON ({error})") from None
    except MemoryError:
        raise damaged(path.parent, f"{path.name} does not fit into memory") from None


def _text(path: Path) -> str:
    """The whole lines of a file, joined; one that was cut off is left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise damaged(path.parent, f"{path.name} cannot be read ({error})") from None
    except MemoryError:
        raise damaged(path.parent, f"{path.name} does not fit into memory") from None
    return text[: max(text.rfind("\n"), 0)]


def _parsed(lines: str) -> list[dict[str, Any]]:
    # One parse of the joined lines is several times faster than one per line.
    rows: list[Any] = safe_text.fast_loads("[" + lines.replace("\n", ",") + "]")
    return rows if safe_text.is_plain(lines) else list(map(safe_text.value, rows))


def _damage(path: Path, rows: Sequence[Any]) -> DamagedRunError:
    """The file and the first line that is not a sample."""
    problems = ((number, _problem(row)) for number, row in enumerate(rows, 1))
    number, what = next((number, what) for number, what in problems if what is not None)
    return damaged(path.parent, f"{path.name}, line {number}: {what}")


@cache
def _rules() -> dict[str, Rule]:
    rules = {kind: rule_of(cast(type, sample)) for kind, sample in SAMPLE_TYPES.items()}
    more = {"kind": Rule(frozenset({str}))}
    return {kind: dataclasses.replace(rule, fields={**more, **(rule.fields or {})}) for kind, rule in rules.items()}


def _fit(rows: list[Any]) -> bool:
    """Whether every row is a sample with values that can be, by columns: fast, without saying which is not."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    try:
        for row in rows:
            by_kind.setdefault(row["kind"], []).append(row)
    except (TypeError, KeyError):
        return False
    rules = _rules()
    return all(kind in rules and rules[kind].fits(own) for kind, own in by_kind.items())


def _problem(row: Any) -> str | None:
    """What is wrong with one row."""
    kind = row.get("kind") if isinstance(row, dict) else None
    if not isinstance(kind, str) or kind not in SAMPLE_TYPES:
        got = f"the kind {kind!r:.60}" if isinstance(row, dict) else f"a {type(row).__name__}"
        return f"got {got}, expected an object of a kind that this version of Paceline knows"
    return _rules()[kind].problem(row)


# --- attempts ---

# The controller's account of lost attempts.
ATTEMPTS = "samples-attempts.jsonl"
_NUMBERED = re.compile(r"(samples-(?:gauges-)?\d+)\.(\d+)\.jsonl")
_STEP = StepSeries.FIELDS.index("step")


class Attempt(NamedTuple):
    """The samples of one attempt: steps as columns of each rank, and all others."""

    steps: list[Columns]
    others: list[Sample]


class Joined(NamedTuple):
    """The steps of all attempts, with the last measurement of each; the steps that a later attempt repeated; all other
    samples that are still valid; and the attempts that contributed steps (empty if there was only one attempt)."""

    steps: list[Columns]
    redone: list[Columns]
    others: list[Sample]
    contributing: tuple[int, ...] = ()


def numbered(path: Path) -> bool:
    """Whether a file belongs to a run with lost attempts."""
    return number_of(path) is not None or path.name == ATTEMPTS


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
    """Join attempts by number, from the last to the first. The last measurement of a step counts.

    Starts, checkpoints and gauges of every attempt are kept, routings like steps; memory, traffic and profiles of the
    last one only.
    """
    joined = Joined([], [], [])
    again_from = None
    last = max(attempts)
    for number, attempt in reversed(list(attempts.items())):
        rows = [row for columns in attempt.steps for row in zip(*columns, strict=True)]
        kept = columns_of(row for row in rows if again_from is None or row[_STEP] < again_from)
        redone = columns_of(row for row in rows if again_from is not None and row[_STEP] >= again_from)
        valid: list[Sample] = []
        for sample in attempt.others:
            if isinstance(sample, StartSample | CheckpointSample):
                valid.append(dataclasses.replace(sample, attempt=number))
            elif isinstance(sample, RoutingSample):
                valid += [sample] if again_from is None or sample.step < again_from else []
            elif number == last or isinstance(sample, GaugeSample):
                valid.append(sample)
        contributing = (number, *joined.contributing) if kept else joined.contributing
        joined = Joined(kept + joined.steps, joined.redone + redone, valid + joined.others, contributing)
        began = min((row[_STEP] for row in rows), default=None)
        if began is not None:
            again_from = began if again_from is None else min(again_from, began)
    return joined
