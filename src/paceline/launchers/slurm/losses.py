"""Nodes of a job that ended before the others, by srun's own words in the log of the run.

Only jobs of served replicas are asked about: Slurm is told to let those go on (`--no-kill`), so it is the controller
that ends one which nobody can go on with. All is read from the run folder, so that a later controller knows it too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.launchers._losses import is_past_setup, ranks_of, reported_failure
from paceline.results import store
from paceline.results.records import Status

# What the script says before it starts the agents, with Slurm's list of its nodes behind it.
BEGIN = "paceline: ranks begin on "
_NODES = re.compile(rf"^{BEGIN}(\S+)$", re.MULTILINE)
# Tasks are numbered as the nodes are, one on each; those that ended alike are told of in one line. What a rank has not
# ended by a line break may stand before.
_TASKS = re.compile(r"\bsrun: error: \S+: tasks? ([\d,-]+): ")
_NODE = re.compile(r"\bsrun: error: Node failure on (\S+)")


@dataclass(frozen=True, slots=True)
class Losses:
    """Nodes by their numbers. spared: the job goes on without them. fatal: it cannot. vanished: those of the fatal ones
    that Slurm itself has lost."""

    spared: tuple[int, ...] = ()
    fatal: tuple[int, ...] = ()
    vanished: tuple[int, ...] = ()


def read(handle: Mapping[str, Any], hosts: Callable[[str], Sequence[str]]) -> Losses:
    """hosts: the names in Slurm's own list of nodes. A node whose ranks all ended well is no loss, however its agent
    ended: it may have been asked to. Once the job cannot go on, all are ended, and none is said to be spared."""
    run_dir, ranks = Path(handle["run_dir"]), int(handle["ranks"])
    ended, vanished = _told(run_dir / "log.txt", hosts)
    well = {outcome.rank for outcome in store.read_outcomes(run_dir) if outcome.status is Status.OK}
    fallen = [node for node in sorted(ended | vanished) if not well.issuperset(ranks_of(node, ranks))]
    goes_on = bool(fallen) and is_past_setup(run_dir)
    expendable = [node for node in fallen if goes_on and node in handle["expendable"]]
    spared = [node for node in expendable if not reported_failure(run_dir, ranks_of(node, ranks))]
    fatal = [node for node in fallen if node not in spared]
    return Losses(() if fatal else tuple(spared), tuple(fatal), tuple(node for node in fatal if node in vanished))


def _told(log: Path, hosts: Callable[[str], Sequence[str]]) -> tuple[set[int], set[int]]:
    """Nodes whose agents ended badly, and nodes that Slurm has lost. What stands before the last beginning was said by
    the user's own steps, or of an attempt before."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    begun = list(_NODES.finditer(text))
    if not begun:
        return set(), set()
    said = text[begun[-1].end() :]
    ended = {number for found in _TASKS.findall(said) for number in _numbers(found)}
    names = set(_NODE.findall(said))
    order = hosts(begun[-1][1]) if names else ()
    return ended, {number for number, name in enumerate(order) if name in names}


def _numbers(listed: str) -> list[int]:
    """`1,3-5` as srun writes it."""
    found: list[int] = []
    for part in filter(None, listed.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
