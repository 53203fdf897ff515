from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.analysis.compare.cells import compare_cells
from paceline.analysis.findings import Comparison
from paceline.analysis.statistics.intervals import Ratio
from paceline.analysis.statistics.verdict import verdict_of
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
        clear = Ratio(1.10, 1.08, 1.12, 0.01)
        assert verdict_of(clear, "higher")[0] == "better"
        assert verdict_of(clear, "lower")[0] == "worse"

    @pytest.mark.parametrize(
        ("ratio", "reason"),
        [
            (Ratio(1.10, 0.99, 1.21, 0.01), "the interval includes 1"),
            (Ratio(1.009, 1.008, 1.010, 0.0005), "under 1%"),
            (Ratio(0.992, 0.991, 0.993, 0.0005), "under 1%"),
            (Ratio(1.05, 1.01, 1.09, 0.02), "smallest detectable"),
            (Ratio(0.955, 0.92, 0.99, 0.02), "smallest detectable"),
        ],
    )
    def test_ties_say_why(self, ratio: Ratio, reason: str) -> None:
        verdict, text = verdict_of(ratio, "higher")
        assert verdict == "tie"
        assert reason in text

    def test_both_directions_agree(self) -> None:
        for value in (1.0101, 1.0099):
            there = verdict_of(Ratio(value, value, value, 0.0), "higher")[0]
            back = verdict_of(Ratio(1 / value, 1 / value, 1 / value, 0.0), "higher")[0]
            assert {there, back} in ({"better", "worse"}, {"tie"})


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

    def test_same_speed_is_a_tie(self, make_cell: Builder) -> None:
        (c,) = found(make_cell(1.0, strategy="ddp"), make_cell(1.003, strategy="fsdp2"))
        assert c.verdict == "tie"

    def test_noise_hides_what_precision_would_show(self, make_cell: Builder) -> None:
        (c,) = found(make_cell(1.0, strategy="ddp", spread=0.06), make_cell(1.03, strategy="fsdp2", spread=0.06))
        assert c.verdict == "tie"
        assert c.detectable_ratio > 0.03

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
            ("precision", {"precision": "bf16"}, "precision bf16"),
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
