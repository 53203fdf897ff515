"""When a campaign has enough launches: its intervals are narrow enough, or its time is spent.

The rule is fixed before the first launch and stored in the plan. It looks at the widths of intervals and never at which
cell is ahead, so that it cannot wait for a difference to appear (`benchmarks/error_rates.py` has its error rates).
Launches are added in rounds: every cell that is not precise enough once, in shuffled order, so that drift cancels.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.analysis.compare.precision import Precision, launches_left
from paceline.analysis.statistics.verdict import FEWEST_LAUNCHES
from paceline.errors import RequestError
from paceline.experiment.spec import RunSpec
from paceline.wording import format_duration, short_percent

MOST_LAUNCHES = 30
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, slots=True)
class Stopping:
    """until: the half-width to reach, as a fraction. budget_s: the time that launches may take. usd_per_hour: price of
    one GPU, for estimates.
    """

    until: float | None = None
    budget_s: float | None = None
    usd_per_hour: float | None = None
    seed: int = 0

    @property
    def text(self) -> str:
        """The rule as a sentence; stored in the plan."""
        parts = []
        if self.until is not None:
            parts.append(f"every comparison is known to +-{self.until * 100:.3g} %, or after {MOST_LAUNCHES} launches")
        if self.budget_s is not None:
            parts.append(f"{format_duration(self.budget_s)} are over")
        return f"after {FEWEST_LAUNCHES} launches of each cell, cells are repeated until {' or until '.join(parts)}"

    def planned(self, specs: Sequence[RunSpec]) -> list[RunSpec]:
        """The runs with at least FEWEST_LAUNCHES of each cell."""
        done = max(spec.repeat for spec in specs) + 1
        first = [spec for spec in specs if spec.repeat == 0]
        return [*specs, *(spec for repeat in range(done, FEWEST_LAUNCHES) for spec in self._round(first, repeat))]

    def next_round(self, runs: Sequence[RunSpec], known: Mapping[str, Precision], spent_s: float) -> list[RunSpec]:
        """One more launch of every cell that needs it; with nothing but a budget, of those that gain most from it.

        Empty if all are precise enough, had MOST_LAUNCHES, or would take longer than is left. Cells without a valid
        launch are not repeated.
        """
        newest = {spec.cell: spec for spec in sorted(runs, key=lambda spec: spec.repeat) if spec.cell in known}
        cells = [cell for cell in newest if newest[cell].repeat + 1 < MOST_LAUNCHES or self.until is None]
        if self.until is not None:
            cells = [cell for cell in cells if known[cell].width > self.until]
        else:
            largest = max((known[cell].gain for cell in cells), default=0.0)
            cells = [cell for cell in cells if known[cell].gain >= largest / 2]
        following = [replace(newest[cell], repeat=newest[cell].repeat + 1) for cell in cells]
        random.Random(f"{self.seed} {len(runs)}").shuffle(following)
        return [spec for spec in following if self.affords(known[spec.cell].seconds, spent_s)]

    def affords(self, seconds: float, spent_s: float) -> bool:
        """Whether a launch of so many seconds ends within the budget."""
        return self.budget_s is None or spent_s + seconds <= self.budget_s

    def outlook(self, known: Mapping[str, Precision], spent_s: float, gpus: Mapping[str, int]) -> str:
        """How precise the campaign is, and what reaching the goal still takes; gpus counts those of each cell."""
        if not known:
            return "no cell has a valid launch"
        launches, width = sum(own.launches for own in known.values()), max(own.width for own in known.values())
        reached = "no interval yet" if math.isinf(width) else f"the widest interval is +-{short_percent(width)}"
        text = f"after {launches} launch{'' if launches == 1 else 'es'}, {reached}"
        if self.until is None:
            return f"{text}; {format_duration(max(0.0, (self.budget_s or 0.0) - spent_s))} left"
        left = launches_left(known, self.until, MOST_LAUNCHES)
        if not left:
            return f"{text}, as asked for"
        seconds = sum(known[cell].seconds * count for cell, count in left.items())
        text += f", asked for +-{self.until * 100:.3g} %: about {sum(left.values())} more launches"
        text += f", {format_duration(seconds)}"
        if self.usd_per_hour is not None:
            hours = sum(known[cell].seconds * count * gpus.get(cell, 1) for cell, count in left.items()) / 3600
            text += f", {hours * self.usd_per_hour:.2g} USD"
        if self.budget_s is not None:
            text += f"; {format_duration(max(0.0, self.budget_s - spent_s))} left"
        return text

    def _round(self, cells: Sequence[RunSpec], repeat: int) -> list[RunSpec]:
        turn = [replace(spec, repeat=repeat) for spec in cells]
        random.Random(f"{self.seed} {repeat}").shuffle(turn)
        return turn


def parse_until(text: str) -> float:
    """`2%` as 0.02; RequestError for anything else.

    >>> parse_until("2%"), parse_until("0.5 %")
    (0.02, 0.005)
    """
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)\s*%", text.strip(), re.ASCII)
    value = float(match[1]) / 100 if match else 0.0
    if not 0 < value < 1:
        raise RequestError(f"--until: got {text!r}, expected percent above 0 and under 100, such as 2%.")
    return value


def parse_budget(text: str, where: str = "--time-budget") -> float:
    """`90s`, `10m`, `1.5h` or `3d` in seconds; RequestError for anything else.

    >>> parse_budget("10m")
    600.0
    """
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)\s*([smhd])", text.strip().lower(), re.ASCII)
    value = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if value <= 0:
        raise RequestError(f"{where}: got {text!r}, expected a time such as 90s, 10m, 2h or 3d.")
    return value
