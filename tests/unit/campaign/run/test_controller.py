from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from testbed.instant import Instant, Watcher

from paceline.campaign.run import controller, references, supervision
from paceline.campaign.run.references import reference_of, references_of
from paceline.campaign.run.supervision import End, judge, name_stalled
from paceline.contract import Job, JobState
from paceline.errors import LaunchError, RequestError
from paceline.experiment import plugins
from paceline.experiment.choices import Choice
from paceline.experiment.plugins import parse_options
from paceline.experiment.spec import RunSpec
from paceline.results import launches, store
from paceline.results.records import MemorySample, Status
from paceline.results.store import Progress
from paceline.workloads.reference import Options

Make = Callable[..., Any]
ENDED, FAILED = End(JobState(running=False, exit_code=0)), End(JobState(running=False, exit_code=1))

DEATHS = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
paceline.workloads.worker FAILED
Failures:
[1]:
  time      : 2026-11-15_19:51:45
  host      : localhost
  rank      : {other} (local_rank: {other})
  exitcode  : {other_code} (pid: 20866)  (SIGTERM)
  error_file: <N/A>
-------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-15_19:51:45
  host      : localhost
  rank      : {root} (local_rank: {root})
  exitcode  : {code} (pid: 20867)  (SIGKILL)
  error_file: <N/A>
======================================================="""


def torchrun_says(run_dir: Path, root: int, code: int, other: int, other_code: int = -15) -> None:
    text = DEATHS.format(root=root, code=code, other=other, other_code=other_code)
    (run_dir / "log.txt").write_text(text)


@pytest.fixture
def spec(make_spec: Make) -> RunSpec:
    found: RunSpec = make_spec("ddp", 2)
    return found


@pytest.fixture
def folder(tmp_path: Path, spec: RunSpec, make_run: Make) -> Callable[..., Path]:
    def make(*outcomes: Any) -> Path:
        found: Path = make_run(tmp_path, spec, None, outcomes=outcomes)
        return found

    return make


# --- judge ---


def test_all_ranks_ok_is_ok(folder: Make, spec: RunSpec, make_outcome: Make) -> None:
    assert judge(spec, folder(make_outcome(0), make_outcome(1)), ENDED) == (Status.OK, None)


@pytest.mark.parametrize("status", [Status.FAILED, Status.OOM, Status.INVALID])
def test_the_first_rank_that_ended_badly_is_named(
    folder: Make, spec: RunSpec, make_outcome: Make, status: Status, golden: object
) -> None:
    late = make_outcome(0, Status.FAILED, "connection reset", ended_at=9.0)
    first = make_outcome(1, status, "what happened", ended_at=8.0)
    found = judge(spec, folder(late, first), FAILED)
    assert found[0] == status
    assert found[1] == golden


def test_what_is_unsupported_is_so_for_all_ranks(folder: Make, spec: RunSpec, make_outcome: Make) -> None:
    run_dir = folder(make_outcome(0, Status.UNSUPPORTED, "no GPU"), make_outcome(1, Status.UNSUPPORTED, "no GPU"))
    assert judge(spec, run_dir, FAILED) == (Status.UNSUPPORTED, "no GPU")


def test_one_process_needs_no_name(tmp_path: Path, make_spec: Make, make_run: Make, make_outcome: Make) -> None:
    alone = make_spec("ddp", 1)
    run_dir = make_run(tmp_path, alone, None, outcomes=[make_outcome(0, Status.FAILED, "why")])
    assert judge(alone, run_dir, FAILED) == (Status.FAILED, "why")


@pytest.mark.parametrize("limit", [Status.TIMEOUT, Status.HANG])
def test_a_limit_is_the_reason_unless_a_rank_gave_one(
    folder: Make, spec: RunSpec, make_outcome: Make, limit: Status
) -> None:
    end = End(JobState(running=True), limit, "the text")
    assert judge(spec, folder(), end) == (limit, "the text")
    assert judge(spec, folder(make_outcome(0)), end) == (limit, "the text")
    assert judge(spec, folder(make_outcome(0, Status.OOM, "full")), end)[0] is Status.OOM


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-9, "rank 1 was killed by signal 9"),
        (-11, "ended by signal 11 (SIGSEGV)"),
        (-35, "rank 1 was ended by signal 35"),
        (7, "rank 1 ended with exit code 7"),
    ],
)
def test_a_rank_that_died_without_a_word_is_named_not_the_peer_that_noticed(
    folder: Make, spec: RunSpec, make_outcome: Make, code: int, words: str
) -> None:
    run_dir = folder(make_outcome(0, Status.FAILED, "RuntimeError: Connection reset by peer"))
    torchrun_says(run_dir, root=1, code=code, other=0)
    status, error = judge(spec, run_dir, FAILED)
    assert status is Status.FAILED
    assert words in error
    torchrun_says(run_dir, root=0, code=1, other=1, other_code=code)
    assert words in judge(spec, run_dir, FAILED)[1], "both died within one look of torchrun"


def test_a_rank_that_torchrun_ended_is_not_to_blame(
    folder: Make, spec: RunSpec, make_outcome: Make, golden: object
) -> None:
    run_dir = folder(make_outcome(1, Status.OOM, "CUDA out of memory"))
    torchrun_says(run_dir, root=1, code=1, other=0, other_code=-15)
    found = judge(spec, run_dir, FAILED)
    assert found[0] == Status.OOM
    assert found[1] == golden
    assert "CUDA" in found[1]


def test_a_rank_ended_from_outside_is_named(folder: Make, spec: RunSpec, golden: object) -> None:
    run_dir = folder()
    torchrun_says(run_dir, root=1, code=-15, other=0, other_code=-15)
    text = judge(spec, run_dir, FAILED)[1]
    assert text == golden
    assert "15" in text
    assert "SIGTERM" in text


def test_a_job_without_outcomes_shows_its_last_line(folder: Make, spec: RunSpec, golden: object) -> None:
    run_dir = folder()
    status, error = judge(spec, run_dir, End(JobState(running=False, exit_code=3)))
    assert status == Status.FAILED
    assert error == golden
    (run_dir / "log.txt").write_text("first\nNo module named torch\n\n")
    assert judge(spec, run_dir, FAILED)[1] == golden


def test_a_rank_without_outcome_is_a_failure_even_at_exit_code_0(
    folder: Make, spec: RunSpec, make_outcome: Make
) -> None:
    assert judge(spec, folder(make_outcome(0)), ENDED)[0] is Status.FAILED


# --- who holds the others up ---


def at(rank: int, step: int, phase: str, beat: float = 0.0, pid: int | None = None) -> Progress:
    return Progress(rank, pid or os.getpid(), step, phase, beat, 0.0)


def test_a_rank_that_never_came_is_named_first(spec: RunSpec, golden: object) -> None:
    assert name_stalled([at(0, 3, "forward")], spec) == golden
    assert name_stalled([], spec) == golden


@pytest.mark.parametrize(
    ("positions", "rank"),
    [
        ([at(0, 4, "forward"), at(1, 3, "optimizer")], 1),
        ([at(0, 3, "backward"), at(1, 3, "forward")], 1),
        ([at(0, 3, "forward"), at(1, 3, "backward")], 0),
        ([at(0, 3, "backward", 5.0), at(1, 3, "backward", 4.0)], 1),
    ],
)
def test_the_rank_furthest_behind_is_named(spec: RunSpec, positions: list[Progress], rank: int, golden: object) -> None:
    text = name_stalled(positions, spec)
    assert text == golden
    assert f"{rank}" in text


def test_a_suspended_process_is_named_wherever_it_is(spec: RunSpec, golden: object) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        os.kill(child.pid, signal.SIGSTOP)
        end = time.monotonic() + 30
        while supervision._process_state(child.pid) != "stopped" and time.monotonic() < end:
            time.sleep(0.01)
        text = name_stalled([at(0, 9, "optimizer", pid=child.pid), at(1, 3, "forward")], spec)
    finally:
        child.kill()
        child.wait()
    assert text == golden
    assert "suspended" in text


# --- references ---


def test_one_reference_serves_all_runs_of_one_work(make_spec: Make) -> None:
    specs = [
        make_spec("ddp", 2, accumulation=2),
        make_spec("fsdp2", 1, accumulation=4),
        make_spec("zero:stage=3", 4, accumulation=1),
        make_spec("ddp", 2, accumulation=2, repeat=3, compile=True, bucket_mb=3.0),
        make_spec("ddp", 2, accumulation=4),
    ]
    references = references_of(specs)
    assert len(references) == 2
    assert set(references) == {s.work for s in specs}
    for work, reference in references.items():
        assert reference.work == work
        assert reference.topology.world_size == 1
        assert reference.strategy is None
        assert (reference.workload.name, reference.repeat) == ("reference", 0)
        assert not reference.training.compile
        assert controller.unsupported(reference) is None


def test_a_reference_is_named_by_the_work_not_by_whoever_asks(make_spec: Make) -> None:
    """So that a later campaign over other strategies finds the stored one."""
    names = {reference_of(make_spec(strategy, 2)).run_id for strategy in ("ddp", "fsdp2", "zero:stage=2")}
    assert len(names) == 1


def test_a_reference_covers_the_longest_run_and_at_least_what_was_requested(make_spec: Make) -> None:
    def lengths(spec: RunSpec) -> tuple[int, object]:
        return spec.steps, spec.workload.options["least"]

    assert lengths(reference_of(make_spec(steps=100, reference_steps=20))) == (100, 20)
    assert lengths(reference_of(make_spec(steps=5, reference_steps=20))) == (5, 5)
    both = references_of([make_spec("ddp", steps=5), make_spec("fsdp2", steps=50, reference_steps=20)])
    assert [lengths(r) for r in both.values()] == [(50, 20)]


@pytest.mark.parametrize(
    ("model", "length", "micro_batch"), [("gpt2-124m", 1024, 8), ("llama-8b", 4096, 1), ("llama-8b", 8192, 1)]
)
def test_a_reference_has_micro_batches_whose_logits_fit_beside_the_model(
    make_spec: Make, model: str, length: int, micro_batch: int
) -> None:
    spec = make_spec("ddp", 2, model=model, sequence_length=length, micro_batch=8, accumulation=1)
    training = reference_of(spec).training
    assert (training.micro_batch, training.accumulation) == (micro_batch, 16 // micro_batch)


@pytest.mark.parametrize(("precision", "steps", "variants"), [("fp32", 20, 1), ("fp32", 21, 2), ("bf16", 5, 4)])
def test_references_have_reseeded_copies_where_rounding_matters(
    make_spec: Make, precision: str, steps: int, variants: int
) -> None:
    spec = make_spec(precision=precision, steps=steps)
    assert reference_of(spec).workload.options["variants"] == variants


@pytest.mark.parametrize(
    ("strategy", "precision", "often"),
    [
        ("ddp", "bf16", False),
        ("mesh:tp=2", "bf16", True),
        ("mesh:cp=2", "bf16", True),
        ("mesh:tp=2", "fp32", False),
        ("mesh:pp=2", "bf16", False),
        ("ddp", "float8", True),
    ],
)
def test_copies_round_more_often_where_honest_runs_do(
    make_spec: Make, strategy: str, precision: str, often: bool
) -> None:
    spec = make_spec(strategy, 2, precision=precision)
    assert reference_of(spec).workload.options.get("rounds_often", False) is often


def test_one_run_that_rounds_more_often_is_enough_for_its_group(make_spec: Make) -> None:
    # Two ranks of one replica, and two replicas: the same global batch.
    asked = (("mesh:tp=2", 4), ("ddp", 2), ("fsdp2", 2))
    specs = [make_spec(name, 2, precision="bf16", accumulation=accumulation) for name, accumulation in asked]
    (reference,) = references_of(specs).values()
    assert reference.workload.options["rounds_often"] is True
    assert reference.workload.options["shared_words"] == "2"


def test_copies_share_the_output_layer_among_as_many_ranks_as_the_runs_of_their_group(make_spec: Make) -> None:
    specs = [make_spec(f"mesh:tp={tp}", tp, precision="bf16", accumulation=4) for tp in (4, 2)]
    (reference,) = references_of(specs).values()
    assert reference.workload.options["shared_words"] == "2+4"
    options = parse_options(Options, reference.workload)
    assert [options.head_parts(variant) for variant in range(4)] == [1, 2, 4, 2]
    assert "shared_words" not in reference_of(make_spec("mesh:cp=2", 2, precision="bf16")).workload.options
    assert "shared_words" not in reference_of(make_spec("mesh:tp=2", 2, precision="fp32")).workload.options


def test_what_cannot_run_needs_no_reference(make_spec: Make) -> None:
    assert (
        references_of([make_spec("single", 2), make_spec("ddp", 2, model="mixtral-8x7b", compile="reduce-overhead")])
        == {}
    )


def test_a_note_that_could_not_be_written_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not taken back on a full disk, it would say of a job that runs that it waits."""
    store.write_json(tmp_path / "job.json", {"handle": None})
    note = supervision.QueueNote(tmp_path)
    note.keep("job 9 is pending")

    def full(path: Path, value: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_json", full)
        note.keep(None)
    assert store.read_json(tmp_path / "job.json")["waiting"] == "job 9 is pending"
    note.keep(None)
    assert store.read_json(tmp_path / "job.json")["waiting"] is None


# --- the campaign, with a launcher that starts nothing ---


@pytest.mark.parametrize("status", list(Status))
def test_sealed_runs_are_skipped_and_retried_when_asked(
    tmp_path: Path, make_spec: Make, make_outcome: Make, make_run: Make, launcher: Make, status: Status
) -> None:
    spec = make_spec("ddp", 1)
    reference = reference_of(spec)
    make_run(tmp_path, reference, Status.OK)
    make_run(tmp_path, spec, status, "why")
    instant = launcher(lambda run_dir: store.write_outcome(run_dir, make_outcome(0, Status.OOM, "again")))
    watcher = Watcher()
    assert controller.campaign([spec], tmp_path, watcher) == [Status.OK, status]
    assert watcher.known == [True, True]
    assert instant.submitted == 0
    retried = status is not Status.OK
    assert controller.campaign([spec], tmp_path, watcher, retry=True) == [Status.OK, Status.OOM if retried else status]
    assert instant.submitted == int(retried)


def test_an_unsealed_or_damaged_run_is_run_again(
    tmp_path: Path, make_spec: Make, make_outcome: Make, make_run: Make, launcher: Make
) -> None:
    spec = make_spec("ddp", 1)
    make_run(tmp_path, reference_of(spec), Status.OK)
    run_dir = make_run(tmp_path, spec, None)
    instant = launcher(lambda path: store.write_outcome(path, make_outcome(0, Status.FAILED, "x")))
    controller.campaign([spec], tmp_path, Watcher())
    (run_dir / "status.json").write_text("{")
    controller.campaign([spec], tmp_path, Watcher())
    assert instant.submitted == 2
    assert instant.cancelled == 2
    assert sorted(path.name for path in (run_dir / "attempts").iterdir()) == ["1", "2"]


def test_what_is_unsupported_is_sealed_without_a_launch(
    tmp_path: Path, make_spec: Make, launcher: Make, golden: object
) -> None:
    instant = launcher(lambda path: None)
    assert controller.campaign([make_spec("single", 2)], tmp_path, Watcher()) == [Status.UNSUPPORTED]
    assert instant.submitted == 0
    (record,) = store.read_runs(tmp_path)[0]
    assert record.error == golden


class Closed(Instant):
    """A launcher whose engine takes nothing for now; it says so when it is asked."""

    def __init__(self, leave: Callable[[Path], None]) -> None:
        super().__init__(leave)
        self.asked: list[list[RunSpec]] = []
        self.open = False

    def preflight(self, specs: Sequence[RunSpec]) -> None:
        self.asked.append(list(specs))
        if not self.open:
            raise LaunchError("no partition of that name; try: sinfo")


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch, make_outcome: Make) -> Closed:
    found = Closed(lambda run_dir: store.write_outcome(run_dir, make_outcome(0, Status.OOM, "full")))
    load = plugins.load
    for module in (controller, references):
        monkeypatch.setattr(module, "load", lambda kind, name: found if kind == "launchers" else load(kind, name))
    return found


def test_an_engine_that_takes_nothing_is_one_sentence_and_leaves_no_trace(
    tmp_path: Path, make_spec: Make, closed: Closed, golden: object
) -> None:
    specs = [replace(make_spec("ddp", 2), launcher=Choice("slurm", {"partition": name})) for name in "ab"]
    with pytest.raises(RequestError) as caught:
        controller.campaign(specs, tmp_path / "out", Watcher())
    assert str(caught.value) == golden
    assert not (tmp_path / "out").exists()
    closed.open, closed.asked = True, []
    controller.campaign(specs, tmp_path / "out", Watcher())
    assert [{str(spec.launcher) for spec in group} for group in closed.asked] == [
        {"slurm:partition=a"},
        {"slurm:partition=b"},
    ]
    assert [spec.workload.name for spec in closed.asked[0]] == ["reference", "pretrain"], "each engine is asked once"


def test_a_slow_engine_is_reported(
    tmp_path: Path, make_spec: Make, closed: Closed, monkeypatch: pytest.MonkeyPatch, golden: object
) -> None:
    told: queue.Queue[str] = queue.Queue()
    heard: list[str] = []
    monkeypatch.setattr(controller, "SLOW_S", 0.01)
    monkeypatch.setattr(closed, "preflight", lambda specs: heard.append(told.get(timeout=60)))
    controller.campaign([replace(make_spec("ddp", 1), launcher=Choice("slurm"))], tmp_path, Watcher(), notify=told.put)
    assert heard == golden


def test_half_a_campaign_loses_nothing_when_its_engine_is_away(
    tmp_path: Path, make_spec: Make, make_run: Make, closed: Closed, golden: object
) -> None:
    done, left = make_spec("ddp", 1), make_spec("fsdp2", 1)
    make_run(tmp_path, reference_of(done), Status.OK)
    make_run(tmp_path, done, Status.OOM, "full")
    make_run(tmp_path, left, None)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(RequestError) as caught:
        controller.campaign([done, left], tmp_path, Watcher())
    assert str(caught.value) == golden
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert closed.asked == [[left]], "what is sealed needs no engine"
    assert controller.campaign([done], tmp_path, Watcher()) == [Status.OK, Status.OOM]
    closed.open = True
    assert controller.campaign([done, left], tmp_path, Watcher()) == [Status.OK, Status.OOM, Status.OOM]


class NoImage(Instant):
    """Whose jobs with these options never start, by a cause that the next one would meet too."""

    def __init__(self, leave: Callable[[Path], None]) -> None:
        super().__init__(leave)
        self.started: list[tuple[str, int]] = []

    def prepare(self, spec: RunSpec, run_dir: Path) -> Job:
        self.started.append((str(spec.launcher), spec.topology.nodes))
        return super().prepare(spec, run_dir)

    def poll(self, handle: Mapping[str, Any]) -> JobState:
        launcher, nodes = self.started[-1]
        if launcher == "slurm:partition=a" and nodes > 1:
            reason = "after 60 s 0 of 2 pods have started: ErrImagePull"
            return JobState(running=False, status=Status.FAILED, reason=reason, recurs=True)
        return super().poll(handle)


@pytest.mark.parametrize("keep_going", [False, True])
def test_a_cause_that_would_repeat_stops_the_runs_that_would_meet_it(
    tmp_path: Path, make_spec: Make, make_outcome: Make, monkeypatch: pytest.MonkeyPatch, keep_going: bool
) -> None:
    engine = NoImage(lambda run_dir: store.write_outcome(run_dir, make_outcome(0, Status.OOM, "full")))
    load = plugins.load
    for module in (controller, references):
        monkeypatch.setattr(module, "load", lambda kind, name: engine if kind == "launchers" else load(kind, name))
    sizes = [("a", 2), ("a", 4), ("b", 2), ("a", 1), ("a", 2)]
    specs = [
        replace(
            make_spec(None, processes=1, nodes=nodes, workload="collectives", steps=step),
            launcher=Choice("slurm", {"partition": name}),
        )
        for step, (name, nodes) in enumerate(sizes, 1)
    ]
    messages: list[str] = []
    statuses = controller.campaign(specs, tmp_path, Watcher(), keep_going=keep_going, notify=messages.append)
    if keep_going:
        assert len(engine.started) == len(statuses) == 5
        assert not any("not started" in message for message in messages)
        return
    assert engine.started == [("slurm:partition=a", 2), ("slurm:partition=b", 2), ("slurm:partition=a", 1)]
    assert statuses == [Status.FAILED, Status.OOM, Status.OOM]
    assert messages[-1].startswith(f"2 runs were not started: {specs[0].run_id} failed for a reason that")
    assert not (tmp_path / specs[1].experiment / specs[1].run_id).exists(), "so that the next command runs it"


class Refusing(NoImage):
    """Refuses every submission; the first time for a reason that may pass."""

    def submit(self, job: Job) -> Mapping[str, Any]:
        super().submit(job)
        if len(self.started) == 1:
            raise LaunchError("the API server does not answer (tried for 120 s)")
        raise LaunchError("cannot create jobs in namespace bench (exceeded quota: runs)", recurs=True)


def test_a_refusal_that_would_repeat_stops_the_campaign_and_one_that_may_pass_does_not(
    tmp_path: Path, make_spec: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Refusing(lambda run_dir: None)
    load = plugins.load
    for module in (controller, references):
        monkeypatch.setattr(module, "load", lambda kind, name: engine if kind == "launchers" else load(kind, name))
    specs = [make_spec(None, processes=1, nodes=2, workload="collectives", steps=step) for step in (1, 2, 3, 4)]
    messages: list[str] = []
    statuses = controller.campaign(specs, tmp_path, Watcher(), notify=messages.append)
    assert statuses == [Status.FAILED, Status.FAILED]
    assert messages[-1].startswith(f"2 runs were not started: {specs[1].run_id} failed for a reason that")


def test_a_job_of_a_dead_controller_is_collected_though_its_engine_takes_no_new_one(
    tmp_path: Path, make_spec: Make, make_run: Make, closed: Closed, monkeypatch: pytest.MonkeyPatch, golden: object
) -> None:
    """A reservation has expired since: what ran in it must not be lost."""
    spec = make_spec("ddp", 1)
    make_run(tmp_path, reference_of(spec), Status.OK)
    run_dir = make_run(tmp_path, spec, None)
    store.write_json(run_dir / "job.json", {"handle": None})
    with pytest.raises(RequestError) as caught:
        controller.campaign([spec], tmp_path, Watcher())
    assert str(caught.value) == golden

    def adopt(job: Job, handle: object) -> Mapping[str, Any]:
        closed.leave(run_dir)
        return {}

    monkeypatch.setattr(closed, "adopt", adopt, raising=False)
    closed.asked = []
    assert controller.campaign([spec], tmp_path, Watcher()) == [Status.OK, Status.OOM]
    assert (closed.asked, closed.submitted) == ([], 0)
    with pytest.raises(RequestError) as caught:
        controller.campaign([spec], tmp_path, Watcher(), retry=True)
    assert str(caught.value) == golden


def test_a_folder_in_use_is_reported_before_any_engine_is_asked(
    tmp_path: Path, make_spec: Make, closed: Closed, golden: object
) -> None:
    spec = make_spec("ddp", 1)
    with store.exclusive(tmp_path / spec.experiment), pytest.raises(RequestError) as caught:
        controller.campaign([spec], tmp_path, Watcher())
    assert str(caught.value) == golden
    assert closed.asked == []


def test_what_is_unsupported_asks_no_engine(tmp_path: Path, make_spec: Make, closed: Closed) -> None:
    assert controller.campaign([make_spec("single", 2)], tmp_path, Watcher()) == [Status.UNSUPPORTED]
    assert closed.asked == []


def test_an_engine_that_fails_later_still_gives_records(
    tmp_path: Path, make_spec: Make, closed: Closed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(job: Job) -> Mapping[str, Any]:
        raise LaunchError("slurmctld cannot be reached")

    closed.open = True
    monkeypatch.setattr(closed, "submit", gone)
    assert controller.campaign([make_spec("ddp", 1)], tmp_path, Watcher()) == [Status.FAILED, Status.FAILED]
    assert {record.error for record in store.read_runs(tmp_path)[0]} == {"slurmctld cannot be reached"}


def test_a_run_without_a_reference_is_invalid(
    tmp_path: Path,
    make_spec: Make,
    make_step: Make,
    make_outcome: Make,
    make_evidence: Make,
    launcher: Make,
    golden: object,
) -> None:
    spec = make_spec("ddp", 1)

    def leave(run_dir: Path) -> None:
        lines = [store.sample_line(make_step(0, step)) for step in range(spec.steps)]
        (run_dir / "samples-0.jsonl").write_text("".join(lines))
        store.write_outcome(run_dir, make_outcome(0, evidence=make_evidence()))

    launcher(leave)
    status, error = controller.execute(spec, tmp_path, Watcher(), None)
    assert status is Status.INVALID
    assert error is not None
    assert error == golden


def test_an_interrupt_ends_the_job_and_leaves_no_seal(tmp_path: Path, make_spec: Make, launcher: Make) -> None:
    spec = make_spec("ddp", 1)
    instant = launcher(lambda path: None)

    def interrupt(handle: object) -> JobState:
        raise KeyboardInterrupt

    instant.poll = interrupt  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        controller.campaign([spec], tmp_path, Watcher())
    assert instant.cancelled == 1
    assert not [path for path in store.run_dirs(tmp_path) if store.is_sealed(path)]


def test_sigterm_takes_the_way_of_ctrl_c() -> None:
    def work() -> list[Status]:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        return []

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        controller.interruptible(work)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_at_once_does_not_interrupt_cancelling(second: signal.Signals) -> None:
    """`timeout` signals the process and its group."""
    cancelled = []

    def work() -> list[Status]:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            os.kill(os.getpid(), second)
            cancelled.append(True)
        return []

    with pytest.raises(KeyboardInterrupt):
        controller.interruptible(work)
    assert cancelled


def test_a_signal_after_a_while_interrupts_cancelling_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "ONE_STOP_S", 0.0)
    cancelled = []

    def work() -> list[Status]:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            cancelled.append(True)
        return []

    with pytest.raises(KeyboardInterrupt):
        controller.interruptible(work)
    assert not cancelled


def test_a_folder_without_runs_is_the_users_mistake(tmp_path: Path, golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        launches.read_experiment(tmp_path)
    assert str(caught.value) == golden
    with pytest.raises(RequestError) as caught:
        launches.read_experiment(tmp_path / "absent")
    assert str(caught.value) == golden


# --- searches ---


def test_a_search_goes_on_by_its_records_and_resumes_without_repeating(
    tmp_path: Path, make_spec: Make, make_outcome: Make, launcher: Make
) -> None:
    """Micro batches above 5 find no room; no prediction, so the search doubles and then bisects."""
    asked = replace(make_spec("single", 1), workload=Choice("frontier", {"most": 64}))
    asked = replace(asked, training=replace(asked.training, micro_batch=1))

    def leave(run_dir: Path) -> None:
        size = store.read_spec(run_dir).training.micro_batch
        store.write_outcome(run_dir, make_outcome(0, Status.OK if size <= 5 else Status.OOM, None))
        sample = MemorySample(
            rank=0, moment="steps", allocated_bytes=size, reserved_bytes=None, device_bytes=None, resident_bytes=None
        )
        (run_dir / "samples-0.jsonl").write_text(store.sample_line(sample))

    instant = launcher(leave)
    statuses = controller.campaign([asked], tmp_path, Watcher())
    tried = {r.spec.training.micro_batch: r.status for r in store.read_runs(tmp_path)[0]}
    assert tried == {1: "ok", 2: "ok", 4: "ok", 8: "oom", 6: "oom", 5: "ok"}
    assert len(statuses) == instant.submitted == 6
    assert controller.campaign([asked], tmp_path, Watcher(), retry=True) == statuses
    assert instant.submitted == 6


def test_only_searching_workloads_lead_on(make_spec: Make) -> None:
    assert not controller.leads_on(make_spec("ddp", 1))
    assert controller.leads_on(replace(make_spec("ddp", 1), workload=Choice("frontier")))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("outcome-0.json", "[]"),
        ("outcome-0.json", '{"rank": 0}'),
        ("outcome-0.json", "[" * 5000),
        ("outcome-x.json", "{}"),
        ("samples-0.jsonl", '{"kind": "step"}\n{"kind": "step"}\n'),
        ("machine-n1.json", "[]"),
        ("progress-0", "x" * 168),
    ],
)
def test_whatever_a_node_leaves_the_campaign_goes_on(
    tmp_path: Path, launcher: Make, make_spec: Make, make_outcome: Make, name: str, content: str
) -> None:
    """The run of that node fails with a sentence that names the file; the next run is started all the same."""

    def leave(run_dir: Path) -> None:
        store.write_outcome(run_dir, make_outcome(0, Status.OK))
        if instant.submitted == 1:
            (run_dir / name).write_text(content)

    instant = launcher(leave)
    spec = reference_of(make_spec("ddp", 1))
    for repeat in range(2):
        status, error = controller.execute(replace(spec, repeat=repeat), tmp_path, Watcher(), None)[:2]
        if repeat == 0 and name != "progress-0":
            assert status is Status.FAILED
            assert name in str(error) or "samples" in name
    assert instant.submitted == 2
