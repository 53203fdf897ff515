"""A disk that only the nodes of a job reach: what each of them puts there, and how it comes home when a log was cut."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.experiment.spec import RunSpec
from paceline.launchers.node import log_transport


def enter(run_dir: Path, spec_text: str) -> None:
    """Bring the spec along: whoever comes first makes the folder, and all bring the same."""
    run_dir.mkdir(parents=True, exist_ok=True)
    # Every agent is process 1 of its pod: only the names of hosts tell them apart.
    beside = run_dir / f".spec.json.{socket.gethostname()}"
    beside.write_text(spec_text)
    beside.replace(run_dir / "spec.json")


def clear(run_dir: Path, own: Callable[[str], bool]) -> None:
    """Remove what an earlier attempt of this node left: its outcome must not be taken for this one's."""
    for stale in log_transport.carried(run_dir, own):
        stale.unlink()


def own_files(spec: RunSpec, node: int, host: str) -> Callable[[str], bool]:
    """Which files a node's ranks write: those that end in one of their numbers, and what the host says of itself."""
    count = spec.topology.processes_per_node
    ranks = range(node * count, (node + 1) * count)

    def is_own(name: str) -> bool:
        if name.startswith("machine-"):
            return name == f"machine-{host}.json"
        number = name.partition(".")[0].rpartition("-")[2]
        return number.isdigit() and int(number) in ranks

    return is_own


def hand_over(run_dir: Path, facts: Mapping[str, Any]) -> Iterator[str]:
    """Everything that a run left, as the lines of a single node."""
    sender = log_transport.Sender(run_dir, 0)
    yield sender.hello(facts)
    yield from sender.farewell(0)
