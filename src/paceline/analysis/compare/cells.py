"""Comparisons within one campaign: a ratio with its interval, the smallest detectable effect, and a verdict.

Only cells that differ in the one axis under test are compared; world size is a separate kind of axis (see scaling).
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.analysis.findings import CONSISTENT, Comparison
from paceline.analysis.findings.cell_axes import DEVICE, EQUAL_WORK, axis_text, distinguishing_axes
from paceline.analysis.grouping import grouped
from paceline.analysis.statistics.intervals import Ratio, ratio_between, sharing_of
from paceline.analysis.statistics.verdict import judged_ratio
from paceline.analysis.training import metrics
from paceline.analysis.training.metrics import BY_NAME, Cell, device_kind
from paceline.errors import RequestError, Scalar
from paceline.experiment.spec import RunSpec

SPEED_METRICS = ("tokens_per_s", "step_time_s")
UNSLOWED_METRICS = ("peak_memory_bytes",)
COMPARED_METRICS = (*SPEED_METRICS, *UNSLOWED_METRICS)
# If the shares of throttled steps differ by more than this, throttling alone may explain a difference.
THROTTLED_APART = 0.05

# Axis -> the fields of a spec that may differ. The split of a global batch counts as one axis. A strategy that splits
# the model has fewer replicas, so it accumulates more micro batches for the same global batch. Another precision is
# other work: it is compared in `tradeoffs` only.
AXES: Mapping[str, tuple[str, ...]] = {
    "strategy": ("strategy", "training.accumulation"),
    "reduce_dtype": ("training.precision.reduce",),
    "checkpointing": ("training.checkpointing",),
    "compile": ("training.compile",),
    "bucket_mb": ("training.bucket_mb",),
    "micro_batch": ("training.micro_batch", "training.accumulation"),
    "launcher": ("launcher",),
    "env": ("env",),
    # Adapters reduce in fp32 and full fine-tuning in its own dtype, so the method includes its reduction dtype.
    "method": ("tuning.method", "training.precision.reduce"),
    "optimizer": ("tuning.optimizer",),
    "rank": ("tuning.rank", "tuning.alpha"),
    "targets": ("tuning.targets",),
    "data": ("training.data",),
}
# Axes of cells that fine-tune.
TUNED_AXES = ("method", "optimizer", "rank", "targets", "data")
# Numbers per step or sample, which are not comparable if steps or samples contain different work.
PER_STEP = ("step_time_s", "samples_per_s", "usd_per_1k_samples")
# Axes that every title names; the device as GPUs or processes.
_TITLED = frozenset(
    (
        *("strategy", "script", "model", "device", "world_size", "precision"),
        *("sequence_length", "global_batch", "checkpointing", "compile"),
    )
)


@dataclass(frozen=True, slots=True)
class Group:
    """Cells that differ in one axis only, highest throughput first; names are their values of it.

    title says what they share, in words; key is unique per group.
    """

    axis: str
    key: str
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
    """Equal for cells that agree in everything but `fields`, on one kind of device, with the same debug switches."""
    skipped = set(fields)
    rest = {name: value for name, value in cell.fields.items() if name not in skipped}
    # A strategy that changes the arithmetic is compared in `tradeoffs` only.
    if cell.spec.approximation is not None:
        more = {"approximation": cell.spec.approximation, **more}
    same = [rest, more, device_kind(cell), cell.switches, cell.shared_gpu]
    return json.dumps([*same, *([cell.observed_work] if cell.spec.script else [])], sort_keys=True)


# --- one pair ---


def comparison(
    metric: str,
    better: str,
    sides: tuple[Cell, Cell],
    names: tuple[str, str],
    found: Ratio,
    axes: Mapping[str, Scalar],
    family: int = 1,
) -> Comparison:
    """The comparison of two certified cells, one of `family`; an error if the metric cannot compare them."""
    refused = why_not_compared(metric, [side.spec for side in sides])
    if refused:
        raise RequestError(refused)
    ids, runs = (sides[0].id, sides[1].id), sides[0].runs + sides[1].runs
    judged = judged_ratio(metric, better, ids, names, found, family=family, axes=axes, runs=runs)
    if levels := [cell.level for cell in sides if cell.level]:
        judged = replace(judged, level=CONSISTENT if CONSISTENT in levels else levels[0])
    a, b = (cell.throttled_ratio for cell in sides)
    if metric in UNSLOWED_METRICS or a is None or b is None or abs(a - b) <= THROTTLED_APART:
        return judged
    slowed = f"throttled in {a:.0%} of the steps of {names[0]}, {b:.0%} of {names[1]}"
    return replace(judged, reason=f"{judged.reason}; {slowed}", throttled=(a, b))


def why_not_compared(metric: str, specs: Iterable[RunSpec]) -> str | None:
    """Why a metric cannot compare these runs; None if it can.

    A sample of 1,024 tokens is twice the work of one of 512, and a packed row holds several documents: per sample, the
    one with less work wins whatever the machine does. Non-pad tokens can be compared.
    """
    if metric not in PER_STEP:
        return None
    # Foreign scripts that are compared have the same tokens in every step.
    kinds = {(spec.training.sequence_length, str(spec.training.data)) for spec in specs if not spec.script}
    if len(kinds) < 2:
        return None
    differs = "lengths" if len({length for length, _ in kinds}) > 1 else "data"
    return f"{metric} cannot be compared across different sequence {differs}: use tokens_per_s, which excludes padding"


def comparable_metrics(cells: Iterable[Cell]) -> tuple[str, ...]:
    """On a shared GPU nothing is a speed, and across different samples nothing per sample or step is comparable."""
    known = tuple(cells)
    found = COMPARED_METRICS if not any(c.shared_gpu for c in known) else COMPARED_METRICS[len(SPEED_METRICS) :]
    return tuple(m for m in found if why_not_compared(m, [c.spec for c in known]) is None)


# --- within one campaign ---


def compare_cells(cells: Sequence[Cell], axes: Iterable[str] = tuple(AXES)) -> list[Compared]:
    """Every group of at least two certified cells, with all its pairs. A metric without spread is not compared.

    Parameters of foreign scripts are axes as well."""
    named = title_axes(cells)
    axes = list(dict.fromkeys([*axes, *(name for c in cells if c.spec.script for name in c.spec.script.parameters)]))
    return [Compared(group, tuple(_pairs(group))) for axis in axes for group in groups_of(cells, axis, named)]


def groups_of(cells: Sequence[Cell], axis: str, named: Sequence[str]) -> list[Group]:
    fields = (*AXES.get(axis, ()), f"script.parameters.{axis}")

    def key(cell: Cell) -> str:
        keeps_batch = axis in ("strategy", "micro_batch") and not cell.spec.script
        same: dict[str, object] = {"global_batch": cell.spec.global_batch} if keeps_batch else {}
        if axis == "launcher" and cell.spec.launcher_axes:
            same |= {"launcher": cell.spec.launcher_axes}
        return key_without(cell, fields, **same)

    usable = [
        cell
        for cell in cells
        if (axis in cell.spec.script.parameters if cell.spec.script else axis in AXES)
        and (axis not in TUNED_AXES or cell.spec.tuning is not None or cell.spec.script)
    ]
    # Two cells differ in some field: if all agree in these, no two of them agree in the others.
    if len({repr([cell.fields.get(name, ...) for name in fields]) for cell in usable}) < 2:
        return []
    by_key = grouped(usable, key).items()
    return [_group(axis, digest(axis, same), members, named) for same, members in by_key if len(members) > 1]


def digest(*parts: str) -> str:
    """A short name for a `key_without`."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=5).hexdigest()


def _group(axis: str, key: str, members: Sequence[Cell], named: Sequence[str]) -> Group:
    speeds = {c.id: metrics.estimate(c, "tokens_per_s") for c in members}
    ordered = sorted(members, key=lambda c: (-(s.value if (s := speeds[c.id]) else 0.0), c.id))
    everything = [cell.axes for cell in ordered]
    shared = {name: value for name, value in everything[0].items() if all(a.get(name) == value for a in everything)}
    names = {cell.id: name_of(cell.spec, axis) for cell in ordered}
    title = title_of({**shared, DEVICE: device_kind(ordered[0])}, named)
    return Group(axis, key, title, tuple(ordered), names, shared)


def name_of(spec: RunSpec, axis: str) -> str:
    """`zero:stage=2`, `compile on`, `micro batch 2 x 4`."""
    value = spec.axes().get(axis)
    if axis == "strategy":
        return str(value or spec.workload)
    if axis == "micro_batch" and not spec.script:
        return f"micro batch {value} x {spec.training.accumulation}"
    return _setting(axis, value)


def _setting(axis: str, value: Scalar) -> str:
    if axis == "env":
        return str(value or "default environment")
    if axis == "arguments":
        return str(value or "without arguments")
    if axis == DEVICE:
        return str(value)
    if isinstance(value, bool):
        value = "on" if value else "off"
    return f"{axis.replace('_', ' ')} {'default' if value is None else value}"


def title_axes(cells: Iterable[Cell]) -> tuple[str, ...]:
    """Axes that titles must name in addition, so that no two groups of these cells have the same title."""
    return untitled_axes([{**cell.axes, DEVICE: device_kind(cell)} for cell in cells])


def untitled_axes(cells: Sequence[Mapping[str, Scalar]]) -> tuple[str, ...]:
    """Axes that distinguish these cells and that titles do not name by default."""
    return tuple(name for name in distinguishing_axes(cells) if name not in _TITLED)


def title_of(axes: Mapping[str, Scalar], named: Iterable[str] = ()) -> str:
    """What all cells of a group share, in words; usual defaults are left out except `named`.

    >>> title_of({"strategy": "ddp", "model": "gpt2-124m", "device": "cuda", "world_size": 8, "precision": "bf16"})
    'ddp, gpt2-124m, 8 GPUs, bf16'
    >>> title_of({"script": "train.py", "arguments": "--lr 0.1"}, ["arguments"])
    'train.py, --lr 0.1'
    """
    parts = [
        axes.get("strategy"),
        axes.get("script"),
        axes.get("model"),
        axis_text("world_size", axes) if axes.get("world_size") else None,
        axes.get("precision"),
        f"sequence {axes['sequence_length']}" if axes.get("sequence_length") else None,
        f"global batch {axes['global_batch']}" if axes.get("global_batch") else None,
        f"checkpointing {axes['checkpointing']}" if axes.get("checkpointing") not in (None, "none") else None,
        _compiled(axes.get("compile")),
        *(_setting(name, axes[name]) for name in named if name in axes and name != EQUAL_WORK),
        axes.get(EQUAL_WORK),
    ]
    return ", ".join(str(part) for part in parts if part)


def _compiled(value: Scalar) -> str | None:
    return f"compiled {value}" if isinstance(value, str) else "compiled" if value else None


def _pairs(group: Group) -> Iterable[Comparison]:
    for metric in comparable_metrics(group.cells):
        known = [(cell, found) for cell in group.cells if (found := metrics.estimate(cell, metric))]
        among = [found for _, found in known]
        # All pairs that may get a verdict are one family: five equal strategies have ten chances to look different.
        repeated = sum(found.launches > 1 for found in among)
        family = max(repeated * (repeated - 1) // 2, 1)
        sharing = sharing_of(among)
        for (cell, over), (other, under) in itertools.combinations(known, 2):
            ratio = ratio_between([over], [under], sharing)
            if ratio is not None:
                names = group.names[cell.id], group.names[other.id]
                yield comparison(metric, BY_NAME[metric].better, (cell, other), names, ratio, group.axes, family)
