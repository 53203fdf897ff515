"""The same traffic on audited steps: which gradients were reduced, in which dtype, and nothing that is frozen."""

from __future__ import annotations

from collections import Counter

from paceline.analysis.findings import Check
from paceline.analysis.training.certificate.observed import Observed, Standard, checked, trained_count
from paceline.experiment import plugins
from paceline.experiment.layout import declared_layout
from paceline.models import arithmetic, parallel
from paceline.models.adapters import DTYPE_BYTES, sharded_adapter_parameters

REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
GATHERS = ("all_gather", "broadcast")
# Padding of buckets, and scalars such as the gradient norm; a frozen weight would be many times larger.
BYTES_TOLERANCE = 0.01
SCALAR_BYTES = 1024
# Loss and norm scalars are always reduced in fp32; only traffic above this share of the gradients is checked.
GRADIENT_SHARE = 0.01
# Dimensions of a mesh over which activations are exchanged, and not gradients.
OF_ACTIVATIONS = ("tp", "cp", "pp", "ep")


def only_adapters(run: Observed, standard: Standard) -> Check | None:
    """Counted bytes of one step: reductions carry the gradients of the adapters once, or once per micro batch if the
    strategy reduces each. Gathered bytes are reported too: strategies that shard frozen weights must fetch them.
    """
    tuning, spec = run.spec.tuning, run.spec
    if tuning is None or not tuning.has_adapters or spec.topology.world_size == 1:
        return None
    count = trained_count(run)
    declared = plugins.declared("strategies", spec.strategy.name) if spec.strategy else None
    if declared and declared["PADS_SHARDS"]:  # it also reduces the padding of its shards
        count = sharded_adapter_parameters(run.record.shape, tuning, spec.topology.world_size)
    once = count * DTYPE_BYTES[spec.training.precision.reduce]
    times = reductions_per_step(run)
    reduced, gathered = _payload(run, REDUCTIONS), _payload(run, GATHERS)
    slack = BYTES_TOLERANCE * times * once + SCALAR_BYTES
    problems = [
        f"{n:,} bytes on rank {rank} at step {step}"
        for (rank, step), n in sorted(reduced.items())
        if abs(n - times * once) > slack
    ]
    problems = problems if reduced else ["no reduction was counted"]
    expected = f"{times * once:,} bytes of adapter gradients reduced per step, within 1 %"
    seen = f"{max(reduced.values(), default=0):,} bytes reduced, {max(gathered.values(), default=0):,} gathered"
    return checked("only adapters reduced", expected, problems, seen)


def reductions_per_step(run: Observed) -> int:
    """How often gradients are reduced: once, unless the strategy says otherwise."""
    return int(run.spec.says("reductions_per_step") or 1)


def _payload(run: Observed, operations: tuple[str, ...]) -> Counter[tuple[int, int]]:
    """Bytes of these operations by rank and audited step, without those on activations."""
    found: Counter[tuple[int, int]] = Counter({(w.rank, w.step): 0 for w in run.record.wire})
    for sample in run.record.wire:
        if sample.operation in operations and sample.dimension not in OF_ACTIVATIONS:
            found[sample.rank, sample.step] += sample.payload_bytes
    return found


def gradients_reduced(run: Observed, standard: Standard) -> Check | None:
    """A lower bound on every audited step: the gradients of all trainable weights of a rank were reduced at least once.

    A rank has all weights, or its part of the layers where a layout splits them. A single replica reduces nothing.
    """
    spec, layout = run.spec, run.layout
    if layout.data_ranks == 1 or (spec.tuning is not None and spec.tuning.has_adapters):
        return None
    size = DTYPE_BYTES[spec.training.precision.reduce]
    whole = trained_count(run) * size
    splits = layout.tp * layout.pp * layout.ep > 1
    own = {
        rank: parallel.reduced(run.record.shape, layout, rank) * size if splits else whole
        for rank in range(layout.world_size)
    }
    reduced = _payload(run, REDUCTIONS)
    problems = [
        f"{bytes_:,} bytes on rank {rank} at step {step}"
        for (rank, step), bytes_ in sorted(reduced.items())
        if bytes_ < (1 - BYTES_TOLERANCE) * own.get(rank, whole)
    ]
    problems = problems if reduced else ["no collective was counted"]
    least = min(own.values())
    seen = (
        f"at least {min(reduced.values(), default=0):,} bytes at {len({s for _, s in reduced})} steps chosen at random"
    )
    return checked("gradients reduced", f"at least {least:,} bytes on every rank", problems, seen)


def declared_traffic(run: Observed, standard: Standard) -> Check:
    """For a strategy that declares other arithmetic: what it declares, and the bytes that it really sent. If it has a
    formula, they are those of the formula."""
    expected, sent = f"declared, not equal work: {run.spec.approximation}", _sent_per_step(run)
    problems = [] if any(sent.values()) or run.spec.topology.world_size == 1 else ["no collective was counted"]
    if (formula := _formula_bytes(run)) is not None:
        expected += f"; {formula:,.0f} bytes sent per step by formula, within 1 %"
        slack = BYTES_TOLERANCE * formula + SCALAR_BYTES
        wrong = {rank: size for rank, size in sent.items() if abs(size - formula) > slack}
        problems = problems or [f"{size:,.0f} bytes sent per step on rank {rank}" for rank, size in wrong.items()]
    seen = f"{max(sent.values(), default=0):,.0f} bytes sent per step on the busiest rank"
    return checked("approximation", expected, problems, seen)


def _sent_per_step(run: Observed) -> dict[int, float]:
    """Bytes that each rank sent per audited step: the counted payload times the factor of its operation."""
    steps: dict[int, set[int]] = {}
    for w in run.record.wire:
        steps.setdefault(w.rank, set()).add(w.step)
    found = dict.fromkeys(sorted(steps), 0.0)
    for w in run.record.wire:
        if w.operation in arithmetic.COLLECTIVES:
            found[w.rank] += w.payload_bytes * arithmetic.wire_factor(w.operation, w.group_size) / len(steps[w.rank])
    return found


def _formula_bytes(run: Observed) -> float | None:
    """What a strategy without a layout sends per step by its own formula; None if it has none."""
    spec, precision = run.spec, run.spec.training.precision
    if spec.strategy is None or spec.tuning is not None or declared_layout(spec) is not None:
        return None
    sizes = DTYPE_BYTES[precision.reduce], DTYPE_BYTES[precision.base]
    ranks, accumulation = spec.topology.world_size, spec.training.accumulation
    return arithmetic.wire_bytes(spec.strategy, trained_count(run), ranks, accumulation, *sizes)


def wire_dtype(run: Observed, standard: Standard) -> Check:
    """The declared reduction dtype is a claim; this is what the collectives carried."""
    wanted = run.spec.training.precision.reduce
    if run.layout.data_ranks == 1:
        who = "one process" if run.spec.topology.world_size == 1 else "one replica"
        return checked("reduction dtype on the wire", f"nothing: {who} does not reduce", [], who)
    gradient_bytes = max((e.parameters for e in run.evidence.values()), default=0) * DTYPE_BYTES[wanted]
    payload: Counter[tuple[int, int, str]] = Counter()
    for w in run.record.wire:
        if w.operation in REDUCTIONS and w.dimension not in OF_ACTIVATIONS:
            payload[w.rank, w.step, w.dtype] += w.payload_bytes
    seen = {dtype for (_, _, dtype), size in payload.items() if size > GRADIENT_SHARE * gradient_bytes}
    problems = [f"gradients crossed in {dtype}" for dtype in sorted(seen - {wanted})]
    problems = problems if seen else ["no reduction of gradients was counted"]
    return checked("reduction dtype on the wire", wanted, problems, wanted)
