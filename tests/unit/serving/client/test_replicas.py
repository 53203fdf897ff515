"""Several replicas, some of them gone, slow or failing: every request is answered once or listed as failed."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable

import pytest
from testbed.requests import request

from paceline.serving.client import schedule, worker_pool
from paceline.serving.client.replicas import REFUSALS, TIMEOUTS, ReplicaStates, RequestQueues
from paceline.serving.client.schedule import Assignment, Limits, ShardResult, Target
from paceline.serving.client.shard import Progress
from paceline.serving.mock import MockReplica

pytestmark = pytest.mark.slow

Send = Callable[..., ShardResult]
Make = Callable[..., MockReplica]
Serve = Callable[..., int]
ANY = schedule.ANY_REPLICA


def errors(shard: ShardResult) -> dict[str | None, int]:
    return dict(Counter(h.error for h in shard.results))


def once(shard: ShardResult, count: int) -> bool:
    return sorted(h.number for h in shard.results) == list(range(count))


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def lanes(replicas: list[int], targets: int) -> RequestQueues:
    made = RequestQueues(targets)
    for number, replica in enumerate(replicas):
        made.add(number, replica)
    return made


def test_the_least_busy_living_replica_is_chosen() -> None:
    states = ReplicaStates(3, most=2)
    for replica in (0, 0, 1):
        states.count_sent(replica)
    assert states.least_busy() == 2
    states.count_sent(2)
    # Of 1 and 2, with one each, the one that was given less so far; they are equal, so the first.
    assert states.least_busy() == 1
    for _ in range(REFUSALS):
        states.refused(1, 5)
    assert (states.least_busy(), states.died_ns) == (2, {1: 5})
    states.count_sent(2)
    assert states.least_busy() is None


def test_refusals_count_in_a_row_only() -> None:
    states = ReplicaStates(1, None)
    for _ in range(REFUSALS - 1):
        assert not states.refused(0, 1)
    states.accepted(0)
    assert [states.refused(0, 2) for _ in range(REFUSALS + 1)] == [False] * (REFUSALS - 1) + [True, False]


def test_a_full_replica_holds_up_nobody_else() -> None:
    states, waiting = ReplicaStates(2, most=1), lanes([0, 0, 1, ANY], 2)
    order = []
    while (found := waiting.take(states)) is not None:
        order.append(found)
        states.count_sent(found[1] or 0)
    assert order == [(0, 0), (2, 1)]
    states.in_flight[1] = 0
    assert waiting.take(states) == (3, 1)


def test_what_a_dead_replica_has_left_goes_to_any() -> None:
    states, waiting = ReplicaStates(2, None), lanes([0, 1, 0, 1], 2)
    states.died_ns[0] = 1
    waiting.release(0, states)
    assert [waiting.take(states) for _ in range(4)] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert states.reassigned == {0: 2}


def test_a_request_is_given_to_each_replica_once() -> None:
    states, waiting = ReplicaStates(2, None), RequestQueues(2)
    assert waiting.requeue(7, 0, states)
    assert waiting.take(states) == (7, 1)
    assert not waiting.requeue(7, 1, states)
    assert waiting.waiting == 0


def test_a_replica_killed_while_it_answers(server: Serve, send: Send) -> None:
    """Static partition over three; the second dies with requests in flight, and others still to come."""
    law = {"ttft_s": 0.05, "itl_s": 0.02}
    ports = [server(**law), server(**law, dies_after=9), server(**law)]
    # The tenth of its 40 requests kills it, on any machine; with at most ten in flight it refuses those still to come.
    shard = send(0, 120, ports=ports, due_ns=schedule.constant(40, 120), reassigns=True, per_replica=10)
    assert once(shard, 120)
    assert errors(shard) == {None: 120}
    assert list(shard.died_ns) == [1]
    moved = [h for h in shard.results if h.number % 3 == 1 and h.replica != 1]
    assert shard.reassigned[1] >= len(moved) >= 31
    tried = [h for h in shard.results if h.attempt]
    assert tried, "some were in flight on it"
    # Late by what the dead replica cost: the due time is the schedule's.
    assert all(h.sent_ns is not None and h.sent_ns > h.due_ns for h in tried)
    assert {(h.reported_tokens, h.pieces) for h in shard.results} == {(8, 8)}


def test_without_reassigning_they_are_listed_as_failed(server: Serve, send: Send) -> None:
    kept, lost = server(), server(ttft_s=0.05, itl_s=0.02, dies_after=9)
    shard = send(0, 80, ports=[kept, lost], due_ns=schedule.constant(80, 80), per_replica=10)
    assert once(shard, 80)
    counts = errors(shard)
    assert set(counts) <= {None, "connect", "reset", "truncated", "closed"}
    assert counts[None] < 80
    assert all(h.error is None for h in shard.results if h.replica == 0)
    assert shard.reassigned == {}


def test_nobody_is_left(closed_port: int, send: Send) -> None:
    shard = send(0, 9, ports=[closed_port] * 2, replicas=[ANY] * 9, reassigns=True)
    assert once(shard, 9)
    assert errors(shard) == {"connect": 9}
    assert sorted(shard.died_ns) == [0, 1]


def test_resets_are_tried_elsewhere_and_everywhere_once(replica: Make, send: Send) -> None:
    breaking, whole = replica(mode="reset").port, replica().port
    shard = send(0, 12, ports=[breaking, whole], reassigns=True)
    assert once(shard, 12)
    assert errors(shard) == {None: 12}
    assert {h.attempt for h in shard.results if h.number % 2 == 0} == {1}
    assert shard.died_ns == {}, "it accepts connections"
    shard = send(0, 6, ports=[breaking, breaking], reassigns=True)
    assert (errors(shard), {h.attempt for h in shard.results}) == ({"reset": 6}, {1})


@pytest.mark.parametrize(("mode", "error"), [("fail", "http_500"), ("refuse", "http_429"), ("stall", "timeout")])
def test_answers_that_are_no_success_stay_where_they_are(mode: str, error: str, replica: Make, send: Send) -> None:
    ports = [replica(mode=mode).port, replica().port]
    shard = send(0, 8, ports=ports, reassigns=True, timeout_s=5.0 if mode == "stall" else 60.0)
    assert once(shard, 8)
    failed = [h for h in shard.results if h.error]
    assert {(h.error, h.replica, h.attempt) for h in failed} == {(error, 0, 0)}
    if mode == "refuse":
        assert {str(h.detail)[:16] for h in failed} == {"Retry-After: 1; "}


def test_a_replica_that_answers_nothing_any_more_costs_three_requests(server: Serve, send: Send) -> None:
    ports = [server(), server(dies_after=0, lives_on=True)]
    shard = send(0, 60, ports=ports, due_ns=schedule.constant(40, 60), reassigns=True, timeout_s=0.4)
    assert once(shard, 60)
    assert errors(shard) == {None: 57, "timeout": TIMEOUTS}
    assert shard.reassigned == {1: 27}
    assert shard.died_ns == {}, "it accepts connections"
    assert {h.attempt for h in shard.results if h.error is None} == {0, 1}


def test_a_silent_replica_that_no_other_can_relieve_keeps_its_requests(server: Serve, send: Send) -> None:
    port = server(dies_after=0, lives_on=True)
    alone = send(port, 5, reassigns=True, timeout_s=0.3)
    assert errors(alone) == {"timeout": 5}
    fixed = send(0, 10, ports=[server(), port], timeout_s=0.3)
    assert errors(fixed) == {None: 5, "timeout": 5}


def test_timeouts_between_answers_are_not_silence() -> None:
    states = ReplicaStates(2, None)
    for moment in range(10):
        states.answered(1, moment)
        assert not states.timed_out(1, began_ns=moment), "it answered another request in that time"
    assert [states.timed_out(1, began_ns=100) for _ in range(TIMEOUTS)] == [False, False, True]
    states.suspended.add(1)
    assert (states.alive(), states.is_gone(1), states.is_gone(0)) == ([0], True, False)
    states.died_ns[0] = 1
    assert states.alive() == [1], "better a silent one than none"
    states.resume(1)
    assert not states.timed_out(1, began_ns=100), "the count starts again"


def test_the_faster_of_two_takes_more(replica: Make, send: Send) -> None:
    ports = [replica(ttft_s=0.005, itl_s=0.001).port, replica(ttft_s=0.03, itl_s=0.005).port]
    closed = {"due_ns": schedule.closed_loop(40), "concurrency": 4, "per_replica": 2}
    shard = send(0, 40, ports=ports, replicas=[ANY] * 40, **closed)
    assert once(shard, 40)
    share = Counter(h.replica for h in shard.results)
    assert share[0] > share[1] > 0
    shard = send(0, 40, ports=ports, **closed)
    assert Counter(h.replica for h in shard.results) == {0: 20, 1: 20}


def test_each_replica_has_no_more_than_asked(replica: Make, send: Send) -> None:
    ports = [replica().port, replica().port]
    shard = send(0, 30, ports=ports, replicas=[ANY] * 30, due_ns=schedule.at_once(30), per_replica=3)
    assert errors(shard) == {None: 30}
    assert shard.most_in_flight == 6
    assert shard.waited_for_cap == 24


def test_enough_is_enough(replica: Make, send: Send) -> None:
    """Both must be reached; what was never given out is no result."""
    port = replica().port
    loop = {"due_ns": schedule.closed_loop(500), "concurrency": 2}
    shard = send(port, 500, least_ns=1, least_requests=20, **loop)
    assert once(shard, 20)
    shard = send(port, 500, least_ns=300_000_000, **loop)
    assert once(shard, len(shard.results))
    assert 2 <= len(shard.results) < 500
    assert max(h.ended_ns or 0 for h in shard.results) - shard.start_ns >= 300_000_000


def test_a_payload_for_each_replica_and_a_head_of_its_own(replica: Make, send: Send) -> None:
    ports = [replica(model="one").port, replica(model="two").port]
    both = (request(model="one"), request(model="two"))
    shard = send(0, 8, ports=ports, payloads=[both] * 8, replicas=[ANY] * 8)
    assert errors(shard) == {None: 8}
    line, rest = request(model="one").split(b"\r\n", 1)
    target = Target(host="127.0.0.1", port=ports[0], head=line + b"\r\n")
    assert errors(send(0, 2, targets=[target], ports=[0], payloads=[rest] * 2)) == {None: 2}


def test_counts_are_reported_while_it_runs(server: Serve) -> None:
    port, broken = server(ttft_s=0.2, itl_s=0.01), server(mode="fail")
    whole = schedule.Plan(
        due_ns=schedule.constant(40, 60), samples=schedule.permuted(60, 60, 1), replicas=schedule.spread(60, 3)
    )
    targets = [Target(host="127.0.0.1", port=each) for each in (port, broken, broken)]
    shares: list[Assignment] = [
        schedule.assignment_of(whole, part, lambda _: request(tokens=4), targets, limits=Limits(ttft_ns=200_000_000))
        for part in whole.shares(2)
    ]
    seen: list[Progress] = []
    shards = worker_pool.run(shares, watch=seen.append)
    handled = [each for shard in shards for each in shard.results]
    failed = sum(each.error is not None for each in handled)
    late = sum(each.first_ns is not None and each.first_ns - each.due_ns > 200_000_000 for each in handled)
    assert late >= 20, "all of the replica whose law it is"
    assert seen[-1] == Progress(planned=60, sent=60, ended=60, late=late, failed=failed)
    assert 0 < failed < 40
    assert len(seen) >= 2
    assert [each.ended for each in seen] == sorted(each.ended for each in seen)
