"""Step samples of a run as columns: what is read by the thousand takes a fifth of the room."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from operator import attrgetter, eq
from typing import Any, ClassVar, TypeAlias, overload

from paceline.results.records import StepSample

Column: TypeAlias = "array[int] | array[float] | list[Any]"


class StepSeries(Sequence[StepSample]):
    """Steps of one run as a column per field; reads as the tuple of samples it stands for, in a fifth of the room.

    A column is an array where it holds every value exactly, else (something is missing) a list.
    """

    FIELDS: ClassVar[tuple[str, ...]] = tuple(f.name for f in fields(StepSample))
    _CODES: ClassVar[tuple[str, ...]] = tuple("d" if "float" in f.type else "iqQ" for f in fields(StepSample))
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
    """The narrowest of the arrays that holds all values."""
    for code in codes:
        with suppress(TypeError, OverflowError):
            return array(code, values)
    return list(values)
