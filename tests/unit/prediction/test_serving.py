"""Serving by memory and compute limits, and scaling beyond the measured, on numbers that can be worked out by hand."""

from __future__ import annotations

import math

import pytest

from paceline.experiment.choices import Choice
from paceline.models import arithmetic
from paceline.prediction import hardware, scaling, serving
from paceline.prediction.predict import setup_of
from paceline.prediction.serving import Served


def served(model: str = "llama-8b", gpu: str = "h100", **more: object) -> Served:
    usual: dict[str, object] = {"input_tokens": 1000, "output_tokens": 200}
    return Served(shape=arithmetic.load(Choice(model)), gpu=hardware.accelerator(gpu), **usual | more)  # type: ignore[arg-type]


def test_one_sequence_decodes_at_the_memory_bandwidth() -> None:
    p = {"bandwidth": math.log(0.5), "prefill": 0.0, "step_s": -40.0, "layer_s": -40.0}
    _, step = serving.times(served(batch=1), 1, p)
    cache = 1100 * 2 * 2 * 32 * 8 * 128
    assert step == pytest.approx((2 * 8_030_261_248 + cache) / (0.5 * 3350e9))


def test_the_cache_limits_the_batch() -> None:
    one = served()
    room = 0.88 * 80e9 - 2 * 8_030_261_248
    assert one.most_sequences() == int(room / (1200 * 2 * 2 * 32 * 8 * 128))
    assert served("llama-70b").most_sequences() == 0
    with pytest.raises(Exception, match="at least 3 GPUs"):
        serving.predict(served("llama-70b"))


def test_an_anchor_scales_the_prediction_and_narrows_it() -> None:
    one = served(batch=16)
    before = serving.predict(one)
    after = serving.predict(one, [(one, 0.5 * before.tokens_per_s)])
    assert after.tokens_per_s == pytest.approx(0.5 * before.tokens_per_s, rel=0.15)
    assert after.factor < before.factor
    low, high = after.interval(after.tokens_per_s)
    assert low < after.tokens_per_s < high


def test_a_limit_on_tpot_is_met_and_splits_are_ranked() -> None:
    found = serving.partitions(served("llama-70b", "h200", precision="fp8"), 8, tpot_s=0.04)
    assert found
    assert all(one.tpot_s <= 0.04 for one in found)
    assert all(one.served.gpus == 8 for one in found)
    rates = [one.tokens_per_s for one in found]
    assert rates == sorted(rates, reverse=True)
    assert serving.partitions(served("llama-70b", "h200"), 8, tpot_s=1e-4) == []


def test_a_fit_recovers_what_made_the_rows() -> None:
    truth = {**serving.starting_values(), "bandwidth": math.log(0.85), "prefill": math.log(0.35)}
    setups = [
        served(model, "h200", precision="fp8", tp=tp, input_tokens=prompt, output_tokens=answer)
        for model, tp in (("llama-8b", 1), ("llama-70b", 2))
        for prompt, answer in ((128, 2048), (2048, 128), (500, 500))
    ]
    rows = [(one, serving.throughput(one, one.most_sequences(), truth)) for one in setups]
    found = serving.fit_rows(rows)
    assert found.sd < 0.05
    assert found.values["prefill"] == pytest.approx(truth["prefill"], abs=0.1)


def test_scaling_finds_where_a_slow_network_limits() -> None:
    slow = setup_of("llama-8b", "h100", 8, shard="zero3", interconnect="25gbe", micro_batch=1, global_batch=8)
    found = scaling.extrapolate(slow, 64)
    assert [one.prediction.setup.gpus for one in found] == [8, 16, 32, 64]
    assert found[0].efficiency == 1
    assert not found[0].is_limited
    assert found[1].is_limited
    assert scaling.limit_text(found).startswith("The network limits from 16 GPUs on")
    fast = scaling.extrapolate(setup_of("llama-8b", "h100", 8, shard="zero1", global_batch=256), 64)
    assert scaling.limit_text(fast).startswith("The network does not limit up to 64 GPUs")
