"""The same model, data and optimizer in several training frameworks, each in the loop that its users write.

    python benchmarks/frameworks.py FRAMEWORK [STEPS] [--size SIZE] [--settings default|best] [--device cuda]
    paceline run benchmarks/frameworks.yaml         six frameworks on a CPU, interleaved, with their levels of equality
    paceline run benchmarks/frameworks-gpu.yaml     the same on a GPU: gpt2-124m in bf16, defaults and best settings

Every framework trains in the same order on the same random sequences, with AdamW without weight decay and gradients
clipped at 1. On a GPU the products are in bf16. `default` sets only what makes the work equal and leaves the rest to
the framework; `best` adds what is known to be faster: fused AdamW, torch.compile, no activation checkpointing.
Frameworks are imported by their own loop only, so a missing one does not matter to the others.
"""

from __future__ import annotations

import argparse
import atexit
import fcntl
import os
import subprocess
from dataclasses import dataclass
from typing import Any

import torch

LEARNING_RATE, CLIP_NORM = 1e-3, 1.0


@dataclass(frozen=True)
class Work:
    """What every framework has to do. best: with the settings that are known to be fastest.

    lock: a file. Whoever has it locked has the device alone, so that several launches can import their framework and
    build their model at once, and train one after the other.
    """

    steps: int
    size: str
    micro_batch: int
    accumulation: int
    length: int
    vocabulary: int
    device: str = "cpu"
    best: bool = False
    lock: str | None = None

    @property
    def is_bf16(self) -> bool:
        return self.device == "cuda"

    def autocast(self) -> Any:
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.is_bf16)


SIZES = {
    "tiny": {"micro_batch": 4, "accumulation": 2, "length": 64, "vocabulary": 512},
    "gpt2-tiny": {"micro_batch": 4, "accumulation": 2, "length": 64, "vocabulary": 512},
    "gpt2-124m": {"micro_batch": 8, "accumulation": 2, "length": 1024, "vocabulary": 50257},
}


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random sequences, the same in every framework."""

    def __init__(self, work: Work) -> None:
        shape = (work.steps * work.micro_batch * work.accumulation, work.length)
        self.ids = torch.randint(3, work.vocabulary, shape, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def new_model(work: Work) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
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


def await_device(path: str) -> None:
    """Have the device alone until a second after this process has ended, in which its end is recorded."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    atexit.register(keep_locked, handle)


def keep_locked(handle: int) -> None:
    subprocess.Popen(["sleep", "1"], pass_fds=[handle], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def build_optimizer(work: Work, model: Any, may_fuse: bool = True) -> Any:
    fused = {"fused": True} if work.best and may_fuse and work.device == "cuda" else {}
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, **fused)


def loader(work: Work) -> Any:
    return torch.utils.data.DataLoader(Rows(work), batch_size=work.micro_batch, pin_memory=work.best)


def plain(work: Work) -> None:
    """A loop as in nanoGPT."""
    model = build_model(work).to(work.device)
    optimizer, batches = build_optimizer(work, model), iter(loader(work))
    model = torch.compile(model) if work.best else model
    for _ in range(work.steps):
        for _ in range(work.accumulation):
            batch = {name: each.to(work.device, non_blocking=True) for name, each in next(batches).items()}
            with work.autocast():
                loss = model(**batch).loss / work.accumulation
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def accelerate(work: Work) -> None:
    from accelerate import Accelerator

    model = build_model(work)
    accelerator = Accelerator(
        gradient_accumulation_steps=work.accumulation,
        cpu=work.device == "cpu",
        mixed_precision="bf16" if work.is_bf16 else "no",
        dynamo_backend="inductor" if work.best else None,
    )
    model, optimizer, batches = accelerator.prepare(model, build_optimizer(work, model), loader(work))
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()


def arguments(work: Work) -> dict[str, Any]:
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
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": work.steps,
    }
    if work.device == "cpu":
        same |= {"optim": "adamw_torch", "gradient_checkpointing": False}
    best = {"optim": "adamw_torch_fused", "torch_compile": True, "gradient_checkpointing": False}
    return same | (best if work.best else {})


class InOrder:
    """A Trainer that does not shuffle."""

    train_dataset: Any

    def _get_train_sampler(self, *_: object) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trainer(work: Work) -> None:
    from transformers import Trainer, TrainingArguments

    class OrderedTrainer(InOrder, Trainer):
        pass

    OrderedTrainer(build_model(work), TrainingArguments(**arguments(work)), train_dataset=Rows(work)).train()


def trl(work: Work) -> None:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    class OrderedTrainer(InOrder, SFTTrainer):
        pass

    words = {"<pad>": 0, "<s>": 1, "</s>": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="</s>"
    )
    model = build_model(work)
    config = SFTConfig(max_length=work.length, dataset_kwargs={"skip_prepare_dataset": True}, **arguments(work))
    rows = Dataset.from_dict({"input_ids": Rows(work).ids.tolist()})
    OrderedTrainer(model, config, train_dataset=rows, processing_class=tokenizer).train()


def lightning(work: Work) -> None:
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build_model(work)

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
    Trainer(
        accelerator="gpu" if work.device == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed" if work.is_bf16 else "32-true",
        max_steps=work.steps,
        accumulate_grad_batches=work.accumulation,
        gradient_clip_val=CLIP_NORM,
        enable_model_summary=False,
        callbacks=callbacks,
        **quiet,
    ).fit(torch.compile(module) if work.best else module, loader(work))


def deepspeed(work: Work) -> None:
    """By default with bf16 weights and fp32 copies in the optimizer; the best settings use autocast, as the others."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if work.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    model = build_model(work)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo" if work.device == "cpu" else "nccl")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "gradient_accumulation_steps": work.accumulation,
        "gradient_clipping": CLIP_NORM,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    if work.is_bf16:
        config |= (
            {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}} if work.best else {"bf16": {"enabled": True}}
        )
    model = model.to(work.device)
    engine, *_ = deepspeed.initialize(model=model, optimizer=build_optimizer(work, model), config=config)
    if work.best:
        engine.compile()
    for batch in loader(work):
        moved = {name: each.to(engine.device, non_blocking=True) for name, each in batch.items()}
        engine.backward(engine(**moved).loss)
        engine.step()


FRAMEWORKS = {loop.__name__: loop for loop in (plain, accelerate, trainer, trl, lightning, deepspeed)}


def work_of(steps: int = 24, size: str = "tiny", settings: str = "default", **more: Any) -> Work:
    return Work(steps=steps, size=size, best=settings == "best", **more, **SIZES[size])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument("steps", nargs="?", type=int, default=24)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--settings", choices=("default", "best"), default="default")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--lock", metavar="FILE", help="train only while this file is locked")
    given = parser.parse_args()
    work = work_of(given.steps, given.size, given.settings, device=given.device, lock=given.lock)
    FRAMEWORKS[given.framework](work)


if __name__ == "__main__":
    main()
