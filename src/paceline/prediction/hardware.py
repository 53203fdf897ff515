"""GPUs and networks as the predictor sees them: peaks, bandwidths, links, power."""

from __future__ import annotations

import functools
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import RequestError, did_you_mean
from paceline.host import machine

_ADAPTERS = re.compile(r"(\d+)\s*x\s*(?:hdr|ndr|edr)?\s*(\d+)\s*(?:gb)?", re.IGNORECASE)
# A process of a machine without GPUs; its rates are measured (`processors.measured_cpu`).
CPU = "cpu"
_TOTAL = re.compile(r"(\d+(?:\.\d+)?)\s*(?:gbps|gb/s|gbe|g)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One kind of GPU. Rates are the vendor's, dense; links in one direction of one GPU; the network of one node."""

    name: str
    gpu: str
    generation: str
    flops: float
    fp8_flops: float
    memory_bytes: float | None
    memory_bytes_per_s: float
    link_bytes_per_s: float
    gpus_per_node: int
    node_bytes_per_s: float
    power_w: float
    matmul_ratio: float = 1.0


# What a process of a machine without GPUs is in a stored prediction, whatever its rates were.
ANY_CPU = Accelerator(
    name=CPU,
    gpu=CPU,
    generation=CPU,
    flops=math.nan,
    fp8_flops=math.nan,
    memory_bytes=None,
    memory_bytes_per_s=math.nan,
    link_bytes_per_s=math.nan,
    gpus_per_node=1,
    node_bytes_per_s=math.nan,
    power_w=math.nan,
)


def host_rates(gpu: Accelerator) -> tuple[float, float]:
    """(bytes per second between the host and one GPU, memory bytes per second of the host), as a vendor states them."""
    if gpu.name == CPU:
        return gpu.memory_bytes_per_s, gpu.memory_bytes_per_s
    pcie, memory, _ = _data()["hosts"][gpu.generation]
    return float(pcie), float(memory)


def host_memory_bytes(gpu: Accelerator) -> float:
    """Memory of a node for offloaded state: that of the reference design, because nodes with one GPU differ."""
    if gpu.name == CPU:
        return (gpu.memory_bytes or 0.0) * gpu.gpus_per_node
    return float(_data()["hosts"][gpu.generation][2]) * gpu.gpus_per_node


@functools.cache
def _data() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "hardware.toml").read_text(encoding="utf-8"))


@functools.cache
def _by_name() -> dict[str, Accelerator]:
    found: dict[str, Accelerator] = {}
    for row in _data()["accelerator"]:
        table = machine.gpu_row(row["gpu"])
        assert table is not None, row["gpu"]
        derate = row.get("derate", 1.0)
        flops = (table.get("bf16") or table["fp16"]) * derate
        one = Accelerator(
            name=row["aliases"][0],
            gpu=row["gpu"],
            generation=row["generation"],
            flops=flops,
            fp8_flops=(table["fp8"] * derate) if "fp8" in table else flops,
            memory_bytes=table.get("memory_bytes"),
            memory_bytes_per_s=row.get("memory_bytes_per_s") or table["memory_bytes_per_s"],
            link_bytes_per_s=row["nvlink_bytes_per_s"],
            gpus_per_node=row["gpus_per_node"],
            node_bytes_per_s=row["node_bytes_per_s"],
            power_w=row["power_w"],
            matmul_ratio=row.get("matmul_ratio", 1.0),
        )
        for alias in row["aliases"]:
            found[alias] = one
        if derate == 1.0:
            for name in table["names"]:
                found.setdefault(name.casefold(), one)
    return found


def names() -> tuple[str, ...]:
    """The short name of every GPU that can be predicted."""
    return tuple(dict.fromkeys(one.name for one in _by_name().values()))


def accelerator(name: str, where: str = "--gpu") -> Accelerator:
    """The GPU of this name: a short name (h100), a published one (H100-SXM) or the driver's. where: who asks.

    >>> accelerator("h100").flops
    989000000000000.0
    """
    words = name.strip().casefold().removeprefix("nvidia ")
    found = _by_name().get(words) or _by_name().get(words.replace(" ", "-"))
    if found is None:
        raise RequestError(
            f"{where}: got {name!r}, expected one of {', '.join(names())}.{did_you_mean(words, names())}"
        )
    return found


def interconnects() -> tuple[str, ...]:
    """The links and networks that have a name."""
    return (*_data()["links"], *_data()["networks"])


def network(text: str) -> tuple[float | None, float | None]:
    """(link, node) bytes per second that an interconnect's name states; None for what it does not say.

    A name is one of `hardware.toml` ("nvlink4", "ib-ndr", "25gbe"), several joined by "+", or a description such as
    "NVLink3 + 1600Gbps RoCE/node" or "8x400Gbps".

    >>> network("nvlink4+ib-ndr")
    (450000000000.0, 400000000000.0)
    >>> network("NVLink3 + 4x100Gbps RoCE/node")
    (300000000000.0, 50000000000.0)
    """
    links: Mapping[str, float] = _data()["links"]
    networks: Mapping[str, float] = _data()["networks"]
    link = node = None
    for part in filter(None, (piece.strip().casefold() for piece in re.split(r"[+;(]", text))):
        word = next((name for name in links if part.replace(" ", "").startswith(name)), None)
        if word is not None:
            link = links[word]
            continue
        if (adapters := _ADAPTERS.search(part)) is not None:
            node = float(adapters[1]) * float(adapters[2]) / 8 * 1e9
        elif part.strip(") ").replace(" ", "-") in networks:
            node = networks[part.strip(") ").replace(" ", "-")]
        elif (total := _TOTAL.search(part)) is not None:
            node = float(total[1]) / 8 * 1e9
    return link, node
