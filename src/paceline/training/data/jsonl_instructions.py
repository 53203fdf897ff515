"""Instructions from the user's JSONL file: one document per line, of which only the responses are learned.

`jsonl:path=FILE,tokenizer=DIR,packed=true`. A line has prompt and response, used as they are; or instruction, input and
output, in Alpaca's layout; or messages with role and content, in the tokenizer's chat template (without one, a line
`role: content` each), where the assistant's messages are learned. Prompt and response are tokenised separately, so that
the response begins with a whole token. Without a tokenizer every byte of the UTF-8 text is a token. After the last row
the file starts again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import MissingPackageError, RequestError, Scalar, UnsupportedError, require
from paceline.experiment.choices import Choice
from paceline.training.data.packing import Document, Row, lay_out, pack

ACCEPTED = "an object with prompt and response, instruction, input and output, or messages"
# Lines checked before anything starts; the run reads the rest.
CHECKED_LINES = 100
BYTES = 256
END_BYTE = 0
ALPACA = "### Instruction:\n{instruction}\n\n{context}### Response:\n"

# Pieces of a document in order: text, and whether it is learned.
Pieces = list[tuple[str, bool]]
Encode = Callable[[Pieces], Document]


@dataclass(frozen=True)
class Dialogues:
    """The documents of one file, and the rows they are packed into."""

    rows: tuple[tuple[int, ...], ...]
    documents: Sequence[Document]
    length: int
    facts: dict[str, Scalar] = field(default_factory=dict)

    def row(self, index: int) -> Row:
        return lay_out([self.documents[number] for number in self._numbers(index)], self.length)

    def label_tokens(self, index: int) -> int:
        return sum(self.documents[number].label_tokens for number in self._numbers(index))

    def _numbers(self, index: int) -> tuple[int, ...]:
        return self.rows[index % len(self.rows)]


def open_dialogues(data: Choice, vocab: int, length: int, seed: int) -> Dialogues:
    """Read and tokenise the whole file. Documents are cut to a row; those with nothing left to learn are dropped."""
    path, tokenizer = _options(data)
    encode, render = _encoder(tokenizer)
    read = [encode(pieces) for pieces in _lines(path, render)]
    top = max((int(document.tokens.max()) for document in read if len(document.tokens)), default=0)
    if top >= vocab:
        raise UnsupportedError(f"{data} has token ids up to {top}, but the model's vocabulary has {vocab}")
    cut = [document.cut(length) for document in read]
    kept = [document for document in cut if document.label_tokens]
    if not kept:
        raise RequestError(f"data: {path} has no document with a token to learn within the first {length} tokens")
    sizes = [len(document.tokens) for document in kept]
    rows = tuple(pack(sizes, length)) if data.options.get("packed") else tuple((i,) for i in range(len(kept)))
    facts: dict[str, Scalar] = {
        "data.tokenizer": "bytes" if tokenizer is None else tokenizer.name,
        "data.documents": len(kept),
        "data.cut_documents": sum(len(document.tokens) > length for document in read),
        "data.left_out_documents": len(read) - len(kept),
    }
    return Dialogues(rows, kept, length, facts)


def check_dialogues(data: Choice) -> None:
    """Reject a missing file or tokenizer, invalid first lines, and a file whose responses are all empty: its documents
    still have an end to learn, so a run would succeed and learn nothing else."""
    path, _ = _options(data)
    answered = False
    for number, pieces in enumerate(_lines(path, _plain), start=1):
        answered = answered or any(learned and text.strip() for text, learned in pieces)
        if answered and number >= CHECKED_LINES:
            return
    if not answered:
        raise RequestError(f"data: every response in {path} is empty, expected at least one with text.")


def _options(data: Choice) -> tuple[Path, Path | None]:
    options = dict(data.options)
    path, tokenizer = Path(str(options.pop("path", ""))), options.pop("tokenizer", None)
    packed = options.pop("packed", False)
    require(not options, "data", str(data), "the options path, tokenizer and packed")
    require(isinstance(packed, bool), "data packed", packed, "true or false")
    if not path.is_file():
        raise RequestError(
            f"data: got {str(path)!r}, which does not exist, expected a file with one JSON object per line."
        )
    if tokenizer is None:
        return path, None
    folder = Path(str(tokenizer))
    if not (folder / "tokenizer_config.json").is_file() and not (folder / "tokenizer.json").is_file():
        raise RequestError(f"data tokenizer: got {str(folder)!r}, expected a model directory with a tokenizer.")
    return path, folder


def _lines(path: Path, render: Callable[[Any], Pieces]) -> Iterator[Pieces]:
    """Pieces of every line that is not blank; an invalid line is an error with its number."""
    is_empty = True
    with path.open(encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    is_empty = False
                    yield _pieces(line, f"data: {path} line {number}", render)
        except UnicodeDecodeError:
            raise RequestError(f"data: {path} is not UTF-8 text, expected one JSON object per line.") from None
    if is_empty:
        raise RequestError(f"data: {path} is empty, expected one JSON object per line.")


def _pieces(line: str, where: str, render: Callable[[Any], Pieces]) -> Pieces:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise RequestError(f"{where}: not JSON, expected {ACCEPTED}.") from None
    if not isinstance(value, dict):
        raise RequestError(f"{where}: not an object, expected {ACCEPTED}.")
    if "messages" in value:
        given = value["messages"]
        is_valid = isinstance(given, list) and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in given
        )
        if not is_valid or not any(message["role"] == "assistant" for message in given):
            raise RequestError(
                f"{where}: messages is invalid, expected a list of role and content with an assistant's message."
            )
        return render([{"role": message["role"], "content": message["content"]} for message in given])
    if "instruction" in value:
        instruction, context, output = (_text(value, key, where) for key in ("instruction", "input", "output"))
        context = f"### Input:\n{context}\n\n" if context else ""
        return [(ALPACA.format(instruction=instruction, context=context), False), (output, True)]
    if "prompt" not in value or "response" not in value:
        keys = ", ".join(sorted(value)[:5]) or "nothing"
        raise RequestError(f"{where}: got an object with {keys}, expected {ACCEPTED}.")
    return [(_text(value, "prompt", where), False), (_text(value, "response", where), True)]


def _text(value: Mapping[str, Any], key: str, where: str) -> str:
    """The text of a field; only Alpaca's input may be missing."""
    text = value.get(key, "" if key == "input" else None)
    if not isinstance(text, str):
        raise RequestError(f"{where}, {key}: got {json.dumps(text)[:40]}, expected text.")
    return text


def _plain(messages: Sequence[Mapping[str, str]]) -> Pieces:
    pieces: Pieces = []
    for message in messages:
        pieces.append((f"{message['role']}: ", False))
        pieces.append((f"{message['content']}\n", message["role"] == "assistant"))
    return pieces


def _encoder(folder: Path | None) -> tuple[Encode, Callable[[Any], Pieces]]:
    """How pieces become a document, and how messages become pieces."""
    if folder is None:
        return lambda pieces: _joined(
            [*((list(t.encode()), learned) for t, learned in pieces), ([END_BYTE], True)]
        ), _plain
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingPackageError("transformers", "a tokenizer", "transformers") from None
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise RequestError(f"data tokenizer: cannot read a tokenizer from {str(folder)!r} ({reason})") from None
    if not tokenizer.chat_template:
        return lambda pieces: _encode_words(tokenizer, pieces), _plain
    return lambda pieces: _encode_words(tokenizer, pieces), lambda messages: _templated(tokenizer, messages)


def _encode_words(tokenizer: Any, pieces: Pieces) -> Document:
    """Tokens with the tokenizer's begin and end marks, unless the text of a chat template has its own."""
    parts = [(tokenizer(text, add_special_tokens=False)["input_ids"], learned) for text, learned in pieces]
    ids = [token for part, _ in parts for token in part]
    first, last = tokenizer.bos_token_id, tokenizer.eos_token_id
    if first is not None and ids[:1] != [first]:
        parts.insert(0, ([first], False))
    if last is not None and last not in ids[-2:]:
        parts.append(([last], True))
    return _joined(parts)


def _joined(parts: Sequence[tuple[Sequence[int], bool]]) -> Document:
    tokens = [token for part, _ in parts for token in part]
    learned = [flag for part, flag in parts for _ in part]
    return Document(np.asarray(tokens, dtype=np.int64), np.asarray(learned, dtype=bool))


def _templated(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> Pieces:
    """The text that the template adds per message. An assistant's message is learned after the generation prompt."""
    pieces: Pieces = []
    before = ""
    for count, message in enumerate(messages, start=1):
        if message["role"] == "assistant":
            prompt = _rendered(tokenizer, messages[: count - 1], generation=True)
            pieces.append((_continuation(prompt, before), False))
            before = prompt
        text = _rendered(tokenizer, messages[:count], generation=False)
        pieces.append((_continuation(text, before), message["role"] == "assistant"))
        before = text
    return pieces


def _rendered(tokenizer: Any, messages: Sequence[Mapping[str, str]], *, generation: bool) -> str:
    if not messages:
        return ""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
    return str(text)


def _continuation(text: str, before: str) -> str:
    if not text.startswith(before):
        raise UnsupportedError(
            "the tokenizer's chat template rewrites earlier messages, so responses cannot be separated"
        )
    return text[len(before) :]
