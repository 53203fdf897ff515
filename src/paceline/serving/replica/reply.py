"""The answer to one request as it goes out: an event for each piece of text, or one body at the end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from paceline.serving.replica import wire
from paceline.serving.replica.asking import Asked
from paceline.serving.replica.words import Speech, StandInSpeech


@dataclass(slots=True)
class Reply:
    """`add` gives the bytes to send for a token, which may be none: half a character is no text yet."""

    number: int
    asked: Asked
    model: str
    speech: Speech | StandInSpeech
    tokens: int = 0
    text: list[str] = field(default_factory=list)
    created: int = field(default_factory=lambda: int(time.time()))

    def add(self, token: int, finish: str | None) -> bytes:
        self.tokens += 1
        # The token that ends an answer is counted, and is no text.
        piece = self.speech.add(token) if finish != "stop" else ""
        if finish is not None:
            piece += self.speech.rest()
        if not self.asked.streams:
            self.text.append(piece)
            return wire.answer(200, self._whole(finish)) if finish else b""
        head = wire.STREAM_HEAD if self.tokens == 1 else b""
        if finish is None:
            return head + (wire.chunk(self._event(piece, None)) if piece else b"")
        return head + wire.chunk(self._event(piece, finish) + self._tail()) + wire.LAST_CHUNK

    def _event(self, piece: str, finish: str | None) -> bytes:
        said: dict[str, Any] = {"delta": {"content": piece}} if self.asked.chat else {"text": piece}
        return wire.event({**self._head(), "choices": [{"index": 0, **said, "finish_reason": finish}]})

    def _tail(self) -> bytes:
        usage = wire.event({**self._head(), "choices": [], "usage": self._usage()}) if self.asked.wants_usage else b""
        return usage + wire.DONE

    def _head(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.asked.chat else "text_completion"
        return {"id": f"cmpl-{self.number}", "object": kind, "created": self.created, "model": self.model}

    def _whole(self, finish: str | None) -> dict[str, Any]:
        text = "".join(self.text)
        said: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text}} if self.asked.chat else {"text": text}
        )
        head = {**self._head(), "object": "chat.completion" if self.asked.chat else "text_completion"}
        return {**head, "choices": [{"index": 0, **said, "finish_reason": finish}], "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        prompt = len(self.asked.prompt)
        return {"prompt_tokens": prompt, "completion_tokens": self.tokens, "total_tokens": prompt + self.tokens}
