"""A folder tells what is planned, what runs and how long the rest may take; and the truth when its controller died."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.campaign.live import status_page
from paceline.campaign.live.progress import left_text, pulse_text, title
from paceline.campaign.live.status import folder_lines
from paceline.experiment.choices import Choice
from paceline.experiment.serving import Serving
from paceline.experiment.spec import RunSpec
from paceline.results import campaign_file, sealing, store
from paceline.results.campaign_file import EndedRun, PlannedRun, forecast_s
from paceline.results.records import GaugeSample, Status

Make = Callable[..., Any]


def planned(run: str, cell: str, workload: str = "pretrain", kin: str = "small") -> PlannedRun:
    return PlannedRun(run=run, cell=cell, workload=workload, kin=f"{workload} {kin}")


def repeats(make_spec: Make, strategies: Sequence[str] = ("ddp", "fsdp2")) -> list[RunSpec]:
    return [make_spec(strategy, repeat=repeat, experiment="test") for repeat in (0, 1) for strategy in strategies]


def begin(out: Path, spec: RunSpec, make_step: Make, steps: int = 3) -> store.ProgressFile:
    """A run under way in this process: rank 0 has recorded `steps` steps of half a second."""
    run_dir = store.create(out, spec)
    lines = [store.sample_line(make_step(0, step)) for step in range(steps)]
    (run_dir / "samples-0.jsonl").write_text("".join(lines) + '{"kind": "st')
    position = store.ProgressFile(run_dir, 0)
    position.loss, position.peak_bytes = 5.5, 3 * 2**30
    position.mark(steps, "backward")
    return position


def age(run_dir: Path) -> None:
    """Every file of the run is older than this process."""
    began_at = campaign_file._process_began_at(os.getpid())
    assert began_at is not None
    for path in run_dir.iterdir():
        os.utime(path, (began_at - 60,) * 2)


# --- the forecast ---


def test_a_run_is_expected_to_take_what_its_own_repeats_took() -> None:
    runs = [planned("a0", "a"), planned("b0", "b"), planned("a1", "a"), planned("b1", "b")]
    ended = {"a0": EndedRun("ok", 10.0), "b0": EndedRun("ok", 100.0)}
    assert forecast_s(runs, ended, None) == 110.0


def test_the_most_similar_cell_estimates_one_that_never_ran() -> None:
    runs = [planned("a0", "a"), planned("r", "r", "reference"), planned("b0", "b", kin="large"), planned("c0", "c")]
    seen = {"a0": EndedRun("ok", 10.0), "r": EndedRun("ok", 500.0), "b0": EndedRun("ok", 90.0)}
    assert forecast_s(runs, seen, None) == 10.0, "same model, not the mean of all"
    stranger = planned("d0", "d", kin="other")
    assert forecast_s([*runs, stranger], {**seen, "c0": EndedRun("ok", 20.0)}, None) == pytest.approx(40.0)


def test_nothing_is_expected_of_a_workload_that_was_never_seen() -> None:
    runs = [planned("r", "r", "reference"), planned("a0", "a")]
    assert forecast_s(runs, {"r": EndedRun("ok", 10.0)}, None) is None


def test_a_failure_estimates_only_its_own_repeats() -> None:
    runs = [planned("a0", "a"), planned("a1", "a"), planned("b0", "b"), planned("c0", "c")]
    ended = {"a0": EndedRun("oom", 3.0), "b0": EndedRun("ok", 60.0)}
    assert forecast_s(runs, ended, None) == 63.0


def test_the_run_under_way_counts_by_its_last_steps(tmp_path: Path, make_spec: Make, make_step: Make) -> None:
    first, *others = [make_spec("ddp", repeat=repeat, steps=13) for repeat in range(3)]
    begin(tmp_path, first, make_step)
    run_dir = tmp_path / first.experiment / first.run_id
    pulse = campaign_file.read_pulse(run_dir, first, store.read_progress(run_dir))
    assert pulse is not None
    assert pulse.left_s == 10 * 0.5
    left = forecast_s(map(PlannedRun.of, (first, *others)), {}, pulse)
    assert left == pytest.approx(5 + 2 * (5 + time.time() - pulse.began_at), abs=1.0)


def served_pulse(make_spec: Make, step: int, elapsed_s: float, **asked: Any) -> campaign_file.Pulse:
    engine = Choice("openai", {"urls": ("http://a:1", "http://b:1")})
    serving = Serving(**{"scenario": "offline", "requests": 200, **asked})
    spec = make_spec(None, workload="inference", serving=serving, engine=engine)
    began_at = time.time() - elapsed_s
    about = {"rank": 0, "phase": "timing", "step_s": None, "loss": None, "peak_bytes": None}
    return campaign_file.Pulse(spec=spec, began_at=began_at, step=step, beat=began_at + elapsed_s, **about)


def test_requests_of_a_paired_run_are_those_of_all_its_loads(make_spec: Make) -> None:
    """Two replicas, there and back: 800 requests. 320 took 60 s, so that 480 take 90 s."""
    assert served_pulse(make_spec, 320, 60.0, partition="paired").left_s == pytest.approx(90.0)
    assert served_pulse(make_spec, 50, 60.0).left_s == pytest.approx(180.0)
    # The start of the engine would be taken for theirs; and nobody knows how many a search asks.
    assert served_pulse(make_spec, 19, 60.0).left_s is None
    assert served_pulse(make_spec, 50, 60.0, scenario="search").left_s is None
    assert served_pulse(make_spec, 50, 60.0, least_s=600.0).left_s is None


def test_a_run_that_takes_longer_than_others_did_has_no_time_left_rather_than_none(make_spec: Make) -> None:
    pulse = served_pulse(make_spec, 50, 60.0, scenario="search")
    current = PlannedRun.of(pulse.spec)
    other = dataclasses.replace(current, run="other", cell="other")
    assert forecast_s([other, current], {"other": EndedRun("ok", 20.0)}, pulse) is None
    left = forecast_s([other, current], {"other": EndedRun("ok", 100.0)}, pulse)
    assert left == pytest.approx(40.0, abs=5.0)


def test_the_time_left_is_rounded_to_its_uncertainty(golden: object) -> None:
    assert left_text(None) == golden
    text = left_text(63.0)
    assert text == golden
    assert "05" in text
    text = left_text(1234.0)
    assert text == golden
    assert "21" in text
    assert "00" not in text


# --- the run under way ---


def test_the_pulse_is_of_the_last_steps_and_the_rank_behind(
    tmp_path: Path, make_spec: Make, make_step: Make, golden: object
) -> None:
    spec = make_spec("ddp", steps=40)
    begin(tmp_path, spec, make_step, steps=30)
    run_dir = tmp_path / spec.experiment / spec.run_id
    behind = store.ProgressFile(run_dir, 1)
    behind.peak_bytes = 5 * 2**30
    behind.mark(7, "forward")
    pulse = campaign_file.read_pulse(run_dir, spec, store.read_progress(run_dir))
    assert pulse is not None
    assert (pulse.rank, pulse.step, pulse.phase, pulse.peak_bytes) == (1, 7, "forward", 5 * 2**30)
    assert pulse.tokens_per_s == spec.tokens_per_step / 0.5
    text = pulse_text(pulse)
    assert text == golden
    assert "40" in text
    assert "256" in text
    assert "5.00" in text


def test_the_trust_light_of_the_last_readings_is_shown(tmp_path: Path, make_spec: Make) -> None:
    spec = make_spec("ddp")
    run_dir = store.create(tmp_path, spec)
    store.ProgressFile(run_dir, 0).mark(0, "setup")

    def shown(*busy_cores: float) -> str:
        lines, busy_s = [], 0.0
        for at, cores in enumerate(busy_cores):
            usage = {"at_s": float(at), "cores": 2, "total_s": 2.0 * at, "busy_s": busy_s, "own_s": 0.0}
            lines.append(store.sample_line(GaugeSample(rank=0, host="a", at_s=float(at), usage=usage)))
            busy_s += cores
        (run_dir / "samples-gauges-0.jsonl").write_text("".join(lines) + '{"kind": "gau')
        pulse = campaign_file.read_pulse(run_dir, spec, store.read_progress(run_dir))
        assert pulse is not None
        return pulse_text(pulse)

    assert "trust" not in shown(0.0)
    assert shown(0.0, 0.0, 0.0).endswith(", trust green")
    assert shown(0.9, 0.9, 0.0).endswith(", trust red: other processes used 0.9 of 2 cores")
    # Only what is recent: the file keeps the whole run.
    assert shown(*[2.0] * 50, *[0.0] * 150).endswith(", trust green")


def test_what_is_not_known_is_not_said(tmp_path: Path, make_spec: Make, golden: object) -> None:
    spec = make_spec("ddp")
    run_dir = store.create(tmp_path, spec)
    assert campaign_file.read_pulse(run_dir, spec, ()) is None
    store.ProgressFile(run_dir, 0).mark(0, "setup")
    pulse = campaign_file.read_pulse(run_dir, spec, store.read_progress(run_dir))
    assert pulse is not None
    assert pulse_text(pulse) == golden
    assert (pulse.tokens_per_s, pulse.left_s, pulse.loss, pulse.peak_bytes) == (None, None, None, None)


# --- the folder ---


def test_a_running_campaign_is_recognised_by_its_folder(
    tmp_path: Path, make_spec: Make, make_run: Make, make_step: Make, golden: object
) -> None:
    specs = repeats(make_spec)
    make_run(tmp_path, specs[0])
    campaign_file.write_plan(tmp_path / "test", specs)
    begin(tmp_path, specs[1], make_step, steps=2)
    (view,) = campaign_file.read_views(tmp_path)
    assert (view.planned, view.ended, view.running, view.interrupted) == (4, {"ok": 1}, True, ())
    # One repeat of ddp as the first (60 s by its seal); two of fsdp2 by the one under way, of which 1 s is left.
    assert view.left_s == pytest.approx(60 + 60 + 1, abs=2)
    lines, running = folder_lines(tmp_path)
    assert running
    assert lines[0] == golden
    assert lines[1] == golden
    assert "fsdp2" in lines[1]
    assert "x2" in lines[1]
    assert "256" in lines[1]


def test_status_has_the_cost_so_far(tmp_path: Path, make_spec: Make, make_run: Make) -> None:
    """60 s of 2 devices at 30 USD per hour are 1 USD, but nothing if an earlier campaign paid for them."""
    specs = repeats(make_spec)[:2]
    run_dir = Path(make_run(tmp_path, specs[0]))
    campaign_file.write_plan(tmp_path / "test", specs, usd_per_hour=30.0)
    assert folder_lines(tmp_path)[0][0].endswith("running, about 1 min left, 1.00 USD so far")
    assert campaign_file.read_view(tmp_path / "test").usd == pytest.approx(1.0)
    campaign_file.write_plan(tmp_path / "test", specs[:1], usd_per_hour=30.0)
    assert folder_lines(tmp_path)[0][0].endswith("1 of 1 runs ended (1 ok); complete, 1.00 USD")
    sealing.write(run_dir, {**store.read_json(run_dir / sealing.FILE), "reused": True})
    assert campaign_file.read_view(tmp_path / "test").usd == 0.0
    campaign_file.write_plan(tmp_path / "test", specs[:1])
    assert campaign_file.read_view(tmp_path / "test").usd is None


def test_a_dead_controller_is_not_running_whatever_its_files_say(
    tmp_path: Path, make_spec: Make, make_run: Make, make_step: Make, golden: object
) -> None:
    specs = repeats(make_spec)
    make_run(tmp_path, specs[0], Status.OOM, "out of memory")
    begin(tmp_path, specs[1], make_step)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    campaign_file.write_plan(tmp_path / "test", specs)
    plan = store.read_json(tmp_path / "test" / campaign_file.PLAN)
    store.write_json(tmp_path / "test" / campaign_file.PLAN, plan | {"pid": ended.pid})
    lines, running = folder_lines(tmp_path)
    assert not running
    assert lines[0] == golden
    assert lines[1:] == [f"  interrupted: {specs[1].run_id}"]


def test_a_process_that_was_given_the_number_later_is_not_the_controller(tmp_path: Path, make_spec: Make) -> None:
    campaign_file.write_plan(tmp_path, [make_spec()])
    plan = campaign_file.read_plan(tmp_path)
    assert plan is not None
    assert (plan.pid, plan.host, plan.is_driven) == (os.getpid(), socket.gethostname(), True)
    assert dataclasses.replace(plan, began_at=plan.began_at - 3600).is_driven is False
    assert dataclasses.replace(plan, host="elsewhere").is_driven is None


def test_what_an_earlier_campaign_left_open_is_not_called_running(
    tmp_path: Path, make_spec: Make, make_step: Make
) -> None:
    specs = repeats(make_spec)
    begin(tmp_path, specs[0], make_step)
    campaign_file.write_plan(tmp_path / "test", specs)
    age(tmp_path / "test" / specs[0].run_id)
    view = campaign_file.read_view(tmp_path / "test")
    assert (view.pulses, view.interrupted, view.running) == ((), (specs[0].run_id,), True)


@pytest.mark.parametrize("touched", ["job.json", "progress-0", "samples-0.jsonl"])
def test_a_run_that_goes_on_or_is_taken_up_again_is_running(
    touched: str, tmp_path: Path, make_spec: Make, make_step: Make
) -> None:
    """Its spec.json is that of its first start, under an earlier controller."""
    specs = repeats(make_spec)
    begin(tmp_path, specs[0], make_step)
    campaign_file.write_plan(tmp_path / "test", specs)
    run_dir = tmp_path / "test" / specs[0].run_id
    store.write_json(
        run_dir / "job.json", {"outlives_controller": True, "launcher": "slurm", "handle": {"job_id": "17"}}
    )
    age(run_dir)
    (run_dir / touched).touch()
    view = campaign_file.read_view(tmp_path / "test")
    assert ([pulse.spec.run_id for pulse in view.pulses], view.interrupted) == ([specs[0].run_id], ())
    assert view.left_jobs == {}


PENDING = "Slurm job 17 is pending: Resources (waits for nodes to become free)"


@pytest.mark.parametrize("host", ["", "elsewhere"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_queued_job_is_shown_with_its_reason(
    host: str, steps: int, tmp_path: Path, make_spec: Make, make_step: Make
) -> None:
    """One that was never begun, and one that went back after some steps; by a controller of this host or another."""
    specs = repeats(make_spec)
    if steps:
        begin(tmp_path, specs[0], make_step, steps=steps)
    else:
        store.create(tmp_path, specs[0])
    run_dir = tmp_path / "test" / specs[0].run_id
    age(run_dir)
    campaign_file.write_plan(tmp_path / "test", specs)
    plan = store.read_json(tmp_path / "test" / campaign_file.PLAN)
    store.write_json(tmp_path / "test" / campaign_file.PLAN, plan | {"host": host or plan["host"]})
    store.write_json(run_dir / "job.json", {"launcher": "slurm", "outlives_controller": True, "waiting": PENDING})
    view = campaign_file.read_view(tmp_path / "test")
    assert (view.waiting, view.pulses, view.starting, view.interrupted) == ({specs[0].run_id: PENDING}, (), (), ())
    lines, running = folder_lines(tmp_path)
    assert running
    assert lines[1:] == [f"  waiting: {specs[0].run_id}: {PENDING}"]
    assert f"{specs[0].run_id} is waiting: {PENDING}" in status_page.html_text(status_page.read_state(tmp_path))
    store.write_json(run_dir / "job.json", {"launcher": "slurm", "outlives_controller": True, "waiting": None})
    assert campaign_file.read_view(tmp_path / "test").waiting == {}


@pytest.mark.parametrize("host", ["", "elsewhere"])
def test_ranks_that_moved_are_newer_than_the_note_of_a_dead_controller(
    host: str, tmp_path: Path, make_spec: Make, make_step: Make
) -> None:
    """It died while its job was queued; the job began without it."""
    specs = repeats(make_spec)
    begin(tmp_path, specs[0], make_step)
    run_dir = tmp_path / "test" / specs[0].run_id
    campaign_file.write_plan(tmp_path / "test", specs)
    plan = store.read_json(tmp_path / "test" / campaign_file.PLAN)
    # On its own host nothing says that it lives; elsewhere only the ranks do.
    dead = {"host": host} if host else {"pid": 2**22 + 1}
    store.write_json(tmp_path / "test" / campaign_file.PLAN, plan | dead)
    job = {"launcher": "slurm", "outlives_controller": True, "handle": {"job_id": "17"}, "waiting": PENDING}
    store.write_json(run_dir / "job.json", job)
    moved_at = (run_dir / "progress-0").stat().st_mtime
    os.utime(run_dir / "job.json", (moved_at - 60,) * 2)
    view = campaign_file.read_view(tmp_path / "test")
    assert view.waiting == {}
    if host:
        assert [pulse.step for pulse in view.pulses] == [3]
    else:
        assert view.left_jobs == {specs[0].run_id: "its job 17 may still run on slurm"}


@pytest.mark.parametrize(
    ("job", "told"),
    [
        (
            {"outlives_controller": True, "launcher": "slurm", "handle": {"job_id": "17"}, "waiting": PENDING},
            "its job 17 was waiting on slurm when last seen, and may run by now",
        ),
        (
            {"outlives_controller": True, "launcher": "slurm:partition=a", "handle": {"job_id": "17", "name": "x"}},
            "its job 17 may still run on slurm",
        ),
        (
            {"outlives_controller": True, "launcher": "kubernetes", "handle": {"name": "paceline-x"}},
            "its job paceline-x may still run on kubernetes",
        ),
        ({"outlives_controller": True, "launcher": "slurm", "handle": None}, "its job may still run on slurm"),
        ({"launcher": "local", "handle": {"pid": 1}}, None),
        ({"launcher": "ray", "handle": {"pid": 1, "name": "x"}}, None),
        ({"launcher": "of-another-host", "handle": {"name": "x"}}, None),
        (
            {"outlives_controller": True, "launcher": "slurm", "handle": {"job_id": "\x1b[2J"}},
            "its job \ufffd[2J may still run on slurm",
        ),
        ({}, None),
    ],
)
def test_a_dead_controllers_job_that_may_still_run_is_named(
    job: dict[str, Any], told: str | None, tmp_path: Path, make_spec: Make, make_step: Make
) -> None:
    specs = repeats(make_spec)
    begin(tmp_path, specs[0], make_step)
    store.write_json(tmp_path / "test" / specs[0].run_id / "job.json", job)
    campaign_file.write_plan(tmp_path / "test", specs)
    plan = store.read_json(tmp_path / "test" / campaign_file.PLAN)
    store.write_json(tmp_path / "test" / campaign_file.PLAN, plan | {"began_at": plan["began_at"] - 3600})
    lines, _ = folder_lines(tmp_path)
    more = f" ({told}; the same command will adopt it)" if told else ""
    assert lines[1:] == [f"  interrupted: {specs[0].run_id}{more}"]
    status_page.Page(tmp_path).write()
    assert (str(told) in (tmp_path / "status.md").read_text().replace("\\", "")) is bool(told)


def test_another_hosts_run_is_judged_by_when_it_moved(
    tmp_path: Path, make_spec: Make, make_step: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = repeats(make_spec)
    begin(tmp_path, specs[0], make_step)
    campaign_file.write_plan(tmp_path / "test", specs)
    plan = store.read_json(tmp_path / "test" / campaign_file.PLAN)
    store.write_json(tmp_path / "test" / campaign_file.PLAN, plan | {"host": "elsewhere"})
    assert campaign_file.read_view(tmp_path / "test").running
    monkeypatch.setattr(campaign_file, "FRESH_S", -1.0)
    assert not campaign_file.read_view(tmp_path / "test").running


@pytest.mark.parametrize("content", [None, "", "[]", '{"runs": [{"run": 1}]}'])
def test_a_folder_without_a_plan_is_read_as_well_as_it_can_be(
    content: str | None, tmp_path: Path, make_spec: Make, make_run: Make, golden: object
) -> None:
    make_run(tmp_path, make_spec("ddp"))
    make_run(tmp_path, make_spec("fsdp2"), None)
    if content is not None:
        (tmp_path / "test" / campaign_file.PLAN).write_text(content)
    lines, running = folder_lines(tmp_path)
    assert not running
    assert lines[0] == golden


def test_a_complete_campaign_says_so(tmp_path: Path, make_spec: Make, make_run: Make) -> None:
    specs = [make_spec("ddp")]
    make_run(tmp_path, specs[0])
    campaign_file.write_plan(tmp_path / "test", specs)
    lines, running = folder_lines(tmp_path)
    assert (running, lines[0].endswith("1 of 1 runs ended (1 ok); complete")) == (False, True)


def test_an_empty_folder_has_no_run_yet(tmp_path: Path) -> None:
    assert folder_lines(tmp_path) == ([f"{tmp_path}: no runs yet. Begin with `paceline start`."], False)


def test_rank_0_reports_how_many_requests_are_needed(tmp_path: Path, make_spec: Make, golden: object) -> None:
    serving = Serving(scenario="server", rate_per_s=2.0)
    spec = make_spec(None, workload="inference", serving=serving, engine=Choice("openai"), steps=4)
    run_dir = store.create(tmp_path, spec)
    store.ProgressFile(run_dir, 0).mark(412, "timing: 412 of 662 needed, 1 late")
    # It holds its replica, and never moves.
    store.ProgressFile(run_dir, 1).mark(0, "setup")
    pulse = campaign_file.read_pulse(run_dir, spec, store.read_progress(run_dir))
    assert pulse is not None
    assert (pulse.rank, pulse.step, pulse.steps) == (0, 412, None)
    text = f"{title(spec)}: {pulse_text(pulse)}"
    assert text == golden
    assert "x2" in text
    assert "412" in text
    assert "662" in text


@pytest.mark.parametrize(
    "usage", [{}, {"at_s": "x"}, {"at_s": 1.0, "total_s": [1]}, {"at_s": 10**400}, {"at_s": 1.0, "cores": 1e999}]
)
def test_readings_that_no_host_can_send_have_no_trust_light(tmp_path: Path, make_spec: Make, usage: Any) -> None:
    run_dir = store.create(tmp_path, make_spec())
    store.ProgressFile(run_dir, 0).mark(1, "forward")
    (run_dir / "samples-gauges-0.jsonl").write_text(f"{json.dumps({'usage': usage})}\n" * 3)
    pulse = campaign_file.read_pulse(run_dir, make_spec(), store.read_progress(run_dir))
    assert pulse is not None
    assert pulse.trust is None or pulse.trust.level == "unknown"


@pytest.mark.parametrize(
    "change",
    [{"pid": -1}, {"pid": 1e999}, {"pid": "1"}, {"runs": [{}]}, {"runs": 5}, {"host": [1]}, {"began_at": 10**30}],
)
def test_a_plan_that_nobody_wrote_is_none(tmp_path: Path, make_spec: Make, change: dict[str, Any]) -> None:
    campaign_file.write_plan(tmp_path, [make_spec()])
    plan = tmp_path / campaign_file.PLAN
    assert campaign_file.read_plan(tmp_path) is not None
    plan.write_text(json.dumps(json.loads(plan.read_text()) | change))
    assert campaign_file.read_plan(tmp_path) is None
    assert not campaign_file.read_view(tmp_path).running
