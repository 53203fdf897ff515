"""Decisions of routers on samples whose every number is known: what is refused, and how uneven experts are used."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from training_records import build_record, build_reference, build_spec, build_supplement

from paceline.analysis.findings import Check
from paceline.analysis.training import routing
from paceline.analysis.training.certificate import certify, certify_all
from paceline.experiment.proof import Reduction
from paceline.experiment.reduced import reduced
from paceline.results.records import RoutingSample, RunRecord

# tiny-moe: two layers, 2 of 4 experts. The first choices of all tokens of a rank, then the second ones.
FIRST, SECOND = (20, 20, 14, 10), (10, 14, 20, 20)


def sample(rank: int, step: int, first: Any = FIRST, count: int = 2, **changes: Any) -> RoutingSample:
    """count: of layers."""
    assigned = (*first, *SECOND)
    rows = tuple(a + b for a, b in zip(first, SECOND, strict=True))
    values = {
        "layers": tuple(range(count)),
        "assigned": assigned * count,
        "positions": tuple(3 * n for n in rows) * count,
        "computed": rows * count,
        "weights": (16.0,) * 4 * count,
        "balances": (2.0, 2.2) * (count // 2),
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


OTHERS = (16, 24, 14, 10)  # four choices of each of two ranks are others


class TestWithoutReference:
    """Steps of which there is no reference of this size: the configurations are compared with each other."""

    STRATEGIES = ("ddp", "fsdp2", "mesh:ep=2")

    def runs(self, *first: Any, **more: Any) -> list[RunRecord]:
        """A run of each strategy, with 8 layers and these first choices."""
        specs = [build_spec(name, 2, model="tiny-moe:layers=8", steps=3, **more) for name in self.STRATEGIES]
        return [with_routing(build_record(s), first=f, count=8) for s, f in zip(specs, first, strict=False)]

    def proofs(self, runs: Sequence[RunRecord], *copies: Any) -> list[RunRecord]:
        """Their proof group with 2 layers. copies: first choices of re-seeded references."""
        spec = runs[0].spec
        length, batch = spec.training.sequence_length, spec.global_batch
        sizes = {"sequence_length": length, "of_sequence_length": length, "global_batch": batch}
        to = Reduction(work=spec.work, layers=2, of_layers=8, of_global_batch=batch, **sizes)
        small = [with_routing(build_record(reduced(run.spec, to))) for run in runs]
        made = build_reference(small[0].spec, (0.0,) * (1 + len(copies)), 3)
        routings = [with_routing(small[0], first=f, variant=n).routings for n, f in enumerate((FIRST, *copies))]
        return [dataclasses.replace(made, routings=tuple(s for part in routings for s in part)), *small]

    def check(self, run: RunRecord, records: Sequence[RunRecord]) -> Check:
        return next(c for c in certify_all(records)[run.spec.run_id].checks if c.name == "router decisions")

    def test_other_decisions_than_the_other_configurations(self) -> None:
        runs = self.runs(FIRST, OTHERS, FIRST)
        records = [*self.proofs(runs), *runs]
        assert [self.check(run, records).ok for run in runs] == [True, False, True]
        assert self.check(runs[0], records).expected.endswith("those of the other configurations but for 2 per layer")
        found = self.check(runs[1], records)
        assert found.observed.startswith("at least 8 other choices in layer 0 at step 0, expected at most 2;")

    def test_two_that_differ_are_both_refused(self) -> None:
        runs = self.runs(FIRST, OTHERS)
        assert [self.check(run, [*self.proofs(runs), *runs]).ok for run in runs] == [False, False]

    def test_alone_it_rests_on_its_proof(self) -> None:
        (run,) = self.runs(FIRST)
        found = self.check(run, [*self.proofs([run]), run])
        assert (found.ok, found.observed) == (True, "no other configuration to compare with")

    @pytest.mark.parametrize(("first", "valid"), [(OTHERS, True), ((15, 25, 14, 10), False)])
    def test_the_limit_grows_with_the_root_of_the_depth(self, first: Any, valid: bool) -> None:
        """Two choices differ in a copy of 2 layers, so 2 x 2 x the root of 8 over 2 layers = 8 may differ."""
        runs = self.runs(FIRST, first, FIRST, precision="bf16")
        records = [*self.proofs(runs, (19, 21, 14, 10)), *runs]
        assert self.check(runs[1], records).ok is valid

    def test_steps_after_the_reference(self, make_reference: Any) -> None:
        """The last two of 12 steps are compared with the median of three configurations."""
        runs = [with_routing(build_record(build_spec(n, 2, model="tiny-moe", steps=12))) for n in self.STRATEGIES]
        reference = dataclasses.replace(make_reference(runs[0].spec), routings=runs[0].routings[:20])
        late = tuple(sample(s.rank, s.step, OTHERS) if s.step == 11 else s for s in runs[2].routings)
        runs[2] = dataclasses.replace(runs[2], routings=late)
        records = [reference, *runs]
        assert [self.check(run, records).ok for run in runs] == [True, True, False]
        found = self.check(runs[2], records)
        assert found.observed.startswith("at least 8 other choices in layer 0 at step 11, expected at most 2;")


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
