"""Scaling efficiency against a measured baseline, and where the lost time went.

efficiency = (T_N / N) / (T_N0 / N0), T in tokens/s, N0 the smallest world size measured (method.md, section 4). The
formula is the same for weak and strong scaling; they differ in what is held constant. Exposed communication comes from
the profile, wire bytes from the counted step, predicted times from the alpha-beta fits of a sweep on the same kind of
device and number of ranks. What was not measured is None.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.analysis.compare.cells import Compared, Group, comparison, digest, key_without, title_axes, title_of
from paceline.analysis.findings import (
    HIGHER,
    SHARED_GPU,
    CollectiveFit,
    Comparison,
    Measurement,
    ScalingExplanation,
    ScalingPoint,
    Traffic,
)
from paceline.analysis.findings.cell_axes import DEVICE
from paceline.analysis.machine.ceilings import device_names
from paceline.analysis.machine.sweep import factor_of
from paceline.analysis.statistics.intervals import Ratio, Resampled, launches_note, ratio_between
from paceline.analysis.training import metrics
from paceline.analysis.training.metrics import Cell, device_kind
from paceline.errors import Scalar
from paceline.experiment.choices import Choice
from paceline.results.records import RunRecord, WireSample

METRIC = "scaling_efficiency_ratio"
GLOO = "gloo's reduce_scatter moves as many bytes as its all_reduce: CPU timings overstate the cost of FSDP2 and ZeRO-3"
WEAK, STRONG = "weak", "strong"
_PLACES = ("topology.nodes", "topology.processes_per_node")
_BATCH = ("training.micro_batch", "training.accumulation")


@dataclass(frozen=True, slots=True)
class Member:
    """One cell of a series beside its baseline, both with their throughput."""

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
    """Weak holds the sequences per process, strong the sequences per step; everything else is equal in a series."""
    series: defaultdict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        series[_series_key(cell, kind)].append(cell)
    found = []
    for members in series.values():
        smallest = min(cell.spec.topology.world_size for cell in members)
        bases = [cell for cell in members if cell.spec.topology.world_size == smallest]
        if len(bases) < len(members):
            found += [m for cell in members if (m := _member(kind, cell, bases))]
    return sorted(found, key=lambda m: (str(m.cell.spec.strategy), m.world_size, m.cell.id))


def _series_key(cell: Cell, kind: str) -> str:
    training = cell.spec.training
    per_process = training.micro_batch * training.accumulation
    return key_without(cell, (*_PLACES, *_BATCH), sequences=per_process if kind == WEAK else cell.spec.global_batch)


def _member(kind: str, cell: Cell, bases: Sequence[Cell]) -> Member | None:
    """Of several splits of the batch at N0, the one with the cell's own micro batch or else accumulation is meant."""
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


def _efficiency(member: Member) -> Ratio:
    """Exactly 1 at N0 by definition; without spread on either side the bounds are NaN."""
    if member.is_baseline:
        return Ratio(1.0, 1.0, 1.0, 0.0)
    found = ratio_between([member.rate], [member.baseline_rate])
    if found is None:
        return Ratio(member.speedup / member.growth, math.nan, math.nan, math.nan)
    return Ratio(found.value / member.growth, found.low / member.growth, found.high / member.growth, found.error)


def _point(member: Member, named: Sequence[str]) -> ScalingPoint:
    return ScalingPoint(
        kind=member.kind,
        series=_series_title(member, named),
        cell=member.cell.id,
        baseline=member.baseline.id,
        world_size=member.world_size,
        baseline_world_size=member.baseline.spec.topology.world_size,
        speedup_ratio=member.speedup,
        efficiency=_measurement(member),
    )


def _series_title(member: Member, named: Sequence[str]) -> str:
    """`ddp, small, fp32, sequence 128, 8 sequences per process`: without what may change along the series."""
    free = {"world_size", "nodes", "micro_batch", "accumulation", *(["global_batch"] if member.kind == WEAK else [])}
    axes = {**member.baseline.axes, DEVICE: device_kind(member.baseline)}
    title = title_of({k: v for k, v in axes.items() if k not in free}, named)
    if member.kind == STRONG:
        return title
    per_process = member.baseline.spec.global_batch // member.baseline.spec.topology.world_size
    return f"{title}, {per_process} sequences per process"


def _measurement(member: Member) -> Measurement:
    found = _efficiency(member)
    known = not math.isnan(found.low)
    windows = (*member.cell.windows, *(() if member.is_baseline else member.baseline.windows))
    base = member.baseline.spec.topology.world_size
    launches = min(len(member.cell.windows), len(member.baseline.windows))
    notes = (f"{member.kind} scaling, 100 % at world size {base} by definition", launches_note(launches))
    return Measurement(
        metric=METRIC,
        unit="ratio",
        better=HIGHER,
        cell=member.cell.id,
        value=found.value,
        low=found.low if known else None,
        high=found.high if known else None,
        n=sum(len(w.steps) for w in member.cell.windows),
        launches=launches,
        axes={**member.cell.axes, "scaling": member.kind},
        runs=tuple(dict.fromkeys(w.run for w in windows)),
        note="; ".join(filter(None, notes)),
    )


def _compared(members: Sequence[Member], named: Sequence[str]) -> list[Compared]:
    """Strategies that grew from the same N0 to the same N over the same work, the batch split alike."""
    groups: defaultdict[tuple[str, ...], list[Member]] = defaultdict(list)
    for m in members:
        if not m.is_baseline:
            groups[m.kind, key_without(m.cell, ("strategy",)), key_without(m.baseline, ("strategy",))].append(m)
    return [_compared_group(digest(*key), found, named) for key, found in groups.items() if len(found) > 1]


def _compared_group(key: str, members: Sequence[Member], named: Sequence[str]) -> Compared:
    ordered = sorted(members, key=lambda m: -m.speedup)
    everything = [m.cell.axes for m in ordered]
    shared = {name: value for name, value in everything[0].items() if all(a[name] == value for a in everything)}
    shared["scaling"] = ordered[0].kind
    names = {m.cell.id: str(m.cell.spec.strategy) for m in ordered}
    title = title_of({**shared, DEVICE: device_kind(ordered[0].cell)}, named)
    title = f"{title}, {ordered[0].kind} scaling"
    group = Group("strategy", key, title, tuple(m.cell for m in ordered), names, shared)
    pairs = (_pair(group, a, b) for a, b in itertools.combinations(ordered, 2))
    return Compared(group, tuple(pair for pair in pairs if pair))


def _pair(group: Group, a: Member, b: Member) -> Comparison | None:
    found = ratio_between([a.rate, b.baseline_rate], [a.baseline_rate, b.rate])
    if found is None:
        return None
    names = group.names[a.cell.id], group.names[b.cell.id]
    return comparison(METRIC, HIGHER, (a.cell, b.cell), names, found, group.axes)


EXCELLENT, GOOD = 0.9, 0.8
BACK_ENDS: Mapping[str, str] = {"cpu": "gloo", "cuda": "nccl"}  # training uses no other
# torch's own calls work on the buffer they are given; the others write to another one.
_IN_PLACE = ("all_reduce", "broadcast", "reduce")
WAITING_RATIO = 1.25  # exposed time beyond the predicted by more than this is said to be waiting


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
    """Seconds per optimizer step; None is not measured."""

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
        """Of the loss, where there is one beyond chance."""
        return None if seconds is None or not self.is_loss else min(max(seconds / self.loss_s, 0.0), 1.0)

    def transfer_s(self, added_s: float | None) -> float | None:
        """What of the newly exposed time the fabric needs more than at the baseline: waiting looks exposed too."""
        if self.exposed_loss_s is None or added_s is None:
            return None
        return min(self.exposed_loss_s, added_s)


def _explanation(point: ScalingPoint, cell: Cell, baseline: Cell, fits: Sequence[_Fit]) -> ScalingExplanation:
    split = _split(point, cell, baseline)
    traffic, notes = _traffic(cell, fits)
    predicted = _predicted_s(traffic)
    before = _predicted_s(_traffic(baseline, fits)[0]) if point.baseline_world_size > 1 else 0.0
    added = None if predicted is None or before is None else max(predicted - before, 0.0)
    efficiency = point.efficiency
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
        karp_flatt_ratio=karp_flatt(point.speedup_ratio, point.world_size / point.baseline_world_size)
        if point.kind == STRONG
        else None,
        grade=grade(efficiency.value or 0.0, efficiency.low, efficiency.high),
        traffic=traffic,
        text=_text(split, predicted, added, cell),
        notes=notes,
        runs=efficiency.runs,
    )


def _predicted_s(traffic: Sequence[Traffic]) -> float | None:
    """Of all collectives of a step, where every one has a fit."""
    known = [t.predicted_s for t in traffic if t.predicted_s is not None]
    return sum(known) if traffic and len(known) == len(traffic) else None


def karp_flatt(speedup: float, growth: float) -> float:
    """e = (1/psi - 1/p) / (1 - 1/p): the part of the baseline's time that did not shrink (Karp and Flatt, 1990).

    p = N/N0 and psi = T_N/T_N0, so one process is no condition; below 0 the speed-up is more than p.
    """
    return (1 / speedup - 1 / growth) / (1 - 1 / growth)


def grade(value: float, low: float | None, high: float | None) -> str:
    """By the whole interval: `between good and excellent` where it spans a limit; by the value where there is none."""
    worst, best = _word(value if low is None else low), _word(value if high is None else high)
    return worst if worst == best else f"between {worst} and {best}"


def _word(efficiency: float) -> str:
    return "excellent" if efficiency > EXCELLENT else "good" if efficiency > GOOD else "poor"


# --- where the time went ---


def _split(point: ScalingPoint, cell: Cell, baseline: Cell) -> _Split:
    """Wall seconds per step, because efficiency is of wall time too: ideal = step * efficiency, exactly."""
    wall = cell.per("wall")
    assert wall is not None, "a scaling point has a throughput, so it has wall time"
    step_s, efficiency = wall.value, point.efficiency.value or 0.0
    ideal_s = step_s * efficiency
    ratio, before = _exposed_ratio(cell), _exposed_ratio(baseline)
    exposed = None if ratio is None else ratio * step_s
    # The baseline's own exposed share is part of the ideal step: only what came on top of it can explain the loss.
    on_top = None if exposed is None or before is None else exposed - before * ideal_s
    high = point.efficiency.high
    return _Split(step_s, ideal_s, exposed, on_top, efficiency < 1 if high is None else high < 1)


def _exposed_ratio(cell: Cell) -> float | None:
    """One process has nobody to talk to: 0, profiled or not."""
    if cell.spec.topology.world_size == 1:
        return 0.0
    found = metrics.estimate(cell, "comm_exposed_ratio")
    return found.value if found else None


# --- what crossed the wire, and what the fabric needs for it ---


def _traffic(cell: Cell, fits: Sequence[_Fit]) -> tuple[tuple[Traffic, ...], tuple[str, ...]]:
    """The busiest rank's collectives per step, each with its predicted time, and what a reader should know of it."""
    samples, steps = _busiest(cell.windows[0].record.wire)
    merged: defaultdict[tuple[str, str, int], list[WireSample]] = defaultdict(list)
    for w in samples:
        merged[w.operation, w.dtype, w.group_size].append(w)
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
                predicted_s=_predicted(fit, calls, sent),
            )
        )
        if fit and fit.dtype != dtype:
            notes.append(f"{operation} in {dtype} is predicted by its fit in {fit.dtype}")
        if operation == "reduce_scatter" and cell.spec.topology.device == "cpu":
            notes.append(GLOO)
    return tuple(found), tuple(dict.fromkeys(notes))


def _predicted(fit: CollectiveFit | None, calls: int, sent_bytes: float | None) -> float | None:
    if fit is None or sent_bytes is None:
        return None
    return calls * fit.alpha_s + sent_bytes / fit.beta_bytes_per_s


def _busiest(wire: Sequence[WireSample]) -> tuple[list[WireSample], int]:
    """The samples of the rank that sent most, and how many steps they cover."""
    sent: defaultdict[int, float] = defaultdict(float)
    for w in wire:
        sent[w.rank] += w.payload_bytes * (factor_of(w.operation, w.group_size) or 0.0)
    rank = max(sent, key=lambda r: sent[r], default=None)
    ours = [w for w in wire if w.rank == rank]
    return ours, max(len({w.step for w in ours}), 1)


def _fit_for(operation: str, dtype: str, size: int, cell: Cell, fits: Sequence[_Fit]) -> CollectiveFit | None:
    """Of the same operation and ranks on the same kind of device; the same dtype and place are preferred."""
    places: Mapping[str, object] = {"device": cell.spec.topology.device, "nodes": cell.spec.topology.nodes}
    kind = device_kind(cell)
    alike = [
        fit
        for fit, fitted_kind in fits
        if (fit.operation, fit.world_size) == (operation, size)
        and fitted_kind == kind
        and _back_end(fit) == BACK_ENDS[cell.spec.topology.device]
        and all(fit.axes.get(name) == value for name, value in places.items())
    ]
    return min(alike, key=lambda f: (f.dtype != dtype, f.in_place != (operation in _IN_PLACE)), default=None)


def _back_end(fit: CollectiveFit) -> Scalar:
    """What the sweep asked for, else the device's own."""
    asked = Choice.parse(str(fit.axes["workload"])).options.get("backend")
    return asked or BACK_ENDS[str(fit.axes["device"])]


# --- words ---


def _text(split: _Split, predicted: float | None, added: float | None, cell: Cell) -> str:
    n = cell.spec.topology.world_size
    noun = "GPUs" if cell.spec.topology.device == "cuda" else "processes"
    efficiency = split.ideal_s / split.step_s
    start = f"{n} {noun} take {_ms(split.step_s)} per step where {_ms(split.ideal_s)} would be ideal ({efficiency:.1%})"
    if not split.is_loss:
        return f"{start}: no loss beyond chance."
    return " ".join(filter(None, (f"{start}: {_loss(split)}", _prediction(split, predicted, added))))


def _loss(split: _Split) -> str:
    if split.exposed_loss_s is None or split.rest_s is None:
        return "how much of the loss is communication was not measured."
    if split.exposed_loss_s <= 0:
        return "none of the loss is exposed communication; the step itself got slower."
    if split.rest_s <= 0:
        return f"exposed communication accounts for all of the {_ms(split.loss_s)} lost."
    return (
        f"{_ms(split.exposed_loss_s)} of the {_ms(split.loss_s)} lost ({split.share(split.exposed_loss_s):.0%}) are "
        f"communication that nothing hides, {_ms(split.rest_s)} a step that got slower by itself."
    )


def _prediction(split: _Split, predicted_s: float | None, added_s: float | None) -> str:
    """Tells transfer from waiting where a sweep of this fabric allows it."""
    exposed = split.exposed_s
    if predicted_s is None:
        unknown = "No sweep of this fabric is here to tell transfer from waiting for other ranks."
        return unknown if exposed and split.exposed_loss_s and split.exposed_loss_s > 0 else ""
    start = f"By the fits of this fabric the collectives of a step need {_ms(predicted_s)}"
    if exposed is None or split.exposed_loss_s is None:
        return f"{start}."
    share = split.share(split.transfer_s(added_s))
    if exposed > WAITING_RATIO * predicted_s and share is not None:
        return f"{start}: the network accounts for at most {share:.0%} of the loss, the rest of that is waiting."
    if exposed < predicted_s:
        return f"{start}, of which about {_ms(predicted_s - exposed)} are hidden."
    return f"{start}, about what is exposed: nothing of it is hidden."


def _ms(seconds: float) -> str:
    """Three digits, never an exponent: `1,250 ms`, `0.0312 ms`."""
    return f"{float(f'{seconds * 1e3:.3g}'):,.12g} ms"
