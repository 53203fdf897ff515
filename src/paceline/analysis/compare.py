"""A against B: a ratio with its interval, the smallest effect this data could show, and a verdict that may be "tie".

Only cells that differ in the one axis under test meet; world size is an axis of its own kind (see scaling).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.analysis import metrics
from paceline.analysis.ceilings import device_names
from paceline.analysis.certificate import certify_all
from paceline.analysis.metrics import BY_NAME, Cell
from paceline.analysis.statistics import Ratio, Resampled, ratio_between
from paceline.analysis.window import open_window
from paceline.errors import RequestError
from paceline.findings import BETTER, HIGHER, TIE, WORSE, Comparison
from paceline.records import RunRecord, Status
from paceline.spec import RunSpec, Scalar

SPEED_METRICS = ("tokens_per_s", "step_time_s")
COMPARED_METRICS = (*SPEED_METRICS, "peak_memory_bytes")
SMALLEST_EFFECT = 0.01

# Axis -> the fields of a spec that may differ. The split of one global batch counts as one axis.
AXES: Mapping[str, tuple[str, ...]] = {
    "strategy": ("strategy",),
    "precision": ("training.precision.compute",),
    "reduce_dtype": ("training.precision.reduce",),
    "checkpointing": ("training.checkpointing",),
    "compile": ("training.compile",),
    "bucket_mb": ("training.bucket_mb",),
    "micro_batch": ("training.micro_batch", "training.accumulation"),
    "launcher": ("launcher",),
}


@dataclass(frozen=True, slots=True)
class Group:
    """Cells that differ in one axis only, the highest throughput first; names tells them apart."""

    axis: str
    title: str
    cells: tuple[Cell, ...]
    names: Mapping[str, str]
    axes: Mapping[str, Scalar]


@dataclass(frozen=True, slots=True)
class Compared:
    """A group with every pair of its cells compared, as far as the data allows."""

    group: Group
    comparisons: tuple[Comparison, ...]


def key_without(cell: Cell, fields: Iterable[str], **more: object) -> str:
    """Equal for cells that agree in everything but `fields`, on one kind of device, under the same debug switches."""
    skipped = set(fields)
    rest = {name: value for name, value in cell.fields.items() if name not in skipped}
    return json.dumps([rest, more, device_kind(cell), cell.switches, cell.shared_gpu], sort_keys=True)


# --- one pair ---


def verdict_of(found: Ratio, better: str) -> tuple[str, str]:
    """Verdict about the numerator and the reason. Effects are max(r, 1/r) - 1, so that A/B and B/A agree."""
    effect = max(found.value, 1 / found.value) - 1
    if found.low <= 1 <= found.high:
        return TIE, "the interval includes 1"
    if effect < SMALLEST_EFFECT:
        return TIE, f"the effect of {effect:.2%} is under {SMALLEST_EFFECT:.0%}"
    if effect < found.detectable:
        return TIE, f"the effect of {effect:.1%} is under the {found.detectable:.1%} this data could show"
    verdict = BETTER if (found.value > 1) == (better == HIGHER) else WORSE
    return verdict, f"the effect of {effect:.1%} exceeds the {found.detectable:.1%} this data could show"


def comparison(
    metric: str, better: str, sides: tuple[Cell, Cell], names: tuple[str, str], found: Ratio, axes: Mapping[str, Scalar]
) -> Comparison:
    """The finding about two certified cells."""
    verdict, reason = verdict_of(found, better)
    return Comparison(
        metric=metric,
        better=better,
        cell=sides[0].id,
        other=sides[1].id,
        label=names[0],
        other_label=names[1],
        ratio=found.value,
        low=found.low,
        high=found.high,
        detectable_ratio=found.detectable,
        verdict=verdict,
        reason=reason,
        certified=True,
        axes=axes,
        runs=sides[0].runs + sides[1].runs,
    )


def comparable_metrics(cells: Iterable[Cell]) -> tuple[str, ...]:
    """On a shared GPU nothing is a speed."""
    return COMPARED_METRICS if not any(c.shared_gpu for c in cells) else COMPARED_METRICS[len(SPEED_METRICS) :]


# --- within one campaign ---


def compare_cells(cells: Sequence[Cell], axes: Iterable[str] = tuple(AXES)) -> list[Compared]:
    """Every group of at least two certified cells, with all its pairs. A metric without spread is not compared."""
    return [Compared(group, tuple(_pairs(group))) for axis in axes for group in groups_of(cells, axis)]


def groups_of(cells: Sequence[Cell], axis: str) -> list[Group]:
    by_key: defaultdict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        same = {"global_batch": cell.spec.global_batch} if axis == "micro_batch" else {}
        by_key[key_without(cell, AXES[axis], **same)].append(cell)
    return [_group(axis, members) for members in by_key.values() if len(members) > 1]


def _group(axis: str, members: Sequence[Cell]) -> Group:
    speeds = {c.id: metrics.estimate(c, "tokens_per_s") for c in members}
    ordered = sorted(members, key=lambda c: (-(s.value if (s := speeds[c.id]) else 0.0), c.id))
    everything = [cell.axes for cell in ordered]
    shared = {name: value for name, value in everything[0].items() if all(a[name] == value for a in everything)}
    names = {cell.id: name_of(cell.spec, axis) for cell in ordered}
    return Group(axis, title_of(shared), tuple(ordered), names, shared)


def name_of(spec: RunSpec, axis: str) -> str:
    """`zero:stage=2`, `compile on`, `micro batch 2 x 4`."""
    value = spec.axes()[axis]
    if axis == "strategy":
        return str(value or spec.workload)
    if axis == "micro_batch":
        return f"micro batch {value} x {spec.training.accumulation}"
    if isinstance(value, bool):
        value = "on" if value else "off"
    return f"{axis.replace('_', ' ')} {'default' if value is None else value}"


def title_of(axes: Mapping[str, Scalar]) -> str:
    """What all cells of a group share, in the words people use; unremarkable defaults are left out."""
    unit = "GPU" if axes.get("device") == "cuda" else "process"
    size = axes.get("world_size")
    plural = "" if size == 1 else "s" if unit == "GPU" else "es"
    parts = [
        axes.get("strategy"),
        axes.get("model"),
        f"{size} {unit}{plural}" if size else None,
        axes.get("precision"),
        f"sequence {axes['sequence_length']}" if axes.get("sequence_length") else None,
        f"global batch {axes['global_batch']}" if axes.get("global_batch") else None,
        f"checkpointing {axes['checkpointing']}" if axes.get("checkpointing") not in (None, "none") else None,
        "compiled" if axes.get("compile") else None,
    ]
    return ", ".join(str(part) for part in parts if part)


def _pairs(group: Group) -> Iterable[Comparison]:
    for metric in comparable_metrics(group.cells):
        known = [(cell, found) for cell in group.cells if (found := metrics.estimate(cell, metric))]
        for (cell, over), (other, under) in itertools.combinations(known, 2):
            ratio = ratio_between([over], [under])
            if ratio is not None:
                names = group.names[cell.id], group.names[other.id]
                yield comparison(metric, BY_NAME[metric].better, (cell, other), names, ratio, group.axes)


# --- between two campaigns ---


@dataclass(frozen=True, slots=True)
class Difference:
    """Two experiments cell by cell: B over A, and what only one of them holds."""

    comparisons: tuple[Comparison, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]


def compare_experiments(records_a: Sequence[RunRecord], records_b: Sequence[RunRecord]) -> Difference:
    """Ratios B over A of cells in both. Refuses, with the field that differs, other work and another kind of device."""
    a, b = certified_cells(records_a), certified_cells(records_b)
    for name, cells in (("first", a), ("second", b)):
        if not cells:
            raise RequestError(f"compare: the {name} experiment holds no certified run; accepted is one with some")
    common = [cell for cell in a if cell in b]
    if not common:
        raise RequestError(_nearest_difference(list(a.values()), list(b.values())))
    found = [c for cell in common for c in _between(a[cell], b[cell])]
    only_a, only_b = (tuple(describe(x[c].spec) for c in x if c not in y) for x, y in ((a, b), (b, a)))
    return Difference(tuple(found), only_a, only_b)


def certified_cells(records: Sequence[RunRecord]) -> dict[str, Cell]:
    """Cells of the runs that ended ok with a valid certificate."""
    certificates = certify_all(records)
    ended = [r for r in records if r.status in (Status.OK, Status.INVALID) and r.spec.is_certified]
    valid = [r for r in ended if (found := certificates.get(r.spec.run_id)) and found.valid]
    return {cell.id: cell for cell in metrics.gather(map(open_window, valid))}


def describe(spec: RunSpec) -> str:
    return title_of(spec.axes())


def _between(a: Cell, b: Cell) -> list[Comparison]:
    kinds = device_kind(a), device_kind(b)
    if kinds[0] != kinds[1]:
        raise RequestError(
            f"compare: the device of {describe(a.spec)} is {kinds[0]} in the first experiment and {kinds[1]} in the "
            "second; accepted are runs on the same kind of device"
        )
    found = []
    for metric in comparable_metrics((a, b)):
        over, under = _redrawn(b, metric), metrics.estimate(a, metric)
        ratio = ratio_between([over], [under]) if over and under else None
        if ratio is not None:
            names = (f"{describe(b.spec)} (second)", f"{describe(a.spec)} (first)")
            found.append(comparison(metric, BY_NAME[metric].better, (b, a), names, ratio, a.axes))
    return found


def _redrawn(cell: Cell, metric: str) -> Resampled | None:
    """The second side of a pair of equal cells: the same seed would draw the same launches and hide their spread."""
    found = metrics.estimate(cell, metric)
    if found is None or found.deviations is None:
        return found
    return dataclasses.replace(found, deviations=found.deviations[::-1])


def device_kind(cell: Cell) -> str:
    """Names of the GPUs, or of the processors, the cell ran on."""
    return device_names(cell.spec.topology.device, [m for w in cell.windows for m in w.record.machines])


def _nearest_difference(a: Sequence[Cell], b: Sequence[Cell]) -> str:
    """The sentence for two experiments that share no cell: what differs in the pair that is most alike."""
    pairs = itertools.product(a[:50], b[:50])
    differing = (_differing_fields(x.fields, y.fields) for x, y in pairs)
    fields = min(differing, key=len)
    named = "; ".join(f"{field} is {left!r} in the first and {right!r} in the second" for field, left, right in fields)
    return f"compare: no cell is in both experiments; in the nearest pair {named}; accepted are runs of equal work"


def _differing_fields(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(name, a[name], b[name]) for name in a if a[name] != b[name]]
