"""The same settings: dtypes, optimizer and its groups, clipping, precision and debug switches."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.analysis.findings import Check
from paceline.analysis.training.certificate.observed import (
    Observed,
    Standard,
    checked,
    in_words,
    on_ranks,
    silent_ranks,
    trained_count,
)
from paceline.analysis.training.certificate.traffic import BYTES_TOLERANCE
from paceline.experiment.spec import RunSpec, Tuning
from paceline.models import parallel

# Which kernels compute the update does not change what it computes.
KERNELS = ("fused", "foreach")
COUNTS = ("elements", "first_step", "steps")
# Rounding of the norm and of the factor, in 16 bit too.
CLIP_TOLERANCE = 0.01


def _tuned_dtypes(wanted: Mapping[str, str], tuning: Tuning, compute: str) -> dict[str, str]:
    """Dtypes for fine-tuning. Frozen weights are NF4 or of the compute dtype. Moments of an 8-bit optimizer are 8 bit
    except for small tensors, so the reference decides. Adapters are fp32 and their own master weights.
    """
    expected = dict(wanted)
    if tuning.has_adapters:
        expected |= {"parameters": "fp32", "frozen_weights": "nf4" if tuning.method == "qlora" else compute}
    if tuning.optimizer != "adamw":
        del expected["optimizer_state"]
    return expected


def expected_dtypes(spec: RunSpec) -> dict[str, str]:
    """Weights are used in the compute dtype and stored, like Adam's moments, in fp32; gradients follow `reduce`.

    For fine-tuning, see `_tuned_dtypes`.
    """
    precision = spec.training.precision
    wanted = {
        "compute": precision.compute,
        "gradient": precision.reduce,
        "gradient_reduction": precision.reduce,
        "optimizer_state": "fp32",
        "master_weights": "fp32",
    }
    return wanted if spec.tuning is None else _tuned_dtypes(wanted, spec.tuning, precision.base)


def declared_dtypes(run: Observed, standard: Standard) -> Check:
    agreed = dict(standard.plain.evidence[0].dtypes) if standard.plain else {}
    wanted = {**agreed, **expected_dtypes(run.spec)}
    if run.spec.approximation is not None:
        del wanted["gradient_reduction"]
    problems = silent_ranks(run)
    for key, dtype in wanted.items():
        seen = sorted({e.dtypes.get(key, "not observed") for e in run.evidence.values()} - {dtype})
        problems += [f"{key} {other}" for other in seen]
    return checked("dtypes", in_words(wanted), problems, "as expected on every rank")


def optimizer_class(run: Observed, standard: Standard) -> Check | None:
    if standard.plain is None:
        return None
    wanted = {k: v for k, v in standard.plain.evidence[0].optimizer.items() if k not in KERNELS}
    problems = silent_ranks(run)
    for rank, evidence in run.evidence.items():
        own = {k: v for k, v in evidence.optimizer.items() if k not in KERNELS}
        differing = [k for k in {**wanted, **own} if own.get(k) != wanted.get(k)]
        problems += [f"{k} {own.get(k)!r} on rank {rank}" for k in differing]
    return checked("optimizer", in_words(wanted), problems, "equal to the reference's")


def parameter_groups(run: Observed, standard: Standard) -> Check | None:
    """All parameter groups that any optimizer stepped in the window have the reference's hyper-parameters, and together
    they cover every trainable weight: on each rank, or once over all ranks if each rank updates its own part."""
    reference = standard.plain.evidence[0].groups if standard.plain else None
    observed = {rank: e.groups for rank, e in run.evidence.items() if e.groups is not None}
    if not reference or not observed:
        return None
    allowed = [{k: v for k, v in group.items() if k not in COUNTS} for group in reference]
    problems = silent_ranks(run)
    for rank, groups in observed.items():
        for group in groups:
            # Other implementations may lack a switch that is off, such as amsgrad.
            unlike = [[k for k, v in wanted.items() if group.get(k, None if v else v) != v] for wanted in allowed]
            differing = min(unlike, key=len)
            if differing:
                since = f" at {group['steps']} steps from step {group['first_step']}"
                values = ", ".join(f"{k} {group.get(k)}" for k in differing)
                problems.append(f"{values} for {group['elements']:,} weights on rank {rank}{since}")
    total, count = _stepped(observed), trained_count(run)
    # Shards may be padded, never short. A pipeline steps a tied weight in its first and in its last stage.
    whole = count if run.spec.tuning else parallel.optimised(run.record.shape, run.layout)
    if not any(0 <= total - times * whole <= BYTES_TOLERANCE * count for times in range(1, len(observed) + 1)):
        problems.append(f"{total:,} weights stepped over all ranks of {count:,}")
    expected = f"{'; or '.join(map(in_words, allowed))}, for all {count:,} weights"
    return checked("parameter groups", expected, problems, on_ranks(observed))


def _stepped(observed: Mapping[int, Sequence[Mapping[str, Any]]]) -> int:
    """Weights that were stepped, over all ranks: the groups that appear in the same step add up."""
    total = 0
    for groups in observed.values():
        first = min((int(g["first_step"]) for g in groups), default=0)
        total += sum(int(g["elements"]) for g in groups if g["first_step"] == first)
    return total


def clipping(run: Observed, standard: Standard) -> Check | None:
    """On audited steps, the optimizer received gradients whose norm does not exceed `clip_norm`.

    Ranks that update all weights each have the whole norm; otherwise the squares of all ranks add up.
    """
    updates = [o for o in run.record.operations if o.operation == "update" and o.squares is not None]
    if not updates:
        return None
    limit, count, problems, largest = run.spec.training.clip_norm, trained_count(run), [], 0.0
    # A tied weight in the first and the last stage of a pipeline has its gradient twice: at most twice the squares.
    slack = math.sqrt(2) if parallel.twice_held(run.record.shape, run.layout) else 1 + CLIP_TOLERANCE
    for step in sorted({o.step for o in updates}):
        by_rank: defaultdict[int, list[Any]] = defaultdict(list)
        for o in updates:
            if o.step == step:
                by_rank[o.rank].append(o)
        whole = [sum(o.squares for o in found) for found in by_rank.values()]
        is_whole = all(sum(o.work for o in found) > 0.75 * count for found in by_rank.values())
        norm = math.sqrt(max(whole) if is_whole else sum(whole))
        largest = max(largest, norm)
        if not norm <= limit * slack:
            problems.append(f"a norm of {norm:.4g} at step {step}")
    seen = f"a norm of at most {largest:.4g} after clipping"
    return checked("gradient clipping", f"a norm of at most {limit:g} after clipping", problems, seen)


def precision_switches(run: Observed, standard: Standard) -> Check | None:
    """torch's switches of numerical precision had the reference's values at every step."""
    wanted = standard.plain.evidence[0].flags if standard.plain else None
    observed = {rank: e.flags for rank, e in run.evidence.items() if e.flags is not None}
    if not wanted or not observed:
        return None
    problems = silent_ranks(run)
    for rank, flags in observed.items():
        problems += [f"{k} {flags.get(k)} on rank {rank}" for k, v in wanted.items() if flags.get(k) != v]
    return checked("precision switches", in_words(wanted), problems, on_ranks(observed))


def debug_switches(run: Observed, standard: Standard) -> Check:
    own, others = run.switches, sum(peer.switches != run.switches for peer in standard.group)
    expected = "none, or the same in every run of the group"
    if own and others:
        problems = [f"{in_words(own)}, but not in {others} of {len(standard.group)} runs"]
        return checked("debug switches", expected, problems, "")
    return checked("debug switches", expected, [], f"{in_words(own)}, in every run" if own else "none")
