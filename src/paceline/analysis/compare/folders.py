"""Two result folders, cell by cell: what changed from the first to the second, and what else differs beside it.

Only equal work meets: the same cell, or cells that differ in CIRCUMSTANCES alone. A verdict needs an interval, and one
that so many comparisons at once do not show by chance.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from paceline.analysis.compare import fingerprint
from paceline.analysis.compare.comparable import ROW, Judged, Quantity, Subject, judge, rate_searched, subject_of
from paceline.analysis.findings import TIE, Between, Change, Differing, Lost
from paceline.analysis.served import equal_work, rate_search
from paceline.analysis.statistics.intervals import Ratio, launches_note, ratio_between
from paceline.analysis.statistics.verdict import verdict_of
from paceline.analysis.training import metrics
from paceline.errors import RequestError
from paceline.experiment.choices import Choice
from paceline.experiment.spec import RunSpec
from paceline.results.records import RunRecord, Status

MISSING, NOTHING_FOUND = "missing", "nothing found"
BELIEVABLE = "certified training, served models that may be believed, or the machine's own measures"
NEAREST_LOOKED_AT = 50
FAMILY_ERROR = 0.05
_UNUSED = ("training", "warmup", "steps")


@dataclass(frozen=True, slots=True)
class Pair:
    """One cell in both folders. unequal says why what was served is not the same work; None where it is."""

    first: Subject
    second: Subject
    differences: tuple[Differing, ...]
    unequal: str | None = None

    @property
    def same_runs(self) -> bool:
        a, b = ({(r.spec.run_id, r.started_at) for r in side.records} for side in (self.first, self.second))
        return a == b


@dataclass(frozen=True, slots=True)
class Found:
    """A quantity of a pair with its ratio B over A; None where no interval is supported, reason then says why."""

    pair: Pair
    first: Quantity
    second: Quantity
    ratio: Ratio | None
    reason: str


def compare_experiments(
    records_a: Sequence[RunRecord],
    records_b: Sequence[RunRecord],
    names: tuple[str, str] = ("A", "B"),
    across_devices: bool = False,
) -> Between:
    """B over A of every cell in both. Refuses, with the field that differs, other work and another kind of device."""
    a, b = judge(records_a), judge(records_b)
    matched = _match(a, b, across_devices)
    pairs = _pairs(a, b, matched)
    lost = _lost(a, b, matched)
    met = list(pairs.values())
    _refuse_other_devices(() if across_devices else met)
    if not met:
        _refuse_what_cannot_meet(a, b, matched, lost)
    shared = tuple(d for d in met[0].differences if all(d in p.differences for p in met)) if met else ()
    found = [f for pair in met for f in _quantities(pair)]
    changes = [_change(f, sum(f.ratio is not None for f in found), shared) for f in found]
    only_b = [cell for cell in b if cell not in matched.values()]
    return Between(
        first=names[0],
        second=names[1],
        changes=tuple(sorted(changes, key=_decided_first)),
        shared=shared,
        lost=lost,
        only_first=tuple(_label(runs) for cell, runs in a.items() if cell not in matched),
        only_second=tuple(_label(b[cell]) for cell in only_b),
        notes=(*_notes(a, met, changes), *_not_compared(a, b, matched, {*pairs, *(x.cell for x in lost)})),
    )


def _label(judged: Sequence[Judged]) -> str:
    return judged[0].label


def _decided_first(c: Change) -> tuple[int, float, str, str]:
    group = 2 if c.verdict is None else 1 if c.verdict == TIE else 0
    return group, -abs(math.log(c.ratio)), c.label, c.metric


# --- which cells meet ---

Side = Mapping[str, Sequence[Judged]]


def _match(a: Side, b: Side, across_devices: bool) -> dict[str, str]:
    """Cell of A -> cell of B: the same one, or the only two that differ in nothing but circumstances."""
    found = {cell: cell for cell in a if cell in b}
    left, right = (_by_work({c: side[c] for c in side if c not in found}, across_devices) for side in (a, b))
    for work, cells in left.items():
        if len(cells) == len(right.get(work, ())) == 1:
            found[cells[0]] = right[work][0]
    return {cell: found[cell] for cell in a if cell in found}


def _by_work(side: Side, across_devices: bool) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for cell, runs in side.items():
        work = json.dumps(_work_fields(runs[0].record.spec, across_devices), sort_keys=True)
        found.setdefault(work, []).append(cell)
    return found


def _work_fields(spec: RunSpec, across_devices: bool = False) -> dict[str, Any]:
    """The fields two cells must agree in to meet."""
    free = {*fingerprint.CIRCUMSTANCES, *(() if spec.is_trained else _UNUSED)}
    free |= {"topology.device"} if across_devices else set()
    # What serves is what is compared, as long as both did the same work (`served_work`).
    free |= set(equal_work.FREE) if spec.serving else set()
    fields = metrics.flat(spec)
    return {name: value for name, value in fields.items() if name not in free and name.partition(".")[0] not in free}


def _pairs(a: Side, b: Side, matched: Mapping[str, str]) -> dict[str, Pair]:
    """By the cell in A."""
    found = {}
    for cell, other in matched.items():
        first, second = subject_of(a[cell]), subject_of(b[other])
        if first and second:
            differing = fingerprint.differences(first.records, second.records)
            found[cell] = Pair(first, second, differing, _unequal(first, second))
    return found


def _unequal(first: Subject, second: Subject) -> str | None:
    """Why two served cells did not do the same work; training has its certificates."""
    if not first.spec.serving:
        return None
    reasons = equal_work.reasons(equal_work.checks(first.records, second.records))
    return f"not equal work: {'; '.join(reasons)}" if reasons else None


def _lost(a: Side, b: Side, matched: Mapping[str, str]) -> tuple[Lost, ...]:
    """Cells with an ok run in A and none in B, those of which every run was ok in A and not every one is in B, and
    searches that found a rate in A and none in B."""
    found = []
    for cell, runs in a.items():
        now = b[matched[cell]] if cell in matched else ()
        bad = [run for run in now if not run.ok]
        if (failed := _found_no_more(runs, now)) is not None:
            found.append(Lost(cell=cell, label=_label(runs), status=NOTHING_FOUND, reason=failed))
            continue
        # A cell that was flaky in A may be as flaky in B; one of which nothing is left has no such excuse.
        if not any(run.ok for run in runs) or (len(bad) < len(now) and not all(run.ok for run in runs)):
            continue
        if not now:
            found.append(Lost(cell=cell, label=_label(runs), status=MISSING, reason="no run of it stands in B"))
        elif bad:
            why = f"{len(bad)} of {len(now)} runs: {bad[0].reason or 'no reason was recorded'}"
            found.append(Lost(cell=cell, label=_label(runs), status=str(bad[0].status), reason=why))
    return tuple(found)


def _found_no_more(before: Sequence[Judged], after: Sequence[Judged]) -> str | None:
    """What the loads of a search say that finds a rate no more; None where it finds one, or never did."""
    ours, theirs = ([run.record for run in side if run.ok] for side in (before, after))
    if not ours or not theirs or rate_search.bracket(rate_searched(ours)) is None:
        return None
    found = rate_searched(theirs)
    if found is None:
        return "no load with a rate can be believed"
    return found.note if found.value is None else None


def _not_compared(a: Side, b: Side, matched: Mapping[str, str], told: Collection[str]) -> Iterable[str]:
    """Every other cell that is in both folders, with what became of it."""
    for cell, other in matched.items():
        if cell not in told and not a[cell][0].record.spec.traits.measures_memory:
            yield f"not compared: {_standing(a[cell], b[other])}"


def _standing(before: Sequence[Judged], after: Sequence[Judged]) -> str:
    """`ddp, tiny, 2 processes: ok in A, invalid in B (no reference run)`."""
    ended = []
    for side, runs in zip("AB", (before, after), strict=True):
        first = next((run for run in runs if run.ok), runs[0])
        reason = first.reason or (None if not first.ok or subject_of(runs) else "nothing of it can be compared")
        ended.append(f"{first.status} in {side}" + (f" ({reason})" if reason else ""))
    return f"{_label(before)}: {', '.join(ended)}"


def _refuse_other_devices(pairs: Iterable[Pair]) -> None:
    for pair in pairs:
        if pair.first.device != pair.second.device:
            raise RequestError(
                f"compare: the device of {pair.first.label} is {pair.first.device} in A and "
                f"{pair.second.device} in B; accepted are runs on the same kind of device, or --across-devices"
            )


def _refuse_what_cannot_meet(a: Side, b: Side, matched: Mapping[str, str], lost: Sequence[Lost]) -> None:
    """Says why no pair was found, unless that is the answer."""
    # A cell that broke down in B is an answer about it; one that merely lacks a counterpart or a proof is none.
    if any(one.status not in (MISSING, Status.INVALID) for one in lost):
        return
    for name, side in (("first", a), ("second", b)):
        if not any(subject_of(runs) for runs in side.values()):
            raise RequestError(_nothing_believable(name, side))
    if matched:
        told = next(_standing(a[cell], b[other]) for cell, other in matched.items())
        raise RequestError(
            f"compare: no cell can be compared; of one in both folders, {told}; accepted is {BELIEVABLE}"
        )
    raise RequestError(_nearest_difference(a, b))


def _nothing_believable(name: str, side: Side) -> str:
    reasons = (f" ({j.label}: {j.reason})" for runs in side.values() for j in runs if j.reason)
    return f"compare: the {name} folder holds no certified run{next(reasons, '')}; accepted is {BELIEVABLE}"


def _nearest_difference(a: Side, b: Side) -> str:
    """The sentence for two folders that share no cell: what differs in the pair that is most alike."""
    sides = ([_work_fields(runs[0].record.spec) for runs in side.values()][:NEAREST_LOOKED_AT] for side in (a, b))
    fields = min((_differing(x, y) for x, y in itertools.product(*sides)), key=len)
    named = "; ".join(f"{field} is {_told(left)} in A and {_told(right)} in B" for field, left, right in fields)
    return (
        f"compare: no cell is in both folders; in the nearest pair {named or 'only the cell differs'}; "
        "accepted are runs of equal work"
    )


def _told(value: Any) -> str:
    """As people write it: a choice is `zero:stage=2`."""
    return str(Choice(**value)) if isinstance(value, dict) and {*value} == {"name", "options"} else repr(value)


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(name, a.get(name), b.get(name)) for name in dict.fromkeys((*a, *b)) if a.get(name) != b.get(name)]


# --- one pair ---


def _quantities(pair: Pair) -> Iterable[Found]:
    same_memory = pair.first.spec.topology.device == pair.second.spec.topology.device
    for key, first in pair.first.quantities.items():
        second = pair.second.quantities.get(key)
        # Host memory against an allocator's is no ratio of anything.
        if second is None or (first.metric == "peak_memory_bytes" and not same_memory):
            continue
        if min(first.resampled.value, second.resampled.value) > 0:
            ratio, reason = (None, pair.unequal) if pair.unequal else _ratio(first, second)
            yield Found(pair, first, second, ratio, reason)


def _ratio(first: Quantity, second: Quantity) -> tuple[Ratio | None, str]:
    launches = first.resampled.launches, second.resampled.launches
    if first.bracket and second.bracket:
        between = rate_search.ratio(second.bracket, first.bracket)
        return between, rate_search.told_by(first.bracket, second.bracket)
    if first.subject == ROW and not first.tells_alone and min(launches) < 2:
        once = " and ".join(name for name, count in zip("AB", launches, strict=True) if count < 2)
        return None, f"launches were not repeated in {once}: iterations of one launch say nothing about the next"
    found = ratio_between([second.resampled.redrawn()], [first.resampled])
    if found is None:
        return None, _unbounded(first, second)
    return found, launches_note(min(launches), "answers" if first.tells_alone else "steps") or ""


def _unbounded(first: Quantity, second: Quantity) -> str:
    """`the data supports no interval in A and B: launches were not repeated`."""
    silent = [(name, q) for name, q in zip("AB", (first, second), strict=True) if q.resampled.deviations is None]
    if not silent:
        return "the data supports no interval of a ratio: a side drawn again reaches 0"
    reasons = dict.fromkeys(q.unbounded for _, q in silent)
    return f"the data supports no interval in {' and '.join(name for name, _ in silent)}: {'; '.join(reasons)}"


def _change(f: Found, family: int, shared: Sequence[Differing]) -> Change:
    ratio = f.second.resampled.value / f.first.resampled.value
    verdict, reason = _verdict(f, ratio, family)
    return Change(
        subject=f.first.subject,
        metric=f.first.metric,
        unit=f.first.unit,
        better=f.first.better,
        cell=f.pair.second.spec.cell,
        label=f.pair.second.label,
        row=f.first.row,
        first=f.first.resampled.value,
        second=f.second.resampled.value,
        ratio=ratio,
        low=f.ratio.low if f.ratio else None,
        high=f.ratio.high if f.ratio else None,
        detectable_ratio=f.ratio.detectable if f.ratio else None,
        verdict=verdict,
        reason=reason,
        differences=tuple(d for d in f.pair.differences if d not in shared),
        runs_first=f.pair.first.runs,
        runs_second=f.pair.second.runs,
    )


def _verdict(f: Found, ratio: float, family: int) -> tuple[str | None, str]:
    if f.pair.same_runs:
        return TIE, "the same runs stand in both folders"
    if f.ratio is None:
        return (TIE, "both are equal to the last digit") if ratio == 1 and not f.pair.unequal else (None, f.reason)
    verdict, reason = verdict_among(family, f.ratio, f.first.better)
    return verdict, "; ".join(filter(None, (reason, f.reason)))


def verdict_among(family: int, found: Ratio, better: str) -> tuple[str, str]:
    """The verdict about one of `family` comparisons: of sets of equal things not one in twenty may show any.

    Bonferroni's limit, which exceeds the detectable effect of a single comparison from ten comparisons on.
    """
    verdict, reason = verdict_of(found, better)
    chance = math.expm1(NormalDist().inv_cdf(1 - FAMILY_ERROR / 2 / family) * found.error)
    effect = max(found.value, 1 / found.value) - 1
    if verdict == TIE or effect >= chance:
        return verdict, reason
    return TIE, f"among {family} comparisons chance alone shows {chance:.1%}, and the effect is {effect:.1%}"


def _notes(a: Side, pairs: Sequence[Pair], changes: Sequence[Change]) -> Iterable[str]:
    if pairs and all(pair.same_runs for pair in pairs):
        yield "A and B hold the same runs"
    if any(len(s.records) == 1 for p in pairs if not p.same_runs for s in (p.first, p.second) if s.spec.is_certified):
        yield "launches were not repeated in every cell: intervals of such cells are of steps within one launch only"
    if any(len(s.records) == 1 for p in pairs if not p.same_runs for s in (p.first, p.second) if s.spec.serving):
        yield "launches were not repeated in every served cell: intervals of such cells are of requests of one launch"
    yield from (note for pair in pairs if pair.first.spec.serving for note in _loads_of_one(pair))
    if undecided := sum(c.verdict is None for c in changes):
        yield f"{undecided} of {len(changes)} comparisons have no verdict, because the data supports no interval"
    specs = [runs[0].record.spec for runs in a.values()]
    for name in sorted({spec.workload.name for spec in specs if spec.traits.measures_memory}):
        yield f"runs of the workload {name} are looked at for failures only"


def _loads_of_one(pair: Pair) -> Iterable[str]:
    """Loads that only one side has: a sweep by rates ends where replicas keep up no more."""
    ours, theirs = ({row for _, row in side.quantities if row is not None} for side in (pair.first, pair.second))
    for name, left in (("A", ours - theirs), ("B", theirs - ours)):
        if left:
            yield f"not compared: {', '.join(sorted(left))} of {pair.second.label}, believed in {name} alone"
