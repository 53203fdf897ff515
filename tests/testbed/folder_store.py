"""Real ranks of served replicas without torch: they meet in a folder, in the place of torch's store.

`light` runs them where LIGHT_MEETING names that folder. What a rank does is the worker's own code.
"""

from __future__ import annotations

import datetime
import os
import time
from pathlib import Path
from urllib.parse import quote

from paceline import worker
from paceline.plugins import Seat
from paceline.workloads import _inference_ranks as ranks

POLL_S = 0.02


class FolderStore:
    """A file for each key. Other than torch's it does not go away with rank 0."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, key: str) -> Path:
        return self._folder / quote(key, safe="")

    def set(self, key: str, value: str, /) -> None:
        whole = self._path(key).with_suffix(f".{os.getpid()}")
        whole.write_text(value)
        whole.replace(self._path(key))

    def get(self, key: str, /) -> bytes:
        return self._path(key).read_bytes()

    def check(self, keys: list[str], /) -> bool:
        return all(self._path(key).is_file() for key in keys)

    def wait(self, keys: list[str], timeout: datetime.timedelta, /) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{keys} did not come")
            time.sleep(POLL_S)


class FolderCircle(ranks.Circle):
    @classmethod
    def met(cls, seat: Seat, patience_s: float) -> ranks.Circle:
        return cls(FolderStore(Path(os.environ["LIGHT_MEETING"])), seat, patience_s)


def serve(run_dir: Path, rank: int, size: int, on_node: int) -> int:
    """As torchrun would start it. Who looks often, and waits briefly for those that are gone, ends early."""
    ranks.Circle, ranks.LOOK_S, ranks.FAREWELL_S = FolderCircle, 0.1, 2.0  # type: ignore[misc]
    places = {"RANK": rank, "LOCAL_RANK": rank % on_node, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": on_node}
    os.environ |= {name: str(value) for name, value in places.items()}
    os.environ.setdefault("MASTER_ADDR", os.environ.get("PACELINE_MASTER", "127.0.0.1"))
    return worker.main(["paceline.worker", str(run_dir)])
