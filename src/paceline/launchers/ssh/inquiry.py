"""Query the hosts before a job starts: are they reachable, what is installed, which GPUs, what time is it?"""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline import __version__
from paceline.errors import LaunchError
from paceline.experiment.spec import Topology
from paceline.launchers._retry import NoAnswerError
from paceline.launchers.node import clock_offsets
from paceline.launchers.ssh.hosts import Host, Options, hint, ssh_command
from paceline.launchers.ssh.sessions import Connection

# The first import from a slow disk takes long.
ANSWER_S = 60.0
EXCHANGES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The facts of one host, and its clock minus this host's as an interval."""

    facts: Mapping[str, Any]
    clock: tuple[float, float] | None

    @property
    def gpus(self) -> list[str]:
        return [str(gpu.get("name")) for gpu in self.facts.get("gpus") or ()]

    @property
    def torch(self) -> str | None:
        version = (self.facts.get("versions") or {}).get("torch")
        return None if version is None else str(version)


class Refusal(NamedTuple):
    """What is wrong with a host, how to fix it, and whether it may resolve itself within seconds."""

    meaning: str
    remedy: str
    may_pass: bool = False


# Messages of ssh, in any release -> what they mean, and the command that shows more.
_MEANINGS: tuple[tuple[str, str, str], ...] = (
    (
        r"HOST IDENTIFICATION HAS CHANGED",
        "has another host key than the known one",
        "ask its administrator, then: ssh-keygen -R {name}",
    ),
    (r"Host key verification failed", "has an unknown host key", "compare its fingerprint in: {ssh}"),
    (r"Permission denied", "rejects the key (or the user)", "try: {ssh}"),
    (r"No module named '?paceline", "has no Paceline in its Python", "try: {pip}"),
    (r"unrecognized arguments", "has another version of Paceline", "try: {pip}"),
)
# The same for problems that may pass: a server that restarts, a network or name server that is briefly unavailable.
_PASSING: tuple[tuple[str, str, str], ...] = (
    (r"Could not resolve hostname", "has a name that does not resolve here", "try: getent hosts {name}"),
    (r"Connection refused", "refuses the connection: no ssh server listens there", "try: {ssh}"),
    (r"timed out|No route to host|unreachable", "does not answer", "try: {ssh}"),
)


def ask(chosen: Options, hosts: Sequence[Host]) -> list[Answer]:
    """Query all hosts at once.

    Raises LaunchError with the reason and a command for each host that does not answer; NoAnswerError if all of these
    problems may pass.
    """
    paths = [("ssh.ssh_config", chosen.ssh_config), ("ssh.key", chosen.key)]
    for option, path in [*paths, *((f"ssh.hosts: key of {host}", host.key) for host in hosts)]:
        # Without this file, ssh would continue with other keys.
        if path and not Path(path).expanduser().exists():
            raise LaunchError(f"{option}: got {path!r}, expected a file of this host; it does not exist")
    command = ["-m", "paceline.launchers.node.agent", "--facts"]
    connections = [Connection(ssh_command(chosen, host, [host.python or chosen.python, *command])) for host in hosts]
    deadline = time.monotonic() + chosen.connect_s + ANSWER_S
    answers: list[Answer] = []
    refusals: list[tuple[Host, Refusal]] = []
    try:
        for host, connection in zip(hosts, connections, strict=True):
            answer = _answer(connection, deadline)
            if answer is None:
                refusals.append((host, _refusal(chosen, host, connection)))
            else:
                answers.append(answer)
    finally:
        for connection in connections:
            connection.end(0.0 if refusals else 5.0)
    if refusals:
        (first, why), passes = refusals[0], all(refusal.may_pass for _, refusal in refusals)
        others = "".join(f"; {host} {refusal.meaning}" for host, refusal in refusals[1:4])
        more = f"; and {len(refusals) - 4} more" if len(refusals) > 4 else ""
        raise (NoAnswerError if passes else LaunchError)(f"{first} {why.meaning}{others}{more}; {why.remedy}")
    return answers


def _answer(connection: Connection, deadline: float) -> Answer | None:
    """Return the facts of a host. A login may print other lines before them."""
    while (line := connection.await_line(deadline)) is not None:
        try:
            facts = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(facts, dict) and "paceline" in facts:
            return Answer(facts=facts, clock=_clock(connection))
    return None


def _clock(connection: Connection) -> tuple[float, float] | None:
    """Return the narrowest interval of a few exchanges: the host read its clock between request and answer."""
    intervals = []
    for _ in range(EXCHANGES):
        sent = time.time()
        connection.send(b"\n")
        line = connection.await_line(time.monotonic() + 5.0)
        try:
            host_time = float(line or "")
        except ValueError:
            break
        intervals.append((host_time - time.time(), host_time - sent))
    return min(intervals, key=lambda interval: interval[1] - interval[0], default=None)


def _refusal(chosen: Options, host: Host, connection: Connection) -> Refusal:
    code, complaints = connection.end(0.5), " ".join(connection.complaints)
    python = host.python or chosen.python
    commands = {
        "name": f"[{host.host}]:{host.port}" if host.port else host.host,
        "ssh": hint(chosen, host, "true"),
        "pip": hint(chosen, host, shlex.join([python, "-m", "pip", "install", f"paceline=={__version__}"])),
    }
    for known, may_pass in ((_MEANINGS, False), (_PASSING, True)):
        for pattern, meaning, remedy in known:
            if re.search(pattern, complaints):
                return Refusal(meaning, re.sub(r"{(\w+)}", lambda key: commands[key[1]], remedy), may_pass)
    if code in (126, 127):
        return Refusal(f"has no Python at {python!r}", f"set `python`; try: {hint(chosen, host, 'command -v python3')}")
    last = connection.complaints[-1] if connection.complaints else "it printed nothing"
    # A server with many simultaneous logins hangs up without a message.
    return Refusal(f"could not be queried (exit code {code}: {last[:200]})", f"try: {commands['ssh']}", may_pass=True)


def compare(hosts: Sequence[Host], answers: Sequence[Answer], topology: Topology) -> list[str]:
    """Raise LaunchError if the hosts cannot run this job together. Returns sentences about harmless differences."""
    for host, answer in zip(hosts, answers, strict=True):
        theirs = answer.facts["paceline"]
        if theirs != __version__:
            raise LaunchError(f"{host} has paceline {theirs}, this host has {__version__}: they must be the same")
        if answer.torch is None:
            raise LaunchError(f"{host} has no torch in its Python")
        wanted = topology.processes_per_node if topology.device == "cuda" else 0
        if wanted > len(answer.gpus):
            raise LaunchError(f"{host} has {len(answer.gpus) or 'no'} GPUs, but {wanted} processes need one each")
    if difference := _difference(hosts, answers, lambda answer: f"torch {answer.torch}"):
        raise LaunchError(f"{difference}: all hosts of a run must have the same")
    remarks = [
        _difference(hosts, answers, lambda answer: f"{len(answer.gpus)} GPUs ({', '.join(sorted(set(answer.gpus)))})"),
        _difference(hosts, answers, lambda answer: f"driver {answer.facts.get('driver')}"),
    ]
    return [remark for remark in remarks if remark]


def _difference(hosts: Sequence[Host], answers: Sequence[Answer], read: Callable[[Answer], str]) -> str | None:
    texts = [read(answer) for answer in answers]
    other = next((number for number, text in enumerate(texts) if text != texts[0]), None)
    return None if other is None else f"{hosts[0]} has {texts[0]}, {hosts[other]} has {texts[other]}"


def read_clocks(names: Sequence[str], answers: Sequence[Answer]) -> list[clock_offsets.Clock]:
    return [
        clock_offsets.Clock(node=node, host=names[node], low_s=answer.clock[0], high_s=answer.clock[1])
        for node, answer in enumerate(answers)
        if answer.clock is not None
    ]
