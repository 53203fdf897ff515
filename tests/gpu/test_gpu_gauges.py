"""A short run on the GPU leaves power, energy and clocks, and its joules per token are physically possible."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from paceline.analysis.findings import Report
from paceline.analysis.report import build
from paceline.analysis.training import energy, gauges
from paceline.campaign.run.controller import campaign
from paceline.experiment import expansion
from paceline.results import store
from paceline.results.records import RunRecord

# Long enough for the measured window to hold some tens of readings.
EXPERIMENT = """
name: gauges
base: {model: gpt2-124m, precision: bf16, sequence_length: 1024, micro_batch: 16, accumulation: 2, steps: 40,
       warmup: {minimum: 4, maximum: 10, window: 4}, strategy: single, processes: 1,
       telemetry_hz: 10, timeout_s: 300, stall_s: 200}
"""


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory, remember: Any) -> list[RunRecord]:
    folder = tmp_path_factory.mktemp("gauges")
    (folder / "gauges.yaml").write_text(EXPERIMENT)
    campaign(expansion.load(str(folder / "gauges.yaml")), folder, remember)
    found, skipped = store.read_runs(folder / "gauges")
    assert not skipped
    return found


@pytest.fixture(scope="module")
def report(records: list[RunRecord]) -> Report:
    return build(records, "gauges")


def trained(records: list[RunRecord]) -> RunRecord:
    return next(record for record in records if not record.is_reference)


def test_the_gpu_of_the_run_is_read_and_no_other(records: list[RunRecord]) -> None:
    samples = trained(records).gauges
    assert {sample.device for sample in samples} == {None, 0}
    gpu = [sample for sample in samples if sample.device == 0]
    assert len(gpu) >= 10
    for name in ("power_w", "energy_j", "temperature_c", "sm_clock_hz", "memory_clock_hz", "throttle_reasons"):
        assert all(getattr(sample, name) is not None for sample in gpu), name
    counted = [sample.energy_j or 0.0 for sample in gpu]
    assert counted == sorted(counted)
    assert counted[-1] > counted[0]
    assert max(sample.utilisation_ratio or 0.0 for sample in gpu) > 0.5


def test_readings_span_the_window(records: list[RunRecord]) -> None:
    record = trained(records)
    assert record.evidence is not None
    began = record.evidence.window_began_at_s
    assert began is not None
    times = [sample.at_s for sample in record.gauges]
    assert min(times) < began < began + sum(step.duration_s for step in record.steps) < max(times)


def test_joules_per_token_are_possible(records: list[RunRecord], report: Report) -> None:
    """Between a tenth of the power cap and a little above it: the driver lets power exceed the cap for moments."""
    found = {m.metric: m for m in report.measurements if m.metric in ("joules_per_token", "power_w", "tokens_per_s")}
    cap = trained(records).machines[0]["gpus"][0]["power_limit_w"]
    power, joules, rate = (found[name].value for name in ("power_w", "joules_per_token", "tokens_per_s"))
    assert power is not None, found["power_w"].note
    assert joules is not None
    assert rate is not None
    assert 0.1 * cap < power < 1.1 * cap
    assert joules == pytest.approx(power / rate, rel=0.02)
    assert "the energy counter" in str(found["joules_per_token"].note)


def test_the_counter_and_power_over_time_agree(records: list[RunRecord]) -> None:
    record = trained(records)
    samples = next(found for source, found in gauges.sources(record).items() if source.device == 0)
    window = gauges.window_of(record, 0, range(record.spec.steps))
    assert window is not None
    counted = energy.between(samples, *window)
    told = energy.between([dataclasses.replace(sample, energy_j=None) for sample in samples], *window)
    assert counted.how == energy.COUNTER
    assert told.how == energy.POWER
    assert told.joules == pytest.approx(counted.joules, rel=0.25), "power is averaged by the driver over about a second"


def test_the_report_names_the_gpu(report: Report) -> None:
    (state,) = report.gauges
    assert state.device == 0
    assert state.clock_min_hz
    assert state.temperature_max_c
    assert state.throttled_ratio is not None
    (run,) = (run for run in report.runs if not run.is_reference)
    assert run.throttled_steps is not None
    assert report.gauge_traces[0].power_cap_w
