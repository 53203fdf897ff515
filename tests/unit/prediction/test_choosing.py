"""Choosing among layouts: memory, limits, closeness, and successive halving with known step times."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import yaml

from paceline.experiment import expansion, fields, plugins
from paceline.prediction import experiment_file, layouts, memory
from paceline.prediction.choosing import Limits, Option, Timed, decide, halve, rivals, with_measured
from paceline.prediction.predict import predict, setup_of
from paceline.prediction.setup import Setup


@pytest.fixture(scope="module")
def ranked() -> layouts.Ranked:
    base = setup_of("llama-8b", "h200", 8)
    found = layouts.rank(list(layouts.enumerate_layouts(base, 256)))
    assert found is not None
    return found


def test_only_layouts_that_fit_are_ranked(ranked: layouts.Ranked) -> None:
    assert ranked.fitting < ranked.enumerated
    assert all(memory.fits(one.setup) for one in ranked.all)
    assert all(one.setup.global_batch == 256 for one in ranked.all)
    costs = [layouts.cost_of(one) for one in ranked.all]
    assert costs[0] == min(costs)


def test_degrees_divide_the_model() -> None:
    base = setup_of("gpt2-124m", "h100", 8)  # 12 heads, 12 layers
    found = list(layouts.enumerate_layouts(base, 256))
    assert {one.tp for one in found} == {1, 2, 4}
    assert {one.pp for one in found} == {1, 2, 4}


def test_nothing_fits_on_too_few_gpus() -> None:
    base = setup_of("llama-70b", "a10", 4)
    assert layouts.rank(list(layouts.enumerate_layouts(base, 256))) is None


def options(price: float = 2.0) -> list[Option]:
    setups = [setup_of("llama-8b", "h100", n, global_batch=256) for n in (8, 16, 64)]
    return [Option(prediction=one, usd_per_gpu_hour=price) for one in predict(setups)]


def test_limits_refuse_what_is_late_or_expensive() -> None:
    few, more, most = options()
    tokens = 1e10
    limits = Limits(tokens=tokens, deadline_s=few.prediction.seconds_for(tokens) * 0.9)
    decision = decide([few, more, most], limits, "cost", 3, 3)
    assert [why for _, why in decision.refused] == ["too late"]
    assert decision.best is more or decision.best is most
    cheap = Limits(tokens=tokens, budget_usd=few.prediction.usd_for(tokens, 2.0) * 0.5)
    assert decide([few, more, most], cheap, "cost", 3, 3).best is None


def test_by_time_more_gpus_win_and_by_cost_fewer() -> None:
    few, more, most = options()
    assert decide([few, more, most], Limits(), "time", 3, 3).best is most
    assert decide([few, more, most], Limits(), "cost", 3, 3).best is few


def timed(setup: Setup, step_s: float, sd: float) -> Timed:
    return Timed(setup=setup, step_s=step_s, sd=sd, run=f"run of {setup.layout}")


def test_halving_finds_the_fastest_and_stops() -> None:
    setups = [setup_of("llama-8b", "h200", 8, shard=s, micro_batch=1) for s in ("zero1", "zero2", "zero3", "none")]
    true = dict(zip((one.layout for one in setups), (1.0, 1.02, 1.2, 1.5), strict=True))
    asked: list[tuple[int, int]] = []

    def measure(left: Sequence[Setup], steps: int) -> list[Timed]:
        asked.append((len(left), steps))
        # The longer the run, the smaller its uncertainty.
        return [timed(one, true[one.layout], 0.1 / steps) for one in left]

    found = halve(setups, measure)
    assert found.best is setups[0]
    assert found.equal == ()
    assert asked == [(4, 10), (2, 20)]
    assert [len(one.kept) for one in found.rounds] == [2, 1]


def test_halving_says_equal_and_drops_what_fails() -> None:
    setups = [setup_of("llama-8b", "h200", 8, shard=s, micro_batch=1) for s in ("zero1", "zero2", "zero3")]

    def measure(left: Sequence[Setup], steps: int) -> list[Timed]:
        return [timed(one, 1.0 + 0.004 * i, 0.001) for i, one in enumerate(left) if one.shard != "zero3"]

    found = halve(setups, measure)
    assert found.best is setups[0]
    assert found.equal == (setups[1],)
    assert found.failed == (setups[2],)
    assert halve(setups, lambda left, steps: []).best is None


def test_an_experiment_file_is_valid() -> None:
    one = setup_of("llama-8b", "h200", 8, shard="zero3", micro_batch=2, global_batch=64)
    document = experiment_file.document("llama-8b", [one], "chosen", 20)
    assert yaml.safe_load(yaml.safe_dump(document)) == document
    found = fields.Experiment(**document)
    assert found.matrix[0]["strategy"] == ["fsdp2"]
    assert document["matrix"][0]["accumulation"] == [4]
    assert experiment_file.runnable(one) is None
    assert experiment_file.runnable(one.replaced(tp=2)) is None
    assert "zero2 together with tp=2" in (experiment_file.runnable(one.replaced(tp=2, shard="zero2")) or "")


@pytest.mark.parametrize(
    ("model", "gpus", "sequence", "batch"),
    [("llama-70b", 64, 4096, 512), ("mixtral-8x7b", 16, 4096, 64), ("llama-8b", 16, 65_536, 16)],
)
def test_the_file_of_every_enumerated_layout_is_accepted(model: str, gpus: int, sequence: int, batch: int) -> None:
    """ZeRO-1 beside tensor, pipeline and context parallelism included: what `choose` recommends can be run."""
    base = setup_of(model, "h100", gpus, sequence_length=sequence, global_batch=batch)
    enumerated = [one for one in layouts.enumerate_layouts(base, batch, 1, "full") if not one.offload]
    assert {one.shard for one in enumerated if one.tp > 1} == {"none", "zero1", "zero3"}
    for one in enumerated:
        assert experiment_file.runnable(one) is None, one.layout
        written = fields.Experiment(**experiment_file.document(model, [one], "chosen", 20))
        for spec in expansion.expand(written, {}, "cuda"):
            assert spec.strategy is not None
            assert plugins.load("strategies", spec.strategy.name).check(spec) is None, (one.layout, spec.strategy)


def test_zero1_of_a_layout_gathers_weights_once_per_step() -> None:
    one = setup_of("llama-8b", "h200", 8, tp=2, shard="zero1", micro_batch=1, global_batch=16)
    assert experiment_file.strategy(one) == "mesh:tp=2,shard=4,gather_once=true"
    assert experiment_file.strategy(one.replaced(tp=1, pp=2)) == "mesh:pp=2,shard=4"
    assert experiment_file.strategy(one.replaced(shard="zero3")) == "mesh:tp=2,shard=4"


def test_what_was_measured_replaces_what_was_predicted(ranked: layouts.Ranked) -> None:
    decision = decide([Option(prediction=one, usd_per_gpu_hour=None) for one in ranked.all], Limits(), "time", 1, 1)
    first, second, third = decision.options[:3]
    slow, fast = 2 * first.prediction.step_s, 1.5 * second.prediction.step_s

    def measure(left: Sequence[Setup], steps: int) -> list[Timed]:
        times = {first.prediction.setup: slow, second.prediction.setup: fast}
        return [timed(one, times[one], 0.001) for one in left if one in times]

    halved = halve([one.prediction.setup for one in (first, second, third)], measure)
    after = with_measured(decision, halved)
    assert after.best is not None
    assert after.best.prediction.setup == second.prediction.setup
    assert after.best.prediction.step_s == fast
    assert after.best.prediction.measured_by == f"run of {second.prediction.setup.layout}"
    assert third.prediction.setup not in [one.prediction.setup for one in after.options]  # it did not run
    # The others were predicted to beat the measured best, so they are worth a run.
    assert rivals(decision, halved)[0] == decision.options[3].prediction.setup


def test_a_model_that_fits_with_offload_only_is_found() -> None:
    base = setup_of("llama-8b", "a10", 1, sequence_length=2048)  # 16 bytes x 8e9 parameters, 24 GB
    found = layouts.rank(list(layouts.enumerate_layouts(base, 256)))
    assert found is not None
    assert {one.setup.layout for one in found.all} == {"dp=1,zero2,offload", "dp=1,zero3,offload"}
    best = found.best.setup
    assert memory.components(best)["optimizer"] == 0
    assert memory.host_bytes(best.replaced(shard="zero2")) == pytest.approx(16 * 8.03e9, rel=0.01)
    assert memory.host_bytes(best.replaced(shard="zero3")) == pytest.approx(18 * 8.03e9, rel=0.01)  # and the weights
    assert found.best.parts["offload"] > 0
    assert experiment_file.strategy(best.replaced(shard="zero3")) == "zero:stage=3,offload=cpu"


def test_offload_costs_adam_on_the_host() -> None:
    plain = setup_of("llama-1b", "h100", 8, shard="zero2", micro_batch=1, global_batch=8, checkpointing="none")
    kept, moved = predict([plain, plain.replaced(offload=True)])
    assert kept.parts["offload"] == 0
    # 30 bytes x 1.24e9 parameters through 0.45 x 614 GB/s, and little else of one micro batch.
    assert moved.parts["offload"] > 30 * 1.2e9 / (0.45 * 614e9)
    assert moved.half_width > kept.half_width
    assert not any(one.offload for one in layouts.enumerate_layouts(plain.replaced(quantised=True), 8))


def test_given_micro_batch_and_checkpointing_are_kept() -> None:
    base = setup_of("llama-8b", "h200", 8)
    found = list(layouts.enumerate_layouts(base, 256, 2, "full"))
    assert {(one.micro_batch, one.checkpointing) for one in found} == {(2, "full")}


def test_offload_is_second_to_what_may_be_equal_without_it() -> None:
    base = setup_of("llama-8b", "h100", 3)  # little room: offload saves the recomputation
    assert base.global_batch == 258  # the default is a multiple of the ranks
    found = layouts.rank(list(layouts.enumerate_layouts(base, 258)))
    assert found is not None
    assert found.best.setup.offload
    decision = decide([Option(prediction=one, usd_per_gpu_hour=None) for one in found.all], Limits(), "time", 1, 1)
    assert decision.best is not None
    assert not decision.best.prediction.setup.offload
    roomy = setup_of("llama-8b", "h200", 8)
    ranked = layouts.rank(list(layouts.enumerate_layouts(roomy, 256)))
    assert ranked is not None
    plain = decide([Option(prediction=one, usd_per_gpu_hour=None) for one in ranked.all], Limits(), "time", 1, 1)
    assert not any(one.prediction.setup.offload for one in plain.to_measure)
