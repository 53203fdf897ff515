"""Options of the node test, and what each process measures."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.errors import require
from paceline.experiment.choices import Choice
from paceline.experiment.plugins import parse_options
from paceline.experiment.spec import RunSpec, Topology
from paceline.models.arithmetic import load as load_shape
from paceline.results.machine_samples import MEMORY_RATIO, SPEED_RATIO, TEMPERATURE_C
from paceline.workloads import compute
from paceline.workloads.collectives.options import read_bytes
from paceline.workloads.compute.options import FEWEST_ITERATIONS, Row
from paceline.workloads.compute.options import Options as ComputeOptions

NODES = ("host", "process")
TRAININGS = ("pretrain", "finetune", "none")
PINNED = ("", "NT", "pinned")
# Default sides of products and bytes of copies, large enough to fill the device.
SIDES = {"cuda": 8192, "cpu": 512}
COPIES = {"cuda": 2**30, "cpu": 2**24}


@dataclass(frozen=True)
class Options:
    """node: what is judged as one node: a `host` with all its processes, or each `process` (GPU by GPU).

    repeats: interleaved windows of every measure. training: what each process trains alone. proof_steps: seeded steps
    that must give the same bits everywhere. side, copy_bytes, iters and budget_s: for products and copies.
    speed_ratio, memory_ratio and temperature_c: how far a node may deviate from its peers' median or from a baseline.
    """

    node: str = "host"
    repeats: int = 5
    training: str = "pretrain"
    proof_steps: int = 4
    side: int | None = None
    copy_bytes: int | None = None
    iters: int = 50
    budget_s: float = 0.5
    tournament: bool = True
    pair_bytes: int | str | None = None
    speed_ratio: float = SPEED_RATIO
    memory_ratio: float = MEMORY_RATIO
    temperature_c: float = TEMPERATURE_C

    def __post_init__(self) -> None:
        require(self.node in NODES, "nodes.node", self.node, " or ".join(NODES))
        require(self.training in TRAININGS, "nodes.training", self.training, ", ".join(TRAININGS))
        for name, least in (("repeats", 2), ("proof_steps", 1), ("iters", FEWEST_ITERATIONS)):
            require(getattr(self, name) >= least, f"nodes.{name}", getattr(self, name), f"a whole number from {least}")
        for name in ("side", "copy_bytes"):
            given, accepted = getattr(self, name), "a whole number from 1, or null for the device's default"
            require(given is None or (type(given) is int and given >= 1), f"nodes.{name}", given, accepted)
        read_bytes("nodes.pair_bytes", self.pair_bytes)
        for name in ("speed_ratio", "memory_ratio"):
            require(0 < getattr(self, name) < 1, f"nodes.{name}", getattr(self, name), "a number between 0 and 1")
        require(0 < self.temperature_c < 1000, "nodes.temperature_c", self.temperature_c, "degrees above 0")
        require(0 < self.budget_s < float("inf"), "nodes.budget_s", self.budget_s, "a positive number of seconds")


def alone(spec: RunSpec) -> RunSpec:
    """The training of one process: the same work on every node, without communication."""
    training = parse_options(Options, spec.workload).training
    one = Topology(device=spec.topology.device)
    return replace(spec, workload=Choice(training), strategy=Choice("single"), topology=one)


def plan(spec: RunSpec) -> tuple[Row, ...]:
    """One product in the dtype of the training, and one copy in each direction that the device has."""
    device, chosen = spec.topology.device, parse_options(Options, spec.workload)
    side, size = chosen.side or SIDES[device], chosen.copy_bytes or COPIES[device]
    requested = ComputeOptions(
        kernels="matmul+copy+h2d+d2h" if device == "cuda" else "matmul+copy",
        dtypes=spec.training.precision.compute,
        largest_matmul=side,
        largest_copy_bytes=size,
    )
    largest = {"matmul": side, "copy": size, "h2d": size, "d2h": size}
    rows = compute.plan(load_shape(spec.model), requested, device)
    return tuple(row for row in rows if row.size == largest[row.kernel] and row.variant in PINNED)
