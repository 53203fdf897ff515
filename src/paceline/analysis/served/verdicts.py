"""All that is concluded about served models: does each result count, what do replicas gain, what would the whole take.

Only what can be believed is among the measurements of a report. What cannot is judged all the same, with its reasons,
and measured apart from them: to be shown, and to be part of nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from paceline.analysis.findings import Measurement, Report
from paceline.analysis.findings.served import (
    CLIENT,
    INVALID,
    INVALID_CLIENT,
    NOT_KEPT,
    VALID,
    Fleet,
    Rule,
    ServedVerdict,
)
from paceline.analysis.served import client_share, extrapolation, fleets, mlperf_rules, prompt_counts, rate_search
from paceline.analysis.served import measurements as measured
from paceline.analysis.served.loads import Served, gather
from paceline.experiment.serving import PERCENTILE, UNKNOWN_SHAPE
from paceline.results.records import RunRecord, Status
from paceline.serving import early_stopping


def added_to(report: Report, records: Sequence[RunRecord]) -> Report:
    """records are those of the report, in the order of its runs; what was scored stands in the report before."""
    statuses = zip(records, (run.status for run in report.runs), strict=True)
    ours = [(record, status) for record, status in statuses if record.spec.serving and record.requests]
    if not ours:
        return report
    asked = [record for record, _ in ours]
    loads = measured.believed([record for record, status in ours if status == Status.OK])
    alone = fleets.alone_rates(loads)
    found = [(load, fleets.fleet_of(load, alone.get(fleets.unpartitioned(load.records[0]), {}))) for load in loads]
    together = [(load, fleet) for load, fleet in found if fleet is not None]
    sets = tuple(each for load in loads if (each := extrapolation.full_set(load)) is not None)
    told_ahead = (each.time for each in sets if each.time is not None)
    judged = list(_judged(ours, mlperf_rules.accuracy_rules(report.accuracy)))
    return dataclasses.replace(
        report,
        measurements=(*report.measurements, *_combined(together), *_max_rates(loads), *told_ahead),
        served=tuple(verdict for _, verdict in judged),
        doubted=tuple(m for load, verdict in judged if not verdict.is_believed for m in measured.measure(load)),
        fleets=tuple(fleet for _, fleet in together),
        partition_gains=tuple(fleets.partition_gains(loads)),
        full_sets=sets,
        notes=(*report.notes, *_unknown_shapes(asked), *prompt_counts.notes(asked)),
    )


def _unknown_shapes(records: Sequence[RunRecord]) -> Iterator[str]:
    unknown = (r.spec.model_text for r in records if r.evidence and r.evidence.settings.get("shape") == UNKNOWN_SHAPE)
    for model in dict.fromkeys(unknown):
        yield f"the shape of {model} is {UNKNOWN_SHAPE}: what needs it (parameters, FLOPs, a memory bound) is absent"


def _combined(together: Sequence[tuple[Served, Fleet]]) -> Iterator[Measurement]:
    for load, fleet in together:
        yield from fleets.measurements_of(fleet, load)


def _max_rates(loads: Sequence[Served]) -> Iterator[Measurement]:
    by_cell: dict[str, list[Served]] = {}
    for load in loads:
        by_cell.setdefault(load.cell, []).append(load)
    yield from (found for ours in by_cell.values() if (found := rate_search.max_rate(ours)) is not None)


# --- does it count ---


def _judged(
    ours: Sequence[tuple[RunRecord, str]], accuracy: Mapping[str, Rule]
) -> Iterator[tuple[Served, ServedVerdict]]:
    """Each load of each cell, of its believed launches; where there are none, of those that are not."""
    cells = dict.fromkeys(record.spec.cell for record, _ in ours)
    for cell in cells:
        told = {status: [r for r, s in ours if r.spec.cell == cell and s == status] for status in ("ok", "invalid")}
        sound, doubted = told["ok"], told["invalid"]
        left_out = tuple(f"{r.spec.run_id}: {'; '.join(measured.problems(r))}" for r in doubted) if sound else ()
        # Once for each launch: it may hold many loads, and each asks.
        known = {id(record): measured.run_problems(record) for record in sound or doubted}
        for load in gather(sound or doubted):
            problems = [text for record in load.records for text in known[id(record)]]
            yield load, verdict_of(load, accuracy.get(cell), left_out, problems)


def verdict_of(
    served: Served,
    accuracy: Rule | None = None,
    left_out: tuple[str, ...] = (),
    problems: Sequence[str] | None = None,
) -> ServedVerdict:
    """problems are those of its launches as a whole, where they are known already."""
    if problems is None:
        problems = [problem for record in served.records for problem in measured.run_problems(record)]
    doubts = dict.fromkeys((*problems, *measured.load_problems(served)))
    broken = (*measured.rule_problems(served), *measured.duration_problems(served))
    reasons = (*doubts, *broken, *_failed_accuracy(accuracy))
    label, count = mlperf_rules.label_of(served), len(served.requests)
    return ServedVerdict(
        cell=served.cell,
        axes=served.axes(),
        verdict=_word(reasons),
        reasons=reasons,
        requests=count,
        failed=count - len(served.answered),
        late=measured.late_of(served) if served.has_limits else None,
        allowed=early_stopping.late_allowed(count, PERCENTILE) if served.has_limits else None,
        runs=served.runs,
        label=label,
        rules=mlperf_rules.checklist(served, accuracy) if label else (),
        accuracy=accuracy,
        left_out=left_out,
        ceiling=client_share.use_of(served),
        is_believed=not doubts,
        fails=bool(doubts) and not served.is_tried,
    )


def _failed_accuracy(accuracy: Rule | None) -> Iterator[str]:
    """Of the whole set alone: a part of it can neither pass nor fail."""
    if accuracy is not None and accuracy.outcome == NOT_KEPT:
        yield f"accuracy {accuracy.asked}: {accuracy.seen}"


def _word(reasons: Sequence[str]) -> str:
    by_client = [reason.startswith(f"{CLIENT}: ") for reason in reasons]
    return VALID if not reasons else INVALID_CLIENT if all(by_client) else INVALID
