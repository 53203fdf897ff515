"""The same trajectory: loss and gradient norm at every step, within what rounding explains."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from paceline.analysis.findings import Check
from paceline.analysis.findings.training import LOOSE_LIMIT, LossCurve
from paceline.analysis.training.certificate.observed import (
    LOSS,
    NORM,
    QUANTITIES,
    Observed,
    Standard,
    Values,
    checked,
    steps_text,
)

# Ranks take the norm of the same reduced gradients, in sums of the same order.
RANK_TOLERANCE = 1e-5
# Sums in another order, in fp32. Coarser arithmetic does not agree better, though three re-seeded references of a small
# model in bf16 may, by chance.
LEAST_TOLERANCE = 1e-4
# Another run of the same arithmetic is one more sample next to the three re-seeded references: it sometimes exceeds
# their largest deviation, but hardly ever twice that.
SPREAD_FACTOR = 2.0
# After the reference, the losses of honest bf16 runs on an H200 drifted apart from 6e-4 to 1.5e-2 in 18 steps, never
# doubling in one of them. Their gradient norms jumped, by up to 0.05; a wrong mean would be a factor.
GROWTH = 2.0
LATER_NORM = 0.25


def norms_agree(run: Observed, standard: Standard) -> Check | None:
    """All ranks report the same gradient norm, because it is computed from the reduced gradients."""
    if run.spec.topology.world_size == 1:
        return None
    worst, at = 0.0, None
    for step, norms in run.norms.items():
        known = [x for x in norms if x is not None and math.isfinite(x)]
        if known and (spread := (max(known) - min(known)) / max(max(known), 1e-30)) > worst:
            worst, at = spread, step
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
    sound = all(map(math.isfinite, run.table.values("loss")))
    by_step = {} if sound else run.by_step("loss")
    bad = [step for step, losses in by_step.items() if not all(map(math.isfinite, losses))]
    problems = [f"a loss that is not a number at {steps_text(bad)}"] if bad else []
    problems = problems if run.steps else ["no step was recorded"]
    return checked("finite loss", "a finite loss on every rank at every step", problems, f"{len(run.steps)} steps")


def _deviations(run: Observed, reference: Observed, values: Values) -> dict[int, float]:
    """|x - reference| / |reference| by common step, worst rank; infinite if a value is missing.

    A step that the fp16 reference skipped for overflow has no norm to compare with.
    """
    found = {}
    skips = reference.spec.training.precision.compute == "fp16"
    for step in (s for s in reference.steps if s in run.steps):
        base = values(reference, step)[0]
        if base is None or not math.isfinite(base):
            if not skips:
                found[step] = math.inf
            continue
        found[step] = _deviation(values(run, step), base)
    return found


def _deviation(values: Iterable[float | None], base: float) -> float:
    size = max(abs(base), 1e-30)
    errors = [math.inf if x is None or math.isnan(x) else abs(x - base) / size for x in values]
    return max(errors, default=math.inf)


def compared_deviations(run: Observed, standard: Standard, values: Values, name: str) -> Mapping[int, float]:
    """Deviation at each step that can be compared: with the reference as far as it goes, then with the median of all
    cells, or with the other cell where there are two. A cell alone cannot be compared with itself.

    Kept in the standard: the checks of one run ask for it several times.
    """
    if standard.reference is None:
        return {}
    if (known := standard.deviations.get((run, name))) is not None:
        return known
    found = _deviations(run, standard.reference, values)
    cells = standard.cells.get(name, {})
    peers = cells if len(cells) > 2 else {cell: steps for cell, steps in cells.items() if cell != run.spec.cell}
    overflows, last = run.spec.training.precision.compute == "fp16", max(standard.reference.steps)
    for step in (s for s in run.steps if s > last):
        others = [steps[step] for steps in peers.values() if step in steps]
        own = values(run, step)
        if others and not (overflows and all(x is None for x in own)):
            found[step] = _deviation(own, statistics.median(others))
    standard.deviations[run, name] = found
    return found


def _limits(
    standard: Standard, run: Observed, name: str, deviations: Mapping[int, float]
) -> tuple[Mapping[int, float], str]:
    """The deviation that rounding alone explains at each step, and where that comes from.

    It grows with the spread of the re-seeded references so far: a later spread never excuses an earlier step. After the
    reference, the differences of honest runs still grow, but not suddenly: one step may double the largest so far.
    """
    assert standard.reference is not None
    reference, compute = standard.reference, run.spec.training.precision.compute
    spread: defaultdict[int, float] = defaultdict(float)
    for variant in standard.variants:
        if (variant, name) not in standard.deviations:
            standard.deviations[variant, name] = _deviations(variant, reference, QUANTITIES[name])
        for step, deviation in standard.deviations[variant, name].items():
            spread[step] = max(spread[step], deviation)
    so_far, reached, limits = 0.0, 0.0, {}
    for step in sorted({*reference.steps, *run.steps}):
        so_far = max(so_far, spread[step] if math.isfinite(spread[step]) else 0.0)
        limits[step] = max(LEAST_TOLERANCE, SPREAD_FACTOR * so_far)
        if step not in reference.steps:
            limits[step] = max(limits[step], GROWTH * reached, LATER_NORM if name == NORM else 0.0)
        reached = max(reached, min(deviations.get(step, 0.0), limits[step]))
    origin = f"{SPREAD_FACTOR:g} x the spread so far of {len(standard.variants)} re-seeded references in {compute}"
    if not standard.variants:
        return limits, f"fixed for {compute}"
    if compute == "fp32" or SPREAD_FACTOR * so_far < LEAST_TOLERANCE:
        return limits, f"at least {LEAST_TOLERANCE:g}, or {origin}"
    return limits, f"{origin}, {so_far:.2g} at the last step"


def compared_steps(run: Observed, standard: Standard) -> int:
    """How many steps had a loss to compare with, and a limit that tells a mistake from rounding."""
    deviations = compared_deviations(run, standard, QUANTITIES[LOSS], LOSS)
    limits = _limits(standard, run, LOSS, deviations)[0] if deviations else {}
    return sum(limits[step] <= LOOSE_LIMIT for step in deviations)


def loss_curve(run: Observed, standard: Standard) -> LossCurve | None:
    """The losses of a run beside the reference's, for a chart; None without a step in common."""
    if standard.reference is None:
        return None
    deviations = compared_deviations(run, standard, QUANTITIES[LOSS], LOSS)
    limits, _ = _limits(standard, run, LOSS, deviations)
    base = standard.reference.losses
    steps = [s for s in base if s in run.steps and math.isfinite(base[s]) and math.isfinite(run.losses[s])]
    if not steps:
        return None
    losses = tuple(run.losses[s] for s in steps), tuple(base[s] for s in steps)
    return LossCurve(steps=tuple(steps), losses=losses[0], reference=losses[1], limits=tuple(limits[s] for s in steps))


def trajectory(name: str) -> Callable[[Observed, Standard], Check | None]:
    values = QUANTITIES[name]

    def check(run: Observed, standard: Standard) -> Check | None:
        if standard.reference is None:
            return None
        deviations = compared_deviations(run, standard, values, name)
        limits, origin = _limits(standard, run, name, deviations)
        if not any(step in standard.reference.steps for step in deviations):
            return checked(name, f"the reference's ({origin})", ["no step in common with the reference"], "")
        # The step closest to its limit, or furthest beyond it.
        step = max(deviations, key=lambda s: deviations[s] / max(limits[s], 1e-30))
        worst, limit = deviations[step], limits[step]
        cells = len(standard.cells.get(name, {}))
        others = f"the median of {cells} cells" if cells > 2 else "the other cell"
        source = "the reference" if step in standard.reference.steps else others
        expected = f"within {limit:.2g} of {source} at step {step}, relative ({origin})"
        seen = f"{worst:.2g} at step {step}, the closest to its limit of {len(deviations)} compared steps"
        seen = seen if math.isfinite(worst) else f"not a number at step {step}"
        return checked(name, expected, [] if worst <= limit else [seen], seen)

    return check
