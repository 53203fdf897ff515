"""Mock replicas with known latencies in processes of their own: to load-test, to kill, and as an engine of ranks.

As an engine (`engine: testbed.replicas`) each rank starts one and offers it at the address by which other hosts reach
it. After `dies_after` requests the replica of rank `whose` is killed by signal 9; with `takes_rank` its rank is killed
too; with `falls_silent` it only stops answering, so a load that needs it lasts until its host is removed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from typing import Any

from paceline.contract import Endpoint, Seat
from paceline.experiment.plugins import parse_options
from paceline.experiment.spec import RunSpec
from paceline.host.processes import end_with_parent
from paceline.serving.mock import Latencies, MockReplica

START_S = 60.0


class Queue(MockReplica):
    """Answers one request at a time, in the order they came, each in service_s: latency is the wait for those before.
    What the law forbids cannot happen, however fast the machine is."""

    def __init__(self, law: Latencies, service_s: float, host: str = "127.0.0.1") -> None:
        super().__init__(law, host)
        self._service_ns, self._free_ns = round(service_s * 1e9), 0

    def _begin(self, client: Any, asked: dict[str, Any], chat: bool, now: int) -> None:
        self._free_ns = max(self._free_ns, now) + self._service_ns
        self.latencies = replace(self.latencies, ttft_s=(self._free_ns - now) / 1e9)
        super()._begin(client, asked, chat, now)


class Mortal(MockReplica):
    """Killed when a request comes that is one too many, with those before it under way."""

    def __init__(
        self,
        law: Latencies,
        dies_after: int,
        host: str = "127.0.0.1",
        takes_parent: bool = False,
        lives_on: bool = False,
    ) -> None:
        super().__init__(law, host)
        self._left, self._takes_parent, self._lives_on = dies_after, takes_parent, lives_on

    def _begin(self, client: Any, asked: dict[str, Any], chat: bool, now: int) -> None:
        self._left -= 1
        if self._left < 0:
            if self._lives_on:
                return
            if self._takes_parent:
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        super()._begin(client, asked, chat, now)


@dataclass(frozen=True)
class Replica:
    url: str
    process: BaseProcess

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def start(
    host: str = "127.0.0.1",
    *,
    dies_after: int | None = None,
    takes_parent: bool = False,
    lives_on: bool = False,
    service_s: float | None = None,
    **law: Any,
) -> Replica:
    """In a process of its own, which ends with this one."""
    context = multiprocessing.get_context("fork")
    ports = context.Queue()
    made = Latencies(**{"ttft_s": 0.01, "itl_s": 0.001, **law})

    def serve() -> None:
        end_with_parent()
        if service_s is not None:
            server: MockReplica = Queue(made, service_s, host)
        elif dies_after is not None:
            server = Mortal(made, dies_after, host, takes_parent, lives_on)
        else:
            server = MockReplica(made, host)
        ports.put(server.port)
        server.serve(lambda: False)

    process = context.Process(target=serve, daemon=True)
    process.start()
    return Replica(f"http://{host}:{ports.get(timeout=START_S)}", process)


# --- as an engine ---


@dataclass(frozen=True)
class Options:
    dies_after: int = -1
    whose: int = 1
    takes_rank: bool = False
    falls_silent: bool = False
    ttft_s: float = 0.01


def check(spec: RunSpec) -> str | None:
    assert spec.engine is not None
    parse_options(Options, spec.engine)
    return None


@contextlib.contextmanager
def open(spec: RunSpec, seat: Seat) -> Iterator[Sequence[Endpoint]]:
    assert spec.engine is not None
    chosen = parse_options(Options, spec.engine)
    mortal = chosen.dies_after >= 0 and seat.rank == chosen.whose
    fate = {"dies_after": chosen.dies_after, "takes_parent": chosen.takes_rank, "lives_on": chosen.falls_silent}
    replica = start(_own_address(spec), ttft_s=chosen.ttft_s, **fate if mortal else {})
    try:
        facts = {"version": "mock", "devices": 0, "ready_s": 0.1, "settings": {"rank": seat.rank}}
        yield [Endpoint(url=replica.url, model="mock", secret=f"key-of-{seat.rank}", facts=facts)]
    finally:
        replica.end()


def _own_address(spec: RunSpec) -> str:
    """By which this host would speak to the first node; nothing is sent."""
    if spec.topology.nodes == 1:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))
        return str(probe.getsockname()[0])
