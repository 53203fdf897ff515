"""A model server as a process of this rank: started, waited for, and ended with everything it started."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from paceline.errors import LaunchError, require
from paceline.host import process_guard
from paceline.host.processes import end_all
from paceline.launchers.node import rendezvous

POLL_S = 0.25
SAY_EVERY_S = 10.0
LOOK_S = 5.0
# A controller takes a run in which nothing moves for stall_s to hang: who waits must speak before.
SHARE_OF_STALL = 0.8
# Of what a server printed, as much is kept with the run.
KEPT_BYTES = 256 << 10
_LONGEST_LINE = 400
# What stands before the words themselves: the process, and the logger's level, time and place.
_PREFIX = re.compile(r"^(\([^)]*\)\s*)?((DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+[\d-]+ [\d:.]+ \[[^]]*\]\s*)?")
_HARMLESS = re.compile(r"^(\([^)]*\)\s*)?(DEBUG|INFO|WARNING)\b")
# The error itself; not the one that only says that another process had one.
_CAUSE = re.compile(r"\b\w*(Error|Exception)\b: |\berror: ")
_AFTERMATH = re.compile(r"initialization failed|See root cause|EngineDeadError")


@dataclass(frozen=True, slots=True)
class Server:
    """A process under way and where its output goes. name is what sentences call it; secret is kept out of them."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    secret: str

    def said(self) -> str:
        """The end of its output, without the key."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - KEPT_BYTES))
            return file.read().decode(errors="replace").replace(self.secret, "***")

    def wait_until_ready(self, url: str, patience_s: float) -> float:
        """Seconds until it answered at its /health. One that ends before, or is silent for too long, is told with what
        it said of the reason."""
        began = said_at = time.monotonic()
        while not _is_healthy(url):
            now = time.monotonic()
            if self.process.poll() is not None:
                raise LaunchError(f"{self.name} ended before it answered: {cause(self.said())}")
            if now - began > patience_s:
                told = last_line(self.said())
                raise LaunchError(f"{self.name} did not answer within {patience_s:.0f} s; it said last: {told}")
            if now - said_at > SAY_EVERY_S:
                said_at = now
                _say(f"{self.name}: not ready after {now - began:.0f} s: {last_line(self.said())}")
            time.sleep(POLL_S)
        return time.monotonic() - began

    def require_alive(self, url: str, *, alone: bool) -> None:
        """Told when the block ends that asked it. Of several replicas the client goes on with the others by itself."""
        # A guardian is there until it has ended what its server left.
        if self.process.poll() is None and _is_listening(url):
            return
        sentence = f"{self.name} ended while it was asked; it said last: {cause(self.said())}"
        if alone:
            raise LaunchError(sentence)
        _say(sentence)


@contextlib.contextmanager
def started(name: str, argv: Sequence[str], env: Mapping[str, str], log: Path, secret: str) -> Iterator[Server]:
    """The server, until the block is left. What it printed is then handed to this rank's own output."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            process_guard.command(argv),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(name, process, log, secret)
    try:
        yield server
    finally:
        end_all(process)
        _say(f"--- what {name} printed ---\n{server.said()}")


def require_patience(ready_s: float | None, stall_s: float, where: str) -> None:
    """RequestError where a run would be ended as a hang before its server has had the time that it may take."""
    require(ready_s is None or ready_s < stall_s, where, ready_s, f"less than stall_s ({stall_s:g})")


def patience_s(ready_s: float | None, stall_s: float) -> float:
    """How long a server may take to start."""
    return SHARE_OF_STALL * stall_s if ready_s is None else ready_s


def _say(text: str) -> None:
    """Into the log of the run, where whoever waits looks."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=LOOK_S) as answer:
            return bool(answer.status == http.HTTPStatus.OK)
    except (OSError, http.client.HTTPException):
        return False


def _is_listening(url: str) -> bool:
    """Whether somebody has its port. One that is too busy to take a connection in time is there."""
    parts = urlsplit(url)
    try:
        socket.create_connection((str(parts.hostname), parts.port or 80), timeout=LOOK_S).close()
    except TimeoutError:
        return True
    except OSError:
        return False
    return True


def cause(said: str) -> str:
    """Of a server's output the line that tells why it ended, else its last one."""
    grave = [line for line in said.splitlines() if _CAUSE.search(line) and not _HARMLESS.match(line)]
    told = [line for line in grave if not _AFTERMATH.search(line)]
    return last_line(said) if not grave else last_line("\n".join(told or grave))


def last_line(said: str) -> str:
    """In the words alone, without who said it and when."""
    words = [_PREFIX.sub("", line).strip() for line in said.splitlines()]
    spoken = [line for line in words if line]
    return spoken[-1][:_LONGEST_LINE] if spoken else "nothing"


# --- where it listens ---


def own_address(nodes: int, environ: Mapping[str, str], interfaces: rendezvous.Interfaces | None = None) -> str:
    """Where this host is reached by the ranks of its run: by itself alone, over the interface of the ranks, or over the
    one that leads to the first node."""
    if nodes == 1:
        return "127.0.0.1"
    known = rendezvous.all_interfaces() if interfaces is None else interfaces
    named = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if usable := [address for address in known.get(named, []) if not ipaddress.ip_address(address).is_link_local]:
        return usable[0]
    return _towards(environ.get("MASTER_ADDR", "127.0.0.1"))


def _towards(host: str) -> str:
    """The address from which this host would speak to another; nothing is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return rendezvous.plain(str(probe.getsockname()[0]))
    except OSError as error:
        raise LaunchError(f"this node finds no way to {host}, from where its replica will be asked ({error})") from None


def free_port(address: str) -> int:
    """One that nobody listens at now."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as held:
        return int(held.getsockname()[1])


def url_of(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
