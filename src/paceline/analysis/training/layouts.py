"""What crosses each dimension of a layout, counted beside its formula, and the bubble of a pipeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean

from paceline.analysis.findings import LayoutRow
from paceline.analysis.grouping import grouped
from paceline.errors import RequestError
from paceline.experiment.layout import Layout, declared_layout
from paceline.models import arithmetic, parallel
from paceline.results.records import RunRecord


def analyse(records: Iterable[RunRecord]) -> tuple[LayoutRow, ...]:
    """One row per dimension of more than one rank, for each cell whose strategy declares a layout."""
    split = [record for record in records if record.wire and declared_layout(record.spec)]
    return tuple(row for runs in grouped(split, lambda r: r.spec.cell).values() for row in _rows(runs))


def _rows(runs: Sequence[RunRecord]) -> list[LayoutRow]:
    record, layout = runs[0], declared_layout(runs[0].spec)
    assert layout is not None
    training = record.spec.training
    counted = [_counted(run) for run in runs]
    formulas = [parallel.sent_bytes(record.shape, layout, training, rank) for rank in range(layout.world_size)]
    rows = []
    for dimension, size in layout.sizes().items():
        known = [found[dimension] for found in counted if dimension in found]
        predicted = [by_rank[dimension] for by_rank in formulas if by_rank is not None and dimension in by_rank]
        pipeline = dimension == "pp"
        rows.append(
            LayoutRow(
                cell=record.spec.cell,
                axes=record.spec.axes(),
                dimension=dimension,
                size=size,
                counted_bytes=fmean(known) if known else None,
                formula_bytes=max(predicted, default=None),
                formula=parallel.FORMULAS[dimension],
                idle_ratio=_idle(runs, layout) if pipeline else None,
                idle_formula_ratio=layout.bubble_ratio(parallel.micro_batches(layout, training)) if pipeline else None,
                runs=tuple(run.spec.run_id for run in runs),
            )
        )
    return rows


def _counted(run: RunRecord) -> dict[str, float]:
    """Bytes that the busiest rank sends per step over each dimension; a dimension is left out if one is unknown."""
    sent: defaultdict[str, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    steps = len({sample.step for sample in run.wire})
    unknown = set()
    for sample in run.wire:
        if sample.dimension is None:
            continue
        try:
            factor = arithmetic.wire_factor(sample.operation, sample.group_size)
        except RequestError:
            unknown.add(sample.dimension)
            continue
        sent[sample.dimension][sample.rank] += sample.payload_bytes * factor
    return {name: max(ranks.values()) / steps for name, ranks in sent.items() if name not in unknown}


def _idle(runs: Sequence[RunRecord], layout: Layout) -> float | None:
    """1 - busy / wall, the mean over ranks, steps and launches."""
    samples = [sample for run in runs for sample in run.pipelines if sample.wall_s > 0]
    ranks = {sample.rank for sample in samples}
    if len(ranks) < layout.world_size:
        return None
    return fmean(1 - sample.busy_s / sample.wall_s for sample in samples)
