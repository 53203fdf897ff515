"""The model of a replica inside DeepSpeed's inference engine.

`deepspeed.init_inference` casts the model and, over several devices, splits it with AutoTP: linear layers are replaced
by DeepSpeed's, which sum over ranks. On one device it changes no arithmetic, so its speed is that of eager
transformers. Kernel injection is not used: it needs batches that begin and end together, but requests here come and go
by slot.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch

from paceline.errors import MissingPackageError
from paceline.serving.replica.settings import Settings
from paceline.serving.replica.weights import open_model as open_whole
from paceline.training.decoder import DTYPES


def open_model(settings: Settings, device: torch.device) -> Any:
    """The whole model, then DeepSpeed's part of it. Every rank builds it whole, in host memory if it will be split."""
    deepspeed = _package(settings.device)
    size = settings.tensor_parallel
    whole = open_whole(replace(settings, tensor_parallel=1), 0, device if size == 1 else torch.device("cpu"))
    if size > 1:
        deepspeed.init_distributed(dist_backend="nccl" if settings.device == "cuda" else "gloo", verbose=False)
    engine = deepspeed.init_inference(
        whole, dtype=DTYPES[settings.precision], tensor_parallel={"tp_size": size}, replace_with_kernel_inject=False
    )
    return engine.module.eval().requires_grad_(False)


def _package(device: str) -> Any:
    # Otherwise DeepSpeed guesses its accelerator and compiles operators that are not used here.
    os.environ.setdefault("DS_ACCELERATOR", device)
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
    try:
        import deepspeed
    except ImportError as error:
        raise MissingPackageError(error.name or "deepspeed", "the engine deepspeed", "'paceline[zero]'") from None
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
