"""The same model, data and optimizer in several training frameworks, each in the loop that its users write.

    python benchmarks/frameworks.py FRAMEWORK [STEPS]      one of: plain, accelerate, trainer, trl, lightning, deepspeed
    paceline run benchmarks/frameworks.yaml                all of them, interleaved, with their levels of equality

A decoder of 0.14 million weights in fp32 on one process; each step has 2 micro batches of 4 sequences of 64 tokens, in
the same order everywhere; AdamW without weight decay, gradients clipped at 1. Frameworks are imported by their own loop
only, so a missing one does not matter to the others.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

MICRO_BATCH, ACCUMULATION, LENGTH, VOCABULARY = 4, 2, 64, 512
LEARNING_RATE, CLIP_NORM = 1e-3, 1.0


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random sequences, the same in every framework."""

    def __init__(self, steps: int) -> None:
        shape = (steps * MICRO_BATCH * ACCUMULATION, LENGTH)
        self.ids = torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def build_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, pad_token_id=0, **shape))


def build_optimizer(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)


def loader(steps: int) -> Any:
    return torch.utils.data.DataLoader(Rows(steps), batch_size=MICRO_BATCH)


def plain(steps: int) -> None:
    """A loop as in nanoGPT."""
    model = build_model()
    optimizer, batches = build_optimizer(model), iter(loader(steps))
    for _ in range(steps):
        for _ in range(ACCUMULATION):
            (model(**next(batches)).loss / ACCUMULATION).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def accelerate(steps: int) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION, cpu=True)
    model = build_model()
    model, optimizer, batches = accelerator.prepare(model, build_optimizer(model), loader(steps))
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()


def arguments(steps: int) -> dict[str, Any]:
    """Arguments of a Hugging Face Trainer that ask for the same work."""
    return {
        "output_dir": "frameworks-out",
        "per_device_train_batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "max_steps": steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": CLIP_NORM,
        "optim": "adamw_torch",
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": steps,
    }


class InOrder:
    """A Trainer that does not shuffle."""

    train_dataset: Any

    def _get_train_sampler(self, *_: object) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trainer(steps: int) -> None:
    from transformers import Trainer, TrainingArguments

    class OrderedTrainer(InOrder, Trainer):
        pass

    OrderedTrainer(build_model(), TrainingArguments(**arguments(steps)), train_dataset=Rows(steps)).train()


def trl(steps: int) -> None:
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
    config = SFTConfig(max_length=LENGTH, dataset_kwargs={"skip_prepare_dataset": True}, **arguments(steps))
    rows = Dataset.from_dict({"input_ids": Rows(steps).ids.tolist()})
    OrderedTrainer(build_model(), config, train_dataset=rows, processing_class=tokenizer).train()


def lightning(steps: int) -> None:
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build_model()

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return build_optimizer(self.model)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        accumulate_grad_batches=ACCUMULATION,
        gradient_clip_val=CLIP_NORM,
        enable_model_summary=False,
        **quiet,
    ).fit(Module().train(), loader(steps))


def deepspeed(steps: int) -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    model = build_model()
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIP_NORM,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=build_optimizer(model), config=config)
    for batch in loader(steps):
        engine.backward(engine(**batch).loss)
        engine.step()


FRAMEWORKS = {loop.__name__: loop for loop in (plain, accelerate, trainer, trl, lightning, deepspeed)}

if __name__ == "__main__":
    FRAMEWORKS[sys.argv[1]](int(sys.argv[2]) if len(sys.argv) > 2 else 24)
