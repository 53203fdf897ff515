"""Winners by category, only where verdicts allow: whoever nobody beats is chosen, and several such are a tie.

Every sentence is built from measurements and comparisons of the report; nothing is known here about strategies beyond
one caveat about gloo.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from paceline.analysis.compare.cells import SPEED_METRICS, Compared, Group
from paceline.analysis.compare.scaling import GLOO
from paceline.analysis.compare.scaling import METRIC as EFFICIENCY
from paceline.analysis.findings import (
    BETTER,
    HIGHER,
    WORSE,
    Comparison,
    Cost,
    DesignOutcome,
    LeftOut,
    Measurement,
    Recommendation,
    Report,
    RunFinding,
    offers_of,
)
from paceline.analysis.statistics.intervals import launches_note
from paceline.analysis.training import metrics
from paceline.analysis.training.metrics import Cell, device_kind
from paceline.analysis.training.window import PHASES
from paceline.errors import Scalar
from paceline.wording import format_parts, listed, ratio_words

CATEGORIES: Mapping[str, str] = {
    "tokens_per_s": "highest throughput",
    "step_time_s": "shortest step",
    "peak_memory_bytes": "lowest memory",
    EFFICIENCY: "best scaling",
}
SHARDING = ("fsdp2", "zero:stage=3")
NOT_REPEATED = "launches were not repeated"
COST, THROUGHPUT = "usd_per_mtok", "tokens_per_s"
# What a choice may depend on, in the words of a sentence.
DECISIVE_AXES: Mapping[str, str] = {
    "model": "models",
    "world_size": "world sizes",
    "precision": "precisions",
    "sequence_length": "sequence lengths",
    "micro_batch": "micro batches",
    "checkpointing": "checkpointing",
    "compile": "compilation",
}


def recommend(compared: Sequence[Compared], runs: Sequence[RunFinding] = ()) -> list[Recommendation]:
    """One recommendation per group and category in which every pair of cells was compared."""
    found = (_recommendation(c.group, metric, c.comparisons, runs) for c in compared for metric in CATEGORIES)
    return [recommendation for recommendation in found if recommendation]


def beside_designs(found: Iterable[Recommendation], designs: Iterable[DesignOutcome]) -> tuple[Recommendation, ...]:
    """Without those between cells of one design: its effects say the same, all of them together and ranked."""
    planned = [frozenset(design.names) for design in designs]
    return tuple(r for r in found if not any({c for b in r.because for c in (b.cell, b.other)} <= p for p in planned))


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
    left_out = _left_out(group, runs)
    return Recommendation(
        category=CATEGORIES[metric],
        metric=metric,
        group=group.title,
        choose=tuple(group.names[cell] for cell in best),
        over=tuple(group.names[cell] for cell in rest),
        because=tuple(cited),
        text=_text(group, metric, best, rest, pairs),
        caveats=tuple(_caveats(group, metric, left_out)),
        left_out=left_out,
        not_measured=_not_measured(group, runs),
        group_key=group.key,
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
        return f"Tie between {listed(names)}: this data cannot tell them apart."
    told = [(c, cell) for cell in best for c in pairs if {c.cell, c.other} == {cell, rest[0]} and _loser(c)]
    versus, winner = told[0]
    head = f"Tie between {listed(names)}. " if len(best) > 1 else ""
    why = _why(group, winner, rest[0]) if metric in (*SPEED_METRICS, EFFICIENCY) else ""
    return f"{head}{_margin(metric, group.names[winner], group.names[rest[0]], *_ratio_of(versus, winner))}{why}"


def _margin(metric: str, best: str, other: str, ratio: float, low: float, high: float) -> str:
    """How far the best is from the next, in the metric's own words and as many digits as the interval supports."""
    told, interval = ratio_words(ratio, low, high)
    words = {
        "tokens_per_s": "{best} is {ratio} times as fast as {other}, the next best{interval}.",
        "step_time_s": "A step of {best} takes {ratio} times as long as one of {other}, the next best{interval}.",
        "peak_memory_bytes": "{best} needs {ratio} times the peak memory of {other}, the next best{interval}.",
        COST: "A token of {best} costs {ratio} times as much as one of {other}, the next best{interval}.",
        EFFICIENCY: "{best} scales {ratio} times as well as {other}, the next best{interval}.",
    }[metric]
    return words.format(best=best, other=other, ratio=told, interval=interval)


def _ratio_of(c: Comparison, cell: str) -> tuple[float, float, float]:
    """The comparison told from `cell`'s side."""
    return (c.ratio, c.low, c.high) if c.cell == cell else (1 / c.ratio, 1 / c.high, 1 / c.low)


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


def _caveats(group: Group, metric: str, left_out: Sequence[LeftOut]) -> Iterable[str]:
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
    if speed and (words := _throttled(group)):
        yield words
    if left_out:
        yield f"not ranked: {listed([f'{cell.name} ({cell.status})' for cell in left_out])}"


def _names_sharding(group: Group) -> bool:
    return any(str(cell.spec.strategy).startswith(SHARDING) for cell in group.cells)


def _neighbours(cell: Cell) -> bool:
    return any(o.evidence and o.evidence.neighbours for w in cell.windows for o in w.record.outcomes)


def _throttled(group: Group) -> str | None:
    """Where GPUs were held back: a choice by speed may be one of cooling or of a power cap."""
    known = [(group.names[c.id], c.throttled_ratio) for c in group.cells if c.throttled_ratio]
    told = [f"{name} {ratio:.0%}" for name, ratio in known if ratio]
    return f"share of steps while a GPU was throttled: {listed(told)}" if told else None


def _left_out(group: Group, runs: Sequence[RunFinding]) -> tuple[LeftOut, ...]:
    """Cells that belong to the group by axes and device, if known, but have no valid run, with how they ended."""
    ranked, devices = {cell.id for cell in group.cells}, (None, device_kind(group.cells[0]))
    found: dict[tuple[str, str], list[RunFinding]] = {}
    for run in runs:
        alike = all(run.axes.get(name) == value for name, value in group.axes.items() if name != "scaling")
        if (
            alike
            and run.device_name in devices
            and run.status != "ok"
            and not run.is_reference
            and run.cell not in ranked
        ):
            found.setdefault((str(run.axes.get(group.axis)), run.status), []).append(run)
    return tuple(
        LeftOut(name=name, status=status, reason=ended[0].reason, runs=tuple(run.run for run in ended))
        for (name, status), ended in found.items()
    )


def _not_measured(group: Group, runs: Sequence[RunFinding]) -> tuple[str, ...]:
    """Axes of which the campaign measured one value only, for the group's model where it has one."""
    model = group.axes.get("model")
    ours = [r.axes for r in runs if r.status == "ok" and r.is_certified and not r.is_reference]
    same = [axes for axes in ours if model is None or axes.get("model") == model]
    found = []
    for name, words in DECISIVE_AXES.items():
        values = {axes.get(name) for axes in (ours if name == "model" else same)}
        if len(values) == 1 and name != group.axis:
            found.append(f"{words} other than {_word(values.pop())}")
    return tuple(found)


def _word(value: Scalar) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


# --- cost ---


def by_cost(report: Report) -> tuple[Recommendation, ...]:
    """What throughput decides, said in money, for groups whose cells all lead with one price per GPU hour.

    Cost per token is then price over throughput, so this is the same finding in another unit: it cites the comparisons
    of throughput and claims nothing beside them. Where prices differ within a group nothing is said.
    """
    leads = {offer.lead.cell: offer.lead for offer in offers_of(report.costs)}
    found = (_cost(r, leads) for r in report.recommendations if r.metric == THROUGHPUT)
    return tuple(r for r in found if r)


def _cost(decided: Recommendation, leads: Mapping[str, Cost]) -> Recommendation | None:
    cells = {cell for c in decided.because for cell in (c.cell, c.other)}
    if not cells <= leads.keys() or len({leads[cell].price for cell in cells}) != 1:
        return None
    return dataclasses.replace(decided, category="lowest cost", metric=COST, text=_cost_text(decided, leads))


def _cost_text(decided: Recommendation, leads: Mapping[str, Cost]) -> str:
    start = "At one price per GPU hour cost follows throughput"
    versus = decided.decisive
    if versus is None:
        return f"{start}: {listed(decided.choose)} tie here too."
    winner, other = (versus.other, versus.cell) if _loser(versus) == versus.cell else (versus.cell, versus.other)
    names = {versus.cell: versus.label, versus.other: versus.other_label}
    tie = f"Tie between {listed(decided.choose)}. " if len(decided.choose) > 1 else ""
    told = _margin(COST, names[winner], names[other], *_ratio_of(versus, other))
    a, b = (_usd(leads[cell].usd_per_mtok) for cell in (winner, other))
    price = leads[winner].price
    return f"{start}. {tie}{told} That is {a} against {b} USD per million tokens at {price.name} ({price.kind})."


def _usd(m: Measurement) -> str:
    return format_parts(m.value, m.low, m.high)[0]
