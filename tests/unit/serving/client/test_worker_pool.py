"""Several processes send one schedule; the audit believes none that was late."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from testbed.requests import request

from paceline.errors import UnsupportedError
from paceline.serving.client import audit, schedule, worker_pool
from paceline.serving.client.schedule import RequestResult, ShardResult, Target
from paceline.serving.mock import Latencies, serve_until_signalled


@pytest.fixture
def ports() -> Iterator[list[int]]:
    context = multiprocessing.get_context("fork")
    found, servers = context.Queue(), []
    for _ in range(2):
        law = Latencies(ttft_s=0.02, itl_s=0.005)
        servers.append(
            context.Process(target=serve_until_signalled, args=(law, "127.0.0.1", 0, found.put), daemon=True)
        )
        servers[-1].start()
    yield [found.get(timeout=60) for _ in servers]
    for server in servers:
        server.terminate()
        server.join()


def test_two_processes_send_each_request_once(ports: list[int]) -> None:
    whole = schedule.Plan(
        due_ns=schedule.poisson(300.0, 120, 1), samples=schedule.permuted(120, 120, 1), replicas=schedule.spread(120, 2)
    )
    targets = [Target(host="127.0.0.1", port=port) for port in ports]
    shares = [
        schedule.assignment_of(whole, share, lambda _: request(tokens=4), targets, connections=8)
        for share in whole.shares(2)
    ]
    shards = worker_pool.run(shares)
    assert len(shards) == 2
    handled = [each for shard in shards for each in shard.results]
    assert sorted(each.number for each in handled) == list(range(120))
    assert {each.error for each in handled} == {None}
    assert all(each.replica == each.number % 2 for each in handled)
    verdict = audit.judge(shards)
    assert verdict.unstamped == 0
    assert verdict.schedule_lag_p99_s is not None


def test_more_connections_than_the_system_allows(monkeypatch: pytest.MonkeyPatch, golden: object) -> None:
    monkeypatch.setattr(worker_pool.resource, "getrlimit", lambda _: (1024, 2048))
    with pytest.raises(UnsupportedError) as caught:
        worker_pool.require_files(5000)
    assert str(caught.value) == golden
    assert "5000" in str(caught.value)
    assert "5064" in str(caught.value)
    assert "2048" in str(caught.value)


def test_a_process_of_the_client_may_open_all_files_the_system_allows(
    ports: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open load has as many in flight as the server is slow to answer, whatever was connected beforehand."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(worker_pool, "RESERVED_FILES", 0)
    whole = schedule.Plan(
        due_ns=schedule.at_once(60), samples=schedule.permuted(60, 60, 1), replicas=schedule.spread(60, 2)
    )
    targets = [Target(host="127.0.0.1", port=port) for port in ports]
    share = schedule.assignment_of(whole, whole.shares(1)[0], lambda _: request(tokens=4), targets)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 20, hard))
    try:
        [shard] = worker_pool.run([share])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert {each.error for each in shard.results} == {None}
    assert shard.most_in_flight > 20


ANSWER = RequestResult(
    number=0, replica=0, due_ns=0, first_ns=100_000_000, first_byte_ns=1, pieces=4, coalesced=1, stamped=True
)
GOOD = ShardResult(
    results=[ANSWER],
    start_ns=0,
    schedule_lag_ns=[50_000] * 100,
    read_lag_ns=[30_000] * 100,
    reads=100,
    cpu_s=0.2,
    wall_s=1.0,
    most_in_flight=1,
    waited_for_cap=0,
    clock_doubt_ns=100,
    clock_drift_ns=10,
)


def test_a_punctual_client_is_reliable() -> None:
    assert audit.judge([GOOD]).is_valid


@pytest.mark.parametrize(
    "change",
    [
        {"schedule_lag_ns": [50_000] * 98 + [2_000_000] * 2},
        {"read_lag_ns": [50_000] * 98 + [6_000_000] * 2},
        {"cpu_s": 0.9},
        {"clock_drift_ns": -3_000_000},
    ],
)
def test_one_that_was_late_is_not(change: dict[str, object], golden: object) -> None:
    (reason,) = (
        audit.judge([GOOD, replace(GOOD, **change)]).reasons
        if "cpu_s" in change
        else audit.judge([replace(GOOD, **change)]).reasons
    )
    assert reason == golden


def test_slow_servers_leave_more_room_for_lag() -> None:
    """One percent of a median of 1 s is 10 ms."""
    late = replace(GOOD, schedule_lag_ns=[5_000_000] * 100)
    slow = [replace(GOOD.results[0], first_ns=1_000_000_000)]
    assert not audit.judge([late]).is_valid
    assert audit.judge([replace(late, results=slow)]).is_valid
