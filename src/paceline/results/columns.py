"""The samples of a sealed run as columns: steps.npy has the steps of all ranks, samples-all.jsonl all other samples.

Both are written with the seal, and replace the lines that ranks wrote. steps.npy is one NumPy record with an array per
field, without the fields that have no value: `numpy.load("steps.npy")["duration_s"]`. Writing it does not need NumPy.
"""

from __future__ import annotations

import ast
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from paceline.errors import damaged
from paceline.results import sealing
from paceline.results.samples import STEP_LINE, Column, StepSeries, numbered, step_rules, without_steps

FILE, OTHERS = "steps.npy", "samples-all.jsonl"
_MAGIC = b"\x93NUMPY\x01\x00"
_ALIGNMENT = 64
_NAMES = {"i": "<i4", "q": "<i8", "Q": "<u8", "d": "<f8"}
_CODES = {name: code for code, name in _NAMES.items()}


def write(run_dir: Path, steps: StepSeries) -> dict[str, int]:
    """Write the samples of the run as columns; returns the files of lines that they replace, with their sizes.

    Nothing is written, and the lines stay, if columns do not represent every value of every line exactly.
    """
    for name in (FILE, OTHERS):
        (run_dir / name).unlink(missing_ok=True)
    kept = {name: steps.column(name) for name in StepSeries.FIELDS}
    kept = {name: column for name, column in kept.items() if not _is_absent(column)}
    lines = sorted(run_dir.glob("samples-*.jsonl"))
    # Attempts are joined while lines are read, and on other machines arrays have other bytes.
    if not steps or any(map(numbered, lines)) or sys.byteorder != "little":
        return {}
    if not all(isinstance(column, array) for column in kept.values()):
        return {}
    replaced: dict[str, int] = {}
    others, count = [], 0
    for path in lines:
        content = path.read_bytes()
        if own := (b"\n" + content).count(b"\n" + STEP_LINE.encode()):
            # A line that was cut off is evidence, which only the lines have.
            if not content.endswith(b"\n"):
                return {}
            count += own
            others.append(without_steps(content))
            replaced[path.name] = len(content)
    if count != len(steps):
        return {}
    fields = [(name, _NAMES[column.typecode], (len(steps),)) for name, column in kept.items()]  # type: ignore[union-attr]
    header = repr({"descr": fields, "fortran_order": False, "shape": ()})
    padding = -(len(_MAGIC) + 2 + len(header) + 1) % _ALIGNMENT
    text = f"{header}{' ' * padding}\n".encode()
    try:
        with (run_dir / FILE).open("wb") as file:
            file.write(_MAGIC + struct.pack("<H", len(text)) + text)
            for column in kept.values():
                file.write(memoryview(column))  # type: ignore[arg-type]
        (run_dir / OTHERS).write_bytes(b"".join(part + b"\n" for part in others if part))
    except OSError:
        # The disk is full: the lines are enough, and the seal needs the room.
        for name in (FILE, OTHERS):
            (run_dir / name).unlink(missing_ok=True)
        return {}
    return replaced


def _is_absent(column: Column) -> bool:
    return isinstance(column, list) and all(value is None for value in column)


def replace_lines(seal: Mapping[str, Any]) -> bool:
    """Whether the steps of a run are columns; otherwise they are lines."""
    return sealing.REPLACED in seal


def read(run_dir: Path, seal: Mapping[str, Any], content: bytes | None = None) -> StepSeries | None:
    """The steps of an intact run from its columns; None if its steps are lines.

    content: of the file, if it was read already.
    """
    if not replace_lines(seal):
        return None
    try:
        columns, ranges = _parsed((run_dir / FILE).read_bytes() if content is None else content)
    except (OSError, ValueError, KeyError, TypeError, SyntaxError, RecursionError, MemoryError, struct.error) as error:
        raise damaged(run_dir, f"{FILE} cannot be read ({str(error)[:100]})") from None
    # One list for all fields without values: it is as long as the run has steps.
    absent: list[None] = [None] * len(next(iter(columns.values())))
    rules = step_rules()
    for name in StepSeries.FIELDS:
        column = columns.setdefault(name, absent)
        fits = rules[name].fits_range(*ranges[name]) if name in ranges else rules[name].fits(column[:1])
        if not fits:
            raise damaged(run_dir, f"{FILE}: {name} has a value that cannot be")
    return StepSeries.from_columns(columns)


Ranges = dict[str, tuple[float, float]]


def _parsed(raw: bytes) -> tuple[dict[str, Column], Ranges]:
    """The arrays of the file, and the smallest and the largest value of each; ValueError if it is not as `write` writes
    it."""
    start = len(_MAGIC) + 2
    (size,) = struct.unpack_from("<H", raw, len(_MAGIC))
    if raw[: len(_MAGIC)] != _MAGIC:
        raise ValueError("not a file of NumPy")
    fields = _fields(raw[start : start + size])
    columns: dict[str, Column] = {}
    view, position = memoryview(raw), start + size
    for name, kind, (length,) in fields:
        if name not in StepSeries.FIELDS or name in columns or type(length) is not int or length < 1:
            raise ValueError(f"the field {name!r:.60}")
        column = array(_CODES[kind])
        end = position + length * column.itemsize
        column.frombytes(view[position:end])
        if sys.byteorder == "big":
            column.byteswap()
        if len(column) != length or length != len(next(iter(columns.values()), column)):
            raise ValueError(f"the length of {name}")
        columns[name], position = column, end
    if position != len(raw):
        raise ValueError(f"{len(raw) - position} bytes too many")
    return columns, _ranges(raw, start + size, fields)


def _ranges(raw: bytes, position: int, fields: Sequence[tuple[str, str, tuple[int]]]) -> Ranges:
    """The smallest and the largest value of each field; the first begins at this position."""
    # Not at the top: ranks and agents check what they read, too, and start without it.
    import numpy as np

    found: Ranges = {}
    # Neighbours of one type are one array: a call of NumPy takes longer than a few hundred numbers.
    for kind, group in groupby(fields, itemgetter(1)):
        names, (length, *_) = zip(*((name, length) for name, _, (length,) in group), strict=True)
        values = np.frombuffer(raw, kind, len(names) * length, position).reshape(len(names), length)
        found |= zip(names, zip(values.min(axis=1).tolist(), values.max(axis=1).tolist(), strict=True), strict=True)
        position += values.nbytes
    return found


@lru_cache(maxsize=64)
def _fields(header: bytes) -> list[tuple[str, str, tuple[int]]]:
    """The fields that the header declares. The runs of a campaign have few different ones."""
    declared = ast.literal_eval(header.decode("ascii").strip())
    if declared["shape"] != () or not declared["descr"]:
        raise ValueError("not a record of arrays")
    return list(declared["descr"])
