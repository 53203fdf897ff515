"""Attempts of one run, with a launcher whose ranks leave what each test says: what is tried again, how often, and what
a controller that comes later finds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.campaign.run import controller, references, supervision
from paceline.campaign.run.references import reference_of
from paceline.campaign.run.supervision import End, judge
from paceline.contract import Job, JobState
from paceline.errors import LaunchError, RequestError
from paceline.experiment import plugins, recipe
from paceline.experiment.choices import Choice
from paceline.experiment.serving import Serving
from paceline.experiment.spec import RunSpec
from paceline.launchers._job import job_name
from paceline.report.tables.one_run import record_lines
from paceline.results import attempts, store
from paceline.results.campaign_file import CampaignView, read_view, write_plan
from paceline.results.records import Status
from paceline.results.store import Progress

Make = Callable[..., Any]
Leave = Callable[[Path], JobState]
DEATH = "  rank      : {rank} (local_rank: {rank})\n  exitcode  : -9 (pid: 7)\n"


class Scripted:
    """A launcher whose n-th job does what the n-th function says; the last one's is repeated."""

    def __init__(self, *script: Leave) -> None:
        self.script, self.submitted, self.cancelled = script, 0, 0
        self.specs: list[RunSpec] = []
        self.state = JobState(running=True)

    def check(self, spec: RunSpec) -> str | None:
        return None

    def prepare(self, spec: RunSpec, run_dir: Path) -> Job:
        self.specs.append(spec)
        return Job(argv=("true", str(run_dir)))

    def submit(self, job: Job) -> Mapping[str, Any]:
        self.submitted += 1
        self.state = self.script[min(self.submitted, len(self.script)) - 1](Path(job.argv[1]))
        return {"number": self.submitted}

    def poll(self, handle: Mapping[str, Any]) -> JobState:
        return self.state

    def cancel(self, handle: Mapping[str, Any]) -> None:
        self.cancelled += 1


class Watcher:
    """An observer that remembers restarts."""

    def __init__(self) -> None:
        self.restarts: list[tuple[str, int]] = []

    def begin(self, specs: Sequence[RunSpec]) -> None: ...
    def started(self, spec: RunSpec, run_dir: Path) -> None: ...
    def waiting(self, spec: RunSpec, reason: str, seconds: float) -> None: ...
    def moved(self, spec: RunSpec, positions: Sequence[Progress]) -> None: ...
    def advising(self, spec: RunSpec, seconds: float) -> None: ...
    def ended(self, spec: RunSpec, status: Status, error: str | None, known: bool) -> None: ...
    def restarting(self, spec: RunSpec, reason: str, left: int) -> None:
        self.restarts.append((reason, left))


@pytest.fixture
def spec(make_spec: Make) -> RunSpec:
    """A reference, whose verdict needs finite losses only."""
    return replace(reference_of(make_spec("ddp", 1)), max_restarts=2)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "FIRST_PAUSE_S", 0.0)


@pytest.fixture
def execute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    load = plugins.load

    def call(spec: RunSpec, launcher: Any) -> tuple[Any, Path, Watcher]:
        watcher = Watcher()
        for module in (controller, references):
            monkeypatch.setattr(
                module, "load", lambda kind, name: launcher if kind == "launchers" else load(kind, name)
            )
        found = controller.execute(spec, tmp_path, watcher, None)
        return found, tmp_path / spec.experiment / spec.run_id, watcher

    return call


@pytest.fixture
def leave(make_outcome: Make, make_step: Make) -> Callable[..., Leave]:
    """What the one rank of a job leaves: steps, a position where it lived, an outcome where it spoke, a log."""

    def script(
        status: Status | None = None,
        error: str | None = None,
        steps: range = range(0),
        lived: bool = True,
        log: str = "",
        state: JobState = JobState(running=False, exit_code=1),  # noqa: B008
    ) -> Leave:
        def act(run_dir: Path) -> JobState:
            if lived:
                store.ProgressFile(run_dir, 0).mark(steps.stop, "forward")
            lines = [store.sample_line(make_step(0, step)) for step in steps]
            (run_dir / "samples-0.jsonl").write_text("".join(lines))
            (run_dir / "log.txt").write_text(log)
            if status is not None:
                store.write_outcome(run_dir, make_outcome(0, status, error))
            return state

        return act

    return script


@pytest.mark.parametrize(("spoke", "who"), [((0, 1), "node 1 of 2"), ((0, 1, 2), "rank 3 on node 1 of 2")])
def test_the_record_names_a_node_that_the_run_lost(
    make_spec: Make, execute: Make, make_outcome: Make, spoke: tuple[int, ...], who: str, golden: object
) -> None:
    served = make_spec(None, nodes=2, workload="inference", serving=Serving(), engine=Choice("vllm"))

    def act(run_dir: Path) -> JobState:
        for rank in spoke:
            store.write_outcome(run_dir, make_outcome(rank, Status.OK))
        return JobState(running=False, exit_code=0, lost=(1,))

    _, run_dir, _ = execute(served, Scripted(act))
    record = store.read_run(run_dir)
    assert record.lost_nodes == (1,)
    lines = list(record_lines(record, None))
    assert [line for line in lines if who in line] == golden
    assert any(who in line for line in lines)


KILLED = DEATH.format(rank=0)


def test_a_killed_rank_is_started_again_and_the_run_is_one_trajectory(
    spec: RunSpec, execute: Make, leave: Make
) -> None:
    launcher = Scripted(
        leave(steps=range(5), log=KILLED),
        leave(Status.OK, steps=range(3, 8), state=JobState(running=False, exit_code=0)),
    )
    (status, error), run_dir, watcher = execute(spec, launcher)
    assert (status, error) == (Status.OK, None)
    assert watcher.restarts == [("rank 0 was killed by signal 9 (by hand, or because the host ran out of memory)", 1)]
    assert (launcher.submitted, launcher.cancelled) == (2, 2), "what an attempt left with the engine is removed"
    record = store.read_run(run_dir)
    assert [s.step for s in record.steps] == list(range(8)), "each step once"
    assert [s.step for s in record.redone] == [3, 4]
    assert [(a.attempt, a.status) for a in record.attempts] == [(1, "failed"), (2, "ok")]
    assert (run_dir / "restarts" / "1" / "log.txt").read_text() == KILLED, "the cause is kept"


@pytest.mark.parametrize(("goes_on_at", "hosts"), [(3, ["a", "b"]), (0, ["b"])])
def test_the_record_has_exactly_the_machines_of_its_steps(
    spec: RunSpec, execute: Make, leave: Make, goes_on_at: int, hosts: list[str]
) -> None:
    """Begun anew on another node, nothing of the lost one's was measured; gone on with, its steps are in the record."""

    def on(host: str, act: Leave) -> Leave:
        def left(run_dir: Path) -> JobState:
            store.write_json(run_dir / f"machine-{host}.json", {"host": host})
            (run_dir / "loadgen-detail-0.txt").write_text(host)
            return act(run_dir)

        return left

    ended = leave(Status.OK, steps=range(goes_on_at, 8), state=JobState(running=False, exit_code=0))
    _, run_dir, _ = execute(spec, Scripted(on("a", leave(steps=range(5), log=KILLED)), on("b", ended)))
    assert [facts["host"] for facts in store.read_run(run_dir).machines] == hosts
    assert (run_dir / "restarts" / "1" / "machine-a.json").is_file()
    assert (run_dir / "restarts" / "1" / "loadgen-detail-0.txt").read_text() == "a"
    assert (run_dir / "loadgen-detail-0.txt").read_text() == "b"


def test_a_run_that_is_killed_always_fails_after_as_many_restarts_as_asked(
    spec: RunSpec, execute: Make, leave: Make, golden: object
) -> None:
    launcher = Scripted(leave(steps=range(2), log=KILLED))
    (status, error), run_dir, watcher = execute(spec, launcher)
    assert status is Status.FAILED
    assert error == golden
    assert "max_restarts" in error
    assert [left for _, left in watcher.restarts] == [1, 0]
    assert launcher.submitted == 3
    assert len(store.read_run(run_dir).attempts) == 3


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (Status.OOM, "CUDA out of memory"),
        (Status.UNSUPPORTED, "no GPU"),
        (Status.INVALID, "the loss is nan"),
        (Status.FAILED, "ValueError: wrong"),
        (Status.FAILED, "CheckpointError: the checkpoint could not be written (No space left on device)"),
    ],
)
def test_what_would_come_again_is_not_tried_again(
    spec: RunSpec, execute: Make, leave: Make, monkeypatch: pytest.MonkeyPatch, status: Status, error: str
) -> None:
    monkeypatch.setattr(controller, "advise", lambda *_: None)
    launcher = Scripted(leave(status, error))
    assert execute(spec, launcher)[0] == (status, error)
    assert launcher.submitted == 1


@pytest.mark.parametrize("status", [Status.PREEMPTED, Status.HANG])
def test_what_the_engine_took_away_is_tried_again(spec: RunSpec, execute: Make, leave: Make, status: Status) -> None:
    """Whether or not a rank had begun: the engine knows better."""
    gone = JobState(running=False, status=status, reason="the node was taken")
    launcher = Scripted(
        leave(lived=False, state=gone), leave(Status.OK, steps=range(2), state=JobState(running=False, exit_code=0))
    )
    found, _, watcher = execute(spec, launcher)
    assert found[0] is Status.OK
    assert watcher.restarts == [("the node was taken", 1)]


def test_a_job_of_which_no_rank_began_is_not_tried_again(spec: RunSpec, execute: Make, leave: Make) -> None:
    launcher = Scripted(leave(lived=False, log="No module named torch"))
    assert execute(spec, launcher)[0] == (Status.FAILED, "the job ended with exit code 1: No module named torch")
    assert launcher.submitted == 1


def refuse(run_dir: Path) -> JobState:
    raise LaunchError("the engine is away")


def test_an_engine_that_refuses_is_asked_again_only_for_a_job_it_has_taken_before(
    spec: RunSpec, execute: Make, leave: Make
) -> None:
    never = Scripted(refuse)
    assert execute(spec, never)[0] == (Status.FAILED, "the engine is away")
    assert never.submitted == 1


def test_a_refusal_between_attempts_counts_as_one_of_them(
    spec: RunSpec, execute: Make, leave: Make, golden: object
) -> None:
    ok = JobState(running=False, exit_code=0)
    launcher = Scripted(leave(steps=range(2), log=KILLED), refuse, leave(Status.OK, steps=range(4), state=ok))
    found, run_dir, watcher = execute(spec, launcher)
    assert found[0] is Status.OK
    assert [reason.partition(" (")[0] for reason, _ in watcher.restarts] == golden
    record = store.read_run(run_dir)
    assert [s.step for s in record.steps] == [0, 1, 2, 3]
    assert [a.began_at is None for a in record.attempts] == [False, True, False]


def test_no_secret_of_a_lost_attempt_is_written_down(spec: RunSpec, execute: Make, leave: Make) -> None:
    gone = JobState(running=False, status=Status.PREEMPTED, reason="token hf_abcdefghijklmnopqrstuvwxyz012345 expired")
    launcher = Scripted(leave(state=gone), leave(Status.OK, steps=range(2), state=JobState(running=False, exit_code=0)))
    _, run_dir, _ = execute(spec, launcher)
    assert "hf_" not in (run_dir / attempts.FILE).read_text()


def test_without_restarts_nothing_is_written_about_attempts(spec: RunSpec, execute: Make, leave: Make) -> None:
    launcher = Scripted(leave(steps=range(2), log=KILLED))
    (_, error), run_dir, _ = execute(replace(spec, max_restarts=0), launcher)
    assert "restarted" not in error
    assert launcher.submitted == 1
    assert not (run_dir / attempts.FILE).exists()


class Ending(Scripted):
    """Whose job never ends; being told to, a rank complains of the peer that was ended before it."""

    def __init__(self, complain: Leave, *script: Leave) -> None:
        super().__init__(*script)
        self.complain = complain

    def collect(self, handle: Mapping[str, Any], run_dir: Path) -> str | None:
        self.complain(run_dir)
        return None


@pytest.mark.parametrize("log", ["", DEATH.format(rank=1)], ids=["a peer is lost", "a rank is killed"])
@pytest.mark.parametrize(("limit", "submitted"), [("timeout_s", 1), ("stall_s", 3)])
def test_what_ranks_say_when_they_are_ended_is_not_why_the_run_ended(
    make_spec: Make, execute: Make, leave: Make, limit: str, submitted: int, log: str
) -> None:
    complaint = leave(Status.FAILED, "RuntimeError: Connection reset by peer", steps=range(2), log=log)
    launcher = Ending(complaint, leave(steps=range(2), state=JobState(running=True)))
    spec = replace(make_spec("ddp", 2), max_restarts=2)
    (status, error), _, _ = execute(replace(spec, **{limit: 0.05}), launcher)
    assert status is {"timeout_s": Status.TIMEOUT, "stall_s": Status.HANG}[limit]
    assert "Connection reset" not in error
    assert launcher.submitted == submitted, "a timeout is never tried again, a hang is"


def test_what_a_rank_said_before_the_limit_counts(make_spec: Make, execute: Make, leave: Make) -> None:
    """Its peer, which was ended afterwards, is not to blame."""
    running = JobState(running=True)
    complaint = leave(Status.FAILED, "ValueError: wrong", steps=range(2), log=DEATH.format(rank=1))
    launcher = Ending(complaint, leave(Status.FAILED, "ValueError: wrong", steps=range(2), state=running))
    spec = replace(make_spec("ddp", 2), max_restarts=2)
    (status, error), _, _ = execute(replace(spec, timeout_s=0.05), launcher)
    assert status is Status.FAILED
    assert error.endswith("ValueError: wrong")
    assert launcher.submitted == 1


class Stuck(Scripted):
    """Whose engine does not let go of a job."""

    def cancel(self, handle: Mapping[str, Any]) -> bool:  # type: ignore[override]
        return False


def test_nothing_follows_a_job_that_could_not_be_ended(
    spec: RunSpec, execute: Make, leave: Make, golden: object
) -> None:
    launcher = Stuck(leave(steps=range(2), log=KILLED))
    (status, error), _, _ = execute(spec, launcher)
    assert status is Status.FAILED
    assert error == golden
    assert launcher.submitted == 1


def test_nothing_follows_a_job_that_was_lost_with_its_engine(
    spec: RunSpec, execute: Make, leave: Make, golden: object
) -> None:
    class Lost(Scripted):
        def poll(self, handle: Mapping[str, Any]) -> JobState:
            if self.submitted == 2:
                raise LaunchError("the engine is away")
            return self.state

        def cancel(self, handle: Mapping[str, Any]) -> bool:  # type: ignore[override]
            return self.submitted == 1

    launcher = Lost(leave(steps=range(2), log=KILLED))
    (status, error), _, _ = execute(spec, launcher)
    assert status is Status.FAILED
    assert error == golden
    assert launcher.submitted == 2


def test_a_job_that_could_not_be_written_down_is_ended(
    spec: RunSpec, execute: Make, leave: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json = store.write_json

    def full(path: Path, body: Mapping[str, Any]) -> None:
        if body.get("handle"):
            raise OSError("No space left on device")
        write_json(path, body)

    monkeypatch.setattr(store, "write_json", full)
    launcher = Scripted(leave())
    with pytest.raises(OSError, match="No space"):
        execute(spec, launcher)
    assert launcher.cancelled == 1


# --- the controller itself goes away ---


@pytest.mark.parametrize("checkpoint_every", [None, 2])
def test_a_controller_elsewhere_finds_the_job_by_the_same_name(
    checkpointed: RunSpec,
    execute: Make,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    leave: Make,
    checkpoint_every: int | None,
) -> None:
    spec = replace(checkpointed, checkpoint_every=checkpoint_every)
    first = Scripted(die)
    with pytest.raises(Stopped):
        execute(spec, first)
    monkeypatch.setattr("socket.gethostname", lambda: "another-host")
    second = Lasting(leave(Status.OK, steps=range(6), state=JobState(running=False, exit_code=0)))
    execute(spec, second)
    assert second.submitted == 0
    here, there = job_name(first.specs[0], tmp_path), job_name(second.specs[0], tmp_path / "other")
    assert here == there
    plain = replace(spec, lineage=None)
    assert job_name(plain, tmp_path) != job_name(plain, tmp_path / "other"), "a plan has the path only"


def test_what_an_engine_wrote_of_a_lost_attempt_is_not_read_by_the_next(tmp_path: Path) -> None:
    for name in ("exit.txt", "home.txt", "job.sh", attempts.JOB):
        (tmp_path / name).write_text("{}")
    attempts.close(tmp_path, "failed", None)
    assert {path.name for path in tmp_path.iterdir()} == {attempts.FILE, "restarts"}


def test_an_interrupted_attempt_ended_when_it_last_wrote(tmp_path: Path) -> None:
    store.write_json(tmp_path / attempts.JOB, {"submitted_at": 1000.0, "began_at": 1010.0})
    (tmp_path / "samples-0.jsonl").write_text("")
    for name, when in ((attempts.JOB, 1010.0), ("samples-0.jsonl", 1200.0)):
        os.utime(tmp_path / name, (when, when))
    attempts.close(tmp_path, attempts.INTERRUPTED, None)
    assert attempts.ended(tmp_path)[0].ended_at == 1200.0


class Stopped(BaseException):
    """The end of a controller."""


def die(run_dir: Path) -> JobState:
    raise Stopped


@pytest.fixture
def checkpointed(make_spec: Make, monkeypatch: pytest.MonkeyPatch) -> RunSpec:
    """A run that writes checkpoints; its verdict is not what is tested."""
    monkeypatch.setattr(controller, "verdict", lambda record, reference: (Status.OK, None))
    found: RunSpec = replace(make_spec("ddp", 1, steps=6), max_restarts=1, checkpoint_every=2)
    return found


def test_a_run_with_checkpoints_is_gone_on_with_by_the_next_controller(
    checkpointed: RunSpec, execute: Make, leave: Make
) -> None:
    ok = JobState(running=False, exit_code=0)

    def interrupted(run_dir: Path) -> JobState:
        leave(steps=range(4))(run_dir)
        (run_dir / "checkpoints").mkdir()
        raise Stopped

    first = Scripted(interrupted)
    with pytest.raises(Stopped):
        execute(checkpointed, first)
    second = Scripted(leave(steps=range(4, 5), log=KILLED), leave(Status.OK, steps=range(4, 6), state=ok))
    found, run_dir, _ = execute(checkpointed, second)
    assert found[0] is Status.OK, "an interruption is no restart, so one restart was left"
    record = store.read_run(run_dir)
    assert [s.step for s in record.steps] == list(range(6))
    assert [a.status for a in record.attempts] == ["interrupted", "failed", "ok"]
    marks = {spec.lineage for spec in (*first.specs, *second.specs)}
    assert len(marks) == 1, "attempts of one launch know each other's checkpoints"
    assert marks != {None}
    assert record.started_at == record.attempts[0].submitted_at


def test_a_controller_killed_between_two_attempts_loses_none(checkpointed: RunSpec, execute: Make, leave: Make) -> None:
    with pytest.raises(Stopped):
        execute(checkpointed, Scripted(leave(steps=range(3), log=KILLED), die))
    ok = JobState(running=False, exit_code=0)
    found, run_dir, _ = execute(checkpointed, Scripted(leave(Status.OK, steps=range(2, 6), state=ok)))
    assert found[0] is Status.OK
    assert [s.step for s in store.read_run(run_dir).steps] == list(range(6))


class Lasting(Scripted):
    """Its job outlives the controller, and ends while nobody looks as the first function says."""

    def adopt(self, job: Job, handle: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        self.state = self.script[0](Path(job.argv[1]))
        return {"number": 9}


def test_a_job_that_outlived_its_controller_is_adopted_in_the_middle_of_its_attempts(
    checkpointed: RunSpec, execute: Make, leave: Make
) -> None:
    with pytest.raises(Stopped):
        execute(checkpointed, Scripted(leave(steps=range(3), log=KILLED), die))
    second = Lasting(leave(Status.OK, steps=range(2, 6), state=JobState(running=False, exit_code=0)))
    found, run_dir, _ = execute(checkpointed, second)
    assert found[0] is Status.OK
    assert second.submitted == 0, "nothing is started twice"
    assert second.cancelled == 1
    assert [a.status for a in store.read_run(run_dir).attempts] == ["failed", "ok"]


class Queued(Lasting):
    """A job that is still in its queue when it is adopted, and begins at the third look. What `status` says at each."""

    def __init__(self, out: Path, ends: Leave) -> None:
        super().__init__(ends)
        self.out, self.seen = out, list[CampaignView]()

    def adopt(self, job: Job, handle: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        self.run_dir = Path(job.argv[1])
        return {"number": 9}

    def poll(self, handle: Mapping[str, Any]) -> JobState:
        self.seen.append(read_view(self.out))
        if len(self.seen) < 3:
            return JobState(running=True, waiting="job 9 is pending: TOKEN=hf_abcdefghijklmnop")
        return JobState(running=True) if len(self.seen) == 3 else self.script[0](self.run_dir)


def test_a_job_adopted_in_its_queue_is_shown_as_waiting(
    checkpointed: RunSpec, execute: Make, leave: Make, tmp_path: Path
) -> None:
    with pytest.raises(Stopped):
        execute(checkpointed, Scripted(die))
    run_dir = tmp_path / checkpointed.experiment / checkpointed.run_id
    for path in run_dir.iterdir():
        os.utime(path, (0, 0))  # long before the controller that adopts it
    write_plan(run_dir.parent, [checkpointed])
    assert read_view(run_dir.parent).interrupted == (checkpointed.run_id,)
    second = Queued(run_dir.parent, leave(Status.OK, steps=range(6), state=JobState(running=False, exit_code=0)))
    assert execute(checkpointed, second)[0][0] is Status.OK
    adopted, waiting, *_, begun = second.seen
    assert (adopted.starting, adopted.interrupted, adopted.running) == ((checkpointed.run_id,), (), True)
    assert list(waiting.waiting) == [checkpointed.run_id]
    assert waiting.waiting[checkpointed.run_id].startswith("job 9 is pending: ")
    assert "hf_abc" not in (run_dir / "job.json").read_text() + str(waiting)
    assert (begun.waiting, begun.starting, begun.interrupted) == ({}, (checkpointed.run_id,), ())
    assert store.read_json(run_dir / "job.json")["handle"] == {"number": 9}


def test_a_sealed_run_that_is_repeated_starts_over_under_another_mark(
    checkpointed: RunSpec, execute: Make, leave: Make
) -> None:
    failed = leave(Status.FAILED, "ValueError: wrong", steps=range(2))
    first, second = Scripted(failed), Scripted(failed)
    _, run_dir, _ = execute(checkpointed, first)
    (run_dir / "checkpoints").mkdir()
    execute(checkpointed, second)
    assert first.specs[0].lineage != second.specs[0].lineage
    assert not (run_dir / "checkpoints").exists(), "nobody goes on from them"
    assert not (run_dir / "attempts" / "1" / "checkpoints").exists()


# --- whom a merged log blames ---


def merged(*lines: str) -> str:
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "log",
    [
        merged(
            "Failures:",
            "  <NO_OTHER_FAILURES>",
            "Root Cause (first observed failure):",
            "  rank      : 3 (local_rank: 1)",
            "  exitcode  : -9 (pid: 7)",
            "Failures:",
            "Root Cause (first observed failure):",
            "  rank      : 0 (local_rank: 0)",
            "  exitcode  : -15 (pid: 9)",
        ),
        merged(
            "0: Root Cause (first observed failure):",
            "1: Failures:",
            "1:   rank      : 2 (local_rank: 0)",
            "0:   rank      : 0 (local_rank: 0)",
            "1:   exitcode  : -15 (pid: 8)",
            "0:   exitcode  : -15 (pid: 9)",
            "1: Root Cause (first observed failure):",
            "1:   rank      : 3 (local_rank: 1)",
            "1:   exitcode  : -9 (pid: 7)",
        ),
        merged(
            "[pod-1] Root Cause (first observed failure):",
            "[pod-0] Root Cause (first observed failure):",
            "[pod-1]   rank      : 3 (local_rank: 1)",
            "[pod-0]   rank      : 1 (local_rank: 1)",
            "[pod-1]   exitcode  : -9 (pid: 7)",
            "[pod-0]   exitcode  : 1 (pid: 9)",
        ),
    ],
    ids=["one after the other", "labelled and mixed", "the other node noticed"],
)
def test_of_several_nodes_logs_the_rank_that_died_is_blamed(
    tmp_path: Path, make_spec: Make, make_run: Make, make_outcome: Make, log: str, golden: object
) -> None:
    spec = make_spec("ddp", 4)
    noticed = make_outcome(1, Status.FAILED, "RuntimeError: Connection closed by peer")
    run_dir = make_run(tmp_path, spec, None, outcomes=[noticed])
    (run_dir / "log.txt").write_text(log)
    _, error = judge(spec, run_dir, End(JobState(running=False)))
    assert error is not None
    assert error == golden


def test_a_rank_that_torchrun_stopped_while_it_ended_a_script_is_not_the_cause(
    tmp_path: Path, make_spec: Make, make_run: Make, make_outcome: Make
) -> None:
    spec = make_spec("ddp", 2)
    cause = make_outcome(1, Status.FAILED, "the script ended with exit code 1: ValueError: no data")
    run_dir = make_run(tmp_path, spec, None, outcomes=[cause])
    log = merged(
        "Failures:",
        "  rank      : 0 (local_rank: 0)",
        "  exitcode  : 143 (pid: 9)",
        "Root Cause (first observed failure):",
        "  rank      : 1 (local_rank: 1)",
        "  exitcode  : 1 (pid: 7)",
    )
    (run_dir / "log.txt").write_text(log)
    status, error = judge(spec, run_dir, End(JobState(running=False)))
    assert status is Status.FAILED
    assert error is not None
    assert error.endswith("the script ended with exit code 1: ValueError: no data")


def test_the_node_of_a_rank_that_was_killed_is_named(tmp_path: Path, make_spec: Make, make_run: Make) -> None:
    """By what the agents of the nodes said last, which is nobody's error."""
    spec = make_spec("ddp", 4)
    run_dir = make_run(tmp_path, spec, None, outcomes=())
    agents = "1: paceline: ranks 2-3 ran on gpu2\n0: paceline: ranks 0-1 ran on gpu1\n"
    (run_dir / "log.txt").write_text(f"{DEATH.format(rank=3)}{agents}")
    _, error = judge(spec, run_dir, End(JobState(running=False)))
    assert str(error).startswith("rank 3 on gpu2 was killed by signal 9 ")
    (run_dir / "log.txt").write_text(f"out of file handles\n{agents}")
    _, error = judge(spec, run_dir, End(JobState(running=False, exit_code=1)))
    assert error == "the job ended with exit code 1: out of file handles"


def test_an_engine_without_exit_codes_is_quoted_without_one(
    tmp_path: Path, make_spec: Make, make_run: Make, golden: object
) -> None:
    spec = make_spec("ddp", 2)
    run_dir = make_run(tmp_path, spec, None, outcomes=())
    assert judge(spec, run_dir, End(JobState(running=False)))[1] == golden


# --- what a request says ---


@pytest.mark.parametrize("workload", ["collectives", "compute", "memory", "nodes"])
def test_checkpoints_of_what_has_no_trajectory_are_refused(make_spec: Make, workload: str, golden: object) -> None:
    spec = make_spec("ddp" if workload == "memory" else None, 2, workload=workload, checkpoint_every=5)
    with pytest.raises(RequestError) as caught:
        controller.unsupported(spec)
    assert str(caught.value) == golden
    assert f"{workload}" in str(caught.value)
    assert controller.unsupported(make_spec("ddp", 2, checkpoint_every=5)) is None


def test_a_reference_writes_no_checkpoints_but_may_be_restarted(make_spec: Make) -> None:
    found = reference_of(make_spec("ddp", 2, checkpoint_every=5, max_restarts=2))
    assert (found.checkpoint_every, found.max_restarts) == (None, 2)
    assert found.run_id == reference_of(make_spec("ddp", 2)).run_id, "one reference serves both"


def test_ctrl_c_cancels_the_job_and_says_so(spec: RunSpec, execute: Make, leave: Make, golden: object) -> None:
    launcher = Scripted(leave(state=JobState(running=True)))

    def interrupt(handle: Mapping[str, Any]) -> JobState:
        raise KeyboardInterrupt

    launcher.poll = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt) as caught:
        execute(spec, launcher)
    assert str(caught.value) == golden
    assert launcher.cancelled >= 1


def test_what_is_recreated_from_a_spec_is_the_same_run(make_spec: Make) -> None:
    spec = make_spec("ddp", 2, checkpoint_every=5, max_restarts=2, lineage="a1")
    fields = recipe.fields(spec)
    assert (fields["checkpoint_every"], fields["max_restarts"]) == (5, 2)
    assert "lineage" not in fields
    assert spec.run_id == make_spec("ddp", 2, checkpoint_every=5).run_id
    assert spec.run_id != make_spec("ddp", 2).run_id
