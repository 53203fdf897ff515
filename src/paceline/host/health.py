"""Health facts of one GPU and its host: firmware, clocks, ECC errors, remapped rows, links.

Facts have flat names and plain values, None if unknown. Nothing here raises.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import Scalar
from paceline.host.files import text_of
from paceline.host.gauges import throttle_reasons
from paceline.host.machine import ask, handles, nvlink_states, nvml

_CPU = Path("/sys/devices/system/cpu/cpu0")


def read(gpu_index: int | None) -> dict[str, Scalar]:
    """Facts of the host, and of one visible GPU if an index (CUDA's) is given."""
    microcode = re.search(r"^microcode\s*:\s*(\S+)", text_of(Path("/proc/cpuinfo")), re.MULTILINE)
    khz = text_of(_CPU / "cpufreq" / "scaling_max_freq")
    facts: dict[str, Scalar] = {
        "host.kernel": platform.release(),
        "host.microcode": microcode.group(1) if microcode else text_of(_CPU / "microcode" / "version") or None,
        "host.governor": text_of(_CPU / "cpufreq" / "scaling_governor") or None,
        "host.frequency_max_hz": float(khz) * 1e3 if khz.isdecimal() else None,
    }
    if gpu_index is None:
        return facts
    with nvml() as library:
        visible = handles(library) if library else []
        if library is None or gpu_index >= len(visible):
            return facts
        return facts | {f"gpu.{name}": ask(call) for name, call in _gpu(library, visible[gpu_index])}


Facts = Iterator[tuple[str, Callable[[], Any]]]


def _gpu(n: Any, handle: Any) -> Facts:
    """Names and calls, so that each call may fail on its own."""
    yield "vbios", lambda: n.nvmlDeviceGetVbiosVersion(handle)
    yield "throttle_reasons", lambda: ", ".join(throttle_reasons(n.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))
    yield "temperature_c", lambda: float(n.nvmlDeviceGetTemperature(handle, n.NVML_TEMPERATURE_GPU))
    yield "power_limit_w", lambda: n.nvmlDeviceGetPowerManagementLimit(handle) / 1000
    yield "power_limit_default_w", lambda: n.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1000
    yield "sm_clock_hz", lambda: n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_SM) * 1e6
    yield "sm_clock_max_hz", lambda: n.nvmlDeviceGetMaxClockInfo(handle, n.NVML_CLOCK_SM) * 1e6
    yield "sm_clock_application_hz", lambda: n.nvmlDeviceGetApplicationsClock(handle, n.NVML_CLOCK_SM) * 1e6
    yield "memory_clock_hz", lambda: n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_MEM) * 1e6
    yield "memory_clock_max_hz", lambda: n.nvmlDeviceGetMaxClockInfo(handle, n.NVML_CLOCK_MEM) * 1e6
    # Volatile errors count from when the driver was loaded, aggregate ones over the GPU's life.
    for span in ("volatile", "aggregate"):
        for kind in ("corrected", "uncorrected"):
            names = (f"NVML_MEMORY_ERROR_TYPE_{kind.upper()}", f"NVML_{span.upper()}_ECC")
            yield f"ecc_{span}_{kind}", partial(_ecc_errors, n, handle, *names)
    yield "rows_remapped_correctable", lambda: int(n.nvmlDeviceGetRemappedRows(handle)[0])
    yield "rows_remapped_uncorrectable", lambda: int(n.nvmlDeviceGetRemappedRows(handle)[1])
    yield "remap_pending", lambda: bool(n.nvmlDeviceGetRemappedRows(handle)[2])
    yield "remap_failed", lambda: bool(n.nvmlDeviceGetRemappedRows(handle)[3])
    yield "pages_retired", lambda: _pages_retired(n, handle)
    yield "pages_retirement_pending", lambda: n.nvmlDeviceGetRetiredPagesPendingStatus(handle) == 1
    # An idle GPU lowers its PCIe generation to save power: only a reading under load is meaningful.
    yield "pcie_generation", lambda: n.nvmlDeviceGetCurrPcieLinkGeneration(handle)
    yield "pcie_generation_max", lambda: n.nvmlDeviceGetMaxPcieLinkGeneration(handle)
    yield "pcie_width", lambda: n.nvmlDeviceGetCurrPcieLinkWidth(handle)
    yield "pcie_width_max", lambda: n.nvmlDeviceGetMaxPcieLinkWidth(handle)
    yield "pcie_replays", lambda: n.nvmlDeviceGetPcieReplayCounter(handle)
    yield "nvlinks_up", lambda: _nvlinks(n, handle, 1)
    yield "nvlinks_down", lambda: _nvlinks(n, handle, 0)


def _ecc_errors(n: Any, handle: Any, error: str, counter: str) -> int:
    return int(n.nvmlDeviceGetTotalEccErrors(handle, getattr(n, error), getattr(n, counter)))


def _pages_retired(n: Any, handle: Any) -> int:
    """Retired pages, which older GPUs have; newer ones remap rows."""
    causes = (
        n.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
        n.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
    )
    return sum(len(n.nvmlDeviceGetRetiredPages(handle, cause)) for cause in causes)


def _nvlinks(n: Any, handle: Any, state: int) -> str | None:
    """Numbers of the links in that state; None if the GPU has no NVLink."""
    states = nvlink_states(n, handle)
    return " ".join(str(link) for link, value in states.items() if value == state) if states else None
