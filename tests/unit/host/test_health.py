"""The condition of a GPU and its host: every question may fail by itself, and what is not told is None."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.host import health

NVML = {
    "nvmlInit": lambda: None,
    "nvmlShutdown": lambda: None,
    "nvmlDeviceGetCount": lambda: 1,
    "nvmlDeviceGetHandleByIndex": lambda i: i,
    "nvmlDeviceGetUUID": lambda h: "GPU-a",
    "nvmlDeviceGetHandleByUUID": lambda u: 0,
    "nvmlDeviceGetVbiosVersion": lambda h: "96.00.A5.00.01",
    "nvmlDeviceGetCurrentClocksThrottleReasons": lambda h: 0x40 | 0x4,
    "nvmlDeviceGetTemperature": lambda h, kind: 88,
    "NVML_TEMPERATURE_GPU": 0,
    "nvmlDeviceGetPowerManagementLimit": lambda h: 500_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": lambda h: 700_000,
    "nvmlDeviceGetClockInfo": lambda h, kind: 1200 if kind == 1 else 2619,
    "nvmlDeviceGetMaxClockInfo": lambda h, kind: 1980,
    "NVML_CLOCK_SM": 1,
    "NVML_CLOCK_MEM": 2,
    "nvmlDeviceGetTotalEccErrors": lambda h, error, span: 10 * error + span,
    "NVML_MEMORY_ERROR_TYPE_CORRECTED": 0,
    "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
    "NVML_VOLATILE_ECC": 0,
    "NVML_AGGREGATE_ECC": 1,
    "nvmlDeviceGetRemappedRows": lambda h: (2, 1, 1, 0),
    "nvmlDeviceGetCurrPcieLinkGeneration": lambda h: 5,
    "nvmlDeviceGetMaxPcieLinkGeneration": lambda h: 5,
    "nvmlDeviceGetCurrPcieLinkWidth": lambda h: 8,
    "nvmlDeviceGetMaxPcieLinkWidth": lambda h: 16,
    "nvmlDeviceGetPcieReplayCounter": lambda h: 0,
    "NVML_NVLINK_MAX_LINKS": 4,
    "nvmlDeviceGetNvLinkState": lambda h, link: {0: 1, 1: 1, 2: 0}[link],
}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(**NVML))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return dict(health.read(0))


def test_the_fake_offers_nvml_only() -> None:
    pynvml = pytest.importorskip("pynvml")
    assert [name for name in NVML if not hasattr(pynvml, name)] == []


@pytest.mark.parametrize(
    ("fact", "value"),
    {
        "vbios": "96.00.A5.00.01",
        "throttle_reasons": "software power cap, hardware thermal slowdown",
        "temperature_c": 88.0,
        "power_limit_w": 500.0,
        "power_limit_default_w": 700.0,
        "sm_clock_hz": 1.2e9,
        "sm_clock_max_hz": 1.98e9,
        "ecc_volatile_corrected": 0,
        "ecc_volatile_uncorrected": 10,
        "ecc_aggregate_corrected": 1,
        "ecc_aggregate_uncorrected": 11,
        "rows_remapped_correctable": 2,
        "rows_remapped_uncorrectable": 1,
        "remap_pending": True,
        "remap_failed": False,
        "pcie_width": 8,
        "pcie_width_max": 16,
        "nvlinks_up": "0 1",
        "nvlinks_down": "2",
    }.items(),
)
def test_each_fact_of_a_gpu(told: dict[str, Any], fact: str, value: Any) -> None:
    assert told[f"gpu.{fact}"] == value


@pytest.mark.parametrize("fact", ["sm_clock_application_hz", "pages_retired", "pages_retirement_pending"])
def test_what_the_driver_does_not_tell_is_none(told: dict[str, Any], fact: str) -> None:
    assert told[f"gpu.{fact}"] is None


def test_a_host_without_a_gpu_is_checked_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = health.read(0)
    assert (
        set(found)
        == set(health.read(None))
        == {
            "host.kernel",
            "host.microcode",
            "host.governor",
            "host.frequency_max_hz",
        }
    )
    assert found["host.kernel"]
