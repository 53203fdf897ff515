"""Finds the highest load at which this host's load generator stays accurate, against a mock server with known
latencies.

The server writes the time of sending into every token, on the clock that both share, so each timestamp of the client is
compared with the truth. Client and server share the host here: with the server elsewhere the ceiling is at least as
high.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.results.served_samples import CeilingSample
from paceline.serving.client import audit, schedule, worker_pool
from paceline.serving.client.schedule import Assignment, RequestResult, ShardResult, Target
from paceline.serving.mock import Latencies, serve_until_signalled

TTFT_S = 0.1
FIRST_EVENTS_PER_S = 1000.0
FACTOR = 1.6
MOST_EVENTS_PER_S = 200_000.0
START_S = 60.0
# How far an accurate client may be off: timestamps against the server's own, medians and 99th percentiles against the
# known latencies.
MOST_STAMP_ERROR_S = 1e-3
MOST_ERROR_P50, MOST_ERROR_P99 = 0.01, 0.05
# Longer than the server delays the first token of a connection at worst.
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Rung:
    """One try. asked_events_per_s is the planned load; everything else is computed from every request."""

    asked_events_per_s: float
    latencies: Latencies
    shards: Sequence[ShardResult]

    @cached_property
    def answered(self) -> list[RequestResult]:
        return [each for shard in self.shards for each in shard.results if each.error is None]

    @cached_property
    def verdict(self) -> audit.Verdict:
        return audit.judge(self.shards)

    @property
    def failed(self) -> int:
        return sum(len(shard.results) for shard in self.shards) - len(self.answered)

    @property
    def streams(self) -> int:
        return sum(shard.most_in_flight for shard in self.shards)

    @cached_property
    def events_per_s(self) -> float:
        """Over the second half of the arrivals: an answer lasts as long as the first half, so from then on as many end
        as begin."""
        due = [each.due_ns for each in self.answered]
        if not due or max(due) == min(due):
            return 0.0
        begin, end = (min(due) + max(due)) // 2, max(due)
        times = np.concatenate([np.asarray(each.token_ns, dtype=np.int64) for each in self.answered])
        return float(np.count_nonzero((times >= begin) & (times <= end)) / ((end - begin) / 1e9))

    @cached_property
    def stamp_errors_s(self) -> NDArray[np.float64]:
        """The kernel's time of every token minus the server's time of sending it."""
        sent = [np.array(str(each.text).split(), dtype=np.int64) for each in self.answered]
        seen = [np.asarray(each.token_ns, dtype=np.int64) for each in self.answered]
        pairs = [(s, t) for s, t in zip(seen, sent, strict=True) if len(s) == len(t)]
        return np.concatenate([(s - t) / 1e9 for s, t in pairs]) if pairs else np.zeros(0)

    @cached_property
    def off(self) -> dict[str, float | None]:
        """How far medians and 99th percentiles are from the known latencies, as a share."""
        first = [(h.first_ns - h.sent_ns) / 1e9 for h in self.answered if h.first_ns and h.sent_ns]
        each = [
            (h.last_ns - h.first_ns) / 1e9 / (h.pieces - 1)
            for h in self.answered
            if h.first_ns and h.last_ns and h.pieces > 1
        ]
        off: dict[str, float | None] = {}
        for name, seen, known in (("TTFT", first, self.latencies.ttft_s), ("TPOT", each, self.latencies.itl_s)):
            for p in (50, 99):
                measured = _percentile(seen, p)
                off[f"{name} p{p}"] = None if measured is None else abs(measured / known - 1)
        return off

    @cached_property
    def client_reasons(self) -> tuple[str, ...]:
        """Why the client is not accurate: its own audit, and the server's times of sending."""
        reasons = list(self.verdict.reasons)
        if self.failed:
            reasons.append(f"{self.failed} requests failed")
        if (error := _percentile(self.stamp_errors_s, 99)) is None or error > MOST_STAMP_ERROR_S:
            reasons.append(f"timestamps are {_ms(error)} off (p99), more than {_ms(MOST_STAMP_ERROR_S)}")
        return tuple(reasons)

    @cached_property
    def server_reasons(self) -> tuple[str, ...]:
        """Where the known latencies were not met. If the client is accurate, the server on the same processors was
        late."""
        reasons = []
        for name, off in self.off.items():
            most = MOST_ERROR_P50 if name.endswith("p50") else MOST_ERROR_P99
            if off is None or off > most:
                known = "unknown" if off is None else f"{off:.1%} off the known latency"
                reasons.append(f"{name} is {known}, more than {most:.0%}")
        return tuple(reasons)

    @property
    def reasons(self) -> tuple[str, ...]:
        return self.client_reasons + self.server_reasons

    @property
    def is_valid(self) -> bool:
        return not self.reasons

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, in seconds and shares; None is unknown."""
        return {
            "asked_events_per_s": self.asked_events_per_s,
            "events_per_s": self.events_per_s,
            "streams": self.streams,
            "schedule_lag_p99_s": self.verdict.schedule_lag_p99_s,
            "read_lag_p99_s": self.verdict.read_lag_p99_s,
            "stamp_error_p99_s": _percentile(self.stamp_errors_s, 99),
            "cpu_ratio": self.verdict.cpu_ratio,
            "off_the_law": dict(self.off),
            "valid": self.is_valid,
            "client_reasons": list(self.client_reasons),
            "server_reasons": list(self.server_reasons),
        }

    @property
    def text(self) -> str:
        late, read = _ms(self.verdict.schedule_lag_p99_s), _ms(self.verdict.read_lag_p99_s)
        off = ", ".join(f"{name} {'unknown' if off is None else f'{off:.2%}'}" for name, off in self.off.items())
        culprit = "client" if self.client_reasons else "server"
        verdict = "VALID" if self.is_valid else f"INVALID({culprit}): {'; '.join(self.reasons)}"
        stamps = _ms(_percentile(self.stamp_errors_s, 99))
        return (
            f"{self.asked_events_per_s:>9,.0f} events/s planned, {self.events_per_s:,.0f} measured over "
            f"{self.streams:,} streams: sent {late} late, read {read} late, stamps {stamps} off "
            f"(p99), {self.verdict.cpu_ratio:.0%} of a core, off the known latencies by {off}: {verdict}"
        )


def ceiling_of(rungs: Sequence[Rung], shards: int) -> CeilingSample | None:
    """The highest accurate try, with which runs on this host are compared; None if there was none."""
    best = next((rung for rung in reversed(rungs) if rung.is_valid and rung.events_per_s > 0), None)
    if best is None:
        return None
    return CeilingSample(
        rank=0, processes=shards, events_per_s=best.events_per_s, streams=best.streams, measured_at_s=time.time()
    )


def climb(streams: int, seconds: float, shards: int) -> Iterator[Rung]:
    """Ever more events per second; the first try that is not accurate is the last."""
    events_per_s = FIRST_EVENTS_PER_S
    while events_per_s <= MOST_EVENTS_PER_S:
        rung = one(events_per_s, min(streams, round(events_per_s / 2)), seconds, shards)
        yield rung
        if not rung.is_valid:
            return
        events_per_s *= FACTOR


def one(events_per_s: float, streams: int, seconds: float, shards: int) -> Rung:
    """Send Poisson arrivals that keep `streams` answers in progress, for this many seconds."""
    itl_s = streams / events_per_s
    latencies = Latencies(ttft_s=TTFT_S, itl_s=itl_s, tokens=max(2, round(seconds / 2 / itl_s)), mode="clock")
    worker_pool.require_files(2 * streams)
    with served(latencies) as port:
        return Rung(events_per_s, latencies, worker_pool.run(poisson_load(latencies, port, streams, seconds, shards)))


@contextmanager
def served(latencies: Latencies) -> Iterator[int]:
    """The port of a mock server in a process of its own."""
    context = multiprocessing.get_context("fork")
    ports = context.Queue()
    server = context.Process(target=serve_until_signalled, args=(latencies, "127.0.0.1", 0, ports.put), daemon=True)
    server.start()
    try:
        yield int(ports.get(timeout=START_S))
    finally:
        server.terminate()
        server.join()


def poisson_load(latencies: Latencies, port: int, streams: int, seconds: float, shards: int) -> list[Assignment]:
    rate = streams / (latencies.ttft_s + latencies.itl_s * latencies.tokens)
    count = max(1, int(rate * seconds))
    whole = schedule.Plan(
        due_ns=schedule.poisson(rate, count, seed=1),
        samples=np.zeros(count, dtype=np.int64),
        replicas=schedule.spread(count, 1),
    )
    more = {"connections": min(count, round(streams * 1.2 / shards) + 1), "timeout_s": TIMEOUT_S, "keeps_text": True}
    targets, payload = [Target(host="127.0.0.1", port=port)], completion(latencies.tokens, port)
    return [
        schedule.assignment_of(whole, part, lambda _: payload, targets, **more)
        for part in whole.shares(shards)
        if len(part)
    ]


def completion(tokens: int, port: int) -> bytes:
    """A complete HTTP request for an answer of this many tokens."""
    body = json.dumps({"model": "mock", "prompt": "x", "max_tokens": tokens, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _percentile(values: Sequence[float] | NDArray[np.float64], percentile: int) -> float | None:
    return float(np.percentile(values, percentile)) if len(values) else None


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e3:.2f} ms"
