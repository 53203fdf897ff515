"""A whole Llama in a directory, as people download them, made here: random weights, a tokenizer of made-up words."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

VOCAB, CONTEXT = 512, 1024
SYLLABLES = ("pa", "ce", "li", "ne", "ro", "mi", "ta", "ku", "so", "ve")
END = "<|end|>"
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


def words(count: int, seed: int) -> str:
    draws = random.Random(seed)
    return " ".join("".join(draws.choices(SYLLABLES, k=draws.randint(1, 3))) for _ in range(count))


def write(directory: Path, seed: int = 7) -> Path:
    """The same directory for the same seed: config, safetensors and tokenizer."""
    import torch
    import transformers

    tokenizer = _tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        # Far from the usual 0.02: the likeliest token leads by more than the engines' arithmetic differs.
        initializer_range=0.3,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[_unshowable(tokenizer)] = 0.0
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _tokenizer() -> Any:
    import tokenizers
    import transformers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([words(4000, seed=1)], trainer)
    # Fewer merges than asked for are found in few words: the rest are words nobody has said yet.
    made.add_tokens([f"{SYLLABLES[n % 10]}{n}" for n in range(VOCAB - made.get_vocab_size())])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, chat_template=TEMPLATE)


def _unshowable(tokenizer: Any) -> list[int]:
    """Ids that are no text by themselves. They are never the likeliest: answers are compared as text, and each of their
    tokens is something to see."""
    texts = [tokenizer.decode([number]) for number in range(VOCAB)]
    return [
        number for number, shown in enumerate(texts) if not (shown.isascii() and shown.isprintable()) or shown == END
    ]


@functools.cache
def _opened(directory: Path) -> tuple[Any, Any]:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(directory)


def continuation(directory: Path, prompt: list[int], count: int) -> list[int]:
    """What transformers' own greedy decoding says after the prompt."""
    import torch

    given = torch.tensor([prompt])
    with torch.inference_mode():
        told = _opened(directory)[0].generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=count
        )
    return told[0, len(prompt) :].tolist()


def could_say(directory: Path, prompt: list[int], said: str, count: int, slack: float) -> bool:
    """Whether the text is of `count` tokens each of which has the best score, or one that is less by at most so many
    standard deviations of all scores: what greedy decoding may say where sums are rounded."""
    import torch

    if not count or not said:
        return not count and not said
    with torch.inference_mode():
        scores = _opened(directory)[0](input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1]
    good = torch.nonzero(scores >= scores.max() - slack * scores.std()).flatten().tolist()
    shown = [(token, text(directory, [token])) for token in good]
    return any(
        could_say(directory, [*prompt, token], said[len(piece) :], count - 1, slack)
        for token, piece in shown
        if said.startswith(piece)
    )


def token_ids(directory: Path, said: str) -> list[int]:
    return [int(number) for number in _opened(directory)[1](said, add_special_tokens=False)["input_ids"]]


def text(directory: Path, tokens: list[int]) -> str:
    return str(_opened(directory)[1].decode(tokens))


def answer(directory: Path, messages: list[dict[str, str]], count: int) -> str:
    """The same for a dialogue, by the model's own template."""
    made = _opened(directory)[1].apply_chat_template(messages, tokenize=False)
    return text(directory, continuation(directory, token_ids(directory, made), count))
