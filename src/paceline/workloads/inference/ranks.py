"""How the ranks of a served model find each other: each opens its replicas, rank 0 asks all, the others keep theirs up.

They meet by the store of the launch (torchrun's), which needs no process group and no device: an engine has the GPU to
itself. Keys of replicas pass through it, and are written down nowhere.
"""

from __future__ import annotations

import contextlib
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
from paceline.workloads.inference.requests import Replica

LOOK_S = 2.0
CONNECT_S = 5.0
# Times in a row that a replica may refuse its own rank: it may be busy for a moment.
REFUSALS = 3
# How long the others have to say that they heard of the end.
FAREWELL_S = 30.0
_ENDED = "paceline/ended"


class Store(Protocol):
    """What is used of torch.distributed's; RuntimeError when it is gone, or what is waited for does not come."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: datetime.timedelta, /) -> None: ...


class Circle:
    """The ranks of one run over the store of their launch."""

    def __init__(self, store: Store, seat: Seat, patience_s: float) -> None:
        self._store, self._seat, self._patience_s = store, seat, patience_s

    @classmethod
    def met(cls, seat: Seat, patience_s: float) -> Circle:
        """By the variables that torchrun gives its ranks."""
        from torch.distributed.rendezvous import rendezvous

        store, _, _ = next(rendezvous("env://", timeout=datetime.timedelta(seconds=patience_s)))
        return cls(store, seat, patience_s)

    def tell(self, own: Sequence[Replica]) -> None:
        self._store.set(_replicas_of(self._seat.rank), json.dumps([replica.to_dict() for replica in own]))

    def gathered(self) -> list[Replica]:
        """The replicas of all ranks, in their order; each can be reached from here, or is named."""
        keys = [_replicas_of(rank) for rank in range(self._seat.world_size)]
        self._store.wait(keys, datetime.timedelta(seconds=self._patience_s))
        found = [Replica.from_dict(raw) for key in keys for raw in json.loads(self._store.get(key))]
        for replica in found:
            require_reachable(replica)
        return found

    def gone(self) -> list[int]:
        """Replicas whose ranks say that they answer no more, by their numbers in the run."""
        found, number = [], 0
        for rank in range(self._seat.world_size):
            for place in range(len(json.loads(self._store.get(_replicas_of(rank))))):
                found += [number] if self._store.check([_gone(rank, place)]) else []
                number += 1
        return found

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """However the block ends, the others hear of it; they are given time to say that they did."""
        try:
            yield
        finally:
            self._store.set(_ENDED, "1")
            others = [f"paceline/heard/{rank}" for rank in range(1, self._seat.world_size)]
            # One that does not answer is told of by its launcher.
            with contextlib.suppress(RuntimeError):
                self._store.wait(others, datetime.timedelta(seconds=FAREWELL_S))

    def attend(self, own: Sequence[Replica], answers: Callable[[Replica], bool]) -> list[int]:
        """Keep the replicas of this rank up until rank 0 has ended; those that answer no more are told of, once each,
        and are no reason to end. Returns their places in this rank."""
        refusals = [0] * len(own)
        # A store that is gone went with its launch: there is nobody left to ask.
        with contextlib.suppress(RuntimeError):
            while not self._store.check([_ENDED]):
                time.sleep(LOOK_S)
                for place, replica in enumerate(own):
                    refusals[place] = 0 if refusals[place] < REFUSALS and answers(replica) else refusals[place] + 1
                    if refusals[place] == REFUSALS:
                        sys.stderr.write(f"paceline: the replica {replica.endpoint.url} answers no more\n")
                        self._store.set(_gone(self._seat.rank, place), "1")
            self._store.set(f"paceline/heard/{self._seat.rank}", "1")
        return [place for place, count in enumerate(refusals) if count >= REFUSALS]


def _replicas_of(rank: int) -> str:
    return f"paceline/replicas/{rank}"


def _gone(rank: int, place: int) -> str:
    return f"paceline/gone/{rank}/{place}"


def accepts(replica: Replica) -> bool:
    """Whether somebody listens there."""
    try:
        _connect(replica)
    except OSError:
        return False
    return True


def require_reachable(replica: Replica) -> None:
    try:
        _connect(replica)
    except OSError as error:
        raise UnsupportedError(
            f"rank 0 asks all replicas, but that of rank {replica.rank} on {replica.host} does not answer it at "
            f"{replica.endpoint.url} ({error}); try on both hosts: curl -i {replica.endpoint.url}/v1/models"
        ) from None


def _connect(replica: Replica) -> None:
    parts = urlsplit(replica.endpoint.url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    socket.create_connection((str(parts.hostname), port), timeout=CONNECT_S).close()
