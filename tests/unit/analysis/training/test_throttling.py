"""Steps that ran while a GPU was held back are tagged, counted, and told wherever speeds are compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from answered_records import build_record, build_spec, build_stage

from paceline.analysis import report
from paceline.analysis.compare import cells
from paceline.analysis.findings import Report
from paceline.analysis.training import gauge_summary, gauges, metrics
from paceline.analysis.training.window import open_window
from paceline.report import answer
from paceline.report.charts import gauges as charted
from paceline.report.tables.gauges import tables
from paceline.report.text.cells import turned
from paceline.results.records import GaugeSample, RunRecord

Builder = Callable[..., Any]
BEGAN = 1000.0
CAP, IDLE = ("software power cap",), ("applications clocks setting",)


def stream(throttled: Callable[[float], tuple[str, ...] | None], device: int = 0, **more: Any) -> list[GaugeSample]:
    """A GPU read twice a second from 990 s to 1050 s."""
    usual: dict[str, Any] = {"power_w": 500.0, "temperature_c": 60.0, "sm_clock_hz": 1.7e9, "utilisation_ratio": 0.9}
    return [
        GaugeSample(rank=0, host="node-a", at_s=at, device=device, throttle_reasons=throttled(at), **usual | more)
        for at in (990 + 0.5 * i for i in range(121))
    ]


def during(begin: float, end: float, reasons: tuple[str, ...] = CAP) -> Callable[[float], tuple[str, ...]]:
    return lambda at: reasons if begin <= at <= end else ()


@pytest.fixture
def run_on_gpus(make_spec: Builder, make_record: Builder) -> Builder:
    """30 steps of 1 s on two GPUs: step k runs from 1000 + k to 1001 + k by the clock of the sampling rank 0."""

    def build(first: list[GaugeSample], second: Sequence[GaugeSample] = (), **more: Any) -> RunRecord:
        spec = make_spec(device="cuda", **more)
        found: RunRecord = make_record(spec, evidence={"window_began_at_s": BEGAN}, gauges=(*first, *second))
        return found

    return build


def test_a_sample_covers_the_time_around_it_but_no_pause() -> None:
    samples = [GaugeSample(rank=0, host="a", at_s=at) for at in (0.0, 1.0, 2.0, 9.0)]
    begins, ends = gauges.spoken_for(samples)
    assert begins.tolist() == [-0.5, 0.5, 1.5, 8.0]
    assert ends.tolist() == [0.5, 1.5, 3.0, 9.5]


def test_steps_that_overlap_a_throttled_sample_are_tagged(run_on_gpus: Builder, golden: object) -> None:
    # Throttled readings at 1010 to 1012 stand for 1009.75 to 1012.25: steps 9, 10, 11 and 12.
    found = open_window(run_on_gpus(stream(during(1010, 1012)))).throttling
    assert found == gauges.Throttling(4, 29, CAP)
    assert found.text == golden
    assert "29" in found.text


def test_steps_of_any_gpu_count_once_and_every_reason_is_named(run_on_gpus: Builder) -> None:
    heat = ("hardware thermal slowdown",)
    record = run_on_gpus(stream(during(1010, 1012)), stream(during(1011, 1014, heat), device=1))
    assert open_window(record).throttling == gauges.Throttling(6, 29, CAP + heat)


@pytest.mark.parametrize("when", [during(0, 2000, IDLE), during(990, 999), during(1035, 1050)])
def test_a_set_clock_is_no_throttling_and_set_up_is_no_step(run_on_gpus: Builder, when: Any) -> None:
    assert open_window(run_on_gpus(stream(when))).throttling == gauges.Throttling(0, 29, ())


def test_warm_up_does_not_count(run_on_gpus: Builder) -> None:
    assert open_window(run_on_gpus(stream(during(1000.5, 1000.5)))).throttling == gauges.Throttling(0, 29, ())


def test_a_gpu_that_does_not_tell_is_not_called_healthy(run_on_gpus: Builder, make_record: Builder) -> None:
    record = run_on_gpus(stream(lambda _: None))
    assert open_window(record).throttling is None
    older = dataclasses.replace(record, outcomes=make_record(record.spec).outcomes)
    assert open_window(older).throttling is None, "nobody knows when its steps ran"


def test_the_run_and_the_devices_say_so(run_on_gpus: Builder, make_reference: Builder, golden: object) -> None:
    record = run_on_gpus(stream(during(1010, 1012)))
    found = report.build([make_reference(record.spec), record], "t")
    run = next(run for run in found.runs if not run.is_reference)
    assert (run.status, run.throttled_steps) == ("ok", 4)
    assert run.health == golden
    assert any("29" in note for note in run.health)
    (state,) = found.gauges
    assert (state.host, state.device, state.throttle_reasons) == ("node-a", 0, CAP)
    (table,) = tables(found)
    shown = dict(zip((column.heading for column in table.columns), table.rows[0], strict=True))
    assert shown["clock least / median, MHz"].text == "1,700 / 1,700"
    assert shown["device"].text == golden
    assert shown["throttled"].detail == "software power cap"
    assert shown["throttled"].text == golden
    assert table.notes == golden


# --- two sides ---


@pytest.fixture
def sides(run_on_gpus: Builder, make_steps: Builder) -> Builder:
    """ddp slow and throttled for as long as asked, fsdp2 fast and cool."""

    def build(until: float) -> list[metrics.Cell]:
        windows = []
        for repeat in range(3):
            slow = run_on_gpus(stream(during(0, until)), strategy="ddp", repeat=repeat)
            fast = run_on_gpus(stream(during(0, 0)), strategy="fsdp2", repeat=repeat)
            times = [0.5 + 0.001 * ((i + repeat) % 3) for i in range(30)]
            fast = dataclasses.replace(fast, steps=make_steps(fast.spec, times))
            slow = dataclasses.replace(slow, steps=make_steps(slow.spec, [2 * t for t in times]))
            windows += [open_window(slow), open_window(fast)]
        return metrics.gather(windows)

    return build


def test_a_comparison_of_a_throttled_side_says_so(sides: Builder, golden: object) -> None:
    (compared,) = cells.compare_cells(sides(1020.0))
    speed = next(c for c in compared.comparisons if c.metric == "tokens_per_s")
    assert (speed.label, speed.verdict) == ("fsdp2", "better")
    assert speed.throttled == (0.0, pytest.approx(20 / 29))
    assert speed.reason == golden
    assert "fsdp2" in speed.reason
    assert "69" in speed.reason
    assert turned(speed).throttled == speed.throttled[::-1]


def test_sides_throttled_alike_are_compared_as_ever(sides: Builder) -> None:
    (compared,) = cells.compare_cells(sides(1001.5))
    assert all(c.throttled is None for c in compared.comparisons), "one step of 29 is under 5 %"


def test_the_answer_and_the_recommendation_say_so(sides: Builder, golden: object) -> None:
    from paceline.analysis.compare.recommend import recommend

    found = recommend(cells.compare_cells(sides(1020.0)))
    speed = next(r for r in found if r.metric == "tokens_per_s")
    assert speed.caveats == golden
    assert any("69" in caveat for caveat in speed.caveats)
    empty: dict[str, Any] = dict.fromkeys(("runs", "measurements", "certificates", "comparisons", "scaling"), ())
    page = Report(title="t", created_at=0.0, paceline_version="0", machines=(), recommendations=(speed,), **empty)
    text = answer.answer(page)[1]
    assert text == golden
    assert "fsdp2" in text
    assert "69" in text
    assert "ddp" in text


# --- the table and the curves ---


def test_the_table_counts_the_measured_steps_only(run_on_gpus: Builder) -> None:
    hot = [dataclasses.replace(s, temperature_c=99.0) if s.at_s < 1000 else s for s in stream(during(1010, 1012))]
    record = run_on_gpus(hot)
    window = open_window(record)
    found = gauge_summary.watched([record], {window.run: window})
    (state,) = gauge_summary.states(found)
    assert (state.temperature_median_c, state.temperature_max_c, state.clock_min_hz) == (60.0, 60.0, 1.7e9)
    assert state.throttled_ratio == pytest.approx(5 / 59)
    (trace,) = gauge_summary.traces(found)
    assert trace.throttled == ((pytest.approx(8.75), pytest.approx(11.25)),)
    assert trace.window == (0.0, 29.0)
    assert trace.seconds[0] == -11.0, "set-up is drawn"


def test_throttling_of_a_served_run_is_of_its_loads_and_not_of_its_start() -> None:
    read = [dataclasses.replace(s, utilisation_ratio=0.0) if s.at_s < 1010 else s for s in stream(during(0, 0))]
    loads = [build_stage(0, 0, 4, began_at_s=1010.0), build_stage(1, 5, 12, began_at_s=1015.0)]
    record = build_record(build_spec(device="cuda"), [], stages=tuple(loads), gauges=tuple(read))
    found = gauge_summary.watched([record], {})
    (state,) = gauge_summary.states(found)
    assert (state.readings, state.busy_median_ratio) == (25, 0.9), "from 1010 s to 1022 s, two a second"
    (trace,) = gauge_summary.traces(found)
    assert (trace.window, trace.seconds[0]) == ((0.0, 12.0), -15.0)


def test_a_trace_ends_a_margin_beyond_the_measured_steps(run_on_gpus: Builder) -> None:
    early = [dataclasses.replace(s, at_s=s.at_s - 200) for s in stream(during(0, 0))]
    record = run_on_gpus([*early, *stream(during(0, 0))])
    window = open_window(record)
    (trace,) = gauge_summary.traces(gauge_summary.watched([record], {window.run: window}))
    assert trace.seconds[0] == -11.0, "what was read 200 s earlier is no part of it"


def test_a_reference_has_no_trace(run_on_gpus: Builder, make_reference: Builder) -> None:
    record = run_on_gpus(stream(during(0, 0)))
    reference = dataclasses.replace(make_reference(record.spec), gauges=record.gauges)
    found = report.build([reference, record], "t")
    assert [trace.run for trace in found.gauge_traces] == [record.spec.run_id]


def test_curves_are_shares_of_the_machines_limits_or_of_the_most_seen(run_on_gpus: Builder) -> None:
    record = run_on_gpus(stream(during(0, 0)))
    facts = {"host": "node-a", "gpus": [{"index": 0, "power_limit_w": 700.0}]}
    window = open_window(record)
    found = gauge_summary.watched([dataclasses.replace(record, machines=(facts,))], {window.run: window})
    first = reversed(charted._curves(gauge_summary.traces(found)[0]))
    shares = {name: percent for name, _, percent in first}
    assert shares == {
        "power, % of the cap": pytest.approx(100 * 500 / 700),
        "clock, % of its maximum": 100.0,
        "busy, %": 90.0,
        "temperature, C": 60.0,
    }


def test_a_report_without_gauges_has_no_table(run_on_gpus: Builder) -> None:
    assert tables(report.build([run_on_gpus([])], "t")) == ()
