"""Scaling efficiency against a measured baseline, and where the lost time went.

efficiency = (T_N / N) / (T_N0 / N0), T in tokens/s, N0 the smallest world size measured (method.md, section 4). The
formula is the same for weak and strong scaling; they differ in what is held constant. Exposed communication comes from
the profile, wire bytes from the counted step, predicted times from the alpha-beta fits of a sweep on the same kind of
device and number of ranks. What was not measured is None.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.analysis.compare.cells import Compared, Group, comparison, digest, key_without, title_axes, title_of
from paceline.analysis.findings import (
    HIGHER,
    SHARED_GPU,
    CollectiveFit,
    Measurement,
    ScalingExplanation,
    ScalingPoint,
    Traffic,
)
from paceline.analysis.findings.cell_axes import DEVICE
from paceline.analysis.grouping import grouped
from paceline.analysis.machine.ceilings import device_names
from paceline.analysis.machine.sweep import factor_of
from paceline.analysis.statistics.intervals import Resampled, launches_note, ratio_between
from paceline.analysis.training import metrics
from paceline.analysis.training.bottleneck import milliseconds
from paceline.analysis.training.metrics import Cell, device_kind
from paceline.experiment.choices import Choice
from paceline.results.records import RunRecord

METRIC = "scaling_efficiency_ratio"
GLOO = (
    "gloo's reduce_scatter moves as many bytes as its all_reduce, so CPU timings overstate the cost of FSDP2 and ZeRO-3"
)
WEAK, STRONG = "weak", "strong"
_PLACES = ("topology.nodes", "topology.processes_per_node")
_BATCH = ("training.micro_batch", "training.accumulation")


@dataclass(frozen=True, slots=True)
class Member:
    """One cell of a series with its baseline, both with their throughput."""

    kind: str
    cell: Cell
    baseline: Cell
    rate: Resampled
    baseline_rate: Resampled

    @property
    def world_size(self) -> int:
        return self.cell.spec.topology.world_size

    @property
    def growth(self) -> float:
        """N / N0."""
        return self.world_size / self.baseline.spec.topology.world_size

    @property
    def is_baseline(self) -> bool:
        return self.cell is self.baseline

    @property
    def speedup(self) -> float:
        return self.rate.value / self.baseline_rate.value


@dataclass(frozen=True, slots=True)
class Scaling:
    points: tuple[ScalingPoint, ...]
    compared: tuple[Compared, ...]


def analyse(cells: Sequence[Cell]) -> Scaling:
    """All series of at least two world sizes, and strategies compared by how well they scale."""
    usable = [cell for cell in cells if not cell.shared_gpu]
    members = [m for kind in (WEAK, STRONG) for m in _members(usable, kind)]
    named = title_axes(cells)
    return Scaling(tuple(_point(m, named) for m in members), tuple(_compared(members, named)))


def _members(cells: Sequence[Cell], kind: str) -> list[Member]:
    """Weak scaling keeps the sequences per process, strong the sequences per step; everything else is equal in a
    series.
    """

    def key(cell: Cell) -> str:
        training = cell.spec.training
        sequences = training.micro_batch * training.accumulation if kind == WEAK else cell.spec.global_batch
        return key_without(cell, (*_PLACES, *_BATCH), sequences=sequences)

    found = []
    for members in grouped(cells, key).values():
        smallest = min(cell.spec.topology.world_size for cell in members)
        bases = [cell for cell in members if cell.spec.topology.world_size == smallest]
        if len(bases) < len(members):
            found += [m for cell in members if (m := _member(kind, cell, bases)) is not None]
    return sorted(found, key=lambda m: (str(m.cell.spec.strategy_text), m.world_size, m.cell.id))


def _member(kind: str, cell: Cell, bases: Sequence[Cell]) -> Member | None:
    """If N0 has several splits of the batch, use the one with the cell's micro batch, else its accumulation."""
    if cell in bases:
        base = cell
    else:
        own = cell.spec.training
        base = min(
            bases,
            key=lambda b: (
                b.spec.training.micro_batch != own.micro_batch,
                b.spec.training.accumulation != own.accumulation,
                b.id,
            ),
        )
    rate, baseline_rate = (metrics.estimate(c, "tokens_per_s") for c in (cell, base))
    return Member(kind, cell, base, rate, baseline_rate) if rate and baseline_rate else None


def _point(member: Member, named: Sequence[str]) -> ScalingPoint:
    # `ddp, small, fp32, sequence 128, 8 sequences per process`: without what changes along the series.
    free = {"world_size", "nodes", "micro_batch", "accumulation", *(["global_batch"] if member.kind == WEAK else [])}
    axes = {**member.baseline.axes, DEVICE: device_kind(member.baseline)}
    title = title_of({k: v for k, v in axes.items() if k not in free}, named)
    if member.kind == WEAK:
        per_process = member.baseline.spec.global_batch // member.baseline.spec.topology.world_size
        title = f"{title}, {per_process} sequences per process"
    return ScalingPoint(
        kind=member.kind,
        series=title,
        cell=member.cell.id,
        baseline=member.baseline.id,
        world_size=member.world_size,
        baseline_world_size=member.baseline.spec.topology.world_size,
        speedup_ratio=member.speedup,
        efficiency=_measurement(member),
    )


def _measurement(member: Member) -> Measurement:
    """The efficiency, exactly 1 at N0 by definition; without bounds if a side has no spread."""
    growth = member.growth
    value, bounds = member.speedup / growth, None
    if member.is_baseline:
        bounds = 1.0, 1.0
    elif ratio := ratio_between([member.rate], [member.baseline_rate]):
        value, bounds = ratio.value / growth, (ratio.low / growth, ratio.high / growth)
    windows = (*member.cell.windows, *(() if member.is_baseline else member.baseline.windows))
    base = member.baseline.spec.topology.world_size
    launches = min(len(member.cell.windows), len(member.baseline.windows))
    notes = (f"{member.kind} scaling, 100 % at world size {base} by definition", launches_note(launches))
    return Measurement(
        metric=METRIC,
        unit="ratio",
        better=HIGHER,
        cell=member.cell.id,
        value=value,
        low=bounds[0] if bounds else None,
        high=bounds[1] if bounds else None,
        n=sum(len(w.steps) for w in member.cell.windows),
        launches=launches,
        axes={**member.cell.axes, "scaling": member.kind},
        runs=tuple(dict.fromkeys(w.run for w in windows)),
        note="; ".join(filter(None, notes)),
    )


def _compared(members: Sequence[Member], named: Sequence[str]) -> list[Compared]:
    """Strategies that scaled from the same N0 to the same N over the same work, with the same batch split."""
    groups = grouped(
        (m for m in members if not m.is_baseline),
        lambda m: (m.kind, key_without(m.cell, ("strategy",)), key_without(m.baseline, ("strategy",))),
    )
    return [_compared_group(digest(*key), found, named) for key, found in groups.items() if len(found) > 1]


def _compared_group(key: str, members: Sequence[Member], named: Sequence[str]) -> Compared:
    ordered = sorted(members, key=lambda m: -m.speedup)
    everything = [m.cell.axes for m in ordered]
    shared = {name: value for name, value in everything[0].items() if all(a[name] == value for a in everything)}
    shared["scaling"] = ordered[0].kind
    names = {m.cell.id: str(m.cell.spec.strategy_text) for m in ordered}
    title = title_of({**shared, DEVICE: device_kind(ordered[0].cell)}, named)
    title = f"{title}, {ordered[0].kind} scaling"
    group = Group("strategy", key, title, tuple(m.cell for m in ordered), names, shared)
    pairs = []
    for a, b in itertools.combinations(ordered, 2):
        ratio = ratio_between([a.rate, b.baseline_rate], [a.baseline_rate, b.rate])
        if ratio is not None:
            labels = names[a.cell.id], names[b.cell.id]
            pairs.append(comparison(METRIC, HIGHER, (a.cell, b.cell), labels, ratio, shared))
    return Compared(group, tuple(pairs))


EXCELLENT, GOOD = 0.9, 0.8
BACK_ENDS: Mapping[str, str] = {"cpu": "gloo", "cuda": "nccl"}  # training uses no other
# These calls of torch work in place; the others write to another buffer.
_IN_PLACE = ("all_reduce", "broadcast", "reduce")
WAITING_RATIO = 1.25  # exposed time above this multiple of the predicted time counts as waiting


def explain(
    points: Sequence[ScalingPoint], cells: Sequence[Cell], fits: Sequence[CollectiveFit], records: Sequence[RunRecord]
) -> tuple[ScalingExplanation, ...]:
    """One explanation per point beyond its baseline."""
    by_id = {cell.id: cell for cell in cells}
    kinds = {
        record.spec.run_id: device_names(record.spec.topology.device, record.machines)
        for record in records
        if record.collectives
    }
    usable = [
        _Fit(fit, kinds[fit.runs[0]]) for fit in fits if fit.runs[0] in kinds and SHARED_GPU not in (fit.note or "")
    ]
    grown = [p for p in points if p.world_size != p.baseline_world_size]
    return tuple(_explanation(p, by_id[p.cell], by_id[p.baseline], usable) for p in grown)


class _Fit(NamedTuple):
    fit: CollectiveFit
    device_kind: str


@dataclass(frozen=True, slots=True)
class _Split:
    """Seconds per optimizer step; None means not measured."""

    step_s: float
    ideal_s: float
    exposed_s: float | None
    exposed_loss_s: float | None
    certain: bool

    @property
    def loss_s(self) -> float:
        return self.step_s - self.ideal_s

    @property
    def rest_s(self) -> float | None:
        return None if self.exposed_loss_s is None else self.loss_s - self.exposed_loss_s

    @property
    def is_loss(self) -> bool:
        return self.certain and self.loss_s > 0

    def share(self, seconds: float | None) -> float | None:
        """Share of a significant loss, else None."""
        return None if seconds is None or not self.is_loss else min(max(seconds / self.loss_s, 0.0), 1.0)

    def transfer_s(self, added_s: float | None) -> float | None:
        """Newly exposed time that transfers explain; the rest is waiting, which also looks exposed."""
        if self.exposed_loss_s is None or added_s is None:
            return None
        return min(self.exposed_loss_s, added_s)


def _explanation(point: ScalingPoint, cell: Cell, baseline: Cell, fits: Sequence[_Fit]) -> ScalingExplanation:
    split = _split(point, cell, baseline)
    traffic, notes = _traffic(cell, fits)
    predicted = _predicted_s(traffic)
    before = _predicted_s(_traffic(baseline, fits)[0]) if point.baseline_world_size > 1 else 0.0
    added = None if predicted is None or before is None else max(predicted - before, 0.0)
    efficiency, growth = point.efficiency, point.world_size / point.baseline_world_size
    return ScalingExplanation(
        kind=point.kind,
        series=point.series,
        cell=point.cell,
        baseline=point.baseline,
        world_size=point.world_size,
        baseline_world_size=point.baseline_world_size,
        step_s=split.step_s,
        ideal_s=split.ideal_s,
        loss_s=split.loss_s,
        exposed_s=split.exposed_s,
        exposed_loss_s=split.exposed_loss_s,
        rest_s=split.rest_s,
        predicted_s=predicted,
        exposed_share_ratio=split.share(split.exposed_loss_s),
        network_share_ratio=split.share(split.transfer_s(added)),
        karp_flatt_ratio=karp_flatt(point.speedup_ratio, growth) if point.kind == STRONG else None,
        grade=grade(efficiency.value or 0.0, efficiency.low, efficiency.high),
        traffic=traffic,
        text=_text(split, predicted, added, cell),
        notes=notes,
        runs=efficiency.runs,
    )


def _predicted_s(traffic: Sequence[Traffic]) -> float | None:
    """Time of all collectives of a step; None unless every one has a fit."""
    known = [t.predicted_s for t in traffic if t.predicted_s is not None]
    return sum(known) if traffic and len(known) == len(traffic) else None


def karp_flatt(speedup: float, growth: float) -> float:
    """e = (1/psi - 1/p) / (1 - 1/p): the part of the baseline's time that did not shrink (Karp and Flatt, 1990).

    p = N/N0 and psi = T_N/T_N0, so N0 may be more than one process; below 0 the speed-up exceeds p.

    >>> round(karp_flatt(speedup=3.2, growth=4.0), 3)
    0.083
    """
    return (1 / speedup - 1 / growth) / (1 - 1 / growth)


def grade(value: float, low: float | None, high: float | None) -> str:
    """Grade by the whole interval, or by the value if there is none.

    >>> grade(0.93, 0.91, 0.95), grade(0.88, 0.78, 0.92)
    ('excellent', 'between poor and excellent')
    """
    worst, best = _word(value if low is None else low), _word(value if high is None else high)
    return worst if worst == best else f"between {worst} and {best}"


def _word(efficiency: float) -> str:
    return "excellent" if efficiency > EXCELLENT else "good" if efficiency > GOOD else "poor"


# --- where the time went ---


def _split(point: ScalingPoint, cell: Cell, baseline: Cell) -> _Split:
    """Wall seconds per step, because efficiency is also of wall time: ideal = step * efficiency, exactly."""
    wall = cell.per("wall")
    assert wall is not None, "a scaling point has a throughput, so it has wall time"
    step_s, efficiency = wall.value, point.efficiency.value or 0.0
    ideal_s = step_s * efficiency
    ratio, before = _exposed_ratio(cell), _exposed_ratio(baseline)
    exposed = None if ratio is None else ratio * step_s
    # The baseline's exposed share is part of the ideal step: only the additional part can explain the loss.
    on_top = None if exposed is None or before is None else exposed - before * ideal_s
    high = point.efficiency.high
    return _Split(step_s, ideal_s, exposed, on_top, efficiency < 1 if high is None else high < 1)


def _exposed_ratio(cell: Cell) -> float | None:
    """0 for one process, which does not communicate, profiled or not."""
    if cell.spec.topology.world_size == 1:
        return 0.0
    found = metrics.estimate(cell, "comm_exposed_ratio")
    return found.value if found else None


# --- what crossed the wire, and what the fabric needs for it ---


def _traffic(cell: Cell, fits: Sequence[_Fit]) -> tuple[tuple[Traffic, ...], tuple[str, ...]]:
    """Collectives per step on the busiest rank, each with its predicted time, and notes."""
    wire = cell.windows[0].record.wire
    sent_by: defaultdict[int, float] = defaultdict(float)
    for w in wire:
        sent_by[w.rank] += w.payload_bytes * (factor_of(w.operation, w.group_size) or 0.0)
    busiest = max(sent_by, key=lambda r: sent_by[r], default=None)
    samples = [w for w in wire if w.rank == busiest]
    steps = max(len({w.step for w in samples}), 1)
    merged = grouped(samples, lambda w: (w.operation, w.dtype, w.group_size))
    found, notes = [], []
    for (operation, dtype, size), ours in merged.items():
        calls, payload = sum(w.calls for w in ours) // steps, sum(w.payload_bytes for w in ours) // steps
        factor = factor_of(operation, size)
        fit = _fit_for(operation, dtype, size, cell, fits)
        sent = None if factor is None else payload * factor
        found.append(
            Traffic(
                operation=operation,
                dtype=dtype,
                group_size=size,
                calls=calls,
                payload_bytes=payload,
                sent_bytes=sent,
                predicted_s=None if fit is None or sent is None else calls * fit.alpha_s + sent / fit.beta_bytes_per_s,
            )
        )
        if fit and fit.dtype != dtype:
            notes.append(f"{operation} in {dtype} is predicted from its fit in {fit.dtype}")
        if operation == "reduce_scatter" and cell.spec.topology.device == "cpu":
            notes.append(GLOO)
    return tuple(found), tuple(dict.fromkeys(notes))


def _fit_for(operation: str, dtype: str, size: int, cell: Cell, fits: Sequence[_Fit]) -> CollectiveFit | None:
    """A fit of the same operation and ranks on the same kind of device, preferably of the same dtype and in-place
    mode.
    """
    places: Mapping[str, object] = {"device": cell.spec.topology.device, "nodes": cell.spec.topology.nodes}
    kind, back_end = device_kind(cell), BACK_ENDS[cell.spec.topology.device]
    alike = [
        fit
        for fit, fitted_kind in fits
        if (fit.operation, fit.world_size) == (operation, size)
        and fitted_kind == kind
        and all(fit.axes.get(name) == value for name, value in places.items())
        # The requested back end of the sweep, else the default of the device.
        and (Choice.parse(str(fit.axes["workload"])).options.get("backend") or back_end) == back_end
    ]
    return min(alike, key=lambda f: (f.dtype != dtype, f.in_place != (operation in _IN_PLACE)), default=None)


# --- texts ---


def _text(split: _Split, predicted: float | None, added: float | None, cell: Cell) -> str:
    n = cell.spec.topology.world_size
    noun = "GPUs" if cell.spec.topology.device == "cuda" else "processes"
    efficiency = split.ideal_s / split.step_s
    step, ideal = milliseconds(split.step_s), milliseconds(split.ideal_s)
    start = f"{n} {noun} take {step} per step, {ideal} would be ideal ({efficiency:.1%})"
    if not split.is_loss:
        return f"{start}: no significant loss."
    return " ".join(filter(None, (f"{start}: {_loss(split)}", _prediction(split, predicted, added))))


def _loss(split: _Split) -> str:
    if split.exposed_loss_s is None or split.rest_s is None:
        return "the share of communication in the loss was not measured."
    if split.exposed_loss_s <= 0:
        return "none of the loss is exposed communication; the step itself got slower."
    if split.rest_s <= 0:
        return f"exposed communication accounts for all of the {milliseconds(split.loss_s)} lost."
    return (
        f"{milliseconds(split.exposed_loss_s)} of the {milliseconds(split.loss_s)} lost "
        f"({split.share(split.exposed_loss_s):.0%}) are "
        f"exposed communication, {milliseconds(split.rest_s)} are other work that got slower."
    )


def _prediction(split: _Split, predicted_s: float | None, added_s: float | None) -> str:
    """Separates transfer from waiting if there is a sweep of this fabric."""
    exposed = split.exposed_s
    if predicted_s is None:
        unknown = "Without a sweep of this fabric, transfer cannot be separated from waiting for other ranks."
        return unknown if exposed and split.exposed_loss_s and split.exposed_loss_s > 0 else ""
    start = f"By the fits of this fabric, the collectives of a step need {milliseconds(predicted_s)}"
    if exposed is None or split.exposed_loss_s is None:
        return f"{start}."
    share = split.share(split.transfer_s(added_s))
    if exposed > WAITING_RATIO * predicted_s and share is not None:
        return f"{start}: transfers explain at most {share:.0%} of the loss, the rest of it is waiting."
    if exposed < predicted_s:
        return f"{start}, of which about {milliseconds(predicted_s - exposed)} are hidden."
    return f"{start}, about as much as is exposed: none of it is hidden."
