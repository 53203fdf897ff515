"""Synthetic sweeps and tournaments whose every number is known."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.experiment.choices import Choice
from paceline.experiment.spec import RunSpec, Topology, Training
from paceline.results.machine_samples import CollectiveSample, OverlapSample
from paceline.results.records import Evidence, Outcome, RunRecord, Status

MiB = 2**20


def build_spec(
    world_size: int = 4, nodes: int = 1, device: str = "cpu", repeat: int = 0, workload: str = "collectives"
) -> RunSpec:
    return RunSpec(
        experiment="fabric",
        workload=Choice.parse(workload),
        model=Choice("tiny"),
        topology=Topology(device=device, nodes=nodes, processes_per_node=world_size // nodes),
        training=Training(sequence_length=8, micro_batch=1),
        steps=1,
        repeat=repeat,
    )


def build_record(spec: RunSpec | None = None, samples: Iterable[Any] = (), shared: bool = False) -> RunRecord:
    """Ranks fill one host after the other: node-a, node-b, ...; on CUDA every host has H200s."""
    spec = spec or build_spec()
    size, cuda = spec.topology.processes_per_node, spec.topology.device == "cuda"
    hosts = [f"node-{chr(97 + rank // size)}" for rank in range(spec.topology.world_size)]
    facts = Evidence(
        init_digest="",
        parameters=0,
        dtypes={},
        optimizer={},
        settings={"shared_gpu": True} if shared else {},
        switches={},
        neighbours=None,
        window_wall_s=None,
    )
    gpus = [{"index": i, "name": "NVIDIA H200"} for i in range(size)] if cuda else []
    found = list(samples)
    return RunRecord(
        spec=spec,
        status=Status.OK,
        error=None,
        started_at=100.0 + spec.repeat,
        ended_at=160.0 + spec.repeat,
        path="",
        outcomes=tuple(
            Outcome(rank=r, status=Status.OK, error=None, host=h, pid=r, started_at=0, ended_at=1, evidence=facts)
            for r, h in enumerate(hosts)
        ),
        machines=tuple({"host": h, "cpu": "Xeon", "gpus": gpus} for h in dict.fromkeys(hosts)),
        collectives=tuple(s for s in found if isinstance(s, CollectiveSample)),
        overlaps=tuple(s for s in found if isinstance(s, OverlapSample)),
    )


def row(
    seconds: Sequence[Sequence[float]] | float, operation: str = "all_reduce", size_bytes: int = MiB, **more: Any
) -> list[CollectiveSample]:
    """One row: seconds by rank and iteration, or one number for four ranks of 100 iterations."""
    if isinstance(seconds, int | float):
        seconds = [[seconds] * 100] * int(more.get("group_size", 4))
    usual: dict[str, Any] = {
        "dtype": "fp32",
        "count": size_bytes // 4,
        "group_size": len(seconds),
        "in_place": False,
        "mode": "single",
        "batch": 1,
        "wrong": 0,
    }
    return [
        CollectiveSample(rank=rank, operation=operation, size_bytes=size_bytes, durations_s=tuple(x), **usual | more)
        for rank, x in enumerate(seconds)
    ]


def sweep(
    time_of: Callable[[int], float],
    sizes: Iterable[int] = tuple(2**k for k in range(3, 31)),
    operation: str = "all_reduce",
    noise: float = 0.0,
    seed: int = 0,
    ranks: int = 4,
    iterations: int = 20,
    **more: Any,
) -> list[CollectiveSample]:
    """time_of(S) seconds at every size, with relative noise per iteration common to all ranks."""
    rng = np.random.default_rng(seed)
    found = []
    for size in sizes:
        common = time_of(size) * (1 + noise * rng.standard_normal(iterations))
        found += row([list(common)] * ranks, operation, size, **more)
    return found


def tournament(
    ranks: int,
    bandwidth_of: Callable[[int, int], float] | Mapping[tuple[int, int], float] | None = None,
    turns: int = 2,
    noise: float = 0.0,
    seed: int = 0,
    size_bytes: int = MiB,
) -> list[CollectiveSample]:
    """Every pair in every turn; each of the two ranks measures the same pair within a percent of the other."""
    rng = np.random.default_rng(seed)
    found = []
    for turn, (a, b) in itertools.product(range(turns), itertools.combinations(range(ranks), 2)):
        bandwidth = bandwidth_of(a, b) if callable(bandwidth_of) else (bandwidth_of or {}).get((a, b), 1e9)
        seconds = size_bytes / bandwidth * float(np.exp(noise * rng.standard_normal()))
        for rank, peer in ((a, b), (b, a)):
            found.append(
                CollectiveSample(
                    rank=rank,
                    operation="pair",
                    dtype="fp32",
                    size_bytes=size_bytes,
                    count=size_bytes // 4,
                    group_size=2,
                    in_place=False,
                    mode="single",
                    batch=1,
                    durations_s=(seconds * (0.99 if rank < peer else 1.0),) * 5,
                    wrong=0,
                    peer=peer,
                    turn=turn,
                )
            )
    return found
