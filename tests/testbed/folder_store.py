"""Real ranks of served replicas without torch: a directory takes the place of torch's store.

`light` uses it if LIGHT_MEETING names that directory. The ranks run the worker's own code.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from pathlib import Path
from urllib.parse import quote

import psutil

from paceline.contract import Seat
from paceline.workloads import worker
from paceline.workloads.inference import ranks

POLL_S = 0.02
BARRIER_S = 300.0
_KEEPER = "keeper"


class FolderStore:
    """A file for each key. Like torch's store, it is gone when the process that started rank 0 has ended."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        if rank == 0:
            self.set(_KEEPER, str(os.getppid()))

    def _path(self, key: str) -> Path:
        return self._folder / quote(key, safe="")

    def set(self, key: str, value: str, /) -> None:
        whole = self._path(key).with_suffix(f".{os.getpid()}")
        whole.write_text(value)
        whole.replace(self._path(key))

    def get(self, key: str, /) -> bytes:
        return self._path(key).read_bytes()

    def check(self, keys: list[str], /) -> bool:
        keeper = self._path(_KEEPER)
        if keeper.is_file() and not psutil.pid_exists(int(keeper.read_text())):
            raise RuntimeError("the store is gone")
        return all(self._path(key).is_file() for key in keys)

    def wait(self, keys: list[str], timeout: datetime.timedelta, /) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{keys} did not come")
            time.sleep(POLL_S)


class FolderRanks(ranks.Ranks):
    @classmethod
    def joined(cls, seat: Seat, timeout_s: float) -> ranks.Ranks:
        return cls(FolderStore(Path(os.environ["LIGHT_MEETING"]), seat.rank), seat, timeout_s)


def serve(run_dir: Path, rank: int, size: int, on_node: int) -> int:
    """Start a rank as torchrun would, with frequent polls and short waits, so that tests end early."""
    ranks.Ranks, ranks.POLL_S, ranks.ACKNOWLEDGE_S = FolderRanks, 0.1, 0.5  # type: ignore[misc]
    places = {"RANK": rank, "LOCAL_RANK": rank % on_node, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": on_node}
    os.environ |= {name: str(value) for name, value in places.items()}
    os.environ.setdefault("MASTER_ADDR", os.environ.get("PACELINE_MASTER", "127.0.0.1"))
    return worker.main(["paceline.workloads.worker", str(run_dir)])


def leave_together(node: int, nodes: int) -> None:
    """Wait, as torchrun does, for the agents of the other nodes after the own ranks have ended ok."""
    store = FolderStore(Path(os.environ["LIGHT_MEETING"]), rank=-1)
    store.set(f"left/{node}", "1")
    with contextlib.suppress(RuntimeError):
        store.wait([f"left/{other}" for other in range(nodes)], datetime.timedelta(seconds=BARRIER_S))
