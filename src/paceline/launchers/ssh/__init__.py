"""SSH: one agent per host over the system's ssh client; nothing is left behind.

Nothing is copied: Paceline is installed on the hosts, the spec goes in through standard input, and the files of the
ranks come back as lines of output. An agent whose connection ends also ends its ranks and removes its scratch
directory. So no job outlives its controller, and a run whose controller died is run again.
"""

from __future__ import annotations

import json
import os
import shlex
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.contract import Job, JobState, may_be_lost
from paceline.errors import LaunchError
from paceline.experiment.choices import Choice
from paceline.experiment.plugins import Offer, parse_options
from paceline.experiment.spec import RunSpec
from paceline.launchers._job import agent_arguments, job_name, rank_environment, retry_once
from paceline.launchers.node import clock_offsets, placement
from paceline.launchers.ssh import hosts as ssh_hosts
from paceline.launchers.ssh.hosts import Options, hint, labels, ssh_command
from paceline.launchers.ssh.sessions import FAREWELL_S, SILENCE_S, Connection, Sessions

# Options on which no measured number depends, each with what it decides.
UNMEASURED = {
    "key": "who may log in",
    "known_hosts": "which host keys are accepted",
    "port": "where ranks rendezvous before they choose their own ports",
}
# How long agents may take to end their ranks after the connection was cut.
GRACE_S = 15.0
# Where ranks keep checkpoints, if not in the run directory.
CHECKPOINTS = "PACELINE_CHECKPOINTS"
_sessions: dict[str, Sessions] = {}


def check(spec: RunSpec) -> str | None:
    chosen = parse_options(Options, spec.launcher)
    hosts, topology = chosen.machines, spec.topology
    count = topology.processes_per_node
    if topology.nodes > len(hosts):
        return f"{topology.nodes} nodes need {topology.nodes} hosts; ssh.hosts has {len(hosts)}"
    for host in hosts[: topology.nodes]:
        if topology.device == "cuda" and host.gpus is not None and count > host.gpus:
            return f"{count} processes need {count} GPUs; {host} has {host.gpus}"
    keeps_checkpoints = chosen.shared or CHECKPOINTS in (chosen.env or ()) or CHECKPOINTS in (chosen.forward or ())
    if spec.checkpoint_every is not None and not keeps_checkpoints:
        # A rank would report this too, but only after all hosts have started theirs.
        return (
            "checkpoint_every needs a directory that all hosts share: set ssh.shared, or "
            f"ssh.env: {{{CHECKPOINTS}: /a/shared/folder}}"
        )
    return None


def offer(choice: Choice) -> Offer:
    """As many processes as the host with the fewest GPUs has; one per host if no GPUs are given."""
    hosts = parse_options(Options, choice).machines
    fewest = min(host.gpus or 0 for host in hosts)
    return Offer(device="cuda" if fewest else "cpu", processes=fewest or 1, nodes=len(hosts))


def preflight(specs: Sequence[RunSpec]) -> None:
    """Check that the hosts that every run needs answer, and are suitable for at least one run."""
    chosen = parse_options(Options, specs[0].launcher)
    _forwarded(chosen)
    hosts = chosen.machines[: min(spec.topology.nodes for spec in specs)]
    answers = retry_once(lambda: ssh_hosts.ask(chosen, hosts))
    refusals = []
    for topology in dict.fromkeys(spec.topology for spec in specs):
        try:
            ssh_hosts.compare(hosts, answers, topology)
        except LaunchError as refusal:
            refusals.append(refusal)
        else:
            return
    raise refusals[0]


def prepare(spec: RunSpec, run_dir: Path) -> Job:
    commands = agent_commands(spec, run_dir)
    others = {f"node {number}": shlex.join(words) for number, words in enumerate(commands) if number}
    # The stored spec of a resumed run is that of its first start; options such as the key may have changed since.
    settings = {"run_dir": str(run_dir), "spec": spec.to_dict()}
    return Job(argv=tuple(commands[0]), files=others, name=job_name(spec, run_dir), settings=settings)


def agent_commands(spec: RunSpec, run_dir: Path) -> list[list[str]]:
    """Return the local command for each node. The spec and all variables go through standard input instead."""
    chosen = parse_options(Options, spec.launcher)
    # The hosts may mount the shared disk under another path, so only the last two path components are kept.
    shared = Path(chosen.shared, *run_dir.parts[-2:]) if chosen.shared else None
    arguments = [*agent_arguments(port=chosen.port, shared=shared), "--spec-stdin", f"--controller-link={SILENCE_S:g}"]
    arguments += [f"--patience={chosen.patience_s:g}"]
    arguments += [f"--scratch={chosen.scratch}"] if chosen.scratch and not shared else []
    hosts = chosen.machines[: spec.topology.nodes]
    return [ssh_command(chosen, host, [host.python or chosen.python, *arguments]) for host in hosts]


def submit(job: Job) -> Mapping[str, Any]:
    """Query all hosts, then start an agent on each. Raises LaunchError if a host is unreachable or differs."""
    run_dir = Path(job.settings["run_dir"])
    spec = RunSpec.from_dict(job.settings["spec"])
    chosen = parse_options(Options, spec.launcher)
    hosts = chosen.machines[: spec.topology.nodes]
    names, attempt = labels(hosts), uuid.uuid4().hex
    variables = _environments(spec, chosen, names, attempt)
    answers = ssh_hosts.ask(chosen, hosts)
    remarks = ssh_hosts.compare(hosts, answers, spec.topology)
    clock_offsets.note(run_dir, ssh_hosts.read_clocks(names, answers))
    (run_dir / "log.txt").write_text("".join(f"paceline: {remark}\n" for remark in remarks), encoding="utf-8")
    connections = [Connection(command) for command in agent_commands(spec, run_dir)]
    for connection, env in zip(connections, variables, strict=True):
        connection.send(json.dumps({"spec": spec.to_dict(), "env": env}).encode() + b"\n")
    hints = [hint(chosen, host, "uptime") for host in hosts]
    relay, ranks = chosen.shared is None, spec.topology.processes_per_node
    sessions = Sessions(run_dir, connections, names, hints, relay, expendable=may_be_lost(spec), ranks=ranks)
    _sessions[attempt] = sessions
    return {"run_dir": str(run_dir), "attempt": attempt, "hosts": names, "pids": sessions.pids}


def _environments(spec: RunSpec, chosen: Options, names: list[str], attempt: str) -> list[dict[str, str]]:
    """Return the variables of each node: its placement, and those of the ranks."""
    shared = rank_environment(spec, chosen.threads, chosen.env)
    shared |= _forwarded(chosen) | {placement.ATTEMPT: attempt}
    hosts = chosen.machines[: spec.topology.nodes]
    shared |= {"PACELINE_NODES": str(len(hosts)), "PACELINE_MASTER": hosts[0].address or hosts[0].host}
    environments = []
    for node, host in enumerate(hosts):
        own = {"PACELINE_NODE_RANK": str(node), "PACELINE_NODE": names[node]}
        if host.interface:
            own |= {"GLOO_SOCKET_IFNAME": host.interface, "NCCL_SOCKET_IFNAME": host.interface}
        environments.append(shared | own)
    return environments


def _forwarded(chosen: Options) -> dict[str, str]:
    """Return variables of this host for the ranks. They are read now and stored nowhere."""
    absent = [name for name in chosen.forward or () if name not in os.environ]
    if absent:
        raise LaunchError(f"ssh.forward: {', '.join(absent)} is not set in this host's environment")
    return {name: os.environ[name] for name in chosen.forward or ()}


def poll(handle: Mapping[str, Any]) -> JobState:
    sessions = _sessions.get(str(handle["attempt"]))
    if sessions is None:
        # A job of an earlier controller: its agents ended with it.
        return JobState(running=False)
    sessions.listen()
    return sessions.state()


def collect(handle: Mapping[str, Any], run_dir: Path) -> str | None:
    """Ask agents that still run, because a limit was reached, to end and send their files."""
    sessions = _sessions.get(str(handle["attempt"]))
    if sessions is None:
        return "its controller has ended, and the agents with it"
    deadline = time.monotonic() + FAREWELL_S
    while sessions.is_running and time.monotonic() < deadline:
        sessions.ask_to_end()
        sessions.listen()
        time.sleep(0.05)
    return sessions.missing()


def cancel(handle: Mapping[str, Any]) -> None:
    sessions = _sessions.pop(str(handle["attempt"]), None)
    if sessions is not None:
        sessions.end(GRACE_S)
        sessions.close()
