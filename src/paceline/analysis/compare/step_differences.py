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
from paceline.analysis.findings import EQUAL, WORSE, Comparison, StepDifference, StepTerm
from paceline.analysis.grouping import grouped
from paceline.analysis.statistics.intervals import student_t
from paceline.analysis.training import layouts, metrics
from paceline.analysis.training.bottleneck import milliseconds
from paceline.analysis.training.metrics import Cell
from paceline.errors import RequestError
from paceline.experiment.layout import DIMENSIONS
from paceline.results.records import RunRecord
from paceline.wording import factor, listed

METRIC = "step_time_s"
# Groups along these axes are explained: what splits the work differently, and what is computed again.
AXES = ("strategy", "checkpointing")
# At least this share of a difference must be in the terms that a sentence names, and no more may be unexplained.
LEAST_EXPLAINED = 0.5
# Terms that a sentence names: the largest ones of at least this share.
MOST_NAMED, LEAST_SHARE = 3, 0.05

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
_WHOLES = ((COMPUTE, tuple(CLASSES.values())), (EXPOSED, tuple(BY_DIMENSION.values())))
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
    steps = [(step.value, cell) for cell in compared.group.cells if (step := metrics.estimate(cell, METRIC))]
    cells = [cell for _, cell in sorted(steps, key=lambda pair: (pair[0], pair[1].id))]
    for cell in cells[1:]:
        comparison = judged.get(frozenset((cell.id, cells[0].id)))
        if comparison is not None and comparison.verdict != EQUAL:
            found = _difference(compared.group, cell, cells[0], comparison)
            yield from (found,) if found is not None else ()


def profiled_terms(record: RunRecord) -> Terms:
    """The terms of one launch, in seconds per profiled step; their sum is the profiled step of the rank that computes
    most. Empty unless every rank was profiled."""
    ranks = {}
    for rank, traces in grouped(record.traces, lambda trace: trace.rank).items():
        if steps := sum(trace.steps for trace in traces):
            ranks[rank] = {
                name: sum(math.nan if (value := getattr(trace, name)) is None else value for trace in traces) / steps
                for name in ("wall_s", "compute_s", "exposed_s", *CLASSES)
            }
    if len(ranks) < record.spec.topology.world_size:
        return {}
    busiest, own = max(ranks.items(), key=lambda item: item[1]["compute_s"])
    computed = fmean(each["compute_s"] for each in ranks.values())
    by_class = {words: fmean(each[name] for each in ranks.values()) for name, words in CLASSES.items()}
    by_dimension = layouts.exposed_by_dimension(record, busiest, own["exposed_s"])
    return {
        **({COMPUTE: computed} if math.isnan(sum(by_class.values())) else by_class),
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
                side[whole] = side.get(whole, 0.0) + sum(side.pop(name, 0.0) for name in parts)
    return [*found]


def _recomputed(cell: Cell, terms: Terms) -> Terms:
    """With the recomputed part of products and attention as a term of its own, by their FLOPs."""
    try:
        again = 1 - metrics.flops_per_token(cell) / metrics.flops_per_token(cell, recomputed=True)
    except RequestError:
        return terms
    apart = {name: terms[name] * again for name in _BY_FLOPS if name in terms}
    return {name: seconds - apart.get(name, 0.0) for name, seconds in terms.items()} | {RECOMPUTED: sum(apart.values())}


def _noise(sides: Sequence[tuple[Cell, int]]) -> float:
    """Half of the 95 % interval of a difference between the means of so few steps: by how measured steps scatter
    within launches, and launches among each other where several of both show it."""
    launches = [[window.seconds for window in cell.windows] for cell, _ in sides]
    variance = sum(
        fmean(float(np.var(seconds, ddof=1)) for seconds in own) / steps
        for own, (_, steps) in zip(launches, sides, strict=True)
    )
    if any(len(own) == 1 for own in launches):
        return student_t(math.inf) * math.sqrt(variance)
    variance += sum(float(np.var([seconds.mean() for seconds in own], ddof=1)) / len(own) for own in launches)
    return student_t(sum(len(own) - 1 for own in launches)) * math.sqrt(variance)


def _difference(group: Group, cell: Cell, other: Cell, comparison: Comparison) -> StepDifference | None:
    (terms, steps), (other_terms, other_steps) = _of_cell(cell), _of_cell(other)
    step, other_step = metrics.estimate(cell, METRIC), metrics.estimate(other, METRIC)
    if not terms or not other_terms or step is None or other_step is None or step.value <= other_step.value:
        return None
    if any(len(window.seconds) < 2 for window in (*cell.windows, *other.windows)):
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
        # What has the longer step is the slower one of a decided comparison, whichever side of it this is.
        verdict=WORSE if comparison.is_decided else comparison.verdict,
        launches=(len(cell.windows), len(other.windows)),
        peak_bytes=peaks[0],
        other_peak_bytes=peaks[1],
        text="",
        runs=cell.runs + other.runs,
    )
    return dataclasses.replace(result, text=sentences(result))


def _named(terms: Sequence[StepTerm], noise: float) -> list[StepTerm]:
    """The largest terms that the scatter of steps does not explain."""
    clear = [term for term in terms if abs(term.difference_s) > noise and abs(term.share_ratio) >= LEAST_SHARE]
    return clear[:MOST_NAMED]


# --- in words ---


def sentences(found: StepDifference) -> str:
    """How much longer the step took, and which terms of the profiled steps that is; or that they do not explain it."""
    ours, others = found.launches
    times = f"{milliseconds(found.step_s)} against {milliseconds(found.other_step_s)}"
    longer = f"step of {found.label} took {milliseconds(found.difference_s)} longer than one of {found.other_label}"
    if found.verdict == WORSE:
        start = "A"
    elif min(ours, others) == 1:
        start = f"No verdict ({'one launch each' if ours == others else 'one launch of one of them'}): a"
    else:
        start = (
            f"Inconclusive ({f'{ours} launches each' if ours == others else f'{ours} launches against {others}'}): a"
        )
    return f"{start} {longer} ({times}). {_explained(found) if found.is_explained else _unexplained(found)}"


def _explained(found: StepDifference) -> str:
    named = _named(found.terms, found.noise_s)
    parts = list[str]()
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
    scatter = f"the scatter of so few steps (±{milliseconds(found.noise_s)})"
    if found.difference_s <= found.noise_s:
        return f"That is within {scatter}, so no cause is named."
    differ = f"The profiled steps differ by {milliseconds(abs(found.profiled_s))}"
    ratio = found.profiled_s / found.difference_s
    much = f"{_percent(ratio)} of that" if ratio < 2 else f"{factor(ratio)} times as much"
    share = f", {much}" if ratio >= 0 else " the other way"
    if abs(found.unexplained_s) <= (1 - LEAST_EXPLAINED) * found.difference_s:
        few = f"the terms beyond {scatter} are less than half of it"
        why = f", but {few if _named(found.terms, found.noise_s) else f'no term is beyond {scatter}'}"
    else:
        why = ""
    return f"{differ}{share}{why}: the difference is not explained."


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.0f} %"
