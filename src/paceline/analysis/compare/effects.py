"""Effects of a designed experiment on speed and memory: a ratio with its interval, the smallest detectable effect, and
a verdict that may be "no effect, under 0.8 %".

A change is judged over pairs of cells that agree in everything else, an interaction over squares of four, and in a
fraction over all cells at once, because its points contain no such pairs. Logarithms are averaged, so effects are
ratios. Cells of a design differ in their work on purpose (sequence length, precision, rank), so each cell is certified
against its own reference, and only non-pad tokens per second and bytes are compared, never samples.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from paceline.analysis.compare.cells import title_of
from paceline.analysis.findings import BETTER, EQUAL, HIGHER, INCONCLUSIVE, WORSE, LeftOut, RunFinding
from paceline.analysis.findings.cell_axes import DEVICE
from paceline.analysis.findings.compare import (
    ALIASED,
    COMBINED,
    FACTOR,
    FASTER,
    INTERACTION,
    LESS,
    MORE,
    NO_EFFECT,
    OPEN,
    SLOWER,
    DesignOutcome,
    Effect,
    Response,
)
from paceline.analysis.grouping import grouped
from paceline.analysis.statistics import intervals
from paceline.analysis.statistics.intervals import Ratio
from paceline.analysis.statistics.verdict import verdict_of
from paceline.analysis.training import metrics
from paceline.analysis.training.metrics import Cell, device_kind
from paceline.experiment import recipe
from paceline.experiment.choices import Choice
from paceline.experiment.factorial import FACTORIAL, FRACTIONAL, ONE_AT_A_TIME, Design, Level, Point, Term
from paceline.experiment.spec import NO_CELL, RunSpec
from paceline.results.records import RunRecord
from paceline.wording import percent_up

# Levels of the fields of `Design.baseline`, in their order -> id of the cell.
Members = Mapping[tuple[Level, ...], str]
Corner = tuple[Point, float]


class Question(NamedTuple):
    """One effect to estimate. weights is the power of each cell's value in the ratio; pairs is how many ratios of cells
    (of ratios, for an interaction) are averaged.
    """

    kind: str
    name: str
    factors: tuple[str, ...]
    weights: Mapping[str, float]
    pairs: int
    aliases: tuple[str, ...] = ()


def key_of(point: Mapping[str, Level], design: Design) -> tuple[Level, ...]:
    return tuple(point[name] for name in design.baseline)


def questions(design: Design, members: Members) -> list[Question]:
    """All effects that the measured points can estimate."""
    planned = {key_of(point, design) for point in design.points()}
    ours = {key: cell for key, cell in members.items() if key in planned}
    if design.kind != FRACTIONAL:
        found = _of_pairs(design, ours)
    else:
        found = _of_a_fraction(design, ours) if len(ours) == len(planned) else iter(())
    return [*found, *_of_combined(design, members)]


# --- pairs and squares: one factor at a time, full factorial ---


def _of_pairs(design: Design, ours: Members) -> Iterator[Question]:
    for name, others in design.levels.items():
        for level in others:
            change = {name: level}
            corners = [[(point | change, 1.0), (point, -1.0)] for point in _at_baseline(design, change)]
            yield from _averaged(FACTOR, words_of(design, change), change, corners, design, ours)
    if design.kind != FACTORIAL:
        return
    for first, second in itertools.combinations(design.factors, 2):
        for a, b in itertools.product(design.levels[first], design.levels[second]):
            one, other = {first: a}, {second: b}
            both = one | other
            squares = [
                [(point | both, 1.0), (point | one, -1.0), (point | other, -1.0), (point, 1.0)]
                for point in _at_baseline(design, both)
            ]
            words = f"{_short(design, one)} \u00d7 {_short(design, other)}"
            yield from _averaged(INTERACTION, words, both, squares, design, ours)


def _at_baseline(design: Design, change: Point) -> list[Point]:
    """Points of the design in which none of the changed factors is changed yet."""
    return [p for p in design.points() if all(p[name] == design.baseline[name] for name in change)]


def _averaged(
    kind: str, name: str, change: Point, corners: Iterable[list[Corner]], design: Design, ours: Members
) -> Iterator[Question]:
    """Average over the corners whose every point was measured; nothing if there are none."""
    whole = [each for each in corners if all(key_of(point, design) in ours for point, _ in each)]
    weights: defaultdict[str, float] = defaultdict(float)
    for point, sign in itertools.chain.from_iterable(whole):
        weights[ours[key_of(point, design)]] += sign / len(whole)
    if whole:
        yield Question(kind, name, tuple(change), dict(weights), len(whole))


# --- a fraction ---


def _of_a_fraction(design: Design, ours: Members) -> Iterator[Question]:
    """Main effects and two-factor interactions; those that share a column are one question with all their names."""
    for name in design.factors:
        words = words_of(design, {name: design.levels[name][0]})
        yield _column(design, ours, FACTOR, words, frozenset((name,)), scale=1.0)
    answered: set[Term] = set()
    for pair in itertools.combinations(design.factors, 2):
        term = frozenset(pair)
        aliases = design.aliases(term)
        if term not in answered and not any(len(alias) == 1 for alias in aliases):
            answered |= {term, *aliases}
            # Twice the difference of means is the difference of differences, as a square of four gives it.
            yield _column(design, ours, INTERACTION, product_words(pair), term, scale=-2.0)


def _column(design: Design, ours: Members, kind: str, name: str, term: Term, scale: float) -> Question:
    """Mean of the points in which an odd number of the term's factors is changed, minus the mean of the others."""
    aliases = tuple(product_words(sorted(a, key=design.factors.index)) for a in design.aliases(term) if len(a) <= 2)
    half = len(ours) / 2
    weights = {}
    for point in design.points():
        odd = sum(point[f] != design.baseline[f] for f in term) % 2
        weights[ours[key_of(point, design)]] = (scale if odd else -scale) / half
    factors = tuple(sorted(term, key=design.factors.index))
    return Question(kind, name, factors, weights, round(half), aliases)


# --- combined points ---


def _of_combined(design: Design, members: Members) -> Iterator[Question]:
    """Each combined point against the baseline, and against a measured point with all but one of its changes."""
    baseline = dict(design.baseline)
    for name, point in design.combined_points().items():
        changed = [field for field in design.combined[name] if point[field] != baseline[field]]
        yield from _averaged(COMBINED, name, point, [[(point, 1.0), (baseline, -1.0)]], design, members)
        for last in changed if len(changed) > 1 else ():
            before = point | {last: baseline[last]}
            rest = ", ".join(f"{_spoken(f)} {level_text(point[f])}" for f in changed if f != last)
            words = f"{words_of(design, {last: point[last]})}, at {rest}"
            yield from _averaged(
                COMBINED, words, {last: point[last]}, [[(point, 1.0), (before, -1.0)]], design, members
            )


# --- texts ---


def words_of(design: Design, change: Point) -> str:
    """`rank 16 \u2192 8`."""
    return ", ".join(
        f"{_spoken(name)} {level_text(design.baseline[name])} \u2192 {level_text(level)}"
        for name, level in change.items()
    )


def product_words(factors: Iterable[str]) -> str:
    return " \u00d7 ".join(map(_spoken, factors))


def level_text(level: Level) -> str:
    if isinstance(level, bool):
        return "on" if level else "off"
    return "default" if level is None else str(level)


def _short(design: Design, change: Point) -> str:
    """The factor, with its level if it has several."""
    ((name, level),) = change.items()
    return f"{_spoken(name)} {level_text(level)}" if len(design.levels[name]) > 1 else _spoken(name)


def _spoken(name: str) -> str:
    return name.replace("_", " ")


SPEED, MEMORY = "tokens_per_s", "peak_memory_bytes"
UP_AND_DOWN = {SPEED: (FASTER, SLOWER), MEMORY: (MORE, LESS)}
# Factors that accumulation may compensate to keep the global batch. If none of them varies, it is a setting.
_SHARES_OF_BATCH = ("micro_batch", "processes", "nodes")

OTHER_WORK = (
    "The cells differ in their work on purpose: each is certified against its own reference, and the comparison uses "
    "non-pad tokens per second and peak memory, never samples per second."
)
_KIND_NOTES = {
    ONE_AT_A_TIME: "One factor at a time: every effect applies at the baseline of all others; interactions are not "
    "estimated, because no point changes two factors.",
    FACTORIAL: "Full factorial: effects are averaged over all levels of the others. If two factors interact, read "
    "their effects together.",
}


def analyse(
    cells: Sequence[Cell], records: Sequence[RunRecord], runs: Sequence[RunFinding]
) -> tuple[DesignOutcome, ...]:
    """One outcome per design, common settings and kind of device. runs are the findings about the records."""
    found = []
    asked = [r.spec for r in records if r.spec.design is not None and not r.proves_only]
    for rest, design in {_rest(spec, spec.design): spec.design for spec in asked if spec.design}.items():
        planned = {key_of(p, design) for p in (*design.points(), *design.combined_points().values())}
        ours = [c for c in cells if _rest(c.spec, design) == rest and _key(c.spec, design) in planned]
        tried = [r.spec for r in records if not r.proves_only and _rest(r.spec, design) == rest]
        ended = {f.run: f for f in runs}
        lost = [(s, ended[s.run_id]) for s in tried if _key(s, design) in planned and s.run_id in ended]
        by_device = grouped(
            ours, lambda cell: json.dumps([device_kind(cell), cell.switches, cell.shared_gpu], sort_keys=True)
        )
        found += [_outcome(design, members, lost) for members in by_device.values()]
    return tuple(found)


def _rest(spec: RunSpec, design: Design | None) -> str:
    """Equal for specs that agree in everything that the design keeps fixed; includes the design itself."""
    assert design is not None
    follows = ("accumulation",) if any(name in design.baseline for name in _SHARES_OF_BATCH) else ()
    asked = recipe.fields(spec) | {"launcher": str(Choice(**spec.configuration()["launcher"]))}
    fixed = {k: v for k, v in asked.items() if k not in (*design.baseline, *NO_CELL, *follows)}
    contents = {k: v for k, v in spec.contents.items() if k not in design.baseline}
    plan = [design.kind, design.baseline, design.levels, design.combined, design.generators]
    return json.dumps([fixed, contents, plan], sort_keys=True, default=str)


def _key(spec: RunSpec, design: Design) -> tuple[Level, ...]:
    return tuple(recipe.setting(spec, name) for name in design.baseline)


def _outcome(design: Design, cells: Sequence[Cell], tried: Sequence[tuple[RunSpec, RunFinding]]) -> DesignOutcome:
    members = {_key(cell.spec, design): cell for cell in cells}
    asked = questions(design, {key: cell.id for key, cell in members.items()})
    by_id = {cell.id: cell for cell in cells}
    effects = [effect for q in asked if (effect := _effect(q, by_id, len(asked))) is not None]
    left_out = tuple(_left_out(design, members, tried))
    axes = [cell.axes for cell in cells]
    shared = {name: value for name, value in axes[0].items() if all(a.get(name) == value for a in axes)}
    baseline = members.get(key_of(design.baseline, design))
    return DesignOutcome(
        kind=design.kind,
        title=title_of({**shared, DEVICE: device_kind(cells[0])}),
        levels={n: tuple(map(level_text, (design.baseline[n], *ls))) for n, ls in design.levels.items()},
        names={cell.id: _name(key, design) for key, cell in members.items()},
        baseline=baseline.id if baseline else None,
        resolution=design.resolution,
        relation=tuple(product_words(sorted(word, key=design.factors.index)) for word in design.words),
        effects=tuple(sorted(effects, key=_rank)),
        left_out=left_out,
        notes=tuple(_notes(design, effects, cells, left_out)),
    )


def _left_out(
    design: Design, members: Mapping[tuple[Level, ...], Cell], tried: Sequence[tuple[RunSpec, RunFinding]]
) -> Iterator[LeftOut]:
    """Planned points without a valid run, and how their runs ended."""
    for point in (*design.points(), *design.combined_points().values()):
        key = key_of(point, design)
        if key in members:
            continue
        ended = [finding for spec, finding in tried if _key(spec, design) == key]
        yield LeftOut(
            name=_name(key, design),
            status=ended[0].status if ended else "not run",
            reason=ended[0].reason if ended else None,
            runs=tuple(f.run for f in ended),
        )


def _name(key: tuple[Level, ...], design: Design) -> str:
    """`baseline`, `rank 8`, or the name of a combined point."""
    named = {key_of(point, design): name for name, point in design.combined_points().items()}
    levels = zip(design.baseline, key, strict=True)
    changed = [f"{n.replace('_', ' ')} {level_text(v)}" for n, v in levels if v != design.baseline[n]]
    return named.get(key) or ", ".join(changed) or "baseline"


# --- one effect ---


def _effect(question: Question, cells: Mapping[str, Cell], family: int) -> Effect | None:
    """One of `family` effects."""
    ours = [cells[cell] for cell in question.weights]
    speeds = () if any(cell.shared_gpu for cell in ours) else (SPEED,)
    found = [_response(metric, question, cells, family) for metric in (*speeds, MEMORY)]
    responses = tuple(response for response in found if response is not None)
    if not responses:
        return None
    return Effect(
        kind=question.kind,
        name=question.name,
        factors=question.factors,
        pairs=question.pairs,
        aliases=question.aliases,
        responses=responses,
        cells=tuple(cell.id for cell in ours),
        runs=tuple(run for cell in ours for run in cell.runs),
    )


def _response(metric: str, question: Question, cells: Mapping[str, Cell], family: int) -> Response | None:
    sides = [(metrics.estimate(cells[cell], metric), weight) for cell, weight in question.weights.items()]
    known = [(side, weight) for side, weight in sides if side is not None and side.value > 0]
    if len(known) < len(sides):
        return None
    among = [side for cell in cells.values() if (side := metrics.estimate(cell, metric)) and side.logarithmic]
    found = intervals.contrast(known, intervals.sharing_of(among) if among else None)
    ratio = found.value if found else math.prod(side.value**weight for side, weight in known)
    if question.kind == INTERACTION and question.aliases:
        verdict = ALIASED
    else:
        up, down = UP_AND_DOWN[metric]
        words = {BETTER: up, WORSE: down, EQUAL: NO_EFFECT, INCONCLUSIVE: OPEN}
        verdict = OPEN if found is None else words[verdict_of(found, HIGHER, family)[0]]
    return Response(
        metric=metric,
        ratio=ratio,
        low=found.low if found else None,
        high=found.high if found else None,
        detectable_ratio=found.detectable(family) if found else None,
        bound_ratio=_bound(found, family) if found else None,
        verdict=verdict,
        text=_text(question, verdict, found, family),
    )


def _bound(found: Ratio, family: int) -> float:
    """The largest effect that the corrected interval allows, the same for A/B and B/A."""
    low, high = found.interval(family)
    return max(high, 1 / low) - 1


def _text(question: Question, verdict: str, found: Ratio | None, family: int) -> str:
    """The whole finding in one sentence without its full stop."""
    words = f"{question.name}: "
    if found is None or (found.launches or 0) < 2:
        return f"{words}{verdict}: one launch cannot show how much launches differ"
    span = f"{_signed(found.low)} to {_signed(found.high)}"
    if verdict == ALIASED:
        others = ", ".join(question.aliases)
        return f"{words}{_signed(found.value)} ({span}) together with {others}: the design cannot separate them"
    if verdict == NO_EFFECT:
        kind = "interaction" if question.kind == INTERACTION else "effect"
        words += f"no {kind}, under {percent_up(_bound(found, family))} %"
    elif verdict == OPEN:
        words += f"{OPEN}, {span}"
    elif question.kind == INTERACTION:
        words += f"interact, {_signed(found.value)} (95 % interval {span}) beyond their separate effects"
    else:
        words += f"{verdict}, {_signed(found.value)} (95 % interval {span})"
    return f"{words}; or {', '.join(question.aliases)}, its alias" if question.aliases else words


def _signed(ratio: float) -> str:
    return f"{round(100 * (ratio - 1), 1) + 0.0:+.1f} %"


def _rank(effect: Effect) -> tuple[int, float, float]:
    """Decided effects by size, then undecided ones, then null effects by their bound."""
    first, last = effect.responses[0], effect.responses[-1]
    order = {OPEN: 1, ALIASED: 1, NO_EFFECT: 2}.get(first.verdict, 0)
    size = abs(math.log(first.ratio)) if order == 0 else first.bound_ratio
    return order, -(math.inf if size is None else size), -abs(math.log(last.ratio))


# --- what a reader must know ---


def _notes(
    design: Design, effects: Sequence[Effect], cells: Sequence[Cell], left_out: Sequence[LeftOut]
) -> Iterator[str]:
    yield OTHER_WORK
    if design.kind in _KIND_NOTES:
        yield _KIND_NOTES[design.kind]
    else:
        made = "; ".join(f"{name} = {product_words(sources)}" for name, sources in design.generators.items())
        words = ", ".join(product_words(sorted(word, key=design.factors.index)) for word in design.words)
        yield (
            f"A two-level fraction of resolution {design.resolution}: {len(design.points())} of "
            f"{2 ** len(design.factors)} points; {made} (words {words}). Effects whose product is a word are one "
            "number. Interactions of three or more factors are assumed to be null."
        )
    if design.kind == FRACTIONAL and not any(effect.kind == FACTOR for effect in effects):
        yield "A point of the fraction has no valid run, so its effects are not estimated."
    elif left_out and design.kind == FACTORIAL:
        yield "Points without a valid run are left out, together with those they would be compared with."
    if (n := len(effects)) > 1:
        yield (
            f"{n} effects on each metric are judged together: if none of them is real, at most one design in 20 shows "
            "any. The intervals shown are 95 % each, the verdicts use wider ones."
        )
    if note := intervals.launches_note(min(len(cell.windows) for cell in cells)):
        yield note[0].upper() + note[1:] + "."
