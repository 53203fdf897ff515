from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from paceline.analysis.compare.cells import compare_cells
from paceline.analysis.findings import Comparison
from paceline.analysis.statistics.intervals import Ratio
from paceline.analysis.statistics.verdict import ONE_LAUNCH, verdict_of
from paceline.analysis.training import metrics
from paceline.analysis.training.metrics import Cell
from paceline.analysis.training.window import open_window
from paceline.experiment.choices import Choice
from paceline.results.records import RunRecord

Builder = Callable[..., Any]


def cells_of(*groups: list[RunRecord]) -> list[Cell]:
    return metrics.gather(open_window(r) for group in groups for r in group)


def found(*groups: list[RunRecord], metric: str = "tokens_per_s") -> list[Comparison]:
    return [c for compared in compare_cells(cells_of(*groups)) for c in compared.comparisons if c.metric == metric]


class TestVerdict:
    def test_better_and_worse_follow_the_direction(self) -> None:
        clear = Ratio(1.10, 0.01, launches=3)
        assert verdict_of(clear, "higher")[0] == "better"
        assert verdict_of(clear, "lower")[0] == "worse"

    @pytest.mark.parametrize(
        ("ratio", "verdict", "reason"),
        [
            # 1.96 standard errors on either side.
            (Ratio(1.10, 0.06, launches=3), "inconclusive", "95 % interval -2.2 % to +23.7 %; four times out of five"),
            (Ratio(1.00, 0.02, launches=3), "inconclusive", "5.8 % would have been shown"),
            (Ratio(1.05, 0.02, launches=3), "better", "a difference of 5.0 %; 95 % interval +1.0 % to +9.2 %"),
            (Ratio(0.955, 0.02, launches=3), "worse", "a difference of 4.5 %; 95 % interval -8.2 % to -0.7 %"),
            (Ratio(1.009, 0.0005, launches=3), "equal", "within 2 %; 95 % interval +0.8 % to +1.0 %"),
            (Ratio(0.992, 0.0005, launches=3), "equal", "within 2 %"),
            (Ratio(1.011, 0.0005, launches=3), "better", "a difference of 1.1 %"),
            (Ratio(1.0, 0.0, launches=3), "equal", "within 2 %; 95 % interval +0.0 % to +0.0 %"),
        ],
    )
    def test_every_verdict_says_why(self, ratio: Ratio, verdict: str, reason: str) -> None:
        found, text = verdict_of(ratio, "higher")
        assert found == verdict
        assert reason in text

    def test_a_small_difference_that_is_sure_is_inconclusive_if_equal_means_less(self) -> None:
        sure = Ratio(1.008, 0.0005, launches=3)
        assert verdict_of(sure, "higher", equal_within=0.005) == (
            "inconclusive",
            "a difference of 0.80 % is under 1 %; 95 % interval +0.7 % to +0.9 %",
        )

    def test_the_detectable_difference_is_no_second_threshold(self) -> None:
        """2.2 standard errors exclude 1; 2.8 are what data of this spread shows four times out of five."""
        found = Ratio(1.022, 0.01, launches=3)
        assert found.detectable() > 0.022
        assert verdict_of(found, "higher")[0] == "better"

    @pytest.mark.parametrize("ratio", [Ratio(3.0, 0.001, launches=1), Ratio(1.0, 0.0, launches=1)])
    def test_one_launch_never_has_a_verdict(self, ratio: Ratio) -> None:
        assert verdict_of(ratio, "higher") == ("inconclusive", ONE_LAUNCH)

    def test_a_question_about_this_launch_alone_has_one(self) -> None:
        assert verdict_of(Ratio(1.1, 0.01), "higher")[0] == "better"

    def test_a_family_needs_a_larger_difference(self) -> None:
        """Three standard errors decide a single comparison; of a hundred equal pairs some show as much."""
        found = Ratio(1.03, 0.01, launches=9)
        assert verdict_of(found, "higher")[0] == "better"
        verdict, reason = verdict_of(found, "higher", family=100)
        assert verdict == "inconclusive"
        assert "for all 100 comparisons together" in reason
        assert verdict_of(Ratio(1.05, 0.01, launches=9), "higher", family=100)[0] == "better"

    def test_a_family_needs_a_narrower_interval_to_be_equal(self) -> None:
        found = Ratio(1.0, 0.007, launches=9)
        assert verdict_of(found, "higher")[0] == "equal"
        assert verdict_of(found, "higher", family=100)[0] == "inconclusive"

    @pytest.mark.parametrize("error", [0.0, 0.002, 0.0101])
    @pytest.mark.parametrize("value", [1.0, 1.0099, 1.0101, 1.0195, 1.03])
    def test_both_directions_agree(self, value: float, error: float) -> None:
        there = verdict_of(Ratio(value, error, launches=3), "higher")[0]
        back = verdict_of(Ratio(1 / value, error, launches=3), "higher")[0]
        assert (there, back) in (("better", "worse"), ("equal", "equal"), ("inconclusive", "inconclusive"))


class TestWithinACampaign:
    def test_faster_by_ten_percent(self, make_cell: Builder) -> None:
        (c,) = found(make_cell(1.0, strategy="ddp"), make_cell(1.1, strategy="fsdp2"))
        assert (c.label, c.other_label, c.verdict) == ("ddp", "fsdp2", "better")
        assert c.ratio == pytest.approx(1.1, rel=0.005)
        assert c.low < 1.1 < c.high
        assert 0 < c.detectable_ratio < 0.05
        assert len(c.runs) == 6
        assert "strategy" not in c.axes
        assert c.axes["world_size"] == 2

    def test_same_speed_is_equal(self, make_cell: Builder) -> None:
        (c,) = found(make_cell(1.0, strategy="ddp"), make_cell(1.003, strategy="fsdp2"))
        assert (c.verdict, c.launches) == ("equal", 3)

    def test_noise_hides_what_precision_would_show(self, make_cell: Builder) -> None:
        (c,) = found(make_cell(1.0, strategy="ddp", spread=0.06), make_cell(1.03, strategy="fsdp2", spread=0.06))
        assert c.verdict == "inconclusive"
        assert c.detectable_ratio > 0.03

    def test_one_launch_has_a_ratio_and_no_verdict(self, make_cell: Builder) -> None:
        (c,) = found(make_cell(1.0, 1, strategy="ddp"), make_cell(2.0, strategy="fsdp2"))
        assert c.ratio == pytest.approx(2, rel=0.01)
        assert (c.verdict, c.reason, c.launches) == ("inconclusive", ONE_LAUNCH, 1)

    def test_cells_share_their_spread_and_their_family(self, make_cell: Builder) -> None:
        """Five strategies: ten pairs, and ten degrees of freedom instead of four."""
        names = ("ddp", "fsdp2", "zero:stage=1", "zero:stage=2", "zero:stage=3")
        five = [make_cell(1.0, strategy=name, spread=0.01) for name in names]
        together, (alone,) = found(*five), found(*five[:2])
        assert len(together) == 10
        (pair,) = [c for c in together if {c.label, c.other_label} == {"ddp", "fsdp2"}]
        assert "for all 10 comparisons together" in pair.reason
        assert "together" not in alone.reason
        # The shown interval is 95 % of its own, with the larger of its own variance and the mean of all five.
        estimates = [metrics.estimate(cell, "tokens_per_s") for cell in cells_of(*five)]
        errors = [e.error for e in estimates if e is not None and e.error is not None]
        mean = sum(error**2 for error in errors) / 5
        error = sum(max(own**2, mean) for own in errors[:2]) ** 0.5
        assert math.log(pair.high / pair.ratio) == pytest.approx(2.2281 * error, rel=1e-4)

    def test_cells_of_one_launch_are_no_chance_to_be_wrong(self, make_cell: Builder) -> None:
        cells = make_cell(1.0, strategy="ddp"), make_cell(1.1, strategy="fsdp2")
        (pair,) = found(*cells)
        with_once = found(*cells, make_cell(1.2, 1, strategy="zero:stage=1"))
        assert pair in with_once
        assert [c.verdict for c in with_once if c != pair] == ["inconclusive"] * 2

    def test_equal_cells_of_a_large_group_are_rarely_ranked(self, make_cell: Builder) -> None:
        """Without the correction, one group in five or more would have a wrong winner."""
        names = ("ddp", "fsdp2", "zero:stage=1", "zero:stage=2", "zero:stage=3")
        wrong = 0
        for group in range(20):
            five = [make_cell(1.0, strategy=name, spread=0.01, seed=group) for name in names]
            wrong += any(c.is_decided for c in found(*five))
        assert wrong <= 3

    def test_step_time_is_the_inverse_verdict(self, make_cell: Builder) -> None:
        cells = make_cell(1.0, strategy="ddp"), make_cell(1.1, strategy="fsdp2")
        (speed,), (step,) = found(*cells), found(*cells, metric="step_time_s")
        assert step.verdict == speed.verdict == "better"
        assert step.ratio == pytest.approx(1 / speed.ratio, rel=1e-6)

    def test_memory_needs_repeats(self, make_cell: Builder) -> None:
        small = {"memory_bytes": 50 * 2**20}
        three = [make_cell(1.0, strategy="ddp"), make_cell(1.0, strategy="fsdp2", record=dict(small))]
        (c,) = found(*three, metric="peak_memory_bytes")
        assert {c.label: c.verdict, c.other_label: ""} in (
            {"ddp": "worse", "fsdp2": ""},
            {"fsdp2": "better", "ddp": ""},
        )
        once = [make_cell(1.0, 1, strategy="ddp"), make_cell(1.0, 1, strategy="fsdp2", record=dict(small))]
        assert found(*once, metric="peak_memory_bytes") == []
        assert len(found(*once)) == 1

    @pytest.mark.parametrize(
        "other",
        [
            {"sequence_length": 32},
            {"world_size": 4},
            {"learning_rate": 3e-4},
            {"model": "tiny-llama"},
            {"steps": 31},
        ],
    )
    def test_cells_that_differ_in_more_than_the_strategy_never_meet(
        self, make_cell: Builder, other: dict[str, Any]
    ) -> None:
        """Error 10: other sequence lengths are other work."""
        assert found(make_cell(1.0, strategy="ddp"), make_cell(1.5, strategy="fsdp2", **other)) == []

    @pytest.mark.parametrize(
        ("axis", "other", "label"),
        [
            ("compile", {"compile": True}, "compile on"),
            ("micro_batch", {"micro_batch": 4, "accumulation": 1}, "micro batch 4 x 1"),
        ],
    )
    def test_one_other_axis_is_compared_too(
        self, make_cell: Builder, axis: str, other: dict[str, Any], label: str
    ) -> None:
        (c,) = found(make_cell(1.1), make_cell(1.0, **other))
        assert (c.label, c.verdict) == (label, "better")
        assert axis not in c.axes

    def test_a_longer_time_limit_keeps_no_runs_apart(self, make_cell: Builder) -> None:
        """What a run that met its limit is told to raise before it is resumed."""
        a = make_cell(1.0, strategy="ddp", launcher=Choice("slurm", {"partition": "gpu", "time": 10}))
        b = make_cell(1.1, strategy="fsdp2", launcher=Choice("slurm", {"partition": "gpu", "time": 60}))
        assert [(c.label, c.verdict) for c in found(a, b)] == [("ddp", "better")]
        elsewhere = make_cell(1.1, strategy="fsdp2", launcher=Choice("slurm", {"partition": "other", "time": 10}))
        assert found(a, elsewhere) == []

    def test_other_gpus_never_meet(self, make_cell: Builder) -> None:
        a = make_cell(1.0, strategy="ddp", device="cuda", record={"gpus": [{"name": "H200"}]})
        b = make_cell(1.0, strategy="fsdp2", device="cuda", record={"gpus": [{"name": "A100"}]})
        assert found(a, b) == []

    def test_shared_gpu_is_not_a_speed(self, make_cell: Builder) -> None:
        shared = {"evidence": {"settings": {"shared_gpu": True}}}
        cells = [
            make_cell(t, strategy=s, device="cuda", record=dict(shared)) for s, t in (("ddp", 1.0), ("fsdp2", 2.0))
        ]
        assert found(*cells) == found(*cells, metric="step_time_s") == []
        assert len(found(*cells, metric="peak_memory_bytes")) == 1
