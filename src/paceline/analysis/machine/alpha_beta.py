"""t = alpha + S*f/beta for each operation: what a start costs, and what a byte on the wire costs after it.

Weighted least squares with weights 1/t^2, which minimises relative errors: sizes span nine decades, and without weights
the largest alone would decide both numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from paceline.analysis.findings import SHARED_GPU, CollectiveFit, CollectiveRow
from paceline.analysis.machine.sweep import factor_of
from paceline.analysis.statistics.intervals import Array

FEWEST_SIZES = 4
# More than this are counted, not listed, in a note.
MOST_NAMED = 3
SURE_ERRORS = 2.0  # a slope within two standard errors of 0 tells no bandwidth
HELD_AT_ZERO = "alpha came out negative and is held at 0"


class Line(NamedTuple):
    """alpha in seconds, beta in bytes per second, residual as the RMS of relative errors; held: alpha was set to 0."""

    alpha_s: float
    beta_bytes_per_s: float
    residual_ratio: float
    held: bool


def line_through(sent_bytes: Sequence[float], seconds: Sequence[float]) -> Line | None:
    """alpha >= 0 and beta > 0, or None where time does not grow with size by more than its noise. sent_bytes is S*f."""
    x, t = np.asarray(sent_bytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    scale = float(x.max())
    columns = np.column_stack([1 / t, x / scale / t])  # relative: alpha/t + slope*x/t shall be 1
    (alpha, slope), *_ = np.linalg.lstsq(columns, np.ones(len(t)), rcond=None)
    held = bool(alpha < 0)
    if held:
        columns[:, 0] = 0.0
        alpha, slope = 0.0, columns[:, 1].sum() / (columns[:, 1] @ columns[:, 1])
    errors = columns @ (alpha, slope) - 1
    if slope <= SURE_ERRORS * _slope_error(columns, errors):
        return None
    return Line(float(alpha), scale / float(slope), math.sqrt(float(np.mean(errors**2))), held)


def _slope_error(columns: Array, errors: Array) -> float:
    """Standard error of the slope: sqrt(s^2 (A'A)^-1), s^2 the errors' variance with what the fit used up taken off."""
    free = len(errors) - int(columns.any(axis=0).sum())
    variance = float(errors @ errors) / free if free else 0.0
    return math.sqrt(variance * float(np.linalg.pinv(columns.T @ columns)[1, 1]))


def fit_all(
    rows: Sequence[CollectiveRow], runs: Mapping[str, tuple[str, ...]]
) -> tuple[tuple[CollectiveFit, ...], tuple[str, ...]]:
    """One fit per cell, operation, dtype, world size and place, and a sentence on those that have none.

    `single` rows are fitted where they span enough sizes: a batch or a graph of launches hides part of alpha.
    """
    groups: dict[tuple[object, ...], list[CollectiveRow]] = {}
    for row in rows:
        if row.status == "ok" and row.time_s and factor_of(row.operation, row.world_size) and row.size_bytes:
            groups.setdefault((row.cell, row.operation, row.dtype, row.world_size, row.in_place), []).append(row)
    fits, flat, short = [], [], []
    for group in groups.values():
        chosen = _one_mode(group)
        if len(chosen) >= FEWEST_SIZES:
            found = _fit(chosen, runs[chosen[0].cell])
            fits += [found] if found else []
            flat += [] if found else [f"{chosen[0].operation} in {chosen[0].dtype}"]
        else:
            short.append(f"{chosen[0].operation} in {chosen[0].dtype}")
    reasons = {
        "time does not grow with size by more than its noise": flat,
        f"it needs {FEWEST_SIZES} sizes": short,
    }
    notes = (f"no alpha-beta fit of {_counted(tuple(dict.fromkeys(n)))}: {why}" for why, n in reasons.items() if n)
    return tuple(fits), tuple(notes)


def _counted(names: Sequence[str]) -> str:
    """All of a few; else how many, and the first of them: the tables show which have none."""
    if len(names) <= MOST_NAMED:
        return ", ".join(names)
    return f"{len(names)} pairs of operation and dtype, such as {', '.join(names[:2])}"


def _one_mode(group: Sequence[CollectiveRow]) -> list[CollectiveRow]:
    """Rows of one mode, one per size: `single` if it has enough, else the mode with most sizes."""
    by_mode: dict[str, dict[int, CollectiveRow]] = {}
    for row in group:
        by_mode.setdefault(row.mode, {}).setdefault(row.size_bytes, row)
    single = by_mode.get("single", {})
    chosen = single if len(single) >= FEWEST_SIZES else max(by_mode.values(), key=len)
    return [chosen[size] for size in sorted(chosen)]


def _fit(rows: Sequence[CollectiveRow], runs: tuple[str, ...]) -> CollectiveFit | None:
    first = rows[0]
    factor = factor_of(first.operation, first.world_size) or 0.0
    line = line_through([row.size_bytes * factor for row in rows], [row.time_s or 0.0 for row in rows])
    if line is None:
        return None
    notes = (HELD_AT_ZERO if line.held else None, SHARED_GPU if SHARED_GPU in (first.note or "") else None)
    return CollectiveFit(
        operation=first.operation,
        dtype=first.dtype,
        world_size=first.world_size,
        in_place=first.in_place,
        alpha_s=line.alpha_s,
        beta_bytes_per_s=line.beta_bytes_per_s,
        residual_ratio=line.residual_ratio,
        sizes=len(rows),
        axes=first.axes,
        runs=runs,
        note="; ".join(filter(None, notes)) or None,
    )
