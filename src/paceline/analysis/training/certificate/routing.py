"""The same decisions of the routers of a mixture of experts, and every token computed by the experts that it chose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import median_low

from paceline.analysis.findings import Check
from paceline.analysis.training.certificate.observed import Observed, Standard, checked, steps_text
from paceline.analysis.training.certificate.trajectory import GROWTH, SPREAD_FACTOR, growth_with_depth
from paceline.results.records import RoutingSample

# Rounding decides between experts with nearly equal scores. Without re-seeded references to show how often (fp32, few
# steps), this many choices of a layer may differ, or this share of them.
LEAST_CHOICES, LEAST_SHARE = 2, 1e-3
# Rounding of the mean weight of a token, which is 1 if the weights of its experts were scaled to sum to 1.
WEIGHT_TOLERANCE = {"fp32": 1e-4, "bf16": 2**-8, "fp16": 2**-10}


@dataclass(frozen=True, slots=True)
class Decisions:
    """Sums over all ranks, of one layer at one step. assigned and positions have one number per expert (assigned for
    the first choices, then for the second ones, ...), computed too. weight and choices are sums over experts."""

    assigned: tuple[int, ...]
    positions: tuple[int, ...]
    computed: tuple[int, ...]
    weight: float
    choices: int

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
    assigned = row("assigned")
    return Decisions(assigned, row("positions"), row("computed"), weight, sum(assigned))


def router_decisions(run: Observed, standard: Standard) -> Check | None:
    """Each token chose as many experts as the model says, with weights that sum as in the reference, and the choices
    are the reference's, but for as many as rounding explains. Steps that the reference does not have are compared with
    the other configurations. A strategy that approximates gradients decides as the reference until its first update."""
    shape, plain = run.record.shape, standard.plain
    if not shape.experts or plain is None or not plain.record.routings:
        return None
    parts, known, limits = _by_part(run), _compared_decisions(run, standard), _limits(run, standard)
    if run.spec.approximation is not None:
        known = {key: base for key, base in known.items() if key[0] == min(run.steps, default=0)}
    length, chosen = run.spec.training.sequence_length, shape.experts_per_token or 0
    tokens = run.spec.tokens_per_step
    layers = range(shape.layers)
    missing = [step for step in run.steps if any((step, layer) not in own for own in parts for layer in layers)]
    problems = [f"no decision of some layers at {steps_text(missing)}"] if missing else []
    tolerance = WEIGHT_TOLERANCE[run.spec.training.precision.base]
    identical, compared, worst, limit, excess, beyond = 0, 0, 0.0, 0.0, 0.0, 0
    allowed = float(LEAST_CHOICES)
    earlier, so_far, at = 0.0, 0.0, -1  # the most choices that differed before this step, and with it
    for step, layer in sorted(known):
        base = known[step, layer]
        allowed = limits.get((step, layer), allowed)
        earlier, at = (earlier, at) if step == at else (so_far, step)
        for seen in (own[step, layer] for own in parts if (step, layer) in own):
            where, compared = f"in layer {layer} at step {step}", compared + 1
            if seen.size != base.size:
                problems.append(f"counts for another number of experts or choices {where}")
                continue
            if seen.choices != base.choices:
                problems.append(f"{seen.choices:,} choices instead of {base.choices:,} {where}")
                continue
            if abs(seen.weight - base.weight) > tolerance * tokens:
                problems.append(f"weights that sum to {seen.weight / tokens:.4g} per token {where}")
            moved, identical = seen.differing(base, length), identical + (seen.assigned == base.assigned)
            # After the reference, as for losses: honest differences grow, but not suddenly.
            limit = allowed if (step, layer) in limits else max(allowed, GROWTH * earlier)
            worst, excess, so_far = max(worst, moved), max(excess, moved / limit), max(so_far, min(moved, limit))
            if moved > limit:
                beyond += 1
                problems.append(f"at least {moved:.0f} other choices {where}, expected at most {limit:.0f}")
    source = "the reference's" if standard.proof is None else "those of the other configurations"
    if standard.reference is not None and any(step > standard.last_step for step, _ in known):
        source += ", then those of the other configurations,"
    if not known:
        return checked("router decisions", source, problems, "no other configuration to compare with")
    expected = f"{chosen} of {shape.experts} experts for each token, {source} but for {limit:.0f} per layer"
    seen_text = f"equal counts for {identical} of {compared} layers and steps, at most {worst:.0f} other choices"
    is_rounding = bool(standard.variants) and len(problems) == beyond
    return checked("router decisions", expected, problems, seen_text, excess if is_rounding else None)


def _compared_decisions(run: Observed, standard: Standard) -> dict[tuple[int, int], Decisions]:
    """The decisions of the reference, and at later steps the median of all cells, or those of the other cell where
    there are two."""
    cells = standard.once(("decisions of cells",), lambda: _of_cells(standard))
    left_out = None if len(cells) > 2 else run.spec.cell
    return standard.once(("compared decisions", left_out), lambda: _reference_and_median(standard, cells, left_out))


def _reference_and_median(
    standard: Standard, cells: Mapping[str, Mapping[tuple[int, int], Decisions]], left_out: str | None
) -> dict[tuple[int, int], Decisions]:
    later = _medians([found for cell, found in cells.items() if cell != left_out])
    return later | (_decisions(standard.reference.record.routings) if standard.reference else {})


def _of_cells(standard: Standard) -> dict[str, dict[tuple[int, int], Decisions]]:
    """By cell, the decisions after the last step of the reference: the median of the cell's launches."""
    launches: dict[str, list[dict[tuple[int, int], Decisions]]] = {}
    for peer in standard.group:
        if peer.spec.approximation is None and peer.record.routings:
            found = {key: seen for key, seen in _by_part(peer)[0].items() if key[0] > standard.last_step}
            launches.setdefault(peer.spec.cell, []).append(found)
    return {cell: _medians(found) for cell, found in launches.items()}


def _medians(runs: Sequence[Mapping[tuple[int, int], Decisions]]) -> dict[tuple[int, int], Decisions]:
    """By step and layer, the median of every number. A run with counts for another number of experts than the first
    one is left out."""
    found = {}
    for key in sorted({key for run in runs for key in run}):
        known = [run[key] for run in runs if key in run]
        alike = [seen for seen in known if seen.size == known[0].size]
        rows = ([getattr(seen, name) for seen in alike] for name in ("assigned", "positions", "computed"))
        assigned, positions, computed = (tuple(map(median_low, zip(*row, strict=True))) for row in rows)
        weight, choices = (median_low(getattr(seen, name) for seen in alike) for name in ("weight", "choices"))
        found[key] = Decisions(assigned, positions, computed, weight, choices)
    return found


def _limits(run: Observed, standard: Standard) -> dict[tuple[int, int], float]:
    """By layer and step of the reference, how many choices rounding alone may change: twice as many as in the re-seeded
    references so far. A proof group in the place of a reference shows the share of the choices, in any of its layers;
    more layers round more often."""
    return standard.once(("limits of choices",), lambda: _computed_limits(run, standard))


def _computed_limits(run: Observed, standard: Standard) -> dict[tuple[int, int], float]:
    plain, proof = standard.plain, standard.proof
    assert plain is not None
    variants = standard.variants if proof is None else proof.variants
    known, length = _decisions(plain.record.routings), plain.spec.training.sequence_length
    copies = [_decisions(copy.record.routings, copy.variant) for copy in variants]
    factor = SPREAD_FACTOR if proof is None else SPREAD_FACTOR * growth_with_depth(proof.reduction)
    larger = 1.0 if proof is None else run.spec.tokens_per_step / plain.spec.tokens_per_step
    found, spread = {}, 0.0
    for key in sorted(known):
        base = known[key]
        others = [copy[key] for copy in copies if key in copy and copy[key].size == base.size]
        spread = max([spread, *(other.differing(base, length) for other in others)])
        found[key] = max(LEAST_CHOICES, larger * max(LEAST_SHARE * base.choices, factor * spread))
    if proof is None:
        return found
    return {(step, layer): most for (step, _), most in found.items() for layer in range(run.record.shape.layers)}


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
