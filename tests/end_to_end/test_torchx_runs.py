"""The TorchX component with the real package: a run by its local scheduler, and by a real Slurm on two nodes.

TorchX requires an old urllib3, so it is in an environment of its own: PACELINE_TORCHX names its program.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from testbed import slurm as testbed

from paceline.launchers.here import start
from paceline.results import store

pytestmark = pytest.mark.slow

TORCHX = shutil.which(os.environ.get("PACELINE_TORCHX", "torchx"))
COMPONENT = f"{Path(start.__file__).with_name(start.COMPONENT)}:run"
needs_torchx = pytest.mark.skipif(TORCHX is None, reason="no torchx: pip install torchx, or set PACELINE_TORCHX")


def test_the_component_prints_its_path() -> None:
    command = (sys.executable, "-m", "paceline.launchers.here.start", "--torchx-component")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{done.stdout.strip()}:run" == COMPONENT


def torchx(folder: Path, variables: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    assert TORCHX is not None
    return subprocess.run(
        [TORCHX, *words], cwd=folder, env={**variables}, capture_output=True, text=True, timeout=240, check=False
    )


def request(folder: Path, nodes: int, processes: int) -> list[str]:
    """The component with its arguments, for one small sweep of collectives."""
    sweep = "collectives:operations=all_reduce,dtypes=fp32,max_bytes=1KiB,iters=5,tournament=false,overlap=false"
    content = {"name": "e", "base": {"workload": sweep, "device": "cpu", "nodes": nodes, "processes": processes}}
    (folder / "e.yaml").write_text(yaml.safe_dump(content))
    words = ["--experiment", str(folder / "e.yaml"), "--out", str(folder / "out"), "--python", sys.executable]
    return [
        COMPONENT,
        *words,
        "--nodes",
        str(nodes),
        "--processes",
        str(processes),
        "--cpu",
        "1",
        "--options",
        "--format json",
    ]


@needs_torchx
def test_a_run_by_the_local_scheduler(tmp_path: Path, environment: Callable[..., dict[str, str]]) -> None:
    done = torchx(tmp_path, environment(), "run", "-s", "local_cwd", "--wait", "--log", *request(tmp_path, 1, 2))
    assert "SUCCEEDED" in done.stderr, done.stdout + done.stderr
    (record,), damaged = store.read_runs(tmp_path / "out" / "e")
    assert (record.status, len(record.outcomes), damaged) == ("ok", 2, [])


@needs_torchx
def test_what_slurm_would_start(tmp_path: Path, environment: Callable[..., dict[str, str]]) -> None:
    words = [*request(tmp_path, 2, 8), "--gpu", "8"]
    done = torchx(tmp_path, environment(), "run", "--dryrun", "-s", "slurm", *words)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"--nodes 2 --node-rank {rank} --processes 8 -- run" in done.stdout
    assert "--gpus-per-task=8" in done.stdout


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[testbed.Cluster]:
    if TORCHX is None:
        pytest.skip("no torchx")
    if reason := testbed.missing():
        pytest.skip(reason)
    with testbed.running(tmp_path_factory.mktemp("slurm")) as made:
        yield made


def test_a_run_by_slurm_on_two_nodes(
    tmp_path: Path,
    cluster: testbed.Cluster,
    environment: Callable[..., dict[str, str]],
    eventually: Callable[..., Any],
) -> None:
    """TorchX asks the accounting for states, which this Slurm does not have: only the results count."""
    variables = environment(**cluster.environment)
    done = torchx(tmp_path, variables, "run", "-s", "slurm", "-cfg", "partition=main", *request(tmp_path, 2, 1))
    assert "slurm://torchx/" in done.stdout, done.stderr
    (run_dir,) = eventually(lambda: [d for d in store.run_dirs(tmp_path / "out") if store.is_sealed(d)], "a sealed run")
    record = store.read_run(run_dir)
    assert record.status == "ok", record.error
    assert sorted(outcome.host for outcome in record.outcomes) == ["n1", "n2"]
