"""A replica of known law in a thread of its own, and a client's process in this one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from testbed.requests import request

from paceline.loadgen import arrivals
from paceline.loadgen.orders import Orders, Shift, Target
from paceline.loadgen.shard import Shard
from paceline.mock_replica import Law, MockReplica


@pytest.fixture
def replica() -> Iterator[Callable[..., MockReplica]]:
    ended = threading.Event()
    threads = []

    def make(**law: Any) -> MockReplica:
        made = MockReplica(Law(**{"ttft_s": 0.01, "itl_s": 0.002, **law}))
        threads.append(threading.Thread(target=made.serve, args=(ended.is_set,)))
        threads[-1].start()
        return made

    yield make
    ended.set()
    for thread in threads:
        thread.join()


@pytest.fixture
def send() -> Callable[..., Shift]:
    def run(port: int, count: int = 10, payload: bytes | None = None, **more: Any) -> Shift:
        ports = more.pop("ports", [port])
        orders = {
            "numbers": list(range(count)),
            "due_ns": arrivals.constant(500, count),
            "replicas": [n % len(ports) for n in range(count)],
            "payloads": [payload or request()] * count,
            "targets": [Target(host="127.0.0.1", port=each) for each in ports],
            "timeout_s": 20.0,
            "keeps_text": True,
            **more,
        }
        shard = Shard(Orders(**orders))
        shard.connect()
        return shard.work(time.monotonic_ns() + 10_000_000)

    return run
