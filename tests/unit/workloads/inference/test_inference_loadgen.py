"""When LoadGen may ask, and what it is told of a run's set-up."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import RequestError
from paceline.experiment.fields import Cell, build
from paceline.experiment.spec import RunSpec
from paceline.serving.client import mlcommons
from paceline.workloads import inference
from paceline.workloads.inference import loadgen as second


def spec(**more: Any) -> RunSpec:
    values = {"workload": "inference", "model": "tiny", "processes": 1, "scenario": "server", "rate_per_s": 5.0}
    return build("test", Cell(**{**values, "engine": "openai:loadgen=mlcommons", **more}), "cpu")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlcommons, "is_installed", lambda: True)


def test_engine_loadgen_is_the_field_loadgen() -> None:
    by_engine, by_field = spec(), spec(engine="openai", loadgen="mlcommons")
    assert by_engine.engine is not None
    assert by_engine.engine.options == {}
    assert by_engine.cell == by_field.cell != spec(engine="openai").cell
    assert second.is_requested(by_engine)
    assert not second.is_requested(spec(engine="openai"))
    assert inference.check(by_engine) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"scenario": "concurrency", "concurrency": 2},
        {"partition": "paired", "scenario": "offline"},
        {"engine": "openai:loadgen=other"},
    ],
)
def test_what_it_has_no_test_for_is_one_sentence(fields: dict[str, Any], golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        inference.check(spec(**fields))
    assert str(caught.value) == golden


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch, golden: object) -> None:
    monkeypatch.setattr(mlcommons, "is_installed", lambda: False)
    with pytest.raises(RequestError) as caught:
        inference.check(spec())
    assert str(caught.value) == golden


def test_it_asks_for_as_long_again(golden: object) -> None:
    alone = spec(engine="openai", least_s=60.0, requests=10)
    both = spec(least_s=60.0, requests=10)
    assert [inference.lasting_s(each.serving) for each in (alone, both) if each.serving] == [60.0, 120.0]
    text = inference.outline(both)
    assert text == golden
    assert "LoadGen" in text
    assert "LoadGen" not in inference.outline(alone)


def test_the_same_set_up_in_its_words() -> None:
    told = second.terms_of(spec(least_s=60.0, requests=700, partition="dynamic"), 500, 12.5)
    assert (told.ttft_s, told.tpot_s, told.rate_per_s, told.least_s) == (2.0, 0.1, 5.0, 60.0)
    assert (told.requests, told.samples, told.shared, told.cap) == (700, 500, True, None)
    tighter = second.terms_of(spec(scenario="interactive", ttft_limit_s=0.25), 500, 12.5)
    assert (tighter.ttft_s, tighter.tpot_s, tighter.requests) == (0.25, 0.03, 500)
    offline = second.terms_of(spec(scenario="offline"), 500, 12.5)
    assert (offline.cap, offline.expected_per_s, offline.ttft_s) == (512, 12.5, None)
