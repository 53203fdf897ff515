"""The prompts of a load test: synthetic, or from a file, each with the tokens allowed for its answer.

    synthetic:prompt=lognormal,prompt_mean=512,prompt_spread=0.6,answer=fixed,answer_mean=128
    synthetic:shared_prefix=1024,prefixes=4,turns=3       prefixes shared by prompts; dialogues that grow
    jsonl:path=FILE          {"prompt" | "token_ids" | "messages", "max_tokens"?, "reference"?} a line
    sharegpt:path=FILE       a list, or lines, of {"conversations": [{"from": "human" | "gpt", "value"}]}
    summaries:path=FILE      a list of {"tok_input" | "input", "output"}: the 13,368 articles of CNN/DailyMail
    trace:path=FILE          {"timestamp_s" | "timestamp" (ms), "input_length", "output_length"} a line

Prompt i is a function of the seed and i, or of line i, independent of who sends it and in which order. Generated
prompts (synthetic, trace) are token ids; as text (`form=text`), and in a chat, they are as many common words.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import RequestError, require
from paceline.experiment.choices import Choice

DISTRIBUTIONS = ("fixed", "uniform", "lognormal")
FORMS = ("ids", "text")
# Roles of a person in ShareGPT files.
SPEAKERS = ("human", "user")
# The number of synthetic prompts by default.
SYNTHETIC_COUNT = 256
# Most tokenizers have one token for each of these after a space.
_TEXT = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number way could people"
)
_WORDS = tuple(_TEXT.split())
LARGEST_FILE = 1 << 30
# Tokens of a prompt and of its answer.
Lengths = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Exactly one of token_ids, text and messages. due_s: the time in a trace. reference: a good answer."""

    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    max_tokens: int
    reference: str | None = None
    due_s: float | None = None


def _lengths(name: str, mean: float, spread: float, random: np.random.Generator, count: int) -> list[int]:
    """Lengths in tokens: fixed, uniform over mean +- spread * mean, or lognormal with that mean and the spread as the
    standard deviation of the logarithm."""
    if name == "fixed":
        drawn = np.full(count, mean)
    elif name == "uniform":
        drawn = random.uniform(mean * (1 - spread), mean * (1 + spread), count)
    else:
        drawn = random.lognormal(math.log(mean) - spread**2 / 2, spread, count)
    sizes: list[int] = np.maximum(np.rint(drawn), 1).astype(int).tolist()
    return sizes


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Options of `synthetic`. A dialogue of several turns gives as many prompts, each with all turns before it."""

    prompt: str = "lognormal"
    prompt_mean: float = 512.0
    prompt_spread: float = 0.6
    answer: str = "fixed"
    answer_mean: float = 128.0
    answer_spread: float = 0.0
    shared_prefix: int = 0
    prefixes: int = 1
    turns: int = 1
    form: str = "ids"

    def __post_init__(self) -> None:
        require(self.form in FORMS, "data form", self.form, " or ".join(FORMS))
        for part in ("prompt", "answer"):
            distribution, mean, spread = (getattr(self, f"{part}{end}") for end in ("", "_mean", "_spread"))
            require(distribution in DISTRIBUTIONS, f"data {part}", distribution, ", ".join(DISTRIBUTIONS))
            require(_is_number(mean) and mean >= 1, f"data {part}_mean", mean, "a number of tokens from 1")
            most = 1 if distribution == "uniform" else 3
            require(_is_number(spread) and 0 <= spread <= most, f"data {part}_spread", spread, f"0 to {most}")
        for name, least in (("shared_prefix", 0), ("prefixes", 1), ("turns", 1)):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            require(whole and value >= least, f"data {name}", value, f"a whole number from {least}")

    def _drawn(self, count: int, seed: int) -> list[tuple[int, int]]:
        """Tokens of each turn and of its answer."""
        draws = np.random.default_rng([seed, 2])
        sizes = _lengths(self.prompt, self.prompt_mean, self.prompt_spread, draws, count)
        answers = _lengths(self.answer, self.answer_mean, self.answer_spread, draws, count)
        return list(zip(sizes, answers, strict=True))

    def lengths(self, count: int, seed: int) -> Iterator[Lengths]:
        """Of each prompt, with all turns before it, and of its answer."""
        before = 0
        for number, (size, answer) in enumerate(self._drawn(count, seed)):
            before = size + (before if number % self.turns else self.shared_prefix)
            yield before, answer
            before += answer

    def prompts(self, count: int, seed: int, vocab: int, api: str) -> list[Prompt]:
        made: list[Prompt] = []
        turns: list[Turn] = []
        for number, (size, answer) in enumerate(self._drawn(count, seed)):
            random = np.random.default_rng([seed, 3, number])
            if number % self.turns == 0:
                shared = np.random.default_rng([seed, 4, number // self.turns % self.prefixes])
                prefix = tuple(shared.integers(0, vocab, self.shared_prefix).tolist())
                turns = [("system", prefix)] if prefix else []
            turns = [*turns, ("user", tuple(random.integers(0, vocab, size).tolist()))]
            made.append(_formed(turns, answer, self.form, api))
            # The next turn needs an answer of the model; this one has the same length.
            turns = [*turns, ("assistant", tuple(random.integers(0, vocab, answer).tolist()))]
        return made


# The role, and its tokens.
Turn = tuple[str, tuple[int, ...]]


def _formed(turns: Sequence[Turn], max_tokens: int, form: str, api: str, due_s: float | None = None) -> Prompt:
    """A prompt from tokens: the tokens themselves, words instead of them, or the turns of a chat."""
    if api == "chat":
        messages = tuple({"role": role, "content": _words(tokens)} for role, tokens in turns)
        return Prompt(messages=messages, max_tokens=max_tokens, due_s=due_s)
    tokens = tuple(token for _, each in turns for token in each)
    if form == "text":
        return Prompt(text=_words(tokens), max_tokens=max_tokens, due_s=due_s)
    return Prompt(token_ids=tokens, max_tokens=max_tokens, due_s=due_s)


def _words(tokens: Sequence[int]) -> str:
    return " ".join(_WORDS[token % len(_WORDS)] for token in tokens)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check(data: Choice, scenario: str | None = None) -> None:
    """RequestError for impossible data, as far as the options show: files are read where the client runs."""
    if data.name == "synthetic":
        _synthetic(data)
    require(data.name in ("synthetic", *_READERS), "data", data.name, f"synthetic, {', '.join(_READERS)}")
    has_times = data.name == "trace"
    require(scenario != "trace" or has_times, "data", str(data), "trace:path=FILE with scenario trace")
    if data.name in _READERS:
        accepted = {"path", "form"} if has_times else {"path"}
        fits = "path" in data.options and set(data.options) <= accepted
        require(fits, "data", str(data), f"{data.name}:path=FILE")
        form = data.options.get("form", FORMS[0])
        require(form in FORMS, "data form", form, " or ".join(FORMS))


def _synthetic(data: Choice) -> Synthetic:
    names = {field.name for field in fields(Synthetic)}
    require(set(data.options) <= names, "data", str(data), f"the options {', '.join(sorted(names))}")
    options: dict[str, Any] = dict(data.options)
    return Synthetic(**options)


def form_of(prompts: Sequence[Prompt]) -> str:
    """The form in which all prompts are sent: token_ids, text or messages; mixed if they differ."""
    forms = {"token_ids" if p.token_ids is not None else "messages" if p.messages else "text" for p in prompts}
    return forms.pop() if len(forms) == 1 else "mixed"


def open_prompts(
    data: Choice, *, count: int | None, seed: int, vocab: int, max_tokens: int, api: str = "completions"
) -> list[Prompt]:
    """At most `count` prompts of a file, or all if count is None; exactly `count` synthetic ones."""
    check(data)
    if data.name == "synthetic":
        return _synthetic(data).prompts(count or SYNTHETIC_COUNT, seed, vocab, api)
    form = str(data.options.get("form", FORMS[0]))
    context = FileContext(max_tokens=max_tokens, vocab=vocab, seed=seed, form=form, api=api)
    prompts = list(_READERS[data.name](Path(str(data.options["path"])).expanduser(), context))
    require(bool(prompts), "data", str(data), "a file with at least one prompt")
    return prompts[:count]


def longest_synthetic(data: Choice, *, count: int | None, seed: int) -> Lengths:
    """The longest of the prompts that `open_prompts` would make, with its answer. In words instead of token ids, and
    in a chat, a server may count more tokens."""
    return max(_synthetic(data).lengths(count or SYNTHETIC_COUNT, seed), key=sum)


def longest_of(prompts: Iterable[Prompt]) -> Lengths | None:
    """The longest prompt of token ids with its answer; None without any: how many tokens a text has is known to the
    server alone."""
    lengths = ((len(each.token_ids), each.max_tokens) for each in prompts if each.token_ids is not None)
    return max(lengths, key=sum, default=None)


# --- files ---


@dataclass(frozen=True, slots=True, kw_only=True)
class FileContext:
    """What a file does not contain: the tokens of an answer, and for a trace what its prompts are made of."""

    max_tokens: int
    vocab: int
    seed: int
    form: str
    api: str


Reader = Callable[[Path, FileContext], Iterator[Prompt]]


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    # Only line feeds end a line: JSON may contain other characters that Unicode counts as line ends.
    for number, line in enumerate(_text(path).split("\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, _object(_parsed(line, where), where)


def _entries(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """A list of objects, or one object per line if the file begins with an object."""
    text = _text(path)
    if text.lstrip()[:1] == "{" and "\n" in text.strip():
        yield from _lines(path)
        return
    whole = _parsed(text, str(path))
    require(isinstance(whole, list), f"data {path}", type(whole).__name__, "a list of objects")
    for number, entry in enumerate(whole):
        where = f"{path}, entry {number}"
        yield where, _object(entry, where)


def _text(path: Path) -> str:
    try:
        require(path.stat().st_size <= LARGEST_FILE, "data", str(path), "a file of at most 1 GiB")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"data: {str(path)!r} cannot be read ({error}). Expected a text file") from None


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"data {where}: not valid JSON ({error})") from None


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"data {where}: got a {type(value).__name__}, expected an object")
    return value


def _read_jsonl(path: Path, context: FileContext) -> Iterator[Prompt]:
    for where, line in _lines(path):
        most = line.get("max_tokens", context.max_tokens)
        require(type(most) is int and most >= 1, f"data {where}: max_tokens", most, "a whole number from 1")
        reference = line.get("reference")
        require(reference is None or isinstance(reference, str), f"data {where}: reference", reference, "text")
        if isinstance(line.get("prompt"), str) and line["prompt"]:
            yield Prompt(text=line["prompt"], max_tokens=most, reference=reference)
        elif _are_tokens(line.get("token_ids"), context.vocab):
            yield Prompt(token_ids=tuple(line["token_ids"]), max_tokens=most, reference=reference)
        elif isinstance(turns := line.get("messages"), list) and turns and all(map(_is_message, turns)):
            yield Prompt(messages=tuple(line["messages"]), max_tokens=most, reference=reference)
        else:
            accepted = f"prompt (text), token_ids (below {context.vocab}) or messages (role and content)"
            raise RequestError(f"data {where}: got {', '.join(line) or 'nothing'}, expected {accepted}.")


def _are_tokens(value: object, vocab: int) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int and 0 <= token < vocab for token in value)


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _read_sharegpt(path: Path, context: FileContext) -> Iterator[Prompt]:
    """The first question of each conversation; its answer there is not used as a reference. Conversations without a
    question are skipped."""
    for where, entry in _entries(path):
        chat: Any = next((entry[key] for key in ("conversations", "conversation", "messages") if key in entry), None)
        require(isinstance(chat, list), f"data {where}: conversations", chat, "a list of {from, value}")
        turns = [each for each in chat if isinstance(each, dict) and each.get("from", each.get("role")) in SPEAKERS]
        questions: list[Any] = [each.get("value", each.get("content")) for each in turns]
        first = questions[0] if questions else ""
        require(isinstance(first, str), f"data {where}: value", first, "text")
        if first.strip():
            yield Prompt(text=first, max_tokens=context.max_tokens)


def _read_summaries(path: Path, context: FileContext) -> Iterator[Prompt]:
    for where, entry in _entries(path):
        reference = entry.get("output")
        require(isinstance(reference, str), f"data {where}: output", reference, "the summary as text")
        # Sending text instead of invalid ids would be a different prompt.
        tokens = entry.get("tok_input")
        if tokens is not None:
            if not _are_tokens(tokens, context.vocab):
                # For a list, the first invalid token.
                invalid = [t for t in tokens if not _are_tokens([t], context.vocab)] if isinstance(tokens, list) else []
                accepted = f"token ids below {context.vocab}, the vocabulary of the model"
                require(False, f"data {where}: tok_input", invalid[0] if invalid else tokens, accepted)
            yield Prompt(token_ids=tuple(tokens), max_tokens=context.max_tokens, reference=reference)
        else:
            text = entry.get("input")
            require(isinstance(text, str), f"data {where}: input", text, "tok_input (token ids) or input (text)")
            yield Prompt(text=text, max_tokens=context.max_tokens, reference=reference)


def _read_trace(path: Path, context: FileContext) -> Iterator[Prompt]:
    for number, (where, line) in enumerate(_lines(path)):
        seconds: Any = line.get("timestamp_s", line.get("timestamp"))
        if "timestamp_s" not in line and _is_number(seconds):
            seconds = seconds / 1e3
        require(_is_number(seconds) and seconds >= 0, f"data {where}: timestamp", seconds, "timestamp_s or timestamp")
        lengths: list[Any] = [line.get(key) for key in ("input_length", "output_length")]
        whole = all(type(n) is int and n >= 1 for n in lengths)
        require(whole, f"data {where}: lengths", lengths, "input_length and output_length, whole numbers from 1")
        tokens = np.random.default_rng([context.seed, 3, number]).integers(0, context.vocab, lengths[0]).tolist()
        yield _formed([("user", tuple(tokens))], lengths[1], context.form, context.api, float(seconds))


_READERS: dict[str, Reader] = {
    "jsonl": _read_jsonl,
    "sharegpt": _read_sharegpt,
    "summaries": _read_summaries,
    "trace": _read_trace,
}
