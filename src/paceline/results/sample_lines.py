"""The lines of samples-<rank>.jsonl: what a rank observed, read back quickly or refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from paceline.errors import StoreError
from paceline.results import safe_text
from paceline.results.machine_samples import (
    CollectiveSample,
    KernelSample,
    OverlapSample,
    ProductSample,
    TrajectorySample,
)
from paceline.results.records import SAMPLE_TYPES, GaugeSample, Sample, StepSample
from paceline.results.served_samples import LoadgenSample, RequestSample
from paceline.results.step_columns import StepSeries

# Samples that hold a tuple, which JSON knows as a list.
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
    """Samples of one rank; a last line cut short by a killed process is dropped, any other damage is an error."""
    return map(_sample, _rows(path))


_WHOLE_STEP = len(StepSeries.FIELDS) + 1
_step_values = itemgetter(*StepSeries.FIELDS)


def collect(path: Path, steps: list[Sequence[Any]], others: list[Sample]) -> None:
    """The samples of one rank, those of steps as bare values: an object for each would cost more than to read them."""
    rows = _rows(path)
    values = _values_of_steps(rows)
    if values is None:
        found = [_sample(row) for row in rows]
        steps += [StepSeries.values_of(sample) for sample in found if isinstance(sample, StepSample)]
        others += [sample for sample in found if not isinstance(sample, StepSample)]
    else:
        steps += values
        others += [_sample(row) for row in rows if row["kind"] != StepSample.kind]


def _values_of_steps(rows: Sequence[Any]) -> list[Sequence[Any]] | None:
    """None unless every row has a kind and every step exactly its fields: the long way then says what is wrong."""
    try:
        found = [row for row in rows if row["kind"] == StepSample.kind]
        values = list(map(_step_values, found))
    except (KeyError, TypeError):
        return None
    return values if sum(map(len, found)) == _WHOLE_STEP * len(found) else None


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
    """As the standard library reads it, in half the time; what the faster parser refuses, the slower one explains."""
    from pydantic_core import from_json

    try:
        rows: list[Any] = from_json(text)
    except ValueError:
        rows = json.loads(text)
    return rows
