"""How ranks of a served model find each other and part, over a store in memory."""

from __future__ import annotations

import dataclasses
import datetime
import socket
import threading

import pytest

from paceline.contract import Endpoint, Seat
from paceline.errors import UnsupportedError
from paceline.workloads.inference import ranks
from paceline.workloads.inference.session import Replica


class MemoryStore:
    """As torch's, within one process; `lost` is a launch that is gone."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.lost = False
        self._changed = threading.Condition()

    def set(self, key: str, value: str, /) -> None:
        self._look()
        with self._changed:
            self.values[key] = value
            self._changed.notify_all()

    def get(self, key: str, /) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str], /) -> bool:
        self._look()
        return all(key in self.values for key in keys)

    def wait(self, keys: list[str], timeout: datetime.timedelta, /) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.check(keys), timeout.total_seconds()):
                raise RuntimeError("wait timeout")

    def _look(self) -> None:
        if self.lost:
            raise RuntimeError("connection was closed by the store")


def circle(store: MemoryStore, rank: int, size: int = 2, patience_s: float = 60.0) -> ranks.Ranks:
    return ranks.Ranks(store, Seat(rank=rank, local_rank=0, world_size=size, device="cpu"), patience_s)


def replica(rank: int, port: int = 1, **facts: object) -> Replica:
    endpoint = Endpoint(url=f"http://127.0.0.1:{port}", model="m", secret="s", facts=facts)
    return Replica(rank=rank, host=f"host{rank}", endpoint=endpoint)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "POLL_S", 0.001)


def test_rank_0_has_the_replicas_of_all_in_their_order() -> None:
    store = MemoryStore()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        own = [[replica(0, port)], [replica(1, port, devices=2, settings={"max_batch": 8}), replica(1, port)]]
        for rank, found in enumerate(own):
            circle(store, rank).publish(found)
        assert circle(store, 0).all_replicas() == [*own[0], *own[1]]


def test_a_rank_that_serves_a_part_of_another_s_replica_has_none() -> None:
    """Two replicas, each over two nodes: they are numbered as if the other ranks were not there."""
    store = MemoryStore()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        own = [[replica(0, port)], [], [replica(2, port)], []]
        for rank, found in enumerate(own):
            circle(store, rank, size=4).publish(found)
        assert circle(store, 0, size=4).all_replicas() == [*own[0], *own[2]]
    store.set("paceline/dead/2/0", "1")
    assert circle(store, 0, size=4).dead() == [1]
    store.set("paceline/ended", "1")
    assert circle(store, 1, size=4).keep_up([], lambda _: pytest.fail("there is none to ask")) == []


def test_a_replica_that_rank_0_cannot_reach_is_named(golden: object) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = MemoryStore()
    circle(store, 0, size=1).publish([replica(0, port)])
    with pytest.raises(UnsupportedError) as caught:
        circle(store, 0, size=1).all_replicas()
    assert str(caught.value) == golden
    assert f"{port}" in str(caught.value)


@pytest.mark.parametrize("fails", [False, True])
def test_the_others_stay_until_rank_0_has_ended_however_it_ends(fails: bool) -> None:
    store, left = MemoryStore(), threading.Event()

    def attend() -> None:
        circle(store, 1).keep_up([replica(1)], lambda _: True)
        left.set()

    other = threading.Thread(target=attend)
    other.start()

    def work() -> None:
        with circle(store, 0).load_in_progress():
            assert not left.wait(0.05)
            if fails:
                raise ValueError("of the client")

    if fails:
        with pytest.raises(ValueError, match="of the client"):
            work()
    else:
        work()
    # It was given the time to hear of it.
    assert "paceline/heard/1" in store.values
    other.join(60)
    assert left.is_set()


def test_a_rank_whose_replica_died_says_so_once_and_stays(capsys: pytest.CaptureFixture[str]) -> None:
    store, looks = MemoryStore(), [0, 0]
    for rank in (0, 1):
        circle(store, rank).publish([replica(rank, port=1), replica(rank, port=2)])

    def answers(asked: Replica) -> bool:
        place = int(asked.endpoint.url[-1]) - 1
        looks[place] += 1
        if sum(looks) > 40:
            store.set("paceline/ended", "1")
        # The second misses two looks and comes back: that is no death.
        return looks[place] < 3 if place == 0 else looks[place] not in (4, 5)

    assert circle(store, 1).keep_up([replica(1, port=1), replica(1, port=2)], answers) == [0]
    assert circle(store, 0).dead() == [2]
    assert capsys.readouterr().err.count("http://127.0.0.1:1 no longer answers") == 1


def test_a_rank_that_reports_nothing_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = MemoryStore(), [1000.0]
    monkeypatch.setattr(ranks.time, "monotonic", lambda: now[0])
    for rank in range(3):
        circle(store, rank, size=3).publish([replica(rank)])
    first = circle(store, 0, size=3)

    def after(seconds: float, *alive: int) -> list[int]:
        now[0] += seconds
        for rank in alive:
            store.set(f"paceline/beat/{rank}", str(now[0]))
        return first.quiet()

    assert after(0.0, 1, 2) == []
    assert after(ranks.QUIET_S, 1, 2) == []
    assert after(ranks.QUIET_S, 1, 2) == []
    assert after(ranks.QUIET_S + 1, 1) == [2], "rank 0 itself is never quiet"
    assert after(1.0, 1, 2) == []
    store.set("paceline/dead/1/0", "1")
    assert after(1.0, 1, 2) == [1], "its own rank has reported it"
    store.lost = True
    assert after(1.0) == [1], "a launch that ends is no reason"


def test_a_rank_reports_while_it_keeps_its_replica_up() -> None:
    store, beats = MemoryStore(), set[str]()

    def answers(_: Replica) -> bool:
        beats.add(store.values["paceline/beat/1"])
        if len(beats) == 3:
            store.set("paceline/ended", "1")
        return True

    circle(store, 1).keep_up([replica(1)], answers)
    assert beats == {"1", "2", "3"}


def test_a_launch_that_is_gone_ends_the_waiting() -> None:
    store = MemoryStore()

    def answers(_: Replica) -> bool:
        store.lost = True
        return True

    assert circle(store, 1).keep_up([replica(1)], answers) == []


def test_whoever_does_not_say_that_it_heard_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "ACKNOWLEDGE_S", 0.01)
    store = MemoryStore()
    with circle(store, 0).load_in_progress():
        pass
    assert store.values == {"paceline/ended": "1"}


def test_a_key_does_not_show_and_arrives() -> None:
    assert "'s'" not in repr(replica(0))
    assert Replica.from_dict(dataclasses.asdict(replica(0))) == replica(0)


def test_whether_somebody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert ranks.accepts(replica(0, port))
    assert not ranks.accepts(replica(0, port))
