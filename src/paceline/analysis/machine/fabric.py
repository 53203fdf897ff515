"""Collectives: rows by nccl-tests' definitions, alpha-beta fits, overlap, and slow links or nodes among peers.

t = alpha + S*f/beta for each operation: the cost of a start, and the cost of each byte on the wire. Weighted least
squares with weights 1/t^2 minimises relative errors: sizes span nine decades, and the largest alone would decide both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from paceline.analysis.findings import SHARED_GPU, CollectiveFit, CollectiveRow, Measurement, Overlap, Pair, Suspect
from paceline.analysis.grouping import grouped
from paceline.analysis.machine import sweep, tournament
from paceline.analysis.machine.sweep import Entry, factor_of
from paceline.analysis.statistics.intervals import OUTLIER_Z, Array
from paceline.results.machine_samples import OverlapSample
from paceline.results.records import RunRecord

# In these, every rank leaves only when all have arrived: the one that spends least time inside arrived last.
SYNCHRONISING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
LATE_RATIO = 0.9
FEWEST_SIZES = 4
# A note lists this many names; more are counted.
MOST_NAMED = 3
SURE_ERRORS = 2.0  # a slope within two standard errors of 0 gives no bandwidth
ALPHA_FIXED = "alpha came out negative and is fixed at 0"
FEWEST_ROWS = 4
_SAME_OVERLAP = ("operation", "dtype", "size_bytes", "group_size")


@dataclass(frozen=True, slots=True)
class Fabric:
    """All findings about the collectives of a set of runs."""

    rows: tuple[CollectiveRow, ...] = ()
    fits: tuple[CollectiveFit, ...] = ()
    overlaps: tuple[Overlap, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    pairs: tuple[Pair, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    notes: tuple[str, ...] = ()


def analyse(records: Sequence[RunRecord], invalid: Sequence[RunRecord] = ()) -> Fabric:
    """Findings about runs that ended ok. Rows of invalid runs are listed too, to show which were wrong, but nothing
    else is.
    """
    swept = [(entry, entry.resampled_time()) for entry in sweep.entries(records)]
    rows = [sweep.row_of(entry, time) for entry, time in swept]
    runs = {row.cell: entry.runs for (entry, _), row in zip(swept, rows, strict=True)}
    fits, unfitted = fit_all(rows, runs)
    tournaments = [tournament.judge_run(record) for record in records]
    measured = (m for (entry, time), row in zip(swept, rows, strict=True) for m in sweep.measurements(entry, row, time))
    rejected = []
    for entry in sweep.entries(invalid):
        row = sweep.row_of(entry, entry.resampled_time())
        rejected.append(replace(row, status="invalid", error=row.error or "another row of this run has wrong data"))
    return Fabric(
        rows=(*rows, *rejected),
        fits=fits,
        overlaps=tuple(_overlaps(records)),
        suspects=(*merged(s for t in tournaments for s in t.suspects), *_stragglers([entry for entry, _ in swept])),
        pairs=tuple(pair for t in tournaments for pair in t.pairs),
        measurements=tuple(measured),
        notes=tuple(dict.fromkeys((*unfitted, *(note for t in tournaments for note in t.notes)))),
    )


def merged(suspects: Iterable[Suspect]) -> list[Suspect]:
    """What several launches say about the same ranks on the same hosts is one suspicion, with the first text."""
    groups = grouped(suspects, lambda s: (s.kind, s.ranks, s.hosts)).values()
    return [
        replace(same[0], runs=tuple(run for s in same for run in s.runs), confirmed=any(s.confirmed for s in same))
        for same in groups
    ]


# --- fits ---


class Line(NamedTuple):
    """alpha in seconds, beta in bytes per second, residual as the RMS of relative errors; is_fixed: alpha was fixed at
    0.
    """

    alpha_s: float
    beta_bytes_per_s: float
    residual_ratio: float
    is_fixed: bool


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
    is_fixed = bool(alpha < 0)
    if is_fixed:
        columns[:, 0] = 0.0
        alpha, slope = 0.0, columns[:, 1].sum() / (columns[:, 1] @ columns[:, 1])
    errors = columns @ (alpha, slope) - 1
    # Standard error of the slope: sqrt(s^2 (A'A)^-1), s^2 the variance of the errors over the degrees of freedom.
    freedom = len(errors) - int(columns.any(axis=0).sum())
    variance = float(errors @ errors) / freedom if freedom else 0.0
    slope_error = math.sqrt(variance * float(np.linalg.pinv(columns.T @ columns)[1, 1]))
    if slope <= SURE_ERRORS * slope_error:
        return None
    return Line(float(alpha), scale / float(slope), math.sqrt(float(np.mean(errors**2))), is_fixed)


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
        notes = (ALPHA_FIXED if line.is_fixed else None, SHARED_GPU if SHARED_GPU in (first.note or "") else None)
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


# --- overlap ---


def _overlaps(records: Sequence[RunRecord]) -> Iterable[Overlap]:
    """hidden = (collective + compute - together) / collective, from means over iterations of the slowest rank in
    each.
    """

    def slowest(samples: Sequence[OverlapSample], name: str) -> Array:
        iterations = min(len(getattr(s, name)) for s in samples)
        return np.asarray(np.max([getattr(s, name)[:iterations] for s in samples], axis=0), dtype=np.float64)

    pairs = ((record.spec, s) for record in records for s in record.overlaps)
    groups = grouped(pairs, lambda pair: (pair[0].cell, *(getattr(pair[1], name) for name in _SAME_OVERLAP)))
    for group in groups.values():
        launches = grouped(group, lambda pair: pair[0].run_id)
        spec, first = group[0]
        collective, compute, together = (
            float(np.concatenate([slowest([s for _, s in launch], name) for launch in launches.values()]).mean())
            for name in ("collective_s", "compute_s", "together_s")
        )
        yield Overlap(
            operation=first.operation,
            dtype=first.dtype,
            world_size=first.group_size,
            size_bytes=first.size_bytes,
            collective_s=collective,
            compute_s=compute,
            together_s=together,
            hidden_ratio=min(max((collective + compute - together) / collective, 0.0), 1.0),
            axes=spec.axes(),
            runs=tuple(launches),
        )


# --- stragglers over the whole sweep ---


def _stragglers(entries: Sequence[Entry]) -> Iterable[Suspect]:
    """Ranks that arrived last in most rows of a cell, by enough to matter and by more than the others' spread."""
    usable = [e for e in entries if len(e.rank_means) >= tournament.FEWEST_PEERS and not e.shared_gpu]
    synchronising = [e for e in usable if e.first.operation in SYNCHRONISING]
    for of_cell in grouped(synchronising, lambda e: e.records[0].spec.cell).values():
        ranks = sorted(set.intersection(*(set(e.rank_means) for e in of_cell)))
        if len(of_cell) < FEWEST_ROWS or len(ranks) < tournament.FEWEST_PEERS:
            continue
        inside = np.array([[e.rank_means[r] for r in ranks] for e in of_cell])
        share = inside / np.median(inside, axis=1, keepdims=True)
        scores = np.median(share, axis=0)
        last = np.bincount(share.argmin(axis=1), minlength=len(ranks))
        for i, (rank, z) in enumerate(zip(ranks, tournament.modified_z(scores), strict=True)):
            if z >= -OUTLIER_Z or scores[i] > LATE_RATIO or 2 * last[i] <= len(of_cell):
                continue
            place = tournament.places_of(of_cell[0].records[0])[rank]
            yield Suspect(
                kind=tournament.RANK,
                ranks=(rank,),
                hosts=(place.host,),
                devices=(place.device,),
                ratio=float(scores[i]),
                z=float(z),
                confirmed=False,
                text=f"{tournament.rank_name(rank, place)} is last in {last[i]} of {len(of_cell)} rows: it spends "
                f"{scores[i]:.0%} of the other ranks' time inside collectives, so they wait for it; a sweep has no "
                "second turn to confirm it",
                runs=tuple(dict.fromkeys(run for e in of_cell for run in e.runs)),
            )
