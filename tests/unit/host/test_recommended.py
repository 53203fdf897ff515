"""Recommended settings against hosts of several kinds, as trees of /sys and /proc tell them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from paceline.host import doctor, machine, recommended

if TYPE_CHECKING:
    from conftest import FakeNvml

DATA = Path(recommended.__file__).parent / "gpus.toml"


def host(
    root: Path, interfaces: dict[str, bool], ports: dict[str, str] | None = None, modules: tuple[str, ...] = ()
) -> Path:
    """interfaces: name -> whether the default route leads there; ports: device -> state."""
    for name in ("lo", *interfaces):
        (root / "sys/class/net" / name).mkdir(parents=True)
    rows = [f"{name}\t{'00000000' if leads else '0000000A'}\t0100000A" for name, leads in interfaces.items()]
    (root / "proc/net").mkdir(parents=True)
    (root / "proc/net/route").write_text("\n".join(("Iface\tDestination\tGateway", *rows, "")))
    for device, state in (ports or {}).items():
        port = root / "sys/class/infiniband" / device / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
    for module in modules:
        (root / "sys/module" / module).mkdir(parents=True)
    return root


def fits(gpu: str, root: Path) -> dict[str, recommended.Fit]:
    profile = recommended.of(gpu)
    assert profile is not None
    known = recommended.interconnect(root)
    return {setting.variable: recommended.fit(setting, known) for setting in profile.settings}


def test_every_profile_names_rows_of_the_table_and_its_source() -> None:
    for row in tomllib.loads(DATA.read_text())["profile"]:
        assert all(machine.gpu_row(name) for name in row["gpus"])
        assert row["source"]
        assert row["date"]
    wanted = ("A10", "A100-SXM4-80GB", "H100 80GB HBM3", "NVIDIA H200")
    assert [recommended.of(name).name for name in wanted] == ["A10", "A100", "H100", "H200"]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["A10G", "A30", "B200", "Z9000"])
def test_no_gpu_gets_the_profile_of_a_relative(name: str) -> None:
    assert recommended.of(name) is None


def test_an_a10_vm_is_as_its_profile_says(tmp_path: Path) -> None:
    found = fits("A10", host(tmp_path, {"eth0": True}))
    assert {name: fit.fits for name, fit in found.items()} == {"NCCL_SOCKET_IFNAME": True, "NCCL_IB_DISABLE": True}


def test_a_wrong_interface_is_reported_with_the_one_to_use(tmp_path: Path, golden: object) -> None:
    found = fits("A10", host(tmp_path, {"ens3": True, "docker0": False}))["NCCL_SOCKET_IFNAME"]
    assert found.fits is False
    assert found.text == golden
    assert "eth0" in found.text
    assert "ens3" in found.text
    assert found.fix == "set NCCL_SOCKET_IFNAME=ens3, or leave it unset"


def test_infiniband_that_is_there_is_not_to_be_switched_off(tmp_path: Path, golden: object) -> None:
    found = fits("A10", host(tmp_path, {"eth0": True}, {"mlx5_0": "4: ACTIVE"}))["NCCL_IB_DISABLE"]
    assert found.fits is False
    assert found.text == golden
    assert "mlx5_0" in found.text
    assert found.fix == golden
    assert "NCCL_IB_DISABLE" in found.fix
    assert "mlx5_0" in found.fix


@pytest.mark.parametrize("ports", [{}, {"mlx5_0": "1: DOWN"}])
def test_infiniband_that_is_recommended_and_absent_or_down(
    ports: dict[str, str], tmp_path: Path, golden: object
) -> None:
    found = fits("H100 80GB HBM3", host(tmp_path, {"eth0": True}, ports))
    assert found["NCCL_IB_DISABLE"].fits is False
    assert found["NCCL_IB_DISABLE"].text == golden
    assert found["NCCL_NET_GDR_LEVEL"].fits is False
    assert "modprobe" in str(found["NCCL_NET_GDR_LEVEL"].fix)
    assert found["NCCL_COLLNET_ENABLE"].fits is False


def test_a_bare_metal_h200_with_everything(tmp_path: Path) -> None:
    root = host(tmp_path, {"eth0": True, "ib0": False}, {"mlx5_0": "4: ACTIVE"}, ("nvidia_peermem",))
    (root / "opt/mellanox/sharp").mkdir(parents=True)
    found = fits("H200", root)
    assert {name for name, fit in found.items() if fit.fits} == {
        "NCCL_SOCKET_IFNAME",
        "NCCL_IB_DISABLE",
        "NCCL_NET_GDR_LEVEL",
        "NCCL_COLLNET_ENABLE",
    }


def test_a_variable_that_nccl_does_not_know_is_never_recommended(golden: object) -> None:
    profile = recommended.of("H100 PCIe")
    assert profile is not None
    assert "NCCL_NVLINK_ENABLE" in {setting.variable for setting in profile.settings}
    assert "NCCL_" not in str(profile), "settings are for `doctor`, which knows the host"
    assert str(profile) == golden
    assert "fp8" in str(profile)
    assert "precision float8" in str(profile)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth0", ["eth0"]),
        ("=eth", []),
        ("ib,eth1", ["eth1", "ib0"]),
        ("^docker", ["eth0", "eth1", "ib0"]),
        ("^=eth0", ["docker0", "eth1", "ib0"]),
        ("ens", []),
    ],
)
def test_interfaces_are_matched_as_nccl_does(value: str, expected: list[str]) -> None:
    assert recommended.matching(value, ["docker0", "eth0", "eth1", "ib0"]) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {}),
        ({"NCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": "eth0"}, {}),
        ({"NCCL_SOCKET_IFNAME": "ens3"}, {"NCCL_SOCKET_IFNAME": "ens3"}),
        ({"GLOO_SOCKET_IFNAME": "eth"}, {"GLOO_SOCKET_IFNAME": "eth"}),
        ({"NCCL_SOCKET_IFNAME": ""}, {}),
    ],
)
def test_variables_that_name_no_interface_are_found(environ: dict[str, str], expected: dict[str, str]) -> None:
    assert recommended.unmatched(environ, ["eth0", "lo"]) == expected


def test_doctor_calls_a_wrong_interface_bad_and_advice_never(
    tmp_path: Path, fake_nvml: FakeNvml, golden: object
) -> None:
    fake_nvml.names = ["NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"]
    root = host(tmp_path, {"ens3": True})
    interfaces, *advice = doctor._network_checks({"NCCL_SOCKET_IFNAME": "eth0"}, root)
    assert interfaces.ok is False
    assert "NCCL_SOCKET_IFNAME=eth0 matches no interface of this host (ens3, lo)" in interfaces.text
    assert interfaces.fix == "run `unset NCCL_SOCKET_IFNAME`, or use ens3"
    assert len(advice) == 5
    assert {d.name for d in advice} == {"profile"}
    assert not [d for d in advice if d.ok is False]
    assert [d.text for d in advice] == golden
