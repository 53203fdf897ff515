"""Sums, counts and deviations over the ranks of a step, on known numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from paceline.analysis.training import gauges
from paceline.analysis.training.certificate.observed import LOSS, NORM, Observed, observe
from paceline.analysis.training.certificate.trajectory import worst_deviations
from paceline.analysis.training.window import step_table
from paceline.results.records import RunRecord, StepSample

Builder = Callable[..., Any]


@pytest.fixture
def record_of(make_record: Builder, make_spec: Builder) -> Callable[[list[StepSample]], RunRecord]:
    return lambda steps: dataclasses.replace(make_record(make_spec("ddp", 2), 0.1), steps=steps)


def test_ranks_are_added_one_after_the_other_also_where_some_are_missing(
    record_of: Builder, make_step: Builder
) -> None:
    """1e16 + 1 + 1 is 1e16 in that order only; a step of one rank is its own sum."""
    numbers = {0: [1e16, 1.0, 1.0], 1: [0.1, 0.2], 2: [3.0]}
    steps = [make_step(r, s, loss=loss) for s, losses in numbers.items() for r, loss in enumerate(losses)]
    table = step_table(record_of(steps))
    assert table.totals(table.numbers("loss")).tolist() == [1e16, 0.1 + 0.2, 3.0]


def test_the_order_in_which_steps_were_recorded_changes_no_formula(record_of: Builder, make_step: Builder) -> None:
    """By rank, which needs no sorting, or by step; with the numbers of both ranks worked out by hand."""
    by_rank = [
        make_step(r, s, duration_s=1.0 + r + s, loss=2.0 + r, tokens=10 * (1 + r)) for r in (0, 1) for s in (0, 1)
    ]
    for steps in (by_rank, [by_rank[i] for i in (0, 2, 1, 3)], [by_rank[i] for i in (2, 3, 0, 1)]):
        table = step_table(record_of(steps))
        assert table.steps == (0, 1)
        assert table.largest(table.numbers("duration_s")).tolist() == [2.0, 3.0]
        assert table.totals(table.whole_numbers("tokens")).tolist() == [30, 30]
        assert table.losses.tolist() == [pytest.approx((2 * 10 + 3 * 20) / 30)] * 2
        assert [sorted(values) for values in table.by_step("duration_s")] == [[1.0, 2.0], [2.0, 3.0]]
        assert sorted(table.at(1, "rank")) == [0, 1]
    assert step_table(record_of(by_rank)).order is None


def test_a_rank_that_lacks_a_step_is_in_no_maximum_of_it(record_of: Builder, make_step: Builder) -> None:
    """Its place is neither 0 nor missing: norms of -1 stay the largest, and no deviation is infinite."""
    steps = [make_step(0, 0, grad_norm=-1.0), make_step(0, 1, grad_norm=-1.0), make_step(1, 0, grad_norm=-3.0)]
    record = record_of(steps)
    table = step_table(record)
    assert table.largest(table.numbers("grad_norm")).tolist() == [-1.0, -1.0]
    assert worst_deviations(observe(record), {0: -1.0, 1: -2.0}, NORM) == {0: 2.0, 1: 0.5}


def test_values_are_counted(record_of: Builder, make_step: Builder) -> None:
    steps = [make_step(r, s, micro_batches=2 + (s == 1 and r == 1), leader=r or None) for s in (1, 0) for r in (1, 0)]
    table = step_table(record_of(steps))
    assert table.counts("micro_batches") == {2: 3, 3: 1}
    assert table.counts("leader") == {None: 2, 1: 2}


def test_digests_are_added_modulo_64_bits_and_without_followers(record_of: Builder, make_step: Builder) -> None:
    steps = [make_step(0, 0, data_digest=2**64 - 1), make_step(1, 0, data_digest=3)]
    steps += [make_step(0, 1, data_digest=5), make_step(1, 1, data_digest=9, leader=0)]
    run = observe(record_of(steps))
    assert run.digests == {0: 2, 1: 5}
    assert run.tokens == {0: 128, 1: 128}


def test_the_worst_rank_deviates_from_the_base(record_of: Builder, make_step: Builder) -> None:
    """Infinitely where a norm is missing or the base is not a number, and only at steps with a base."""
    norms = {0: (2.0, 2.1), 1: (2.0, None), 2: (2.0, 2.0), 3: (7.0, 7.0)}
    steps = [make_step(r, s, grad_norm=x, loss=4.0) for s, both in norms.items() for r, x in enumerate(both)]
    run: Observed = observe(record_of(steps))
    found = worst_deviations(run, {0: 2.0, 1: 2.0, 2: math.nan, 9: 1.0}, NORM)
    assert found == {0: pytest.approx(0.05), 1: math.inf, 2: math.inf}
    assert worst_deviations(run, {0: 5.0, 3: 4.0}, LOSS) == {0: pytest.approx(0.2), 3: 0.0}


def test_the_steps_of_a_rank_are_found_among_those_of_all(
    record_of: Builder, make_step: Builder, make_outcome: Builder, make_evidence: Builder
) -> None:
    """Other outcomes of the same steps have other times."""
    steps = [make_step(r, s, duration_s=1.0 + r) for r in (1, 0) for s in (0, 1)]
    plain = record_of(steps)
    for began in (10.0, 20.0):
        outcomes = tuple(make_outcome(r, evidence=make_evidence(window_began_at_s=began + r)) for r in (0, 1))
        line = gauges.timeline(dataclasses.replace(plain, outcomes=outcomes), 1)
        assert line is not None
        assert line.begins.tolist() == [began + 1, began + 3]
    assert gauges.timeline(dataclasses.replace(plain, outcomes=outcomes), 2) is None
