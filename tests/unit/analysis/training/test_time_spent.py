"""Where the time of launches went: parts that add up to the launches, and nothing where the clock cannot be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.report import build
from paceline.campaign.run.references import reference_of
from paceline.experiment.spec import RunSpec, WarmUp
from paceline.report.tables import time_spent
from paceline.results import store
from paceline.results.records import AttemptSample, RunRecord

Launch = Callable[..., RunRecord]


@pytest.fixture
def launch(
    make_spec: Callable[..., RunSpec],
    make_run: Callable[..., Path],
    make_step: Callable[..., Any],
    make_outcome: Callable[..., Any],
    make_evidence: Callable[..., Any],
    tmp_path: Path,
) -> Launch:
    """A launch of 60 s from second 100: its steps begin 10 s later and take 1 s each, the first one `first_s`."""

    def one(first_s: float = 1.0, began_at_s: float | None = 110.0, **more: Any) -> RunRecord:
        spec = make_spec("ddp", 1, steps=20, warmup=WarmUp(minimum=4, maximum=4, window=2), **more)
        steps = [make_step(0, step, duration_s=first_s if step == 0 else 1.0) for step in range(20)]
        evidence = make_evidence(window_began_at_s=began_at_s, window_wall_s=19.0 + first_s)
        outcomes = [make_outcome(0, evidence=evidence)]
        return store.read_run(make_run(tmp_path, spec, samples=steps, outcomes=outcomes))

    return one


def spent(records: Sequence[RunRecord]) -> Any:
    from paceline.analysis.training import time_spent as analysis
    from paceline.analysis.training.window import open_window

    return analysis.analyse(records, {r.spec.run_id: open_window(r) for r in records if not r.is_reference})


def test_the_parts_of_a_launch_add_up(launch: Launch) -> None:
    found = spent([launch()])
    assert (found.launches, found.total_s) == (1, 60.0)
    assert (found.setup_s, found.warmup_s, found.measured_s, found.checks_s) == (10.0, 4.0, 16.0, 30.0)
    assert (found.compilation_s, found.reference_s) == (0.0, 0.0)
    assert found.first_measured_s == 14.0


def test_the_first_step_of_a_compiled_model_is_compilation(launch: Launch) -> None:
    found = spent([launch(first_s=9.0, compile=True)])
    assert (found.compilation_s, found.warmup_s, found.measured_s) == (8.0, 4.0, 16.0)
    assert found.first_measured_s == 22.0


def test_references_count_as_a_whole_unless_they_were_reused(
    launch: Launch, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    run = launch()
    reference = store.read_run(make_run(tmp_path, reference_of(run.spec)))
    both = spent([reference, run])
    assert (both.launches, both.total_s, both.reference_s) == (2, 120.0, 60.0)
    assert spent([replace(reference, reused=True), run]).reference_s == 0.0


@pytest.mark.parametrize("began_at_s", [None, 90.0, 150.0], ids=["unknown", "before the launch", "past its end"])
def test_a_start_that_cannot_be_says_nothing(launch: Launch, began_at_s: float | None) -> None:
    assert spent([launch(began_at_s=began_at_s)]) is None


def test_a_restarted_launch_is_left_out(launch: Launch) -> None:
    """Its evidence is of the last attempt: the steps of earlier ones would count as set-up."""
    attempt = AttemptSample(
        rank=0, attempt=1, submitted_at=1.0, began_at=2.0, ended_at=9.0, status="failed", reason="killed"
    )
    once, again = launch(), replace(launch(repeat=1), attempts=(attempt,))
    assert spent([once, again]).launches == 1
    assert spent([again]) is None


def test_the_report_says_it_in_a_sentence_and_a_table(launch: Launch) -> None:
    run = launch()
    report = replace(build([run], title=""), time_spent=spent([run]))
    assert time_spent.sentence(report) == (
        "Of 1 min 00 s in 1 launch: set-up 17 %, warm-up 7 %, measured steps 27 %, checks and end 50 %. "
        "A launch reaches its first measured step after 14 s (median)."
    )
    (table,) = time_spent.details(report)
    assert len(table.rows) == 4
    assert time_spent.sentence(replace(report, time_spent=None)) == ""
