"""How the parts of this host are connected: paths between GPUs and NICs, NICs with their rates, NUMA nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.host.files import text_of

# Interfaces that connect this host only with itself.
INTERNAL = ("lo", "docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "tunl", "ifb", "dummy")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NIC_NAME = re.compile(r"^[ \t]*(NIC\d+)[ \t]*:[ \t]*(\S+)[ \t]*$", re.MULTILINE)
_GPU_NAME = re.compile(r"GPU\d+")
_NUMBER = re.compile(r"[0-9]{1,6}")
_RATE = re.compile(r"[\d.]+(?= Gb/sec)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One active port. kind is ethernet, infiniband or roce; is_default: it carries the default route.

    bytes_per_s is None for interfaces without hardware (those of containers report a rate that nothing limits).
    """

    kind: str
    bytes_per_s: float | None
    numa_node: int | None
    is_default: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """paths has a row for each visible GPU in the order of `devices`, in the words of `nvidia-smi topo -m` (NV18, PIX,
    SYS, ...); devices are the visible GPUs by CUDA's index, then NICs. numa_nodes lists the CPUs of each NUMA node.
    """

    devices: tuple[str, ...]
    paths: Mapping[str, str]
    gpu_numa_nodes: Mapping[str, int | None]
    nics: Mapping[str, Nic]
    numa_nodes: Mapping[str, str]


def read_topology(matrix: str | None, visible: Sequence[int] = (), root: Path = Path("/")) -> Topology:
    """The topology of this host from the text of `nvidia-smi topo -m`, /proc and /sys below `root`.

    `visible` holds the driver's number of each GPU that CUDA shows, in CUDA's order.
    """
    devices, paths, gpu_numa_nodes = parse_matrix(matrix or "", visible)
    nodes = sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    return Topology(
        devices=devices,
        paths=paths,
        gpu_numa_nodes=gpu_numa_nodes,
        nics={**_ports(root), **_interfaces(root)},
        numa_nodes={path.name: text_of(path / "cpulist") for path in nodes},
    )


def parse_matrix(text: str, visible: Sequence[int]) -> tuple[tuple[str, ...], dict[str, str], dict[str, int | None]]:
    """Devices, a row of paths and the NUMA node of each visible GPU; all empty if the text is no such matrix.

    >>> parse_matrix("GPU0 GPU1 CPU Affinity\\nGPU0 X NV18 0-51 0\\nGPU1 NV18 X 52-103 1", visible=(1, 0))
    (('GPU0', 'GPU1'), {'GPU0': 'X NV18', 'GPU1': 'NV18 X'}, {'GPU0': 1, 'GPU1': 0})
    """
    text = _COLOUR.sub("", text)
    lines = [line for line in text.splitlines() if line]
    headers = (line.partition("CPU Affinity") for line in lines)
    columns = next((before.split() for before, found, _ in headers if found and "GPU0" in before), [])
    # The driver separates cells by tabs, and some are empty; a copy may have spaces instead.
    cells = [[cell.strip() for cell in line.split("\t")] if "\t" in line else line.split() for line in lines]
    places = {name: place for place, name in enumerate(columns, 1)}
    full = [row for row in cells if row and row[0] in places and len(row) > len(columns)]
    # The first row of a device counts: other tables of the driver may follow.
    rows = {row[0]: row[1:] for row in reversed(full) if row[places[row[0]]] == "X"}
    shown = [f"GPU{index}" for index in visible if f"GPU{index}" in rows]
    if not shown or len(shown) != len(visible):
        return (), {}, {}
    names = dict(_NIC_NAME.findall(text))
    nics = [name for name in columns if not _GPU_NAME.fullmatch(name)]
    ours = {f"GPU{number}": name for number, name in enumerate(shown)}
    order = [places[name] - 1 for name in (*shown, *nics)]
    paths = {gpu: " ".join(rows[name][column] for column in order) for gpu, name in ours.items()}
    # After the paths: CPUs, NUMA node, and in newer drivers the GPU's own NUMA node. Older ones list CPUs only.
    rest = {gpu: rows[name][len(columns) :] for gpu, name in ours.items()}
    numa = {
        gpu: int(words[1]) if len(words) > 1 and _NUMBER.fullmatch(words[1]) else None for gpu, words in rest.items()
    }
    return (*ours, *(names.get(name, name) for name in nics)), paths, numa


def default_interface(root: Path = Path("/")) -> str | None:
    """The interface of the default route."""
    routes = [line.split() for line in text_of(root / "proc/net/route").splitlines()[1:]]
    return next((row[0] for row in routes if len(row) > 1 and row[1] == "00000000"), None)


def active_ports(root: Path = Path("/")) -> list[Path]:
    """Directories of the active InfiniBand and RoCE ports."""
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    return [port for port in ports if "ACTIVE" in text_of(port / "state")]


def _ports(root: Path) -> dict[str, Nic]:
    nics = {}
    for port in active_ports(root):
        rate = _RATE.match(text_of(port / "rate"))
        nics[f"{port.parents[1].name}:{port.name}"] = Nic(
            kind="roce" if text_of(port / "link_layer") == "Ethernet" else "infiniband",
            bytes_per_s=float(rate[0]) * 1e9 / 8 if rate else None,
            numa_node=_numa_node(port.parents[1]),
            is_default=False,
        )
    return nics


def _interfaces(root: Path) -> dict[str, Nic]:
    """Interfaces that are up and have hardware, and that of the default route."""
    default, nics = default_interface(root), {}
    for path in sorted((root / "sys/class/net").glob("*")):
        has_hardware = (path / "device").exists() or (path / "bonding").exists()
        if path.name.startswith(INTERNAL) or not (has_hardware or path.name == default):
            continue
        if text_of(path / "operstate") == "down":
            continue
        megabits = text_of(path / "speed") if has_hardware else ""
        nics[path.name] = Nic(
            kind="ethernet" if text_of(path / "type") in ("1", "") else "infiniband",
            # A virtual adapter reports -1, or nothing.
            bytes_per_s=int(megabits) * 1e6 / 8 if megabits.isdecimal() and int(megabits) else None,
            numa_node=_numa_node(path),
            is_default=path.name == default,
        )
    return nics


def _numa_node(device: Path) -> int | None:
    text = text_of(device / "device/numa_node")
    return int(text) if text.isdecimal() else None
