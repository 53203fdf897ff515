"""Stored runs compared with the same runs made again: within the intervals or not, and by which proof of equal work.

A cell is reproduced if its replay passes against the *stored* reference (weights, data, losses) and no compared metric
differs significantly: faster is not a reproduction either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.analysis.compare import fingerprint
from paceline.analysis.compare.cells import SPEED_METRICS, comparable_metrics
from paceline.analysis.compare.comparable import describe
from paceline.analysis.findings import BETTER, SHARED_GPU, WORSE, Certificate, Measurement
from paceline.analysis.findings.reproduction import (
    CellReproduction,
    Remeasured,
    ReplayVerdict,
    Reproduction,
    Trajectory,
)
from paceline.analysis.grouping import grouped
from paceline.analysis.report import build
from paceline.analysis.statistics.intervals import ratio_between
from paceline.analysis.statistics.verdict import SMALLEST_EFFECT, verdict_of
from paceline.analysis.training import metrics
from paceline.analysis.training.certificate import certify, certify_all
from paceline.analysis.training.certificate.observed import observe
from paceline.analysis.training.metrics import BY_NAME, Cell, device_kind
from paceline.analysis.training.window import open_window
from paceline.results.records import RunRecord, Status

# Share of the rows of a sweep that must agree; 95 % intervals promise no more.
ROWS_WITHIN = 0.95
# No verdict from data that could have missed a difference of 20 % is not an agreement.
MOST_UNSEEN_RATIO = 0.20


@dataclass(frozen=True, slots=True)
class Side:
    """The stored or the replayed runs by cell, with findings from them alone."""

    records: Mapping[str, Sequence[RunRecord]]
    certificates: Mapping[str, Certificate]
    cells: Mapping[str, Cell]
    measurements: Mapping[str, Sequence[Measurement]]
    references: Mapping[str, Sequence[RunRecord]]


def side_of(records: Sequence[RunRecord]) -> Side:
    """Runs by cell, certified and measured."""
    certificates = certify_all(records)
    valid = [r for r in records if (found := certificates.get(r.spec.run_id)) and found.valid]
    uncertified = build([r for r in records if not r.spec.is_certified], title="")
    return Side(
        grouped(records, lambda r: r.spec.cell),
        certificates,
        {cell.id: cell for cell in metrics.gather(map(open_window, valid))},
        grouped(uncertified.measurements, lambda m: m.cell),
        grouped((r for r in records if r.proves_only and r.status is Status.OK), lambda r: r.spec.group_work),
    )


def reproduce(stored: Sequence[RunRecord], replayed: Sequence[RunRecord], origins: Mapping[str, str]) -> Reproduction:
    """One verdict per replayed cell; origins maps each to its stored cell."""
    old, new = side_of(stored), side_of(replayed)
    return Reproduction(cells=tuple(_cell(old, new, origin, cell, len(origins)) for cell, origin in origins.items()))


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict about one cell."""

    verdict: ReplayVerdict
    reason: str
    metrics: tuple[Remeasured, ...] = ()
    trajectory: Trajectory | None = None
    certificate: Certificate | None = None


def _cell(old: Side, new: Side, origin: str, cell: str, family: int) -> CellReproduction:
    """One of `family` cells."""
    before, after = old.records[origin], new.records.get(cell, ())
    judgement = _ended_badly(before, after) or (
        _trained(old, new, origin, cell, family) if before[0].spec.is_certified else _measured(old, new, origin, cell)
    )
    return CellReproduction(
        cell=origin,
        label=describe(before[0]),
        verdict=judgement.verdict,
        reason=judgement.reason,
        metrics=judgement.metrics,
        trajectory=judgement.trajectory,
        certificate=judgement.certificate,
        differences={d.path: (d.first, d.second) for d in fingerprint.machine_differences(before, after)},
        stored_runs=tuple(r.spec.run_id for r in before),
        replayed_runs=tuple(r.spec.run_id for r in after),
    )


def _ended_badly(before: Sequence[RunRecord], after: Sequence[RunRecord]) -> Judgement | None:
    """The verdict if the statuses of the runs decide it, else None."""
    refused = next((r for r in after if r.status is Status.UNSUPPORTED), None)
    if not after:
        return Judgement(ReplayVerdict.UNDECIDED, "it was not run")
    if refused is not None:
        return Judgement(ReplayVerdict.UNSUPPORTED, f"this machine cannot run it: {refused.error}")
    if all(r.status is Status.OOM for r in before):
        again = all(r.status is Status.OOM for r in after)
        ended = ", ".join(sorted({str(r.status) for r in after}))
        text = "out of memory again" if again else f"stored as out of memory; the replay ended {ended}"
        return Judgement(ReplayVerdict.REPRODUCED if again else ReplayVerdict.DIFFERS, text)
    bad = next((r for r in after if r.status not in (Status.OK, Status.INVALID)), None)
    return Judgement(ReplayVerdict.DIFFERS, f"the replay ended {bad.status}: {bad.error}") if bad else None


# --- training ---


def _trained(old: Side, new: Side, origin: str, cell: str, family: int) -> Judgement:
    a, b = old.cells.get(origin), new.cells.get(cell)
    if a is None:
        return Judgement(ReplayVerdict.UNDECIDED, f"the stored runs are not certified: {_unproved(old, origin)}")
    if b is None:
        return Judgement(ReplayVerdict.DIFFERS, f"the replayed runs are not certified: {_unproved(new, cell)}")
    # Against the stored reference and the stored runs of the same work; the first failure is reported.
    work = new.records[cell][0].spec.work
    peers = [r for runs in old.records.values() for r in runs if r.spec.work == work and r.spec.is_certified]
    trusted = [r for r in peers if r.status is Status.OK]
    known = old.references.get(work, ())
    certificates = [certify(r, known[0] if known else None, trusted, known[1:]) for r in new.records[cell]]
    certificate = next((c for c in certificates if not c.valid), certificates[0])
    trajectory = _trajectory(old.records[origin], new.records[cell])
    if device_kind(a) != device_kind(b):
        devices = f"stored on {device_kind(a)}, replayed on {device_kind(b)}"
        reason = f"{devices}: speeds of different devices cannot be compared"
        return Judgement(ReplayVerdict.UNDECIDED, reason, (), trajectory, certificate)
    if not certificate.valid:
        reason = f"different work than stored: {'; '.join(certificate.reasons)}"
        return Judgement(ReplayVerdict.DIFFERS, reason, (), trajectory, certificate)
    compared = tuple(_remeasured(metric, a, b, family) for metric in comparable_metrics((a, b)))
    return Judgement(*_conclude(compared), compared, trajectory, certificate)


def _unproved(side: Side, cell: str) -> str:
    found = [side.certificates.get(r.spec.run_id) for r in side.records[cell]]
    return next((c.reasons[0] for c in found if c and c.reasons), "no step is left after warm-up")


def _trajectory(before: Sequence[RunRecord], after: Sequence[RunRecord]) -> Trajectory | None:
    """Losses of repeats that both sides have, else of the first of each."""
    by_repeat = {r.spec.repeat: r for r in before}
    pairs = [(by_repeat[r.spec.repeat], r) for r in after if r.spec.repeat in by_repeat] or [(before[0], after[0])]
    ratios = []
    for old, new in pairs:
        was, now = observe(old).losses, observe(new).losses
        ratios += [abs(now[s] - was[s]) / max(abs(was[s]), 1e-30) for s in was if s in now]
    if not ratios:
        return None
    worst = max(ratios, key=lambda ratio: math.inf if math.isnan(ratio) else ratio)
    return Trajectory(steps=len(ratios), equal_steps=sum(ratio == 0 for ratio in ratios), largest_ratio=worst)


def _remeasured(metric: str, a: Cell, b: Cell, family: int) -> Remeasured:
    under, over = metrics.estimate(a, metric), metrics.estimate(b, metric)
    stored, replayed = (next(m for m in cell.measurements if m.metric == metric) for cell in (a, b))
    if under is None or over is None:
        return Remeasured(metric=metric, within=None, reason="not measured on both sides")
    ratio = ratio_between([over], [under])
    plain = over.value / under.value if under.value else None
    if ratio is not None and metric in SPEED_METRICS:
        stored_runs, replayed_runs = ([w.record for w in cell.windows] for cell in (a, b))
        ratio = fingerprint.allow_for_days(ratio, stored_runs, replayed_runs)
    if ratio is None or (ratio.launches or 0) < 2:
        within, reason = _without_interval(math.inf if plain is None else plain)
    else:
        verdict, reason = verdict_of(ratio, BY_NAME[metric].better, family)
        within, unseen = verdict not in (BETTER, WORSE), ratio.detectable(family)
        if within and unseen > MOST_UNSEEN_RATIO:
            missed = f"a difference under {unseen:.0%}" if unseen < 1 else "even a factor of two"
            within, reason = None, f"too noisy: {missed} would not be detected; use more repeats (--set repeats=5)"
    return Remeasured(
        metric=metric,
        within=within,
        reason=reason,
        stored=stored,
        replayed=replayed,
        ratio=ratio.value if ratio else plain,
        low=ratio.low if ratio else None,
        high=ratio.high if ratio else None,
        detectable_ratio=ratio.detectable(family) if ratio else None,
    )


def _without_interval(ratio: float) -> tuple[bool | None, str]:
    """Launches without repeats have no spread: only nearly equal values agree."""
    effect = max(ratio, 1 / ratio) - 1 if 0 < ratio < math.inf else math.inf
    if effect < SMALLEST_EFFECT:
        return True, f"equal within {SMALLEST_EFFECT:.0%}"
    return None, f"no interval, because launches were not repeated; the values differ by {effect:.1%}"


def _conclude(compared: Sequence[Remeasured]) -> tuple[ReplayVerdict, str]:
    """Every speed must agree; without speeds, any other metric."""
    beyond = [m for m in compared if m.within is False]
    speeds = [m for m in compared if m.metric in SPEED_METRICS]
    agree = all(m.within for m in speeds) if speeds else any(m.within for m in compared)
    if agree and not beyond:
        return ReplayVerdict.REPRODUCED, "no compared metric differs significantly"
    verdict = ReplayVerdict.DIFFERS if beyond else ReplayVerdict.UNDECIDED
    shown = beyond or [m for m in compared if m.within is None]
    return verdict, "; ".join(f"{m.metric}: {m.reason}" for m in shown) or "nothing can be compared"


# --- workloads without a certificate ---


def _measured(old: Side, new: Side, origin: str, cell: str) -> Judgement:
    """By the intervals of every row; a workload without measurements is judged by its status alone."""
    bad = next((r for r in new.records[cell] if r.status is not Status.OK), None)
    if bad is not None:
        return Judgement(ReplayVerdict.DIFFERS, f"the replay ended {bad.status}: {bad.error}")
    before, after = (
        {
            f"{m.metric} {sorted((k, v) for k, v in m.axes.items() if k not in ('launcher', 'steps'))}": m
            for m in side.measurements.get(name, ())
            if m.value is not None and SHARED_GPU not in (m.note or "")
        }
        for side, name in ((old, origin), (new, cell))
    )
    names = dict.fromkeys(m.metric for row, m in before.items() if row in after)
    found = tuple(
        _rows_of(name, [(m, after[row]) for row, m in before.items() if row in after and m.metric == name])
        for name in names
    )
    if not found:
        return Judgement(ReplayVerdict.REPRODUCED, "it ended ok both times and has no speed to compare")
    return Judgement(*_conclude(found), found)


def _rows_of(metric: str, pairs: Sequence[tuple[Measurement, Measurement]]) -> Remeasured:
    verdicts: list[tuple[bool | None, str]] = []
    for a, b in pairs:
        near, reason = _without_interval(b.value / a.value if a.value and b.value else math.inf)
        if near or a.low is None or a.high is None or b.low is None or b.high is None:
            verdicts.append((near, reason))
        else:
            overlap = a.low <= b.high and b.low <= a.high
            verdicts.append((overlap, "the intervals overlap" if overlap else "the intervals do not overlap"))
    if len(pairs) == 1:
        (stored, replayed), (within, reason) = pairs[0], verdicts[0]
        return Remeasured(metric=metric, within=within, reason=reason, stored=stored, replayed=replayed)
    agree, decided = (sum(within in kinds for within, _ in verdicts) for kinds in ((True,), (True, False)))
    if not decided:
        return Remeasured(metric=metric, within=None, reason="no row has an interval on both sides")
    reason = f"{agree} of {decided} rows agree within their intervals ({ROWS_WITHIN:.0%} needed)"
    return Remeasured(metric=metric, within=agree >= ROWS_WITHIN * decided, reason=reason)
