"""Points, generators and aliases, against what textbooks print."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from paceline.experiment.factorial import FACTORIAL, FRACTIONAL, ONE_AT_A_TIME, Design, generators


def two_level(kind: str, names: str, resolution: int | None = None) -> Design:
    return Design(
        kind=kind,
        baseline=dict.fromkeys(names, 0),
        levels=dict.fromkeys(names, (1,)),
        generators=(generators(names, resolution) or {}) if kind == FRACTIONAL else {},
    )


def words(design: Design) -> set[str]:
    return {"".join(sorted(word)) for word in design.words}


def test_one_at_a_time_changes_one_factor_of_the_baseline() -> None:
    design = Design(kind=ONE_AT_A_TIME, baseline={"a": 1, "b": "x"}, levels={"a": (2, 3), "b": ("y",)})
    assert design.points() == [
        {"a": 1, "b": "x"},
        {"a": 2, "b": "x"},
        {"a": 3, "b": "x"},
        {"a": 1, "b": "y"},
    ]


def test_a_factorial_holds_every_combination_once() -> None:
    design = Design(kind=FACTORIAL, baseline={"a": 1, "b": "x"}, levels={"a": (2, 3), "b": ("y",)})
    points = {tuple(point.values()) for point in design.points()}
    assert points == set(itertools.product((1, 2, 3), ("x", "y")))
    assert len(design.points()) == 6
    assert design.resolution is None


# Runs and resolution of the smallest fractions: Box, Hunter and Hunter (2005), table 6.22; Montgomery, table 8.14.
@pytest.mark.parametrize(
    ("factors", "least", "runs", "resolution"),
    [
        ("ABC", None, 4, 3),
        ("ABCD", None, 8, 4),
        ("ABCDE", 3, 8, 3),
        ("ABCDE", 4, 16, 5),
        ("ABCDEF", 3, 8, 3),
        ("ABCDEF", 4, 16, 4),
        ("ABCDEF", 5, 32, 6),
        ("ABCDEFG", 3, 8, 3),
        ("ABCDEFG", 4, 16, 4),
        ("ABCDEFGH", 4, 16, 4),
        ("ABCDEFGH", 5, 64, 5),
        ("ABCDEFGHI", 3, 16, 3),
        ("ABCDEFGHI", 4, 32, 4),
        ("ABCDEFGHIJ", 4, 32, 4),
    ],
)
def test_fractions_are_those_of_the_tables(factors: str, least: int | None, runs: int, resolution: int) -> None:
    design = two_level(FRACTIONAL, factors, least)
    assert len({tuple(point.values()) for point in design.points()}) == runs
    assert design.resolution == resolution


def test_there_is_no_fraction_where_none_is_possible() -> None:
    assert generators("AB") is None
    assert generators("ABC", 4) is None
    assert generators("ABCD", 5) is None


@pytest.mark.parametrize("factors", ["ABC", "ABCD", "ABCDE", "ABCDEFG"])
def test_a_fraction_holds_its_baseline_and_is_balanced(factors: str) -> None:
    design = two_level(FRACTIONAL, factors, 3)
    points = design.points()
    assert dict.fromkeys(factors, 0) in points
    for one, other in itertools.combinations(factors, 2):
        pairs = [(point[one], point[other]) for point in points]
        assert {pairs.count(pair) for pair in itertools.product((0, 1), repeat=2)} == {len(points) // 4}


def test_the_words_of_a_half_and_a_quarter() -> None:
    assert words(two_level(FRACTIONAL, "ABCD")) == {"ABCD"}
    assert words(two_level(FRACTIONAL, "ABCDEF", 4)) == {"ABCE", "ABDF", "CDEF"}


def test_aliases_have_the_same_column_and_no_others_do() -> None:
    design = two_level(FRACTIONAL, "ABCDE", 3)
    points = design.points()

    def column(term: frozenset[str]) -> tuple[int, ...]:
        return tuple(sum(int(point[f] or 0) for f in term) % 2 for point in points)

    terms = [frozenset(t) for n in range(1, 6) for t in itertools.combinations("ABCDE", n)]
    for one, other in itertools.combinations(terms, 2):
        assert (column(one) == column(other)) == (other in design.aliases(one)), (one, other)


def test_a_design_survives_json() -> None:
    design = dataclasses.replace(two_level(FRACTIONAL, "ABCD"), combined={"both": {"A": 1, "B": None}})
    assert Design.from_dict(json.loads(json.dumps(dataclasses.asdict(design)))) == design


@pytest.mark.parametrize(
    "change",
    [
        {"levels": {name: [*range(1, 10)] for name in "ABCDEFGH"}, "baseline": dict.fromkeys("ABCDEFGH", 0)},
        {"generators": {name: ["A", "B"] for name in "CDEFGHIJKLM"}},
        {"generators": {"C": ["A", "Z"]}},
        {"levels": {"A": []}},
        {"baseline": {}},
        {"combined": {"all": 0.5}},
        {"combined": {str(number): {} for number in range(20_000)}},
    ],
)
def test_a_stored_design_that_no_experiment_makes_is_refused(change: dict[str, object]) -> None:
    """Its points or words would fill the memory of whoever reads the run."""
    names = "ABCDEFGHIJKLM" if "generators" in change else "AB"
    stored = {
        "kind": FRACTIONAL if "generators" in change else FACTORIAL,
        "baseline": dict.fromkeys(names, 0),
        "levels": {name: [1] for name in names},
        "combined": {},
        "generators": {},
    }
    Design.from_dict(stored)
    with pytest.raises(ValueError, match="design: "):
        Design.from_dict({**stored, **change})
