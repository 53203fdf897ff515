"""A replica of known law in a thread of its own, and a client's process in this one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from testbed import replicas
from testbed.requests import request

from paceline.serving.client import schedule
from paceline.serving.client.schedule import Assignment, ShardResult, Target
from paceline.serving.client.shard import Shard
from paceline.serving.mock import Latencies, MockReplica


@pytest.fixture
def replica() -> Iterator[Callable[..., MockReplica]]:
    ended = threading.Event()
    threads = []

    def make(**law: Any) -> MockReplica:
        made = MockReplica(Latencies(**{"ttft_s": 0.01, "itl_s": 0.002, **law}))
        threads.append(threading.Thread(target=made.serve, args=(ended.is_set,)))
        threads[-1].start()
        return made

    yield make
    ended.set()
    for thread in threads:
        thread.join()


@pytest.fixture
def send() -> Callable[..., ShardResult]:
    def run(port: int, count: int = 10, payload: bytes | None = None, **more: Any) -> ShardResult:
        ports = more.pop("ports", [port])
        orders = {
            "numbers": list(range(count)),
            "due_ns": schedule.constant(500, count),
            "replicas": [n % len(ports) for n in range(count)],
            "payloads": [payload or request()] * count,
            "targets": [Target(host="127.0.0.1", port=each) for each in ports],
            "timeout_s": 20.0,
            "keeps_text": True,
            **more,
        }
        shard = Shard(Assignment(**orders))
        shard.connect()
        return shard.work(time.monotonic_ns() + 10_000_000)

    return run


@pytest.fixture
def server() -> Iterator[Callable[..., int]]:
    """The port of a replica in a process of its own. dies_after: killed by the request after so many."""
    servers: list[replicas.Replica] = []

    def make(**law: Any) -> int:
        servers.append(replicas.start(**{"itl_s": 0.002, **law}))
        return int(servers[-1].url.rpartition(":")[2])

    yield make
    for each in servers:
        each.end()
