"""Anchors on a cluster whose offsets are known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from paceline.prediction import parameters
from paceline.prediction.offsets import Anchor, Observation, anchor_columns, posterior, shared_error, surprise
from paceline.prediction.parameters import Shared
from paceline.prediction.predict import next_measurement, predict, setup_of, worth
from paceline.prediction.setup import Setup
from paceline.prediction.step_time import OFFSETS, columns, step_time


def true_time(one: Setup, **offsets: float) -> float:
    return float(step_time(columns([one]), parameters.load().values, offsets)[0])


@pytest.fixture
def small() -> Setup:
    return setup_of("llama-8b", "h100", 8, shard="zero3", micro_batch=2, global_batch=64)


@pytest.fixture
def large() -> Setup:
    return setup_of("llama-8b", "h100", 256, shard="zero3", micro_batch=2, global_batch=2048)


def test_without_anchors_the_physics_is_the_median(small: Setup) -> None:
    one = predict([small])[0]
    assert one.step_s == pytest.approx(true_time(small))
    assert one.low_s < one.step_s < one.high_s
    assert 0.15 < one.half_width < 0.5


def test_an_anchor_of_a_slow_cluster_moves_larger_scales(small: Setup, large: Setup) -> None:
    """A cluster whose kernels are 20 % slower: measured at 8 GPUs, most of it is expected at 256."""
    slow = math.log(1.2)
    anchor = Anchor(small, true_time(small, level=slow), "8 GPUs")
    before, after = predict([large])[0], predict([large], [anchor])[0]
    truth = true_time(large, level=slow)
    assert abs(math.log(after.step_s / truth)) < 0.5 * abs(math.log(before.step_s / truth))
    assert after.half_width < before.half_width


def test_anchors_where_they_are_expected_narrow_the_interval(small: Setup, large: Setup) -> None:
    """The prior weighs as much as eight anchors, so four exact ones leave the root of 8 / 12."""
    four = [replace(small, gpus=gpus) for gpus in (8, 16, 32, 64)]
    exact, other = ([Anchor(one, f * true_time(one), f"{one.gpus}") for one in four] for f in (1.0, 1.6))
    fitted, (c, log_step, sd) = parameters.load(), anchor_columns(exact)
    assert c is not None
    assert surprise(fitted, c, log_step, sd, ()) == pytest.approx(math.sqrt(8 / 12))
    assert predict([large], exact)[0].half_width < 0.8 * predict([large], other)[0].half_width


def test_a_prediction_follows_an_anchor_of_the_same_setup(small: Setup) -> None:
    measured = 1.25 * true_time(small)
    one = predict([small], [Anchor(small, measured, "same")])[0]
    assert one.step_s == pytest.approx(measured, rel=0.05)


def test_parts_keep_the_sum_of_the_step(small: Setup) -> None:
    one = predict([small], [Anchor(small, 2 * true_time(small), "same")])[0]
    assert sum(one.parts.values()) == pytest.approx(one.step_s)


def test_a_measured_network_changes_traffic_only(large: Setup) -> None:
    slow = Observation("network", math.log(4), 0.05, "fabric")
    before, after = predict([large])[0], predict([large], [], [slow])[0]
    assert after.parts["data parallel (exposed)"] > 2 * before.parts["data parallel (exposed)"]
    assert after.parts["products"] == pytest.approx(before.parts["products"], rel=1e-6)


def test_links_and_network_are_measured_apart() -> None:
    """Tensor parallelism inside a node does not wait for the network between nodes."""
    one = setup_of("llama-70b", "h100", 64, tp=8, shard="zero1", global_batch=64, interconnect="25gbe")
    slow = {name: Observation(name, math.log(2), 0.05, "fabric") for name in ("link", "network")}
    plain, link, network = (predict([one], [], [seen] if seen else [])[0].parts for seen in (None, *slow.values()))
    assert network["tensor parallel"] == pytest.approx(plain["tensor parallel"])
    assert link["tensor parallel"] > 1.5 * plain["tensor parallel"]
    assert network["data parallel (exposed)"] > 1.5 * plain["data parallel (exposed)"]
    assert link["data parallel (exposed)"] == pytest.approx(plain["data parallel (exposed)"], rel=0.02)


def test_what_setups_share_falls_with_what_differs(small: Setup) -> None:
    """Sixteen times the GPUs are one length of four doublings; 8 bits are another kind of work; both add up."""
    others = [small, small.replaced(gpus=128), small.replaced(fp8=True), small.replaced(sequence_length=8192)]
    found = shared_error(Shared(setup=0.3, kind=0.4, gpus=4.0), columns([small]), columns(others))[0]
    longer = math.exp(-((1 / 2) ** 2 + (1 / 2) ** 2) / 2)  # twice the tokens and twice the sequence
    expected = [0.09 + 0.16, 0.09 * math.exp(-0.5) + 0.16, (0.09 + 0.16) * math.exp(-0.35), 0.09 * longer + 0.16]
    assert found == pytest.approx(expected)


def test_an_anchor_without_calibration_says_little_about_others(small: Setup) -> None:
    """A mixture of experts that takes twice as long as predicted does not make dense models twice as slow."""
    mixture = setup_of("moe-3b", "h100", 8, shard="zero1", global_batch=64)
    alone = predict([small])[0].step_s
    dense, sparse = (
        predict([one], [Anchor(mixture, 2 * predict([mixture])[0].step_s, "mixture")])[0] for one in (small, mixture)
    )
    assert dense.step_s < 1.25 * alone
    assert sparse.step_s > 1.7 * predict([mixture])[0].step_s


def test_the_worth_of_every_anchor_is_reported(small: Setup, large: Setup) -> None:
    found = worth(large, [Anchor(small, true_time(small), "small"), Anchor(large, true_time(large), "large")])
    assert [one.name for one in found] == ["small", "large"]
    assert all(one.with_it <= one.without for one in found)
    assert found[1].without - found[1].with_it > found[0].without - found[0].with_it


def test_the_next_measurement_is_a_smaller_run(large: Setup) -> None:
    found = next_measurement(large)
    assert found[0].name.startswith("1 GPU, dp=1, ")  # fewer layers, so that one GPU holds them
    assert "256 GPUs, dp=256,zero3" in [one.name for one in found]
    gains = [one.gain_per_gpu_minute or 0 for one in found]
    assert gains == sorted(gains, reverse=True)
    assert all(one.with_it < one.without for one in found)


def test_an_anchor_teaches_a_parameter_that_is_not_known(small: Setup) -> None:
    """Where only one parameter is uncertain, an anchor moves that parameter and with it other setups."""
    known = parameters.load()
    names = list(known.values)
    covariance = np.zeros_like(known.covariance)
    covariance[names.index("elementwise"), names.index("elementwise")] = 0.3**2
    fitted = replace(
        known, covariance=covariance, offset_sd=dict.fromkeys(OFFSETS, 1e-4), shared=Shared(1e-4, 1e-4, 4.0)
    )
    slow = {**known.values, "elementwise": known.values["elementwise"] + 0.3}
    other = small.replaced(micro_batch=1, sequence_length=8192)
    anchors = [Anchor(small, float(step_time(columns([small]), slow)[0]), "small", sd=1e-4)]
    after = predict([other], anchors, fitted=fitted)[0]
    assert after.step_s == pytest.approx(float(step_time(columns([other]), slow)[0]), rel=0.002)


def test_an_anchor_far_from_the_others_counts_less(small: Setup) -> None:
    """Of anchors with one odd measurement, the prediction stays nearer to the others than their mean does."""
    sizes = [small.replaced(gpus=8 * n, micro_batches=small.micro_batches) for n in (1, 2, 4, 8)]
    factors = (1.0, 1.0, 1.0, 2.0)
    anchors = [Anchor(one, f * true_time(one), str(one.gpus)) for one, f in zip(sizes, factors, strict=True)]
    fitted, (c, log_step, sd) = parameters.load(), anchor_columns(anchors)
    doubted = posterior(fitted, c, log_step, sd).sd
    assert doubted[3] > 2 * doubted[:3].max()
    assert posterior(fitted, c, log_step - np.log(factors), sd).sd == pytest.approx(sd)
