"""What GPUs and hosts did while runs were measured: their usual state over a campaign, and a trace of each cell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np

from paceline.analysis.findings import DeviceGauges, GaugeTrace, Report
from paceline.analysis.grouping import grouped
from paceline.analysis.training import gauges
from paceline.analysis.training.gauges import Source, known, slowing
from paceline.analysis.training.window import Window
from paceline.results.records import GaugeSample, RunRecord

# A trace with fewer readings shows no more than the table.
FEWEST_READINGS, MOST_READINGS = 5, 120
MOST_TRACES = 6
# A trace starts and ends this long before and after the measured steps, or as long as they took if that is longer;
# minutes of set-up would otherwise leave them no width.
LEAST_MARGIN_S = 15.0


@dataclass(frozen=True, slots=True)
class Watched:
    """One source of one run, with the window of its measured steps or loads if it has one."""

    record: RunRecord
    source: Source
    samples: Sequence[GaugeSample]
    window: tuple[float, float] | None

    @property
    def measured(self) -> Sequence[GaugeSample]:
        return gauges.within(self.samples, self.window)

    @property
    def around(self) -> Sequence[GaugeSample]:
        """Readings in the measured window and a margin on both sides; all if there is no window."""
        if self.window is None:
            return self.samples
        begin, end = self.window
        margin = max(LEAST_MARGIN_S, end - begin)
        return gauges.within(self.samples, (begin - margin, end + margin))


def added_to(report: Report, records: Iterable[RunRecord], windows: Mapping[str, Window]) -> Report:
    """The report with the gauges of these runs."""
    found = watched(records, windows)
    return replace(report, gauges=states(found), gauge_traces=traces(found))


def watched(records: Iterable[RunRecord], windows: Mapping[str, Window]) -> list[Watched]:
    """Every GPU of the runs that used one, every host of the others."""
    found = []
    for record in records:
        cuda = record.spec.topology.device == "cuda"
        opened = windows.get(record.spec.run_id)
        for source, samples in gauges.sources(record).items():
            if (source.device is not None) == cuda:
                found.append(Watched(record, source, samples, measured_span(record, source.rank, opened)))
    return found


def measured_span(record: RunRecord, rank: int, window: Window | None) -> tuple[float, float] | None:
    """When the run was measured, by the clock of the rank's host: its steps after warm-up, or from the start of the
    first load of an inference run to the end of its last. None for other runs."""
    if window is not None:
        return gauges.window_of(record, rank, window.measured)
    ends = [stage.began_at_s + (stage.ended_ns - stage.started_ns) * 1e-9 for stage in record.stages]
    return (min(stage.began_at_s for stage in record.stages), max(ends)) if ends else None


# --- usual state ---


def states(found: Iterable[Watched]) -> tuple[DeviceGauges, ...]:
    """One row per device of each host, over all runs on it."""

    def device(one: Watched) -> tuple[str, int]:
        return one.source.host, -1 if one.source.device is None else one.source.device

    return tuple(_state(ours) for _, ours in sorted(grouped(found, device).items()))


def _state(ours: Sequence[Watched]) -> DeviceGauges:
    samples = [sample for one in ours for sample in one.measured]
    power_w, temperatures_c, clocks_hz = (
        known(map(read, samples)) for read in (attrgetter("power_w"), attrgetter("temperature_c"), clock)
    )
    slowed = [slowing(sample) for sample in samples if sample.throttle_reasons is not None]
    return DeviceGauges(
        host=ours[0].source.host,
        device=ours[0].source.device,
        readings=len(samples),
        busy_median_ratio=_median(known(map(busy, samples))),
        memory_max_bytes=max(known(s.memory_used_bytes for s in samples), default=None),
        power_median_w=_median(power_w),
        power_max_w=max(power_w, default=None),
        temperature_median_c=_median(temperatures_c),
        temperature_max_c=max(temperatures_c, default=None),
        clock_min_hz=min(clocks_hz, default=None),
        clock_median_hz=_median(clocks_hz),
        throttled_ratio=sum(map(bool, slowed)) / len(slowed) if slowed else None,
        throttle_reasons=tuple(dict.fromkeys(reason for reasons in slowed for reason in reasons)),
        runs=tuple(dict.fromkeys(one.record.spec.run_id for one in ours)),
    )


def busy(sample: GaugeSample) -> float | None:
    return sample.cpu_ratio if sample.device is None else sample.utilisation_ratio


def clock(sample: GaugeSample) -> float | None:
    return sample.frequency_hz if sample.device is None else sample.sm_clock_hz


def _median(values: Sequence[float]) -> float | None:
    # Not NumPy's: a device has a few readings in a run.
    found = sorted(values)
    return (found[(len(found) - 1) // 2] + found[len(found) // 2]) / 2 if found else None


# --- traces ---


def traces(found: Sequence[Watched]) -> tuple[GaugeTrace, ...]:
    """For each cell the device that was throttled most, else the one with the highest power; most throttled cells
    first.

    References are not measured and have no trace.
    """
    usable = [one for one in found if len(one.around) >= FEWEST_READINGS and not one.record.proves_only]
    by_cell = grouped(usable, lambda one: one.record.spec.cell)
    chosen = sorted((max(ours, key=_interest) for ours in by_cell.values()), key=_interest, reverse=True)
    return tuple(map(_trace, chosen[:MOST_TRACES]))


def _interest(one: Watched) -> tuple[int, float]:
    return sum(bool(slowing(s)) for s in one.measured), max(known(s.power_w for s in one.measured), default=0.0)


def _trace(one: Watched) -> GaugeTrace:
    count = len(one.around)
    evenly_spaced = np.linspace(0, count - 1, min(count, MOST_READINGS)).round().astype(int).tolist()
    samples = [one.around[i] for i in evenly_spaced]
    start = one.window[0] if one.window else samples[0].at_s
    gpus = [g for m in one.record.machines if m.get("host") == one.source.host for g in m.get("gpus") or ()]
    facts: Mapping[str, Any] = next((gpu for gpu in gpus if gpu.get("index") == one.source.device), {})

    return GaugeTrace(
        run=one.record.spec.run_id,
        cell=one.record.spec.cell,
        host=one.source.host,
        device=one.source.device,
        seconds=tuple(sample.at_s - start for sample in samples),
        power_w=tuple(sample.power_w for sample in samples),
        temperature_c=tuple(sample.temperature_c for sample in samples),
        clock_hz=tuple(map(clock, samples)),
        busy_ratio=tuple(map(busy, samples)),
        throttled=tuple((begin - start, end - start) for begin, end in gauges.throttled_spans(one.around)),
        window=(0.0, one.window[1] - start) if one.window else None,
        power_cap_w=facts.get("power_limit_w"),
        clock_max_hz=facts.get("sm_clock_max_hz"),
    )
