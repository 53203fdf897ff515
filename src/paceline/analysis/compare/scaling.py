"""More processes: efficiency against a baseline that was measured in the same campaign, or none at all.

efficiency = (T_N / N) / (T_N0 / N0), T in tokens/s, N0 the smallest world size measured (method.md, section 4); the
formula is the same for weak and strong scaling, what is held constant differs.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.analysis.compare.cells import Compared, Group, comparison, digest, key_without, title_axes, title_of
from paceline.analysis.findings import HIGHER, Comparison, Measurement, ScalingPoint
from paceline.analysis.findings.cell_axes import DEVICE
from paceline.analysis.statistics.intervals import Ratio, Resampled, launches_note, ratio_between
from paceline.analysis.training import metrics
from paceline.analysis.training.metrics import Cell, device_kind

METRIC = "scaling_efficiency_ratio"
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
