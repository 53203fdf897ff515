"""The same trajectory: loss and gradient norm at every step, within what rounding explains."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from paceline.analysis.findings import Check
from paceline.analysis.findings.training import LOOSE_LIMIT, LossCurve
from paceline.analysis.training.certificate.observed import (
    LOSS,
    NORM,
    Observed,
    Standard,
    averages_every,
    checked,
    compared_values,
    first_values,
    steps_text,
)
from paceline.experiment.proof import Reduction

# Ranks take the norm of the same reduced gradients, in sums of the same order.
RANK_TOLERANCE = 1e-5
# Sums in another order, in fp32. Coarser arithmetic does not agree better, though three re-seeded references of a small
# model in bf16 may, by chance.
LEAST_TOLERANCE = 1e-4
# Another run of the same arithmetic is one more sample next to the re-seeded references: it sometimes exceeds their
# largest deviation, but hardly ever twice that of eight. Where three were too few, five more follow.
SPREAD_FACTOR = 2.0
# After the reference, the losses of honest bf16 runs on an H200 drifted apart from 6e-4 to 1.5e-2 in 18 steps, never
# doubling in one of them. Their gradient norms jumped, by up to 0.05; a wrong mean would be a factor.
GROWTH = 2.0
LATER_NORM = 0.25


def norms_agree(run: Observed, standard: Standard) -> Check | None:
    """All ranks report the same gradient norm, because it is computed from the reduced gradients."""
    if run.spec.topology.world_size == 1 or averages_every(run) > 1:
        return None
    worst, at = 0.0, None
    if run.steps:
        known = np.isfinite(run.norms)
        highest = run.table.largest(np.where(known, run.norms, -math.inf))
        lowest = -run.table.largest(np.where(known, -run.norms, -math.inf))
        # A step without any norm has none to compare.
        spread = np.where(highest < lowest, 0.0, (highest - lowest) / np.maximum(highest, 1e-30))
        index = int(spread.argmax())
        if spread[index] > 0:
            worst, at = float(spread[index]), run.table.steps[index]
    seen = f"equal at {len(run.steps)} steps" if at is None else f"a spread of {worst:.2g} at step {at}"
    problems = [seen] if worst > RANK_TOLERANCE else []
    return checked("gradient norm on all ranks", f"equal at every step, within {RANK_TOLERANCE:g}", problems, seen)


def replicas_agree(run: Observed, standard: Standard) -> Check | None:
    """Ranks that split one replica of the model work on the same samples and report the same loss."""
    layout = run.layout
    if not layout.splits_model:
        return None
    problems: list[str] = []
    for step in run.steps:
        columns = (run.table.at(step, field) for field in ("rank", "leader", "data_digest", "loss"))
        seen = {rank: values for rank, *values in zip(*columns, strict=True)}
        for rank, (leader, digest, loss) in seen.items():
            if leader != (None if layout.leader(rank) == rank else layout.leader(rank)):
                problems.append(f"rank {rank} counts the samples of another replica at step {step}")
            _, first_digest, first_loss = seen.get(layout.leader(rank), (None, None, math.nan))
            if digest != first_digest:
                problems.append(f"other samples on rank {rank} than on rank {layout.leader(rank)} at step {step}")
            elif not abs(loss - first_loss) <= RANK_TOLERANCE * abs(first_loss):
                problems.append(f"a loss of {loss:.6g} on rank {rank}, {first_loss:.6g} on its replica, at step {step}")
    seen_text = f"{layout.dp} replica{'' if layout.dp == 1 else 's'} of {layout.world_size // layout.dp} ranks"
    return checked("ranks of one replica", "the same samples and loss at every step", problems, seen_text)


def finite_loss(run: Observed, standard: Standard) -> Check:
    sound = np.isfinite(run.table.numbers("loss")).all()
    by_step = {} if sound else run.by_step("loss")
    bad = [step for step, losses in by_step.items() if not all(map(math.isfinite, losses))]
    problems = [f"a loss that is not a number at {steps_text(bad)}"] if bad else []
    problems = problems if run.steps else ["no step was recorded"]
    return checked("finite loss", "a finite loss on every rank at every step", problems, f"{len(run.steps)} steps")


def worst_deviations(run: Observed, base: Mapping[int, float], name: str) -> dict[int, float]:
    """|x - base| / |base| by step with a base, worst rank; infinite if a value is missing or the base is infinite.

    Losses of 2.1 and 2.0 over a base of 2.0 deviate by 0.05.
    """
    if not run.steps or not base:
        return {}
    bases = np.array([base.get(step, math.nan) for step in run.steps])
    with np.errstate(invalid="ignore", over="ignore"):
        errors = np.abs(compared_values(run, name) - bases) / np.maximum(np.abs(bases), 1e-30)
    errors = np.where(np.isnan(errors), math.inf, errors)
    worst = errors[0] if name == LOSS else run.table.largest(errors)
    return {step: error for step, error in zip(run.steps, worst.tolist(), strict=True) if step in base}


def _from_reference(run: Observed, standard: Standard, reference: Observed, name: str) -> dict[int, float]:
    """Deviation at each step that the reference has too; a reference that is not a number explains nothing.

    A step that the fp16 reference skipped for overflow has no norm to compare with.
    """
    return worst_deviations(run, standard.once(("base of references", name), lambda: _base(reference, name)), name)


def _base(reference: Observed, name: str) -> dict[int, float]:
    """The value of the reference at each step. Not a number, it makes every deviation infinite."""
    base = zip(reference.steps, first_values(reference, name), strict=True)
    skips = reference.spec.training.precision.compute == "fp16"
    return {step: x if math.isfinite(x) else math.nan for step, x in base if math.isfinite(x) or not skips}


def _medians(standard: Standard, name: str, left_out: str | None) -> dict[int, float]:
    """The median of all cells but the one left out, at each step after the reference."""
    peers = [steps for cell, steps in standard.cells.get(name, {}).items() if cell != left_out]
    known = sorted({step for steps in peers for step in steps if step > standard.last_step})
    return {step: statistics.median(steps[step] for steps in peers if step in steps) for step in known}


def compared_deviations(run: Observed, standard: Standard, name: str) -> Mapping[int, float]:
    """Deviation at each step that can be compared: with the reference as far as it goes, then with the median of all
    cells, or with the other cell where there are two. A cell alone cannot be compared with itself."""
    if standard.plain is None:
        return {}
    return standard.once(("deviations", run, name), lambda: _computed_deviations(run, standard, name))


def _computed_deviations(run: Observed, standard: Standard, name: str) -> Mapping[int, float]:
    reference = standard.reference
    left_out = None if len(standard.cells.get(name, {})) > 2 else run.spec.cell
    base = standard.once(
        ("base", name, left_out),
        lambda: (_base(reference, name) if reference else {}) | _medians(standard, name, left_out),
    )
    found = worst_deviations(run, base, name)
    if name != NORM or run.spec.training.precision.compute != "fp16":
        return found
    last, norms = standard.last_step, run.by_step("grad_norm")
    return {s: error for s, error in found.items() if s <= last or any(x is not None for x in norms[s])}


def _spread(standard: Standard, reference: Observed, variants: Iterable[Observed], name: str) -> dict[int, float]:
    """By step of the reference, the largest deviation of a re-seeded reference so far. A later spread never excuses an
    earlier step."""
    found = dict.fromkeys(reference.steps, 0.0)
    for variant in variants:
        for step, deviation in _from_reference(variant, standard, reference, name).items():
            found[step] = max(found[step], deviation)
    finite = (deviation if math.isfinite(deviation) else 0.0 for deviation in found.values())
    return dict(zip(found, itertools.accumulate(finite, max), strict=True))


def _limits(standard: Standard, run: Observed, name: str) -> tuple[Mapping[int, float], str]:
    """The deviation that rounding alone explains at each step, and where that comes from.

    It grows with the spread of the re-seeded references. After the reference, the differences of honest runs still
    grow, but not suddenly: one step may double the largest so far. Without a reference, the spread is that of the proof
    group, and more layers round more often.
    """
    return standard.once(("limits", run, name), lambda: _computed_limits(standard, run, name))


def _computed_limits(standard: Standard, run: Observed, name: str) -> tuple[Mapping[int, float], str]:
    reference, compute, proof = standard.plain, run.spec.training.precision.compute, standard.proof
    assert reference is not None
    variants = standard.variants if proof is None else proof.variants
    spread = standard.once(("spread", name), lambda: _spread(standard, reference, variants, name))
    factor = SPREAD_FACTOR if proof is None else SPREAD_FACTOR * growth_with_depth(proof.reduction)
    limits = standard.once(
        ("limits of the reference", name),
        lambda: {step: max(LEAST_TOLERANCE, factor * so_far) for step, so_far in spread.items()},
    )
    if not run.steps <= spread.keys():
        limits = _later_limits(limits, run.steps, compared_deviations(run, standard, name), name)
    so_far = max(spread.values(), default=0.0)
    origin = f"{factor:.3g} x the spread so far of {len(variants)} re-seeded references in {compute}"
    origin += "" if proof is None else f" on {proof.reduction.text}"
    if not variants:
        return limits, f"fixed for {compute}"
    if compute == "fp32" or factor * so_far < LEAST_TOLERANCE:
        return limits, f"at least {LEAST_TOLERANCE:g}, or {origin}"
    return limits, f"{origin}, {so_far:.2g} at the last step"


def growth_with_depth(reduction: Reduction) -> float:
    """How much further rounding moves the whole model than its reduced form: rounding errors of layers are independent,
    so that their variances add. The mean of a shorter sequence or a smaller batch only moves further.

    >>> growth_with_depth(Reduction(
    ...     work="", layers=4, of_layers=64, sequence_length=8, of_sequence_length=8, global_batch=2, of_global_batch=2
    ... ))
    4.0
    """
    return math.sqrt(reduction.of_layers / reduction.layers)


def _later_limits(
    known: Mapping[int, float], steps: Iterable[int], deviations: Mapping[int, float], name: str
) -> dict[int, float]:
    """The limits of the reference's steps, and of those that it does not have."""
    limits, so_far, reached = {}, LEAST_TOLERANCE, 0.0
    least = LATER_NORM if name == NORM else 0.0
    for step in sorted({*known, *steps}):
        so_far = known.get(step, so_far)
        limit = so_far if step in known else max(so_far, GROWTH * reached, least)
        limits[step] = limit
        if (deviation := deviations.get(step, 0.0)) > reached:
            reached = max(reached, min(deviation, limit))
    return limits


def compared_steps(run: Observed, standard: Standard) -> int:
    """How many steps had a loss to compare with, and a limit that tells a mistake from rounding."""
    deviations = compared_deviations(run, standard, LOSS)
    limits = _limits(standard, run, LOSS)[0] if deviations else {}
    return sum(limits[step] <= LOOSE_LIMIT for step in deviations)


def loss_curve(run: Observed, standard: Standard) -> LossCurve | None:
    """The losses of a run beside the reference's, for a chart; None without a step in common."""
    if standard.reference is None:
        return None
    limits, _ = _limits(standard, run, LOSS)
    own, base = run.losses, standard.reference.losses
    steps = tuple(s for s, loss in base.items() if math.isfinite(loss) and s in own and math.isfinite(own[s]))
    if not steps:
        return None
    losses, reference, limited = (tuple([values[s] for s in steps]) for values in (own, base, limits))
    return LossCurve(steps=steps, losses=losses, reference=reference, limits=limited)


def first_loss(run: Observed, standard: Standard) -> Check | None:
    """A strategy that approximates gradients has the exact loss until its first update."""
    if standard.plain is None or run.spec.says("approximates_loss"):
        return None
    name, first = "loss of the first step", min(run.steps, default=0)
    deviation = compared_deviations(run, standard, LOSS).get(first)
    if deviation is None:
        return checked(name, "the reference's", [], f"no step {first} to compare with")
    limits, origin = _limits(standard, run, LOSS)
    seen = f"{deviation:.2g} at step {first}"
    expected = f"within {limits[first]:.2g} of the reference, relative, because nothing was updated yet ({origin})"
    return checked(name, expected, [] if deviation <= limits[first] else [seen], seen)


def trajectory(name: str) -> Callable[[Observed, Standard], Check | None]:
    def check(run: Observed, standard: Standard) -> Check | None:
        if standard.plain is None:
            return None
        deviations = compared_deviations(run, standard, name)
        if standard.reference is None and not deviations:
            return checked(name, "that of the other configurations", [], "no other configuration to compare with")
        limits, origin = _limits(standard, run, name)
        if standard.reference is not None and not any(step in standard.reference.steps for step in deviations):
            return checked(name, f"the reference's ({origin})", ["no step in common with the reference"], "")
        # The step closest to its limit, or furthest beyond it.
        shares = [deviation / limits[step] for step, deviation in deviations.items()]
        step = [*deviations][shares.index(max(shares))]
        worst, limit = deviations[step], limits[step]
        cells = len(standard.cells.get(name, {}))
        others = f"the median of {cells} cells" if cells > 2 else "the other cell"
        source = "the reference" if step <= standard.last_step else others
        expected = f"within {limit:.2g} of {source} at step {step}, relative ({origin})"
        seen = f"{worst:.2g} at step {step}, the closest to its limit of {len(deviations)} compared steps"
        seen = seen if math.isfinite(worst) else f"not a number at step {step}"
        # A fixed limit does not depend on the number of copies.
        excess = max(shares) if standard.variants else None
        return checked(name, expected, [] if worst <= limit else [seen], seen, excess)

    return check
