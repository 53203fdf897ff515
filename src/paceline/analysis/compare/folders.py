"""Two result folders, compared cell by cell: what changed from the first to the second, and what else differs.

Only equal work is compared: the same cell, or cells that differ in CIRCUMSTANCES alone. A verdict needs an interval and
is corrected for multiple comparisons.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.analysis.compare import fingerprint
from paceline.analysis.compare.comparable import Judged, Quantity, Subject, judge, rate_searched, subject_of
from paceline.analysis.findings import BETTER, CERTIFIED, DIFFERENT, EQUAL, WORSE, Between, Change, Differing, Lost
from paceline.analysis.findings.compare import NOT_EQUAL_WORK
from paceline.analysis.grouping import grouped
from paceline.analysis.served import equal_work, rate_search
from paceline.analysis.statistics.intervals import Ratio, launches_note, ratio_between
from paceline.analysis.statistics.verdict import BETWEEN_DAYS, ONE_LAUNCH, verdict_of
from paceline.analysis.training import metrics, trust
from paceline.analysis.training.certificate.observed import observe
from paceline.analysis.training.equality import Grade, grade_between
from paceline.errors import RequestError
from paceline.experiment.choices import Choice
from paceline.experiment.serving import PERCENTILE
from paceline.experiment.spec import RunSpec
from paceline.results.records import RunRecord, Status
from paceline.serving import early_stopping

MISSING, NOTHING_FOUND = "missing", "nothing found"
ACCEPTED = "certified training, valid inference runs, or machine measurements"
NEAREST_LOOKED_AT = 50
MOST_NAMED = 3
# Trust lights that a reader must know of, the worst first.
DISTURBED = ("red", "amber")
_UNUSED = ("training", "warmup", "steps")


@dataclass(frozen=True, slots=True)
class Pair:
    """One cell in both folders. unequal says why the work differs; None if it is equal. grade: of foreign scripts."""

    first: Subject
    second: Subject
    differences: tuple[Differing, ...]
    unequal: str | None = None
    grade: Grade | None = None

    @property
    def level(self) -> str | None:
        """How equal the work of foreign scripts is, or on what either side was proved."""
        if self.grade is not None:
            return self.grade.text
        levels = [side.level or CERTIFIED for side in (self.first, self.second)]
        if levels == [CERTIFIED, CERTIFIED]:
            return None
        return levels[0] if levels[0] == levels[1] else f"A {levels[0]}, B {levels[1]}"

    @property
    def same_runs(self) -> bool:
        a, b = ({(r.spec.run_id, r.started_at) for r in side.records} for side in (self.first, self.second))
        return a == b


@dataclass(frozen=True, slots=True)
class Found:
    """A quantity of a pair with its ratio B over A; None if no interval is supported (reason says why)."""

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
    between_days: float = BETWEEN_DAYS,
) -> Between:
    """B over A of every cell in both. Refuses different work and another kind of device, naming the field that
    differs. between_days is the spread to assume between launches of different days or nodes.
    """
    a, b = judge(records_a), judge(records_b)
    matched = _match(a, b, across_devices)
    pairs = {}
    for cell, other in matched.items():
        first, second = subject_of(a[cell]), subject_of(b[other])
        if first and second:
            differing = fingerprint.differences(first.records, second.records)
            # Training has its certificates; inference must show that both did the same work.
            checks = equal_work.checks(first.records, second.records) if first.spec.serving else ()
            reasons = equal_work.reasons(checks)
            unequal = f"{NOT_EQUAL_WORK}{'; '.join(reasons)}" if reasons else None
            grade = None
            if first.spec.script and second.spec.script:
                sides = ([observe(record) for record in side.records] for side in (first, second))
                grade = grade_between(*sides)
                unequal = f"{NOT_EQUAL_WORK}{grade.text}" if grade.level == DIFFERENT else None
            pairs[cell] = Pair(first, second, differing, unequal, grade)
    lost = _lost(a, b, matched)
    met = list(pairs.values())
    for pair in () if across_devices else met:
        if pair.first.device != pair.second.device:
            raise RequestError(
                f"compare: the device of {pair.first.label} is {pair.first.device} in A and {pair.second.device} in B, "
                "expected the same kind of device. Use --across-devices to compare them anyway."
            )
    if not met:
        _require_pair(a, b, matched, lost)
    shared = tuple(d for d in met[0].differences if all(d in p.differences for p in met)) if met else ()
    found = [f for pair in met for f in _quantities(pair, between_days)]
    families = Counter(_family(f) for f in found if f.ratio is not None)
    changes = [_change(f, max(families[_family(f)], 1), shared) for f in found]

    def order(c: Change) -> tuple[int, float, str, str]:
        group = 2 if c.verdict is None else 0 if c.verdict in (BETTER, WORSE) else 1
        return group, -abs(math.log(c.ratio)), c.label, c.metric

    rest = [
        f"not compared: {_how_ended(a[cell], b[other])}"
        for cell, other in matched.items()
        if cell not in pairs
        and cell not in {x.cell for x in lost}
        and not a[cell][0].record.spec.traits.measures_memory
    ]
    return Between(
        first=names[0],
        second=names[1],
        changes=tuple(sorted(changes, key=order)),
        shared=shared,
        lost=lost,
        only_first=tuple(runs[0].label for cell, runs in a.items() if cell not in matched),
        only_second=tuple(runs[0].label for cell, runs in b.items() if cell not in matched.values()),
        notes=(*_notes(a, met, changes), *rest),
        occasions=_occasions_text(met, between_days),
        disturbed=_disturbed_text(met),
    )


# --- which cells are compared ---

Side = Mapping[str, Sequence[Judged]]


def _match(a: Side, b: Side, across_devices: bool) -> dict[str, str]:
    """Cell of A -> cell of B: the same one, or the only two that differ in nothing but circumstances."""
    found = {cell: cell for cell in a if cell in b}

    def by_work(side: Side) -> dict[str, list[str]]:
        fields = {cell: _work_fields(side[cell][0].record.spec, across_devices) for cell in side if cell not in found}
        return grouped(fields, lambda cell: json.dumps(fields[cell], sort_keys=True))

    left, right = by_work(a), by_work(b)
    for work, cells in left.items():
        if len(cells) == len(right.get(work, ())) == 1:
            found[cells[0]] = right[work][0]
    return {cell: found[cell] for cell in a if cell in found}


def _work_fields(spec: RunSpec, across_devices: bool = False) -> dict[str, Any]:
    """The fields in which two cells must agree to be compared."""
    free = {*fingerprint.CIRCUMSTANCES, *(() if spec.is_trained else _UNUSED)}
    free |= {"topology.device"} if across_devices else set()
    # The engine is what is compared, if both did the same work (`equal_work`).
    free |= set(equal_work.FREE) if spec.serving else set()
    fields = metrics.flat(spec)
    return {name: value for name, value in fields.items() if name not in free and name.partition(".")[0] not in free}


def _lost(a: Side, b: Side, matched: Mapping[str, str]) -> tuple[Lost, ...]:
    """Cells with an ok run in A and none in B, cells with only ok runs in A and a failed one in B, and searches that
    found a rate in A and none in B.
    """
    found = []
    for cell, runs in a.items():
        now = b[matched[cell]] if cell in matched else ()
        bad = [run for run in now if not run.ok]
        # A cell that was flaky in A may be as flaky in B, but not one without any ok run.
        flaky = not any(run.ok for run in runs) or (len(bad) < len(now) and not all(run.ok for run in runs))
        if (failed := _search_failed(runs, now)) is not None:
            status, reason = NOTHING_FOUND, failed
        elif flaky or (now and not bad):
            continue
        elif not now:
            status, reason = MISSING, "B has no run of it"
        else:
            status = str(bad[0].status)
            reason = f"{len(bad)} of {len(now)} runs: {bad[0].reason or 'no reason was recorded'}"
        found.append(Lost(cell=cell, label=runs[0].label, status=status, reason=reason))
    return tuple(found)


def _search_failed(before: Sequence[Judged], after: Sequence[Judged]) -> str | None:
    """Why a search that found a rate before finds none now, by its loads; None if it finds one, or never did."""
    ours, theirs = ([run.record for run in side if run.ok] for side in (before, after))
    if not ours or not theirs or rate_search.bracket(rate_searched(ours)) is None:
        return None
    found = rate_searched(theirs)
    if found is None:
        return "no load with a rate is valid"
    return found.note if found.value is None else None


def _how_ended(before: Sequence[Judged], after: Sequence[Judged]) -> str:
    """`ddp, tiny, 2 processes: ok in A, invalid in B (no reference run)`."""
    ended = []
    for side, runs in zip("AB", (before, after), strict=True):
        first = next((run for run in runs if run.ok), runs[0])
        reason = first.reason or (None if not first.ok or subject_of(runs) else "it has nothing to compare")
        ended.append(f"{first.status} in {side}" + (f" ({reason})" if reason else ""))
    return f"{before[0].label}: {', '.join(ended)}"


def _require_pair(a: Side, b: Side, matched: Mapping[str, str], lost: Sequence[Lost]) -> None:
    """Raise an error that says why there is no pair, unless failures in B are the answer."""
    # A cell that failed in B is a result; one that merely lacks a counterpart or a proof is not.
    if any(one.status not in (MISSING, Status.INVALID) for one in lost):
        return
    for name, side in (("first", a), ("second", b)):
        if not any(subject_of(runs) for runs in side.values()):
            reasons = (f" ({j.label}: {j.reason})" for runs in side.values() for j in runs if j.reason)
            raise RequestError(f"compare: the {name} folder has no valid run{next(reasons, '')}, expected {ACCEPTED}.")
    if matched:
        first = next(_how_ended(a[cell], b[other]) for cell, other in matched.items())
        raise RequestError(f"compare: no cell can be compared ({first}), expected {ACCEPTED}.")
    # No cell in common: name what differs in the most similar pair.
    sides = ([_work_fields(runs[0].record.spec) for runs in side.values()][:NEAREST_LOOKED_AT] for side in (a, b))
    fields = min(
        (
            [(name, x.get(name), y.get(name)) for name in dict.fromkeys((*x, *y)) if x.get(name) != y.get(name)]
            for x, y in itertools.product(*sides)
        ),
        key=len,
    )
    named = "; ".join(f"{field} is {_shown(left)} in A and {_shown(right)} in B" for field, left, right in fields)
    raise RequestError(
        f"compare: no cell is in both folders, expected runs of equal work. In the most similar pair, "
        f"{named or 'only the cell differs'}."
    )


def _shown(value: Any) -> str:
    """A value as people write it: a choice is `zero:stage=2`."""
    return str(Choice(**value)) if isinstance(value, dict) and {*value} == {"name", "options"} else repr(value)


# --- one pair ---


def _quantities(pair: Pair, between_days: float) -> Iterable[Found]:
    same_memory = pair.first.spec.topology.device == pair.second.spec.topology.device
    for key, first in pair.first.quantities.items():
        second = pair.second.quantities.get(key)
        # Host memory over allocator memory is not a meaningful ratio.
        if second is None or (first.metric == "peak_memory_bytes" and not same_memory):
            continue
        if min(first.resampled.value, second.resampled.value) > 0:
            ratio, reason = (None, pair.unequal) if pair.unequal else _ratio(first, second)
            # Allocated memory does not depend on the day.
            if ratio is not None and first.metric != "peak_memory_bytes":
                ratio = fingerprint.allow_for_days(ratio, pair.first.records, pair.second.records, between_days)
            yield Found(pair, first, second, ratio, reason)


def _ratio(first: Quantity, second: Quantity) -> tuple[Ratio | None, str]:
    launches = first.resampled.launches, second.resampled.launches
    if min(launches) < 2:
        once = " and ".join(name for name, count in zip("AB", launches, strict=True) if count < 2)
        return None, f"launches were not repeated in {once}: one launch cannot show how much launches differ"
    if first.bracket and second.bracket:
        between = rate_search.ratio(second.bracket, first.bracket)
        return between, rate_search.interval_text(first.bracket, second.bracket)
    found = ratio_between([second.resampled], [first.resampled])
    if found is not None:
        return found, launches_note(min(launches)) or ""
    silent = [(name, q) for name, q in zip("AB", (first, second), strict=True) if q.resampled.error is None]
    if not silent:
        return None, "the data supports no interval of a ratio: a resampled side reaches 0"
    reasons = dict.fromkeys(q.unbounded for _, q in silent)
    return None, f"the data supports no interval in {' and '.join(name for name, _ in silent)}: {'; '.join(reasons)}"


def _family(f: Found) -> str:
    """Comparisons that are judged together: step time repeats what throughput shows, and memory is another question."""
    return f.first.metric if f.first.metric in ("step_time_s", "peak_memory_bytes") else "speed"


def _change(f: Found, family: int, shared: Sequence[Differing]) -> Change:
    ratio = f.second.resampled.value / f.first.resampled.value
    verdict: str | None
    if f.pair.same_runs:
        verdict, reason = EQUAL, "both folders contain the same runs"
    elif f.ratio is not None:
        verdict, reason = verdict_of(f.ratio, f.first.better, family)
        reason = "; ".join(filter(None, (reason, f.reason)))
    elif ratio == 1 and not f.pair.unequal:
        verdict, reason = EQUAL, "both are equal to the last digit"
    else:
        verdict, reason = None, f.reason
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
        detectable_ratio=f.ratio.detectable(family) if f.ratio else None,
        verdict=verdict,
        reason=reason,
        differences=tuple(d for d in f.pair.differences if d not in shared),
        level=f.pair.level,
        runs_first=f.pair.first.runs,
        runs_second=f.pair.second.runs,
    )


def _occasions_text(pairs: Sequence[Pair], between_days: float) -> str | None:
    """`B ran on another day (2026-11-02, A on 2026-11-01): ...`; None if every cell ran on the same days and nodes."""
    pairs = [p for p in pairs if not p.same_runs and fingerprint.apart(p.first.records, p.second.records)]
    if not pairs:
        return None
    first, second = (
        {where for side in sides for where in fingerprint.occasions(side.records)}
        for sides in ([p.first for p in pairs], [p.second for p in pairs])
    )
    parts = []
    for index, noun in enumerate(("day", "node")):
        a, b = (sorted({where[index] for where in side if where[index]}) for side in (first, second))
        if a != b and a and b:
            shown = (", ".join(names) if len(names) < MOST_NAMED else f"{len(names)} {noun}s" for names in (b, a))
            parts.append(f"another {noun} ({', A on '.join(shown)})")
    allowance = f"every interval of a speed allows for {between_days * 100:.2g} % between them"
    return f"B ran on {' and '.join(parts) or 'other days or nodes'}: {allowance}"


def _too_few(pair: Pair) -> Iterable[str]:
    """Tails that are left out because a side has too few requests for them, though enough for the median."""
    first, second = pair.first.quantities, pair.second.quantities
    for tail, median in (("ttft_p99_s", "ttft_p50_s"), ("tpot_p99_s", "tpot_p50_s")):
        rows = [row for metric, row in first if metric == median and (metric, row) in second]
        if any((tail, row) not in side for row in rows for side in (first, second)):
            needed = early_stopping.requests_for(PERCENTILE)
            yield f"not compared: {tail} of {pair.second.label}, which needs {needed} requests on each side"


def _disturbed_text(pairs: Sequence[Pair]) -> str | None:
    """`trust red: 1 of 3 launches of A and 2 of 3 of B were disturbed (...)`; None if no launch was."""
    sides = [
        [found for subject in subjects for record in subject.records if (found := trust.finding(record))]
        for subjects in ([pair.first for pair in pairs], [pair.second for pair in pairs])
    ]
    disturbed = [[found for found in side if found.level in DISTURBED] for side in sides]
    worst = min((found for side in disturbed for found in side), key=lambda f: DISTURBED.index(f.level), default=None)
    if worst is None:
        return None
    counts = [
        f"{len(found)} of {len(side)} launches of {name}"
        for name, found, side in zip("AB", disturbed, sides, strict=True)
        if found
    ]
    return f"trust {worst.level}: {' and '.join(counts)} were disturbed ({worst.reasons[0]})"


def _notes(a: Side, pairs: Sequence[Pair], changes: Sequence[Change]) -> Iterable[str]:
    if pairs and all(pair.same_runs for pair in pairs):
        yield "A and B contain the same runs"
    if any(len(s.records) == 1 for p in pairs if not p.same_runs for s in (p.first, p.second)):
        yield f"launches were not repeated in every cell: {ONE_LAUNCH}"
    for pair in pairs:  # a sweep by rates ends where replicas no longer keep up
        rows_a, rows_b = ({row for _, row in s.quantities if row is not None} for s in (pair.first, pair.second))
        for name, left in (("A", rows_a - rows_b), ("B", rows_b - rows_a)) if pair.first.spec.serving else ():
            if left:
                yield f"not compared: {', '.join(sorted(left))} of {pair.second.label}, valid only in {name}"
        yield from _too_few(pair)
    if undecided := sum(c.verdict is None for c in changes):
        yield f"{undecided} of {len(changes)} comparisons have no verdict; each gives its reason"
    specs = [runs[0].record.spec for runs in a.values()]
    for name in sorted({spec.workload.name for spec in specs if spec.traits.measures_memory}):
        yield f"runs of the workload {name} are checked for failures only"
