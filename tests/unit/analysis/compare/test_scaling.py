from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.analysis.compare import scaling
from paceline.analysis.compare.scaling import Scaling
from paceline.analysis.findings import ScalingPoint
from paceline.analysis.training import metrics
from paceline.analysis.training.window import open_window
from paceline.results.records import RunRecord

Builder = Callable[..., Any]


def analyse(*groups: list[RunRecord]) -> Scaling:
    return scaling.analyse(metrics.gather(open_window(r) for group in groups for r in group))


def by_size(found: Scaling, kind: str) -> dict[int, ScalingPoint]:
    return {p.world_size: p for p in found.points if p.kind == kind}


def test_weak_efficiency_by_hand(make_cell: Builder) -> None:
    """Twice the processes, the same sequences each: 1 s becomes 1.25 s, so tokens/s per process fall to 80 %."""
    found = by_size(
        analyse(make_cell(1.0, world_size=1, spread=0.0), make_cell(1.25, world_size=2, spread=0.0)), "weak"
    )
    assert found[2].efficiency.value == pytest.approx(0.8)
    assert found[2].speedup_ratio == pytest.approx(1.6)
    assert (found[2].baseline_world_size, found[2].baseline) == (1, found[1].cell)


def test_strong_efficiency_by_hand(make_cell: Builder) -> None:
    """The same global batch of 4: 1 s on one process, 0.625 s on two; 1.6 times faster is 80 %."""
    one = make_cell(1.0, world_size=1, accumulation=2, spread=0.0)
    two = make_cell(0.625, world_size=2, accumulation=1, spread=0.0)
    found = analyse(one, two)
    assert {p.kind for p in found.points} == {"strong"}
    assert by_size(found, "strong")[2].efficiency.value == pytest.approx(0.8)


def test_baseline_is_exactly_one(make_cell: Builder) -> None:
    """Test (2) of method.md, whatever the noise."""
    found = by_size(analyse(make_cell(1.0, world_size=2), make_cell(1.3, world_size=4)), "weak")
    base = found[2].efficiency
    assert (base.value, base.low, base.high) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(("wrong", "right"), [(0.365, 0.730), (0.348, 0.696), (0.412, 0.824), (0.378, 0.756)])
def test_two_process_baseline_is_not_divided_as_if_it_were_one(make_cell: Builder, wrong: float, right: float) -> None:
    """Error 4: T_4 / (4 T_2) was printed; per process the same rates are twice that."""
    seconds = 4 / (wrong * 4) / 2  # a weak series: T_4 / T_2 = 2 * 1 / seconds
    found = by_size(
        analyse(make_cell(1.0, world_size=2, spread=0.0), make_cell(seconds, world_size=4, spread=0.0)), "weak"
    )
    rate = found[4].speedup_ratio
    assert rate / 4 == pytest.approx(wrong)
    assert found[4].efficiency.value == pytest.approx(right)


def test_interval_holds_the_truth_and_notes_say_the_baseline(make_cell: Builder, golden: object) -> None:
    point = by_size(analyse(make_cell(1.0, world_size=1), make_cell(1.25, world_size=2)), "weak")[2].efficiency
    assert point.low is not None
    assert point.high is not None
    assert point.low < 0.8 < point.high
    assert point.high - point.low < 0.05
    assert point.metric == "scaling_efficiency_ratio"
    assert point.note == golden
    assert "100 %" in point.note
    assert len(point.runs) == 6


def test_no_baseline_no_efficiency(make_cell: Builder) -> None:
    assert analyse(make_cell(1.0, world_size=4)).points == ()
    assert analyse(make_cell(1.0, world_size=1, strategy="fsdp2"), make_cell(1.0, world_size=2)).points == ()


def test_other_work_is_no_baseline(make_cell: Builder) -> None:
    """Error 11: the baseline was a constant from elsewhere."""
    assert analyse(make_cell(1.0, world_size=1, sequence_length=32), make_cell(1.0, world_size=2)).points == ()


def test_shared_gpu_does_not_scale(make_cell: Builder) -> None:
    shared = {"evidence": {"settings": {"shared_gpu": True}}}
    cells = [make_cell(1.0, world_size=n, device="cuda", record=dict(shared)) for n in (1, 2)]
    assert analyse(*cells).points == ()


def test_baseline_with_the_same_micro_batch_is_preferred(make_cell: Builder) -> None:
    same = make_cell(1.0, world_size=1, micro_batch=2, accumulation=2)
    other = make_cell(0.7, world_size=1, micro_batch=4, accumulation=1)
    two = make_cell(1.0, world_size=2, micro_batch=2, accumulation=2)
    point = by_size(analyse(other, same, two), "weak")[2]
    assert point.baseline == same[0].spec.cell


def test_strategies_are_compared_by_how_they_scale(make_cell: Builder) -> None:
    """ddp keeps 90 %, fsdp2 60 %: its efficiency is 1.5 times fsdp2's, though fsdp2 may start faster."""
    times = {("ddp", 1): 1.0, ("ddp", 2): 1 / 0.9, ("fsdp2", 1): 0.5, ("fsdp2", 2): 0.5 / 0.6}
    found = analyse(*(make_cell(t, strategy=s, world_size=n) for (s, n), t in times.items()))
    (compared,) = found.compared
    (c,) = compared.comparisons
    assert (c.label, c.other_label, c.verdict) == ("ddp", "fsdp2", "better")
    assert c.ratio == pytest.approx(1.5, rel=0.02)
    assert c.metric == "scaling_efficiency_ratio"
