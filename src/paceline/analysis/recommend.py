"""Winners by category, only where verdicts allow: whoever nobody beats is chosen, and several such are a tie.

Every sentence is built from measurements and comparisons of the report; nothing is known here about strategies beyond
one caveat about gloo.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from paceline.analysis import metrics
from paceline.analysis.compare import SPEED_METRICS, Compared, Group
from paceline.analysis.metrics import Cell
from paceline.analysis.scaling import METRIC as EFFICIENCY
from paceline.analysis.statistics import launches_note
from paceline.analysis.window import PHASES
from paceline.findings import BETTER, HIGHER, WORSE, Comparison, Recommendation, RunFinding

CATEGORIES: Mapping[str, str] = {
    "tokens_per_s": "highest throughput",
    "step_time_s": "shortest step",
    "peak_memory_bytes": "lowest memory",
    EFFICIENCY: "best scaling",
}
GLOO = "gloo's reduce_scatter moves as many bytes as its all_reduce: CPU timings overstate the cost of FSDP2 and ZeRO-3"
SHARDING = ("fsdp2", "zero:stage=3")
NOT_REPEATED = "launches were not repeated"


def recommend(compared: Sequence[Compared], runs: Sequence[RunFinding] = ()) -> list[Recommendation]:
    """One recommendation per group and category in which every pair of cells was compared."""
    found = (_recommendation(c.group, metric, c.comparisons, runs) for c in compared for metric in CATEGORIES)
    return [recommendation for recommendation in found if recommendation]


def _recommendation(
    group: Group, metric: str, comparisons: Sequence[Comparison], runs: Sequence[RunFinding]
) -> Recommendation | None:
    pairs = [c for c in comparisons if c.metric == metric]
    contestants = {c.cell for c in pairs} | {c.other for c in pairs}
    if not pairs or len(pairs) != len(contestants) * (len(contestants) - 1) // 2:
        return None
    beaten = {loser for c in pairs if (loser := _loser(c))}
    ranked = _by_value(contestants, pairs)
    best = [cell for cell in ranked if cell not in beaten]
    rest = [cell for cell in ranked if cell in beaten]
    cited = [c for c in pairs if not {c.cell, c.other} <= set(rest)]
    return Recommendation(
        category=CATEGORIES[metric],
        metric=metric,
        group=group.title,
        choose=tuple(group.names[cell] for cell in best),
        over=tuple(group.names[cell] for cell in rest),
        because=tuple(cited),
        text=_text(group, metric, best, rest, pairs),
        caveats=tuple(_caveats(group, metric, runs)),
    )


def _loser(c: Comparison) -> str | None:
    return {BETTER: c.other, WORSE: c.cell}.get(c.verdict)


def _by_value(cells: Iterable[str], pairs: Sequence[Comparison]) -> list[str]:
    """Best first, by the ratios against one cell; what is not told apart is still in some order."""
    anchor = pairs[0].cell
    value = {anchor: 1.0}
    for c in pairs:
        if c.cell == anchor:
            value[c.other] = 1 / c.ratio
        elif c.other == anchor:
            value[c.cell] = c.ratio
    return sorted(cells, key=lambda cell: (value[cell] if pairs[0].better != HIGHER else -value[cell], cell))


# --- words ---


def _text(group: Group, metric: str, best: Sequence[str], rest: Sequence[str], pairs: Sequence[Comparison]) -> str:
    names = [group.names[cell] for cell in best]
    if not rest:
        return f"Tie between {_listed(names)}: this data cannot tell them apart."
    told = [(c, cell) for cell in best for c in pairs if {c.cell, c.other} == {cell, rest[0]} and _loser(c)]
    versus, winner = told[0]
    head = f"Tie between {_listed(names)}. " if len(best) > 1 else ""
    why = _why(group, winner, rest[0]) if metric in (*SPEED_METRICS, EFFICIENCY) else ""
    return f"{head}{_margin(metric, group.names[winner], group.names[rest[0]], *_ratio_of(versus, winner))}{why}"


def _margin(metric: str, best: str, other: str, ratio: float, low: float, high: float) -> str:
    """How far the best is from the next, in the metric's own words and as many digits as the interval supports."""
    digits = min(4, max(1, -math.floor(math.log10(max(high - low, 1e-6) / 2))))
    interval = f"(95 % interval {low:.{digits}f} to {high:.{digits}f})"
    words = {
        "tokens_per_s": "{best} is {ratio} times as fast as {other}, the next best {interval}.",
        "step_time_s": "A step of {best} takes {ratio} times as long as one of {other}, the next best {interval}.",
        "peak_memory_bytes": "{best} needs {ratio} times the peak memory of {other}, the next best {interval}.",
        EFFICIENCY: "{best} scales {ratio} times as well as {other}, the next best {interval}.",
    }[metric]
    return words.format(best=best, other=other, ratio=f"{ratio:.{digits}f}", interval=interval)


def _ratio_of(c: Comparison, cell: str) -> tuple[float, float, float]:
    """The comparison told from `cell`'s side."""
    return (c.ratio, c.low, c.high) if c.cell == cell else (1 / c.ratio, 1 / c.high, 1 / c.low)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _why(group: Group, winner: str, other: str) -> str:
    """Wire bytes, exposed communication and the phase that differs most, as far as both sides measured them."""
    cells = {cell.id: cell for cell in group.cells}
    pair = cells[winner], cells[other]
    parts = [
        _contrast(pair, "wire_bytes_per_step", lambda v: f"{v / 1e6:.3g} MB", "on the wire per step"),
        _contrast(pair, "comm_exposed_ratio", lambda v: f"{v:.1%}", "of the time in exposed communication"),
        _largest_phase(pair),
    ]
    told = [part for part in parts if part]
    return (
        f" Measured beside it: {'; '.join(told)} ({group.names[winner]} against {group.names[other]})." if told else ""
    )


def _values(pair: tuple[Cell, Cell], metric: str) -> tuple[float, float] | None:
    a, b = (metrics.estimate(cell, metric) for cell in pair)
    return (a.value, b.value) if a and b else None


def _contrast(pair: tuple[Cell, Cell], metric: str, show: Callable[[float], str], words: str) -> str | None:
    found = _values(pair, metric)
    if found is None:
        return None
    a, b = map(show, found)
    return f"{a} against {b} {words}" if a != b else f"the same {a} {words}"


def _largest_phase(pair: tuple[Cell, Cell]) -> str | None:
    known = {phase: values for phase in PHASES if (values := _values(pair, phase))}
    if not known:
        return None
    phase = max(known, key=lambda p: abs(known[p][0] - known[p][1]))
    a, b = (f"{seconds * 1e3:.3g} ms" for seconds in known[phase])
    return f"the phase that differs most is {phase.removesuffix('_s').replace('_', ' ')}, {a} against {b}"


# --- caveats ---


def _caveats(group: Group, metric: str, runs: Sequence[RunFinding]) -> Iterable[str]:
    speed = metric != "peak_memory_bytes"
    fewest = min(len(cell.windows) for cell in group.cells)
    if fewest == 1:
        yield NOT_REPEATED
    elif note := launches_note(fewest):
        yield note
    if speed and group.axes.get("device") == "cpu" and group.axes.get("world_size") != 1 and _names_sharding(group):
        yield GLOO
    if speed and any(_neighbours(cell) for cell in group.cells):
        yield "other processes ran on the GPU"
    if left_out := _left_out(group, runs):
        yield f"not ranked: {_listed(left_out)}"


def _names_sharding(group: Group) -> bool:
    return any(str(cell.spec.strategy).startswith(SHARDING) for cell in group.cells)


def _neighbours(cell: Cell) -> bool:
    return any(o.evidence and o.evidence.neighbours for w in cell.windows for o in w.record.outcomes)


def _left_out(group: Group, runs: Sequence[RunFinding]) -> list[str]:
    """Cells that belong to the group by their axes but have no valid run, with how they ended."""
    ranked = {cell.id for cell in group.cells}
    members = [
        run
        for run in runs
        if not run.is_reference
        and run.status != "ok"
        and run.cell not in ranked
        and all(run.axes.get(name) == value for name, value in group.axes.items() if name != "scaling")
    ]
    return list(dict.fromkeys(f"{run.axes.get(group.axis)} ({run.status})" for run in members))
