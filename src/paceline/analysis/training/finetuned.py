"""What fine-tuning adds to equal work: the same frozen weights, the same learned tokens, and a wire that carries
nothing but what learns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from paceline.analysis.findings import Check
from paceline.analysis.training.observed import Observed, Standard, checked, silent_ranks
from paceline.experiment.spec import Tuning
from paceline.models import arithmetic
from paceline.models.adapters import DTYPE_BYTES, sharded_adapter_parameters, trained_parameters

REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
GATHERS = ("all_gather", "broadcast")
# Padding of buckets and scalars such as the gradient norm; a frozen weight would be many times this.
BYTES_TOLERANCE = 0.01
SCALAR_BYTES = 1024


def trained_count(run: Observed) -> int:
    """Weights that learn, by arithmetic on the shape."""
    tuning, shape = run.spec.tuning, run.record.shape
    return arithmetic.parameters(shape) if tuning is None else trained_parameters(shape, tuning)


def expected_dtypes(wanted: Mapping[str, str], tuning: Tuning, compute: str) -> dict[str, str]:
    """Frozen weights are NF4 or of the compute dtype. Moments of an 8-bit optimizer are 8 bit but for small tensors,
    so the reference says which; adapters are fp32 and their own master."""
    expected = dict(wanted)
    if tuning.has_adapters:
        expected |= {"parameters": "fp32", "frozen_weights": "nf4" if tuning.method == "qlora" else compute}
    if tuning.optimizer != "adamw":
        del expected["optimizer_state"]
    return expected


def frozen_weights(run: Observed, standard: Standard) -> Check | None:
    """The digest covers 4-bit codes and their scales as every rank holds them."""
    if run.spec.tuning is None or not run.spec.tuning.has_adapters:
        return None
    source = standard.reference or run
    wanted = source.evidence[0].frozen_digest if 0 in source.evidence else None
    problems = silent_ranks(run)
    problems += [f"{e.frozen_digest} on rank {r}" for r, e in run.evidence.items() if e.frozen_digest != wanted]
    problems = problems if wanted else ["no hash of the frozen weights"]
    seen = f"equal on {len(run.evidence)} ranks"
    return checked("frozen weights", f"hash {wanted} on every rank", problems, seen)


def label_tokens(run: Observed, standard: Standard) -> Check | None:
    """Learned tokens of the global batch: the loss is their mean, so another count is another loss."""
    if run.spec.tuning is None or standard.reference is None:
        return None
    seen, known = _sums(run), _sums(standard.reference)
    problems = [f"{n} at step {step}" for step, n in seen.items() if step in known and n != known[step]]
    problems = problems if seen else ["no step was recorded"]
    common = sum(step in known for step in seen)
    return checked("learned tokens per step", "the reference's", problems, f"equal at {common} steps")


def _sums(run: Observed) -> dict[int, int | None]:
    ranks = run.by_step("label_tokens")
    return {step: None if None in counts else sum(counts) for step, counts in ranks.items()}


def only_adapters(run: Observed, standard: Standard) -> Check | None:
    """Counted bytes of one step: reductions carry the adapters' gradients once, or once per micro batch where the
    strategy reduces each. What is gathered besides is stated: strategies that shard frozen weights must fetch them."""
    tuning, spec = run.spec.tuning, run.spec
    if tuning is None or not tuning.has_adapters or spec.topology.world_size == 1:
        return None
    once = _reduced_count(run, tuning) * DTYPE_BYTES[spec.training.precision.reduce]
    times = reductions_per_step(run)
    reduced, gathered = _payload(run, REDUCTIONS), _payload(run, GATHERS)
    slack = BYTES_TOLERANCE * times * once + SCALAR_BYTES
    problems = [f"{n:,} bytes on rank {rank}" for rank, n in sorted(reduced.items()) if abs(n - times * once) > slack]
    problems = problems if reduced else ["no reduction was counted"]
    expected = f"{times * once:,} bytes of adapters' gradients reduced per step, within 1 %"
    seen = f"{max(reduced.values(), default=0):,} bytes reduced, {max(gathered.values(), default=0):,} gathered"
    return checked("only adapters reduced", expected, problems, seen)


def _reduced_count(run: Observed, tuning: Tuning) -> int:
    """FSDP2 reduces the padding of its shards with them."""
    spec = run.spec
    if spec.strategy is not None and spec.strategy.name == "fsdp2":
        return sharded_adapter_parameters(run.record.shape, tuning, spec.topology.world_size)
    return trained_count(run)


def reductions_per_step(run: Observed) -> int:
    """DDP, ZeRO-1 and FSDP2 reduce after the last micro batch; ZeRO-2 and 3, and FSDP2 where asked, after each."""
    strategy, accumulation = run.spec.strategy, run.spec.training.accumulation
    if strategy is None:
        return 1
    each = strategy.options.get("stage", 1) in (2, 3) if strategy.name == "zero" else False
    each = each or strategy.options.get("sync_every_micro_batch", False) is True
    return accumulation if each else 1


def _payload(run: Observed, operations: tuple[str, ...]) -> Counter[int]:
    """Bytes by rank."""
    found: Counter[int] = Counter()
    for sample in run.record.wire:
        if sample.operation in operations:
            found[sample.rank] += sample.payload_bytes
    return found


def moved(run: Observed, standard: Standard) -> Check | None:
    """Every adapter changed and nothing frozen did: both are read after the window, because in its first steps an
    adapter learns so little that a trajectory in 16 bit cannot tell one that never does.

    Runs of before this was read are not held to it.
    """
    read = {rank: e for rank, e in run.evidence.items() if e.unmoved is not None}
    if run.spec.tuning is None or not run.spec.tuning.has_adapters or not read:
        return None
    problems = [f"{len(e.unmoved)} did not on rank {r}, {e.unmoved[0]} first" for r, e in read.items() if e.unmoved]
    problems += [
        f"frozen weights changed on rank {r}" for r, e in read.items() if e.final_frozen_digest != e.frozen_digest
    ]
    return checked("adapters learn", "every adapter changed, no frozen weight did", problems, f"on {len(read)} ranks")
