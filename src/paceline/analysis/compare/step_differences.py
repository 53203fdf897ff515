"""Why a step of one layout takes longer than one of another: the terms of their profiled steps beside each other.

A profiled step is divided on the rank that computes most: it waits least for others. Its compute time is the mean over
ranks and what it computes beyond that mean. The rest is communication that nothing hides, and gaps in which nothing
runs. So the terms add up to the profiled step, and what they leave of the measured difference is unexplained.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean

import numpy as np

from paceline.analysis.compare.cells import Compared, Group
from paceline.analysis.findings import EQUAL, Comparison, StepDifference, StepTerm
from paceline.analysis.grouping import grouped
from paceline.analysis.training import layouts, metrics
from paceline.analysis.training.bottleneck import milliseconds
from paceline.analysis.training.metrics import Cell
from paceline.errors import RequestError
from paceline.experiment.layout import DIMENSIONS
from paceline.results.records import RunRecord
from paceline.wording import listed

METRIC = "step_time_s"
# Groups along these axes are explained: what splits the work differently, and what is computed again.
AXES = ("strategy", "checkpointing")
# At least this share of a difference must be in the terms that a sentence names, and no more may be unexplained.
LEAST_EXPLAINED = 0.5
# Terms that a sentence names: the largest ones of at least this share.
MOST_NAMED, LEAST_SHARE = 3, 0.05
NORMAL_95 = 1.96

COMPUTE, EXPOSED = "compute", "exposed communication"
IMBALANCE, GAPS, RECOMPUTED = "uneven compute of the ranks", "host gaps", "recomputation"
CLASSES: Mapping[str, str] = {
    "products_s": "matrix products",
    "attention_s": "attention",
    "dequantisation_s": "dequantisation",
    "copies_s": "copies",
    "elementwise_s": "other operations",
}
# A rank receives while it waits for another stage.
BY_DIMENSION: Mapping[str, str] = {
    **{name: f"{EXPOSED} ({words})" for name, words in DIMENSIONS.items()},
    "pp": "pipeline bubble and messages",
}
_WHOLES = ((COMPUTE, frozenset(CLASSES.values())), (EXPOSED, frozenset(BY_DIMENSION.values())))
# Computed with FLOPs that are counted, so the part that is computed again is known.
_BY_FLOPS = (CLASSES["products_s"], CLASSES["attention_s"])

# Seconds per profiled step by the name of the term.
Terms = Mapping[str, float]


def analyse(compared: Iterable[Compared]) -> tuple[StepDifference, ...]:
    """Each cell of a group against the one with the shortest step, the shortest first; none for cells without a
    profile, nor for steps that are equal."""
    return tuple(found for each in compared if each.group.axis in AXES for found in _of_group(each))


def _of_group(compared: Compared) -> Iterator[StepDifference]:
    judged = {frozenset((c.cell, c.other)): c for c in compared.comparisons if c.metric == METRIC}
    known = [(found.value, cell) for cell in compared.group.cells if (found := metrics.estimate(cell, METRIC))]
    (_, fastest), *others = sorted(known, key=lambda pair: (pair[0], pair[1].id)) or [(0.0, None)]
    for _, cell in others:
        comparison = judged.get(frozenset((cell.id, fastest.id))) if fastest else None
        if fastest and comparison is not None and comparison.verdict != EQUAL:
            found = _difference(compared.group, cell, fastest, comparison)
            yield from (found,) if found is not None else ()


def profiled_terms(record: RunRecord) -> Terms:
    """The terms of one launch, in seconds per profiled step; their sum is the profiled step of the rank that computes
    most. Empty unless every rank was profiled."""
    ranks = {}
    for rank, traces in grouped(record.traces, lambda trace: trace.rank).items():
        steps = sum(trace.steps for trace in traces)
        if steps:
            found = {n: [getattr(t, n) for t in traces] for n in ("wall_s", "compute_s", "exposed_s", *CLASSES)}
            ranks[rank] = {name: None if None in each else sum(each) / steps for name, each in found.items()}
    if len(ranks) < record.spec.topology.world_size:
        return {}
    busiest, own = max(ranks.items(), key=lambda item: item[1]["compute_s"])
    computed = fmean(each["compute_s"] for each in ranks.values())
    by_class = {words: [each[name] for each in ranks.values()] for name, words in CLASSES.items()}
    is_divided = not any(None in each for each in by_class.values())
    by_dimension = layouts.exposed_by_dimension(record, busiest, own["exposed_s"])
    return {
        **({words: fmean(each) for words, each in by_class.items()} if is_divided else {COMPUTE: computed}),
        IMBALANCE: own["compute_s"] - computed,
        **({BY_DIMENSION[name]: seconds for name, seconds in by_dimension} or {EXPOSED: own["exposed_s"]}),
        GAPS: own["wall_s"] - own["compute_s"] - own["exposed_s"],
    }


def _of_cell(cell: Cell) -> tuple[Terms, int]:
    """The mean over profiled launches, and how many steps were profiled."""
    launches = [(terms, w.record) for w in cell.windows if (terms := profiled_terms(w.record))]
    names = dict.fromkeys(name for terms, _ in launches for name in terms)
    steps = sum(trace.steps for _, record in launches for trace in record.traces if trace.rank == 0)
    return {name: fmean(terms.get(name, 0.0) for terms, _ in launches) for name in names}, steps


def _alike(sides: Sequence[Terms]) -> list[Terms]:
    """The same division for both: what one does not divide, the other does not either.

    >>> _alike([{"exposed communication": 3.0}, {"pipeline bubble and messages": 1.0, "host gaps": 2.0}])
    [{'exposed communication': 3.0}, {'host gaps': 2.0, 'exposed communication': 1.0}]
    """
    found = [dict(side) for side in sides]
    for whole, parts in _WHOLES:
        if any(side.get(whole) for side in found):
            for side in found:
                side[whole] = side.get(whole, 0.0) + sum(side.pop(name) for name in parts & side.keys())
    return list(found)


def _recomputed(cell: Cell, terms: Terms) -> Terms:
    """With the recomputed part of products and attention as a term of its own, by their FLOPs."""
    try:
        again = 1 - metrics.flops_per_token(cell) / metrics.flops_per_token(cell, recomputed=True)
    except RequestError:
        return terms
    apart = {name: terms[name] * again for name in _BY_FLOPS if name in terms}
    return {name: seconds - apart.get(name, 0.0) for name, seconds in terms.items()} | {
        RECOMPUTED: sum(apart.values())
    }


def _noise(sides: Sequence[tuple[Cell, int]]) -> float:
    """Half of the 95 % interval of a difference between means of so few steps, by the scatter of the measured ones."""
    return NORMAL_95 * math.sqrt(
        sum(float(np.var(seconds := cell.seconds(), ddof=min(1, len(seconds) - 1))) / steps for cell, steps in sides)
    )


def _difference(group: Group, cell: Cell, other: Cell, comparison: Comparison) -> StepDifference | None:
    (terms, steps), (other_terms, other_steps) = _of_cell(cell), _of_cell(other)
    step, other_step = metrics.estimate(cell, METRIC), metrics.estimate(other, METRIC)
    if not terms or not other_terms or step is None or other_step is None or step.value <= other_step.value:
        return None
    if cell.spec.training.checkpointing != other.spec.training.checkpointing:
        terms, other_terms = _recomputed(cell, terms), _recomputed(other, other_terms)
    terms, other_terms = _alike((terms, other_terms))
    difference = step.value - other_step.value
    found = [
        StepTerm(
            name=name,
            seconds=(own := terms.get(name, 0.0)),
            other_s=(others := other_terms.get(name, 0.0)),
            difference_s=own - others,
            share_ratio=(own - others) / difference,
        )
        for name in dict.fromkeys((*terms, *other_terms))
    ]
    found.sort(key=lambda term: -abs(term.difference_s))
    profiled, noise = sum(term.difference_s for term in found), _noise(((cell, steps), (other, other_steps)))
    named = _named(found, noise)
    peaks = [m.value if (m := metrics.estimate(each, "peak_memory_bytes")) else None for each in (cell, other)]
    is_explained = (
        difference > noise
        and abs(difference - profiled) <= (1 - LEAST_EXPLAINED) * difference
        and sum(term.difference_s for term in named) >= LEAST_EXPLAINED * difference
    )
    result = StepDifference(
        cell=cell.id,
        other=other.id,
        label=group.names[cell.id],
        other_label=group.names[other.id],
        group=group.title,
        group_key=group.key,
        step_s=step.value,
        other_step_s=other_step.value,
        difference_s=difference,
        profiled_s=profiled,
        noise_s=noise,
        terms=tuple(found),
        unexplained_s=difference - profiled,
        is_explained=is_explained,
        verdict=comparison.verdict,
        launches=(len(cell.windows), len(other.windows)),
        peak_bytes=peaks[0],
        other_peak_bytes=peaks[1],
        text="",
        runs=cell.runs + other.runs,
    )
    return dataclasses.replace(result, text=sentences(result, comparison.is_decided))


def _named(terms: Sequence[StepTerm], noise: float) -> list[StepTerm]:
    """The largest terms that the scatter of steps does not explain."""
    clear = [term for term in terms if abs(term.difference_s) > noise and abs(term.share_ratio) >= LEAST_SHARE]
    return clear[:MOST_NAMED]


# --- in words ---


def sentences(found: StepDifference, is_decided: bool) -> str:
    """How much longer the step took, and which terms of the profiled steps that is; or that they do not explain it."""
    ours, others = found.launches
    times = f"{milliseconds(found.step_s)} against {milliseconds(found.other_step_s)}"
    longer = f"step of {found.label} took {milliseconds(found.difference_s)} longer than one of {found.other_label}"
    if is_decided:
        start = "A"
    elif min(ours, others) == 1:
        start = f"No verdict ({'one launch each' if ours == others else 'one launch of one of them'}): a"
    else:
        start = f"Inconclusive ({ours} launches against {others}): a"
    return f"{start} {longer} ({times}). {_explained(found) if found.is_explained else _unexplained(found)}"


def _explained(found: StepDifference) -> str:
    named = _named(found.terms, found.noise_s)
    parts = []
    for term in named:
        share = _percent(abs(term.share_ratio)) + ("" if parts else " of the measured difference")
        less = " less" if term.difference_s < 0 else ""
        parts.append(f"{milliseconds(abs(term.difference_s))}{less} ({share}) in {term.name}")
    small = found.profiled_s - sum(term.difference_s for term in named)
    if abs(small) >= LEAST_SHARE * found.difference_s:
        parts.append(f"{milliseconds(abs(small))}{' less' if small < 0 else ''} in smaller terms")
    rest = f"{milliseconds(abs(found.unexplained_s))} ({_percent(abs(found.unexplained_s) / found.difference_s)})"
    end = f"{rest} remain unexplained" if found.unexplained_s >= 0 else f"that is {rest} more than was measured"
    return f"The profiled steps differ by {milliseconds(found.profiled_s)}: {listed(parts)}; {end}."


def _unexplained(found: StepDifference) -> str:
    start, scatter = "The profiled steps do not explain it", f"±{milliseconds(found.noise_s)}"
    if found.difference_s <= found.noise_s:
        return f"{start}: it is within the scatter of so few steps ({scatter})."
    if abs(found.unexplained_s) <= (1 - LEAST_EXPLAINED) * found.difference_s:
        return f"{start}: they differ by as much, but no term stands out of the scatter of so few steps ({scatter})."
    amount = milliseconds(abs(found.profiled_s))
    if found.profiled_s < 0:
        return f"{start}: there {found.other_label} took {amount} longer."
    return f"{start}: they differ by {amount}, {_percent(found.profiled_s / found.difference_s)} of it."


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.0f} %"
