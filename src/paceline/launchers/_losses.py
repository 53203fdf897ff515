"""When a job of served replicas goes on without a node, and for whom it then waits: the same under every launcher.

Which nodes may be lost at all is `plugins.may_be_lost`; how the loss of one is noticed is each launcher's own affair.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from paceline.results import store
from paceline.results.records import Status


def is_past_setup(run_dir: Path) -> bool:
    """Whether rank 0 has begun to ask: it then needs nothing more of other nodes than their replicas' answers."""
    first = next((position for position in store.read_progress(run_dir) if position.rank == 0), None)
    return first is not None and first.phase not in ("start", "setup")


def ranks_of(node: int, ranks: int) -> range:
    """ranks: of each node."""
    return range(node * ranks, (node + 1) * ranks)


def awaited_ranks(nodes: int, lost: Collection[int], ranks: int) -> set[int]:
    """Those that are still to speak for themselves."""
    return {rank for node in range(nodes) if node not in lost for rank in ranks_of(node, ranks)}


def have_spoken(run_dir: Path, awaited: Collection[int]) -> bool:
    """Starters of ranks (torchrun) would wait minutes for the lost ones when all awaited ranks have ended."""
    return set(awaited) <= {outcome.rank for outcome in store.read_outcomes(run_dir)}


def complain(run_dir: Path, ranks: Collection[int]) -> bool:
    """Whether one of them has said itself what went wrong. That fails the run, so there is no reason to go on."""
    return any(o.rank in ranks and o.status is not Status.OK for o in store.read_outcomes(run_dir))
