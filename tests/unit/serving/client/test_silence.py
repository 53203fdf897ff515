"""Which replicas get no requests, and when they get some again."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
from testbed.requests import request

from paceline.serving.client import silence
from paceline.serving.client.schedule import Target
from paceline.serving.client.silence import ReplicaBoard, ReplicaGuard, probe
from paceline.serving.mock import MockReplica

Make = Callable[..., MockReplica]


class Watched:
    """A guard over three replicas, whose probes end before the next look."""

    def __init__(self) -> None:
        self.answering, self.quiet, self.notes = {0, 1, 2}, set[int](), list[tuple[int, bool]]()
        self.guard = ReplicaGuard(
            lambda replica: replica in self.answering,
            lambda: self.quiet,
            lambda replica, is_silent, _: self.notes.append((replica, is_silent)),
        )
        self.board = ReplicaBoard(2, 3)

    def suspended(self, looks: int = 3) -> list[int]:
        for _ in range(looks):
            self.guard.watch(self.board, (0, 1, 2))
            for _, thread in self.guard._probes.values():
                thread.join()
        return [replica for replica in range(3) if self.board.is_suspended(replica)]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(silence, "PROBE_EVERY_S", 0.0)
    return Watched()


def test_what_one_process_finds_silent_no_process_uses_until_a_probe_is_answered(watched: Watched) -> None:
    finder, other = watched.board.view(0), watched.board.view(1)
    watched.answering = {0, 2}
    finder.report(1)
    assert (finder.suspended(), other.suspended()) == ({1}, set()), "the finder does not wait for the parent"
    assert watched.suspended() == [1]
    assert finder.suspended() == other.suspended() == {1}
    watched.answering = {0, 1, 2}
    assert watched.suspended() == []
    assert finder.suspended() == other.suspended() == set()
    finder.report(1)
    watched.answering = {0, 2}
    assert watched.suspended() == [1], "and a second time"
    assert watched.notes == [(1, True), (1, False), (1, True)]
    assert len(watched.guard.silences[1]) == 3
    assert watched.guard.silent == {1}


def test_a_quiet_rank_is_not_enough_while_its_replica_answers(watched: Watched) -> None:
    watched.quiet = {2}
    assert watched.suspended() == []
    watched.answering = {0, 1}
    assert watched.suspended() == [2]
    watched.answering = {0, 1, 2}
    assert watched.suspended() == [2], "a node whose rank is still quiet may be gone again in a moment"
    watched.quiet = set()
    assert watched.suspended() == []


def test_what_was_silent_stays_suspended_in_the_next_load(watched: Watched) -> None:
    watched.answering = {0, 2}
    watched.board.view(0).report(1)
    assert watched.suspended() == [1]
    watched.guard.close()
    # A replica has died in the meantime, so the load has fewer, with other indices.
    following = ReplicaBoard(1, 2)
    watched.guard.begin(following, (1, 2))
    assert following.view(0).suspended() == {0}


def test_a_probe_is_answered_by_a_token_and_nothing_less(replica: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "PROBE_S", 0.3)

    def asked(port: int) -> bool:
        return probe(Target(host="127.0.0.1", port=port), request(tokens=1))

    assert asked(replica().port)
    assert not asked(replica(ttft_s=5.0).port), "it accepts, but does not answer"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    assert not asked(port)
