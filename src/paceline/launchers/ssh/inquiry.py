"""What hosts say before a job is started: that they can be reached, what is installed, which GPUs, what time it is."""

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
from paceline.launchers._retry import SilenceError
from paceline.launchers.node import clock_offsets
from paceline.launchers.ssh.connections import Connection
from paceline.launchers.ssh.hosts import Host, Options, hint, ssh_command

# A first import from a slow disk takes its time.
ANSWER_S = 60.0
EXCHANGES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one host said of itself, and its clock: minus this host's, between low_s and high_s."""

    facts: Mapping[str, Any]
    clock: tuple[float, float] | None

    @property
    def gpus(self) -> list[str]:
        return [str(gpu.get("name")) for gpu in self.facts.get("gpus") or ()]

    @property
    def torch(self) -> str | None:
        found = (self.facts.get("versions") or {}).get("torch")
        return None if found is None else str(found)


def ask(chosen: Options, hosts: Sequence[Host]) -> list[Answer]:
    """All hosts at once. LaunchError says of each one that does not answer why, and what to try; SilenceError where
    that may pass for all of them."""
    named = [("ssh.ssh_config", chosen.ssh_config), ("ssh.key", chosen.key)]
    for option, path in [*named, *((f"ssh.hosts: key of {host}", host.key) for host in hosts)]:
        # Without it ssh would go on with keys that nobody meant.
        if path and not Path(path).expanduser().exists():
            raise LaunchError(f"{option}: {path} was given; accepted is a file of this host, which has none there")
    questions = [
        Connection(
            ssh_command(chosen, host, [host.python or chosen.python, "-m", "paceline.launchers.node.agent", "--facts"])
        )
        for host in hosts
    ]
    deadline = time.monotonic() + chosen.connect_s + ANSWER_S
    answers: list[Answer] = []
    refusals: list[tuple[Host, Refusal]] = []
    try:
        for host, question in zip(hosts, questions, strict=True):
            answer = _heard(question, deadline)
            if answer is None:
                refusals.append((host, _refusal(chosen, host, question)))
            else:
                answers.append(answer)
    finally:
        for question in questions:
            question.end(0.0 if refusals else 5.0)
    if refusals:
        (first, why), passes = refusals[0], all(refusal.may_pass for _, refusal in refusals)
        others = "".join(f"; {host} {refusal.meaning}" for host, refusal in refusals[1:4])
        more = f"; and {len(refusals) - 4} more" if len(refusals) > 4 else ""
        raise (SilenceError if passes else LaunchError)(f"{first} {why.meaning}{others}{more}; {why.remedy}")
    return answers


def _heard(question: Connection, deadline: float) -> Answer | None:
    """The line of facts among what a login may print before it."""
    while (line := question.await_line(deadline)) is not None:
        try:
            facts = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(facts, dict) and "paceline" in facts:
            return Answer(facts=facts, clock=_clock(question))
    return None


def _clock(question: Connection) -> tuple[float, float] | None:
    """The narrowest of a few exchanges: the far side answered some time between question and answer."""
    found = []
    for _ in range(EXCHANGES):
        asked = time.time()
        question.send(b"\n")
        line = question.await_line(time.monotonic() + 5.0)
        try:
            said = float(line or "")
        except ValueError:
            break
        found.append((said - time.time(), said - asked))
    return min(found, key=lambda interval: interval[1] - interval[0], default=None)


class Refusal(NamedTuple):
    """What is wrong with a host, what to do about it, and whether it may be right again in seconds."""

    meaning: str
    remedy: str
    may_pass: bool = False


# ssh's own words, in any release of it -> what they mean, and the command that shows more (`{}`: to the host).
_MEANINGS: tuple[tuple[str, str, str], ...] = (
    (
        r"HOST IDENTIFICATION HAS CHANGED",
        "has another host key than the known one",
        "ask its administrator, then: ssh-keygen -R {name}",
    ),
    (r"Host key verification failed", "has a host key that is not known here", "compare its fingerprint in: {ssh}"),
    (r"Permission denied", "refuses the key (or the user)", "try: {ssh}"),
    (r"No module named '?paceline", "has no Paceline in its Python", "try: {pip}"),
    (r"unrecognized arguments", "has another version of Paceline", "try: {pip}"),
)
# The same of what may pass: a server that restarts, a network or a name server that is away for a moment.
_PASSING: tuple[tuple[str, str, str], ...] = (
    (r"Could not resolve hostname", "has a name that does not resolve here", "try: getent hosts {name}"),
    (r"Connection refused", "refuses the connection: no ssh server listens there", "try: {ssh}"),
    (r"timed out|No route to host|unreachable", "does not answer", "try: {ssh}"),
)


def _refusal(chosen: Options, host: Host, question: Connection) -> Refusal:
    code, said = question.end(0.5), " ".join(question.complaints)
    python = host.python or chosen.python
    ways = {
        "name": f"[{host.host}]:{host.port}" if host.port else host.host,
        "ssh": hint(chosen, host, "true"),
        "pip": hint(chosen, host, shlex.join([python, "-m", "pip", "install", f"paceline=={__version__}"])),
    }
    for known, may_pass in ((_MEANINGS, False), (_PASSING, True)):
        for pattern, meaning, remedy in known:
            if re.search(pattern, said):
                return Refusal(meaning, _filled(remedy, ways), may_pass)
    if code in (126, 127):
        return Refusal(f"has no Python at {python!r}", f"set `python`; try: {hint(chosen, host, 'command -v python3')}")
    last = question.complaints[-1] if question.complaints else "it said nothing"
    # A server with many logins at once hangs up without a word.
    return Refusal(f"could not be asked (exit code {code}: {last[:200]})", f"try: {ways['ssh']}", may_pass=True)


def _filled(remedy: str, ways: Mapping[str, str]) -> str:
    return re.sub(r"{(\w+)}", lambda found: ways[found[1]], remedy)


def compare(hosts: Sequence[Host], answers: Sequence[Answer], topology: Topology) -> list[str]:
    """LaunchError where the hosts cannot do one run together; else what differs and may, in sentences."""
    for host, answer in zip(hosts, answers, strict=True):
        theirs = answer.facts["paceline"]
        if theirs != __version__:
            raise LaunchError(f"{host} has paceline {theirs}, this host {__version__}: they must be the same")
        if answer.torch is None:
            raise LaunchError(f"{host} has no torch in its Python")
        wanted = topology.processes_per_node if topology.device == "cuda" else 0
        if wanted > len(answer.gpus):
            raise LaunchError(f"{host} shows {len(answer.gpus) or 'no'} GPUs, and {wanted} processes need one each")
    if difference := _difference(hosts, answers, lambda answer: f"torch {answer.torch}"):
        raise LaunchError(f"{difference}: hosts of one run must have the same")
    told = [
        _difference(hosts, answers, lambda answer: f"{len(answer.gpus)} GPUs ({', '.join(sorted(set(answer.gpus)))})"),
        _difference(hosts, answers, lambda answer: f"driver {answer.facts.get('driver')}"),
    ]
    return [sentence for sentence in told if sentence]


def _difference(hosts: Sequence[Host], answers: Sequence[Answer], read: Callable[[Answer], str]) -> str | None:
    found = [read(answer) for answer in answers]
    other = next((number for number, text in enumerate(found) if text != found[0]), None)
    return None if other is None else f"{hosts[0]} has {found[0]}, {hosts[other]} {found[other]}"


def read_clocks(names: Sequence[str], answers: Sequence[Answer]) -> list[clock_offsets.Clock]:
    return [
        clock_offsets.Clock(node=node, host=names[node], low_s=answer.clock[0], high_s=answer.clock[1])
        for node, answer in enumerate(answers)
        if answer.clock is not None
    ]
