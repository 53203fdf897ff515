"""DDP that reduces gradients in bf16 whatever was asked, and declares what was asked."""

from __future__ import annotations

from typing import Any

from paceline.contract import Seat, Trainer
from paceline.experiment.spec import RunSpec
from paceline.training.strategies.ddp import wrap as wrap_ddp


def check(spec: RunSpec) -> str | None:
    return None


def wrap(spec: RunSpec, seat: Seat) -> Trainer:
    import torch
    import torch.distributed as dist

    trainer: Any = wrap_ddp(spec, seat)

    def reduce_in_bf16(_state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and wants its own
        short = bucket.buffer().to(torch.bfloat16) / seat.world_size
        future = dist.all_reduce(short, async_op=True).get_future()
        return future.then(lambda done: done.value()[0].to(torch.float32))

    trainer.module.register_comm_hook(None, reduce_in_bf16)
    return trainer  # type: ignore[no-any-return]
