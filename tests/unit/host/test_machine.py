"""Probing is honest about what it does not know; the GPU table never answers for a relative."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from paceline.host import machine
from paceline.host.environment import recorded_environment

if TYPE_CHECKING:
    from conftest import FakeNvml

ROWS = tomllib.loads((Path(machine.__file__).parent / "gpus.toml").read_text())["gpu"]

# --- the GPU table ---


@pytest.mark.parametrize(
    ("name", "bf16", "fp8", "bandwidth"),
    # method.md section 4, in TFLOP/s and GB/s
    [
        ("NVIDIA A10", 125, None, 600),
        ("NVIDIA A10G", 70, None, 600),
        ("NVIDIA A30", 165, None, 933),
        ("NVIDIA A100-SXM4-40GB", 312, None, 1555),
        ("NVIDIA A100-SXM4-80GB", 312, None, 2039),
        ("NVIDIA A100 80GB PCIe", 312, None, 1935),
        ("NVIDIA L4", 121, 242, 300),
        ("NVIDIA L40S", 362, 733, 864),
        ("NVIDIA H100 80GB HBM3", 989, 1979, 3350),
        ("NVIDIA H100 PCIe", 756, 1513, 2000),
        ("NVIDIA H200", 989, 1979, 4800),
        ("NVIDIA B200", 2250, 4500, 8000),
        ("AMD Instinct MI300X", 1307, 2615, 5300),
    ],
)
def test_peaks_are_those_of_the_method(name: str, bf16: float, fp8: float | None, bandwidth: float) -> None:
    peaks, row = machine.gpu_peaks(name), machine.gpu_row(name)
    assert peaks is not None
    assert row is not None
    assert peaks["bf16"] == peaks["fp16"] == bf16 * 1e12
    assert peaks["fp8"] == (None if fp8 is None else fp8 * 1e12)
    assert row["memory_bytes_per_s"] == bandwidth * 1e9


@pytest.mark.parametrize(
    "name",
    [
        "",
        "H100",
        "NVIDIA A100",
        "NVIDIA A10-24Q",
        "NVIDIA H20",
        "NVIDIA H2000",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    ],
)
def test_an_unknown_gpu_has_no_peak_never_a_fallback(name: str) -> None:
    assert machine.gpu_peaks(name) is None
    assert machine.gpu_row(name) is None


def test_a_name_matches_whole_whatever_its_case_and_spaces() -> None:
    assert machine.gpu_peaks("  nvidia  h100 pcie ") == machine.gpu_peaks("H100 PCIe")


def test_volta_has_no_bf16() -> None:
    peaks = machine.gpu_peaks("Tesla V100-SXM2-32GB")
    assert peaks == {"bf16": None, "fp16": 125e12, "fp32": 15.7e12, "fp8": None}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["names"][0])
def test_every_row_has_a_source_a_date_and_plausible_numbers(row: dict[str, object]) -> None:
    assert str(row["source"]).split()[0] in ("NVIDIA", "AMD")
    assert str(row["date"]) >= "2026-11-15"
    peaks = {key: value for key, value in row.items() if key in machine.PEAK_DTYPES}
    assert all(isinstance(value, float) and 1e12 < value < 1e16 for value in peaks.values())
    assert "fp16" in peaks
    assert peaks.get("bf16", peaks["fp16"]) == peaks["fp16"]


def test_no_name_is_in_two_rows() -> None:
    names = [name.casefold() for row in ROWS for name in row["names"]]
    assert len(names) == len(set(names))


# --- probing ---


def test_this_machine_is_probed_without_torch_and_is_json() -> None:
    code = (
        "import json, sys; from paceline.host import machine; m = machine.to_dict(machine.probe());"
        "machine.device_kind(); assert 'torch' not in sys.modules; print(json.dumps(m))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    seen = json.loads(printed)
    assert seen["cores"] == len(os.sched_getaffinity(0))
    assert seen["memory_bytes"] > 2**30
    assert seen["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert seen["versions"]["torch"].startswith("2.")


def test_revision_is_the_commit_of_the_checkout() -> None:
    here = Path(machine.__file__).parent
    head = subprocess.run(["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode:
        pytest.skip("Paceline is not in a git checkout here")
    assert (machine.probe().revision or "").removesuffix("-dirty") == head.stdout.strip()


def test_the_fake_offers_nvml_only(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pynvml")
    pynvml = pytest.importorskip("pynvml")
    spoken = [name for name in dir(type(fake_nvml)) if name.startswith(("nvml", "NVML"))]
    assert len(spoken) > 20
    assert [name for name in spoken if not hasattr(pynvml, name)] == []


def test_gpus_are_read_from_nvml(fake_nvml: FakeNvml) -> None:
    seen = machine.probe()
    assert (seen.driver, seen.cuda, seen.links, len(seen.gpus)) == ("580.65.06", "13.2", "nvlink", 2)
    assert seen.gpus[1] == machine.Gpu(
        index=1,
        name="NVIDIA H200",
        memory_bytes=150_754_820_096,
        sm_clock_max_hz=1.98e9,
        power_limit_w=700.0,
        ecc=None,
        mig=False,
        capability="9.0",
        pcie_generation=5,
        pcie_width=16,
        nvlink_links=12,
        peak_flops={"bf16": 989e12, "fp16": 989e12, "fp32": 67e12, "fp8": 1979e12},
        memory_bytes_per_s=4.8e12,
    )
    assert fake_nvml.opened == 0


def test_a_gpu_cut_by_mig_has_no_peak(fake_nvml: FakeNvml) -> None:
    fake_nvml.mig = 1
    assert [gpu.peak_flops for gpu in machine.probe().gpus] == [None, None]


def test_an_unknown_gpu_is_probed_without_peak(fake_nvml: FakeNvml) -> None:
    fake_nvml.names = ["NVIDIA Z9000"]
    seen = machine.probe()
    assert (seen.gpus[0].name, seen.gpus[0].peak_flops, seen.links) == ("NVIDIA Z9000", None, None)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_driver_everything_about_gpus_is_absent() -> None:
    seen = machine.probe()
    assert (seen.gpus, seen.links, seen.driver, seen.cuda) == ((), None, None, None)
    assert (machine.device_kind(), machine.device_count(), machine.neighbours(0)) == ("cpu", 0, None)


def test_nvidia_smi_counts_where_nvml_cannot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listing = "GPU 0: NVIDIA L4 (UUID: GPU-aa-1)\\nGPU 1: NVIDIA L4 (UUID: GPU-bb-2)"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{listing}\\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine.device_count() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bb")
    assert machine.device_count() == 1


# --- visible devices ---


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, ["GPU-a1", "GPU-b2", "GPU-b3"]),
        ("", []),
        ("-1", []),
        ("2,0", ["GPU-b3", "GPU-a1"]),
        ("0,7,1", ["GPU-a1"]),
        ("1,1", ["GPU-b2"]),
        ("GPU-b3, GPU-a", ["GPU-b3", "GPU-a1"]),
        ("GPU-b", []),
        ("MIG-55", ["MIG-55"]),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_does(setting: str | None, expected: list[str]) -> None:
    environ = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
    assert machine.visible(["GPU-a1", "GPU-b2", "GPU-b3"], environ) == expected


def test_planning_sees_only_the_visible_gpus(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml.names = ["NVIDIA L4", "NVIDIA H200"]
    monkeypatch.setattr(machine, "version", lambda package: "2.11.0+cu130")
    assert (machine.device_kind(), machine.device_count()) == ("cuda", 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert (machine.device_count(), machine.probe().gpus[0].name) == (1, "NVIDIA H200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.device_kind() == "cpu"


def test_a_cpu_build_of_torch_means_cpu(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "version", lambda package: "2.13.0+cpu")
    assert (machine.device_count(), machine.device_kind()) == (2, "cpu")


# --- what spoils a measurement ---


@pytest.mark.parametrize(
    ("name", "value", "on"),
    [
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", True),
        ("TORCH_DISTRIBUTED_DEBUG", "INFO", True),
        ("TORCH_DISTRIBUTED_DEBUG", "OFF", False),
        ("NCCL_DEBUG", "INFO", True),
        ("NCCL_DEBUG", "trace", True),
        ("NCCL_DEBUG", "WARN", False),
        ("NCCL_DEBUG", "VERSION", False),
        ("CUDA_LAUNCH_BLOCKING", "1", True),
        ("CUDA_LAUNCH_BLOCKING", "0", False),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", True),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", True),
        ("TORCHDYNAMO_DISABLE", "1", True),
        ("PYTHONMALLOC", "debug", True),
        ("PYTHONMALLOC", "malloc", False),
        ("NCCL_SOCKET_IFNAME", "eth0", False),
        ("MY_CUDA_LAUNCH_BLOCKING", "1", False),
    ],
)
def test_debug_switches_that_change_speed_are_seen(name: str, value: str, on: bool) -> None:
    assert machine.debug_switches({name: value, "HOME": "/root"}) == ({name: value} if on else {})


def test_deterministic_modes_of_torch_are_seen() -> None:
    import torch

    assert machine.debug_switches({}) == {}
    try:
        torch.use_deterministic_algorithms(True)
        torch.autograd.set_detect_anomaly(True)
        switches = set(machine.debug_switches({}))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)
    assert switches == {"torch.use_deterministic_algorithms", "torch.autograd.set_detect_anomaly"}


def test_only_allowed_variables_are_recorded_and_never_a_secret() -> None:
    environ = {
        "NCCL_ALGO": "Ring",
        "OMP_NUM_THREADS": "2",
        "CUDA_VISIBLE_DEVICES": "0",
        "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
        "HF_TOKEN": "hf_abcdefghijklmnop",
        "AWS_SECRET_ACCESS_KEY": "x",
        "TORCH_HUB_TOKEN": "x",
        "NCCL_API_KEY": "x",
        "NCCL_NOTE": "hf_abcdefghijklmnop",
        "TORCH_PROXY": "http://user:pass@proxy",
        "HOME": "/root",
        "MY_NCCL_ALGO": "Tree",
    }
    kept = ["CUDA_VISIBLE_DEVICES", "NCCL_ALGO", "OMP_NUM_THREADS", "TORCHINDUCTOR_MAX_AUTOTUNE"]
    assert recorded_environment(environ) == {name: environ[name] for name in kept}


LEGITIMATE = {
    "NCCL_SOCKET_IFNAME": "eth0,eth1,eth2,eth3,enp97s0f0np0,enp97s0f1np1",
    "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1,mlx5_10:1",
    "LD_PRELOAD": "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2:/opt/A-Long_Folder/of/Version-12/lib/libnccl-net.so",
    "TORCH_EXTENSIONS_DIR": "/home/someone/.cache/torch_extensions/Py312_cu128/with_a_long_name_of_2026",
    "CUDA_VISIBLE_DEVICES": "GPU-5ac2d6a1-3b1d-8b4c-2c8a-6b3e2e9a5b4c,MIG-5ac2d6a1-3b1d-8b4c-2c8a-6b3e2e9a5b4c",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,garbage_collection_threshold:0.8,max_split_size_mb:512",
    "TORCH_SHORT": "1",
}


def test_what_really_changes_speed_is_kept() -> None:
    assert recorded_environment(LEGITIMATE) == dict(sorted(LEGITIMATE.items()))


@pytest.mark.parametrize(
    "value",
    [
        "9f86d081884c7d659a2feaa0c55ad015",
        "x=9f86d081884c7d659a2feaa0c55ad015a3bf4f1b",
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        "/var/run/9f86d081884c7d659a2feaa0c55ad015",
    ],
)
def test_a_value_that_looks_drawn_at_random_is_not_recorded(value: str) -> None:
    assert recorded_environment({"NCCL_NOTE": value}) == {}


def test_the_value_of_a_secret_is_not_recorded_under_another_name() -> None:
    environ = {"MY_PASSWORD": "correct horse", "NCCL_NOTE": "is correct horse.", "DB_KEY": "1", "OMP_NUM_THREADS": "1"}
    assert recorded_environment(environ) == {"OMP_NUM_THREADS": "1"}


def test_neighbours_are_the_others(fake_nvml: FakeNvml) -> None:
    assert machine.neighbours(0) == 0
    fake_nvml.pids = [os.getpid(), 11, 12]
    assert machine.neighbours(0) == 2
    assert machine.neighbours(0, ours={11}) == 1
    assert machine.neighbours(7) is None


def test_pids_of_another_namespace_are_counted_not_compared(
    fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_uses_gpu", lambda: True)
    for pids, expected in (([900_001], 0), ([900_001, 900_002], 1), ([], None)):
        fake_nvml.pids = pids
        assert machine.neighbours(0) == expected


# --- fingerprints ---


def test_a_fingerprint_differs_exactly_where_the_machines_do() -> None:
    a = {"host": "a", "gpus": [{"name": "H200", "ecc": True}], "versions": {"torch": "2.11"}, "driver": None}
    b = {
        "host": "a",
        "gpus": ({"name": "H100", "ecc": True},),
        "versions": {"torch": "2.11", "numpy": "2"},
        "driver": "1",
    }
    assert machine.fingerprint_diff(a, b) == {
        "gpus.0.name": ("H200", "H100"),
        "driver": (None, "1"),
        "versions.numpy": (None, "2"),
    }
    assert machine.fingerprint_diff(a, json.loads(json.dumps(a))) == {}


# --- programs of the host that misbehave ---


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Write an nvidia-smi that comes first on the path."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(machine, "_silent", set())

    def write(script: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    return write


def test_what_a_driver_prints_cannot_move_the_cursor_or_end_a_probe(smi: Callable[[str], None]) -> None:
    smi(r"printf 'UUID: GPU-1a\377\033]0;owned\007 \033[4mGPU0\033[0m\n'")
    assert machine._output("nvidia-smi") == "UUID: GPU-1a\ufffd\ufffd]0;owned\ufffd \x1b[4mGPU0\x1b[0m"
    assert machine.host_uuids(None) == ["GPU-1a"]


def test_a_program_whose_child_keeps_the_output_open_is_not_waited_for(smi: Callable[[str], None]) -> None:
    smi("sleep 60 & echo UUID: GPU-1")
    assert machine.host_uuids(None) == ["GPU-1"]


def test_a_program_that_prints_without_end_is_ended_and_not_asked_again(
    smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "MOST_PRINTED_BYTES", 1 << 16)
    smi("yes")
    assert machine.host_uuids(None) == []
    smi("echo UUID: GPU-1")
    assert machine.host_uuids(None) == [], "one that hangs would take its time at every question"


def test_a_program_that_hangs_is_ended_with_its_children(
    smi: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "ANSWER_S", 0.5)
    smi(f"sleep 60 & echo $! > {tmp_path}/pid; wait")
    assert machine._output("nvidia-smi") is None
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(child)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_visible_device_of_thousands_of_digits_is_none() -> None:
    assert machine.visible(["GPU-1"], {"CUDA_VISIBLE_DEVICES": "9" * 5000}) == []
