"""What our own replicas are asked for before one is started; tests/end_to_end/test_own_replicas.py starts them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

from paceline.contract import Seat
from paceline.errors import LaunchError, RequestError
from paceline.experiment.choices import Choice
from paceline.experiment.serving import Serving
from paceline.experiment.spec import RunSpec
from paceline.serving.engines import _server, deepspeed, transformers
from paceline.serving.replica.settings import Settings
from paceline.workloads import inference

ENGINES = [transformers, deepspeed]


@pytest.fixture
def make(make_spec: Callable[..., RunSpec]) -> Callable[..., RunSpec]:
    def spec(engine: ModuleType, nodes: int = 1, **options: Any) -> RunSpec:
        chosen = Choice(engine.__name__.rpartition(".")[2], options)
        asked: dict[str, Any] = {"model": "tiny-llama", "engine": chosen, "serving": Serving(), "stall_s": 100.0}
        return make_spec(None, processes=1, nodes=nodes, workload="inference", **asked)

    return spec


@pytest.mark.parametrize("engine", ENGINES)
def test_a_replica_may_not_take_longer_to_start_than_a_run_may_stand_still(
    engine: Any, make: Any, golden: object
) -> None:
    with pytest.raises(RequestError) as caught:
        engine.check(make(engine, ready_s=100.0))
    assert str(caught.value) == golden
    assert "ready_s" in str(caught.value)
    assert "100.0" in str(caught.value)
    assert "stall_s" in str(caught.value)
    assert engine.check(make(engine, ready_s=99.0)) is None
    # Who gives none has one that is short enough.
    assert engine.check(make(engine)) is None
    assert _server.patience_s(None, 100.0) == 80.0


def test_a_time_to_start_is_positive(make: Any, golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        transformers.check(make(transformers, ready_s=0.0))
    assert str(caught.value) == golden
    assert "engine.ready_s" in str(caught.value)
    assert "0.0" in str(caught.value)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("nodes", "host"), [(1, "127.0.0.1"), (2, "10.1.0.5")])
def test_a_replica_listens_at_the_interface_of_the_ranks(
    engine: Any, make: Any, monkeypatch: pytest.MonkeyPatch, nodes: int, host: str, golden: object
) -> None:
    """The one that is named, by an address that other hosts can reach; without a way to the first node too."""
    monkeypatch.setattr("paceline.launchers.node.rendezvous.all_interfaces", lambda: {"eth1": ["fe80::1", "10.1.0.5"]})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    monkeypatch.setenv("MASTER_ADDR", "node-that-is-not-there")
    listening: list[str] = []

    def process(settings: Settings, *_: Any) -> NoReturn:
        listening.append(settings.host)
        raise LaunchError("started elsewhere")

    monkeypatch.setattr(_server, "_process", process)
    seat = Seat(rank=0, local_rank=0, world_size=nodes, device="cpu")
    with pytest.raises(LaunchError) as caught, engine.open(make(engine, nodes), seat):
        pass
    assert str(caught.value) == golden
    assert listening == [host]


@pytest.mark.parametrize(
    ("device", "options", "made"),
    [
        ("cpu", {}, (False, False)),
        ("cuda", {}, (True, True)),
        ("cuda", {"graph": False}, (True, False)),
        ("cpu", {"compile": True}, (True, False)),
    ],
)
def test_a_decode_step_is_compiled_on_gpus_by_default(
    make: Any, monkeypatch: pytest.MonkeyPatch, device: str, options: dict[str, Any], made: tuple[bool, bool]
) -> None:
    started: list[Settings] = []

    def process(settings: Settings, *_: Any) -> NoReturn:
        started.append(settings)
        raise LaunchError("started elsewhere")

    monkeypatch.setattr(_server, "_process", process)
    spec = make(transformers, tensor_parallel=2, **options)
    seat = Seat(rank=1, local_rank=1, world_size=2, device=device)
    with pytest.raises(LaunchError), transformers.open(spec, seat):
        pass
    assert [(each.compiled, each.graph, each.first_device) for each in started] == [(*made, 2)]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_architecture_without_a_shape_is_refused(engine: Any, make: Any, tmp_path: Path, golden: object) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "phi3", "vocab_size": 32064}')
    spec = dataclasses.replace(make(engine), model=Choice(str(tmp_path)))
    with pytest.raises(RequestError) as caught:
        inference.check(spec)
    assert str(caught.value) == golden
    assert "phi3" in str(caught.value)
