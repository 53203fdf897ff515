"""One model process of a replica: builds its part of the model, says when it is ready, and computes what is asked."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from paceline.errors import UnsupportedError
from paceline.launchers.node import placement
from paceline.serving.replica.batching import serve
from paceline.serving.replica.channel import Channel
from paceline.serving.replica.settings import Settings
from paceline.training.instruments import collection_paused

if TYPE_CHECKING:
    import torch


def run(settings: Settings, rank: int, channel: Channel | None, port: int | None) -> None:
    """Rank 0 has the line to the front; the others have the port where it waits for them."""
    with collection_paused():
        import torch
        import transformers  # noqa: F401  (most of the start is this import)

    # fp32 means fp32: TF32 would be another precision under the same name.
    torch.set_float32_matmul_precision("highest")
    device = device_of(settings, rank)
    group = _group(settings, rank, channel, port, device)
    # transformers imports a model's code when the model is asked for.
    with collection_paused():
        decoding = _decoding(settings, rank, device)
    if channel is None:
        from paceline.serving.replica.ensemble import follow

        follow(decoding, group)
        return
    channel.put({"ready": facts(settings, decoding)})
    if group is None:
        serve(decoding, channel, settings)
    else:
        from paceline.serving.replica.ensemble import Leader

        serve(Leader(decoding, group), channel, settings)


def device_of(settings: Settings, rank: int) -> torch.device:
    import torch

    if settings.device == "cpu":
        if settings.tensor_parallel > 1 and "OMP_NUM_THREADS" not in os.environ:
            # Processes that each take every core only wait for one another.
            torch.set_num_threads(max(1, torch.get_num_threads() // settings.tensor_parallel))
        return torch.device("cpu")
    number = settings.first_device + rank
    if placement.shares_gpu(os.environ):
        # NCCL refuses two processes of one host on one GPU; under host names of their own they talk through sockets.
        os.environ["NCCL_HOSTID"] = f"paceline-replica-{os.getpid()}"
        number = 0
    if not torch.cuda.is_available() or number >= torch.cuda.device_count():
        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise UnsupportedError(f"the replica needs GPU {number}, but this host shows {seen}")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def _group(settings: Settings, rank: int, channel: Channel | None, port: int | None, device: torch.device) -> Any:
    """The group by which the leader speaks; None for a replica of one process."""
    if settings.tensor_parallel == 1:
        return None
    from paceline.serving.replica import ensemble

    if channel is None:
        assert port is not None
        store = ensemble.reach_store(port, settings.tensor_parallel)
    else:
        store = ensemble.open_store(settings.tensor_parallel)
        channel.put({"meet": store.port})
    return ensemble.join(store, rank, settings, device)


def _decoding(settings: Settings, rank: int, device: torch.device) -> Any:
    from paceline.serving.replica.decoding import Decoding
    from paceline.serving.replica.projections import join
    from paceline.serving.replica.weights import open_model

    if settings.engine == "deepspeed":
        from paceline.serving.replica.deepspeed_model import open_model as open_injected

        model = open_injected(settings, device)
    else:
        model = join(open_model(settings, rank, device))
    shape = settings.shape
    decoding = Decoding(
        model,
        places=settings.max_batch,
        length=settings.max_length,
        reaches=settings.reaches,
        heads=shape.kv_heads // settings.tensor_parallel,
        width=shape.head_dim,
    )
    if settings.compiled:
        decoding.compile_layers()
    decoding.warm_up(settings.graph)
    return decoding


def facts(settings: Settings, decoding: Any) -> dict[str, Any]:
    """What a record says of this replica: versions, devices, and everything that changes its speed."""
    import torch
    import transformers

    versions = [f"transformers {transformers.__version__}", f"torch {torch.__version__}"]
    if settings.engine == "deepspeed":
        import deepspeed

        versions.insert(0, f"deepspeed {deepspeed.__version__}")
    told = {
        "batching": settings.batching,
        "max_batch": settings.max_batch,
        "max_length": settings.max_length,
        "prefill_tokens": settings.prefill_tokens,
        "dtype": settings.precision,
        "attention": decoding.attention,
        "projections": "joined" if decoding.joined else "separate",
        "kv_cache": "static",
        "prefix_caching": False,
        "compiled": "layers" if settings.compiled else "none",
        "cuda_graph": settings.graph,
        "weights": "pretrained" if settings.is_directory else "random",
        "threads": torch.get_num_threads() if settings.device == "cpu" else None,
    }
    size = settings.tensor_parallel
    return {"version": ", ".join(versions), "devices": size, "tensor_parallel": size, "settings": told}
