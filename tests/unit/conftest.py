"""A driver of known answers: NVML as two GPUs would give it, so that probing is tested without one."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest


class NVMLError(Exception):
    pass


class FakeNvml:
    """Answers by the names of pynvml; test_machine checks that each of them exists there."""

    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_TEMPERATURE_GPU = 0
    NVML_NVLINK_MAX_LINKS = 18

    def __init__(self, names: list[str], pids: list[int] | None = None) -> None:
        self.names, self.pids, self.mig, self.opened = names, pids or [], 0, 0

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}{handle}-uuid"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return int(uuid[4])

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13020

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.names[handle]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=150_754_820_096, used=1_000_000)

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:
        return 1980

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return {self.NVML_CLOCK_SM: 1755, self.NVML_CLOCK_MEM: 3201}[kind]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        return 5_000_250

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        return 700_000

    def nvmlDeviceGetEccMode(self, handle: int) -> list[int]:
        raise NVMLError("Not Supported")

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        return [self.mig, self.mig]

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return (9, 0)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return 5

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return 16

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= 12:
            raise NVMLError("Invalid Argument")
        return 1

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=pid) for pid in self.pids]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=87, memory=40)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 512_500

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 61

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return 0x0001 | 0x0004 | 0x0040


@pytest.fixture
def fake_nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Two H200s; no GPU is hidden."""
    library = FakeNvml(["NVIDIA H200", "NVIDIA H200"])
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return library


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither NVML nor nvidia-smi, whatever the machine has."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
