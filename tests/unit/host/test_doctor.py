"""Doctor's answers on machines that are well and on machines that are not."""

from __future__ import annotations

import socket
from collections import namedtuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from paceline.host import doctor, machine, trust, usage

if TYPE_CHECKING:
    from conftest import FakeNvml


def diagnoses(tmp_path: Path, environ: dict[str, str]) -> dict[str, doctor.Diagnosis]:
    return {d.name: d for d in doctor.checks(tmp_path / "results", environ)}


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> list[trust.Check]:
    """The trust light that doctor sees: green, unless a test changes it. This machine may be busy with other tests."""
    checks = [trust.Check(trust.OTHERS, trust.GREEN, "other processes used 0.0 of 2 cores")]
    monkeypatch.setattr(trust, "before", lambda uses_gpu: trust.Trust(tuple(checks)))
    return checks


@pytest.mark.usefixtures("no_gpu")
def test_a_busy_machine_is_named_with_its_neighbours(tmp_path: Path, light: list[trust.Check]) -> None:
    light[:] = trust.usage_checks(
        usage.HostUsage(at_s=0.0, cores=2, total_s=0.0, busy_s=0.0, own_s=0.0, steal_s=0.0, governor="powersave"),
        usage.HostUsage(at_s=1.0, cores=2, total_s=2.0, busy_s=0.92, own_s=0.0, steal_s=0.0, governor="powersave"),
    )
    found = diagnoses(tmp_path, {})
    assert found["other processes"] == doctor.Diagnosis(
        "other processes", False, "other processes used 0.9 of 2 cores", "stop them, or expect wide intervals"
    )
    assert (found["steal"].ok, found["steal"].fix) == (True, None)
    assert (found["governor"].ok, found["governor"].fix) == (None, "run `cpupower frequency-set -g performance`")


@pytest.mark.usefixtures("no_gpu")
def test_a_plain_cpu_machine_is_fit(tmp_path: Path) -> None:
    found = diagnoses(tmp_path, {"OMP_NUM_THREADS": "1"})
    assert {name for name, d in found.items() if d.ok is False} <= {"shared memory"}
    assert (found["python"].ok, found["torch"].ok, found["loopback"].ok, found["threads"].ok) == (True,) * 4
    assert found["gpu"].ok is None
    assert not (tmp_path / "results").exists()


def test_every_trouble_names_its_fix(
    tmp_path: Path, fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, golden: object
) -> None:
    fake_nvml.pids = [4242]
    monkeypatch.setattr(machine, "version", lambda package: None)
    found = diagnoses(tmp_path, {"NCCL_DEBUG": "INFO", "CUDA_LAUNCH_BLOCKING": "1"})
    troubled = [d for d in found.values() if d.ok is False]
    assert {"torch", "neighbours", "debug switches"} <= {d.name for d in troubled}
    assert all(d.fix for d in troubled)
    assert found["debug switches"].fix == "run `unset CUDA_LAUNCH_BLOCKING NCCL_DEBUG`"
    assert found["deepspeed"].fix == "run `pip install 'paceline[zero]'`"
    assert found["neighbours"].text == golden


def test_a_gpu_machine_is_described(
    tmp_path: Path, fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, golden: object
) -> None:
    monkeypatch.setattr(machine, "version", lambda package: "2.12.0+cu130")
    found = diagnoses(tmp_path, {"CUDA_VISIBLE_DEVICES": "1"})
    assert found["gpu"].ok is True
    assert found["gpu"].text == golden
    assert found["driver"].text == golden
    assert "580.65.06" in found["driver"].text
    assert "CUDA" in found["driver"].text
    assert "13.2" in found["driver"].text
    assert found["nvml"].ok is True
    assert found["neighbours"].ok is True


def test_a_gpu_out_of_the_table_points_to_the_measured_peak(
    tmp_path: Path, fake_nvml: FakeNvml, golden: object
) -> None:
    fake_nvml.names = ["NVIDIA Z9000"]
    driver = diagnoses(tmp_path, {})["driver"]
    assert driver.ok is None
    assert driver.text == golden
    assert "NVIDIA" in driver.text
    assert "Z9000" in driver.text


def test_hidden_and_unusable_gpus_are_reported_differently(
    tmp_path: Path, fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = diagnoses(tmp_path, {"CUDA_VISIBLE_DEVICES": ""})["gpu"]
    assert (hidden.ok, hidden.fix) == (None, "run `unset CUDA_VISIBLE_DEVICES`")
    monkeypatch.setattr(machine, "version", lambda package: "2.13.0+cpu")
    assert diagnoses(tmp_path, {})["gpu"].ok is False


@pytest.mark.parametrize(
    ("version", "ok"),
    [(None, False), ("2.10.1", False), ("2.11.0+cu130", True), ("2.13.0+cpu", True), ("2.14.0", None), ("3.0.0", None)],
)
def test_torch_versions(
    version: str | None, ok: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_gpu: None
) -> None:
    monkeypatch.setattr(machine, "version", lambda package: version)
    assert diagnoses(tmp_path, {})["torch"].ok is ok


@pytest.mark.usefixtures("no_gpu")
def test_a_machine_without_loopback_compiler_or_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no such device")

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(socket.socket, "bind", refuse)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage(64 * 2**20, 0, 2**20))
    found = diagnoses(tmp_path, {})
    assert [found[name].ok for name in ("loopback", "shared memory", "disk", "c++ compiler")] == [False] * 3 + [None]
    assert "--shm-size" in (found["shared memory"].fix or "")


@pytest.mark.usefixtures("no_gpu")
def test_a_results_path_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("not a folder")
    assert diagnoses(tmp_path, {})["results"].ok is False


def test_a_results_folder_that_is_not_there_yet_is_said_to_be_created(tmp_path: Path, golden: object) -> None:
    absent = tmp_path / "results"
    found = diagnoses(tmp_path, {})["results"]
    assert found.ok is True
    assert found.text == golden
    assert f"{absent}" in found.text
    assert f"{tmp_path}" in found.text
    absent.mkdir()
    text = diagnoses(tmp_path, {})["results"].text
    assert text == golden
    assert f"{absent}" in text
    file = tmp_path / "file"
    file.touch()
    found = diagnoses(file, {})["results"]
    assert found.ok is False
    assert found.text == golden
    assert f"{file / 'results'}" in found.text
    assert f"{file}" in found.text
