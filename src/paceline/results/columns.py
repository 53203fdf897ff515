"""The steps of a sealed run as columns: steps.npy, written with the seal from the lines of all ranks.

The file is derived. A reader uses it instead of parsing the lines only if the seal says that it belongs to exactly
these lines; otherwise the lines count. It is one NumPy record with an array per field, without the fields that have no
value: `numpy.load("steps.npy")["duration_s"]`. Neither writing nor reading needs NumPy.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
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
from paceline.results.samples import STEP_LINE, Column, StepSeries, numbered, step_rules

FILE = "steps.npy"
# The field of the seal with the digest of the lines that the file was made from.
SOURCE = "columns_of"
_SAMPLES = re.compile(r"samples-.*\.jsonl")
_MAGIC = b"\x93NUMPY\x01\x00"
_ALIGNMENT = 64
_NAMES = {"i": "<i4", "q": "<i8", "Q": "<u8", "d": "<f8"}
_CODES = {name: code for code, name in _NAMES.items()}


def write(run_dir: Path, steps: StepSeries) -> bool:
    """Write the columns if they represent every value of every line exactly; returns whether they do."""
    path = run_dir / FILE
    path.unlink(missing_ok=True)
    lines = sorted(run_dir.glob("samples-*.jsonl"))
    kept = {name: steps.column(name) for name in StepSeries.FIELDS}
    kept = {name: column for name, column in kept.items() if not _is_absent(column)}
    # Attempts are joined while lines are read, and on other machines arrays have other bytes.
    if not steps or any(map(numbered, lines)) or sys.byteorder != "little":
        return False
    if not all(isinstance(column, array) for column in kept.values()):
        return False
    if sum(map(_step_lines, lines)) != len(steps):
        return False
    fields = [(name, _NAMES[column.typecode], (len(steps),)) for name, column in kept.items()]  # type: ignore[union-attr]
    header = repr({"descr": fields, "fortran_order": False, "shape": ()})
    padding = -(len(_MAGIC) + 2 + len(header) + 1) % _ALIGNMENT
    text = f"{header}{' ' * padding}\n".encode()
    try:
        with path.open("wb") as file:
            file.write(_MAGIC + struct.pack("<H", len(text)) + text)
            for column in kept.values():
                file.write(memoryview(column))  # type: ignore[arg-type]
    except OSError:
        # The disk is full: the lines are enough, and the seal needs the room.
        path.unlink(missing_ok=True)
        return False
    return True


def _step_lines(path: Path) -> int:
    return (b"\n" + path.read_bytes()).count(b"\n" + STEP_LINE.encode())


def _is_absent(column: Column) -> bool:
    return isinstance(column, list) and all(value is None for value in column)


def source(files: Mapping[str, Any]) -> str:
    """The digest of all lines of a run, from the entries of its seal."""
    lines = {name: entry for name, entry in files.items() if _SAMPLES.fullmatch(name)}
    return hashlib.sha256(json.dumps(lines, sort_keys=True).encode()).hexdigest()


def read(run_dir: Path, seal: Mapping[str, Any], content: bytes | None = None) -> StepSeries | None:
    """The steps of an intact run from its columns; None if it has none that belong to its lines.

    content: of the file, if it was read already.
    """
    files = seal["files"]
    if FILE not in files or seal.get(SOURCE) != source(files) or sys.byteorder != "little":
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
