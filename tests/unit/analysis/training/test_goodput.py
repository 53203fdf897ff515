"""Runs in several attempts, by numbers worked out by hand: which step counts, what is measured, where the time went."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis import report
from paceline.analysis.findings.training import Goodput
from paceline.analysis.training import gauges, metrics
from paceline.analysis.training.energy import window_energy
from paceline.analysis.training.goodput import goodput, resumed_at
from paceline.analysis.training.window import open_window
from paceline.experiment.spec import RunSpec, WarmUp
from paceline.report.tables.one_run import record_lines
from paceline.results import attempts, store
from paceline.results.records import (
    AttemptSample,
    CheckpointSample,
    GaugeSample,
    RunRecord,
    Sample,
    StartSample,
    Status,
)

Make = Callable[..., Any]


@pytest.fixture
def spec(make_spec: Make) -> RunSpec:
    found: RunSpec = replace(
        make_spec("ddp", 2, steps=10), max_restarts=2, checkpoint_every=4, warmup=WarmUp(minimum=1, maximum=2, window=2)
    )
    return found


def attempt(number: int, submitted: float, began: float | None, ended: float, status: str = "failed") -> AttemptSample:
    return AttemptSample(
        rank=0, attempt=number, submitted_at=submitted, began_at=began, ended_at=ended, status=status, reason=None
    )


@pytest.fixture
def restarted(tmp_path: Path, spec: RunSpec, make_run: Make, make_step: Make) -> RunRecord:
    """Steps of 1 s; 0 to 5 at the first attempt, which wrote a checkpoint of 2 s after 4 steps; 4 to 9 at the last one,
    which wrote one after 8. The clocks of the two ranks are an hour apart."""

    def samples(first: int, last: int, setup_s: float, at_s: float, checkpoint: int) -> list[Sample]:
        found: list[Sample] = []
        for rank in (0, 1):
            when = at_s + 3600 * rank
            found.append(StartSample(rank=rank, step=first, setup_s=setup_s, at_s=when))
            found += [make_step(rank, step, duration_s=1.0) for step in range(first, last + 1)]
            found.append(CheckpointSample(rank=rank, step=checkpoint, duration_s=2.0, bytes=100))
        return found

    run_dir: Path = make_run(tmp_path, spec, None, samples=samples(0, 5, 5.0, 1015.0, 4), outcomes=())
    store.write_json(run_dir / attempts.JOB, {"submitted_at": 1000.0, "began_at": 1010.0})
    attempts.close(run_dir, "failed", "rank 1 was killed")
    for rank in (0, 1):
        own = [s for s in samples(4, 9, 7.0, 1057.0, 8) if s.rank == rank]
        (run_dir / f"samples-{rank}.jsonl").write_text("".join(map(store.sample_line, own)))
    store.write_json(run_dir / attempts.JOB, {"submitted_at": 1030.0, "began_at": 1050.0})
    attempts.conclude(run_dir, "ok", None)
    store.seal(run_dir, Status.OK, None, 1000.0, 1070.0)
    return store.read_run(run_dir)


def test_of_every_step_the_last_attempts_stays(restarted: RunRecord) -> None:
    assert sorted((s.rank, s.step) for s in restarted.steps) == [(r, s) for r in (0, 1) for s in range(10)]
    assert sorted((s.rank, s.step) for s in restarted.redone) == [(0, 4), (0, 5), (1, 4), (1, 5)]
    assert {(s.attempt, s.step) for s in restarted.starts} == {(1, 0), (2, 4)}
    assert resumed_at(restarted) == [4]


def test_the_time_of_a_restarted_run_adds_up(restarted: RunRecord, golden: object) -> None:
    """From 1010 s, when ranks were first seen, to the end of the last step: 1050 + 7 to load + 6 steps + 2 = 1065 s."""
    found = goodput(restarted)
    assert found is not None
    assert (found.restarts, found.checkpoints) == (1, 2)
    assert (found.span_s, found.start_s, found.counted_s) == (55.0, 5.0, 10.0)
    assert (found.redone_s, found.checkpoint_s) == (2.0, 4.0)
    assert found.down_s == 55.0 - 5.0 - 10.0 - 2.0 - 4.0
    assert found.ratio == pytest.approx(10 / 55)
    assert found.text == golden
    assert "18" in found.text
    assert "34" in found.text


def test_a_run_with_checkpoints_alone_was_never_down(restarted: RunRecord, golden: object) -> None:
    ours = {"attempt": 1}
    alone = replace(
        restarted,
        attempts=(),
        redone=(),
        starts=tuple(replace(s, **ours) for s in restarted.starts if s.attempt == 1),
        checkpoints=tuple(replace(c, **ours) for c in restarted.checkpoints),
    )
    found = goodput(alone)
    assert found is not None
    assert (found.span_s, found.down_s, found.redone_s) == (5.0 + 10.0 + 4.0, 0.0, 0.0)
    assert found.text == golden
    assert "53" in found.text


def test_a_run_in_one_piece_has_no_goodput_to_tell(tmp_path: Path, spec: RunSpec, make_run: Make) -> None:
    record = store.read_run(make_run(tmp_path, spec))
    assert goodput(record) is None
    (cell,) = metrics.gather([open_window(record)])
    assert not [m for m in cell.measurements if m.metric == "goodput_ratio"]


def test_an_attempt_that_no_rank_began_is_time_down(restarted: RunRecord) -> None:
    """It lies between the two that did: the first and the last are where they were."""
    lost = attempt(2, 1021.0, None, 1029.0)
    three = replace(
        restarted,
        attempts=(restarted.attempts[0], lost, replace(restarted.attempts[1], attempt=3)),
        starts=tuple(replace(s, attempt=3) if s.attempt == 2 else s for s in restarted.starts),
        checkpoints=tuple(replace(c, attempt=3) if c.attempt == 2 else c for c in restarted.checkpoints),
    )
    found, usual = goodput(three), goodput(restarted)
    assert found is not None
    assert usual is not None
    assert found == replace(usual, restarts=2)


def test_the_numbers_of_files_are_the_controllers(tmp_path: Path, spec: RunSpec, make_run: Make) -> None:
    """An attempt that left no file is counted all the same: starts are joined with the moments of their own attempt."""
    run_dir: Path = make_run(tmp_path, spec, None, samples=())
    for path in run_dir.glob("samples-*"):
        path.unlink()
    for began in (1.0, 2.0):
        store.write_json(run_dir / attempts.JOB, {"submitted_at": began, "began_at": began})
        attempts.close(run_dir, "failed", None)
    start = StartSample(rank=0, step=0, setup_s=1.0, at_s=5.0)
    (run_dir / "samples-0.jsonl").write_text(store.sample_line(start))
    attempts.conclude(run_dir, "ok", None)
    store.seal(run_dir, Status.OK, None, 0.0, 9.0)
    assert [s.attempt for s in store.read_run(run_dir).starts] == [3]


def test_steps_after_a_restart_are_warm_up_again(restarted: RunRecord, golden: object) -> None:
    """The rule is asked of steps 0 to 3 and again of 4 to 9; steps of one length settle at once."""
    window = open_window(restarted)
    assert window.measured == (1, 2, 3, 5, 6, 7, 8, 9)
    assert (window.warmup.excluded_steps, window.warmup.measured_steps) == (2, 8)
    assert window.warmup.text == golden
    assert len(window.steps) == len(window.measured)


def test_moments_of_steps_leave_out_checkpoints_and_lost_attempts(restarted: RunRecord) -> None:
    when = gauges.timeline(restarted, 0)
    assert when is not None
    # Steps 0 to 3 from 1015 on; 4 to 7 from 1057 on, the checkpoint, 8 and 9.
    begins = [1015, 1016, 1017, 1018, 1057, 1058, 1059, 1060, 1063, 1064]
    assert when.begins.tolist() == begins
    assert when.ends.tolist() == [begin + 1 for begin in begins]
    measured = open_window(restarted).measured
    assert gauges.stretches(restarted, 0, measured) == [(1016.0, 1019.0), (1058.0, 1061.0), (1063.0, 1065.0)]
    assert gauges.window_of(restarted, 1, measured) == (4616.0, 4665.0)


def test_energy_is_of_the_steps_and_not_of_what_lies_between(restarted: RunRecord, make_outcome: Make) -> None:
    """200 W while it steps, 1,000 W in between: 8 steps of 1 s are 1,600 J, whatever the pauses took."""
    measured = open_window(restarted).measured
    pairs = gauges.stretches(restarted, 0, measured)
    assert pairs is not None
    joules, read = 0.0, []
    for second in range(1010, 1070):
        read.append(GaugeSample(rank=0, host="node-a", at_s=float(second), energy_j=joules))
        joules += 200.0 if any(begin <= second < end for begin, end in pairs) else 1000.0
    outcomes = (make_outcome(0, evidence=None), make_outcome(1, evidence=None))
    watched = replace(restarted, gauges=tuple(read), outcomes=outcomes)
    found = window_energy(watched, measured)
    assert (found.joules, found.seconds) == (1600.0, 8.0)


def test_report_and_show_tell_it(restarted: RunRecord) -> None:
    built = report.build([restarted], "x")
    assert built.runs[0].goodput == goodput(restarted)
    assert any("18% goodput" in note for note in built.runs[0].health)
    lines = list(record_lines(replace(restarted, machines=()), None))
    (told,) = [line for line in lines if line.startswith("  attempt 1: failed after ")]
    assert told.endswith(" (rank 1 was killed)")


def test_goodput_of_launches_is_the_ratio_of_their_sums(restarted: RunRecord, spec: RunSpec) -> None:
    (cell,) = metrics.gather([open_window(restarted)])
    found = {m.metric: m.value for m in cell.measurements}
    assert found["goodput_ratio"] == pytest.approx(10 / 55)
    assert (found["redone_s"], found["checkpoint_s"], found["down_s"]) == (2.0, 4.0, 34.0)


def test_the_time_without_a_controller_is_nobodys_loss(restarted: RunRecord) -> None:
    """Interrupted at 1020, gone on with three days later: the run was down from 1020 to 1050 without the three days."""
    first, second = restarted.attempts
    known = goodput(replace(restarted, attempts=(replace(first, ended_at=1020.0), second)))
    days = 3 * 86400.0
    absent = (
        replace(first, ended_at=1020.0, status="interrupted"),
        replace(second, submitted_at=1020.0 + days, began_at=1040.0 + days, ended_at=1100.0 + days),
    )
    found = goodput(replace(restarted, attempts=absent))
    assert known is not None
    assert found is not None
    assert found.span_s == known.span_s - 10.0, "what it waited between 1020 and 1030 is absence too"
    assert (known.restarts, found.restarts) == (1, 0)
    assert known.text.startswith("restarted 1 time; ")
    assert found.text.startswith("interrupted 1 time; ")


def test_the_rest_of_a_difference_of_clocks_is_no_time() -> None:
    found = Goodput(
        span_s=10.0,
        start_s=1.0,
        counted_s=8.0,
        redone_s=8.88e-16,
        checkpoint_s=1.0,
        down_s=0.0,
        restarts=0,
        checkpoints=1,
    )
    assert "0 s redone, 1 s checkpoints (1 time), 0 s down" in found.text
