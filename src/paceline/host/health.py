"""The condition of one GPU and of its host, beyond what `machine` knows: what an operator looks at first.

Facts have flat names and plain values. A name whose answer nobody gives is None; nothing here raises.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.errors import Scalar
from paceline.host.gauges import throttle_reasons
from paceline.host.machine import ask, handles, nvml

_CPU = Path("/sys/devices/system/cpu/cpu0")


def read(gpu_index: int | None) -> dict[str, Scalar]:
    """Host facts, and those of one visible GPU (CUDA's index) where an index is given."""
    found: dict[str, Scalar] = {f"host.{name}": value for name, value in _host()}
    if gpu_index is None:
        return found
    with nvml() as library:
        visible = handles(library) if library else []
        if library is None or gpu_index >= len(visible):
            return found
        return found | {f"gpu.{name}": ask(call) for name, call in _gpu(library, visible[gpu_index])}


# --- host ---


def _host() -> Iterator[tuple[str, Scalar]]:
    yield "kernel", platform.release()
    yield "microcode", _microcode()
    yield "governor", _text(_CPU / "cpufreq" / "scaling_governor")
    yield "frequency_max_hz", _frequency_max_hz()


def _microcode() -> str | None:
    found = re.search(r"^microcode\s*:\s*(\S+)", _text(Path("/proc/cpuinfo")) or "", re.MULTILINE)
    return found.group(1) if found else _text(_CPU / "microcode" / "version")


def _frequency_max_hz() -> float | None:
    """The highest the kernel may choose: a lowered one is as good as a slower processor."""
    khz = _text(_CPU / "cpufreq" / "scaling_max_freq") or ""
    return float(khz) * 1e3 if khz.isdecimal() else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:
        return None


# --- GPU ---

Facts = Iterator[tuple[str, Callable[[], Any]]]


def _gpu(n: Any, handle: Any) -> Facts:
    """Name and question, so that each question may fail by itself."""
    yield "vbios", lambda: n.nvmlDeviceGetVbiosVersion(handle)
    yield "throttle_reasons", lambda: ", ".join(throttle_reasons(n.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))
    yield "temperature_c", lambda: float(n.nvmlDeviceGetTemperature(handle, n.NVML_TEMPERATURE_GPU))
    yield "power_limit_w", lambda: n.nvmlDeviceGetPowerManagementLimit(handle) / 1000
    yield "power_limit_default_w", lambda: n.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1000
    yield from _clocks(n, handle)
    yield from _memory_errors(n, handle)
    yield from _links(n, handle)


def _clocks(n: Any, handle: Any) -> Facts:
    yield "sm_clock_hz", lambda: n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_SM) * 1e6
    yield "sm_clock_max_hz", lambda: n.nvmlDeviceGetMaxClockInfo(handle, n.NVML_CLOCK_SM) * 1e6
    yield "sm_clock_application_hz", lambda: n.nvmlDeviceGetApplicationsClock(handle, n.NVML_CLOCK_SM) * 1e6
    yield "memory_clock_hz", lambda: n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_MEM) * 1e6
    yield "memory_clock_max_hz", lambda: n.nvmlDeviceGetMaxClockInfo(handle, n.NVML_CLOCK_MEM) * 1e6


def _memory_errors(n: Any, handle: Any) -> Facts:
    """Volatile counts since the driver was loaded, aggregate ones over the GPU's life."""
    for span in ("volatile", "aggregate"):
        for kind in ("corrected", "uncorrected"):
            yield f"ecc_{span}_{kind}", _ecc(n, handle, span, kind)
    yield "rows_remapped_correctable", lambda: int(n.nvmlDeviceGetRemappedRows(handle)[0])
    yield "rows_remapped_uncorrectable", lambda: int(n.nvmlDeviceGetRemappedRows(handle)[1])
    yield "remap_pending", lambda: bool(n.nvmlDeviceGetRemappedRows(handle)[2])
    yield "remap_failed", lambda: bool(n.nvmlDeviceGetRemappedRows(handle)[3])
    yield "pages_retired", lambda: _pages_retired(n, handle)
    yield "pages_retirement_pending", lambda: n.nvmlDeviceGetRetiredPagesPendingStatus(handle) == 1


def _ecc(n: Any, handle: Any, span: str, kind: str) -> Callable[[], int]:
    def count() -> int:
        error = getattr(n, f"NVML_MEMORY_ERROR_TYPE_{kind.upper()}")
        return int(n.nvmlDeviceGetTotalEccErrors(handle, error, getattr(n, f"NVML_{span.upper()}_ECC")))

    return count


def _pages_retired(n: Any, handle: Any) -> int:
    """Older GPUs retire pages where newer ones remap rows."""
    causes = (
        n.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
        n.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
    )
    return sum(len(n.nvmlDeviceGetRetiredPages(handle, cause)) for cause in causes)


def _links(n: Any, handle: Any) -> Facts:
    """An idle GPU lowers its PCIe generation to save power, so only a reading under load tells something of that."""
    yield "pcie_generation", lambda: n.nvmlDeviceGetCurrPcieLinkGeneration(handle)
    yield "pcie_generation_max", lambda: n.nvmlDeviceGetMaxPcieLinkGeneration(handle)
    yield "pcie_width", lambda: n.nvmlDeviceGetCurrPcieLinkWidth(handle)
    yield "pcie_width_max", lambda: n.nvmlDeviceGetMaxPcieLinkWidth(handle)
    yield "pcie_replays", lambda: n.nvmlDeviceGetPcieReplayCounter(handle)
    yield "nvlinks_up", lambda: _nvlinks(n, handle, 1)
    yield "nvlinks_down", lambda: _nvlinks(n, handle, 0)


def _nvlinks(n: Any, handle: Any, state: int) -> str | None:
    """Numbers of the links in that state; None where the GPU has no link."""
    states = {link: ask(n.nvmlDeviceGetNvLinkState, handle, link) for link in range(n.NVML_NVLINK_MAX_LINKS)}
    known = {link: found for link, found in states.items() if found is not None}
    return " ".join(str(link) for link, found in known.items() if found == state) if known else None
