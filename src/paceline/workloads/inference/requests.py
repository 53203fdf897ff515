"""Requests to replicas as bytes, and what came back as samples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from paceline.contract import Endpoint
from paceline.results.served_samples import ClientSample, RequestSample
from paceline.serving.client.orders import Handled, Shift, Target
from paceline.serving.prompts import Prompt

CHAT = "chat"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One endpoint, the rank that opened it and that rank's host."""

    rank: int
    host: str
    endpoint: Endpoint

    def to_dict(self) -> dict[str, Any]:
        e = self.endpoint
        told = {"url": e.url, "model": e.model, "secret": e.secret, "certificates": e.certificates}
        return {"rank": self.rank, "host": self.host, "endpoint": {**told, "facts": dict(e.facts)}}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Replica:
        return cls(rank=raw["rank"], host=raw["host"], endpoint=Endpoint(**raw["endpoint"]))


class Bodies:
    """What is sent of each sample, made once. Replicas of one model are sent the same bytes."""

    def __init__(self, prompts: Sequence[Prompt], endpoints: Sequence[Endpoint], api: str) -> None:
        self._prompts, self._endpoints, self._api = prompts, endpoints, api
        self._made: dict[int, bytes | tuple[bytes, ...]] = {}

    def of(self, sample: int) -> bytes | tuple[bytes, ...]:
        """After a target's head; one for each replica where they are asked for different things."""
        found = self._made.get(sample)
        if found is None:
            each = tuple(body(self._prompts[sample], endpoint, self._api) for endpoint in self._endpoints)
            found = self._made[sample] = each[0] if len(set(each)) == 1 else each
        return found


def head(endpoint: Endpoint, api: str) -> bytes:
    """What only this replica is told: its path, its host and its key."""
    parts = urlsplit(endpoint.url)
    path = parts.path.rstrip("/") + ("/v1/chat/completions" if api == CHAT else "/v1/completions")
    lines = [f"POST {path} HTTP/1.1", f"Host: {parts.netloc}", "Content-Type: application/json"]
    lines += [f"Authorization: Bearer {endpoint.secret}"] if endpoint.secret else []
    return "\r\n".join([*lines, "Accept: text/event-stream", ""]).encode()


def body(prompt: Prompt, endpoint: Endpoint, api: str) -> bytes:
    """Greedy, and exactly as many tokens as asked for where the server can be told so."""
    told: dict[str, Any] = {"model": endpoint.model, "max_tokens": prompt.max_tokens, "temperature": 0.0}
    told |= {"stream": True, "stream_options": {"include_usage": True}, **endpoint.facts.get("body", {})}
    if api == CHAT:
        said = prompt.messages or ({"role": "user", "content": prompt.text or ""},)
        told["messages"] = list(said)
    else:
        told["prompt"] = list(prompt.token_ids) if prompt.token_ids is not None else prompt.text
    text = json.dumps(told).encode()
    return f"Content-Length: {len(text)}\r\n\r\n".encode() + text


def target_of(endpoint: Endpoint, api: str) -> Target:
    parts = urlsplit(endpoint.url)
    secure = parts.scheme == "https"
    assert parts.hostname is not None
    port = parts.port or (443 if secure else 80)
    return Target(
        host=parts.hostname, port=port, tls=secure, certificates=endpoint.certificates, head=head(endpoint, api)
    )


# --- what was seen ---


def request_sample(handled: Handled, origin_ns: int, prompt: Prompt, **told: Any) -> RequestSample:
    """Times from the common start of the run; told are its place in the run: rank, stage, number, sample, replica."""

    def since(moment: int | None) -> int | None:
        return None if moment is None else moment - origin_ns

    gaps = np.diff(np.asarray(handled.token_ns, dtype=np.int64)).tolist() if len(handled.token_ns) else []
    return RequestSample(
        due_ns=handled.due_ns - origin_ns,
        sent_ns=since(handled.sent_ns),
        first_byte_ns=since(handled.first_byte_ns),
        first_ns=since(handled.first_ns),
        last_ns=since(handled.last_ns),
        ended_ns=since(handled.ended_ns),
        pieces=handled.pieces,
        tokens=handled.tokens_told,
        prompt_tokens=handled.prompt_tokens,
        asked_tokens=prompt.max_tokens,
        sent_ids=None if prompt.token_ids is None else len(prompt.token_ids),
        coalesced=handled.coalesced,
        stamped=handled.stamped,
        error=handled.error,
        detail=handled.detail,
        first_reasoning_ns=since(handled.first_reasoning_ns),
        finish=handled.finish,
        attempt=handled.attempt,
        token_ns=tuple(gaps),
        text=handled.text,
        **told,
    )


def client_sample(shift: Shift, **told: Any) -> ClientSample:
    """told are its place in the run: rank, shard, stage and the digest of the plan."""
    schedule, reads = (_percentiles(values) for values in (shift.schedule_lag_ns, shift.read_lag_ns))
    return ClientSample(
        requests=len(shift.handled),
        reads=shift.reads,
        schedule_lag_p50_ns=schedule[0],
        schedule_lag_p99_ns=schedule[1],
        read_lag_p50_ns=reads[0],
        read_lag_p99_ns=reads[1],
        cpu_s=shift.cpu_s,
        wall_s=shift.wall_s,
        most_in_flight=shift.most_in_flight,
        waited_for_cap=shift.waited_for_cap,
        clock_doubt_ns=shift.clock_doubt_ns,
        clock_drift_ns=shift.clock_drift_ns,
        **told,
    )


def _percentiles(values: Sequence[int]) -> tuple[float | None, float | None]:
    if not len(values):
        return None, None
    low, high = np.percentile(np.asarray(values, dtype=np.int64), (50, 99)).tolist()
    return low, high
