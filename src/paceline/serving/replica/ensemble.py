"""Tensor parallelism: the model processes of one replica, of which the first one leads.

The leader tells the others what is computed next over a group of its own on the host, so that waiting for it never
waits for the device; the tensors themselves meet inside the model.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.serving.replica.decoding import Decoding
from paceline.serving.replica.settings import Settings

READ, STEP = 0, 1
# The others wait for the leader as long as nobody asks anything: days, not minutes.
PATIENCE = datetime.timedelta(days=30)
HOST = "127.0.0.1"


def open_store(size: int) -> Any:
    """Where the processes meet: the leader's, at a free port of this host."""
    return dist.TCPStore(HOST, 0, size, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


def reach_store(port: int, size: int) -> Any:
    return dist.TCPStore(HOST, port, size, is_master=False)  # type: ignore[attr-defined]


def join(store: Any, rank: int, settings: Settings, device: torch.device) -> Any:
    """Enter the group of the model; returns the one by which the leader speaks."""
    # DeepSpeed reads where it is from the environment.
    size = settings.tensor_parallel
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(device.index or 0), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": HOST, "MASTER_PORT": str(store.port)}
    backend = "nccl" if settings.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    return dist.new_group(backend="gloo", timeout=PATIENCE)


class Leader:
    """A `Decoding` whose every call is made by all processes."""

    def __init__(self, decoding: Decoding, group: Any) -> None:
        self._decoding, self._group = decoding, group

    def read(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[int]:
        longest = max(len(prompt) for prompt in prompts)
        _tell(self._group, [READ, len(rows), longest])
        table = [[row, len(p), *p, *[0] * (longest - len(p))] for row, p in zip(rows, prompts, strict=True)]
        dist.broadcast(torch.tensor(table), src=0, group=self._group)
        return self._decoding.read(rows, prompts)

    def step(self, reach: int) -> list[int]:
        _tell(self._group, [STEP, reach, 0])
        return self._decoding.step(reach)


def _tell(group: Any, words: list[int]) -> None:
    dist.broadcast(torch.tensor(words), src=0, group=group)


def follow(decoding: Decoding, group: Any) -> None:
    """What the leader says, until this process is ended with the replica."""
    words = torch.zeros(3, dtype=torch.long)
    while True:
        dist.broadcast(words, src=0, group=group)
        what, count, longest = words.tolist()
        if what == STEP:
            decoding.advance(count)
            continue
        table = torch.zeros((count, 2 + longest), dtype=torch.long)
        dist.broadcast(table, src=0, group=group)
        rows = table.tolist()
        decoding.read([row[0] for row in rows], [row[2 : 2 + row[1]] for row in rows])
