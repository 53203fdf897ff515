"""How much load this host's client can be believed at: steps up until it cannot, against a server of known law.

Client and server share the host here, so the ceiling is no higher than it would be with the server elsewhere.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from paceline.loadgen import arrivals, audit, plan, team
from paceline.loadgen.orders import Shift, Target
from paceline.mock_replica import Law, serve_until_told

TTFT_S = 0.1
FIRST_EVENTS_PER_S = 1000.0
FACTOR = 1.6
MOST_EVENTS_PER_S = 200_000.0
START_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One try. asked is the load that was planned; events_per_s what arrived while it lasted."""

    asked_events_per_s: float
    events_per_s: float
    streams: int
    failed: int
    ttft_error_ratio: float | None
    verdict: audit.Verdict

    @property
    def is_valid(self) -> bool:
        return self.verdict.is_valid and self.failed == 0

    @property
    def text(self) -> str:
        lags = [self.verdict.schedule_lag_p99_s, self.verdict.read_lag_p99_s]
        late, read = (f"{lag * 1e3:.2f} ms" if lag is not None else "unknown" for lag in lags)
        off = f", TTFT off by {self.ttft_error_ratio:.1%} (p50)" if self.ttft_error_ratio is not None else ""
        said = "VALID" if self.is_valid else f"INVALID(client): {'; '.join(self.verdict.reasons) or 'requests failed'}"
        return (
            f"{self.asked_events_per_s:>9,.0f} events/s asked, {self.events_per_s:,.0f} seen over {self.streams:,} "
            f"streams: sent {late} late, read {read} late (p99), {self.verdict.cpu_ratio:.0%} of a core{off}: {said}"
        )


def climb(streams: int, seconds: float, shards: int) -> Iterator[Rung]:
    """Ever more events per second; the first rung that is not believed is the last."""
    asked = FIRST_EVENTS_PER_S
    while asked <= MOST_EVENTS_PER_S:
        rung = one(asked, min(streams, round(asked / 2)), seconds, shards)
        yield rung
        if not rung.is_valid:
            return
        asked *= FACTOR


def one(events_per_s: float, streams: int, seconds: float, shards: int) -> Rung:
    itl_s = streams / events_per_s
    tokens = max(2, round(seconds / 2 / itl_s))
    law = Law(ttft_s=TTFT_S, itl_s=itl_s, tokens=tokens)
    shifts = drive(law, streams, seconds, shards)
    handled = [each for shift in shifts for each in shift.handled]
    answered = [each for each in handled if each.error is None]
    first = [(h.first_ns - h.sent_ns) / 1e9 for h in answered if h.first_ns is not None and h.sent_ns is not None]
    wall = max(shift.wall_s for shift in shifts)
    return Rung(
        asked_events_per_s=events_per_s,
        events_per_s=sum(each.pieces for each in answered) / wall,
        streams=sum(shift.most_in_flight for shift in shifts),
        failed=len(handled) - len(answered),
        ttft_error_ratio=abs(float(np.median(first)) / law.ttft_s - 1) if first else None,
        verdict=audit.judge(shifts),
    )


def drive(law: Law, streams: int, seconds: float, shards: int) -> list[Shift]:
    """Poisson arrivals that keep so many answers under way, for so long."""
    team.require_files(2 * streams)
    context = multiprocessing.get_context("fork")
    ports = context.Queue()
    server = context.Process(target=serve_until_told, args=(law, "127.0.0.1", 0, ports.put), daemon=True)
    server.start()
    try:
        port = int(ports.get(timeout=START_S))
        rate = streams / (law.ttft_s + law.itl_s * law.tokens)
        count = max(1, int(rate * seconds))
        whole = plan.Plan(
            due_ns=arrivals.poisson(rate, count, seed=1),
            samples=np.zeros(count, dtype=np.int64),
            replicas=plan.spread(count, 1),
        )
        room = min(count, round(streams * 1.2 / shards) + 1)
        targets = [Target(host="127.0.0.1", port=port)]
        return team.run(
            [
                plan.orders_of(whole, part, [_request(law.tokens, port)], targets, connections=room, timeout_s=120.0)
                for part in whole.shares(shards)
                if len(part)
            ]
        )
    finally:
        server.terminate()
        server.join()


def _request(tokens: int, port: int) -> bytes:
    body = json.dumps({"model": "mock", "prompt": "x", "max_tokens": tokens, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
