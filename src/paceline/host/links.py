"""The links of a host by its recorded facts: NVLink, PCIe and NICs, with their nominal rates in one direction.

Facts are the JSON form of `machine.Machine`. Runs of earlier versions have less of them: what is unknown is None.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paceline.host.recommended import matching

# Compute capability -> generation of NVLink and bytes per second of one link in one direction: NVIDIA's whitepapers of
# P100, V100, Turing, A100, GA102, H100 and B200.
_NVLINK = {
    "6.0": (1, 20e9),
    "7.0": (2, 25e9),
    "7.5": (2, 25e9),
    "8.0": (3, 25e9),
    "8.6": (3, 14.0625e9),
    "9.0": (4, 25e9),
    "10.0": (5, 50e9),
    "10.3": (5, 50e9),
}
# PCIe generation -> bytes per second of one lane: transfers per second by the line code (8b/10b, 128b/130b, FLIT).
_PCIE_LANE = {
    1: 2.5e9 / 8 * 8 / 10,
    2: 5e9 / 8 * 8 / 10,
    3: 8e9 / 8 * 128 / 130,
    4: 16e9 / 8 * 128 / 130,
    5: 32e9 / 8 * 128 / 130,
    6: 64e9 / 8 * 242 / 256,
}
_NVLINKS = re.compile(r"NV(\d{1,3})")
_KINDS = {"infiniband": "InfiniBand", "roce": "RoCE", "ethernet": "Ethernet"}

Facts = Mapping[str, Any]


class Link(NamedTuple):
    """A link by name and its nominal bytes per second in one direction."""

    name: str
    bytes_per_s: float


def nvlink(capability: str | None, links: int | None) -> Link | None:
    """The name and the rate of the NVLinks of a GPU; None for an unknown generation or without any.

    >>> nvlink("9.0", 18)
    Link(name='NVLink 4 x18', bytes_per_s=450000000000.0)
    """
    known = _NVLINK.get(capability or "")
    return Link(f"NVLink {known[0]} x{links}", known[1] * links) if known and links else None


def pcie(generation: int | None, width: int | None) -> Link | None:
    """The name and the rate of a PCIe slot.

    >>> "{} {:.3g}".format(*pcie(5, 16))
    'PCIe 5.0 x16 6.3e+10'
    """
    lane = _PCIE_LANE.get(generation or 0)
    return Link(f"PCIe {generation}.0 x{width}", lane * width) if lane and width else None


def inside_link(host: Facts, count: int, to_neighbour: bool = False) -> Link | None:
    """The link between the first `count` GPUs of a host: NVLink if it connects them all, else PCIe.

    to_neighbour: each GPU sends to the next only, so that only the links between the two count.
    """
    gpus = list(host.get("gpus") or ())[:count]
    if len(gpus) < count or any(gpu.get("mig") for gpu in gpus):
        return None
    nvlinks = [gpu.get("nvlink_links") or 0 for gpu in gpus]
    rows = (host.get("topology") or {}).get("paths") or {}
    paths = [str(rows.get(f"GPU{i}", "")).split()[:count] for i in range(count)]
    if all(len(row) == count for row in paths):
        if not _are_joined(paths):
            nvlinks = []
        elif to_neighbour:
            ahead = [_NVLINKS.fullmatch(row[(i + 1) % count]) for i, row in enumerate(paths)]
            nvlinks = [int(match[1]) if match else 0 for match in ahead]
    elif host.get("links") != "nvlink":
        nvlinks = []  # Runs of earlier versions have no matrix.
    disabled = str((host.get("environment") or {}).get("NCCL_P2P_DISABLE", "0")).strip() not in ("", "0")
    if nvlinks and all(nvlinks) and not disabled:
        links = [nvlink(gpu.get("capability"), least) for gpu, least in zip(gpus, nvlinks, strict=True)]
    else:
        links = [pcie(gpu.get("pcie_generation"), gpu.get("pcie_width")) for gpu in gpus]
    known = [link for link in links if link]
    return min(known, key=lambda link: link.bytes_per_s) if len(known) == len(gpus) else None


def _are_joined(paths: Sequence[Sequence[str]]) -> bool:
    """Whether NVLinks alone connect all GPUs, directly, through switches or through each other."""
    reached, left = set[int](), [0]
    while left:
        here = left.pop()
        if here not in reached:
            reached.add(here)
            left += [other for other, path in enumerate(paths[here]) if _NVLINKS.fullmatch(path)]
    return len(reached) == len(paths)


def used_nics(host: Facts, uses_gpu: bool) -> dict[str, Facts]:
    """The NICs that NCCL or gloo uses on this host, by the settings it recorded: RDMA ports if NCCL has any, else the
    interface that a variable names, else that of the default route.
    """
    nics: Mapping[str, Facts] = (host.get("topology") or {}).get("nics") or {}
    environment = {name: str(value).strip() for name, value in (host.get("environment") or {}).items()}
    # Ports are named device:port; an interface has no port.
    ports = {name: nic for name, nic in nics.items() if ":" in name}
    if uses_gpu and ports and environment.get("NCCL_IB_DISABLE", "0") in ("", "0"):
        wanted = environment.get("NCCL_IB_HCA", "")
        devices = {name.partition(":")[0] for name in ports}
        chosen = {*matching(wanted, devices), *matching(wanted, ports)} if wanted else devices
        return {name: nic for name, nic in ports.items() if name in chosen or name.partition(":")[0] in chosen}
    interfaces = {name: nic for name, nic in nics.items() if name not in ports}
    setting = environment.get("NCCL_SOCKET_IFNAME" if uses_gpu else "GLOO_SOCKET_IFNAME", "")
    if setting:
        names = matching(setting if uses_gpu else f"={setting}", interfaces)
    else:
        names = [name for name, nic in interfaces.items() if nic.get("is_default")]
    return {name: interfaces[name] for name in names}


def nic_text(nics: Mapping[str, Facts]) -> str:
    """`8 x InfiniBand 400 Gb/s`, or `eth0 25 Gb/s` for one."""
    if len(nics) == 1:
        ((name, nic),) = nics.items()
        return f"{name}, {_KINDS.get(str(nic.get('kind')), 'network')} {_gigabits(nic)}"
    kinds = Counter(f"{_KINDS.get(str(nic.get('kind')), 'network')} {_gigabits(nic)}" for nic in nics.values())
    return " and ".join(f"{count} x {text}" for text, count in kinds.items())


def _gigabits(nic: Facts) -> str:
    return f"{nic['bytes_per_s'] * 8 / 1e9:g} Gb/s"


def summary(host: Facts) -> str:
    """The topology of a host in one line; empty if it recorded none."""
    facts = host.get("topology") or {}
    parts = []
    if (count := len(host.get("gpus") or ())) > 1:
        link = inside_link(host, count)
        rows = [str(row).split() for row in (facts.get("paths") or {}).values()]
        kinds = Counter(row[j] for i, row in enumerate(rows) for j in range(i + 1, min(count, len(row))))
        pairs = ", ".join(f"{path} ({times} pair{'s' if times > 1 else ''})" for path, times in kinds.items())
        parts.append(
            f"GPUs by {link.name if link else host.get('links') or 'unknown links'}{f': {pairs}' if pairs else ''}"
        )
    nics: Mapping[str, Facts] = facts.get("nics") or {}
    known = {name: nic for name, nic in nics.items() if nic.get("bytes_per_s")}
    unknown = [name for name in nics if name not in known]
    shown = [nic_text(known)] if known else []
    if nics:
        parts.append(f"NICs: {', '.join((*shown, *(f'{name} (rate unknown)' for name in unknown)))}")
    if numa := facts.get("numa_nodes"):
        parts.append(f"{len(numa)} NUMA node{'s' if len(numa) > 1 else ''}")
    return "; ".join(parts)
