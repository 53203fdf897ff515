"""Concluded about what GPUs and hosts did while runs were measured: their usual state, and traces to look at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGauges:
    """One GPU, or one host's processors (device None), over the measured steps or loads of all runs that ended ok.

    busy_ratio is the driver's busy share of a GPU, or that of all cores; clock_hz the multiprocessors' or the cores'.
    throttled_ratio is the share of readings in which it was held back, for throttle_reasons; None where none told.
    What was never told is None.
    """

    host: str
    device: int | None
    readings: int
    busy_median_ratio: float | None
    memory_max_bytes: float | None
    power_median_w: float | None
    power_max_w: float | None
    temperature_median_c: float | None
    temperature_max_c: float | None
    clock_min_hz: float | None
    clock_median_hz: float | None
    throttled_ratio: float | None
    throttle_reasons: tuple[str, ...]
    runs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GaugeTrace:
    """One device of one run from its first reading to its last, thinned to what a chart can show.

    seconds count from the first measured step or load, or from the first reading of a run that measured none; window is
    the measured part, throttled the stretches in which the device was held back. A reading that lacks a gauge has None.
    power_cap_w and clock_max_hz are the machine's own limits.
    """

    run: str
    cell: str
    host: str
    device: int | None
    seconds: tuple[float, ...]
    power_w: tuple[float | None, ...]
    temperature_c: tuple[float | None, ...]
    clock_hz: tuple[float | None, ...]
    busy_ratio: tuple[float | None, ...]
    throttled: tuple[tuple[float, float], ...]
    window: tuple[float, float] | None
    power_cap_w: float | None
    clock_max_hz: float | None
