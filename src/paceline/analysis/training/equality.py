"""How equal the work of foreign training scripts is: certified, consistent or different, from what was observed of it.

Paceline's own training loops have a reference (`certificate`). A script has none, so the first run of those that most
runs agree with is the baseline of its group, and each quantity below is compared with it:

    certified   ── initial weights, data, updates, optimizer and losses were all observed, and all agree
    consistent  ── all that was observed agrees; what could not be observed is named
    different   ── something differs; such runs are compared only with runs of their own kind, never ranked with others

A quantity in which launches of one configuration differ among themselves (a script without a seed) proves nothing: it
counts as not observed. See docs/scripts.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.analysis.findings import CERTIFIED, CONSISTENT, DIFFERENT, Certificate, Check
from paceline.analysis.grouping import grouped

if TYPE_CHECKING:
    from paceline.analysis.training.certificate.observed import Observed

MASK64 = (1 << 64) - 1
# Relative deviation of the loss at the first step, and what each later step adds: rounding differs between strategies.
LOSS_TOLERANCE = {"fp32": (1e-4, 1e-5)}
ROUNDED_TOLERANCE = (1e-2, 1e-3)
# The gradient norm reacts more strongly, to rounding and to a missing part of the gradient.
NORM_TOLERANCE = {"fp32": (1e-3, 1e-4)}
ROUNDED_NORM_TOLERANCE = (1e-1, 1e-2)
# How far deviations grow, and in how many steps.
GROWTH, GROWTH_STEPS = 10.0, 5
# If the data of a script is shuffled without a seed, its padding varies.
TOKENS_TOLERANCE = 0.05
# Which code computes an update does not change what it computes.
_ALIASES = {"FusedAdam": "AdamW", "DeepSpeedCPUAdam": "AdamW", "CPUAdam": "AdamW"}
_IMPLIED = ("initial_lr", "bias_correction")


@dataclass(frozen=True, slots=True)
class Quantity:
    """One thing that equal work has in common. value: None if it was not observed. differs: what differs, or None.

    seeded: it depends on random numbers, so launches of an unseeded script differ in it. needed: for `certified`.
    """

    name: str
    value: Callable[[Observed], Any]
    differs: Callable[[Observed, Observed], str | None]
    needed: bool = True
    seeded: bool = False


@dataclass(frozen=True, slots=True)
class Grade:
    """The outcome of one comparison. differing: what differs. unobserved: what could not be compared, and why."""

    differing: Mapping[str, str]
    unobserved: Mapping[str, str]

    @property
    def level(self) -> str:
        if self.differing:
            return DIFFERENT
        needed = {quantity.name for quantity in QUANTITIES if quantity.needed}
        return CONSISTENT if needed & self.unobserved.keys() else CERTIFIED

    @property
    def text(self) -> str:
        """`consistent (not observed: initial weights)`."""
        if self.differing:
            return f"{DIFFERENT} ({'; '.join(f'{name}: {what}' for name, what in self.differing.items())})"
        return self.level if self.level == CERTIFIED else f"{CONSISTENT} (not compared: {', '.join(self.unobserved)})"


def certify_scripts(runs: Sequence[Observed]) -> dict[str, Certificate]:
    """Certificates of the runs of one work, by run id. The baseline is the earliest run of what most runs did."""
    ordered = sorted(runs, key=lambda run: (run.record.started_at, run.run))
    varying = varying_quantities(ordered)
    # Each kind of work, in the order of their first runs, with which others of that kind are compared.
    kinds: list[list[Observed]] = []
    for run in ordered:
        alike = (kind for kind in kinds if not grade(run, kind[0], varying).differing)
        if (kind := next(alike, None)) is None:
            kinds.append(kind := [])
        kind.append(run)
    kinds.sort(key=len, reverse=True)
    numbers = {run.run: number for number, kind in enumerate(kinds) for run in kind}
    return {
        run.run: _certificate(run, kinds[number][0], kinds[0][0], number, varying, ordered)
        for run in ordered
        for number in (numbers[run.run],)
    }


def grade_between(ours: Sequence[Observed], theirs: Sequence[Observed]) -> Grade:
    """The grade of the runs of one cell against those of another, such as the same cell after a change of the code."""
    varying = varying_quantities([*ours, *theirs])
    grades = [grade(run, ours[0], varying) for run in theirs]
    worst = (CERTIFIED, CONSISTENT, DIFFERENT)
    return max(grades, key=lambda each: worst.index(each.level))


def varying_quantities(runs: Iterable[Observed]) -> set[str]:
    """Seeded quantities in which launches of one configuration and one code differ."""
    found = set()
    for launches in grouped(runs, lambda run: (run.spec.cell, _code(run))).values():
        for quantity in (q for q in QUANTITIES if q.seeded):
            known = [run for run in launches if quantity.value(run) is not None]
            if any(quantity.differs(run, known[0]) for run in known[1:]):
                found.add(quantity.name)
    return found


def grade(run: Observed, baseline: Observed, varying: Iterable[str]) -> Grade:
    differing, unobserved = {}, {}
    for quantity in QUANTITIES:
        if quantity.name in varying:
            unobserved[quantity.name] = "differs between launches of one configuration: the script sets no seed"
        elif quantity.value(run) is None or quantity.value(baseline) is None:
            unobserved[quantity.name] = "not observed"
        elif (what := quantity.differs(run, baseline)) is not None:
            differing[quantity.name] = what
    if "data" in varying and "tokens per step" in differing and _same_mean(run, baseline):
        del differing["tokens per step"]
    return Grade(differing, unobserved)


def _certificate(
    run: Observed, baseline: Observed, first: Observed, number: int, varying: set[str], group: Sequence[Observed]
) -> Certificate:
    own, whole = grade(run, baseline, varying), grade(run, first, varying)
    unseen = f" (not observed: {', '.join(own.unobserved)})" if own.unobserved else ""
    checks = [*soundness(run, group)]
    for quantity in QUANTITIES:
        differing, missing = whole.differing.get(quantity.name), whole.unobserved.get(quantity.name)
        checks.append(
            Check(
                name=quantity.name,
                ok=differing is None,
                expected=f"that of {first.run}",
                observed=differing or missing or ("the baseline itself" if run is first else "equal"),
                basis="observed",
                grades=True,
            )
        )
    return Certificate(
        run=run.run,
        cell=run.spec.cell,
        work=f"{run.spec.work}{f'-{number + 1}' if number else ''}",
        reference=None if run is baseline else baseline.run,
        checks=tuple(checks),
        steps=len(run.steps),
        compared_steps=len(run.steps),
        level=own.level,
        grade=own.text if len(group) > 1 else f"nothing to compare with{unseen}",
        differs=tuple(f"{name}: {what}" for name, what in whole.differing.items()),
    )


# --- whether a run is sound ---


def soundness(run: Observed, group: Sequence[Observed]) -> Iterable[Check]:
    """What every run must show, whatever it is compared with."""
    ranks, counts = run.spec.topology.world_size, Counter(run.table.values("rank"))
    wrong = [f"{counts[rank]} on rank {rank}" for rank in range(ranks) if not counts[rank] or counts[rank] != counts[0]]
    wrong += ["none of them updated the weights"] if run.steps and not _updates(run) else []
    yield _sound("steps", "the same number on every rank, at least 1", wrong, f"{counts[0]} on every rank")
    if _loss_source(run) is not None:
        bad = [str(step) for step, loss in run.losses.items() if not math.isfinite(loss)]
        problems = [f"not a number at step {', '.join(bad[:3])}"] if bad else []
        yield _sound("finite loss", "a finite loss at every step", problems, f"{len(run.steps)} steps")
    final = {rank: e.final_digests for rank, e in run.evidence.items() if e.final_digests}
    whole = [weights for weights in final.values() if not any(value.endswith("+") for value in weights.values())]
    if ranks > 1 and len(whole) == ranks:
        problems = [] if all(weights == whole[0] for weights in whole) else ["ranks ended with different weights"]
        yield _sound("weights after the last step", "the same on every rank", problems, f"equal on {ranks} ranks")
    newest = max((peer for peer in group if peer.spec.cell == run.spec.cell), key=lambda peer: peer.record.started_at)
    problems = [] if _code(newest) == _code(run) else [f"an older version of it: {newest.run} ran another one"]
    yield _sound("script", "the same code in all launches of a configuration", problems, "the same code")


def _sound(name: str, expected: str, problems: Sequence[str], seen: str) -> Check:
    return Check(name=name, ok=not problems, expected=expected, observed="; ".join(problems) or seen)


def _code(run: Observed) -> str | None:
    return run.spec.script.code if run.spec.script else None


# --- what is compared ---


def _weights(run: Observed) -> tuple[str, ...] | None:
    """`shape:digest` of every initial tensor, in any order; parts of sharded tensors are added up."""
    by_rank = [e.init_digests for e in run.evidence.values()]
    if not by_rank or len(by_rank) != run.spec.topology.world_size or not all(by_rank):
        return None
    found = []
    for name, text in by_rank[0].items():
        shape, _, digest = text.partition(":")
        if digest.endswith("+"):
            parts = [weights.get(name, "").partition(":")[2].rstrip("+") for weights in by_rank]
            if not all(parts):
                return None
            digest = f"{sum(int(part, 16) for part in parts) & MASK64:016x}"
        found.append(f"{shape}:{digest}")
    return tuple(sorted(found))


def _weights_differ(run: Observed, baseline: Observed) -> str | None:
    own, known = Counter(_weights(run) or ()), Counter(_weights(baseline) or ())
    other, missing = (own - known).total(), (known - own).total()
    if other:
        return f"{other} of {own.total()} tensors"
    return f"{missing} of {known.total()} tensors are missing" if missing else None


def _parameters(run: Observed) -> tuple[int, Any] | None:
    first = run.evidence.get(0)
    return (first.parameters, first.settings.get("frozen_parameters")) if first and first.parameters else None


def _data(run: Observed) -> Mapping[int, int] | None:
    return run.digests if any(run.digests.values()) else None


def _optimizer(run: Observed) -> list[dict[str, Any]] | None:
    """The parameter groups of rank 0. Equal ones are one: frameworks and sharded optimizers split them differently."""
    first = run.evidence.get(0)
    if first is None or not first.groups:
        return None
    sizes: Counter[tuple[tuple[str, Any], ...]] = Counter()
    for group in first.groups:
        settings = {**group, "class": _ALIASES.get(str(group.get("class")), group.get("class"))}
        size = int(settings.pop("elements", 0) or 0)
        sizes[tuple(sorted((name, value) for name, value in settings.items() if name not in _IMPLIED))] += size
    # Sizes can be compared if these groups have all weights of the model.
    is_whole = sum(sizes.values()) == first.parameters
    return [{**dict(settings), **({"elements": size} if is_whole else {})} for settings, size in sizes.items()]


def _optimizer_differs(run: Observed, baseline: Observed) -> str | None:
    own, known = _optimizer(run) or [], _optimizer(baseline) or []
    if what := _unmatched(own, known):
        return what
    if missing := _unmatched(known, own):
        return f"a group is missing ({missing})"
    limits = [each.evidence[0].settings.get("clip_norm") for each in (run, baseline)]
    if None not in limits and limits[0] != limits[1]:
        return f"clip norm {limits[0]} instead of {limits[1]}"
    changes = [each.evidence[0].settings.get("changed") for each in (run, baseline)]
    if None not in changes and changes[0] != changes[1]:
        return f"during training, {changes[0] or 'nothing changes'} instead of {changes[1] or 'no change'}"
    rates = [str(each.evidence[0].settings.get("rates")) for each in (run, baseline)]
    same_length = rates[0].partition(":")[0] == rates[1].partition(":")[0]
    return "another schedule of learning rates" if same_length and rates[0] != rates[1] else None


def _unmatched(own: Sequence[Mapping[str, Any]], known: Sequence[Mapping[str, Any]]) -> str | None:
    """How the first group that none of the known ones equals differs from the nearest; None if all have an equal."""
    for group in own:
        unlike = [
            [
                f"{name} {group[name]} instead of {other[name]}"
                for name in group
                if group[name] != other.get(name, group[name])
            ]
            for other in known
        ]
        if nearest := min(unlike, key=len, default=["another optimizer"]):
            return ", ".join(nearest)
    return None


def _trained_tensors(run: Observed) -> int | None:
    """How many tensors changed between the first step and the end; None if a rank could not read them."""
    ranks = run.evidence.values()
    if len(ranks) != run.spec.topology.world_size or not all(e.init_digests and e.final_digests for e in ranks):
        return None
    changed = {n for e in ranks for n, w in (e.final_digests or {}).items() if e.init_digests.get(n) != w}
    return len(changed)


def _norms(run: Observed) -> dict[int, float] | None:
    """The gradient norm of each step with an update; None if a rank has none, or only that of its own part of the
    model."""
    found, updates = {}, run.by_step("updates")
    for step, values in run.by_step("grad_norm").items():
        if not any(updates[step]):
            continue
        known = [value for value in values if value is not None]
        if len(known) != len(values) or max(known) > min(known) * (1 + NORM_TOLERANCE["fp32"][0]):
            return None
        # Infinite if a loss scale was too large and the script, or DeepSpeed, left out the update itself.
        if math.isfinite(known[0]):
            found[step] = known[0]
    return found or None


def _norms_differ(run: Observed, baseline: Observed) -> str | None:
    own, known = _norms(run) or {}, _norms(baseline) or {}
    return _deviates(own, known, *NORM_TOLERANCE.get(_dtypes(run) or "", ROUNDED_NORM_TOLERANCE))


def _dtypes(run: Observed) -> str | None:
    first = run.evidence.get(0)
    dtype = first.dtypes.get("compute") if first else None
    return None if dtype == "unknown" else dtype


def _reduction(run: Observed) -> str | None:
    """The dtype in which most bytes of gradients are added up over ranks; None if no such collective was seen."""
    moved: Counter[str] = Counter()
    for sample in run.record.wire:
        if sample.operation in ("all_reduce", "reduce_scatter", "reduce"):
            moved[sample.dtype] += sample.payload_bytes
    return max(moved, key=lambda dtype: moved[dtype]) if moved else None


def _loss_source(run: Observed) -> str | None:
    """Where losses were seen; None if nowhere."""
    first = run.evidence.get(0)
    source = first.settings.get("loss") if first else None
    return None if source in (None, "none") else str(source)


def _losses(run: Observed) -> Mapping[int, float] | None:
    return run.losses if _loss_source(run) is not None else None


def _losses_differ(run: Observed, baseline: Observed) -> str | None:
    return _deviates(run.losses, baseline.losses, *LOSS_TOLERANCE.get(_dtypes(run) or "", ROUNDED_TOLERANCE))


def _deviates(own: Mapping[int, float], known: Mapping[int, float], least: float, growth: float) -> str | None:
    """The first step at which a relative deviation exceeds its limit: the least tolerance and what each step adds.

    Rounding errors grow slowly, so a limit above the least one is at most GROWTH times the largest deviation until
    GROWTH_STEPS steps before: a mistake that begins late jumps.

    >>> honest = {step: 1 + 1e-4 * step for step in range(40)}
    >>> _deviates(honest, dict.fromkeys(honest, 1.0), 1e-3, 1e-4)
    >>> late = {step: 1 + 4e-3 * (step > 35) for step in range(40)}
    >>> _deviates(late, dict.fromkeys(late, 1.0), 1e-3, 1e-4)
    '1.004 instead of 1 at step 36'
    """
    deviations: list[float] = []
    reached = 0.0
    for step in (step for step in own if step in known):
        if len(deviations) > GROWTH_STEPS:
            reached = max(reached, deviations[-GROWTH_STEPS - 1])
        deviations.append(abs(own[step] - known[step]) / max(abs(known[step]), 1e-30))
        if not deviations[-1] <= max(least, min(least + growth * step, GROWTH * reached)):
            return f"{own[step]:.6g} instead of {known[step]:.6g} at step {step}"
    return None


def _same_mean(run: Observed, baseline: Observed) -> bool:
    means = [sum(each.tokens.values()) / max(len(each.tokens), 1) for each in (run, baseline)]
    return abs(means[0] - means[1]) <= TOKENS_TOLERANCE * means[1]


def _by_step(field: str, what: Callable[[int, int], str]) -> Callable[[Observed, Observed], str | None]:
    def differs(run: Observed, baseline: Observed) -> str | None:
        own, known = getattr(run, field), getattr(baseline, field)
        other = [step for step in own if step in known and own[step] != known[step]]
        return f"{what(own[other[0]], known[other[0]])} at step {other[0]}" if other else None

    return differs


def _unequal(value: Callable[[Observed], Any], words: Callable[[Any], str] = str) -> Callable[..., str | None]:
    def differs(run: Observed, baseline: Observed) -> str | None:
        own, known = value(run), value(baseline)
        return f"{words(own)} instead of {words(known)}" if own != known else None

    return differs


def _tokens_differ(run: Observed, baseline: Observed) -> str | None:
    sees = [e.settings.get("data") != "unseen" for e in (run.evidence.get(0), baseline.evidence.get(0)) if e]
    if len(set(sees)) > 1:
        return "seen in one of them only; `paceline.track.batch` shows those of compiled code"
    return _by_step("tokens", lambda own, known: f"{own:,} instead of {known:,}")(run, baseline)


def _sample(run: Observed) -> str | None:
    """The shape of a sample of the first micro batch, or `token ids`, whose number is compared."""
    first = run.evidence.get(0)
    shape = first.settings.get("sample") if first else None
    return None if shape is None else str(shape)


def _updates(run: Observed) -> int:
    """Without the steps in which a loss scaler skipped the update."""
    return sum(max(values) for values in run.by_step("updates").values())


def _fp32_precision(run: Observed) -> Mapping[str, str] | None:
    """How products and convolutions in fp32 are computed: `ieee`, `tf32` or `bf16`."""
    first = run.evidence.get(0)
    flags = (first.flags if first else None) or {}
    return {name: value for name, value in flags.items() if name.startswith("fp32 ") and value != "unknown"} or None


def _fp32_precision_differs(run: Observed, baseline: Observed) -> str | None:
    own, known = _fp32_precision(run) or {}, _fp32_precision(baseline) or {}
    other = [f"{name} {own[name]} instead of {known[name]}" for name in own if own[name] != known.get(name, own[name])]
    return ", ".join(other) or None


QUANTITIES: tuple[Quantity, ...] = (
    Quantity("parameters", _parameters, _unequal(_parameters, lambda n: f"{n[0]:,}"), needed=False),
    Quantity("initial weights", _weights, _weights_differ, seeded=True),
    Quantity("data", _data, _by_step("digests", lambda own, known: "other samples"), seeded=True),
    Quantity("tokens per step", lambda run: run.tokens, _tokens_differ),
    Quantity("shape of a sample", _sample, _unequal(_sample), needed=False, seeded=True),
    Quantity("updates", _updates, _unequal(_updates)),
    Quantity("optimizer", _optimizer, _optimizer_differs),
    Quantity("compute dtype", _dtypes, _unequal(_dtypes), needed=False),
    Quantity("precision of fp32", _fp32_precision, _fp32_precision_differs, needed=False),
    Quantity("reduction dtype", _reduction, _unequal(_reduction), needed=False),
    Quantity("losses", _losses, _losses_differ, seeded=True),
    Quantity("gradient norms", _norms, _norms_differ, needed=False, seeded=True),
    Quantity("trained tensors", _trained_tensors, _unequal(_trained_tensors), needed=False),
)
