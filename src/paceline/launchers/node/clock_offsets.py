"""Clock offsets of nodes, as intervals that certainly contain them.

A node's timestamp was taken between the earliest moment at which the node could have run and the moment the controller
received it. A clock counts as wrong only if the whole interval is beyond the tolerance. No decision about a run
compares times of two hosts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "clocks.json"
TOLERANCE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """A node's clock minus the controller's is between low_s and high_s."""

    node: int
    host: str
    low_s: float
    high_s: float

    def within(self, other: Clock) -> Clock:
        """Return the intersection. If there is none, because a clock was set in between, return this later one."""
        low, high = max(self.low_s, other.low_s), min(self.high_s, other.high_s)
        return Clock(node=self.node, host=self.host, low_s=low, high_s=high) if low <= high else self


def observed(node: int, host: str, node_time_s: float, earliest_s: float, latest_s: float) -> Clock:
    """Return the offset of a node that read node_time_s between earliest_s and latest_s of the controller's clock.

    >>> observed(1, "n1", 105.0, earliest_s=100.0, latest_s=101.0)
    Clock(node=1, host='n1', low_s=4.0, high_s=5.0)
    """
    return Clock(node=node, host=host, low_s=node_time_s - latest_s, high_s=node_time_s - earliest_s)


def note(run_dir: Path, clocks: Iterable[Clock]) -> None:
    """Write these offsets into the run directory, intersected with those already known."""
    known = {clock.node: clock for clock in read(run_dir)}
    for clock in clocks:
        known[clock.node] = clock.within(known[clock.node]) if clock.node in known else clock
    text = json.dumps([asdict(known[node]) for node in sorted(known)], indent=1)
    (run_dir / FILE).write_text(text + "\n", encoding="utf-8")


def read(run_dir: Path) -> list[Clock]:
    """Return the offsets of a run directory; none if the file is absent or invalid."""
    try:
        return [Clock(**entry) for entry in json.loads((run_dir / FILE).read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []


def warning(clock: Clock) -> str | None:
    """Return a sentence if the clock is certainly off by more than the tolerance."""
    if clock.low_s > TOLERANCE_S:
        return f"the clock of {clock.host} is at least {clock.low_s:.1f} s ahead of the controller's"
    if clock.high_s < -TOLERANCE_S:
        return f"the clock of {clock.host} is at least {-clock.high_s:.1f} s behind the controller's"
    return None
