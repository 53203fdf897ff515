"""Lightning's Trainer: DDP, FSDP, or FSDP2 by its ModelParallelStrategy."""

from __future__ import annotations

import os
from typing import Any

from paceline.examples.work import CLIP_NORM, Work, blocks_of, build_model, build_optimizer, loader, run


def train(work: Work) -> None:
    import torch
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = build_model(work)

        def configure_model(self) -> None:
            if work.strategy == "fsdp2":
                shard(self.model, self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            # With autocast, Lightning refuses to clip the gradients of a fused optimizer.
            return build_optimizer(work, self.model, may_fuse=False)

    module = Module().train()
    # Lightning compiles the training step, inside of which no forward pass can be seen.
    callbacks = []
    if work.best:
        from paceline.integrations.lightning import Callback

        callbacks.append(Callback())
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        accelerator="gpu" if work.device == "cuda" else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy=strategy_of(work, module),
        precision="bf16-mixed" if work.is_bf16 else "32-true",
        max_steps=work.steps,
        accumulate_grad_batches=work.accumulation,
        gradient_clip_val=CLIP_NORM,
        enable_model_summary=False,
        callbacks=callbacks,
        **quiet,
    )
    trainer.fit(torch.compile(module) if work.best else module, loader(work))


def shard(model: Any, mesh: Any) -> None:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if not isinstance(model, FSDPModule):
        for block in blocks_of(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)


def strategy_of(work: Work, module: Any) -> Any:
    """FSDP's units are the layers; Lightning would make one unit of the whole model."""
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

    if work.strategy == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=work.ranks, tensor_parallel_size=1)
    if work.strategy == "fsdp":
        return FSDPStrategy(auto_wrap_policy={type(blocks_of(module.model)[0])}, state_dict_type="sharded")
    return "ddp" if work.ranks > 1 else "auto"


if __name__ == "__main__":
    run("lightning", train)
