"""Two hosts of network namespaces, joined by veth to a bridge: agents meet over the interface that leads there, or say
within their patience why they do not. Needs root and iproute2."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from testbed import ONE_SUM
from testbed.networks import Network, why_not
from testbed.networks import network as built_network

from paceline.experiment.choices import Choice
from paceline.experiment.serving import Serving
from paceline.experiment.spec import RunSpec
from paceline.launchers._job import spec_text
from paceline.launchers.node import log_transport, placement
from paceline.results import store
from paceline.results.records import Status

MASTER = "10.78.0.1"
# In a network of its own each agent has its ports to itself.
PORT = placement.RENDEZVOUS_PORT


WHY_NOT = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with built_network(MASTER.rpartition(".")[0], 2) as built:
        # From the second host: an address whose packets are lost, and one to which no way leads.
        silent = ("ip", "neigh", "add", "10.78.0.9", "lladdr", "02:00:00:00:00:99", "dev", "eth0")
        built.inside(built.hosts[1], *silent)
        built.inside(built.hosts[1], "ip", "route", "add", "unreachable", "10.79.0.1")
        yield built


@dataclass(frozen=True)
class Agent:
    """One under way; `end` gives what it left."""

    process: subprocess.Popen[str]
    home: Path

    def end(self, patience_s: float = 200.0) -> tuple[log_transport.Receiver, str]:
        try:
            told, _ = self.process.communicate(timeout=patience_s)
        finally:
            self.process.kill()
            self.process.wait()
        receiver = log_transport.Receiver(self.home)
        return receiver, "\n".join(line for line in told.splitlines() if receiver.feed(line) is not None)


Start = Callable[..., Agent]


@pytest.fixture(scope="module")
def start(
    network: Network,
    tmp_path_factory: pytest.TempPathFactory,
    environment: Callable[..., dict[str, str]],
) -> Start:
    """An agent on one of the hosts, as any engine starts it; `home` is where its files arrive."""

    def begin(
        spec: RunSpec, node: int, *words: str, master: str = MASTER, home: Path | None = None, **more: str
    ) -> Agent:
        place = {"PACELINE_NODE_RANK": str(node), "PACELINE_NODES": "2", "PACELINE_MASTER": master}
        place |= {"PACELINE_SPEC": spec_text(spec), "PACELINE_NODE": f"node{node}", "OMP_NUM_THREADS": "1"}
        command = [
            "ip",
            "netns",
            "exec",
            network.hosts[node],
            sys.executable,
            "-m",
            "paceline.launchers.node.agent",
            "--relay",
            *words,
        ]
        process = subprocess.Popen(
            command,
            env=environment(**place, **more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return Agent(process, home or tmp_path_factory.mktemp("home"))

    return begin


def test_ranks_meet_over_the_interface_that_leads_to_the_other_host(
    start: Start, make_spec: Callable[..., RunSpec], tmp_path: Path
) -> None:
    """With nothing said about interfaces: gloo would look up the host's name and find loopback."""
    spec = make_spec(None, processes=1, nodes=2, workload=ONE_SUM, timeout_s=300.0, telemetry_hz=0.0)
    home = store.create(tmp_path, spec)
    agents = [start(spec, node, "--runner=testbed.bare", home=home) for node in (0, 1)]
    for node, agent in enumerate(agents):
        receiver, told = agent.end()
        assert receiver.arrivals[node].is_whole, told
        assert receiver.arrivals[node].exit_code == 0, told
    outcomes = store.read_outcomes(home)
    assert [(o.rank, o.host, o.status) for o in outcomes] == [(0, "node0", Status.OK), (1, "node1", Status.OK)]
    chosen = {machine["environment"].get("GLOO_SOCKET_IFNAME") for machine in store.read_machines(home)}
    assert chosen == {"eth0"}


def test_replicas_of_both_hosts_are_asked_from_the_first(
    start: Start, make_spec: Callable[..., RunSpec], tmp_path: Path
) -> None:
    """Each rank starts its own where the other host reaches it; rank 0 asks both, and every sample once."""
    spec = make_spec(
        None,
        processes=1,
        nodes=2,
        workload="inference",
        engine=Choice("testbed.replicas"),
        serving=Serving(requests=20, max_tokens=4, concurrency=4, warmup_requests=1, request_timeout_s=60.0),
        data=Choice.parse("synthetic:prompt=fixed,prompt_mean=4,answer_mean=4"),
        timeout_s=300.0,
        telemetry_hz=0.0,
    )
    home = store.create(tmp_path, spec)
    agents = [start(spec, node, "--runner=testbed.bare", home=home) for node in (0, 1)]
    for node, agent in enumerate(agents):
        receiver, told = agent.end()
        assert receiver.arrivals[node].exit_code == 0, told
    record = store.read_unsealed(home, 0.0, 0.0)
    assert [(replica.rank, replica.host) for replica in record.replicas] == [(0, "node0"), (1, "node1")]
    assert sorted(request.sample for request in record.requests) == list(range(20))
    assert {(request.replica, request.error) for request in record.requests} == {(0, None), (1, None)}
    assert {answer.replica for answer in record.answers} == {0, 1}


LOST = {
    "silent": (1, {"master": "10.78.0.9"}, "node 0 at 10.78.0.9 port {port} does not answer: a firewall"),
    "no way": (1, {"master": "10.79.0.1"}, "node 0 at 10.79.0.1 port {port} cannot be reached (No route to host)"),
    "other family": (
        1,
        {"master": "fd00::1"},
        "node 0 has the IPv6 address fd00::1, but this host has only IPv4",
    ),
    "nobody there": (1, {}, f"node 0 at {MASTER} port {{port}} refuses: nothing listens there"),
    "itself": (1, {"master": "10.78.0.2"}, "node 0 at 10.78.0.2 port {port} is an address of this host (interface"),
    "alone": (0, {}, f"node 1 did not reach node 0 (node0) at {MASTER} port {{port}} within 1 s"),
    "interface": (
        0,
        {"GLOO_SOCKET_IFNAME": "eth7"},
        "GLOO_SOCKET_IFNAME: got 'eth7', expected interfaces of this host",
    ),
}


@pytest.fixture(scope="module")
def lost(start: Start, make_spec: Callable[..., RunSpec]) -> dict[str, str]:
    """What each of the agents said that could not meet: all at once, as they mostly wait, each at a port of its own."""
    spec = make_spec(None, processes=1, nodes=2, workload="reference")
    words = ("--patience=1", "--runner=testbed.light")
    agents = {
        name: start(spec, node, *words, f"--port={PORT + 1 + number}", **more)
        for number, (name, (node, more, _)) in enumerate(LOST.items())
    }
    said = {}
    for name, agent in agents.items():
        agent.end()
        (outcome,) = store.read_outcomes(agent.home)
        assert outcome.status is Status.FAILED
        said[name] = str(outcome.error)
    return said


@pytest.mark.parametrize("name", list(LOST))
def test_an_agent_that_cannot_meet_says_why_and_what_to_try(lost: dict[str, str], name: str) -> None:
    number = list(LOST).index(name)
    assert lost[name].startswith(LOST[name][2].format(port=PORT + 1 + number))
    assert "; try" in lost[name]
