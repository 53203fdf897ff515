"""How the ranks of an inference run coordinate: each opens its replicas, rank 0 sends the load, the others keep theirs
up.

They exchange messages through the launch's store (torchrun's). It needs no process group and no device, so an engine
has the GPU to itself. API keys of replicas pass through it and are written nowhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol
from urllib.parse import urlsplit

from paceline.contract import Seat
from paceline.errors import UnsupportedError
from paceline.launchers.node import torchrun
from paceline.workloads.inference.session import Replica

POLL_S = 2.0
CONNECT_S = 5.0
# A replica may refuse its own rank so often in a row: it may be busy for a moment.
REFUSALS = 3
# A rank that has not reported for this long may be gone. Rank 0 then asks its replicas.
QUIET_S = 15.0
# How long the other ranks may take to acknowledge the end.
ACKNOWLEDGE_S = 30.0
_ENDED = "paceline/ended"


class Store(Protocol):
    """The methods used of a torch.distributed store. They raise RuntimeError when the store is gone or a wait times
    out."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: datetime.timedelta, /) -> None: ...


class Ranks:
    """The ranks of one run, coordinated through the store of their launch."""

    def __init__(self, store: Store, seat: Seat, timeout_s: float) -> None:
        self._store, self._seat, self._timeout_s = store, seat, timeout_s
        # By rank: its last report, and when this rank first saw it.
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._quiet: list[int] = []
        self._looked_at = float("-inf")

    @classmethod
    def joined(cls, seat: Seat, timeout_s: float) -> Ranks:
        """Join through the environment variables that torchrun sets."""
        return cls(torchrun.launch_store(timeout_s), seat, timeout_s)

    def publish(self, own: Sequence[Replica]) -> None:
        self._store.set(_replicas_key(self._seat.rank), json.dumps([dataclasses.asdict(replica) for replica in own]))

    def all_replicas(self) -> list[Replica]:
        """The replicas of all ranks in rank order; UnsupportedError names one that this host cannot reach."""
        keys = [_replicas_key(rank) for rank in range(self._seat.world_size)]
        self._store.wait(keys, datetime.timedelta(seconds=self._timeout_s))
        replicas = [Replica.from_dict(raw) for key in keys for raw in json.loads(self._store.get(key))]
        for replica in replicas:
            require_reachable(replica)
        return replicas

    def dead(self) -> list[int]:
        """Numbers of the replicas whose own ranks report that they no longer answer."""
        return [number for number, rank, index in self._numbered() if self._store.check([_dead_key(rank, index)])]

    def quiet(self) -> list[int]:
        """Numbers of the replicas that are dead, or whose own ranks have not reported for QUIET_S. The store is asked
        at most every POLL_S."""
        if time.monotonic() - self._looked_at < POLL_S:
            return self._quiet
        self._looked_at = time.monotonic()
        # The store ends with its launch.
        with contextlib.suppress(RuntimeError):
            quiet_ranks = {rank for rank in range(1, self._seat.world_size) if self._is_quiet(rank)}
            dead = set(self.dead())
            self._quiet = [number for number, rank, _ in self._numbered() if rank in quiet_ranks or number in dead]
        return self._quiet

    def _is_quiet(self, rank: int) -> bool:
        key = _beat_key(rank)
        beat = self._store.get(key) if self._store.check([key]) else b""
        known, since = self._beats.get(rank, (None, 0.0))
        if beat != known:
            self._beats[rank] = (beat, time.monotonic())
            return False
        return time.monotonic() - since > QUIET_S

    def _numbered(self) -> Iterator[tuple[int, int, int]]:
        """Every replica: its number, its rank, and its index among the replicas of that rank."""
        number = 0
        for rank in range(self._seat.world_size):
            for index in range(len(json.loads(self._store.get(_replicas_key(rank))))):
                yield number, rank, index
                number += 1

    @contextlib.contextmanager
    def load_in_progress(self) -> Iterator[None]:
        """Tell the other ranks when the block ends, however it ends, and wait for them to acknowledge it."""
        try:
            yield
        finally:
            self._store.set(_ENDED, "1")
            others = [f"paceline/heard/{rank}" for rank in range(1, self._seat.world_size)]
            # The launcher reports a rank that does not answer.
            with contextlib.suppress(RuntimeError):
                self._store.wait(others, datetime.timedelta(seconds=ACKNOWLEDGE_S))

    def keep_up(self, own: Sequence[Replica], answers: Callable[[Replica], bool]) -> list[int]:
        """Keep this rank's replicas up until rank 0 has ended. Returns the indices of those that no longer answer; each
        is reported once and does not end the rank."""
        refusals = [0] * len(own)
        # The store ends with its launch: then no rank is left.
        with contextlib.suppress(RuntimeError):
            beats = 0
            while not self._store.check([_ENDED]):
                beats += 1
                self._store.set(_beat_key(self._seat.rank), str(beats))
                time.sleep(POLL_S)
                for index, replica in enumerate(own):
                    refusals[index] = 0 if refusals[index] < REFUSALS and answers(replica) else refusals[index] + 1
                    if refusals[index] == REFUSALS:
                        sys.stderr.write(f"paceline: replica {replica.endpoint.url} no longer answers\n")
                        self._store.set(_dead_key(self._seat.rank, index), "1")
            self._store.set(f"paceline/heard/{self._seat.rank}", "1")
        return [index for index, count in enumerate(refusals) if count >= REFUSALS]


def _replicas_key(rank: int) -> str:
    return f"paceline/replicas/{rank}"


def _beat_key(rank: int) -> str:
    return f"paceline/beat/{rank}"


def _dead_key(rank: int, index: int) -> str:
    return f"paceline/dead/{rank}/{index}"


def accepts(replica: Replica) -> bool:
    """Whether the replica accepts a connection."""
    return _refusal(replica) is None


def require_reachable(replica: Replica) -> None:
    if error := _refusal(replica):
        raise UnsupportedError(
            f"rank 0 cannot reach the replica of rank {replica.rank} on {replica.host} at {replica.endpoint.url} "
            f"({error}). Run `curl -i {replica.endpoint.url}/v1/models` on both hosts to see where it fails"
        )


def _refusal(replica: Replica) -> OSError | None:
    """Why the replica does not accept a connection."""
    parts = urlsplit(replica.endpoint.url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((str(parts.hostname), port), timeout=CONNECT_S).close()
    except OSError as error:
        return error
    return None
