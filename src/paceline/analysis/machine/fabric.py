"""Collectives: rows by nccl-tests' definitions, alpha-beta fits, overlap, and slow links or nodes among peers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.analysis.findings import CollectiveFit, CollectiveRow, Measurement, Overlap, Pair, Suspect
from paceline.analysis.grouping import grouped
from paceline.analysis.machine import alpha_beta, sweep, tournament
from paceline.analysis.machine.sweep import Entry
from paceline.analysis.statistics.intervals import OUTLIER_Z, Array
from paceline.results.machine_samples import OverlapSample
from paceline.results.records import RunRecord

# In these, every rank leaves only when all have arrived: the one that spends least time inside arrived last.
SYNCHRONISING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
LATE_RATIO = 0.9
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
    fits, unfitted = alpha_beta.fit_all(rows, runs)
    tournaments = [tournament.hold(record) for record in records]
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
