"""Collectives: rows to nccl-tests' definitions, alpha-beta fits, overlap, and the slow link or node among peers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.analysis.findings import CollectiveFit, CollectiveRow, Measurement, Overlap, Pair, Suspect
from paceline.analysis.machine import alpha_beta, sweep, tournament
from paceline.analysis.machine.sweep import Entry
from paceline.analysis.statistics.intervals import OUTLIER_Z
from paceline.results.machine_samples import OverlapSample
from paceline.results.records import RunRecord

# Every rank has the same part in these and leaves only when all have come: whoever spends least time inside came last.
SYNCHRONISING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
LATE_RATIO = 0.9
FEWEST_ROWS = 4


@dataclass(frozen=True, slots=True)
class Fabric:
    """All that the collectives of a set of runs say."""

    rows: tuple[CollectiveRow, ...] = ()
    fits: tuple[CollectiveFit, ...] = ()
    overlaps: tuple[Overlap, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    pairs: tuple[Pair, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    notes: tuple[str, ...] = ()


def analyse(records: Sequence[RunRecord], invalid: Sequence[RunRecord] = ()) -> Fabric:
    """records ended ok. Of invalid ones the rows are shown, so that a reader sees which were wrong; nothing else is."""
    swept = [(entry, entry.resampled_time()) for entry in sweep.entries(records)]
    rows = [sweep.row_of(entry, time) for entry, time in swept]
    runs = {row.cell: entry.runs for (entry, _), row in zip(swept, rows, strict=True)}
    fits, unfitted = alpha_beta.fit_all(rows, runs)
    held = [tournament.hold(record) for record in records]
    measured = (m for (entry, time), row in zip(swept, rows, strict=True) for m in sweep.measurements(entry, row, time))
    return Fabric(
        rows=(*rows, *_rows_of_invalid(invalid)),
        fits=fits,
        overlaps=tuple(_overlaps(records)),
        suspects=(*merged(s for h in held for s in h.suspects), *_stragglers([entry for entry, _ in swept])),
        pairs=tuple(pair for h in held for pair in h.pairs),
        measurements=tuple(measured),
        notes=tuple(dict.fromkeys((*unfitted, *(note for h in held for note in h.notes)))),
    )


def _rows_of_invalid(records: Sequence[RunRecord]) -> Iterable[CollectiveRow]:
    for entry in sweep.entries(records):
        row = sweep.row_of(entry, entry.resampled_time())
        yield replace(row, status="invalid", error=row.error or "another row of this run arrived wrong")


def merged(suspects: Iterable[Suspect]) -> list[Suspect]:
    """What several launches say about the same ranks on the same hosts is one suspicion; the first one's text stays."""
    found: dict[tuple[object, ...], list[Suspect]] = {}
    for s in suspects:
        found.setdefault((s.kind, s.ranks, s.hosts), []).append(s)
    return [
        replace(same[0], runs=tuple(run for s in same for run in s.runs), confirmed=any(s.confirmed for s in same))
        for same in found.values()
    ]


# --- overlap ---


def _overlaps(records: Sequence[RunRecord]) -> Iterable[Overlap]:
    groups: dict[tuple[object, ...], dict[str, list[OverlapSample]]] = {}
    by_run = {r.spec.run_id: r for r in records}
    for record in records:
        for s in record.overlaps:
            key = (record.spec.cell, s.operation, s.dtype, s.size_bytes, s.group_size)
            groups.setdefault(key, {}).setdefault(record.spec.run_id, []).append(s)
    for launches in groups.values():
        yield _overlap(launches, by_run[next(iter(launches))])


def _overlap(launches: dict[str, list[OverlapSample]], record: RunRecord) -> Overlap:
    """hidden = (collective + compute - together) / collective, of means over iterations of the slowest rank in each."""
    first = next(iter(launches.values()))[0]
    collective, compute, together = (
        float(np.concatenate([_slowest(samples, name) for samples in launches.values()]).mean())
        for name in ("collective_s", "compute_s", "together_s")
    )
    return Overlap(
        operation=first.operation,
        dtype=first.dtype,
        world_size=first.group_size,
        size_bytes=first.size_bytes,
        collective_s=collective,
        compute_s=compute,
        together_s=together,
        hidden_ratio=min(max((collective + compute - together) / collective, 0.0), 1.0),
        axes=record.spec.axes(),
        runs=tuple(launches),
    )


def _slowest(samples: Sequence[OverlapSample], name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    iterations = min(len(getattr(s, name)) for s in samples)
    return np.asarray(np.max([getattr(s, name)[:iterations] for s in samples], axis=0), dtype=np.float64)


# --- a straggler over the whole sweep ---


def _stragglers(entries: Sequence[Entry]) -> Iterable[Suspect]:
    cells: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        alike = entry.first.operation in SYNCHRONISING and len(entry.rank_means) >= tournament.FEWEST_PEERS
        if alike and not entry.shared_gpu:
            cells[entry.records[0].spec.cell].append(entry)
    for found in cells.values():
        if len(found) >= FEWEST_ROWS:
            yield from _late_ranks(found)


def _late_ranks(entries: Sequence[Entry]) -> Iterable[Suspect]:
    """Ranks that came last in most rows, by enough to matter and by more than the others differ among themselves."""
    ranks = sorted(set.intersection(*(set(e.rank_means) for e in entries)))
    if len(ranks) < tournament.FEWEST_PEERS:
        return
    inside = np.array([[e.rank_means[r] for r in ranks] for e in entries])
    share = inside / np.median(inside, axis=1, keepdims=True)
    scores = np.median(share, axis=0)
    last = np.bincount(share.argmin(axis=1), minlength=len(ranks))
    for i, (rank, z) in enumerate(zip(ranks, tournament.modified_z(scores), strict=True)):
        if z < -OUTLIER_Z and scores[i] <= LATE_RATIO and 2 * last[i] > len(entries):
            yield _late(entries, rank, float(scores[i]), float(z), int(last[i]))


def _late(entries: Sequence[Entry], rank: int, share: float, z: float, last: int) -> Suspect:
    record = entries[0].records[0]
    place = tournament.places_of(record)[rank]
    name = tournament.rank_name(rank, place)
    return Suspect(
        kind=tournament.RANK,
        ranks=(rank,),
        hosts=(place.host,),
        devices=(place.device,),
        ratio=share,
        z=z,
        confirmed=False,
        text=f"{name} comes last in {last} of {len(entries)} rows: it spends {share:.0%} of the other ranks' time "
        "inside collectives, so they wait for it; a sweep has no second turn to confirm it",
        runs=tuple(dict.fromkeys(run for e in entries for run in e.runs)),
    )
