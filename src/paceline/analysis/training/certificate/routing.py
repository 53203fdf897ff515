"""The same decisions of the routers of a mixture of experts, and every token computed by the experts that it chose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter

from paceline.analysis.findings import Check
from paceline.analysis.training.certificate.observed import Observed, Standard, checked, steps_text
from paceline.analysis.training.certificate.trajectory import SPREAD_FACTOR
from paceline.results.records import RoutingSample

# Rounding decides between experts with nearly equal scores. Without re-seeded references to show how often (fp32, few
# steps), this many choices of a layer may differ, or this share of them.
LEAST_CHOICES, LEAST_SHARE = 2, 1e-3
# Rounding of the mean weight of a token, which is 1 if the weights of its experts were scaled to sum to 1.
WEIGHT_TOLERANCE = {"fp32": 1e-4, "bf16": 2**-8, "fp16": 2**-10}


@dataclass(frozen=True, slots=True)
class Decisions:
    """Sums over all ranks, of one layer at one step. assigned and positions have one number per expert (assigned for
    the first choices, then for the second ones, ...), computed and weight too."""

    assigned: tuple[int, ...]
    positions: tuple[int, ...]
    computed: tuple[int, ...]
    weight: float

    @property
    def size(self) -> tuple[int, int]:
        return len(self.assigned), len(self.positions)

    def differing(self, other: Decisions, length: int) -> float:
        """At least so many choices differ: one that moves changes two counts by one, and two sums of positions by less
        than the length of a sequence."""
        counts = sum(abs(a - b) for a, b in zip(self.assigned, other.assigned, strict=True)) / 2
        places = sum(abs(a - b) for a, b in zip(self.positions, other.positions, strict=True)) / 2
        return max(counts, places / max(length - 1, 1))


def _decisions(samples: Iterable[RoutingSample], variant: int = 0) -> dict[tuple[int, int], Decisions]:
    """By step and layer."""
    totals: dict[tuple[int, int], Counter[tuple[str, int]]] = {}
    for sample in samples:
        if sample.variant != variant:
            continue
        for number, layer in enumerate(sample.layers):
            total = totals.setdefault((sample.step, layer), Counter())
            for name in ("assigned", "positions", "computed", "weights"):
                values = getattr(sample, name)
                size = len(values) // len(sample.layers)
                for place, value in enumerate(values[number * size : (number + 1) * size]):
                    total[name, place] += value
    return {key: _summed(total) for key, total in totals.items()}


def _by_part(run: Observed) -> list[dict[tuple[int, int], Decisions]]:
    """The decisions of a run, once for each tensor parallel part: every rank of such a group makes them all."""
    routings, at = run.record.routings, run.layout.coordinates
    return [_decisions(s for s in routings if at(s.rank)["tp"] == part) for part in range(run.layout.tp)]


def _summed(total: Mapping[tuple[str, int], float]) -> Decisions:
    def row(name: str) -> tuple[int, ...]:
        return tuple(int(total[key]) for key in sorted(key for key in total if key[0] == name))

    weight = sum(value for (name, _), value in total.items() if name == "weights")
    return Decisions(row("assigned"), row("positions"), row("computed"), weight)


def router_decisions(run: Observed, standard: Standard) -> Check | None:
    """Each token chose as many experts as the model says, with weights that sum as in the reference, and the choices
    are the reference's, but for as many as rounding explains."""
    shape, reference = run.record.shape, standard.reference
    if not shape.experts or reference is None or not reference.record.routings:
        return None
    parts, known = _by_part(run), _decisions(reference.record.routings)
    variants = [_decisions(copy.record.routings, copy.variant) for copy in standard.variants]
    length, chosen = run.spec.training.sequence_length, shape.experts_per_token or 0
    tokens = run.spec.tokens_per_step
    layers = range(shape.layers)
    missing = [step for step in run.steps if any((step, layer) not in own for own in parts for layer in layers)]
    problems = [f"no decision of some layers at {steps_text(missing)}"] if missing else []
    tolerance = WEIGHT_TOLERANCE[run.spec.training.precision.base]
    identical, compared, spread, worst, limit, excess, beyond = 0, 0, 0.0, 0.0, 0.0, 0.0, 0
    for step, layer in sorted(known):
        base = known[step, layer]
        others = [v[step, layer] for v in variants if (step, layer) in v and v[step, layer].size == base.size]
        spread = max([spread, *(other.differing(base, length) for other in others)])
        for seen in (own[step, layer] for own in parts if (step, layer) in own):
            where, compared = f"in layer {layer} at step {step}", compared + 1
            if seen.size != base.size:
                problems.append(f"counts for another number of experts or choices {where}")
                continue
            if sum(seen.assigned) != sum(base.assigned):
                problems.append(f"{sum(seen.assigned):,} choices instead of {sum(base.assigned):,} {where}")
                continue
            if abs(seen.weight - base.weight) > tolerance * tokens:
                problems.append(f"weights that sum to {seen.weight / tokens:.4g} per token {where}")
            moved, identical = seen.differing(base, length), identical + (seen.assigned == base.assigned)
            limit = max(LEAST_CHOICES, LEAST_SHARE * sum(base.assigned), SPREAD_FACTOR * spread)
            worst, excess = max(worst, moved), max(excess, moved / limit)
            if moved > limit:
                beyond += 1
                problems.append(f"at least {moved:.0f} other choices {where}, expected at most {limit:.0f}")
    expected = f"{chosen} of {shape.experts} experts for each token, the reference's but for {limit:.0f} per layer"
    seen_text = f"equal counts for {identical} of {compared} layers and steps, at most {worst:.0f} other choices"
    is_rounding = bool(variants) and len(problems) == beyond
    return checked("router decisions", expected, problems, seen_text, excess if is_rounding else None)


def computed_choices(run: Observed, standard: Standard) -> Check | None:
    """Every expert computed exactly the tokens that chose it, at every step: none was dropped or computed twice."""
    if not run.record.shape.experts or not run.record.routings:
        return None
    parts = _by_part(run)
    problems, rows = [], 0
    for (step, layer), seen in sorted((each for own in parts for each in own.items()), key=itemgetter(0)):
        experts = len(seen.computed)
        wanted = [sum(seen.assigned[expert::experts]) for expert in range(experts)]
        rows += sum(wanted)
        lost = sum(abs(a - b) for a, b in zip(wanted, seen.computed, strict=True))
        if lost:
            problems.append(f"{lost:,} rows too few or too many in layer {layer} at step {step}")
    expected = "every expert computes the tokens that chose it"
    seen_text = f"{rows // len(parts):,} rows at {len({s for s, _ in parts[0]})} steps"
    return checked("tokens of experts", expected, problems, seen_text)
