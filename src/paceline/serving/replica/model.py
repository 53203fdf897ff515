"""One model process of a replica: builds its part of the model, reports that it is ready, and computes tokens.

With tensor parallelism a replica has several such processes, on one host or several. Rank 0 leads: it sends every call
to the others through a process group of CPUs, so that waiting for the next call never waits for the device. The tensors
of a call are exchanged inside the model.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import transformers

from paceline.errors import UnsupportedError
from paceline.host.processes import collection_paused
from paceline.launchers.node import placement, torchrun
from paceline.serving.replica import weights
from paceline.serving.replica.batching import Channel, serve
from paceline.serving.replica.decoding import Decoding, is_joined, join_projections
from paceline.serving.replica.settings import Meeting, Settings

# Kinds of calls to the other ranks; a call is its kind and three numbers.
READ, STEP, CLEAR = 0, 1, 2
# The other ranks wait for the leader until the next request: days, not minutes.
PATIENCE = datetime.timedelta(days=30)


def run(settings: Settings, rank: int, channel: Channel | None, meeting: Meeting | None) -> None:
    """The first rank of a host has a channel to its front. All but the first of a single host know where to meet."""
    # fp32 means fp32: TF32 would be another precision under the same name.
    torch.set_float32_matmul_precision("highest")
    device = device_of(settings, rank)
    group = _join_group(settings, rank, channel, meeting, device) if settings.tensor_parallel > 1 else None
    # transformers imports the code of an architecture when it builds the model.
    with collection_paused():
        if settings.engine == "deepspeed":
            model = weights.open_deepspeed_model(settings, device)
        else:
            model = join_projections(weights.open_model(settings, rank, device))
        decoding = Decoding(
            model,
            slots=settings.max_batch,
            length=settings.max_length,
            reaches=settings.reaches,
            heads=settings.shape.kv_heads // settings.tensor_parallel,
            width=settings.shape.head_dim,
        )
        if settings.compiled and not decoding.fuse():
            if decoding.refusal:
                sys.stderr.write(f"Our decoding kernels are not used: {decoding.refusal}\n")
            decoding.compile_layers()
        decoding.warm_up(settings.graph)
    if channel is not None:
        channel.put({"ready": facts(settings, decoding)})
    if rank > 0:
        follow(decoding, group)
    else:
        assert channel is not None
        serve(decoding if group is None else Leader(decoding, group), channel, settings)


def device_of(settings: Settings, rank: int) -> torch.device:
    if settings.device == "cpu":
        if len(settings.ranks) > 1 and "OMP_NUM_THREADS" not in os.environ:
            # Processes that each use every core only wait for one another.
            torch.set_num_threads(max(1, torch.get_num_threads() // len(settings.ranks)))
        return torch.device("cpu")
    number = settings.first_device + settings.ranks.index(rank)
    if placement.shares_gpu(os.environ):
        # NCCL refuses two processes of one host on one GPU; with different host names they use sockets.
        os.environ["NCCL_HOSTID"] = f"paceline-replica-{os.getpid()}"
        number = 0
    if not torch.cuda.is_available() or number >= torch.cuda.device_count():
        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise UnsupportedError(f"the replica needs GPU {number}, but this host shows {seen}")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def facts(settings: Settings, decoding: Decoding) -> dict[str, Any]:
    """What a record says about this replica: versions, devices, and everything that changes its speed."""
    versions = [f"transformers {transformers.__version__}", f"torch {torch.__version__}"]
    if settings.engine == "deepspeed":
        import deepspeed

        versions.insert(0, f"deepspeed {deepspeed.__version__}")
    in_effect = {
        "batching": settings.batching,
        "max_batch": settings.max_batch,
        "max_length": settings.max_length,
        "prefill_tokens": settings.prefill_tokens,
        "prefill_chunk": settings.prefill_chunk,
        "dtype": settings.precision,
        "attention": decoding.attention,
        "projections": "joined" if is_joined(decoding.model) else "separate",
        "kv_cache": "static",
        "prefix_caching": False,
        "compiled": "none" if not settings.compiled else "fused" if decoding.is_fused else "layers",
        **({"fused": f"refused: {decoding.refusal}"} if decoding.refusal else {}),
        "cuda_graph": settings.graph,
        "weights": "pretrained" if settings.is_directory else "random",
        **({"nodes": settings.nodes} if settings.nodes > 1 else {}),
        "threads": torch.get_num_threads() if settings.device == "cpu" else None,
    }
    size = settings.tensor_parallel
    return {"version": ", ".join(versions), "devices": size, "tensor_parallel": size, "settings": in_effect}


# --- tensor parallelism ---


def _join_group(
    settings: Settings, rank: int, channel: Channel | None, meeting: Meeting | None, device: torch.device
) -> Any:
    """Join the process group of the model. Returns the group through which the leader sends its calls."""
    size = settings.tensor_parallel
    if meeting is None:
        assert channel is not None
        store = torchrun.serve(torchrun.listen())
        meeting = (torchrun.LOOPBACK, store.port, "")
        channel.put({"meeting": meeting})
    else:
        store = dist.TCPStore(*meeting[:2], is_master=False, timeout=torchrun.PATIENCE)  # type: ignore[attr-defined]
    host, port, prefix = meeting
    # DeepSpeed reads its rank from the environment.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(device.index or 0), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    if sys.platform == "linux" and settings.nodes == 1:
        # All processes of a replica are on this host, also if the ranks of the run use another interface.
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    backend = "nccl" if settings.device == "cuda" else "gloo"
    own_keys = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=own_keys, rank=rank, world_size=size, timeout=PATIENCE)
    return dist.new_group(backend="gloo", timeout=PATIENCE)


class Leader:
    """A `Decoding` whose calls are made by all processes."""

    def __init__(self, decoding: Decoding, group: Any) -> None:
        self._decoding, self._group = decoding, group

    def read(self, rows: Sequence[int], prompts: Sequence[Sequence[int]], start: int = 0) -> list[int]:
        longest = max(len(prompt) for prompt in prompts)
        self._call(READ, len(rows), longest, start)
        table = [[row, len(p), *p, *[0] * (longest - len(p))] for row, p in zip(rows, prompts, strict=True)]
        dist.broadcast(torch.tensor(table), src=0, group=self._group)
        return self._decoding.read(rows, prompts, start)

    def step(self, used: int, reach: int) -> list[int]:
        self._call(STEP, used, reach)
        return self._decoding.step(used, reach)

    def clear(self, rows: Sequence[int]) -> None:
        self._call(CLEAR, len(rows))
        dist.broadcast(torch.tensor(rows), src=0, group=self._group)
        self._decoding.clear(rows)

    def _call(self, kind: int, first: int, second: int = 0, third: int = 0) -> None:
        dist.broadcast(torch.tensor([kind, first, second, third]), src=0, group=self._group)


def follow(decoding: Decoding, group: Any) -> None:
    """Make every call that the leader makes, until this process is ended with the replica."""
    call = torch.zeros(4, dtype=torch.long)
    while True:
        dist.broadcast(call, src=0, group=group)
        kind, *numbers = call.tolist()
        if kind == STEP:
            used, reach, _ = numbers
            decoding.advance(used, reach)
            continue
        count, longest, start = numbers
        if kind == CLEAR:
            free = torch.zeros(count, dtype=torch.long)
            dist.broadcast(free, src=0, group=group)
            decoding.clear(free.tolist())
            continue
        table = torch.zeros((count, 2 + longest), dtype=torch.long)
        dist.broadcast(table, src=0, group=group)
        rows = table.tolist()
        decoding.read([row[0] for row in rows], [row[2 : 2 + row[1]] for row in rows], start)
