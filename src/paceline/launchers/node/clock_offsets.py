"""How far the clocks of nodes are off, as far as that can be known: an interval, never a guess.

What a node says was said between the moment it could have begun to speak and the moment it was heard, by the clock of
the controller. A clock is called wrong only where the whole interval lies beyond the tolerance; nothing that decides
about a run compares times of two hosts.
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
    """A node's clock minus the controller's lies between low_s and high_s."""

    node: int
    host: str
    low_s: float
    high_s: float

    def within(self, other: Clock) -> Clock:
        """What both say. Two that contradict each other, as when a clock was set in between: the later one."""
        low, high = max(self.low_s, other.low_s), min(self.high_s, other.high_s)
        return Clock(node=self.node, host=self.host, low_s=low, high_s=high) if low <= high else self


def heard(node: int, host: str, said_s: float, earliest_s: float, latest_s: float) -> Clock:
    """said_s by the node's clock; spoken between earliest_s and latest_s by the controller's."""
    return Clock(node=node, host=host, low_s=said_s - latest_s, high_s=said_s - earliest_s)


def note(run_dir: Path, found: Iterable[Clock]) -> None:
    """Write down what is known now, together with what was known before."""
    known = {clock.node: clock for clock in read(run_dir)}
    for clock in found:
        known[clock.node] = clock.within(known[clock.node]) if clock.node in known else clock
    text = json.dumps([asdict(known[node]) for node in sorted(known)], indent=1)
    (run_dir / FILE).write_text(text + "\n")


def read(run_dir: Path) -> list[Clock]:
    """None known where the file is absent or nobody's of ours."""
    try:
        return [Clock(**entry) for entry in json.loads((run_dir / FILE).read_text())]
    except (OSError, ValueError, TypeError):
        return []


def warning(clock: Clock) -> str | None:
    """One sentence where the clock is surely off by more than the tolerance."""
    if clock.low_s > TOLERANCE_S:
        return f"the clock of {clock.host} is at least {clock.low_s:.1f} s ahead of the controller's"
    if clock.high_s < -TOLERANCE_S:
        return f"the clock of {clock.host} is at least {-clock.high_s:.1f} s behind the controller's"
    return None
