"""t = alpha + S*f/beta for each operation: the cost of a start, and the cost of each byte on the wire.

Weighted least squares with weights 1/t^2, which minimises relative errors. Sizes span nine decades: without weights the
largest alone would decide both numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from paceline.analysis.findings import SHARED_GPU, CollectiveFit, CollectiveRow
from paceline.analysis.grouping import grouped
from paceline.analysis.machine.sweep import factor_of

FEWEST_SIZES = 4
# A note lists this many names; more are counted.
MOST_NAMED = 3
SURE_ERRORS = 2.0  # a slope within two standard errors of 0 gives no bandwidth
HELD_AT_ZERO = "alpha came out negative and is fixed at 0"


class Line(NamedTuple):
    """alpha in seconds, beta in bytes per second, residual as the RMS of relative errors; held: alpha was fixed at
    0.
    """

    alpha_s: float
    beta_bytes_per_s: float
    residual_ratio: float
    held: bool


def line_through(sent_bytes: Sequence[float], seconds: Sequence[float]) -> Line | None:
    """alpha >= 0 and beta > 0, or None if time does not grow significantly with size. sent_bytes is S*f.

    >>> line = line_through([1e6, 2e6, 4e6, 8e6], [1.1e-4, 2.1e-4, 4.1e-4, 8.1e-4])
    >>> f"{line.alpha_s:.1e} s, {line.beta_bytes_per_s:.2e} bytes/s"
    '1.0e-05 s, 1.00e+10 bytes/s'
    """
    x, t = np.asarray(sent_bytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    scale = float(x.max())
    columns = np.column_stack([1 / t, x / scale / t])  # relative: alpha/t + slope*x/t should be 1
    (alpha, slope), *_ = np.linalg.lstsq(columns, np.ones(len(t)), rcond=None)
    held = bool(alpha < 0)
    if held:
        columns[:, 0] = 0.0
        alpha, slope = 0.0, columns[:, 1].sum() / (columns[:, 1] @ columns[:, 1])
    errors = columns @ (alpha, slope) - 1
    # Standard error of the slope: sqrt(s^2 (A'A)^-1), s^2 the variance of the errors over the degrees of freedom.
    freedom = len(errors) - int(columns.any(axis=0).sum())
    variance = float(errors @ errors) / freedom if freedom else 0.0
    slope_error = math.sqrt(variance * float(np.linalg.pinv(columns.T @ columns)[1, 1]))
    if slope <= SURE_ERRORS * slope_error:
        return None
    return Line(float(alpha), scale / float(slope), math.sqrt(float(np.mean(errors**2))), held)


def fit_all(
    rows: Sequence[CollectiveRow], runs: Mapping[str, tuple[str, ...]]
) -> tuple[tuple[CollectiveFit, ...], tuple[str, ...]]:
    """One fit per cell, operation, dtype, world size and in-place mode, and notes on those without one.

    `single` rows are fitted if they cover enough sizes: a batch or a graph of launches hides part of alpha.
    """
    timed = [row for row in rows if row.status == "ok" and row.time_s and row.size_bytes]
    moved = [row for row in timed if factor_of(row.operation, row.world_size)]
    fits, flat, short = [], [], []
    for group in grouped(moved, lambda r: (r.cell, r.operation, r.dtype, r.world_size, r.in_place)).values():
        by_mode: dict[str, dict[int, CollectiveRow]] = {}
        for row in group:
            by_mode.setdefault(row.mode, {}).setdefault(row.size_bytes, row)
        single = by_mode.get("single", {})
        by_size = single if len(single) >= FEWEST_SIZES else max(by_mode.values(), key=len)
        chosen = [by_size[size] for size in sorted(by_size)]
        first = chosen[0]
        if len(chosen) < FEWEST_SIZES:
            short.append(f"{first.operation} in {first.dtype}")
            continue
        factor = factor_of(first.operation, first.world_size) or 0.0
        line = line_through([row.size_bytes * factor for row in chosen], [row.time_s or 0.0 for row in chosen])
        if line is None:
            flat.append(f"{first.operation} in {first.dtype}")
            continue
        notes = (HELD_AT_ZERO if line.held else None, SHARED_GPU if SHARED_GPU in (first.note or "") else None)
        fits.append(
            CollectiveFit(
                operation=first.operation,
                dtype=first.dtype,
                world_size=first.world_size,
                in_place=first.in_place,
                alpha_s=line.alpha_s,
                beta_bytes_per_s=line.beta_bytes_per_s,
                residual_ratio=line.residual_ratio,
                sizes=len(chosen),
                axes=first.axes,
                runs=runs[first.cell],
                note="; ".join(filter(None, notes)) or None,
            )
        )
    unfitted = []
    for reason, all_names in (
        ("time does not grow significantly with size", flat),
        (f"a fit needs {FEWEST_SIZES} sizes", short),
    ):
        names = list(dict.fromkeys(all_names))
        if len(names) > MOST_NAMED:
            names = [f"{len(names)} pairs of operation and dtype, such as {', '.join(names[:2])}"]
        if names:
            unfitted.append(f"no alpha-beta fit for {', '.join(names)}: {reason}")
    return tuple(fits), tuple(unfitted)
