"""Which cells of a design answer which question, each with the power to which its value enters the answer.

A change is judged over pairs of cells that agree in everything else; an interaction over squares of four; in a fraction
over all cells at once, because its points hold no such pairs. Logarithms are averaged, so effects are ratios.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from paceline.analysis.findings.effects import COMBINED, FACTOR, INTERACTION
from paceline.experiment.factorial import FACTORIAL, FRACTIONAL, Design, Level, Point, Term

# Points by the levels of `Design.baseline`'s fields, in their order, to a cell's id.
Members = Mapping[tuple[Level, ...], str]
Corner = tuple[Point, float]


class Question(NamedTuple):
    """One effect to estimate: weights is the power of each cell's value in the ratio, pairs how many ratios of cells
    (of ratios, for an interaction) are averaged in it."""

    kind: str
    name: str
    factors: tuple[str, ...]
    weights: Mapping[str, float]
    pairs: int
    aliases: tuple[str, ...] = ()


def key_of(point: Mapping[str, Level], design: Design) -> tuple[Level, ...]:
    return tuple(point[name] for name in design.baseline)


def questions(design: Design, members: Members) -> list[Question]:
    """All that the measured points can answer."""
    planned = {key_of(point, design) for point in design.points()}
    ours = {key: cell for key, cell in members.items() if key in planned}
    if design.kind == FRACTIONAL:
        found = list(_of_a_fraction(design, ours)) if len(ours) == len(planned) else []
    else:
        found = list(_of_pairs(design, ours))
    return [*found, *_of_combined(design, members)]


# --- pairs and squares: one factor at a time, full factorial ---


def _of_pairs(design: Design, ours: Members) -> Iterator[Question]:
    for name, others in design.levels.items():
        for level in others:
            change = {name: level}
            corners = [[(point | change, 1.0), (point, -1.0)] for point in _at_baseline(design, change)]
            yield from _averaged(FACTOR, words_of(design, change), change, corners, design, ours)
    if design.kind == FACTORIAL:
        for one, other in itertools.combinations(design.factors, 2):
            for a, b in itertools.product(design.levels[one], design.levels[other]):
                yield from _square(design, {one: a}, {other: b}, ours)


def _square(design: Design, one: Point, other: Point, ours: Members) -> Iterator[Question]:
    both = one | other
    corners = [
        [(point | both, 1.0), (point | one, -1.0), (point | other, -1.0), (point, 1.0)]
        for point in _at_baseline(design, both)
    ]
    name = f"{_short(design, one)} \u00d7 {_short(design, other)}"
    return _averaged(INTERACTION, name, both, corners, design, ours)


def _at_baseline(design: Design, change: Point) -> list[Point]:
    """Points of the design in which none of the changed factors is changed yet."""
    return [p for p in design.points() if all(p[name] == design.baseline[name] for name in change)]


def _averaged(
    kind: str, name: str, change: Point, corners: Iterable[list[Corner]], design: Design, ours: Members
) -> Iterator[Question]:
    """Over those whose every corner was measured; nothing where none is."""
    whole = [each for each in corners if all(key_of(point, design) in ours for point, _ in each)]
    weights: defaultdict[str, float] = defaultdict(float)
    for point, sign in itertools.chain.from_iterable(whole):
        weights[ours[key_of(point, design)]] += sign / len(whole)
    if whole:
        yield Question(kind, name, tuple(change), dict(weights), len(whole))


# --- a fraction ---


def _of_a_fraction(design: Design, ours: Members) -> Iterator[Question]:
    """Main effects, and two-factor interactions; those that share a column are one question with all their names."""
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
    """Mean of the points where an odd number of the term's factors is changed, less the mean of the others."""
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
    """Each against the baseline; and, where a point with all but one of its changes was measured, against that."""
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


# --- words ---


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
    """The factor, with its level where it has more than one other."""
    ((name, level),) = change.items()
    return f"{_spoken(name)} {level_text(level)}" if len(design.levels[name]) > 1 else _spoken(name)


def _spoken(name: str) -> str:
    return name.replace("_", " ")
