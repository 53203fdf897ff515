"""The link that limits a collective: its name and its nominal rate, on hosts whose every rate is known."""

from __future__ import annotations

import dataclasses
from typing import Any

import fabric_records as made
import pytest

from paceline.analysis import report
from paceline.analysis.machine import fabric
from paceline.analysis.machine.links import limiting_link
from paceline.report.tables import fabric as tables
from paceline.results.records import RunRecord

GPU = {"name": "NVIDIA H100 80GB HBM3", "capability": "9.0", "nvlink_links": 18, "pcie_generation": 5, "pcie_width": 16}
PORT = {"kind": "infiniband", "bytes_per_s": 50e9, "numa_node": 0, "is_default": False}
ETHERNET = {"kind": "ethernet", "bytes_per_s": 1.25e9, "numa_node": None, "is_default": True}


def record(
    world_size: int = 8, nodes: int = 1, device: str = "cuda", ports: int = 8, samples: Any = (), **gpu: Any
) -> RunRecord:
    """Ranks on hosts with H100s behind NVSwitch, `ports` InfiniBand ports of 400 Gb/s and Ethernet of 10 Gb/s."""
    one = made.build_record(made.build_spec(world_size, nodes, device), samples)
    per_node = world_size // nodes
    paths = {f"GPU{i}": " ".join("X" if i == j else "NV18" for j in range(per_node)) for i in range(per_node)}
    facts = {
        "gpus": [GPU | gpu | {"index": i} for i in range(per_node)] if device == "cuda" else [],
        "links": "nvlink",
        "environment": {},
        "topology": {"paths": paths, "nics": {f"mlx5_{i}:1": PORT for i in range(ports)} | {"eth0": ETHERNET}},
    }
    return dataclasses.replace(one, machines=tuple({**machine, **facts} for machine in one.machines))


def test_one_node_is_limited_by_nvlink() -> None:
    for operation in ("all_reduce", "all_to_all", "send_recv", "ring"):
        assert limiting_link(record(), operation, 2 if operation == "send_recv" else 8) == ("NVLink 4 x18", 450e9)


def test_several_nodes_are_limited_by_all_nics_of_a_node() -> None:
    two = record(16, 2)
    assert limiting_link(two, "all_reduce", 16) == ("8 x InfiniBand 400 Gb/s", 400e9)
    # Each rank sends 8 of its 15 parts to the other node, and 8 ranks share the NICs.
    link = limiting_link(two, "all_to_all", 16)
    assert link is not None
    assert link.bytes_per_s == pytest.approx(400e9 / 8 * 15 / 8)
    # One rank of a node sends to the other node, over one NIC.
    assert limiting_link(two, "ring", 16) == ("mlx5_0:1, InfiniBand 400 Gb/s", 50e9)
    # Ranks 0 and 1 are on one node.
    assert limiting_link(two, "send_recv", 2) == ("NVLink 4 x18", 450e9)
    assert limiting_link(record(2, 2), "send_recv", 2) == ("mlx5_0:1, InfiniBand 400 Gb/s", 50e9)


def test_more_nics_than_nvlink_leave_nvlink_as_the_limit() -> None:
    assert limiting_link(record(16, 2, nvlink_links=12), "all_reduce", 16) == ("NVLink 4 x12", 300e9)


def test_gloo_between_nodes_is_limited_by_the_interface() -> None:
    assert limiting_link(record(4, 2, "cpu"), "all_reduce", 4) == ("eth0, Ethernet 10 Gb/s", 1.25e9)
    # Within one node it is memory.
    assert limiting_link(record(4, 1, "cpu"), "all_reduce", 4) is None


def test_the_slowest_host_is_the_limit_and_an_unknown_one_leaves_none() -> None:
    two = record(16, 2)
    first, second = two.machines
    nics = second["topology"]["nics"] | {"mlx5_7:1": PORT | {"bytes_per_s": 25e9}}
    slow = dataclasses.replace(two, machines=(first, {**second, "topology": {**second["topology"], "nics": nics}}))
    assert limiting_link(slow, "all_reduce", 16) == ("7 x InfiniBand 400 Gb/s and 1 x InfiniBand 200 Gb/s", 375e9)
    unknown = dataclasses.replace(two, machines=(first, {"host": "node-b", "gpus": second["gpus"], "links": "nvlink"}))
    assert limiting_link(unknown, "all_reduce", 16) is None


def test_without_facts_there_is_no_link() -> None:
    assert limiting_link(made.build_record(made.build_spec(8, 1, "cuda")), "all_reduce", 8) is None
    shared = made.build_record(made.build_spec(8, 1, "cuda"), shared=True)
    assert limiting_link(dataclasses.replace(shared, machines=record().machines), "all_reduce", 8) is None


def test_the_report_states_the_rate_of_the_link_beside_the_measured_one() -> None:
    # 1 GiB over 8 ranks at 360 GB/s of bus bandwidth: t = S * 1.75 / 360e9.
    size = 2**30
    samples = made.row(size * 1.75 / 360e9, size_bytes=size, group_size=8)
    one = record(samples=samples)
    (row,) = fabric.analyse([one]).rows
    assert (row.link, row.link_bytes_per_s) == ("NVLink 4 x18", 450e9)
    found = report.build([one], "t")
    assert "360 GB/s of bus bandwidth, 80 % of the 450 GB/s of NVLink 4 x18" in tables.sentence(found)
    (table, *_) = tables.tables(found)
    shown = {column.heading: cell.text for column, cell in zip(table.columns, table.rows[0], strict=True)}
    assert shown["of link, %"] == "80.0"
    assert "Link: NVLink 4 x18, nominally 450 GB/s in each direction." in table.notes


def test_a_run_of_an_earlier_version_is_reported_without_a_link() -> None:
    found = report.build([made.build_record(samples=made.row(1e-3))], "t")
    assert " of link" not in str(tables.tables(found))
    assert found.collectives[0].link is None
