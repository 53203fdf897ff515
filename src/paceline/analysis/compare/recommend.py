"""Winners by category, only if verdicts allow: every cell that no other beats is chosen.

Every sentence is built from measurements and comparisons of the report. The only built-in knowledge about strategies is
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
    EQUAL,
    HIGHER,
    WORSE,
    Comparison,
    Cost,
    DesignOutcome,
    LeftOut,
    Recommendation,
    Report,
    RunFinding,
    offers_of,
)
from paceline.analysis.grouping import grouped
from paceline.analysis.statistics.intervals import launches_note
from paceline.analysis.statistics.verdict import ONE_LAUNCH
from paceline.analysis.training import layouts, metrics
from paceline.analysis.training.metrics import Cell, device_kind
from paceline.analysis.training.window import PHASES
from paceline.errors import Scalar
from paceline.wording import Scale, equal_sentence, format_parts, inconclusive_sentence, listed, margin_sentence

GIB = 2**30

CATEGORIES: Mapping[str, str] = {
    "tokens_per_s": "highest throughput",
    "step_time_s": "shortest step",
    "peak_memory_bytes": "lowest memory",
    EFFICIENCY: "best scaling",
}
SHARDING = ("fsdp2", "zero:stage=3")
NOT_REPEATED = "launches were not repeated"
COST, THROUGHPUT = "usd_per_mtok", "tokens_per_s"
# What a choice may depend on, as plural nouns for a sentence.
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
    ours = [r.axes for r in runs if r.status == "ok" and r.is_certified and not r.proves_only]
    measured = {model: _values(axes) for model, axes in grouped(ours, lambda axes: axes.get("model")).items()}
    measured[None] = _values(ours)
    found = (_recommendation(c.group, metric, c.comparisons, runs, measured) for c in compared for metric in CATEGORIES)
    return [recommendation for recommendation in found if recommendation]


# The measured values of each decisive axis, in order of appearance.
_Values = Mapping[str, Sequence[Scalar]]


def _values(axes: Sequence[Mapping[str, Scalar]]) -> _Values:
    return {name: [*dict.fromkeys(each.get(name) for each in axes)] for name in DECISIVE_AXES}


def beside_designs(found: Iterable[Recommendation], designs: Iterable[DesignOutcome]) -> tuple[Recommendation, ...]:
    """Without those between cells of one design: its ranked effects say the same."""
    planned = [frozenset(design.names) for design in designs]
    return tuple(r for r in found if not any({c for b in r.because for c in (b.cell, b.other)} <= p for p in planned))


def _recommendation(
    group: Group,
    metric: str,
    comparisons: Sequence[Comparison],
    runs: Sequence[RunFinding],
    measured: Mapping[Scalar, _Values],
) -> Recommendation | None:
    """measured: by model, and of all models as None."""
    pairs = [c for c in comparisons if c.metric == metric]
    contestants = {c.cell for c in pairs} | {c.other for c in pairs}
    if not pairs or len(pairs) != len(contestants) * (len(contestants) - 1) // 2:
        return None
    beaten = {loser for c in pairs if (loser := _loser(c))}
    # Best first, by the ratios against one cell; equal cells are still in some order.
    anchor = pairs[0].cell
    value = {anchor: 1.0}
    for c in pairs:
        if c.cell == anchor:
            value[c.other] = 1 / c.ratio
        elif c.other == anchor:
            value[c.cell] = c.ratio
    sign = 1 if pairs[0].better != HIGHER else -1
    ranked = sorted(contestants, key=lambda cell: (sign * value[cell], cell))
    best = [cell for cell in ranked if cell not in beaten]
    rest = [cell for cell in ranked if cell in beaten]
    cited = [c for c in pairs if not {c.cell, c.other} <= set(rest)]
    left_out = _left_out(group, runs)
    # Axes with a single measured value, for the group's model if it has one.
    model = group.axes.get("model")
    not_measured = []
    for name, noun in DECISIVE_AXES.items():
        values = measured.get(None if name == "model" else model, {}).get(name, ())
        if len(values) == 1 and name != group.axis:
            (only,) = values
            shown = ("on" if only else "off") if isinstance(only, bool) else only
            not_measured.append(f"{noun} other than {shown}")
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
        not_measured=tuple(not_measured),
        group_key=group.key,
    )


def _loser(c: Comparison) -> str | None:
    return {BETTER: c.other, WORSE: c.cell}.get(c.verdict)


# --- texts ---


def _text(group: Group, metric: str, best: Sequence[str], rest: Sequence[str], pairs: Sequence[Comparison]) -> str:
    leaders = _leaders([group.names[cell] for cell in best], [c for c in pairs if {c.cell, c.other} <= {*best}])
    if not rest:
        return f"{leaders}."
    decided = ((c, cell) for cell in best for c in pairs if {c.cell, c.other} == {cell, rest[0]} and _loser(c))
    versus, winner = next(decided)
    head = f"{leaders}. " if len(best) > 1 else ""
    why = _why(group, winner, rest[0]) if metric in (*SPEED_METRICS, EFFICIENCY) else ""
    margin = _margin(metric, group.names[winner], group.names[rest[0]], len(best) > 1, _ratio_of(versus, winner))
    return f"{head}{margin}{why}"


def _leaders(names: Sequence[str], pairs: Sequence[Comparison]) -> str:
    """What is known about several cells that no other beats."""
    if pairs and all(c.verdict == EQUAL for c in pairs):
        return equal_sentence(listed(names), ((c.low, c.high) for c in pairs))
    if any(c.launches == 1 for c in pairs):
        return f"No verdict on {listed(names)}: {ONE_LAUNCH}"
    widest = max(pairs, key=lambda c: c.detectable_ratio or 0.0, default=None)
    return inconclusive_sentence(listed(names), widest.detectable_ratio if widest else None)


def _margin(
    metric: str, best: str, other: str, is_tied: bool, ratio: tuple[float, float, float], counted: str = "token"
) -> str:
    """How far the best is from the next, or from the first one that it beats if it is not known to beat some."""
    rank = "best of the others" if is_tied else "next best"
    return f"{margin_sentence(metric, best, f'{other}, the {rank}', *ratio, counted=counted)}."


def _ratio_of(c: Comparison, cell: str) -> tuple[float, float, float]:
    """The ratio from the side of `cell`."""
    return (c.ratio, c.low, c.high) if c.cell == cell else (1 / c.ratio, 1 / c.high, 1 / c.low)


def _why(group: Group, winner: str, other: str) -> str:
    """Wire bytes, exposed communication and the phase with the largest difference, if both sides measured them."""
    cells = {cell.id: cell for cell in group.cells}
    pair = cells[winner], cells[other]
    parts = [
        _contrast(
            pair, "wire_bytes_per_step", lambda v: f"{format_parts(v / 1e6, None, None)[0]} MB", "on the wire per step"
        ),
        _contrast(pair, "comm_exposed_ratio", lambda v: f"{v:.1%}", "of the time in exposed communication"),
    ]
    phases = {phase: values for phase in PHASES if (values := _both(pair, phase))}
    if phases:
        phase = max(phases, key=lambda p: abs(phases[p][0] - phases[p][1]))
        a, b = (f"{format_parts(seconds * 1e3, None, None)[0]} ms" for seconds in phases[phase])
        parts.append(f"the largest difference is in {phase.removesuffix('_s').replace('_', ' ')}, {a} against {b}")
    parts += _layout_terms(pair, group.names)
    known = [part for part in parts if part]
    names = f"{group.names[winner]} against {group.names[other]}"
    return f" Also measured: {'; '.join(known)} ({names})." if known else ""


def _layout_terms(pair: tuple[Cell, Cell], names: Mapping[str, str]) -> list[str | None]:
    """For layouts: what each sends and exposes by mesh dimension, its bubble and imbalance, and the memory of both."""
    terms = {cell.id: layouts.terms([window.record for window in cell.windows]) for cell in pair}
    if not any(terms.values()):
        return []
    found = [f"{names[cell]}: {text}" for cell, text in terms.items() if text]
    peak = _contrast(pair, "peak_memory_bytes", lambda v: f"{format_parts(v / GIB, None, None)[0]} GiB", "at the peak")
    return [*found, peak]


def _both(pair: tuple[Cell, Cell], metric: str) -> tuple[float, float] | None:
    a, b = (metrics.estimate(cell, metric) for cell in pair)
    return (a.value, b.value) if a and b else None


def _contrast(pair: tuple[Cell, Cell], metric: str, show: Callable[[float], str], words: str) -> str | None:
    found = _both(pair, metric)
    if found is None or not any(found):
        return None
    a, b = map(show, found)
    return f"{a} against {b} {words}" if a != b else f"the same {a} {words}"


# --- caveats ---


def _caveats(group: Group, metric: str, left_out: Sequence[LeftOut]) -> Iterable[str]:
    speed = metric != "peak_memory_bytes"
    fewest = min(len(cell.windows) for cell in group.cells)
    if fewest == 1:
        yield NOT_REPEATED
    elif note := launches_note(fewest):
        yield note
    sharded = any(str(cell.spec.strategy).startswith(SHARDING) for cell in group.cells)
    if speed and sharded and group.axes.get("device") == "cpu" and group.axes.get("world_size") != 1:
        yield GLOO
    outcomes = [o for cell in group.cells for w in cell.windows for o in w.record.outcomes]
    if speed and any(o.evidence and o.evidence.neighbours for o in outcomes):
        yield "other processes ran on the GPU"
    # A choice by speed may be one of cooling or of a power cap.
    throttled = [f"{group.names[c.id]} {c.throttled_ratio:.0%}" for c in group.cells if c.throttled_ratio]
    if speed and throttled:
        yield f"share of steps with a throttled GPU: {listed(throttled)}"
    if left_out:
        yield f"not ranked: {listed([f'{cell.name} ({cell.status})' for cell in left_out])}"


def _left_out(group: Group, runs: Sequence[RunFinding]) -> tuple[LeftOut, ...]:
    """Cells that belong to the group by axes and device (if known) but have no valid run, and how they ended."""
    ranked, devices = {cell.id for cell in group.cells}, (None, device_kind(group.cells[0]))
    shared = [(name, value) for name, value in group.axes.items() if name != "scaling"]
    unranked = [run for run in runs if run.status != "ok" and not run.proves_only and run.cell not in ranked]
    here = [run for run in unranked if run.device_name in devices]
    ours = [run for run in here if all(run.axes.get(name) == value for name, value in shared)]
    by_end = grouped(ours, lambda run: (str(run.axes.get(group.axis)), run.status))
    return tuple(
        LeftOut(name=name, status=status, reason=ended[0].reason, runs=tuple(run.run for run in ended))
        for (name, status), ended in by_end.items()
    )


# --- cost ---


def by_cost(report: Report) -> tuple[Recommendation, ...]:
    """Recommendations by cost for groups whose cells all have the same lowest price per GPU hour.

    Cost per token is then price over throughput, so this is the same finding in another unit: it cites the comparisons
    of throughput. Groups with different prices get none.
    """
    leads = {offer.lead.cell: offer.lead for offer in offers_of(report.costs)}
    found = []
    for decided in report.recommendations:
        cells = {cell for c in decided.because for cell in (c.cell, c.other)}
        if decided.metric != THROUGHPUT or not cells <= leads.keys() or len({leads[c].price for c in cells}) != 1:
            continue
        text = _cost_text(decided, leads)
        found.append(dataclasses.replace(decided, category="lowest cost", metric=COST, text=text))
    return tuple(found)


def _cost_text(decided: Recommendation, leads: Mapping[str, Cost]) -> str:
    start = "With one price per GPU hour, cost follows throughput"
    versus = decided.decisive
    if versus is None:
        return f"{start}, which has no winner here."
    winner, other = (versus.other, versus.cell) if _loser(versus) == versus.cell else (versus.cell, versus.other)
    names = {versus.cell: versus.label, versus.other: versus.other_label}
    among = [c for c in decided.because if {c.label, c.other_label} <= {*decided.choose}]
    leaders = f"{_leaders(decided.choose, among)}. " if len(decided.choose) > 1 else ""
    lead, is_tied, ratio = leads[winner], len(decided.choose) > 1, _ratio_of(versus, other)
    margin = _margin(COST, names[winner], names[other], is_tied, ratio, lead.counted)
    amount, factor = lead.amount
    costs = (leads[cell].usd_per_mtok for cell in (winner, other))
    a, b = (format_parts(m.value, m.low, m.high, Scale("USD", factor))[0] for m in costs)
    at = f"{lead.price.name} ({lead.price.kind})"
    return f"{start}. {leaders}{margin} That is {a} against {b} USD per {amount} at {at}."
