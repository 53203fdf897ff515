"""What compiling costs once and saves per step: the time of the first steps beside the speed of the later ones."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence

from paceline.analysis.compare.cells import Compared
from paceline.analysis.findings import BETTER, EQUAL, INCONCLUSIVE, WORSE, Comparison, CompileCost
from paceline.analysis.training import metrics
from paceline.analysis.training.metrics import Cell
from paceline.analysis.training.window import Window, step_table
from paceline.wording import speed_clause

AXIS, SPEED = "compile", "tokens_per_s"
_OPPOSITE = {BETTER: WORSE, WORSE: BETTER}


def analyse(compared: Iterable[Compared]) -> tuple[CompileCost, ...]:
    """One row per compiled cell that was compared with the same one without compilation."""
    return tuple(row for each in compared if each.group.axis == AXIS for row in _rows(each))


def _rows(compared: Compared) -> Iterator[CompileCost]:
    cells = compared.group.cells
    plain = next((cell for cell in cells if cell.spec.training.compilation is None), None)
    if plain is None:
        return
    for cell in (cell for cell in cells if cell is not plain):
        found = _cost(cell, plain, compared.comparisons)
        if found is not None:
            yield found


def _cost(cell: Cell, plain: Cell, comparisons: Sequence[Comparison]) -> CompileCost | None:
    pair, wanted = {cell.id, plain.id}, cell.spec.training.compilation
    speed = next((c for c in comparisons if c.metric == SPEED and {c.cell, c.other} == pair), None)
    step, other = (metrics.estimate(each, "step_time_s") for each in (cell, plain))
    if wanted is None or speed is None or step is None or other is None:
        return None
    usual = statistics.median(map(extra_s, plain.windows))
    times = [max(extra_s(window) - usual, 0.0) for window in cell.windows]
    ratio, verdict = speed.ratio, speed.verdict
    if speed.cell == plain.id:
        ratio, verdict = 1 / ratio, _OPPOSITE.get(verdict, verdict)
    saved = other.value - step.value
    after = math.ceil(max(times) / saved) if saved > 0 and verdict != EQUAL else None
    return CompileCost(
        cell=cell.id,
        other=plain.id,
        axes=cell.axes,
        mode=wanted.mode,
        scope=wanted.scope,
        compile_s=max(times),
        cached_s=min(times),
        launches=len(times),
        step_s=step.value,
        other_step_s=other.value,
        speed=ratio,
        verdict=verdict,
        pays_after_steps=after,
        text=sentence(wanted.mode, max(times), ratio, verdict, after),
        runs=tuple(window.run for each in (cell, plain) for window in each.windows),
    )


def extra_s(window: Window) -> float:
    """How much longer the steps before the measured window took, in all, than as many inside it."""
    if not window.measured:
        return 0.0
    table = step_table(window.record)
    slowest = dict(zip(table.steps, map(max, table.by_step("duration_s")), strict=True))
    usual = statistics.median(slowest[step] for step in window.measured)
    return float(sum(seconds - usual for step, seconds in slowest.items() if step < window.measured[0]))


def sentence(mode: str, compile_s: float, speed: float, verdict: str, after: int | None) -> str:
    """
    >>> sentence("default", 41.3, 1.3, BETTER, 212)
    'compile default takes 41.3 s, 30 % faster: it pays after 212 steps.'
    """
    pays = "it does not pay" if after is None else f"it pays after {after:,} steps"
    unsure = ", if that speed is real" if verdict == INCONCLUSIVE and after is not None else ""
    took = f"{compile_s:.3g} s"
    return f"compile {mode} takes {took}, {speed_clause(verdict, speed)}: {pays}{unsure}."
