"""What a served model is asked: prompts of a stated law, or of a file the user brings, each with the tokens allowed.

    synthetic:prompt=lognormal,prompt_mean=512,prompt_spread=0.6,answer=fixed,answer_mean=128
    synthetic:shared_prefix=1024,prefixes=4,turns=3       prefixes shared by prompts; dialogues that grow
    jsonl:path=FILE          {"prompt" | "token_ids" | "messages", "max_tokens"?, "reference"?} a line
    sharegpt:path=FILE       a list of {"conversations": [{"from": "human" | "gpt", "value"}]}
    summaries:path=FILE      a list of {"tok_input" | "input", "output"}: the 13,368 articles of CNN/DailyMail
    trace:path=FILE          {"timestamp_s" | "timestamp" (ms), "input_length", "output_length"} a line

Prompt i is a function of the seed and i, or of line i; whoever sends it and in whatever order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import RequestError
from paceline.spec import Choice, require

LAWS = ("fixed", "uniform", "lognormal")
LARGEST_FILE = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Exactly one of token_ids, text and messages. due_s is a trace's time, reference what a good answer says."""

    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    max_tokens: int
    reference: str | None = None
    due_s: float | None = None


@dataclass(frozen=True, slots=True)
class Law:
    """Lengths in tokens: all alike, evenly spread over mean +- spread * mean, or lognormal with that mean and the
    standard deviation of the logarithm."""

    name: str
    mean: float
    spread: float

    def draw(self, random: np.random.Generator, count: int) -> list[int]:
        if self.name == "fixed":
            drawn = np.full(count, self.mean)
        elif self.name == "uniform":
            drawn = random.uniform(self.mean * (1 - self.spread), self.mean * (1 + self.spread), count)
        else:
            drawn = random.lognormal(math.log(self.mean) - self.spread**2 / 2, self.spread, count)
        sizes: list[int] = np.maximum(np.rint(drawn), 1).astype(int).tolist()
        return sizes


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Options of `synthetic`. A dialogue of several turns is as many prompts, each with all that was said before."""

    prompt: str = "lognormal"
    prompt_mean: float = 512.0
    prompt_spread: float = 0.6
    answer: str = "fixed"
    answer_mean: float = 128.0
    answer_spread: float = 0.0
    shared_prefix: int = 0
    prefixes: int = 1
    turns: int = 1

    def __post_init__(self) -> None:
        for part in ("prompt", "answer"):
            law, mean, spread = (getattr(self, f"{part}{end}") for end in ("", "_mean", "_spread"))
            require(law in LAWS, f"data {part}", law, ", ".join(LAWS))
            require(_is_number(mean) and mean >= 1, f"data {part}_mean", mean, "a number of tokens from 1")
            most = 1 if law == "uniform" else 3
            require(_is_number(spread) and 0 <= spread <= most, f"data {part}_spread", spread, f"0 to {most}")
        for name, least in (("shared_prefix", 0), ("prefixes", 1), ("turns", 1)):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            require(whole and value >= least, f"data {name}", value, f"a whole number from {least}")

    def prompts(self, count: int, seed: int, vocab: int) -> list[Prompt]:
        lengths = np.random.default_rng([seed, 2])
        sizes = Law(self.prompt, self.prompt_mean, self.prompt_spread).draw(lengths, count)
        answers = Law(self.answer, self.answer_mean, self.answer_spread).draw(lengths, count)
        made: list[Prompt] = []
        said: tuple[int, ...] = ()
        for number, (size, answer) in enumerate(zip(sizes, answers, strict=True)):
            random = np.random.default_rng([seed, 3, number])
            if number % self.turns == 0:
                said = self._prefix(number // self.turns, seed, vocab)
            said += tuple(random.integers(0, vocab, size).tolist())
            made.append(Prompt(token_ids=said, max_tokens=answer))
            # What the model would have said: the next turn needs something in its place, of the same length.
            said += tuple(random.integers(0, vocab, answer).tolist())
        return made

    def _prefix(self, dialogue: int, seed: int, vocab: int) -> tuple[int, ...]:
        random = np.random.default_rng([seed, 4, dialogue % self.prefixes])
        return tuple(random.integers(0, vocab, self.shared_prefix).tolist())


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def open_prompts(data: Choice, *, count: int | None, seed: int, vocab: int, max_tokens: int) -> list[Prompt]:
    """As many prompts as asked for; of a file at most as many as it holds, and all of them where none are asked for."""
    if data.name == "synthetic":
        names = {field.name for field in fields(Synthetic)}
        require(set(data.options) <= names, "data", str(data), f"the options {', '.join(sorted(names))}")
        options: dict[str, Any] = dict(data.options)
        return Synthetic(**options).prompts(count or 1, seed, vocab)
    require(data.name in _READERS, "data", data.name, f"synthetic, {', '.join(_READERS)}")
    require(set(data.options) == {"path"}, "data", str(data), f"{data.name}:path=FILE")
    found = list(_READERS[data.name](Path(str(data.options["path"])).expanduser(), max_tokens, vocab))
    require(bool(found), "data", str(data), "a file that holds at least one prompt")
    return found[:count]


# --- files ---

Reader = Callable[[Path, int, int], Iterator[Prompt]]


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(_text(path).splitlines(), 1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, _object(_parsed(line, where), where)


def _entries(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    whole = _parsed(_text(path), str(path))
    require(isinstance(whole, list), f"data {path}", type(whole).__name__, "a list of objects")
    for number, entry in enumerate(whole):
        where = f"{path}, entry {number}"
        yield where, _object(entry, where)


def _text(path: Path) -> str:
    try:
        require(path.stat().st_size <= LARGEST_FILE, "data", str(path), "a file of at most 1 GiB")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"data: {str(path)!r} cannot be read ({error}); accepted is a text file") from None


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"data {where}: no JSON was given ({error})") from None


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"data {where}: a {type(value).__name__} was given; accepted is an object")
    return value


def _read_jsonl(path: Path, max_tokens: int, vocab: int) -> Iterator[Prompt]:
    for where, line in _lines(path):
        asked = line.get("max_tokens", max_tokens)
        require(isinstance(asked, int) and asked >= 1, f"data {where}: max_tokens", asked, "a whole number from 1")
        reference = line.get("reference")
        words = {"max_tokens": asked, "reference": reference if isinstance(reference, str) else None}
        if isinstance(line.get("prompt"), str):
            yield Prompt(text=line["prompt"], **words)
        elif _are_tokens(line.get("token_ids"), vocab):
            yield Prompt(token_ids=tuple(line["token_ids"]), **words)
        elif _are_messages(line.get("messages")):
            yield Prompt(messages=tuple(line["messages"]), **words)
        else:
            accepted = f"prompt (text), token_ids (below {vocab}) or messages (role and content)"
            raise RequestError(f"data {where}: {', '.join(line) or 'nothing'} was given; accepted is {accepted}")


def _are_tokens(value: object, vocab: int) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int and 0 <= token < vocab for token in value)


def _are_messages(value: object) -> bool:
    def is_one(each: object) -> bool:
        return isinstance(each, dict) and all(isinstance(each.get(key), str) for key in ("role", "content"))

    return isinstance(value, list) and bool(value) and all(map(is_one, value))


def _read_sharegpt(path: Path, max_tokens: int, vocab: int) -> Iterator[Prompt]:
    """The first question of each conversation; what was answered there is no reference, but tells its length."""
    for where, entry in _entries(path):
        said: Any = entry.get("conversations", entry.get("conversation"))
        require(isinstance(said, list), f"data {where}: conversations", said, "a list of {from, value}")
        asked = [each["value"] for each in said if isinstance(each, dict) and each.get("from") in ("human", "user")]
        if asked and isinstance(asked[0], str) and asked[0].strip():
            yield Prompt(text=asked[0], max_tokens=max_tokens)


def _read_summaries(path: Path, max_tokens: int, vocab: int) -> Iterator[Prompt]:
    for where, entry in _entries(path):
        reference = entry.get("output")
        require(isinstance(reference, str), f"data {where}: output", reference, "the summary as text")
        if _are_tokens(entry.get("tok_input"), vocab):
            yield Prompt(token_ids=tuple(entry["tok_input"]), max_tokens=max_tokens, reference=reference)
        else:
            text = entry.get("input")
            require(isinstance(text, str), f"data {where}: input", text, "tok_input (token ids) or input (text)")
            yield Prompt(text=text, max_tokens=max_tokens, reference=reference)


def _read_trace(path: Path, max_tokens: int, vocab: int) -> Iterator[Prompt]:
    for number, (where, line) in enumerate(_lines(path)):
        seconds: Any = line["timestamp_s"] if "timestamp_s" in line else _milliseconds(line.get("timestamp"))
        require(_is_number(seconds) and seconds >= 0, f"data {where}: timestamp", seconds, "timestamp_s or timestamp")
        lengths: list[Any] = [line.get(key) for key in ("input_length", "output_length")]
        whole = all(type(n) is int and n >= 1 for n in lengths)
        require(whole, f"data {where}: lengths", lengths, "input_length and output_length, whole numbers from 1")
        tokens: list[int] = np.random.default_rng([3, number]).integers(0, vocab, lengths[0]).tolist()
        yield Prompt(token_ids=tuple(tokens), max_tokens=lengths[1], due_s=float(seconds))


def _milliseconds(value: object) -> object:
    return value / 1e3 if isinstance(value, int | float) and not isinstance(value, bool) else value


_READERS: dict[str, Reader] = {
    "jsonl": _read_jsonl,
    "sharegpt": _read_sharegpt,
    "summaries": _read_summaries,
    "trace": _read_trace,
}
