"""Gauges tell what the driver says, and never disturb the run they watch."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

import pytest

from paceline import telemetry

if TYPE_CHECKING:
    from conftest import FakeNvml


def wait_until(condition: object, timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def test_a_reading_has_the_drivers_numbers_in_base_units(fake_nvml: FakeNvml) -> None:
    before = time.time()
    devices = telemetry.read().devices
    assert [d.device for d in devices] == [0, 1]
    first = devices[0]
    assert before <= first.at_s <= time.time()
    assert (first.utilisation_ratio, first.memory_used_bytes, first.power_w) == (0.87, 1_000_000, 512.5)
    assert (first.temperature_c, first.sm_clock_hz, first.memory_clock_hz) == (61.0, 1.755e9, 3.201e9)
    assert (first.memory_total_bytes, first.energy_j) == (150_754_820_096, 5000.25)
    assert first.throttle_reasons == ("software power cap", "hardware thermal slowdown")
    assert fake_nvml.opened == 0


def test_a_gauge_that_is_not_there_is_none_and_the_others_stay(
    fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(type(fake_nvml), "nvmlDeviceGetPowerUsage")
    first = telemetry.read().devices[0]
    assert (first.power_w, first.temperature_c) == (None, 61.0)


@pytest.mark.usefixtures("no_gpu")
def test_a_host_without_gpu_is_still_read() -> None:
    seen = telemetry.read()
    assert seen.devices == ()
    assert seen.host.cpu_ratio is None
    assert seen.host.memory_used_bytes is not None
    assert seen.host.memory_used_bytes > 10 * 2**20


def test_throttle_bits_become_words() -> None:
    assert telemetry.throttle_reasons(0x0001) == ()
    assert telemetry.throttle_reasons(0x0088) == ("hardware slowdown", "hardware power brake")


def test_the_sampler_reads_until_stopped(fake_nvml: FakeNvml) -> None:
    sampler = telemetry.Sampler(interval_s=0.02)
    sampler.start()
    sampler.start()
    wait_until(lambda: len(sampler.snapshots) >= 4)
    seen = sampler.stop()
    time.sleep(0.1)
    assert sampler.snapshots == seen
    assert "paceline-telemetry" not in {thread.name for thread in threading.enumerate()}
    times = [snapshot.host.at_s for snapshot in seen]
    assert times == sorted(times)
    assert all(len(snapshot.devices) == 2 for snapshot in seen)
    assert (fake_nvml.opened, sampler.failures) == (0, 0)


@pytest.mark.usefixtures("no_gpu")
def test_the_sampler_sees_a_busy_host() -> None:
    with telemetry.Sampler(interval_s=0.2) as sampler:
        wait_until(lambda: len(sampler.snapshots) >= 1)
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            sum(range(1000))
    ratios = [s.host.cpu_ratio for s in sampler.snapshots if s.host.cpu_ratio is not None]
    assert all(0 <= ratio <= 1 for ratio in ratios)
    assert max(ratios) > 0
    cores = [s.host.cores_ratio for s in sampler.snapshots if s.host.cores_ratio is not None]
    assert {len(shares) for shares in cores} == {os.cpu_count()}
    assert all(0 <= share <= 1 for shares in cores for share in shares)


@pytest.mark.usefixtures("no_gpu")
def test_failing_readings_are_counted_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: tuple[float, ...] | None) -> telemetry.HostSample:
        raise RuntimeError("gauge broke")

    monkeypatch.setattr(telemetry, "_host", broken)
    with telemetry.Sampler(interval_s=0.01) as sampler:
        wait_until(lambda: sampler.failures >= 3)
    assert sampler.snapshots == ()


@pytest.mark.usefixtures("no_gpu")
def test_old_snapshots_make_room() -> None:
    with telemetry.Sampler(interval_s=0.01, keep=3) as sampler:
        wait_until(lambda: len(sampler.snapshots) == 3)
        newest = sampler.snapshots[-1]
        wait_until(lambda: sampler.snapshots[0].host.at_s > newest.host.at_s)
        assert len(sampler.snapshots) == 3
