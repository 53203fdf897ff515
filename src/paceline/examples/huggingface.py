"""Hugging Face Trainer: DDP, FSDP, or DeepSpeed ZeRO-2 and 3, by its arguments."""

from __future__ import annotations

from paceline.examples.work import InOrder, Rows, Work, build_model, run, trainer_arguments


def train(work: Work) -> None:
    from transformers import Trainer, TrainingArguments

    class OrderedTrainer(InOrder, Trainer):  # type: ignore[misc]
        pass

    # Before the model, because DeepSpeed's settings change how it is built.
    arguments = TrainingArguments(**trainer_arguments(work))
    OrderedTrainer(build_model(work), arguments, train_dataset=Rows(work)).train()


if __name__ == "__main__":
    run("huggingface", train)
