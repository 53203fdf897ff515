"""Instructions out of a JSONL file the user brings: one document a line, of which only the responses are learned.

`jsonl:path=FILE,tokenizer=DIR,packed=true`. A line holds prompt and response, as they are; or instruction, input and
output, in Alpaca's layout; or messages with role and content, in the tokenizer's chat template (without one: a line
`role: content` each), of which the assistant's are learned. Prompt and response are tokenised apart, so that what is
learned begins with a token. Without a tokenizer every byte of the UTF-8 text is a token, which random weights suffice
for, and the record says so. Row i is row i modulo the rows of the file: it is read again from its start when it ends.
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
# Lines looked at before anything starts; the rest are read by the run itself.
CHECKED_LINES = 100
BYTES = 256
END_BYTE = 0
ALPACA = "### Instruction:\n{instruction}\n\n{context}### Response:\n"

# Pieces of a document in order: text, and whether it is learned.
Pieces = list[tuple[str, bool]]
Encode = Callable[[Pieces], Document]


@dataclass(frozen=True)
class Dialogues:
    """The documents of one file, laid out in rows once."""

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
    """Reads and tokenises the whole file. Documents are cut to a row; one with nothing left to learn is left out."""
    path, tokenizer = _options(data)
    encode, render = _encoder(tokenizer)
    read = [encode(pieces) for pieces in _lines(path, render)]
    _require_vocabulary(data, read, vocab)
    cut = [document.cut(length) for document in read]
    kept = [document for document in cut if document.label_tokens]
    if not kept:
        raise RequestError(f"data: {path} holds no document of which a token is learned within {length} tokens")
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
    """Refuse a file or tokenizer that is not there, what the first lines already show, and a file without a response:
    every document has an end to learn, so that the run would go through and teach that alone."""
    path, _ = _options(data)
    answered = False
    for number, pieces in enumerate(_lines(path, _plain), start=1):
        answered = answered or any(learned and text.strip() for text, learned in pieces)
        if answered and number >= CHECKED_LINES:
            return
    if not answered:
        raise RequestError(f"data: every response in {path} is empty; accepted is a file with something to learn")


def _options(data: Choice) -> tuple[Path, Path | None]:
    options = dict(data.options)
    path, tokenizer = Path(str(options.pop("path", ""))), options.pop("tokenizer", None)
    packed = options.pop("packed", False)
    require(not options, "data", str(data), "the options path, tokenizer and packed")
    require(isinstance(packed, bool), "data packed", packed, "true or false")
    if not path.is_file():
        raise RequestError(f"data: the file {str(path)!r} does not exist; accepted is a file of one JSON object a line")
    if tokenizer is None:
        return path, None
    folder = Path(str(tokenizer))
    if not (folder / "tokenizer_config.json").is_file() and not (folder / "tokenizer.json").is_file():
        raise RequestError(
            f"data tokenizer: {str(folder)!r} was given; accepted is a model's directory with its tokenizer"
        )
    return path, folder


# --- lines ---


def _lines(path: Path, render: Callable[[Any], Pieces]) -> Iterator[Pieces]:
    """Pieces of every line that is not blank; a line that is none of the accepted forms is one sentence."""
    found = False
    with path.open(encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    found = True
                    yield _pieces(line, f"data: {path} line {number}", render)
        except UnicodeDecodeError:
            raise RequestError(f"data: {path} is no UTF-8 text; accepted is one JSON object a line") from None
    if not found:
        raise RequestError(f"data: {path} holds no line; accepted is one JSON object a line")


def _pieces(line: str, where: str, render: Callable[[Any], Pieces]) -> Pieces:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise RequestError(f"{where}: it is no JSON; accepted is {ACCEPTED}") from None
    if not isinstance(value, dict):
        raise RequestError(f"{where}: it is no object; accepted is {ACCEPTED}")
    if "messages" in value:
        return render(_messages(value["messages"], where))
    if "instruction" in value:
        instruction, context, output = (_text(value, key, where) for key in ("instruction", "input", "output"))
        context = f"### Input:\n{context}\n\n" if context else ""
        return [(ALPACA.format(instruction=instruction, context=context), False), (output, True)]
    if "prompt" not in value or "response" not in value:
        keys = ", ".join(sorted(value)[:5]) or "nothing"
        raise RequestError(f"{where}: it has {keys}; accepted is {ACCEPTED}")
    return [(_text(value, "prompt", where), False), (_text(value, "response", where), True)]


def _text(value: Mapping[str, Any], key: str, where: str) -> str:
    """Alpaca's input may be absent; everything else must be text."""
    text = value.get(key, "" if key == "input" else None)
    if not isinstance(text, str):
        raise RequestError(f"{where}: {key} is {json.dumps(text)[:40]}; accepted is text")
    return text


def _messages(given: object, where: str) -> list[dict[str, str]]:
    sound = isinstance(given, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in given
    )
    if not sound or not any(m["role"] == "assistant" for m in given):  # type: ignore[attr-defined]
        raise RequestError(
            f"{where}: messages is no list of role and content; accepted is one with an assistant's message"
        )
    return [{"role": m["role"], "content": m["content"]} for m in given]  # type: ignore[attr-defined]


def _plain(messages: Sequence[Mapping[str, str]]) -> Pieces:
    pieces: Pieces = []
    for message in messages:
        pieces.append((f"{message['role']}: ", False))
        pieces.append((f"{message['content']}\n", message["role"] == "assistant"))
    return pieces


# --- tokens ---


def _encoder(folder: Path | None) -> tuple[Encode, Callable[[Any], Pieces]]:
    """How pieces become a document, and how messages become pieces."""
    if folder is None:
        return _encode_bytes, _plain
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingPackageError("transformers", "a tokenizer", "transformers") from None
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise RequestError(f"data tokenizer: {str(folder)!r} cannot be read as a tokenizer ({reason})") from None
    if not tokenizer.chat_template:
        return lambda pieces: _encode_words(tokenizer, pieces), _plain
    return lambda pieces: _encode_words(tokenizer, pieces), lambda messages: _templated(tokenizer, messages)


def _encode_bytes(pieces: Pieces) -> Document:
    parts = [(list(text.encode()), learned) for text, learned in pieces]
    return _joined([*parts, ([END_BYTE], True)])


def _encode_words(tokenizer: Any, pieces: Pieces) -> Document:
    """The beginning and end marks of the tokenizer around it, unless the text (a chat template's) brings its own."""
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
    """What the template adds with each message; an assistant's message is learned from where its generation begins."""
    pieces: Pieces = []
    before = ""
    for count, message in enumerate(messages, start=1):
        if message["role"] == "assistant":
            asked = _rendered(tokenizer, messages[: count - 1], generation=True)
            pieces.append((_continuation(asked, before), False))
            before = asked
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
        raise UnsupportedError("the tokenizer's chat template rewrites earlier messages, so responses cannot be told")
    return text[len(before) :]


def _require_vocabulary(data: Choice, documents: Sequence[Document], vocab: int) -> None:
    top = max((int(document.tokens.max()) for document in documents if len(document.tokens)), default=0)
    if top >= vocab:
        raise UnsupportedError(f"{data} holds token ids up to {top}, but the model's vocabulary has {vocab}")
