"""Gauges tell what the driver says, and never disturb the run they watch."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from paceline.host import gauges as telemetry
from paceline.workloads import worker

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
    def broken(*_: object) -> None:
        raise RuntimeError("gauge broke")

    monkeypatch.setattr(telemetry, "_core_ratios", broken)
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


# --- for a run ---


def test_only_as_many_gpus_are_read_as_the_run_uses(fake_nvml: FakeNvml) -> None:
    for devices, expected in ((0, []), (1, [0]), (None, [0, 1])):
        with telemetry.Gauges(devices) as gauges:
            assert [device.device for device in gauges.read().devices] == expected
            assert fake_nvml.opened == (devices != 0)


def test_a_reading_becomes_samples_of_the_run(fake_nvml: FakeNvml) -> None:
    host, *gpus = worker.gauge_samples(telemetry.read(), rank=8, host="node-b")
    assert (host.rank, host.host, host.device, host.utilisation_ratio) == (8, "node-b", None, None)
    assert host.memory_used_bytes
    assert [gpu.device for gpu in gpus] == [0, 1]
    first = gpus[0]
    assert (first.power_w, first.energy_j, first.temperature_c, first.utilisation_ratio) == (512.5, 5000.25, 61.0, 0.87)
    assert (first.sm_clock_hz, first.memory_clock_hz) == (1.755e9, 3.201e9)
    assert first.throttle_reasons == ("software power cap", "hardware thermal slowdown")
    assert set(telemetry.THROTTLE_REASONS.values()) > telemetry.SLOWING_REASONS


@pytest.mark.usefixtures("no_gpu")
def test_every_reading_reaches_the_sink_and_the_last_comes_at_the_end() -> None:
    seen: list[telemetry.Snapshot] = []
    with telemetry.Sampler(interval_s=60.0, sink=seen.append):
        wait_until(lambda: seen)
        before = time.time()
    assert len(seen) == 2
    assert seen[-1].host.at_s >= before


@pytest.mark.usefixtures("no_gpu")
def test_a_sink_that_fails_is_counted_and_the_run_goes_on() -> None:
    def full(_: telemetry.Snapshot) -> None:
        raise OSError("no space left on device")

    with telemetry.Sampler(interval_s=0.01, sink=full) as sampler:
        wait_until(lambda: sampler.failures >= 2)


def test_a_thread_that_is_not_granted_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with telemetry.Sampler() as sampler:
        pass
    assert (sampler.failures, sampler.snapshots) == (1, ())


# --- processors ---


def package(root: Path, zone: str, name: str, microjoules: int, largest: int = 262_143_000_000) -> Path:
    folder = root / zone
    folder.mkdir()
    for file, value in {"name": name, "energy_uj": microjoules, "max_energy_range_uj": largest}.items():
        (folder / file).write_text(f"{value}\n")
    return folder / "energy_uj"


def test_packages_add_up_and_what_is_part_of_them_does_not(tmp_path: Path) -> None:
    first, second = (package(tmp_path, f"intel-rapl:{i}", f"package-{i}", 7_000_000) for i in (0, 1))
    parts = [package(tmp_path, "intel-rapl:0:0", "core", 1), package(tmp_path, "intel-rapl:2", "psys", 1)]
    energy = telemetry.PackageEnergy(tmp_path)
    assert energy.read_j() == 0
    first.write_text("9000000\n")
    second.write_text("12000000\n")
    for part in parts:
        part.write_text("900000000\n")
    assert energy.read_j() == 2 + 5


def test_a_counter_that_wrapped_goes_on(tmp_path: Path) -> None:
    counter = package(tmp_path, "intel-rapl:0", "package-0", 90_000_000, largest=100_000_000)
    energy = telemetry.PackageEnergy(tmp_path)
    energy.read_j()
    counter.write_text("5000000\n")
    assert energy.read_j() == 15


def test_packages_that_cannot_all_be_read_tell_nothing(tmp_path: Path) -> None:
    assert telemetry.PackageEnergy(tmp_path).read_j() is None
    package(tmp_path, "intel-rapl:0", "package-0", 5)
    package(tmp_path, "intel-rapl:1", "package-1", 5).unlink()
    assert telemetry.PackageEnergy(tmp_path).read_j() is None


def test_network_counters_are_those_of_hardware_and_rdma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "dev"
    lines = ["lo: 9 0 0 0 0 0 0 0 9", "eth0: 100 1 0 0 0 0 0 0 40", "docker0: 7 1 0 0 0 0 0 0 7"]
    table.write_text("\n".join(("Inter-|", "face |bytes", *(f"{line} 1 0 0 0 0 0 0" for line in lines))))
    monkeypatch.setattr(telemetry, "NETWORK", table)
    monkeypatch.setattr(telemetry, "INTERFACES", tmp_path / "net")
    monkeypatch.setattr(telemetry, "INFINIBAND", tmp_path / "infiniband")
    assert telemetry.network_bytes() == (107, 47)  # a container has virtual interfaces only
    (tmp_path / "net" / "eth0" / "device").mkdir(parents=True)
    assert telemetry.network_bytes() == (100, 40)
    counters = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1" / "counters"
    counters.mkdir(parents=True)
    (counters / "port_rcv_data").write_text("1000\n")
    (counters / "port_xmit_data").write_text("10\n")
    assert telemetry.network_bytes() == (4100, 80)
    table.unlink()
    monkeypatch.setattr(telemetry, "INFINIBAND", tmp_path / "none")
    assert telemetry.network_bytes() is None
