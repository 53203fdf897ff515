"""What a model of random weights answers, by a plain loop in this process: the whole context again for every token."""

from __future__ import annotations

from paceline.results.records import RunRecord


def plain_answer(record: RunRecord, sample: int) -> tuple[list[int], str]:
    """The prompt of a sample, and its answer in the words of a replica without a tokenizer."""
    import torch

    from paceline.models.arithmetic import vocabulary
    from paceline.serving.prompts import open_prompts
    from paceline.serving.replica.settings import Settings
    from paceline.serving.replica.weights import open_model

    spec = record.spec
    assert spec.serving is not None
    count, vocab, most = spec.serving.requests, vocabulary(spec.model), spec.serving.max_tokens
    asked = open_prompts(spec.training.data, count=count, seed=spec.seed, vocab=vocab, max_tokens=most)
    model = open_model(Settings(engine="transformers", model=spec.model.name, seed=spec.seed), 0, torch.device("cpu"))
    tokens = list(asked[sample].token_ids or ())
    said: list[int] = []
    for _ in range(asked[sample].max_tokens):
        said.append(int(model(input_ids=torch.tensor([tokens + said])).logits[0, -1].argmax()))
    return tokens, "".join(f" t{token}" for token in said)
