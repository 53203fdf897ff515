"""Topology from `nvidia-smi topo -m` and /sys in the formats of real hosts, and the rates of their links."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.host import links, machine
from paceline.host.topology import Nic, parse_matrix, read_topology
from paceline.results.validity import machine_rule

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def dgx_h100() -> str:
    """Eight H100 behind NVSwitch with eight NICs, as driver 550 prints it: underlined header, tabs, NIC legend."""
    names = [f"GPU{i}" for i in range(8)] + [f"NIC{i}" for i in range(8)]
    lines = ["\x1b[4m\t" + "\t".join((*names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID")) + "\x1b[0m"]
    for i in range(8):
        gpus = [" X " if i == j else "NV18" for j in range(8)]
        nics = ["PXB" if i == j else "NODE" if i // 4 == j // 4 else "SYS" for j in range(8)]
        lines.append(
            "\t".join((f"GPU{i}", *gpus, *nics, ("0-55,112-167", "56-111,168-223")[i // 4], str(i // 4), "", "N/A"))
        )
    for i in range(8):
        gpus = ["PXB" if i == j else "NODE" if i // 4 == j // 4 else "SYS" for j in range(8)]
        nics = [" X " if i == j else "NODE" if i // 4 == j // 4 else "SYS" for j in range(8)]
        lines.append("\t".join((f"NIC{i}", *gpus, *nics, "", "", "", "")))
    legend = "".join(f"  NIC{i}: mlx5_{i + (i > 3)}\n" for i in range(8))
    return "\n".join(lines) + f"\n{LEGEND}\nNIC Legend:\n\n{legend}"


def pair(path: str) -> str:
    """Two GPUs as driver 570 prints them; only the path differs between hosts."""
    return (
        "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
        f"GPU0\t X \t{path}\t0-63\t0\t\tN/A\nGPU1\t{path}\t X \t0-63\t0\t\tN/A\n{LEGEND}"
    )


SINGLE = f"\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-15\t0\t\tN/A\n{LEGEND}"
# A driver of 2017: a NIC by its own name, spaces (copied from a terminal), no NUMA column.
OLD = """
        GPU0    GPU1    GPU2    mlx4_0  CPU Affinity
GPU0     X      PIX     SYS     PHB     0-9,20-29
GPU1    PIX      X      SYS     PHB     0-9,20-29
GPU2    SYS     SYS      X      SYS     10-19,30-39
mlx4_0  PHB     PHB     SYS      X
"""
# A job that may use no CPU of the GPU's NUMA node: the cell is empty.
UNUSABLE_CPUS = (
    "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    "GPU0\t X \tNV18\t\t0\t\tN/A\nGPU1\tNV18\t X \t1\t1\t\tN/A\n"
)

# As captured on a host with one H200 (driver 580.159.04), `topo -m` and after it `topo -p2p r`.
H200 = (
    "\t\x1b[4mGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\nGPU0\t X \t0-15\t0\t\tN/A\n"
    "\nLegend:\n\n  X    = Self\n"
    "  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)\n"
    "  NV#  = Connection traversing a bonded set of # NVLinks\n"
)
H200_P2P = (
    " \t\x1b[4mGPU0\t\x1b[0m\n GPU0\tX\t\n\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n  NS   = Not supported\n"
)


def test_a_real_h200_host_also_if_another_table_follows() -> None:
    assert parse_matrix(H200, (0,)) == (("GPU0",), {"GPU0": "X"}, {"GPU0": 0})
    assert parse_matrix(H200 + H200_P2P, (0,)) == parse_matrix(H200, (0,))


def test_a_host_with_eight_gpus_and_nics() -> None:
    devices, paths, numa = parse_matrix(dgx_h100(), range(8))
    assert devices == (*(f"GPU{i}" for i in range(8)), *(f"mlx5_{i}" for i in (0, 1, 2, 3, 5, 6, 7, 8)))
    assert paths["GPU5"] == "NV18 NV18 NV18 NV18 NV18 X NV18 NV18 SYS SYS SYS SYS NODE PXB NODE NODE"
    assert [numa[f"GPU{i}"] for i in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("path", ["PIX", "PXB", "PHB", "NODE", "SYS", "NV4"])
def test_two_gpus(path: str) -> None:
    assert parse_matrix(pair(path), (0, 1)) == (
        ("GPU0", "GPU1"),
        {"GPU0": f"X {path}", "GPU1": f"{path} X"},
        {"GPU0": 0, "GPU1": 0},
    )


def test_one_gpu_an_old_driver_and_empty_cells() -> None:
    assert parse_matrix(SINGLE, (0,)) == (("GPU0",), {"GPU0": "X"}, {"GPU0": 0})
    devices, paths, numa = parse_matrix(OLD, (0, 1, 2))
    assert devices == ("GPU0", "GPU1", "GPU2", "mlx4_0")
    assert paths["GPU2"] == "SYS SYS X SYS"
    assert set(numa.values()) == {None}
    assert parse_matrix(UNUSABLE_CPUS, (0, 1))[2] == {"GPU0": 0, "GPU1": 1}


def test_only_visible_gpus_by_their_cuda_index() -> None:
    devices, paths, numa = parse_matrix(dgx_h100(), (6, 2))
    assert devices[:2] == ("GPU0", "GPU1")
    assert paths["GPU0"] == "X NV18 SYS SYS SYS SYS NODE NODE PXB NODE"
    assert paths["GPU1"] == "NV18 X NODE NODE PXB NODE SYS SYS SYS SYS"
    assert numa == {"GPU0": 1, "GPU1": 0}


@pytest.mark.parametrize(
    "text",
    ["", "Failed to initialize NVML: Driver/library version mismatch", "GPU0 CPU Affinity\nGPU0", "\x00\tGPU0\t"],
)
def test_other_text_is_no_topology(text: str) -> None:
    assert parse_matrix(text, (0,)) == ((), {}, {})


# --- /sys ---


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two InfiniBand ports (one down), a RoCE port, a NIC at 25 Gb/s, a container's interface, two NUMA nodes."""
    files = {
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
        "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
        "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand",
        "sys/class/infiniband/mlx5_0/device/numa_node": "1",
        "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN",
        "sys/class/infiniband/mlx5_2/ports/1/state": "4: ACTIVE",
        "sys/class/infiniband/mlx5_2/ports/1/rate": "100 Gb/sec (4X EDR)",
        "sys/class/infiniband/mlx5_2/ports/1/link_layer": "Ethernet",
        "sys/class/infiniband/mlx5_2/device/numa_node": "-1",
        "sys/class/net/ens3/speed": "25000",
        "sys/class/net/ens3/operstate": "up",
        "sys/class/net/ens3/type": "1",
        "sys/class/net/ens3/device/numa_node": "0",
        "sys/class/net/ens4/operstate": "down",
        "sys/class/net/ens4/device/numa_node": "0",
        "sys/class/net/eth0/speed": "10000",
        "sys/class/net/eth0/operstate": "up",
        "sys/class/net/veth1/speed": "10000",
        "sys/class/net/lo/operstate": "unknown",
        "sys/devices/system/node/node0/cpulist": "0-31,64-95",
        "sys/devices/system/node/node1/cpulist": "32-63,96-127",
        "proc/net/route": "Iface\tDestination\tGateway\neth0\t00000000\t0102A8C0",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return tmp_path


def test_nics_and_numa_nodes(root: Path) -> None:
    seen = read_topology(None, (), root)
    assert seen.nics == {
        "mlx5_0:1": Nic(kind="infiniband", bytes_per_s=50e9, numa_node=1, is_default=False),
        "mlx5_2:1": Nic(kind="roce", bytes_per_s=12.5e9, numa_node=None, is_default=False),
        "ens3": Nic(kind="ethernet", bytes_per_s=3.125e9, numa_node=0, is_default=False),
        # veth reports 10 Gb/s, which nothing limits.
        "eth0": Nic(kind="ethernet", bytes_per_s=None, numa_node=None, is_default=True),
    }
    assert seen.numa_nodes == {"node0": "0-31,64-95", "node1": "32-63,96-127"}


def test_a_probed_machine_can_be_read_back() -> None:
    facts = json.loads(json.dumps(machine.to_dict(machine.probe())))
    assert machine_rule().problem(facts) is None
    assert machine_rule().problem(facts | {"topology": None}) is None
    del facts["topology"]
    assert machine_rule().problem(facts) is None
    bad = facts | {"topology": {"nics": {"eth0": {"bytes_per_s": "fast"}}}}
    assert "topology.nics.eth0.bytes_per_s: got 'fast'" in str(machine_rule().problem(bad))


# --- links ---


def host_of(text: str | None, count: int, **gpu: Any) -> dict[str, Any]:
    """A host with `count` GPUs (H100 unless said otherwise) and that matrix, as a run records it."""
    usual = {"capability": "9.0", "nvlink_links": 18, "pcie_generation": 5, "pcie_width": 16, "mig": False}
    facts: dict[str, Any] = {"host": "a", "gpus": [usual | gpu | {"index": i} for i in range(count)], "links": "nvlink"}
    if text is not None:
        devices, paths, numa = parse_matrix(text, range(count))
        facts["topology"] = {"devices": devices, "paths": paths, "gpu_numa_nodes": numa}
    return facts


def test_the_link_between_gpus() -> None:
    assert links.inside_link(host_of(dgx_h100(), 8), 8) == ("NVLink 4 x18", 450e9)
    assert links.inside_link(host_of(pair("NV12"), 2, capability="8.0", nvlink_links=12), 2) == ("NVLink 3 x12", 300e9)
    slot = links.inside_link(host_of(pair("SYS"), 2, nvlink_links=None, pcie_generation=4), 2)
    assert slot is not None
    assert slot.name == "PCIe 4.0 x16"
    assert slot.bytes_per_s == pytest.approx(31.5e9, rel=0.001)
    # A run of an earlier version has no matrix.
    assert links.inside_link(host_of(None, 2), 2) == ("NVLink 4 x18", 450e9)
    assert links.inside_link(host_of(pair("NV18"), 2, mig=True), 2) is None
    assert links.inside_link(host_of(pair("NV18"), 2, capability="99.0"), 2) is None


def test_bridges_between_pairs_do_not_connect_four_gpus() -> None:
    rows = {0: "X NV4 SYS SYS", 1: "NV4 X SYS SYS", 2: "SYS SYS X NV4", 3: "SYS SYS NV4 X"}
    host = host_of(None, 4, capability="8.0", nvlink_links=4, pcie_generation=4)
    host["topology"] = {"paths": {f"GPU{i}": row for i, row in rows.items()}}
    assert str(links.inside_link(host, 4)).startswith("Link(name='PCIe 4.0 x16'")
    assert links.inside_link(host, 2) == ("NVLink 3 x4", 100e9)


def test_a_mesh_has_fewer_links_to_one_neighbour_than_in_all() -> None:
    # Four V100 in a square: two links to each neighbour, one across.
    rows = {0: "X NV2 NV1 NV2", 1: "NV2 X NV2 NV1", 2: "NV1 NV2 X NV2", 3: "NV2 NV1 NV2 X"}
    host = host_of(None, 4, capability="7.0", nvlink_links=5)
    host["topology"] = {"paths": {f"GPU{i}": row for i, row in rows.items()}}
    assert links.inside_link(host, 4) == ("NVLink 2 x5", 125e9)
    assert links.inside_link(host, 4, to_neighbour=True) == ("NVLink 2 x2", 50e9)


def test_nccl_settings_choose_the_nics() -> None:
    nic = {"kind": "infiniband", "bytes_per_s": 50e9, "is_default": False}
    nics = {f"mlx5_{i}:1": nic for i in range(4)} | {
        "eth0": {"kind": "ethernet", "bytes_per_s": 1e9, "is_default": True}
    }

    def used(uses_gpu: bool = True, **environment: str) -> list[str]:
        return list(links.used_nics({"topology": {"nics": nics}, "environment": environment}, uses_gpu))

    assert used() == ["mlx5_0:1", "mlx5_1:1", "mlx5_2:1", "mlx5_3:1"]
    assert used(NCCL_IB_HCA="=mlx5_1,mlx5_2") == ["mlx5_1:1", "mlx5_2:1"]
    assert used(NCCL_IB_HCA="^mlx5_3") == ["mlx5_0:1", "mlx5_1:1", "mlx5_2:1"]
    assert used(NCCL_IB_DISABLE="1") == ["eth0"]
    assert used(uses_gpu=False) == ["eth0"]
    assert used(uses_gpu=False, GLOO_SOCKET_IFNAME="eth1") == []


def test_one_line_about_a_host(root: Path) -> None:
    host = host_of(dgx_h100(), 8)
    host["topology"] |= {
        "nics": {"mlx5_0:1": {"kind": "infiniband", "bytes_per_s": 50e9}},
        "numa_nodes": {"node0": "0"},
    }
    assert links.summary(host) == (
        "GPUs by NVLink 4 x18: NV18 (28 pairs); NICs: mlx5_0:1, InfiniBand 400 Gb/s; 1 NUMA node"
    )
    assert links.summary({"host": "a", "gpus": []}) == ""


def test_a_numa_node_of_thousands_of_digits_is_unknown() -> None:
    text = f"GPU0 CPU Affinity\nGPU0 X 0-51 {'9' * 5000}"
    assert parse_matrix(text, (0,)) == (("GPU0",), {"GPU0": "X"}, {"GPU0": None})


def test_a_matrix_with_a_million_empty_lines_is_read_in_linear_time() -> None:
    """`nvidia-smi` may print 1 MiB, and a probe must end."""
    devices, _, _ = parse_matrix(f"GPU0 CPU Affinity\nGPU0 X 0-51 0{chr(10) * 2**20}x", (0,))
    assert devices == ("GPU0",)
    columns = " ".join(f"NIC{i}" for i in range(100_000))
    wide = f"GPU0 {columns} CPU Affinity\nGPU0 X {'SYS ' * 100_000}0-51 0\nNIC99999: mlx5_7"
    assert parse_matrix(wide, (0,))[0][-1] == "mlx5_7"
