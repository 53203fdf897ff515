"""When a job of served replicas continues without a node, and for which ranks it still waits. Same for all launchers.

`contract.may_be_lost` says which nodes may be lost. Each launcher detects losses in its own way.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from paceline.results import store
from paceline.results.records import Status


def is_past_setup(run_dir: Path) -> bool:
    """Whether rank 0 has begun to send requests. From then on it only needs answers from the other nodes."""
    first = next((position for position in store.read_progress(run_dir) if position.rank == 0), None)
    return first is not None and first.phase not in ("start", "setup")


def ranks_of(node: int, ranks: int) -> range:
    """Return the ranks of a node. ranks: per node."""
    return range(node * ranks, (node + 1) * ranks)


def awaited_ranks(nodes: int, lost: Collection[int], ranks: int) -> set[int]:
    """Return the ranks of all nodes that are not lost."""
    return {rank for node in range(nodes) if node not in lost for rank in ranks_of(node, ranks)}


def have_ended(run_dir: Path, awaited: Collection[int]) -> bool:
    """Whether all awaited ranks have written an outcome. Their torchrun would wait minutes for the lost ones."""
    return set(awaited) <= {outcome.rank for outcome in store.read_outcomes(run_dir)}


def reported_failure(run_dir: Path, ranks: Collection[int]) -> bool:
    """Whether one of these ranks reported a failure itself. That fails the run, so it does not continue."""
    return any(o.rank in ranks and o.status is not Status.OK for o in store.read_outcomes(run_dir))
