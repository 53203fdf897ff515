"""A real Slurm of three nodes on this host: a campaign to its report, and everything that can go wrong on the way.

Faults are suffered by ranks without torch (testbed/light.py). Every folder has a name that a shell would run.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from testbed import ONE_SUM
from testbed import slurm as testbed
from testbed.observers import live_looks, seen_live

from paceline.campaign.run import controller as run
from paceline.experiment.choices import Choice
from paceline.experiment.serving import Serving
from paceline.experiment.spec import RunSpec
from paceline.launchers import _job
from paceline.launchers._job import is_past_setup
from paceline.launchers.slurm import output_files
from paceline.report.tables.one_run import record_lines
from paceline.results import store
from paceline.results.records import Status
from paceline.workloads import reference

pytestmark = pytest.mark.slow

HOSTILE = "it's $(touch never) `id` %j"
# What a process of its own does before it is `paceline`: ranks without torch on as many nodes as asked for.
LIGHT = """
import sys
from paceline import cli
from paceline.launchers import _job
from paceline.workloads import reference
_job.RUNNER, reference.check = "testbed.light", lambda spec: None
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[testbed.Cluster]:
    reason = testbed.missing()
    if reason is not None:
        pytest.skip(reason)
    with testbed.running(tmp_path_factory.mktemp("slurm")) as started:
        yield started
    assert started.processes() == []


class Witness:
    """Sees a run, and acts once when its ranks are under way."""

    def __init__(self, act: Callable[[], object] | None = None) -> None:
        self.act = act
        self.waited: list[str] = []

    def begin(self, specs: Sequence[RunSpec]) -> None: ...
    def started(self, spec: RunSpec, run_dir: Path) -> None: ...
    def advising(self, spec: RunSpec, seconds: float) -> None: ...
    def ended(self, spec: RunSpec, status: Status, error: str | None, known: bool) -> None: ...

    def waiting(self, spec: RunSpec, reason: str, seconds: float) -> None:
        self.waited.append(reason)

    def moved(self, spec: RunSpec, positions: Sequence[store.Progress]) -> None:
        if self.act is not None and len(positions) == spec.topology.world_size:
            act, self.act = self.act, None
            act()


class Bench:
    """Light runs on the cluster, in this process."""

    def __init__(self, cluster: testbed.Cluster, out: Path, make_spec: Callable[..., RunSpec]) -> None:
        self.cluster, self.out, self._make_spec = cluster, out, make_spec
        self.run_dir = out

    def spec(self, processes: int = 1, nodes: int = 2, **more: Any) -> RunSpec:
        options = {"poll_s": 0.2, **more.pop("options", {})}
        spec = self._make_spec(None, processes, nodes=nodes, **{"workload": "reference", **more})
        return replace(spec, launcher=Choice("slurm", options))

    def run(self, witness: Witness | None = None, **more: Any) -> tuple[Status, str | None]:
        spec = self.spec(**more)
        self.run_dir = self.out / spec.experiment / spec.run_id
        found = run.execute(spec, self.out, witness or Witness(), None)
        assert self.cluster.jobs() == [], "a sealed run leaves nothing in the queue"
        assert store.read_run(self.run_dir).status is found[0]
        return found

    @property
    def job_id(self) -> str:
        return str(json.loads((self.run_dir / "job.json").read_text())["handle"]["job_id"])


@pytest.fixture
def bench(
    cluster: testbed.Cluster,
    tmp_path: Path,
    make_spec: Callable[..., RunSpec],
    environment: Callable[..., dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> Bench:
    for name, value in environment(**cluster.environment).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(_job, "RUNNER", "testbed.light")
    # The real one has one process; light ranks only look like it.
    monkeypatch.setattr(reference, "check", lambda spec: None)
    monkeypatch.setenv("LIGHT_S", "0.4")
    return Bench(cluster, tmp_path / HOSTILE, make_spec)


def test_ranks_on_two_nodes_meet_and_are_reported(cluster: testbed.Cluster, campaign: Callable[..., Any]) -> None:
    """Real ranks; those of ssh and, in `make test-all`, of Slurm are started by torchrun."""
    launcher = {"name": "slurm", "poll_s": 0.3, "comment": HOSTILE}
    sizes = {"nodes": 2, "processes": 1, "global_batch": 2}
    env = {**cluster.environment, "FORKED_RUNNER": "testbed.bare"}
    found = campaign("on_slurm", {"workload": [ONE_SUM]}, env, launcher=launcher, **sizes)
    assert found.code == 0, found.stdout + found.stderr
    (record,) = found.records
    assert {outcome.host for outcome in record.outcomes} == {"n1", "n2"}
    assert {(row.rank, row.operation, row.wrong) for row in record.collectives} == {
        (r, "all_reduce", 0) for r in (0, 1)
    }
    assert [run["status"] for run in found.report["runs"]] == ["ok"]
    assert cluster.jobs() == []


@pytest.mark.exhaustive
def test_a_campaign_on_two_nodes_ends_with_a_certified_report(
    cluster: testbed.Cluster, campaign: Callable[..., Any]
) -> None:
    launcher = {"name": "slurm", "poll_s": 0.3, "comment": HOSTILE}
    small = {"nodes": 2, "processes": 1, "global_batch": 2, "steps": 3}
    found = campaign("on_slurm", {"strategy": ["ddp"]}, cluster.environment, launcher=launcher, **small)
    assert found.code == 0, found.stdout + found.stderr
    record = found.record("ddp")
    assert record.status == "ok"
    assert {outcome.host for outcome in record.outcomes} == {"n1", "n2"}
    assert [run["status"] for run in found.report["runs"]] == ["ok", "ok"]
    assert all(certificate["valid"] for certificate in found.report["certificates"])
    measured = [m for m in found.report["measurements"] if m["metric"] == "tokens_per_s"]
    assert [(m["nodes"], m["world_size"], m["launcher"]) for m in measured] == [(2, 2, "slurm")]
    assert cluster.jobs() == []


def test_a_partition_that_is_not_there_is_one_sentence_before_the_first_job(
    cluster: testbed.Cluster, campaign: Callable[..., Any], smaller: dict[str, Any]
) -> None:
    launcher = {"name": "slurm", "partition": "nope"}
    fields = {"nodes": 2, "processes": 1, "launcher": launcher}
    found = campaign("nowhere", {"strategy": ["ddp", "fsdp2"]}, cluster.environment, **smaller | fields)
    assert found.code == 2
    assert found.stderr == (
        "paceline: launcher slurm: slurm.partition: got 'nope'; Slurm says: Invalid partition name "
        "specified; expected one of main, urgent, closed, gpu; try: sinfo\n"
    )
    assert not found.directory.exists()
    assert cluster.jobs() == []


def test_hostile_names_reach_slurm_as_they_are(bench: Bench) -> None:
    comment = "a \"b\" 'c' $(touch never) `id` \\ # %j"
    shown: list[str] = []
    witness = Witness(lambda: shown.append(bench.cluster.command("scontrol", "show", "job", bench.job_id)))
    assert bench.run(witness, options={"comment": comment}) == (Status.OK, None)
    assert f"Comment={comment}" in shown[0]
    assert (bench.run_dir / "log.txt").is_file(), "Slurm's own patterns in a folder's name are no patterns"
    assert not list(bench.out.parent.rglob("never"))


@pytest.mark.parametrize("fetched", [pytest.param(False, marks=pytest.mark.exhaustive), True], ids=["folder", "disks"])
def test_without_a_shared_disk_results_travel_in_the_output(
    bench: Bench, tmp_path: Path, fetched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_files, "FETCH_S", 0.5)
    monkeypatch.setenv("LIGHT_S", "4")
    places = {"scratch" if fetched else "output": str(tmp_path)}
    with live_looks(bench.out) as looks:
        assert bench.run(options={"shared": False, **places}) == (Status.OK, None)
    assert seen_live(looks) == {"n1", "n2"}
    record = store.read_run(bench.run_dir)
    assert {(step.rank, step.step) for step in record.steps} == {(rank, step) for rank in (0, 1) for step in range(4)}
    assert [path.name for path in tmp_path.iterdir()] == [HOSTILE], "nothing is left beside the results"


def test_an_output_that_is_lost_is_known(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The controller has to see the ranks under way before their last lines: on a busy machine it is seconds late.
    monkeypatch.setenv("LIGHT_S", "12")
    witness = Witness(lambda: next(tmp_path.glob("*-node1.log")).unlink())
    status, error = bench.run(witness, options={"shared": False, "output": str(tmp_path)})
    assert (status, error) == (Status.FAILED, "results are incomplete: node 1 (n2): its log ends early")


def test_gpus_are_those_that_slurm_gives(bench: Bench) -> None:
    options = {"partition": "gpu", "setup": ["srun --ntasks=1 printenv CUDA_VISIBLE_DEVICES"]}
    assert bench.run(processes=2, nodes=1, device="cuda", options=options) == (Status.OK, None)
    assert "0,1\n" in (bench.run_dir / "log.txt").read_text()


def test_a_rank_that_is_killed_fails_the_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHT_FAULT", "die:1")
    status, error = bench.run()
    assert status is Status.FAILED
    assert re.search(r"n2: task 1|rank 1 on n2 was killed by signal 9", str(error)), error
    assert bench.cluster.processes() == []


@pytest.mark.exhaustive
def test_a_rank_that_says_why_is_heard(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHT_FAULT", "full:1")
    assert bench.run() == (Status.FAILED, "rank 1 on n2: OSError: No space left on device")


def test_a_run_that_does_not_end_is_ended(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHT_S", "600")
    status, error = bench.run(timeout_s=2.0)
    assert status is Status.TIMEOUT
    assert "did not end within 2 s" in str(error)
    assert bench.cluster.processes() == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"partition": "no such"}, "Invalid partition name specified"),
        ({"constraint": "cray"}, "Invalid feature specification"),
        ({"gres": "gpu:99"}, "Requested node configuration is not available"),
        ({"reservation": "mine"}, "Requested reservation is invalid"),
    ],
)
def test_what_slurm_refuses_is_said_in_its_words(bench: Bench, options: dict[str, Any], sentence: str) -> None:
    expected = f"Slurm rejected the job: Batch job submission failed: {sentence}"
    assert bench.run(options=options) == (Status.FAILED, expected)


def test_a_job_that_never_begins_says_why(bench: Bench) -> None:
    witness = Witness()
    status, error = bench.run(witness, options={"partition": "closed", "pending_s": 1.0})
    assert status is Status.FAILED
    assert "pending: PartitionDown (the partition is down; `sinfo` shows those that are up)" in str(error)
    assert "did not start within 1 s" in str(error)
    assert any("PartitionDown" in reason for reason in witness.waited)


@pytest.mark.exhaustive
def test_a_slurmctld_that_restarts_loses_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHT_S", "2")

    def restart() -> None:
        bench.cluster.end("slurmctld")
        bench.cluster.start_controller()

    assert bench.run(Witness(restart)) == (Status.OK, None)


@pytest.mark.exhaustive
def test_a_preempted_run_is_no_failure(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHT_S", "600")
    urgent = ("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    status, error = bench.run(Witness(lambda: bench.cluster.command(*urgent)))
    assert status is Status.PREEMPTED
    assert error == f"Slurm job {bench.job_id} was preempted by a job of higher priority (PREEMPTED)"


@pytest.mark.exhaustive
def test_a_job_put_back_into_the_queue_begins_anew(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHT_S", "1.5")

    class Impatient(Witness):
        """Slurm holds a job that was put back for two minutes; this lets it go when its first attempt has been gone for
        a while: the end of that one, told late, would count as the end of the second."""

        gone_at: float | None = None

        def waiting(self, spec: RunSpec, reason: str, seconds: float) -> None:
            super().waiting(spec, reason, seconds)
            if "BeginTime" not in reason or bench.cluster.processes():
                self.gone_at = None
            elif self.gone_at is None:
                self.gone_at = time.monotonic()
            elif time.monotonic() - self.gone_at > 2:
                bench.cluster.command("scontrol", "update", f"jobid={bench.job_id}", "starttime=now")

    witness = Impatient(lambda: bench.cluster.command("scontrol", "requeue", bench.job_id))
    assert bench.run(witness, options={"requeue": True}) == (Status.OK, None)
    aside = bench.run_dir / "attempts" / "requeued-1"
    assert (aside / "samples-0.jsonl").is_file()
    assert len(store.read_run(bench.run_dir).steps) == 8


# --- a controller of its own process


def command(file: Path) -> list[str]:
    return [sys.executable, "-c", LIGHT, "run", str(file), "--out", str(file.parent), "--format", "json"]


@pytest.fixture
def experiment(bench: Bench, experiment_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIGHT_S", "2")
    bench.out.mkdir()
    launcher = {"name": "slurm", "poll_s": 0.2}
    matrix = {"workload": ["reference"]}
    return experiment_file(bench.out, "alone", matrix, launcher=launcher, nodes=2, processes=1, global_batch=2)


def under_way(out: Path) -> Path | None:
    return next((path for path in store.run_dirs(out) if len(store.read_progress(path)) == 2), None)


def start(file: Path) -> subprocess.Popen[str]:
    heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    return subprocess.Popen(
        command(file),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed,
    )


def test_a_killed_controller_finds_its_job_again_and_starts_nothing_twice(
    bench: Bench, experiment: Path, eventually: Callable[..., Any]
) -> None:
    ended_before = (bench.cluster.root / "ended.txt").read_text().count("JobId=")
    child = start(experiment)
    bench.run_dir = eventually(lambda: under_way(bench.out), "two ranks under way")
    child.kill()
    child.communicate()
    first = bench.job_id
    assert bench.cluster.jobs() == [first], "the job outlives its controller"
    done = subprocess.run(command(experiment), capture_output=True, text=True, timeout=120, check=False)
    assert store.read_run(bench.run_dir).status == "ok", done.stdout + done.stderr
    assert bench.job_id == first
    assert not (bench.run_dir / "attempts").exists()
    ended = (bench.cluster.root / "ended.txt").read_text().count("JobId=")
    assert ended == ended_before + 1
    assert bench.cluster.jobs() == []


def test_ctrl_c_leaves_nothing_behind_and_the_next_command_starts_anew(
    bench: Bench, experiment: Path, eventually: Callable[..., Any]
) -> None:
    child = start(experiment)
    bench.run_dir = eventually(lambda: under_way(bench.out), "two ranks under way")
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 130, out + err
    assert bench.cluster.jobs() == []
    assert bench.cluster.processes() == []
    assert not store.is_sealed(bench.run_dir)
    first = bench.job_id
    done = subprocess.run(
        command(experiment),
        env={**os.environ, "LIGHT_S": "0.4"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert store.read_run(bench.run_dir).status == "ok", done.stdout + done.stderr
    assert bench.job_id != first


def test_a_node_that_disappears_ends_the_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., Any]
) -> None:
    monkeypatch.setenv("LIGHT_S", "600")
    began = time.monotonic()
    try:
        status, error = bench.run(Witness(lambda: bench.cluster.lose("n2", "unplugged")))
    finally:
        bench.cluster.start_node("n2")
        eventually(lambda: bench.cluster.states().get("n2") == "idle", "node n2 again")
    assert (status, error) == (
        Status.PREEMPTED,
        f"Slurm job {bench.job_id} lost a node; `sinfo -R` shows which and why (NODE_FAIL)",
    )
    assert time.monotonic() - began < 300, "long before the ranks would have ended"
    assert bench.cluster.processes() == []


# --- served replicas, which go on without a node


SERVED: dict[str, Any] = {
    "workload": "inference",
    "serving": Serving(requests=24, max_tokens=4, concurrency=4, warmup_requests=1, request_timeout_s=120.0),
    "data": Choice.parse("synthetic:prompt=fixed,prompt_mean=4,answer_mean=4"),
}


def dying(whose: int = 1, **how: bool) -> Choice:
    """Replicas of which one falls out while it is asked."""
    return Choice("testbed.replicas", {"dies_after": 6, "whose": whose, **how})


@pytest.fixture
def meeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are the real ones of served replicas."""
    (tmp_path / "meeting").mkdir()
    monkeypatch.setenv("LIGHT_MEETING", str(tmp_path / "meeting"))


def went_on(bench: Bench, status: Status, error: str | None) -> None:
    """Whether every sample was answered once, those of the lost replica by the other, and the record says so."""
    # A client that was late on a busy machine says so itself, and only that.
    assert status is Status.OK or str(error).startswith("client: "), error
    record = store.read_run(bench.run_dir)
    assert sorted(request.sample for request in record.requests) == list(range(24))
    assert {request.error for request in record.requests} == {None}
    assert [replica.died_ns is not None for replica in record.replicas] == [False, True]
    assert record.replicas[1].reassigned >= 1
    assert record.lost_nodes == (1,)
    assert [(outcome.rank, outcome.status) for outcome in record.outcomes] == [(0, Status.OK)]
    assert any("node 1 of 2 was lost before the end" in line for line in record_lines(record, None))
    assert bench.cluster.processes() == []


@pytest.mark.exhaustive
@pytest.mark.usefixtures("meeting")
def test_replicas_go_on_without_a_rank_that_was_killed(bench: Bench) -> None:
    went_on(bench, *bench.run(engine=dying(takes_rank=True), **SERVED))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("meeting")
def test_nothing_goes_on_without_the_rank_of_the_client(bench: Bench) -> None:
    status, error = bench.run(engine=dying(whose=0, takes_rank=True), **SERVED)
    assert status is Status.FAILED
    assert re.match(r"rank 0 on n1 was killed by signal 9", str(error)), error
    assert store.read_run(bench.run_dir).lost_nodes == ()


@pytest.mark.usefixtures("meeting")
@pytest.mark.exhaustive
def test_replicas_go_on_without_a_node_that_disappears(
    bench: Bench, tmp_path: Path, eventually: Callable[..., Any]
) -> None:
    """Nodes share no disk: what the lost one did not send is not missed."""

    class Unplug(Witness):
        def moved(self, spec: RunSpec, positions: Sequence[store.Progress]) -> None:
            if is_past_setup(bench.run_dir):
                super().moved(spec, positions)

    witness, fate = Unplug(lambda: bench.cluster.lose("n2", "unplugged")), dying(falls_silent=True)
    try:
        ended = bench.run(witness, options={"shared": False, "output": str(tmp_path)}, engine=fate, **SERVED)
    finally:
        bench.cluster.start_node("n2")
        eventually(lambda: bench.cluster.states().get("n2") == "idle", "node n2 again")
    went_on(bench, *ended)
