"""How evenly the routers of a mixture of experts spread the tokens over experts, and over the ranks that have them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean

from paceline.analysis.findings import RoutingRow
from paceline.analysis.grouping import grouped
from paceline.experiment.layout import layout_of
from paceline.results.records import RoutingSample, RunRecord


def analyse(records: Iterable[RunRecord]) -> tuple[RoutingRow, ...]:
    """One row for each cell with a mixture of experts."""
    routed = [record for record in records if _measured(record) and not record.proves_only]
    return tuple(_row(runs) for runs in grouped(routed, lambda r: r.spec.cell).values())


def _measured(run: RunRecord) -> list[RoutingSample]:
    """The samples after the first steps, whose routing is that of random weights."""
    first = min(run.spec.warmup.minimum, run.spec.steps - 1)
    return [
        s for s in run.routings if s.step >= first and s.layers and s.balances and len(s.positions) >= len(s.layers)
    ]


def _row(runs: Sequence[RunRecord]) -> RoutingRow:
    shape, layout = runs[0].shape, layout_of(runs[0].spec)
    layers: defaultdict[int, list[float]] = defaultdict(list)
    ranks, balances = [], []
    for run in runs:
        samples = _measured(run)
        for (_, layer), tokens in _by_layer(samples).items():
            layers[layer].append(imbalance(tokens))
        ranks += [imbalance(rows) for rows in _by_rank(samples).values()]
        balances += [balance * layout.cp for sample in samples for balance in sample.balances]
    return RoutingRow(
        cell=runs[0].spec.cell,
        axes=runs[0].spec.axes(),
        experts=shape.experts or 0,
        experts_per_token=shape.experts_per_token or 0,
        imbalance_ratio=fmean(value for values in layers.values() for value in values),
        worst_layer_ratio=max(fmean(values) for values in layers.values()),
        rank_imbalance_ratio=fmean(ranks) if layout.ep > 1 else None,
        balance=fmean(balances),
        products=str(runs[0].evidence.settings.get("expert_products", "")) if runs[0].evidence else "",
        runs=tuple(run.spec.run_id for run in runs),
    )


def imbalance(tokens: Sequence[int]) -> float:
    """The largest over the mean: 1 is balanced, and the number of experts if one gets all.

    >>> imbalance([30, 10, 10, 10])
    2.0
    """
    return max(tokens) * len(tokens) / max(sum(tokens), 1)


def _by_layer(samples: Iterable[RoutingSample]) -> dict[tuple[int, int], list[int]]:
    """Tokens of each expert over all ranks and choices, by step and layer."""
    found: dict[tuple[int, int], list[int]] = {}
    for sample in samples:
        experts = len(sample.positions) // len(sample.layers)
        size = len(sample.assigned) // len(sample.layers)
        for number, layer in enumerate(sample.layers):
            tokens = found.setdefault((sample.step, layer), [0] * experts)
            for place, count in enumerate(sample.assigned[number * size : (number + 1) * size]):
                tokens[place % experts] += count
    return found


def _by_rank(samples: Iterable[RoutingSample]) -> dict[tuple[int, tuple[int, ...]], list[int]]:
    """Rows that each rank computed, by step, for ranks with the same layers."""
    found: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for sample in samples:
        found.setdefault((sample.step, tuple(sample.layers)), []).append(sum(sample.computed))
    return found
