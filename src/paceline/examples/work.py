"""What every example does: the model, the data and the optimizer, and the options of its command line.

Every framework trains in the same order on the same random sequences, with AdamW without weight decay and gradients
clipped at 1. On a GPU the products are in bf16. `default` sets only what makes the work equal and leaves the rest to
the framework; `best` adds what is known to be faster: fused AdamW, torch.compile, no activation checkpointing.
"""

from __future__ import annotations

import argparse
import atexit
import fcntl
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from paceline.examples import EXAMPLES

LEARNING_RATE, CLIP_NORM = 1e-3, 1.0
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"micro_batch": 4, "accumulation": 2, "length": 64, "vocabulary": 512},
    "gpt2-tiny": {"micro_batch": 4, "accumulation": 2, "length": 64, "vocabulary": 512},
    "gpt2-124m": {"micro_batch": 8, "accumulation": 2, "length": 1024, "vocabulary": 50257},
}


@dataclass(frozen=True)
class Work:
    """What a framework has to do on each of `ranks` processes. best: with the settings that are known to be fastest.

    lock: a file. Whoever has it locked has the device alone, so that several launches can import their framework and
    build their model at once, and train one after the other.
    """

    steps: int
    size: str
    micro_batch: int
    accumulation: int
    length: int
    vocabulary: int
    strategy: str = "ddp"
    device: str = "cpu"
    best: bool = False
    lock: str | None = None

    @property
    def is_bf16(self) -> bool:
        return self.device == "cuda"

    @property
    def ranks(self) -> int:
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def own_device(self) -> str:
        """The device of this rank."""
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if self.device == "cuda" else self.device

    @property
    def backend(self) -> str:
        return "nccl" if self.device == "cuda" else "gloo"

    def autocast(self) -> Any:
        import torch

        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.is_bf16)


def work_of(steps: int = 24, size: str = "tiny", settings: str = "default", **more: Any) -> Work:
    return Work(steps=steps, size=size, best=settings == "best", **more, **SIZES[size])


def run(name: str, train: Callable[[Work], None]) -> None:
    """Train as the command line says."""
    strategies = list(EXAMPLES[name].strategies)
    parser = argparse.ArgumentParser(prog=f"python -m paceline.examples.{name}")
    parser.add_argument("--strategy", choices=strategies, default=strategies[0])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--settings", choices=("default", "best"), default="default")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--lock", metavar="FILE", help="train only while this file is locked")
    given = parser.parse_args()
    train(work_of(**vars(given)))


class Rows:
    """Random sequences, the same in every framework: a dataset of all ranks together."""

    def __init__(self, work: Work) -> None:
        import torch

        shape = (work.steps * work.micro_batch * work.accumulation * work.ranks, work.length)
        self.ids = torch.randint(3, work.vocabulary, shape, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def loader(work: Work, *, shares: bool = False) -> Any:
    """Micro batches. shares: this rank's only, where no framework divides the data."""
    from torch.utils.data import DataLoader, DistributedSampler

    rows: Any = Rows(work)
    own: Any = DistributedSampler(rows, shuffle=False) if shares and work.ranks > 1 else None
    return DataLoader(rows, batch_size=work.micro_batch, sampler=own, pin_memory=work.best)


def batches(work: Work) -> Iterator[dict[str, Any]]:
    """Micro batches of this rank on its device."""
    for batch in loader(work, shares=True):
        yield {name: each.to(work.own_device, non_blocking=True) for name, each in batch.items()}


def new_model(work: Work) -> Any:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any]
    if work.size == "tiny":
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        return LlamaForCausalLM(LlamaConfig(vocab_size=512, num_key_value_heads=2, pad_token_id=0, **shape))
    shape = {"n_embd": 64, "n_layer": 2, "n_head": 4} if work.size == "gpt2-tiny" else {}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tokens = {"vocab_size": work.vocabulary, "n_positions": work.length, "bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(pad_token_id=0, use_cache=False, **tokens, **no_dropout, **shape))


def build_model(work: Work) -> Any:
    """The model on the host. From here on the device is used, so it is waited for."""
    model = new_model(work)
    if work.lock:
        await_device(work.lock)
    return model


def blocks_of(model: Any) -> Any:
    """The layers of the model."""
    return model.model.layers if hasattr(model, "model") else model.transformer.h


def await_device(path: str) -> None:
    """Have the device alone until a second after this process has ended, in which its end is recorded."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    atexit.register(keep_locked, handle)


def keep_locked(handle: int) -> None:
    subprocess.Popen(["sleep", "1"], pass_fds=[handle], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def build_optimizer(work: Work, model: Any, may_fuse: bool = True) -> Any:
    import torch

    fused: dict[str, Any] = {"fused": True} if work.best and may_fuse and work.device == "cuda" else {}
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, **fused)


def zero_config(work: Work, stage: int) -> dict[str, Any]:
    """A DeepSpeed config that asks for the same work, with the optimizer passed by the script."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "gradient_accumulation_steps": work.accumulation,
        "gradient_clipping": CLIP_NORM,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    if work.is_bf16:
        # By default bf16 weights, and fp32 copies in the optimizer; the best settings use autocast, as the others do.
        default, best = {"bf16": {"enabled": True}}, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
        config |= best if work.best else default
    return config


def prepare_deepspeed(work: Work) -> None:
    """Without it DeepSpeed compiles an operator for shared memory on CPUs, and looks for MPI."""
    if work.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=work.backend)


def trainer_arguments(work: Work) -> dict[str, Any]:
    """Arguments of a Hugging Face Trainer that ask for the same work."""
    same: dict[str, Any] = {
        "output_dir": "frameworks-out",
        "per_device_train_batch_size": work.micro_batch,
        "gradient_accumulation_steps": work.accumulation,
        "max_steps": work.steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": CLIP_NORM,
        "bf16": work.is_bf16,
        "use_cpu": work.device == "cpu",
        **({"ddp_backend": work.backend} if work.ranks > 1 else {}),
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": work.steps,
    }
    if work.device == "cpu":
        same |= {"optim": "adamw_torch", "gradient_checkpointing": False}
    if work.strategy == "fsdp":
        same |= {"fsdp": "full_shard auto_wrap"}
    if work.strategy.startswith("zero"):
        prepare_deepspeed(work)
        same |= {"deepspeed": zero_config(work, int(work.strategy[-1]))}
    best = {"optim": "adamw_torch_fused", "torch_compile": True, "gradient_checkpointing": False}
    best |= {"ddp_find_unused_parameters": False}
    return same | (best if work.best else {})


class InOrder:
    """A Trainer that does not shuffle."""

    train_dataset: Any

    def _get_train_sampler(self, *_: object) -> Any:
        from torch.utils.data import SequentialSampler

        return SequentialSampler(self.train_dataset)
