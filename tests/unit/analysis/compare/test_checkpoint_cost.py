"""The cost of a checkpoint from step times with and without, and goodput at a failure rate, on known numbers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from training_records import build_record, build_reference, build_spec

from paceline.analysis.compare import checkpoints
from paceline.analysis.findings import CheckpointCost
from paceline.analysis.report import build
from paceline.analysis.training.goodput import goodput
from paceline.errors import RequestError
from paceline.results.records import AttemptSample, CheckpointSample, RunRecord, StartSample


def run(every: int | None, seconds: float, pause: float = 0.0, repeat: int = 0, *, later: bool = False) -> RunRecord:
    spec = build_spec("ddp", repeat=repeat, checkpoint_every=every, checkpoint_async=later)
    ranks = range(spec.topology.world_size)
    written = [
        CheckpointSample(rank=rank, step=step, duration_s=pause / (1 + rank), bytes=None if later else 1000)
        for step in range(every or spec.steps, spec.steps, every or spec.steps)
        for rank in ranks
    ]
    starts = tuple(StartSample(rank=rank, step=0, setup_s=1.0, at_s=0.0) for rank in ranks) if every else ()
    return build_record(spec, seconds, checkpoints=tuple(written), starts=starts)


def test_lost_time_is_the_pause_and_what_the_steps_take_longer() -> None:
    records = [build_reference(build_spec("ddp"), steps=30)]
    for repeat in range(3):
        records += [
            run(None, 1.0, repeat=repeat),
            run(10, 1.0, 4.0, repeat),
            run(10, 1.1 + 0.01 * repeat, 0.5, repeat, later=True),
        ]
    plain, later = build(records, "test").checkpoints
    assert (plain.is_async, plain.pause_s, plain.lost_s, plain.bytes) == (False, 4.0, pytest.approx(4.0), 2000.0)
    assert (later.is_async, later.pause_s, later.bytes) == (True, 0.5, None)
    assert later.lost_s == pytest.approx(0.5 + 10 * 0.11)
    assert later.lost_low_s == pytest.approx(later.lost_s - 4.303 * 0.1 / 3**0.5, abs=1e-3)
    assert plain.checkpoints == 6
    assert plain.restart_s is None


def test_a_repeated_command_is_a_restart_too() -> None:
    """One killed rank and one interrupted command share what was lost; before, all of it was of the killed rank."""

    def attempt(number: int, began: float, status: str) -> AttemptSample:
        return AttemptSample(
            rank=0, attempt=number, submitted_at=began, began_at=began, ended_at=began + 40, status=status, reason=None
        )

    record = run(10, 1.0)
    starts = tuple(replace(start, attempt=n) for n in (1, 2, 3) for start in record.starts)
    ends = ("failed", "interrupted", "ok")
    attempts = tuple(attempt(n, 100.0 * n, status) for n, status in enumerate(ends, 1))
    record = replace(record, starts=starts, attempts=attempts)
    spent = goodput(record)
    assert spent is not None
    assert (spent.restarts, spent.interruptions) == (1, 1)
    assert spent.down_s > 0
    (found,) = build([build_reference(build_spec("ddp"), steps=30), record], "test").checkpoints
    assert (found.restarts, found.restart_s) == (2, pytest.approx(spent.down_s / 2))


def test_without_a_cell_to_compare_with_only_the_pause_is_known() -> None:
    (found,) = build([build_reference(build_spec("ddp"), steps=30), run(10, 2.0, 3.0)], "test").checkpoints
    assert (found.lost_s, found.is_beside_none, found.lost_low_s) == (3.0, False, None)


@pytest.mark.parametrize(("interval", "cost", "restart", "mtbf"), [(100.0, 5.0, 20.0, 500.0), (30.0, 1.0, 60.0, 90.0)])
def test_the_formula_agrees_with_simulated_failures(interval: float, cost: float, restart: float, mtbf: float) -> None:
    """Work in pieces of an interval and a checkpoint; a failure loses the piece, and restarts may fail too."""
    rng, pieces, clock = random.Random(7), 20_000, 0.0
    for _ in range(pieces):
        needed = interval + cost
        while (failed_after := rng.expovariate(1 / mtbf)) < needed:
            clock += failed_after
            # A restart comes before the piece that is done again.
            needed = restart + interval + cost
        clock += needed
    expected = checkpoints.expected_goodput(interval, cost, restart, mtbf)
    assert interval * pieces / clock == pytest.approx(expected, rel=0.02)


def test_dalys_interval_is_the_best() -> None:
    cost, restart, mtbf = 30.0, 120.0, 7200.0
    best = max(range(50, 4000), key=lambda t: checkpoints.expected_goodput(t, cost, restart, mtbf))
    assert checkpoints.daly_interval(cost, mtbf) == pytest.approx(best, rel=0.01)
    assert checkpoints.expected_goodput(1.0, 1e9, 1.0, 1.0) == 0.0


def test_spot_breaks_even_where_its_hours_cost_the_same() -> None:
    cost = CheckpointCost(
        cell="a",
        axes={},
        is_async=False,
        every=100,
        checkpoints=3,
        step_s=1.0,
        pause_s=10.0,
        lost_s=10.0,
        lost_low_s=None,
        lost_high_s=None,
        is_beside_none=True,
        bytes=None,
        restarts=1,
        restart_s=100.0,
        redone_s=1.0,
        goodput_ratio=0.9,
        runs=(),
    )
    offer = checkpoints.spot_offer(cost, 100.0, 1e6, (10.0, 4.0), 1.0)
    assert offer.break_even_per_h is not None
    assert offer.spot_usd_per_useful_h < offer.usd_per_useful_h
    even = checkpoints.spot_offer(cost, 100.0, 1e6, (10.0, 4.0), offer.break_even_per_h)
    assert even.spot_usd_per_useful_h == pytest.approx(even.usd_per_useful_h, rel=1e-3)
    assert checkpoints.spot_offer(cost, 100.0, 1e6, (10.0, 12.0), 0.0).break_even_per_h is None


def test_a_background_write_needs_an_interval() -> None:
    with pytest.raises(RequestError, match=r"checkpoint_async: got True, expected false, or a number of steps"):
        build_spec("ddp", checkpoint_async=True)
