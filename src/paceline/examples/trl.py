"""TRL's SFTTrainer, on sequences that are tokens already: DDP, FSDP, or DeepSpeed ZeRO-2 and 3, as Trainer."""

from __future__ import annotations

from paceline.examples.work import InOrder, Rows, Work, build_model, run, trainer_arguments


def train(work: Work) -> None:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    class OrderedTrainer(InOrder, SFTTrainer):  # type: ignore[misc]
        pass

    words = {"<pad>": 0, "<s>": 1, "</s>": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="</s>"
    )
    skip = {"skip_prepare_dataset": True}
    config = SFTConfig(max_length=work.length, dataset_kwargs=skip, **trainer_arguments(work))
    model = build_model(work)
    rows = Dataset.from_dict({"input_ids": Rows(work).ids.tolist()})
    OrderedTrainer(model, config, train_dataset=rows, processing_class=tokenizer).train()


if __name__ == "__main__":
    run("trl", train)
