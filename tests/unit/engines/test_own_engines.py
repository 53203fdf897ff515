"""What our own replicas are asked for before one is started; tests/end_to_end/test_own_replicas.py starts them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from paceline.engines import _replica, _server, deepspeed, transformers
from paceline.errors import RequestError
from paceline.plugins import Seat
from paceline.serving import Serving
from paceline.spec import Choice, RunSpec

ENGINES = [transformers, deepspeed]


@pytest.fixture
def make(make_spec: Callable[..., RunSpec]) -> Callable[..., RunSpec]:
    def spec(engine: ModuleType, nodes: int = 1, **options: Any) -> RunSpec:
        chosen = Choice(engine.__name__.rpartition(".")[2], options)
        asked: dict[str, Any] = {"model": "tiny-llama", "engine": chosen, "serving": Serving(), "stall_s": 100.0}
        return make_spec(None, processes=1, nodes=nodes, workload="inference", **asked)

    return spec


@pytest.mark.parametrize("engine", ENGINES)
def test_a_replica_may_not_take_longer_to_start_than_a_run_may_stand_still(engine: Any, make: Any) -> None:
    with pytest.raises(RequestError, match=r"ready_s: 100\.0 was given; accepted is less than stall_s \(100\)"):
        engine.check(make(engine, ready_s=100.0))
    assert engine.check(make(engine, ready_s=99.0)) is None
    # Who gives none has one that is short enough.
    assert engine.check(make(engine)) is None
    assert _server.patience_s(None, 100.0) == 80.0


def test_a_time_to_start_is_positive(make: Any) -> None:
    with pytest.raises(RequestError, match=r"engine.ready_s: 0\.0 was given"):
        transformers.check(make(transformers, ready_s=0.0))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("nodes", "host"), [(1, "127.0.0.1"), (2, "10.1.0.5")])
def test_a_replica_listens_at_the_interface_of_the_ranks(
    engine: Any, make: Any, monkeypatch: pytest.MonkeyPatch, nodes: int, host: str
) -> None:
    """The one that is named, by an address that other hosts can reach; without a way to the first node too."""
    monkeypatch.setattr("paceline.reach.all_interfaces", lambda: {"eth1": ["fe80::1", "10.1.0.5"]})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    monkeypatch.setenv("MASTER_ADDR", "node-that-is-not-there")
    listening: list[str] = []

    @contextlib.contextmanager
    def opened(spec: Any, seat: Any, settings: Any, ready_s: float) -> Iterator[list[Any]]:
        listening.append(settings.host)
        yield []

    monkeypatch.setattr(_replica, "opened", opened)
    with engine.open(make(engine, nodes), Seat(rank=0, local_rank=0, world_size=nodes, device="cpu")):
        assert listening == [host]
