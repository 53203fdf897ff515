"""The hosts of the SSH launcher: the options, the ssh command for each, and what they answer before a job starts."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from paceline import __version__
from paceline.errors import LaunchError, RequestError, require
from paceline.experiment.spec import Topology
from paceline.host.environment import is_secret
from paceline.launchers._job import NoAnswerError
from paceline.launchers.node import clock_offsets
from paceline.launchers.node.placement import RENDEZVOUS_PORT
from paceline.launchers.ssh.sessions import Connection

# The first import from a slow disk takes long.
ANSWER_S = 60.0
EXCHANGES = 3

# Rejects anything that ssh could read as an option, a shell as syntax, or either as the end of a line.
_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*")
# ssh itself expands %, $ and quotes in paths.
_OWN_PATH = re.compile(r"""[^-\x00-\x1f"'%$\\\x7f][^\x00-\x1f"'%$\\\x7f]*""")
_WORD = re.compile(r"[^-\x00-\x1f\x7f][^\x00-\x1f\x7f]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WRITTEN = re.compile(r"(?:(?P<user>[^@].*)@)?(?:\[(?P<six>[^\]]+)\]|(?P<host>[^:@]*))(?::(?P<port>\d+))?")

# The connection never prompts, is not shared, and notices within a minute that the other side is gone.
_FIXED = (
    *("BatchMode=yes", "ClearAllForwardings=yes", "ControlMaster=no", "ControlPath=none", "ForwardAgent=no"),
    *("LogLevel=ERROR", "PermitLocalCommand=no", "RemoteCommand=none", "RequestTTY=no"),
    *("ServerAliveCountMax=3", "ServerAliveInterval=15"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine. address: how the other hosts reach it, if not by `host`. gpus: how many it has. interface: the
    network interface of its ranks. None means the option for all hosts, or the default of ssh."""

    host: str
    user: str | None = None
    port: int | None = None
    key: str | None = None
    python: str | None = None
    address: str | None = None
    gpus: int | None = None
    interface: str | None = None

    def __post_init__(self) -> None:
        _check_text("ssh.hosts: host", self.host, _HOST, "a host name or address")
        _check_text("ssh.hosts: user", self.user, _USER, "a user name")
        _check_text("ssh.hosts: key", self.key, _OWN_PATH, PATHS)
        _check_text("ssh.hosts: python", self.python, _WORD, "the path of a Python on the host")
        _check_text("ssh.hosts: address", self.address, _HOST, "a name or an address")
        _check_text("ssh.hosts: interface", self.interface, re.compile(r"[\w.^=,@-]+"), "an interface name")
        for name, least, most in (("port", 1, 65535), ("gpus", 0, 1024)):
            number = getattr(self, name)
            is_number = isinstance(number, int) and not isinstance(number, bool)
            fits = number is None or (is_number and least <= number <= most)
            require(fits, f"ssh.hosts: {name}", number, f"a whole number from {least} to {most}")

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        host = f"[{self.host}]" if ":" in self.host and self.port else self.host
        return f"{user}{host}" + (f":{self.port}" if self.port else "")

    @property
    def label(self) -> str:
        """The host name with only characters that are valid in file names."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", self.host).strip("-")


PATHS = "a path without quotes, backslash, $ and %"


def _check_text(where: str, given: object, pattern: re.Pattern[str], accepted: str) -> None:
    fits = given is None or (isinstance(given, str) and pattern.fullmatch(given) is not None)
    require(fits, where, given, accepted)


def read_host(written: object) -> Host:
    """Read `user@host:port`, `[::1]:22`, a plain IPv6 address, or a mapping.

    >>> read_host("bench@gate:2200")
    Host(host='gate', user='bench', port=2200, key=None, python=None, address=None, gpus=None, interface=None)
    """
    if isinstance(written, Mapping):
        known = [field.name for field in fields(Host)]
        unknown = [str(name) for name in written if name not in known]
        require(not unknown, "ssh.hosts", ", ".join(unknown), ", ".join(known))
        require("host" in written, "ssh.hosts", dict(written), "a mapping with host")
        return Host(**written)
    require(isinstance(written, str), "ssh.hosts", written, "user@host:port or a mapping with host")
    text = str(written)
    if text.count(":") > 1 and "[" not in text:
        user, _, host = text.rpartition("@")
        return Host(host=host, user=user or None)
    match = _WRITTEN.fullmatch(text)
    require(match is not None, "ssh.hosts", text, "user@host:port, of which user and port are optional")
    assert match is not None
    port = match["port"]
    return Host(host=match["six"] or match["host"] or "", user=match["user"], port=int(port) if port else None)


@dataclass(frozen=True)
class Options:
    """hosts: a list of `user@host:port` or mappings (host, user, port, key, python, address, gpus, interface); a run of
    fewer nodes uses the first ones.

    key: a private key. jump: a jump host, or several separated by commas. ssh_config, known_hosts: files that replace
    the user's own. connect_s: connection timeout in seconds. python: the Python of the hosts, with Paceline and torch
    installed. port: rendezvous port on the first host. patience_s: time limit of the rendezvous in seconds. shared: the
    path under which the hosts mount the results directory (`--out`), if they share it. scratch: directory on the hosts
    for the files of a running run. env: variables for the ranks. forward: names of variables of this host that ranks
    also get; their values are never stored. threads: CPU threads per process.
    """

    hosts: Any = None
    key: str | None = None
    jump: str | None = None
    ssh_config: str | None = None
    known_hosts: str | None = None
    connect_s: float = 10.0
    python: str = "python3"
    port: int = RENDEZVOUS_PORT
    patience_s: float = 120.0
    shared: str | None = None
    scratch: str | None = None
    env: Any = None
    forward: Any = None
    threads: int = 1

    def __post_init__(self) -> None:
        require(isinstance(self.hosts, list) and bool(self.hosts), "ssh.hosts", self.hosts, "a list of hosts")
        hosts = self.machines
        ends = [(host.host, host.port) for host in hosts]
        twice = [str(host) for number, host in enumerate(hosts) if ends[number] in ends[:number]]
        require(not twice, "ssh.hosts", ", ".join(twice), "each host once")
        known = [host.gpus is not None for host in hosts]
        accepted = "the number of GPUs of every host, or of none"
        require(all(known) or not any(known), "ssh.hosts: gpus", "the number of some hosts only", accepted)
        for name in ("key", "ssh_config", "known_hosts"):
            _check_text(f"ssh.{name}", getattr(self, name), _OWN_PATH, PATHS)
        for name in ("shared", "scratch"):
            path = getattr(self, name)
            _check_text(f"ssh.{name}", path, re.compile(r"/[^\x00-\x1f\x7f]*"), "an absolute path on the hosts")
        _check_text("ssh.python", self.python, _WORD, "the path of a Python on the hosts")
        require(1 <= self.connect_s <= 600, "ssh.connect_s", self.connect_s, "1 to 600 seconds")
        require(1 <= self.patience_s <= 3600, "ssh.patience_s", self.patience_s, "1 to 3600 seconds")
        require(1024 <= self.port <= 65535, "ssh.port", self.port, "a whole number from 1024 to 65535")
        require(self.threads >= 1, "ssh.threads", self.threads, "a whole number, 1 or more")
        fits = self.jump is None or _is_jump(self.jump)
        require(fits, "ssh.jump", self.jump, "user@host:port, several separated by commas")
        env = {} if self.env is None else self.env
        require(isinstance(env, dict), "ssh.env", env, "a mapping of variables to values")
        for name, value in env.items():
            where = f"ssh.env: {name}"
            require(bool(_VARIABLE.fullmatch(str(name))), "ssh.env", name, "a variable name")
            require(isinstance(value, str | int | float), where, "another value", "text or a number")
            # The value is not repeated, because error messages are stored.
            accepted = "no secret; set it on this host and name it in ssh.forward"
            require(not is_secret(str(name), str(value)), where, "a value that looks like a secret", accepted)
        names = [] if self.forward is None else self.forward
        fits = isinstance(names, list) and all(isinstance(n, str) and _VARIABLE.fullmatch(n) for n in names)
        require(fits, "ssh.forward", names, "a list of variable names")

    @property
    def machines(self) -> tuple[Host, ...]:
        return tuple(read_host(written) for written in self.hosts)


def _is_jump(written: object) -> bool:
    try:
        return isinstance(written, str) and bool([read_host(hop) for hop in written.split(",")])
    except RequestError:
        return False


def labels(hosts: tuple[Host, ...]) -> list[str]:
    """Return a unique name for each host. Several hosts may be ports of one address."""
    names = [host.label for host in hosts]
    ports = [host.port or 22 for host in hosts]
    return [n if names.count(n) == 1 else f"{n}-{port}" for n, port in zip(names, ports, strict=True)]


def ssh_command(chosen: Options, host: Host, remote: list[str]) -> list[str]:
    """Return the local command that runs a command on a host.

    Its words are quoted for the remote shell, and `--` keeps the host name from being read as an option.
    """

    def quoted(word: str) -> str:
        # For a POSIX shell; only a leading `~/` keeps its meaning.
        return f"~/{shlex.quote(word[2:])}" if word.startswith("~/") and len(word) > 2 else shlex.quote(word)

    words = ["ssh", *_access(chosen, host)]
    for option in (*_FIXED, f"ConnectTimeout={int(chosen.connect_s)}"):
        words += ["-o", option]
    words += ["-p", str(host.port)] if host.port else []
    words += ["-l", host.user] if host.user else []
    return [*words, "--", host.host, " ".join(["exec", *map(quoted, remote)])]


def _access(chosen: Options, host: Host) -> list[str]:
    words = ["-F", str(Path(chosen.ssh_config).expanduser())] if chosen.ssh_config else []
    key = host.key or chosen.key
    words += ["-i", key, "-o", "IdentitiesOnly=yes"] if key else []
    words += ["-o", f'UserKnownHostsFile="{chosen.known_hosts}"'] if chosen.known_hosts else []
    return words + (["-J", chosen.jump] if chosen.jump else [])


def hint(chosen: Options, host: Host, *remote: str) -> str:
    """Return the shortest command with which a person can reproduce the problem."""
    port = ["-p", str(host.port)] if host.port else []
    name = f"{host.user}@{host.host}" if host.user else host.host
    return shlex.join(["ssh", *_access(chosen, host), *port, name, *remote])


# --- what hosts answer before a job starts: versions, GPUs, the time ---


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
