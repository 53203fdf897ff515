"""Hosts reached by the system's ssh client: one agent on each, tied to its connection, nothing left behind.

Nothing is copied: hosts have Paceline installed, the spec goes in through standard input, what ranks leave comes back
as lines of output. An agent whose connection ends, for whatever reason, ends its ranks and removes its scratch folder;
so no job outlives its controller, and a run whose controller died is run again.
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
from paceline.launchers._retry import asked_again
from paceline.launchers._start import agent_arguments, job_name, rank_environment
from paceline.launchers.node import clock_offsets, placement
from paceline.launchers.ssh import inquiry
from paceline.launchers.ssh.connections import Connection
from paceline.launchers.ssh.crew import FAREWELL_S, SILENCE_S, Crew
from paceline.launchers.ssh.hosts import Options, hint, labels, ssh_command

# Options on which no measured number depends, each with what it decides.
UNMEASURED = {
    "key": "who may log in",
    "known_hosts": "which host keys are accepted",
    "port": "where ranks rendezvous before they choose their own ports",
}
# How long agents may take to end their ranks after the connection was cut.
GRACE_S = 15.0
# Where ranks keep checkpoints, if not in the run folder.
CHECKPOINTS = "PACELINE_CHECKPOINTS"
_crews: dict[str, Crew] = {}


def check(spec: RunSpec) -> str | None:
    chosen = parse_options(Options, spec.launcher)
    hosts, topology = chosen.machines, spec.topology
    if topology.nodes > len(hosts):
        return f"{topology.nodes} nodes need as many hosts; ssh.hosts names {len(hosts)}"
    for host in hosts[: topology.nodes]:
        if topology.device == "cuda" and host.gpus is not None and topology.processes_per_node > host.gpus:
            return f"{topology.processes_per_node} processes need as many GPUs; {host} has {host.gpus}"
    if spec.checkpoint_every is not None and not _keeps_checkpoints(chosen):
        # A rank would say so too, but only once all hosts have started theirs.
        return (
            "checkpoint_every needs a folder that all hosts share: name it by ssh.shared, or by "
            f"ssh.env: {{{CHECKPOINTS}: /a/shared/folder}}"
        )
    return None


def _keeps_checkpoints(chosen: Options) -> bool:
    return chosen.shared is not None or CHECKPOINTS in (chosen.env or ()) or CHECKPOINTS in (chosen.forward or ())


def offer(choice: Choice) -> Offer:
    """As many processes as the host with the fewest GPUs can take; one on each host where none are told of."""
    hosts = parse_options(Options, choice).machines
    fewest = min(host.gpus or 0 for host in hosts)
    return Offer(device="cuda" if fewest else "cpu", processes=fewest or 1, nodes=len(hosts))


def preflight(specs: Sequence[RunSpec]) -> None:
    """Hosts that every run needs answer, and are fit for at least one of them."""
    chosen = parse_options(Options, specs[0].launcher)
    _forwarded(chosen)
    hosts = chosen.machines[: min(spec.topology.nodes for spec in specs)]
    answers = asked_again(lambda: inquiry.ask(chosen, hosts))
    refusals = []
    for topology in dict.fromkeys(spec.topology for spec in specs):
        try:
            inquiry.compare(hosts, answers, topology)
        except LaunchError as refusal:
            refusals.append(refusal)
        else:
            return
    raise refusals[0]


def prepare(spec: RunSpec, run_dir: Path) -> Job:
    commands = agent_commands(spec, run_dir)
    others = {f"node {number}": shlex.join(words) for number, words in enumerate(commands) if number}
    name = job_name(spec, run_dir)
    # A run that goes on keeps the file of its first start, and may have been given another key since.
    settings = {"run_dir": str(run_dir), "spec": spec.to_dict()}
    return Job(argv=tuple(commands[0]), files=others, name=name, settings=settings)


def agent_commands(spec: RunSpec, run_dir: Path) -> list[list[str]]:
    """The local command for each node. The spec and all variables go through standard input, not through these."""
    chosen = parse_options(Options, spec.launcher)
    # By the folder of the experiment, not by its path here: the hosts may have the shared disk elsewhere.
    shared = Path(chosen.shared, *run_dir.parts[-2:]) if chosen.shared else None
    arguments = [*agent_arguments(port=chosen.port, shared=shared), "--spec-stdin", f"--controller-link={SILENCE_S:g}"]
    arguments += [f"--patience={chosen.patience_s:g}"]
    arguments += [f"--scratch={chosen.scratch}"] if chosen.scratch and not shared else []
    hosts = chosen.machines[: spec.topology.nodes]
    return [ssh_command(chosen, host, [host.python or chosen.python, *arguments]) for host in hosts]


def submit(job: Job) -> Mapping[str, Any]:
    """Ask all hosts, then start an agent on each. LaunchError where one cannot be reached or differs."""
    run_dir = Path(job.settings["run_dir"])
    spec = RunSpec.from_dict(job.settings["spec"])
    chosen = parse_options(Options, spec.launcher)
    hosts = chosen.machines[: spec.topology.nodes]
    names, attempt = labels(hosts), uuid.uuid4().hex
    variables = _environments(spec, chosen, names, attempt)
    answers = inquiry.ask(chosen, hosts)
    remarks = inquiry.compare(hosts, answers, spec.topology)
    clock_offsets.note(run_dir, inquiry.read_clocks(names, answers))
    (run_dir / "log.txt").write_text("".join(f"paceline: {remark}\n" for remark in remarks))
    connections = [Connection(command) for command in agent_commands(spec, run_dir)]
    for connection, env in zip(connections, variables, strict=True):
        connection.send(json.dumps({"spec": spec.to_dict(), "env": env}).encode() + b"\n")
    tries = [hint(chosen, host, "uptime") for host in hosts]
    relay, ranks = chosen.shared is None, spec.topology.processes_per_node
    _crews[attempt] = Crew(run_dir, connections, names, tries, relay, expendable=may_be_lost(spec), ranks=ranks)
    return {"run_dir": str(run_dir), "attempt": attempt, "hosts": names, "pids": _crews[attempt].pids}


def _environments(spec: RunSpec, chosen: Options, names: list[str], attempt: str) -> list[dict[str, str]]:
    """Per node: its place, and what ranks shall find."""
    shared = rank_environment(chosen.threads) | {name: str(value) for name, value in (chosen.env or {}).items()}
    shared |= _forwarded(chosen) | {placement.ATTEMPT: attempt}
    hosts = chosen.machines[: spec.topology.nodes]
    shared |= {"PACELINE_NODES": str(len(hosts)), "PACELINE_MASTER": hosts[0].address or hosts[0].host}
    found = []
    for number, host in enumerate(hosts):
        own = {"PACELINE_NODE_RANK": str(number), "PACELINE_NODE": names[number]}
        if host.interface:
            own |= {"GLOO_SOCKET_IFNAME": host.interface, "NCCL_SOCKET_IFNAME": host.interface}
        found.append(shared | own)
    return found


def _forwarded(chosen: Options) -> dict[str, str]:
    """Variables of this host that ranks get too: read now, and kept nowhere."""
    absent = [name for name in chosen.forward or () if name not in os.environ]
    if absent:
        raise LaunchError(f"ssh.forward names {', '.join(absent)}, which this host's environment does not have")
    return {name: os.environ[name] for name in chosen.forward or ()}


def poll(handle: Mapping[str, Any]) -> JobState:
    crew = _crews.get(str(handle["attempt"]))
    if crew is None:
        # A job of an earlier controller: its agents ended with it.
        return JobState(running=False)
    crew.listen()
    return crew.state()


def collect(handle: Mapping[str, Any], run_dir: Path) -> str | None:
    """Agents that still run, because a limit was reached, are asked for an end with a farewell."""
    crew = _crews.get(str(handle["attempt"]))
    if crew is None:
        return "its controller has ended, and the agents with it"
    deadline = time.monotonic() + FAREWELL_S
    while crew.is_running and time.monotonic() < deadline:
        crew.ask_to_end()
        crew.listen()
        time.sleep(0.05)
    return crew.missing()


def cancel(handle: Mapping[str, Any]) -> None:
    crew = _crews.pop(str(handle["attempt"]), None)
    if crew is not None:
        crew.end(GRACE_S)
        crew.close()
