"""The launcher `here` inside real torchrun, srun and mpirun, and inside processes that a test starts as engines do.

Faults are suffered by ranks without torch (testbed/light_rank.py).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from testbed import ONE_SUM, light_rank, twins
from testbed import slurm as testbed

from paceline.results import store
from paceline.results.records import RunRecord

pytestmark = pytest.mark.slow

# Steps of a light run take 0.5 s together; LIGHT_S is the time for all.
BASE = {"workload": "reference", "device": "cpu", "model": "tiny", "precision": "fp32", "sequence_length": 32}
LIGHT = (sys.executable, "-m", "testbed.light_rank", "paceline", "run")
# Light runs are references, which a report does not rank: it says so with this exit code.
NOTHING_RANKED = 1
# A guard against tests that hang, not a criterion.
PATIENCE_S = 240
Started = Callable[..., list[subprocess.Popen[str]]]


def write_experiment(folder: Path, **more: Any) -> Path:
    path = folder / "e.yaml"
    content = {"name": "e", "base": {**BASE, "steps": 12, **more.pop("base", {})}, **more}
    path.write_text(yaml.safe_dump(content))
    return path


def command(folder: Path, *more: str) -> list[str]:
    words = [str(folder / "e.yaml"), "--launcher", "here", "--out", str(folder / "out"), "--format", "json"]
    return [*words, *more]


def records(folder: Path) -> list[RunRecord]:
    return store.read_runs(folder / "out" / "e")[0]


@pytest.fixture
def started(tmp_path: Path, environment: Callable[..., dict[str, str]]) -> Iterator[Started]:
    """Processes with the variables of torchrun, without torchrun."""
    children: list[subprocess.Popen[str]] = []

    def start(size: int, *, ranks: Sequence[int] | None = None, **env: str) -> list[subprocess.Popen[str]]:
        for rank in range(size) if ranks is None else ranks:
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": 29500}
            variables = environment(PACELINE_RED_REPEATS="0", **{k: str(v) for k, v in own.items()}, **env)
            children.append(twins.started(light_rank.main, [*LIGHT[2:], *command(tmp_path)], variables))
        return children

    yield start
    for child in children:
        child.kill()
        child.communicate()


def ended(children: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit code and errors of each; their ranks are gone."""
    family = [each for child in children if child.poll() is None for each in psutil.Process(child.pid).children()]
    found = [(child.wait(PATIENCE_S), child.communicate()[1]) for child in children]
    _, alive = psutil.wait_procs(family, PATIENCE_S)
    assert not alive
    return found


def await_ranks(folder: Path, number: int, eventually: Callable[..., Any]) -> Path:
    """The run directory, once as many ranks are under way."""

    def under_way() -> Path | None:
        found = [path for path in store.run_dirs(folder / "out") if not store.is_sealed(path)]
        return next((path for path in found if len(store.read_progress(path)) == number), None)

    run_dir = eventually(under_way, f"{number} ranks")
    assert isinstance(run_dir, Path)
    return run_dir


def test_runs_follow_each_other_in_one_job(tmp_path: Path, started: Started) -> None:
    """A run of all processes and one of the first alone, twice each; nothing is left beside the results."""
    write_experiment(tmp_path, matrix={"processes": [1, 2]}, repeats=2)
    outcome = ended(started(2, LIGHT_S="0.2"))
    assert [code for code, _ in outcome] == [NOTHING_RANKED] * 2, outcome
    assert sorted(len(record.outcomes) for record in records(tmp_path)) == [1, 1, 2, 2]
    assert {record.status for record in records(tmp_path)} == {"ok"}
    pids = [own.pid for record in records(tmp_path) for own in record.outcomes]
    assert len(set(pids)) == len(pids), "every rank of every run is a process of its own"
    assert not list((tmp_path / "out").glob(".here*"))
    handle = store.read_json(Path(records(tmp_path)[0].path) / store.JOB)
    assert handle["launcher"] == "here"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("die:1", "rank 1 was killed by signal 9"),
        pytest.param("fail:1", "rank 1 on ", marks=pytest.mark.exhaustive),
        pytest.param("mute:1", "rank 1 ended with exit code 3", marks=pytest.mark.exhaustive),
    ],
)
def test_a_rank_that_fails_is_a_sealed_failure_and_the_next_run_goes_on(
    tmp_path: Path, started: Started, fault: str, words: str
) -> None:
    write_experiment(tmp_path, base={"processes": 2}, repeats=2)
    outcome = ended(started(2, LIGHT_FAULT=fault))
    assert [code for code, _ in outcome] == [1, 1], outcome
    assert [record.status for record in records(tmp_path)] == ["failed", "failed"]
    assert all(words in str(record.error) for record in records(tmp_path)), records(tmp_path)[0].error


@pytest.mark.exhaustive
def test_a_process_of_the_job_that_dies_ends_the_run_and_the_command(
    tmp_path: Path, started: Started, eventually: Callable[..., Any]
) -> None:
    """srun goes on without it: rank 0 has to notice. No later run could start, so none is recorded as failed."""
    write_experiment(tmp_path, base={"processes": 2}, repeats=2)
    children = started(2, LIGHT_S="60")
    await_ranks(tmp_path, 2, eventually)
    children[1].kill()
    outcome = ended(children)
    assert outcome[0][0] == 130
    assert "rank 1 of the running job on" in outcome[0][1]
    (record,) = records(tmp_path)
    assert record.status == "failed"
    assert str(record.error).startswith("rank 1: its process in the running job, number 1 on ")


@pytest.mark.parametrize("later_s", [0.0, pytest.param(0.3, marks=pytest.mark.exhaustive)])
def test_what_torchrun_does_when_it_loses_a_process_is_a_failure_too(
    tmp_path: Path, started: Started, eventually: Callable[..., Any], later_s: float
) -> None:
    """It ends all others with SIGTERM, before or after rank 0 has noticed the loss itself."""
    write_experiment(tmp_path, base={"processes": 3}, repeats=2)
    children = started(3, LIGHT_S="60")
    await_ranks(tmp_path, 3, eventually)
    children[1].kill()
    children[1].wait()
    time.sleep(later_s)
    for child in (children[0], children[2]):
        child.terminate()
    outcome = ended(children)
    assert outcome[0][0] == 130
    (record,) = records(tmp_path)
    assert record.status == "failed"
    assert "number 1 on" in str(record.error)


def test_an_interrupted_job_leaves_no_record(tmp_path: Path, started: Started, eventually: Callable[..., Any]) -> None:
    write_experiment(tmp_path, base={"processes": 2})
    children = started(2, LIGHT_S="60")
    run_dir = await_ranks(tmp_path, 2, eventually)
    children[0].send_signal(signal.SIGINT)
    outcome = ended(children)
    assert [code for code, _ in outcome] == [130, 130]
    assert "interrupted; the running job was cancelled" in outcome[0][1]
    assert outcome[1][1] == ""
    assert not store.is_sealed(run_dir)


@pytest.mark.exhaustive
def test_processes_end_with_rank_0(tmp_path: Path, started: Started, eventually: Callable[..., Any]) -> None:
    write_experiment(tmp_path, base={"processes": 2})
    children = started(2, LIGHT_S="60")
    await_ranks(tmp_path, 2, eventually)
    children[0].kill()
    assert ended(children)[1] == (1, "")


@pytest.mark.exhaustive
def test_a_run_that_hangs_is_ended_with_its_stacks(tmp_path: Path, started: Started) -> None:
    write_experiment(tmp_path, base={"processes": 2, "stall_s": 3.0})
    assert [code for code, _ in ended(started(2, LIGHT_FAULT="hang:1"))] == [1, 1]
    (record,) = records(tmp_path)
    assert record.status == "hang"
    assert "rank 1 stopped" in str(record.error)
    assert "suffer" in (Path(record.path) / "stack-1.txt").read_text()


def test_a_process_that_does_not_come_is_named(tmp_path: Path, started: Started) -> None:
    write_experiment(tmp_path, base={"processes": 2})
    for rank, words in ((0, "missing: rank 1"), (1, "got no answer from rank 0")):
        code, error = ended(started(2, ranks=[rank], LIGHT_PATIENCE_S="1")[-1:])[0]
        assert code == 2
        assert words in error
        assert error.count("\n") == 1


def test_a_wrong_experiment_ends_all_processes_with_one_sentence(tmp_path: Path, started: Started) -> None:
    write_experiment(tmp_path, base={"colour": 1})
    outcome = ended(started(2))
    assert [code for code, _ in outcome] == [2, 2]
    assert "colour" in outcome[0][1]
    assert outcome[1][1] == "", "once is enough"


# --- real engines ---


def run(*words: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=900, check=False)


@pytest.fixture
def inside_torchrun(tmp_path: Path, environment: Callable[..., dict[str, str]]) -> Callable[..., list[RunRecord]]:
    """The records of a campaign of two real ranks."""

    def start(**base: Any) -> list[RunRecord]:
        write_experiment(tmp_path, base={"processes": 2, **base})
        words = ("--nproc-per-node=2", "--log-dir", os.devnull, "-m", "paceline", "run")
        nursery = (sys.executable, "-m", "testbed.nursery", "start")
        torchrun = (*nursery, "-m", "torch.distributed.run", *words, *command(tmp_path))
        done = run(*torchrun, env=environment(PACELINE_RED_REPEATS="0"))
        assert done.returncode == 0, done.stdout + done.stderr
        return records(tmp_path)

    return start


def test_real_ranks_inside_torchrun_meet(inside_torchrun: Callable[..., list[RunRecord]]) -> None:
    (record,) = inside_torchrun(workload=ONE_SUM)
    assert (record.status, record.spec.launcher.name) == ("ok", "here")
    assert {(row.rank, row.operation, row.wrong) for row in record.collectives} == {
        (r, "all_reduce", 0) for r in (0, 1)
    }


@pytest.mark.exhaustive
def test_real_ranks_inside_torchrun_are_certified(inside_torchrun: Callable[..., list[RunRecord]]) -> None:
    found = inside_torchrun(workload="pretrain", strategy="ddp")
    assert {record.status for record in found} == {"ok"}
    launchers = {record.spec.workload.name: record.spec.launcher.name for record in found}
    assert launchers == {"reference": "here", "pretrain": "here"}


def test_ranks_inside_srun(
    tmp_path: Path, environment: Callable[..., dict[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two nodes of two tasks each. A batch script that calls it without srun is told so."""
    if (reason := testbed.missing()) is not None:
        pytest.skip(reason)
    write_experiment(tmp_path)
    with testbed.running(tmp_path_factory.mktemp("slurm")) as cluster:
        env = environment(PACELINE_RED_REPEATS="0", **cluster.environment)
        done = run("srun", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", *LIGHT, *command(tmp_path), env=env)
        alone = run("salloc", "--nodes=1", "--ntasks=2", "--quiet", *LIGHT, *command(tmp_path), env=env)
    assert done.returncode == NOTHING_RANKED, done.stdout + done.stderr
    (record,) = records(tmp_path)
    assert record.status == "ok"
    assert (record.spec.topology.nodes, record.spec.topology.processes_per_node) == (2, 2), "all of the job by default"
    assert [own.host for own in sorted(record.outcomes, key=lambda own: own.rank)] == ["n1", "n1", "n2", "n2"]
    assert alone.returncode == 2
    assert "got no running job" in alone.stderr


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun not installed: apt-get install openmpi-bin")
def test_ranks_inside_mpirun(tmp_path: Path, environment: Callable[..., dict[str, str]]) -> None:
    write_experiment(tmp_path)
    words = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2")
    done = run(*words, *LIGHT, *command(tmp_path), env=environment(PACELINE_RED_REPEATS="0"))
    assert done.returncode == NOTHING_RANKED, done.stdout + done.stderr
    (record,) = records(tmp_path)
    assert record.status == "ok"
    assert len(record.outcomes) == 2


# --- engines that start one process per node ---


@pytest.fixture
def node(tmp_path: Path, environment: Callable[..., dict[str, str]]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`paceline.launchers.here.start` with light ranks."""
    children: list[subprocess.Popen[str]] = []

    def start(*words: str, **env: str) -> subprocess.Popen[str]:
        begin = (sys.executable, "-m", "paceline.launchers.here.start", "--job", "j1", "--module", LIGHT[2], *words)
        children.append(
            subprocess.Popen(
                [*begin, "--", *LIGHT[3:], *command(tmp_path)],
                env=environment(PACELINE_RED_REPEATS="0", **env),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.communicate()


def test_one_process_of_a_node_starts_the_others(tmp_path: Path, node: Callable[..., subprocess.Popen[str]]) -> None:
    write_experiment(tmp_path, base={"processes": 2})
    child = node("--processes", "2", LIGHT_S="0.2")
    assert child.wait(PATIENCE_S) == NOTHING_RANKED, child.communicate()
    (record,) = records(tmp_path)
    assert (record.status, len(record.outcomes)) == ("ok", 2)


@pytest.mark.exhaustive
def test_the_others_of_a_node_end_with_it(
    tmp_path: Path, node: Callable[..., subprocess.Popen[str]], eventually: Callable[..., Any]
) -> None:
    write_experiment(tmp_path, base={"processes": 2})
    child = node("--processes", "2", LIGHT_S="300")
    await_ranks(tmp_path, 2, eventually)
    family = psutil.Process(child.pid).children(recursive=True)
    child.terminate()
    assert child.wait(PATIENCE_S) != 0
    _, alive = psutil.wait_procs(family, PATIENCE_S)
    assert not alive
    assert records(tmp_path) == []


def test_a_node_beyond_the_number_of_nodes_is_refused(node: Callable[..., subprocess.Popen[str]]) -> None:
    child = node("--nodes", "2", "--node-rank", "2")
    assert child.wait(PATIENCE_S) == 2
    assert "--node-rank 2: expected a number below --nodes 2" in child.communicate()[1]
