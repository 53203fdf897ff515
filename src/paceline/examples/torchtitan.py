"""torchtitan's own Trainer and config, on its Llama 3 model: DDP, or FSDP2.

Its data and initial weights are ours, by a train spec: torchtitan would read text, and draw other weights for each way
of sharding.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from paceline.examples.work import CLIP_NORM, LEARNING_RATE, SIZES, Work, await_device, loader, run

SHAPES = {
    "tiny": {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 32},
    "gpt2-tiny": {"dim": 64, "n_layers": 2, "n_heads": 4, "multiple_of": 32},
    "gpt2-124m": {"dim": 768, "n_layers": 12, "n_heads": 12, "multiple_of": 256},
}


def train(work: Work) -> None:
    if work.device == "cpu":
        use_cpu()
    from torchtitan.config import ConfigManager
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.train import Trainer

    register_train_spec("paceline", train_spec(work))
    config = ConfigManager().parse_args(options(work))
    if work.lock:
        await_device(work.lock)
    trainer = Trainer(config)
    trainer.train()
    trainer.close()


def options(work: Work) -> list[str]:
    """The command line of torchtitan."""
    replicas, shards = (work.ranks, 1) if work.strategy == "ddp" else (1, work.ranks)
    tokens = work.micro_batch * work.accumulation * work.ranks
    settings = {
        "model.name": "paceline",
        "model.flavor": work.size,
        "job.dump_folder": "frameworks-out",
        "optimizer.lr": LEARNING_RATE,
        "optimizer.weight_decay": 0.0,
        "lr_scheduler.warmup_steps": 0,
        "lr_scheduler.decay_ratio": 0.0,
        "training.local_batch_size": work.micro_batch,
        "training.global_batch_size": tokens,
        "training.seq_len": work.length,
        "training.max_norm": CLIP_NORM,
        "training.steps": work.steps,
        "training.mixed_precision_param": "bfloat16" if work.is_bf16 else "float32",
        "parallelism.data_parallel_replicate_degree": replicas,
        "parallelism.data_parallel_shard_degree": shards,
        "comm.trace_buf_size": 0,
    }
    if work.best:
        settings |= {"activation_checkpoint.mode": "none"}
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return [*words, *(["--compile.enable"] if work.best else [])]


def train_spec(work: Work) -> Any:
    from torchtitan.models import llama3
    from torchtitan.models.llama3.model.args import TransformerModelArgs

    shape = TransformerModelArgs(vocab_size=SIZES[work.size]["vocabulary"], **SHAPES[work.size])
    return dataclasses.replace(
        llama3.get_train_spec(),
        model_cls=model_class(),
        model_args={work.size: shape},
        parallelize_fn=lambda model, *given: reducible(work, llama3.parallelize_llama(model, *given)),
        build_dataloader_fn=lambda **_: Batches(work),
        build_tokenizer_fn=None,
        build_validator_fn=None,
        build_metrics_processor_fn=(lambda *_: Quiet()) if work.device == "cpu" else None,
    )


def reducible(work: Work, model: Any) -> Any:
    """The model of which gloo can reduce gradients: it has no sums with a factor, which torchtitan sets."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if work.device == "cpu" and isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def model_class() -> type:
    import torch
    from torch.distributed.tensor import DTensor, distribute_tensor
    from torchtitan.models.llama3.model.model import Transformer

    class Seeded(Transformer):  # type: ignore[misc]
        """Draws the whole of each weight on the host, so that they are the same however they are sharded."""

        def init_weights(self, buffer_device: Any = None) -> None:
            super().init_weights(buffer_device)
            generator = torch.Generator().manual_seed(0)
            for weight in self.parameters():
                if weight.dim() > 1:
                    whole = 0.02 * torch.randn(weight.shape, generator=generator)
                    own = whole.to(weight.device)
                    sharded = isinstance(weight, DTensor)
                    weight.copy_(distribute_tensor(own, weight.device_mesh, weight.placements) if sharded else own)

    return Seeded


class Batches:
    """Micro batches of this rank, as torchtitan wants them: its labels are shifted by one."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Any]]:
        for batch in loader(self._work, shares=True):
            labels = batch["labels"].roll(-1, dims=1)
            labels[:, -1] = -100
            yield {"input": batch["input_ids"]}, labels


class Quiet(SimpleNamespace):
    """What the Trainer needs of its metrics where there is no GPU, whose memory they would read."""

    def __init__(self) -> None:
        colors = SimpleNamespace(red="", blue="", reset="")
        stats = SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
        monitor = SimpleNamespace(device_name="cpu", get_peak_stats=lambda: stats)
        super().__init__(color=colors, device_memory_monitor=monitor, ntokens_since_last_log=0, data_loading_times=[])

    def should_log(self, step: int) -> bool:
        return False

    def close(self) -> None:
        """Nothing is open."""


def use_cpu() -> None:
    """torchtitan takes the device that torch names as an accelerator, by a private function, and CUDA if there is none.
    Ranks on a CPU have one device."""
    import torch

    torch._utils._get_available_device_type = lambda: "cpu"
    os.environ["LOCAL_RANK"] = "0"
    from torchtitan.distributed import utils

    # It only shortens timeouts after the first step, with a barrier on devices that gloo refuses.
    utils.set_pg_timeouts = lambda *_, **__: None


if __name__ == "__main__":
    run("torchtitan", train)
