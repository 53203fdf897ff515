"""Hosts as users write them, and the command of the ssh client that leads to each."""

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

# Nothing that ssh could take for an option, a shell for a word of its own, or either for the end of a line.
_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*")
# ssh reads paths of its options itself: it expands %, $ and quotes.
_OWN_PATH = re.compile(r"""[^-\x00-\x1f"'%$\\\x7f][^\x00-\x1f"'%$\\\x7f]*""")
_WORD = re.compile(r"[^-\x00-\x1f\x7f][^\x00-\x1f\x7f]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WRITTEN = re.compile(r"(?:(?P<user>[^@].*)@)?(?:\[(?P<six>[^\]]+)\]|(?P<host>[^:@]*))(?::(?P<port>\d+))?")

# A connection that answers no questions, is nobody else's, and notices within a minute that the other side is gone.
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
    """One machine. address: how the other hosts reach it, where that is not `host`. gpus: how many it has. interface:
    over which its ranks talk. What is None is as the options for all hosts, or as ssh, decides."""

    host: str
    user: str | None = None
    port: int | None = None
    key: str | None = None
    python: str | None = None
    address: str | None = None
    gpus: int | None = None
    interface: str | None = None

    def __post_init__(self) -> None:
        _check_text("ssh.hosts: host", self.host, _HOST, "a host's name or address")
        _check_text("ssh.hosts: user", self.user, _USER, "a user's name")
        _check_text("ssh.hosts: key", self.key, _OWN_PATH, PATHS)
        _check_text("ssh.hosts: python", self.python, _WORD, "the path of a Python on the host")
        _check_text("ssh.hosts: address", self.address, _HOST, "a name or an address")
        _check_text("ssh.hosts: interface", self.interface, re.compile(r"[\w.^=,@-]+"), "an interface's name")
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
        """The host's name as far as names of files can hold it."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", self.host).strip("-")


PATHS = "a path without quotes, backslash, $ and %"


def _check_text(where: str, given: object, pattern: re.Pattern[str], accepted: str) -> None:
    fits = given is None or (isinstance(given, str) and pattern.fullmatch(given) is not None)
    require(fits, where, given, accepted)


def read_host(written: object) -> Host:
    """`user@host:port`, `[::1]:22`, an IPv6 address alone, or a mapping."""
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
    require(found is not None, "ssh.hosts", text, "user@host:port, each but the host optional")
    assert found is not None
    port = found["port"]
    return Host(host=found["six"] or found["host"] or "", user=found["user"], port=int(port) if port else None)


@dataclass(frozen=True)
class Options:
    """hosts: one after the other, `user@host:port` or a mapping (host, user, port, key, python, address, gpus,
    interface); a run of fewer nodes uses the first ones.

    key: a private key. jump: a host to go through, or several by commas. ssh_config, known_hosts: files for the ssh
    client in the place of the user's own. connect_s: seconds to wait for a connection. python: the Python of the hosts,
    with Paceline and torch installed. port: where ranks meet on the first host. patience_s: seconds in which all nodes
    must have met. shared: the path under which the hosts see the results folder (`--out`), where they share it.
    scratch: where on the hosts a run's files are kept for as long as it runs. env: variables for the ranks. forward:
    names of variables of this host, which ranks get too and no file holds. threads: CPU threads of each process.
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
        found = self.machines
        twice = [
            str(h) for number, h in enumerate(found) if (h.host, h.port) in [(o.host, o.port) for o in found[:number]]
        ]
        require(not twice, "ssh.hosts", ", ".join(twice), "each host once")
        known = [host.gpus is not None for host in found]
        require(all(known) or not any(known), "ssh.hosts: gpus", "some", "the number of every host, or of none")
        for name in ("key", "ssh_config", "known_hosts"):
            _check_text(f"ssh.{name}", getattr(self, name), _OWN_PATH, PATHS)
        for name in ("shared", "scratch"):
            path = getattr(self, name)
            _check_text(f"ssh.{name}", path, re.compile(r"/[^\x00-\x1f\x7f]*"), "an absolute path on the hosts")
        _check_text("ssh.python", self.python, _WORD, "the path of a Python on the hosts")
        require(1 <= self.connect_s <= 600, "ssh.connect_s", self.connect_s, "seconds from 1 to 600")
        require(1 <= self.patience_s <= 3600, "ssh.patience_s", self.patience_s, "seconds from 1 to 3600")
        require(1024 <= self.port <= 65535, "ssh.port", self.port, "a whole number from 1024 to 65535")
        require(self.threads >= 1, "ssh.threads", self.threads, "a whole number from 1")
        require(self.jump is None or _is_way(self.jump), "ssh.jump", self.jump, "user@host:port, several by commas")
        self._check_variables()

    def _check_variables(self) -> None:
        env = {} if self.env is None else self.env
        require(isinstance(env, dict), "ssh.env", env, "variables with their values")
        for name, value in env.items():
            require(bool(_VARIABLE.fullmatch(str(name))), "ssh.env", name, "the name of a variable")
            require(isinstance(value, str | int | float), f"ssh.env: {name}", "another value", "text or a number")
            secret = is_secret(str(name), str(value))
            # The value is not repeated: sentences are kept.
            require(
                not secret, f"ssh.env: {name}", "what looks like a secret", "its name in `forward`, set on this host"
            )
        names = [] if self.forward is None else self.forward
        fits = isinstance(names, list) and all(isinstance(n, str) and _VARIABLE.fullmatch(n) for n in names)
        require(fits, "ssh.forward", names, "a list of names of variables")

    @property
    def machines(self) -> tuple[Host, ...]:
        return tuple(read_host(written) for written in self.hosts)


def _is_way(written: object) -> bool:
    try:
        return isinstance(written, str) and bool([read_host(hop) for hop in written.split(",")])
    except RequestError:
        return False


def labels(hosts: tuple[Host, ...]) -> list[str]:
    """A different name for each, also where several are ports of one address."""
    names = [host.label for host in hosts]
    return [
        name if names.count(name) == 1 else f"{name}-{host.port or 22}" for name, host in zip(names, hosts, strict=True)
    ]


def ssh_command(chosen: Options, host: Host, remote: list[str]) -> list[str]:
    """The local command that runs one on a host. Its words reach the remote shell quoted, the host's name stands where
    no option can."""
    words = ["ssh", *_way(chosen, host)]
    for name, value in {**_FIXED, "ConnectTimeout": str(int(chosen.connect_s))}.items():
        words += ["-o", f"{name}={value}"]
    words += ["-p", str(host.port)] if host.port else []
    words += ["-l", host.user] if host.user else []
    return [*words, "--", host.host, " ".join(["exec", *map(_quoted, remote)])]


def _way(chosen: Options, host: Host) -> list[str]:
    words = ["-F", str(Path(chosen.ssh_config).expanduser())] if chosen.ssh_config else []
    key = host.key or chosen.key
    words += ["-i", key, "-o", "IdentitiesOnly=yes"] if key else []
    words += ["-o", f'UserKnownHostsFile="{chosen.known_hosts}"'] if chosen.known_hosts else []
    return words + (["-J", chosen.jump] if chosen.jump else [])


def hint(chosen: Options, host: Host, *remote: str) -> str:
    """The shortest command by which a person sees the same."""
    port = ["-p", str(host.port)] if host.port else []
    name = f"{host.user}@{host.host}" if host.user else host.host
    return shlex.join(["ssh", *_way(chosen, host), *port, name, *remote])


def _quoted(word: str) -> str:
    """For a POSIX shell; only a leading `~/` keeps its meaning."""
    return f"~/{shlex.quote(word[2:])}" if word.startswith("~/") and len(word) > 2 else shlex.quote(word)
