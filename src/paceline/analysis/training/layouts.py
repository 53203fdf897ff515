"""What crosses each dimension of a layout, counted beside its formula, and the bubble of a pipeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from paceline.analysis.findings import LayoutRow
from paceline.analysis.grouping import grouped
from paceline.analysis.training import routing
from paceline.errors import RequestError
from paceline.experiment.layout import DIMENSIONS, Layout, balanced_split, declared_layout, stage_times
from paceline.models import arithmetic, parallel
from paceline.results.records import RunRecord
from paceline.wording import format_parts


def analyse(records: Iterable[RunRecord]) -> tuple[LayoutRow, ...]:
    """One row per dimension of more than one rank, for each cell whose strategy declares a layout."""
    split = [record for record in records if record.wire and declared_layout(record.spec)]
    return tuple(row for runs in grouped(split, lambda r: r.spec.cell).values() for row in _rows(runs))


def terms(runs: Sequence[RunRecord]) -> str | None:
    """What the layout of one cell costs, in words: by dimension bytes and exposed time, the bubble, and how unevenly
    experts are used. None without a layout."""
    rows = analyse(runs)
    parts = [_term(row) for row in rows]
    parts += [f"busiest expert {row.imbalance_ratio:.3g} times the mean" for row in routing.analyse(runs) if rows]
    return ", ".join(parts) or None


def _term(row: LayoutRow) -> str:
    known = [
        None if row.counted_bytes is None else f"{format_parts(row.counted_bytes / 1e6, None, None)[0]} MB",
        None if row.exposed_ratio is None else f"{row.exposed_ratio:.1%} exposed",
        None if row.idle_ratio is None else f"{row.idle_ratio:.1%} idle",
    ]
    return f"{DIMENSIONS[row.dimension]} {' and '.join(each for each in known if each) or 'not measured'}"


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
                exposed_ratio=_exposed(runs, layout, dimension),
                **(_balance(runs, layout) if pipeline else {}),
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


def _exposed(runs: Sequence[RunRecord], layout: Layout, dimension: str) -> float | None:
    """Exposed over wall time, the mean over ranks and launches; None unless every rank has it."""
    samples = [s for run in runs for s in run.exposures if s.dimension == dimension and s.wall_s > 0]
    if len({sample.rank for sample in samples}) < layout.world_size:
        return None
    return fmean(sample.exposed_s / sample.wall_s for sample in samples)


def exposed_by_dimension(record: RunRecord, rank: int, exposed_s: float) -> tuple[tuple[str, float], ...]:
    """Exposed time by mesh dimension, in the shares of the steps that observe every operator, which are slower."""
    ours = grouped((s for s in record.exposures if s.rank == rank), lambda sample: sample.dimension)
    times = {name: sum(sample.exposed_s for sample in samples) for name, samples in ours.items()}
    whole = sum(times.values())
    return tuple((name, exposed_s * value / whole) for name, value in times.items() if value > 0)


def _balance(runs: Sequence[RunRecord], layout: Layout) -> dict[str, Any]:
    """How evenly the stages of a pipeline share the measured times of the model's parts, and how they could."""
    samples = [sample for run in runs for sample in run.pipelines]
    parts = []
    for name in ("embedding_s", "block_s", "head_s"):
        known = [value for sample in samples if (value := getattr(sample, name)) is not None]
        parts.append(fmean(known) if known else None)
    if layout.virtual > 1 or None in parts:
        return {}
    embedding, block, head = (part or 0.0 for part in parts)
    layers = runs[0].shape.layers
    own = tuple(len(layout.layers_of(stage, layers)) for stage in range(layout.stages))
    best = balanced_split(layers, layout.stages, embedding, block, head)

    def ratio(split: Sequence[int]) -> float:
        times = stage_times(split, embedding, block, head)
        return max(times) / fmean(times)

    # Equal shares stay where nothing is faster.
    best = own if ratio(best) >= ratio(own) else best
    return {
        "split": "+".join(map(str, own)),
        "balance_ratio": ratio(own),
        "best_split": "+".join(map(str, best)),
        "best_balance_ratio": ratio(best),
    }


def _idle(runs: Sequence[RunRecord], layout: Layout) -> float | None:
    """1 - busy / wall, the mean over ranks, steps and launches."""
    samples = [sample for run in runs for sample in run.pipelines if sample.wall_s > 0]
    ranks = {sample.rank for sample in samples}
    if len(ranks) < layout.world_size:
        return None
    return fmean(1 - sample.busy_s / sample.wall_s for sample in samples)
