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
REPORT_EVERY_S = 10.0
REQUEST_S = 5.0
# The controller ends a run without progress after stall_s as hung: whoever waits must report before.
SHARE_OF_STALL = 0.8
# How much of a server's output is kept with the run.
KEPT_BYTES = 256 << 10
_LONGEST_LINE = 400
# Prefixes of log lines: the process, and the logger's level, time and file.
_PREFIX = re.compile(r"^(\([^)]*\)\s*)?((DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+[\d-]+ [\d:.]+ \[[^]]*\]\s*)?")
_HARMLESS = re.compile(r"^(\([^)]*\)\s*)?(DEBUG|INFO|WARNING)\b")
# The error itself, not one that only reports an error of another process.
_CAUSE = re.compile(r"\b\w*(Error|Exception)\b: |\berror: ")
_AFTERMATH = re.compile(r"initialization failed|See root cause|EngineDeadError")


@dataclass(frozen=True, slots=True)
class Server:
    """A running process and where its output goes. name is used in messages; secret is removed from them."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    secret: str

    def output(self) -> str:
        """The end of its output, without the key."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - KEPT_BYTES))
            return file.read().decode(errors="replace").replace(self.secret, "***")

    def wait_until_ready(self, url: str, timeout_s: float) -> float:
        """Seconds until it answered at /health; LaunchError with the reason if it ends before, or takes too long."""
        began = reported_at = time.monotonic()
        while True:
            with (
                contextlib.suppress(OSError, http.client.HTTPException),
                urllib.request.urlopen(f"{url}/health", timeout=REQUEST_S) as answer,
            ):
                if answer.status == http.HTTPStatus.OK:
                    return time.monotonic() - began
            now = time.monotonic()
            if self.process.poll() is not None:
                raise LaunchError(f"{self.name} ended before it answered: {cause(self.output())}")
            if now - began > timeout_s:
                last = last_line(self.output())
                raise LaunchError(f"{self.name} did not answer within {timeout_s:.0f} s; its last output: {last}")
            if now - reported_at > REPORT_EVERY_S:
                reported_at = now
                _report(f"{self.name}: not ready after {now - began:.0f} s: {last_line(self.output())}")
            time.sleep(POLL_S)

    def require_alive(self, url: str, *, alone: bool) -> None:
        """LaunchError if the server died during the load and was the only one; otherwise only a message, because the
        client continues with the others."""
        # The process guard stays until it has ended what its server left.
        if self.process.poll() is None and _is_listening(url):
            return
        sentence = f"{self.name} ended during the load; its last output: {cause(self.output())}"
        if alone:
            raise LaunchError(sentence)
        _report(sentence)


@contextlib.contextmanager
def started(name: str, argv: Sequence[str], env: Mapping[str, str], log: Path, secret: str) -> Iterator[Server]:
    """The server, until the block ends. Its output is then copied to this rank's own output."""
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
        _report(f"--- output of {name} ---\n{server.output()}")


def require_patience(ready_s: float | None, stall_s: float, where: str) -> None:
    """RequestError if the run would be ended as hung before its server may be ready."""
    require(ready_s is None or ready_s < stall_s, where, ready_s, f"less than stall_s ({stall_s:g})")


def patience_s(ready_s: float | None, stall_s: float) -> float:
    """How long a server may take to start."""
    return SHARE_OF_STALL * stall_s if ready_s is None else ready_s


def _report(text: str) -> None:
    """Print to the log of the run."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _is_listening(url: str) -> bool:
    """Whether its port is in use. A server too busy to accept in time is alive."""
    parts = urlsplit(url)
    try:
        socket.create_connection((str(parts.hostname), parts.port or 80), timeout=REQUEST_S).close()
    except TimeoutError:
        return True
    except OSError:
        return False
    return True


def cause(output: str) -> str:
    """The line of a server's output that says why it ended, else its last line."""
    grave = [line for line in output.splitlines() if _CAUSE.search(line) and not _HARMLESS.match(line)]
    first = [line for line in grave if not _AFTERMATH.search(line)]
    return last_line(output) if not grave else last_line("\n".join(first or grave))


def last_line(output: str) -> str:
    """The last line that is not empty, without logger prefixes."""
    stripped = [_PREFIX.sub("", line).strip() for line in output.splitlines()]
    lines = [line for line in stripped if line]
    return lines[-1][:_LONGEST_LINE] if lines else "nothing"


# --- where it listens ---


def own_address(nodes: int, environ: Mapping[str, str], interfaces: rendezvous.Interfaces | None = None) -> str:
    """The address at which the ranks of the run reach this host: loopback, the interface of the ranks, or the one that
    leads to the first node."""
    if nodes == 1:
        return "127.0.0.1"
    known = rendezvous.all_interfaces() if interfaces is None else interfaces
    named = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if usable := [address for address in known.get(named, []) if not ipaddress.ip_address(address).is_link_local]:
        return usable[0]
    host = environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        # The address from which this host would connect to the first node; nothing is sent.
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return rendezvous.plain(str(probe.getsockname()[0]))
    except OSError as error:
        raise LaunchError(f"this node has no route to {host}, which sends the load to its replica ({error})") from None


def free_port(address: str) -> int:
    """A port that is free now."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        return int(listener.getsockname()[1])


def url_of(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
