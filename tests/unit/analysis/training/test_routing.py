"""Decisions of routers on samples whose every number is known: what is refused, and how uneven experts are used."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from training_records import build_supplement

from paceline.analysis.training import routing
from paceline.analysis.training.certificate import certify
from paceline.results.records import RoutingSample, RunRecord

# tiny-moe: two layers, 2 of 4 experts. The first choices of all tokens of a rank, then the second ones.
FIRST, SECOND = (20, 20, 14, 10), (10, 14, 20, 20)


def sample(rank: int, step: int, first: Any = FIRST, **changes: Any) -> RoutingSample:
    assigned = (*first, *SECOND)
    rows = tuple(a + b for a, b in zip(first, SECOND, strict=True))
    values = {
        "layers": (0, 1),
        "assigned": assigned * 2,
        "positions": tuple(3 * n for n in rows) * 2,
        "computed": rows * 2,
        "weights": (16.0,) * 8,
        "balances": (2.0, 2.2),
    }
    return RoutingSample(rank=rank, step=step, **{**values, **changes})


def with_routing(record: RunRecord, **changes: Any) -> RunRecord:
    steps = sorted({step.step for step in record.steps})
    ranks = range(record.spec.topology.world_size)
    found = tuple(sample(rank, step, **changes) for step in steps for rank in ranks)
    return dataclasses.replace(record, routings=found)


@pytest.fixture
def record(make_spec: Any, make_record: Any) -> RunRecord:
    built: RunRecord = make_record(make_spec("mesh:ep=2", 2, model="tiny-moe"))
    return built


def refusals(record: RunRecord, reference: RunRecord) -> dict[str, str]:
    names = ("router decisions", "tokens of experts")
    checks = certify(record, reference, []).checks
    assert {c.name for c in checks} >= set(names)
    return {c.name: c.observed for c in checks if not c.ok and c.name in names}


@pytest.mark.parametrize(
    ("changes", "check", "reason"),
    [
        ({}, None, ""),
        ({"first": (19, 21, 14, 10)}, None, ""),
        ({"first": (16, 24, 14, 10)}, "router decisions", "at least 8 other choices in layer 0 at step 0"),
        ({"first": (20, 20, 14, 9)}, "router decisions", "254 choices instead of 256 in layer 0 at step 0"),
        ({"weights": (6.0,) * 8}, "router decisions", "weights that sum to "),
        ({"positions": (0, 180, 102, 90) * 2}, "router decisions", "other choices in layer 0 at step 0"),
        ({"computed": (30, 34, 34, 20) * 2}, "tokens of experts", "20 rows too few or too many in layer 0 at step 0"),
        ({"layers": (0, 5)}, "router decisions", "no decision of some layers"),
        ({"positions": (1, 2) * 2}, "router decisions", "counts for another number of experts or choices in layer 0"),
    ],
)
def test_what_is_refused(
    record: RunRecord, make_reference: Any, changes: dict[str, Any], check: str | None, reason: str
) -> None:
    """The reference has the decisions of both ranks."""
    reference = dataclasses.replace(make_reference(record.spec), routings=with_routing(record).routings)
    found = refusals(with_routing(record, **changes), reference)
    assert set(found) == ({check} if check else set())
    assert reason in found.get(check or "", "")


def test_more_copies_allow_as_many_other_choices(make_spec: Any, make_record: Any, make_reference: Any) -> None:
    """The first copy moves one choice on each rank, so four may differ; the second one, computed later, three."""
    moved = {1: (19, 21, 14, 10), 2: (17, 23, 14, 10)}
    run = make_record(make_spec("mesh:ep=2", 2, model="tiny-moe", precision="bf16"))

    def copies(number: int) -> tuple[RoutingSample, ...]:
        return with_routing(run, first=moved.get(number, FIRST), variant=number).routings

    reference = make_reference(run.spec, variants=(0.0, 0.001))
    reference = dataclasses.replace(reference, routings=(*copies(0), *copies(1)))
    supplement = dataclasses.replace(build_supplement(reference, (0.0,)), routings=copies(2))
    other = with_routing(run, first=(17, 23, 14, 10))
    refused = certify(other, reference, [])
    assert "at least 6 other choices in layer 0 at step 0, expected at most 4" in refused.reasons[0]
    assert refused.is_narrow
    assert refused.failed[0].excess == pytest.approx(1.5)
    assert certify(other, reference, [], [supplement]).valid
    heavy = with_routing(run, first=(17, 23, 14, 10), weights=(6.0,) * 8)
    assert not certify(heavy, reference, []).is_narrow, "weights are no matter of rounding"


def test_each_tensor_parallel_rank_makes_all_decisions(make_spec: Any, make_record: Any, make_reference: Any) -> None:
    """Both ranks have all tokens, and each must decide as the reference."""
    whole = with_routing(make_record(make_spec("mesh:tp=2", 2, model="tiny-moe")))
    reference = make_reference(whole.spec)
    reference = dataclasses.replace(reference, routings=tuple(s for s in whole.routings if s.rank == 0))
    assert refusals(whole, reference) == {}
    other = tuple(sample(1, s.step, first=(16, 24, 14, 10)) if s.rank == 1 else s for s in whole.routings)
    found = refusals(dataclasses.replace(whole, routings=other), reference)
    assert "at least 4 other choices in layer 0 at step 0" in found["router decisions"]


def test_how_uneven_experts_and_ranks_are_used(record: RunRecord) -> None:
    """30, 34, 34 and 30 tokens on each rank; rank 1 computed three times as many rows as rank 0."""
    uneven = [
        dataclasses.replace(s, computed=(16, 16, 0, 0) * 2 if s.rank == 0 else (0, 0, 48, 48) * 2)
        for s in with_routing(record).routings
    ]
    (row,) = routing.analyse([dataclasses.replace(record, routings=tuple(uneven))])
    assert (row.experts_per_token, row.experts) == (2, 4)
    assert row.imbalance_ratio == row.worst_layer_ratio == pytest.approx(34 / 32)
    assert row.rank_imbalance_ratio == pytest.approx(96 / 64)
    assert row.balance == pytest.approx(2.1)
