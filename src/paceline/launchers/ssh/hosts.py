"""The options of the SSH launcher: hosts as users write them, and the ssh command for each."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from paceline.errors import RequestError, require
from paceline.host.environment import is_secret
from paceline.launchers.node.placement import RENDEZVOUS_PORT

# Rejects anything that ssh could read as an option, a shell as syntax, or either as the end of a line.
_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*")
# ssh itself expands %, $ and quotes in paths.
_OWN_PATH = re.compile(r"""[^-\x00-\x1f"'%$\\\x7f][^\x00-\x1f"'%$\\\x7f]*""")
_WORD = re.compile(r"[^-\x00-\x1f\x7f][^\x00-\x1f\x7f]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WRITTEN = re.compile(r"(?:(?P<user>[^@].*)@)?(?:\[(?P<six>[^\]]+)\]|(?P<host>[^:@]*))(?::(?P<port>\d+))?")

# The connection never prompts, is not shared, and notices within a minute that the other side is gone.
_FIXED = {
    "BatchMode": "yes",
    "ClearAllForwardings": "yes",
    "ControlMaster": "no",
    "ControlPath": "none",
    "ForwardAgent": "no",
    "LogLevel": "ERROR",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "RequestTTY": "no",
    "ServerAliveCountMax": "3",
    "ServerAliveInterval": "15",
}


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
    found = _WRITTEN.fullmatch(text)
    require(found is not None, "ssh.hosts", text, "user@host:port, of which user and port are optional")
    assert found is not None
    port = found["port"]
    return Host(host=found["six"] or found["host"] or "", user=found["user"], port=int(port) if port else None)


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
        require(
            self.jump is None or _is_jump(self.jump),
            "ssh.jump",
            self.jump,
            "user@host:port, several separated by commas",
        )
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
    for name, value in {**_FIXED, "ConnectTimeout": str(int(chosen.connect_s))}.items():
        words += ["-o", f"{name}={value}"]
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
