"""GPU and host gauges, read during a run through NVML and psutil; unknown values are None.

Sampling must not disturb a run: one reading takes a few milliseconds of a thread, and errors never reach the caller.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.host import machine
from paceline.host.files import text_of
from paceline.host.usage import HostUsage, UsageReader

# Bits of NVML's clock event reasons that mean the GPU runs below its maximum clock (nvml.h); idle is not one of them.
THROTTLE_REASONS = {
    0x0002: "applications clocks setting",
    0x0004: "software power cap",
    0x0008: "hardware slowdown",
    0x0010: "sync boost",
    0x0020: "software thermal slowdown",
    0x0040: "hardware thermal slowdown",
    0x0080: "hardware power brake",
    0x0100: "display clock setting",
}


# Reasons that slow a run down; the others are clocks that somebody set or that follow another GPU.
SLOWING_REASONS = frozenset(THROTTLE_REASONS[bit] for bit in (0x0004, 0x0008, 0x0020, 0x0040, 0x0080))
# Of these, the ones that are no normal state: a data centre GPU under full load runs at its power cap.
HEAT_REASONS = SLOWING_REASONS - {THROTTLE_REASONS[0x0004]}
SET_CLOCKS = THROTTLE_REASONS[0x0002]
POWERCAP = Path("/sys/class/powercap")
NETWORK, INTERFACES, INFINIBAND = Path("/proc/net/dev"), Path("/sys/class/net"), Path("/sys/class/infiniband")
# An InfiniBand counter counts words of four bytes.
RDMA_WORD_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    """One GPU at one moment. at_s is `time.time()`; device is CUDA's index. utilisation_ratio is the driver's busy
    share; energy_j counts from when the driver was loaded, so only differences are meaningful."""

    at_s: float
    device: int
    utilisation_ratio: float | None
    memory_used_bytes: int | None
    power_w: float | None
    temperature_c: float | None
    sm_clock_hz: float | None
    throttle_reasons: tuple[str, ...] | None
    memory_total_bytes: int | None = None
    memory_clock_hz: float | None = None
    energy_j: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSample:
    """The host at one moment. cpu_ratio and cores_ratio are busy shares since the previous reading, None at first.

    load: runnable processes, averaged over a minute by the kernel. frequency_hz: mean of all cores. temperature_c: the
    hottest sensor of the processor. energy_j: energy of the processor packages since the first reading. received_bytes
    and sent_bytes: counters of the network (see `network_bytes`).
    """

    at_s: float
    cpu_ratio: float | None
    memory_used_bytes: int | None
    load: float | None
    memory_total_bytes: int | None = None
    cores_ratio: tuple[float, ...] | None = None
    frequency_hz: float | None = None
    temperature_c: float | None = None
    energy_j: float | None = None
    received_bytes: int | None = None
    sent_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One reading of everything. usage: counters of the host and of a run's own processes, if they were asked for."""

    host: HostSample
    devices: tuple[DeviceSample, ...]
    usage: HostUsage | None = None


class Gauges:
    """Reads on demand while open. NVML is opened once, because opening it takes longer than a reading.

    devices: how many of the visible GPUs to read, all by default; 0 does not open NVML. marks: of the processes of the
    run whose host is read (see `UsageReader`); None does not count processes.
    """

    def __init__(self, devices: int | None = None, marks: Sequence[str] | None = None) -> None:
        self._devices, self._marks = devices, marks

    def __enter__(self) -> Gauges:
        self._open = contextlib.ExitStack()
        self._library = self._open.enter_context(machine.nvml()) if self._devices != 0 else None
        self._handles = machine.handles(self._library)[: self._devices] if self._library else []
        self._busy: CoreSeconds | None = None
        self._packages = PackageEnergy()
        self._usage = None if self._marks is None else UsageReader(self._marks)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def read(self) -> Snapshot:
        """One reading. Processor shares count from the previous reading, so the first has none."""
        now = _core_seconds()
        cores = _core_ratios(self._busy, now)
        self._busy = now
        memory = machine.ask(lambda: _psutil().virtual_memory())
        host = HostSample(
            at_s=time.time(),
            cpu_ratio=sum(cores) / len(cores) if cores else None,
            memory_used_bytes=memory and int(memory.total - memory.available),
            memory_total_bytes=memory and int(memory.total),
            load=machine.ask(lambda: os.getloadavg()[0]),
            cores_ratio=cores,
            # Virtual machines report 0 if they do not know it.
            frequency_hz=machine.ask(lambda: float(_psutil().cpu_freq().current) * 1e6 or None),
            temperature_c=machine.ask(_temperature_c),
            energy_j=self._packages.read_j(),
            **dict(zip(("received_bytes", "sent_bytes"), network_bytes() or (), strict=False)),
        )
        devices = (_device(self._library, index, handle) for index, handle in enumerate(self._handles))
        return Snapshot(host=host, devices=tuple(devices), usage=self._usage.read() if self._usage else None)


def network_bytes() -> tuple[int, int] | None:
    """Bytes received and sent by this host's hardware, without loopback and bridges; None if the kernel does not say.

    A container has only virtual interfaces, which then count. RDMA bypasses them and is counted by its own devices.
    """
    counts = {}
    for line in text_of(NETWORK).splitlines()[2:]:
        name, _, numbers = line.partition(":")
        words = numbers.split()
        if name.strip() != "lo" and len(words) > 8:
            counts[name.strip()] = int(words[0]), int(words[8])
    hardware = {name: pair for name, pair in counts.items() if (INTERFACES / name / "device").exists()}
    pairs = list((hardware or counts).values())
    for port in INFINIBAND.glob("*/ports/*/counters"):
        received, sent = text_of(port / "port_rcv_data"), text_of(port / "port_xmit_data")
        if received.isdecimal() and sent.isdecimal():
            pairs.append((int(received) * RDMA_WORD_BYTES, int(sent) * RDMA_WORD_BYTES))
    return (sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)) if pairs else None


def read() -> Snapshot:
    """One snapshot of this host and its visible GPUs; never raises."""
    with Gauges() as gauges:
        return gauges.read()


class Sampler:
    """Reads every `interval_s` in its own thread, from `start` to `stop`, and once at the end; a context manager.

    Keeps the newest `keep` snapshots and passes each to `sink` in that thread. Failed readings, sinks and thread starts
    are counted in `failures` and never raised.
    """

    def __init__(
        self,
        interval_s: float = 1.0,
        keep: int = 3600,
        devices: int | None = None,
        sink: Callable[[Snapshot], None] | None = None,
        marks: Sequence[str] | None = None,
    ) -> None:
        self.interval_s, self.devices, self.sink, self.marks = interval_s, devices, sink, marks
        self.failures = 0
        self._snapshots: deque[Snapshot] = deque(maxlen=keep)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """Oldest first; safe to read while sampling."""
        return tuple(self._snapshots.copy())

    def start(self) -> None:
        """Start sampling; does nothing while it runs."""
        if self._thread is not None:
            return
        self._ended.clear()
        thread = threading.Thread(target=self._run, name="paceline-telemetry", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self.failures += 1
        else:
            self._thread = thread

    def stop(self) -> tuple[Snapshot, ...]:
        """Stop after the reading in progress; returns the snapshots."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=self.interval_s + 5)
            self._thread = None
        return self.snapshots

    def __enter__(self) -> Sampler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        with Gauges(self.devices, self.marks) as gauges:
            self._read(gauges)
            while not self._ended.wait(self.interval_s):
                self._read(gauges)
            # The last moments of the run need a reading at or after them.
            self._read(gauges)

    def _read(self, gauges: Gauges) -> None:
        try:
            snapshot = gauges.read()
            self._snapshots.append(snapshot)
            if self.sink is not None:
                self.sink(snapshot)
        except Exception:
            self.failures += 1


def throttle_reasons(bits: int) -> tuple[str, ...]:
    """The names of the reasons in NVML's bit mask."""
    return tuple(name for bit, name in THROTTLE_REASONS.items() if bits & bit)


def _device(library: Any, index: int, handle: Any) -> DeviceSample:
    ask = machine.ask
    # NVML 12.2 renamed throttle reasons to event reasons; later libraries may drop the old name.
    reasons = getattr(library, "nvmlDeviceGetCurrentClocksEventReasons", None)
    reasons = reasons or library.nvmlDeviceGetCurrentClocksThrottleReasons
    return DeviceSample(
        at_s=time.time(),
        device=index,
        utilisation_ratio=ask(lambda: library.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
        memory_used_bytes=ask(lambda: int(library.nvmlDeviceGetMemoryInfo(handle).used)),
        power_w=ask(lambda: library.nvmlDeviceGetPowerUsage(handle) / 1000),
        temperature_c=ask(lambda: float(library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU))),
        sm_clock_hz=ask(lambda: library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM) * 1e6),
        throttle_reasons=ask(lambda: throttle_reasons(reasons(handle))),
        memory_total_bytes=ask(lambda: int(library.nvmlDeviceGetMemoryInfo(handle).total)),
        memory_clock_hz=ask(lambda: library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_MEM) * 1e6),
        energy_j=ask(lambda: library.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000),
    )


class PackageEnergy:
    """Joules of all processor packages since the first reading, from the kernel's RAPL counters; None if there are none
    or this user may not read them. Readings are frequent, so a counter wraps at most once between two of them."""

    def __init__(self, root: Path | None = None) -> None:
        zones = sorted((root or POWERCAP).glob("intel-rapl:*"))
        # Subzones are part of their package; psys is the whole platform, packages included.
        self._zones = [zone for zone in zones if text_of(zone / "name").startswith("package")]
        self._ranges = [_joules(zone / "max_energy_range_uj") for zone in self._zones]
        self._last: list[float] | None = None
        self._total = 0.0

    def read_j(self) -> float | None:
        counters = [_joules(zone / "energy_uj") for zone in self._zones]
        now = [joules for joules in counters if joules is not None]
        if not now or len(now) != len(counters):
            return None
        for before, after, largest in zip(self._last or now, now, self._ranges, strict=True):
            self._total += after - before + (0 if after >= before else largest or before)
        self._last = now
        return self._total


def _joules(path: Path) -> float | None:
    text = text_of(path)
    return int(text) / 1e6 if text.isdecimal() else None


def _psutil() -> Any:
    return importlib.import_module("psutil")


def _temperature_c() -> float | None:
    """The hottest processor sensor, by the kernel drivers of Intel, AMD and Arm."""
    sensors = _psutil().sensors_temperatures()
    own = [entry.current for name in ("coretemp", "k10temp", "cpu_thermal") for entry in sensors.get(name, ())]
    return max(own, default=None)


CoreSeconds = tuple[tuple[float, float], ...]


def _core_seconds() -> CoreSeconds | None:
    """Busy and total seconds of each core since boot; psutil's cpu_percent would share state with other users."""

    def seconds(times: dict[str, float]) -> tuple[float, float]:
        total = sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)
        return total - times["idle"] - times.get("iowait", 0.0), total

    return machine.ask(lambda: tuple(seconds(core._asdict()) for core in _psutil().cpu_times(percpu=True)))


def _core_ratios(before: CoreSeconds | None, now: CoreSeconds | None) -> tuple[float, ...] | None:
    """Busy share of each core; None if the set of cores changed or the kernel's 10 ms clock did not advance."""
    if before is None or now is None or len(before) != len(now):
        return None
    pairs = [(b - busy, t - total) for (busy, total), (b, t) in zip(before, now, strict=True)]
    if any(total <= 0 for _, total in pairs):
        return None
    return tuple(min(1.0, max(0.0, busy / total)) for busy, total in pairs)
