"""A loop of one's own, as in nanoGPT: DDP, or FSDP2 (`fully_shard`)."""

from __future__ import annotations

from typing import Any

from paceline.examples.work import CLIP_NORM, Work, batches, blocks_of, build_model, build_optimizer, run


def train(work: Work) -> None:
    import torch
    import torch.distributed as dist

    if work.ranks > 1 or work.strategy == "fsdp":
        if work.device == "cuda":
            torch.cuda.set_device(work.own_device)
        dist.init_process_group(work.backend)
    model = build_model(work).to(work.own_device)
    wrapped, optimizer = wrap(work, model)
    feed = batches(work)
    for _ in range(work.steps):
        for micro_batch in range(work.accumulation):
            synchronize(wrapped, micro_batch == work.accumulation - 1)
            with work.autocast():
                loss = wrapped(**next(feed)).loss / work.accumulation
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def wrap(work: Work, model: Any) -> tuple[Any, Any]:
    """The model as the strategy wraps it, and its optimizer."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if work.strategy == "fsdp":
        for block in blocks_of(model):
            fully_shard(block)
        fully_shard(model)
    optimizer = build_optimizer(work, model)
    model = torch.compile(model) if work.best else model
    if work.strategy == "ddp" and work.ranks > 1:
        model = DistributedDataParallel(model)
    return model, optimizer


def synchronize(model: Any, is_last: bool) -> None:
    """Reduce gradients after the last micro batch of a step only."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(is_last)
    elif hasattr(model, "require_backward_grad_sync"):
        # What DDP's `no_sync` sets, as nanoGPT does it.
        model.require_backward_grad_sync = is_last


if __name__ == "__main__":
    run("plain_loop", train)
