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
from paceline.serving import prompts
from paceline.serving.engines import _server, deepspeed, transformers, vllm
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


def settings_of(spec: RunSpec, engine: ModuleType) -> Settings:
    options = engine.Options(**spec.engine.options)  # type: ignore[union-attr]
    return _server.settings_of(spec, options, first_device=0, host="127.0.0.1")


@pytest.mark.parametrize("engine", ENGINES)
def test_prompts_are_read_in_pieces_by_default_where_others_would_wait(engine: Any, make: Any, golden: object) -> None:
    def chunk(**options: Any) -> int:
        return settings_of(make(engine, **options), engine).prefill_chunk

    assert chunk() == 1024
    assert chunk(prefill_chunk=512) == 512
    assert chunk(prefill_chunk=0) == 0
    assert chunk(batching="static") == 0
    errors = []
    for options in ({"batching": "static", "prefill_chunk": 512}, {"prefill_chunk": -1}, {"max_length": 1}):
        with pytest.raises(RequestError) as caught:
            engine.check(make(engine, **options))
        errors.append(str(caught.value))
    assert "\n".join(errors) == golden


# --- room for the longest request ---


def with_data(spec: RunSpec, data: str, **serving: Any) -> RunSpec:
    """On a model of 8192 positions."""
    training = dataclasses.replace(spec.training, data=Choice.parse(data))
    asked = Serving(**{"requests": 4, **serving})
    return dataclasses.replace(spec, model=Choice("llama-8b"), training=training, serving=asked)


SYNTHETIC = "synthetic:prompt=fixed,prompt_mean=1000,answer_mean=28"


def test_the_default_length_has_room_for_synthetic_prompts(make: Any) -> None:
    def length(data: str, **options: Any) -> int:
        return settings_of(with_data(make(transformers, **options), data), transformers).max_length

    assert length(SYNTHETIC) == 2048
    assert length(SYNTHETIC.replace("1000", "2021")) == 2304
    assert length(SYNTHETIC.replace("1000", "2020")) == 2048
    assert length(SYNTHETIC.replace("1000", "20000")) == 8192, "the model has no more"
    assert length(SYNTHETIC.replace("1000", "3000"), max_length=512) == 512


@pytest.mark.parametrize(
    ("engine", "option"), [(transformers, "max_length"), (deepspeed, "max_length"), (vllm, "max_model_len")]
)
def test_a_request_that_does_not_fit_is_refused_before_the_run(
    engine: Any, option: str, make: Any, golden: object
) -> None:
    spec = with_data(make(engine, **{option: 1027}), SYNTHETIC)
    with pytest.raises(RequestError) as caught:
        inference.check(spec)
    assert str(caught.value) == golden
    assert inference.check(with_data(make(engine, **{option: 1028}), SYNTHETIC)) is None
    # How many tokens a text or a chat has is known to the server alone.
    assert inference.check(with_data(make(engine, **{option: 1027}), f"{SYNTHETIC},form=text")) is None
    assert inference.check(with_data(make(engine, **{option: 1027}), SYNTHETIC, api="chat")) is None


def test_a_longer_replica_is_not_suggested_if_the_model_has_no_such_positions(make: Any, golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        inference.check(with_data(make(transformers), SYNTHETIC.replace("1000", "20000")))
    assert str(caught.value) == golden


def test_a_request_of_a_file_that_does_not_fit_is_refused_too(make: Any, tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text(
        '{"token_ids": [1, 2, 3], "max_tokens": 6}\n{"token_ids": [1, 2, 3, 4, 5]}\n{"prompt": "a b c d"}\n'
    )
    data = f"jsonl:path={file}"
    assert inference.check(with_data(make(transformers, max_length=9), data, max_tokens=4, requests=None)) is None
    with pytest.raises(RequestError, match=r"a prompt of 3 tokens with an answer of 6, expected at most 8 together"):
        inference.check(with_data(make(transformers, max_length=8), data, max_tokens=2, requests=None))


@pytest.mark.parametrize(
    "data",
    [
        "synthetic",
        "synthetic:prompt=uniform,prompt_mean=30,answer=lognormal,answer_mean=9,answer_spread=0.5,turns=3",
        "synthetic:shared_prefix=100,prefixes=2,turns=2,prompt_mean=8",
        "synthetic:prompt_mean=8,turns=4,form=text",
    ],
)
def test_the_longest_synthetic_request_is_known_without_making_it(data: str) -> None:
    choice = Choice.parse(data)
    made = prompts.open_prompts(choice, count=50, seed=7, vocab=100, max_tokens=1)
    lengths = [(len(each.token_ids or str(each.text).split()), each.max_tokens) for each in made]
    assert sum(prompts.longest_synthetic(choice, count=50, seed=7)) == max(map(sum, lengths))
    assert list(prompts._synthetic(choice).lengths(50, 7)) == lengths
