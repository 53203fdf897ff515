"""The launcher `here` without a job: which process this is, which processes take part in a run, what is refused."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.errors import LaunchError, RequestError
from paceline.experiment.plugins import Offer
from paceline.experiment.spec import RunSpec, Topology
from paceline.launchers import here
from paceline.launchers.here import processes_of_job
from paceline.launchers.here.processes_of_job import Member, Session, directory_of, position, seats

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_PORT": "29500"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
}


@pytest.mark.parametrize(
    ("environ", "engine"),
    [
        (TORCHRUN, "torchrun"),
        (OPENMPI, "mpirun"),
        (MPICH, "mpiexec"),
        (SRUN, "srun"),
        # The innermost starter counts: mpirun inside an allocation of Slurm, torchrun inside a step.
        ({**SRUN, **OPENMPI, "SLURM_PROCID": "0"}, "mpirun"),
        ({**SRUN, **TORCHRUN, "SLURM_PROCID": "1"}, "torchrun"),
    ],
)
def test_every_engine_says_which_process_this_is(environ: dict[str, str], engine: str) -> None:
    found = position(environ)
    assert (found.engine, found.rank, found.size, found.local_rank, found.local_size) == (engine, 5, 8, 1, 4)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0"},
        {**TORCHRUN, "RANK": "8"},
        {**TORCHRUN, "RANK": "x"},
        {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"},
    ],
)
def test_outside_of_a_job_is_one_sentence(environ: dict[str, str]) -> None:
    with pytest.raises(RequestError, match=r"^launcher here: got no running job, expected .* `torchrun .*`\.$"):
        position(environ)


def test_jobs_have_names_of_their_own() -> None:
    other = [{**SRUN, "SLURM_STEP_ID": "1"}, {**TORCHRUN, "MASTER_PORT": "29501"}, TORCHRUN]
    assert len({position(environ).job for environ in (SRUN, *other)}) == 4
    ranks = [position({**SRUN, "SLURM_PROCID": str(rank)}).job for rank in range(8)]
    assert len(set(ranks)) == 1


def members(*nodes: str, gpus: int = 0) -> dict[int, Member]:
    return {
        rank: Member(rank=rank, token="t", node=node, host=node, pid=1, began_at=0.0, gpus=gpus)
        for rank, node in enumerate(nodes)
    }


@pytest.mark.parametrize(
    ("nodes", "asked", "expected"),
    [
        ("aabb", (2, 2), {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}),
        ("aabb", (1, 2), {0: (0, 0), 1: (0, 1)}),
        ("aabb", (2, 1), {0: (0, 0), 2: (1, 0)}),
        # Numbered around the nodes in turn.
        ("abab", (2, 2), {0: (0, 0), 2: (0, 1), 1: (1, 0), 3: (1, 1)}),
        ("aabb", (1, 3), None),
        ("aabb", (3, 1), None),
        # Rank 0 has to take part.
        ("abb", (1, 2), None),
    ],
)
def test_the_first_processes_of_each_node_take_part(
    nodes: str, asked: tuple[int, int], expected: dict[int, tuple[int, int]] | None
) -> None:
    topology = Topology(device="cpu", nodes=asked[0], processes_per_node=asked[1])
    assert seats(members(*nodes).values(), topology) == expected


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    def enter(nodes: str, **more: Any) -> None:
        found = members(*nodes, **more)
        monkeypatch.setattr(here, "_session", Session(tmp_path, found[0], found, {}))
        own = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": len(nodes), "LOCAL_WORLD_SIZE": nodes.count("a")}
        for name, value in own.items():
            monkeypatch.setenv(name, str(value))

    return enter


def test_what_the_job_cannot_do_is_said(
    job: Callable[..., None], make_spec: Callable[..., RunSpec], golden: object
) -> None:
    job("aabb", gpus=1)
    assert here.offer(make_spec(launcher="here").launcher) == Offer(device="cpu", processes=2, nodes=2)
    assert here.check(make_spec("ddp", 2, nodes=2, launcher="here")) is None
    asked = [
        make_spec("ddp", 8, launcher="here"),
        make_spec("ddp", 4, launcher="here"),
        make_spec("ddp", 2, device="cuda", launcher="here"),
    ]
    assert [here.check(spec) for spec in asked] == golden
    with pytest.raises(RequestError, match=r"here\.threads"):
        here.check(make_spec(launcher="here:threads=0"))


def test_only_run_takes_part_in_a_job(make_spec: Callable[..., RunSpec]) -> None:
    with pytest.raises(LaunchError, match="`paceline run` only"):
        here.preflight([make_spec(launcher="here")])


@pytest.mark.parametrize("verb", ["run", "plan"])
def test_the_command_outside_of_a_job_ends_with_2(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*TORCHRUN, *OPENMPI, *MPICH, *SRUN):
        monkeypatch.delenv(name, raising=False)
    assert cli.main([verb, "quick", "--launcher", "here", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    """Whoever writes into it decides what the processes of the job start."""
    path = directory_of(tmp_path, position(TORCHRUN))
    assert path.stat().st_mode & 0o777 == 0o700
    path.chmod(0o777)
    with pytest.raises(RequestError, match="writable by others"):
        directory_of(tmp_path, position(TORCHRUN))


def test_a_process_on_another_host_is_gone_when_its_counter_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = members(os.uname().nodename, "elsewhere").values()
    session = Session(tmp_path, own, {0: own, 1: other}, {})
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    (tmp_path / "beat-1").write_text("1")
    assert not session.is_gone(1)
    clock[0] += processes_of_job.SILENCE_S - 1
    (tmp_path / "beat-1").write_text("2")
    assert not session.is_gone(1)
    clock[0] += processes_of_job.SILENCE_S + 1
    assert session.is_gone(1)
