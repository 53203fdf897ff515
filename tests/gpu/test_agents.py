"""Two nodes on one host, whose agents start a rank each on the same GPU and send home what it left as lines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from testbed.ports import free_port

from paceline.experiment.spec import RunSpec
from paceline.launchers._job import rank_environment, spec_text
from paceline.launchers.node import log_transport
from paceline.results import store
from paceline.results.records import Status

NODES = 2


def start(spec: RunSpec, node: int, port: int, environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    place = {"PACELINE_NODE_RANK": str(node), "PACELINE_NODES": str(NODES), "PACELINE_MASTER": "127.0.0.1"}
    shared = {"PACELINE_SHARED_GPU": "1", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "paceline.launchers.node.agent", "--relay", f"--port={port}"],
            env={**environment, **rank_environment(spec, 1), **place, **shared, "PACELINE_SPEC": spec_text(spec)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_ranks_of_two_agents_train_over_nccl(strategy: str, tmp_path: Path, make_spec: Any, environment: Any) -> None:
    spec = make_spec(strategy, 1, nodes=NODES, device="cuda", precision="bf16", timeout_s=240.0)
    run_dir, port = store.create(tmp_path, spec), free_port()
    logs = [tmp_path / f"node{node}.log" for node in range(NODES)]
    agents = [start(spec, node, port, environment(PACELINE_NODE=f"n{node}"), log) for node, log in enumerate(logs)]
    try:
        codes = [agent.wait(280) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    receiver = log_transport.Receiver(run_dir)
    rest = [line for log in logs for line in log.read_text().splitlines() if receiver.feed(line) is not None]
    assert codes == [0, 0], "\n".join(rest[-30:])
    assert receiver.missing(NODES) is None
    store.seal(run_dir, Status.OK, None, 0.0, 1.0)
    record = store.read_run(run_dir)
    assert {outcome.rank: outcome.status for outcome in record.outcomes} == {0: Status.OK, 1: Status.OK}
    assert {outcome.host for outcome in record.outcomes} == {"n0", "n1"}
    assert sum(wire.payload_bytes for wire in record.wire if wire.group_size == NODES) > 0
