"""What a launcher asks of its driver on Ray: one JSON line, the same for the same spec and folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """each: what one rank reserves, by Ray's names. env: variables that all ranks get. expendable: nodes without which
    the job goes on, once rank 0 is past its setup."""

    name: str
    run_dir: str
    version: str
    address: str
    placement: str
    nodes: int
    processes_per_node: int
    each: Mapping[str, float]
    env: Mapping[str, str]
    runner: str
    port: int
    scratch: str
    pending_s: float
    expendable: Sequence[int] = ()

    @property
    def bundle(self) -> dict[str, float]:
        """What one node reserves: a bundle of Ray is never split between machines."""
        return {name: amount * self.processes_per_node for name, amount in self.each.items()}

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes_per_node
