"""What the client holds on this machine, against a server of known law in another process.

    python benchmarks/loadgen.py [--streams 5000] [--events 25000] [--seconds 20] [--shards 1]

Prints streams held, events/s, the error of TTFT and TPOT against the law, schedule lag, read lag and processor time.
The server tells what it was late by itself, which no client can see: its share stands beside the client's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import urllib.request
from typing import Any

import numpy as np

from paceline.loadgen import arrivals, audit, plan, team
from paceline.loadgen.orders import Handled, Shift, Target
from paceline.mock_replica import Law, serve_until_told

TTFT_S = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=5000)
    parser.add_argument("--events", type=float, default=25_000, help="events per second of all streams")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--shards", type=int, default=1)
    asked = parser.parse_args()
    itl_s = asked.streams / asked.events
    tokens = max(2, round(asked.seconds / 2 / itl_s))
    law = Law(ttft_s=TTFT_S, itl_s=itl_s, tokens=tokens)
    shifts, told = run(law, asked)
    print(json.dumps(summary(law, shifts, told), indent=1))


def run(law: Law, asked: argparse.Namespace) -> tuple[list[Shift], dict[str, Any]]:
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    server = context.Process(target=serve_until_told, args=(law, "127.0.0.1", 0, found.put), daemon=True)
    team.require_files(asked.streams * 2)
    server.start()
    port = found.get(timeout=60)
    rate = asked.streams / (law.ttft_s + law.itl_s * law.tokens)
    count = int(rate * asked.seconds)
    whole = plan.Plan(
        due_ns=arrivals.poisson(rate, count, seed=1),
        samples=np.zeros(count, dtype=np.int64),
        replicas=plan.spread(count, 1),
    )
    targets = [Target(host="127.0.0.1", port=port)]
    room = round(asked.streams * 1.2 / asked.shards)
    shares = [
        plan.orders_of(whole, part, [request(law.tokens, port)], targets, connections=room, timeout_s=120.0)
        for part in whole.shares(asked.shards)
    ]
    try:
        shifts = team.run(shares)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/law") as answer:
            return shifts, json.load(answer)
    finally:
        server.terminate()
        server.join()


def request(tokens: int, port: int) -> bytes:
    body = json.dumps({"model": "mock", "prompt": "x", "max_tokens": tokens, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def summary(law: Law, shifts: list[Shift], told: dict[str, Any]) -> dict[str, Any]:
    handled = [each for shift in shifts for each in shift.handled]
    ok = [each for each in handled if each.error is None]
    verdict = audit.judge(shifts)
    wall = max(shift.wall_s for shift in shifts)
    return {
        "requests": len(handled),
        "failed": len(handled) - len(ok),
        "streams held": sum(shift.most_in_flight for shift in shifts),
        "events/s": round(sum(each.pieces for each in ok) / wall),
        "ttft ms (from send)": percentiles([(h.first_ns - h.sent_ns) / 1e6 for h in ok if h.first_ns and h.sent_ns]),
        "ttft law ms": law.ttft_s * 1e3,
        "tpot ms": percentiles([tpot_ms(h) for h in ok]),
        "tpot law ms": law.itl_s * 1e3,
        "server late ms": {name: round(value * 1e3, 3) for name, value in told["late_s"].items()},
        "schedule lag p99 ms": milliseconds(verdict.schedule_lag_p99_s),
        "read lag p99 ms": milliseconds(verdict.read_lag_p99_s),
        "coalesced": verdict.coalesced_ratio,
        "client cpu": [round(shift.cpu_s / shift.wall_s, 2) for shift in shifts],
        "verdict": "VALID" if verdict.is_valid else f"INVALID(client): {'; '.join(verdict.reasons)}",
    }


def tpot_ms(handled: Handled) -> float:
    assert handled.first_ns is not None
    assert handled.last_ns is not None
    return (handled.last_ns - handled.first_ns) / 1e6 / (handled.pieces - 1)


def percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{p}": round(float(np.percentile(values, p)), 3) for p in (50, 99)}


def milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


if __name__ == "__main__":
    main()
