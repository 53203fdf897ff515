"""What the driver of a real GPU tells: gauges while it works, the endpoint, and a repeated run of a stored cell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.host import gauges as telemetry


@pytest.fixture(scope="module")
def busy() -> telemetry.DeviceSample:
    """A reading under a second of matrix products."""
    import torch

    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    with telemetry.Gauges() as gauges:
        gauges.read()
        for _ in range(600):
            a @ a
        found = gauges.read().devices[0]
        torch.cuda.synchronize()
    return found


def test_every_gauge_of_a_data_centre_gpu_has_a_value(busy: telemetry.DeviceSample) -> None:
    missing = [name for name in busy.__slots__ if getattr(busy, name) is None]
    assert not missing
    assert busy.memory_total_bytes is not None
    assert busy.memory_used_bytes is not None
    assert 0 < busy.memory_used_bytes < busy.memory_total_bytes


def test_work_is_seen(busy: telemetry.DeviceSample) -> None:
    idle = telemetry.read().devices[0]
    assert busy.power_w is not None
    assert busy.energy_j is not None
    assert idle.energy_j is not None
    assert idle.energy_j > busy.energy_j, "the counter only grows"
    assert busy.power_w > 100


def test_monitor_records_and_sums_up(tmp_path: Path) -> None:
    file = tmp_path / "readings.jsonl"
    command = [sys.executable, "-m", "paceline.cli", "monitor", "--interval", "0.2", "--count", "3"]
    done = subprocess.run([*command, "--record", str(file)], capture_output=True, text=True, check=True)
    readings = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(readings) == 3
    assert all(reading["devices"][0]["power_w"] > 0 for reading in readings)
    assert "power" in done.stdout
