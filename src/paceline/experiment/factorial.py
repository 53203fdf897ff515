"""Arithmetic of designed experiments: the points of a design, and which effects its points cannot distinguish.

A point has one level for every factor; the first level of a factor is its baseline. A two-level fraction is built from
the bits 0 (baseline) and 1: the bit of a generated factor is the sum modulo 2 of its generators, so the baseline point
is always included. An effect is a set of factors. Two effects whose symmetric difference is a word of the defining
relation are aliases: they have the same column, so the same estimate (Box, Hunter and Hunter, 2005, chapter 6).
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ONE_AT_A_TIME, FACTORIAL, FRACTIONAL = "one-at-a-time", "factorial", "fractional"
# With more factors the search for generators takes too long; with fewer than three there is nothing to leave out.
FEWEST_FACTORS, MOST_FACTORS = 3, 10
# As many as an experiment may have runs.
MOST_POINTS = 10_000

Level = str | int | float | bool | None
Point = dict[str, Level]
Term = frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """The plan of an experiment, complete enough to analyse its runs years later.

    baseline: the level of every field that any point changes. levels: the other levels of each factor. combined:
    further points by name, as changes from the baseline. generators: for a fraction, the factors that generate each
    generated factor.
    """

    kind: str
    baseline: Mapping[str, Level]
    levels: Mapping[str, tuple[Level, ...]]
    combined: Mapping[str, Mapping[str, Level]] = field(default_factory=dict)
    generators: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Design:
        """The inverse of `dataclasses.asdict`; JSON turns tuples into lists.

        ValueError for one that no experiment makes: its points and words would take any time to list.
        """
        tuples = {name: {key: tuple(v) for key, v in raw[name].items()} for name in ("levels", "generators")}
        design = cls(**{**raw, **tuples})
        levels, others = design.levels, [*design.combined.values(), *design.generators.values()]
        named = {name for sources in design.generators.values() for name in (*sources, *design.generators)}
        if not (levels.keys() <= design.baseline.keys() and named <= levels.keys() and all(levels.values())):
            raise ValueError("design: got factors without levels, expected at least two levels of each")
        if len(design.generators) > MOST_FACTORS or design._points() > MOST_POINTS or len(others) > MOST_POINTS:
            raise ValueError(f"design: got too many points, expected at most {MOST_POINTS:,}")
        if not all(isinstance(changes, Mapping) for changes in design.combined.values()):
            raise ValueError("design: combined points are mappings of fields to levels")
        return design

    def _points(self) -> int:
        """How many points a factorial of all levels has."""
        sizes = (len(others) + 1 for name, others in self.levels.items() if name not in self.generators)
        return 0 if self.kind == ONE_AT_A_TIME else functools.reduce(operator.mul, sizes, 1)

    @property
    def factors(self) -> tuple[str, ...]:
        return tuple(self.levels)

    @property
    def words(self) -> tuple[Term, ...]:
        """The defining relation without the identity; empty if nothing is aliased."""
        own = [frozenset((name, *sources)) for name, sources in self.generators.items()]
        chosen = (c for n in range(1, len(own) + 1) for c in itertools.combinations(own, n))
        return tuple(functools.reduce(operator.xor, terms) for terms in chosen)

    @property
    def resolution(self) -> int | None:
        """The length of the shortest word; None if nothing is aliased."""
        return min(map(len, self.words), default=None)

    def aliases(self, effect: Term) -> tuple[Term, ...]:
        """Effects with the same column as this one, the simplest first."""
        return tuple(sorted((effect ^ word for word in self.words), key=lambda term: (len(term), sorted(term))))

    def points(self) -> list[Point]:
        """All points of the factors, the baseline first, without the combined points."""
        baseline = dict(self.baseline)
        if self.kind == ONE_AT_A_TIME:
            alone = [baseline | {name: level} for name, others in self.levels.items() for level in others]
            return [baseline, *alone]
        if self.kind == FACTORIAL:
            axes = ((baseline[name], *others) for name, others in self.levels.items())
            return [baseline | dict(zip(self.levels, values, strict=True)) for values in itertools.product(*axes)]
        free = [name for name in self.levels if name not in self.generators]
        points = []
        for values in itertools.product((0, 1), repeat=len(free)):
            bits = dict(zip(free, values, strict=True))
            bits |= {name: sum(bits[s] for s in sources) % 2 for name, sources in self.generators.items()}
            points.append(baseline | {name: self.levels[name][0] for name in self.levels if bits[name]})
        return points

    def combined_points(self) -> dict[str, Point]:
        return {name: dict(self.baseline) | dict(changes) for name, changes in self.combined.items()}


# --- generators ---


def generators(factors: Sequence[str], resolution: int | None = None) -> dict[str, tuple[str, ...]] | None:
    """Generators of the smallest fraction with at least this resolution; None if there is none.

    Among equally small fractions, the one whose shortest words are longest and fewest. Without a resolution: IV if
    there is such a fraction, else III.

    >>> generators(("a", "b", "c"), 3)
    {'c': ('a', 'b')}
    """
    if resolution is None:
        return generators(factors, 4) or generators(factors, 3)
    for generated in range(len(factors) - 2, 0, -1):
        free, made = factors[: len(factors) - generated], factors[len(factors) - generated :]
        ranked = []
        for masks, words in _choices(len(free), generated, resolution):
            lengths = [word.bit_count() for word in words]
            ranked.append((-min(lengths), lengths.count(min(lengths)), masks))
        if ranked:
            return {
                name: tuple(f for i, f in enumerate(free) if mask >> i & 1)
                for name, mask in zip(made, min(ranked)[2], strict=True)
            }
    return None


def _choices(free: int, generated: int, resolution: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every set of generators without a word that is too short, as bit masks over the free factors, one for each
    generated factor, with its words over free and generated factors."""
    masks = [mask for mask in range(1 << free) if mask.bit_count() >= resolution - 1]

    def extend(chosen: tuple[int, ...], words: tuple[int, ...], begin: int) -> Iterator[tuple[Any, Any]]:
        if len(chosen) == generated:
            yield chosen, words
            return
        for at in range(begin, len(masks)):
            own = masks[at] | 1 << (free + len(chosen))
            more = (own, *(word ^ own for word in words))
            if all(word.bit_count() >= resolution for word in more):
                yield from extend((*chosen, masks[at]), (*words, *more), at + 1)

    return extend((), (), 0)
