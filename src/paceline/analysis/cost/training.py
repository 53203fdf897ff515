"""Cost of a token, from measured throughput and a price with its source.

usd_per_mtok = price per GPU-hour * N * 1e6 / (3600 * tokens/s); tokens_per_usd is its inverse (method.md, section 4). A
price is taken as exact: intervals are those of the throughput. Samples of different lengths are never compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from paceline.analysis.findings import (
    BETTER,
    HIGHER,
    LOWER,
    SHARED_GPU,
    Cost,
    Measurement,
    NodeVerdict,
    Recommendation,
    Report,
    Saving,
)
from paceline.analysis.statistics.intervals import Resampled, launches_note
from paceline.analysis.training import metrics
from paceline.analysis.training.metrics import Cell, device_kind
from paceline.host import prices
from paceline.host.prices import Price

SECONDS_PER_HOUR = 3600.0
METRICS = {
    "usd_per_mtok": ("USD/Mtoken", LOWER),
    "tokens_per_usd": ("tokens/USD", HIGHER),
    "usd_per_1k_samples": ("USD/1000 samples", LOWER),
    "train_time_s": ("s", LOWER),
    "train_cost_usd": ("USD", LOWER),
    "samples_time_s": ("s", LOWER),
    "samples_cost_usd": ("USD", LOWER),
}
# Metrics that hold for samples of one length and data only.
PER_SAMPLE = ("usd_per_1k_samples", "samples_time_s", "samples_cost_usd")


@dataclass(frozen=True, slots=True)
class Costing:
    """Requested prices (None: those of the table that match the GPU), tokens or samples of a whole training, and the
    assumed hours per day in which reserved devices serve.
    """

    prices: tuple[Price, ...] | None = None
    train_tokens: int | None = None
    train_samples: int | None = None
    busy_hours: float = 8.0

    @property
    def goal(self) -> str | None:
        """The option that requested a whole training."""
        asked = {"--train-tokens": self.train_tokens, "--train-samples": self.train_samples}
        return next((option for option, count in asked.items() if count is not None), None)


# --- formulas ---


def tokens_per_usd(usd_per_gpu_hour: float, devices: int, tokens_per_s: float) -> float:
    """Tokens of one hour over the USD of that hour for all devices.

    >>> tokens_per_usd(usd_per_gpu_hour=2.0, devices=8, tokens_per_s=100_000)
    22500000.0
    """
    return SECONDS_PER_HOUR * tokens_per_s / (usd_per_gpu_hour * devices)


def usd_per_mtok(usd_per_gpu_hour: float, devices: int, tokens_per_s: float) -> float:
    """USD per million tokens.

    >>> round(usd_per_mtok(usd_per_gpu_hour=2.0, devices=8, tokens_per_s=100_000), 4)
    0.0444
    """
    return 1e6 / tokens_per_usd(usd_per_gpu_hour, devices, tokens_per_s)


def usd_per_1k_samples(usd_per_gpu_hour: float, devices: int, samples_per_s: float) -> float:
    """USD per 1,000 samples.

    >>> usd_per_1k_samples(usd_per_gpu_hour=3.6, devices=1, samples_per_s=10.0)
    0.1
    """
    return usd_per_gpu_hour * devices * 1000 / (SECONDS_PER_HOUR * samples_per_s)


# --- cells ---


def added_to(report: Report, cells: Sequence[Cell], costing: Costing) -> Report:
    """The report with the costs of every cell whose device has a price, and what the recommended choice saves there."""
    rows = tuple(row for cell in cells for price in prices_of(cell, costing) for row in _costs(cell, price, costing))
    savings = (_saving(r) for r in report.recommendations if r.metric == "tokens_per_s" and r.over)
    measurements, timed = list(report.measurements), set()
    for c in rows:
        measurements += (c.usd_per_mtok, c.tokens_per_usd, c.usd_per_1k_samples)
        measurements += (m for m in (c.train_cost_usd, c.samples_cost_usd) if m)
        # The time to train does not depend on the price.
        measurements += (m for m in (c.train_time_s, c.samples_time_s) if m and c.cell not in timed)
        timed.add(c.cell)
    return dataclasses.replace(
        report,
        costs=rows,
        savings=tuple(s for s in savings if s and s.cell in timed),
        measurements=tuple(measurements),
        notes=(*report.notes, *_notes(cells, rows, costing)),
    )


def of_nodes(nodes: Sequence[NodeVerdict], costing: Costing) -> tuple[NodeVerdict, ...]:
    """The nodes with the cost of their own training speed, at the lowest price that applies to all their devices."""
    offered = prices.table() if costing.prices is None else costing.prices
    found = []
    for node in nodes:
        applies = [p.usd_per_gpu_hour for p in offered if all(p.holds_for(device) for device in node.devices)]
        if node.tokens_per_s and applies:
            usd = usd_per_mtok(min(applies), len(node.devices), node.tokens_per_s)
            node = dataclasses.replace(node, usd_per_mtok=usd)
        found.append(node)
    return tuple(found)


def device_of(cell: Cell) -> str | None:
    """The kind of GPU the cell ran on, None for a CPU. A MIG slice, several kinds and an unrecorded one have no
    price.
    """
    return device_kind(cell) if cell.spec.topology.device == "cuda" else None


def prices_of(cell: Cell, costing: Costing) -> list[Price]:
    """Prices, cheapest first; none for a shared GPU, which says nothing about speed."""
    if cell.shared_gpu:
        return []
    gpu = device_of(cell)
    offered = prices.table() if costing.prices is None else costing.prices
    return sorted((p for p in offered if p.holds_for(gpu)), key=lambda p: (p.usd_per_gpu_hour, p.name))


def _costs(cell: Cell, price: Price, costing: Costing) -> Iterable[Cost]:
    tokens, samples = (metrics.estimate(cell, name) for name in ("tokens_per_s", "samples_per_s"))
    if tokens is None or samples is None:
        return
    devices, usd = cell.spec.topology.world_size, price.usd_per_gpu_hour
    of_tokens = metrics.unit_of("tokens_per_s", cell.windows[0].record) == "tokens/s"
    goal, count = costing.train_tokens if of_tokens else None, costing.train_samples

    def measured(
        metric: str, rate: Resampled, formula: Callable[[float], float], at: Price | None = price
    ) -> Measurement:
        return _measurement(cell, at, metric, rate, formula)

    yield Cost(
        cell=cell.id,
        axes=cell.axes,
        price=price,
        devices=devices,
        usd_per_hour=usd * devices,
        usd_per_mtok=measured("usd_per_mtok", tokens, lambda rate: usd_per_mtok(usd, devices, rate)),
        tokens_per_usd=measured("tokens_per_usd", tokens, lambda rate: tokens_per_usd(usd, devices, rate)),
        usd_per_1k_samples=measured("usd_per_1k_samples", samples, lambda rate: usd_per_1k_samples(usd, devices, rate)),
        train_tokens=goal,
        train_time_s=measured("train_time_s", tokens, lambda rate: goal / rate, None) if goal else None,
        train_cost_usd=measured("train_cost_usd", tokens, lambda rate: goal / tokens_per_usd(usd, devices, rate))
        if goal
        else None,
        train_samples=count,
        samples_time_s=measured("samples_time_s", samples, lambda rate: count / rate, None) if count else None,
        samples_cost_usd=measured(
            "samples_cost_usd", samples, lambda rate: count / 1000 * usd_per_1k_samples(usd, devices, rate)
        )
        if count
        else None,
    )


def _measurement(
    cell: Cell, price: Price | None, metric: str, rate: Resampled, formula: Callable[[float], float]
) -> Measurement:
    """Every formula is monotonic in the rate, so its bounds are those of the rate, sorted."""
    unit, better = METRICS[metric]
    unit = metrics.in_counted(unit, cell.windows[0].record)
    low, high = rate.interval
    bounds = sorted(map(formula, (low, high))) if low is not None and high is not None and low > 0 else (None, None)
    spec = cell.spec
    known = metric in PER_SAMPLE and not spec.script
    samples = f"samples of {spec.training.sequence_length} tokens ({spec.data_text})" if known else None
    notes = (price.origin if price else None, samples, launches_note(len(cell.windows)))
    return Measurement(
        metric=metric,
        unit=unit,
        better=better,
        cell=cell.id,
        value=formula(rate.value),
        low=bounds[0],
        high=bounds[1],
        n=sum(len(w.steps) for w in cell.windows),
        launches=len(cell.windows),
        axes={**cell.axes, "price": price.name, "price_kind": price.kind} if price else cell.axes,
        runs=cell.runs,
        note="; ".join(filter(None, notes)) or None,
    )


# --- savings ---


def _saving(recommendation: Recommendation) -> Saving | None:
    """The recommended over the next best, by the comparison that decided it; without a verdict nothing is saved."""
    for c in recommendation.because:
        winner = {c.label: c.other_label, c.other_label: c.label}.get(recommendation.over[0])
        if winner not in recommendation.choose or not c.is_decided:
            continue
        forward = c.verdict == BETTER
        ratio, low, high = (c.ratio, c.low, c.high) if forward else (1 / c.ratio, 1 / c.high, 1 / c.low)
        names = (c.label, c.other_label) if forward else (c.other_label, c.label)
        return Saving(
            group=recommendation.group,
            cell=c.cell if forward else c.other,
            other=c.other if forward else c.cell,
            label=names[0],
            other_label=names[1],
            saved_ratio=1 - 1 / ratio,
            low=1 - 1 / low,
            high=1 - 1 / high,
            runs=c.runs,
            tied=tuple(name for name in recommendation.choose if name != names[0]),
        )
    return None


def _notes(cells: Sequence[Cell], rows: Sequence[Cost], costing: Costing) -> Iterable[str]:
    """Why a requested answer is missing."""
    if costing.train_tokens is not None and any(row.counted != "token" for row in rows):
        yield "--train-tokens: a script that counts samples or micro-batches has no tokens; use --train-samples"
    if rows or not cells or (costing.prices is None and costing.goal is None):
        return
    if all(cell.shared_gpu for cell in cells):
        yield f"{costing.goal if costing.prices is None else '--price'}: {SHARED_GPU}, so there is no cost"
        return
    devices = ", ".join(sorted({device_of(cell) or cell.spec.topology.device for cell in cells}))
    if costing.prices is None:
        yield f"{costing.goal}: no price is known for {devices}, so there is no cost; give one with --price"
    else:
        named = ", ".join(f"{p.name} ({p.gpu})" if p.gpu else p.name for p in costing.prices)
        yield f"--price: {named} applies to none of the measured cells ({devices}), so there is no cost"
