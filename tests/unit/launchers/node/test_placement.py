"""A node's place out of every engine's own words."""

from __future__ import annotations

import pytest

from paceline.errors import RequestError
from paceline.launchers.node import placement

KUBERNETES = {"JOB_COMPLETION_INDEX": "2", "PACELINE_NODES": "4", "PACELINE_MASTER": "job-0.job"}
SLURM = {"SLURM_NODEID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "gpu[07-08]"}


@pytest.mark.parametrize(
    ("environ", "node", "nodes", "master", "engine"),
    [
        ({}, 0, 1, "127.0.0.1", "none"),
        (KUBERNETES, 2, 4, "job-0.job", "kubernetes"),
        (SLURM, 1, 2, "gpu07", "slurm"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PACELINE_MASTER": "a"}, 1, 2, "a", "mpi"),
        ({"PET_NODE_RANK": "0", "PET_NNODES": "3", "PET_MASTER_ADDR": "t-0"}, 0, 3, "t-0", "kubeflow"),
        ({**SLURM, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "m"}, 0, 2, "m", "torchrun"),
        ({"SLURM_NODEID": "1"}, 0, 1, "127.0.0.1", "none"),
    ],
)
def test_every_engine(environ: dict[str, str], node: int, nodes: int, master: str, engine: str) -> None:
    assert placement.here(environ) == placement.NodePosition(node=node, nodes=nodes, master=master, engine=engine)


def test_a_number_beyond_the_job_is_refused(golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        placement.here({**KUBERNETES, "JOB_COMPLETION_INDEX": "4"})
    assert str(caught.value) == golden


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-4]", "n1"),
        ("gpu[003,007-009],login", "gpu003"),
        ("a1,b[1-2]", "a1"),
        ("rack[1-2]-gpu", "rack1-gpu"),
    ],
)
def test_first_host(nodelist: str, first: str) -> None:
    assert placement.first_host(nodelist) == first


def test_the_name_operators_use() -> None:
    assert placement.node_name({"PACELINE_NODE": "gpu-7", "SLURMD_NODENAME": "n1"}) == "gpu-7"
    assert placement.node_name({"SLURMD_NODENAME": "n1"}) == "n1"
