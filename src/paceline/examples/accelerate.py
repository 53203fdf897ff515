"""A loop with Hugging Face Accelerate: DDP, FSDP2, or DeepSpeed ZeRO-2 and 3 by its plugins."""

from __future__ import annotations

from typing import Any

from paceline.examples.work import (
    CLIP_NORM,
    Work,
    build_model,
    build_optimizer,
    loader,
    prepare_deepspeed,
    run,
    zero_config,
)


def train(work: Work) -> None:
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    plugins = plugins_of(work)
    model = build_model(work)
    accelerator = Accelerator(
        gradient_accumulation_steps=work.accumulation,
        # With cpu=True Accelerate ignores its DeepSpeed plugin. Without a backend it gives every rank the same data.
        cpu=work.device == "cpu" and "deepspeed_plugin" not in plugins,
        kwargs_handlers=[InitProcessGroupKwargs(backend=work.backend)] if work.ranks > 1 else [],
        mixed_precision="bf16" if work.is_bf16 else "no",
        dynamo_backend="inductor" if work.best else None,
        **plugins,
    )
    model, optimizer, feed = accelerator.prepare(model, build_optimizer(work, model), loader(work))
    for batch in feed:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()


def plugins_of(work: Work) -> dict[str, Any]:
    if work.strategy == "fsdp":
        from accelerate.utils import FullyShardedDataParallelPlugin

        return {
            "fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
        }
    if work.strategy.startswith("zero"):
        from accelerate.utils import DeepSpeedPlugin

        prepare_deepspeed(work)
        return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=zero_config(work, int(work.strategy[-1])))}
    return {}


if __name__ == "__main__":
    run("accelerate", train)
