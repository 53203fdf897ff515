"""All conclusions about load tests: does each result count, what do replicas gain, how long would the full set take.

Only reliable results are among the measurements of a report. Unreliable ones are judged too, with their reasons, and
measured separately: they are shown and used for nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from paceline.analysis.findings import Report
from paceline.analysis.findings.served import (
    CLIENT,
    INVALID,
    INVALID_CLIENT,
    NOT_KEPT,
    VALID,
    FailureClass,
    LoadOfRun,
    ReplicaOfRun,
    Rule,
    ServedVerdict,
)
from paceline.analysis.grouping import grouped
from paceline.analysis.served import client_share, extrapolation, fleets, latency_bounds, mlperf_rules, rate_search
from paceline.analysis.served import measurements as measured
from paceline.analysis.served.loads import NS, Served, gather, latency_s, tpot_s, ttft_s
from paceline.experiment.serving import PERCENTILE, UNKNOWN_SHAPE
from paceline.results.records import RunRecord, Status
from paceline.serving import early_stopping

# Grades of a client's headroom, the worst first.
GRADES = ("insufficient", "tight", "unknown", "good")
ACCURACY_ADVICE = "check precision, quantisation and the prompt form of the server: its answers are not accurate enough"


def added_to(report: Report, records: Sequence[RunRecord]) -> Report:
    """The report with verdicts, replica gains and extrapolations. records are in the order of the report's runs;
    accuracy scores must be in the report already."""
    statuses = zip(records, (run.status for run in report.runs), strict=True)
    ours = [(record, status) for record, status in statuses if record.spec.serving and record.requests]
    if not ours:
        return report
    tested = [record for record, _ in ours]
    loads = measured.reliable_loads([record for record, status in ours if status == Status.OK])
    alone = fleets.alone_rates(loads)
    each = [(load, fleets.fleet_of(load, alone.get(fleets.unpartitioned(load.records[0]), {}))) for load in loads]
    together = [(load, fleet) for load, fleet in each if fleet is not None]
    sets = tuple(full for load in loads if (full := extrapolation.full_set(load)) is not None)
    predicted = (full.time for full in sets if full.time is not None)
    combined = (m for load, fleet in together for m in fleets.measurements_of(fleet, load))
    by_cell = grouped(loads, lambda load: load.cell).values()
    max_rates = (rate for cell in by_cell if (rate := rate_search.max_rate(cell)) is not None)
    judged = list(_judged(ours, mlperf_rules.accuracy_rules(report.accuracy)))
    return dataclasses.replace(
        report,
        measurements=(*report.measurements, *combined, *max_rates, *predicted),
        served=tuple(verdict for _, verdict in judged),
        doubted=tuple(m for load, verdict in judged if not verdict.is_believed for m in measured.measure(load)),
        fleets=tuple(fleet for _, fleet in together),
        partition_gains=tuple(fleets.partition_gains(loads)),
        full_sets=sets,
        notes=(*report.notes, *_notes(tested)),
    )


def _judged(
    ours: Sequence[tuple[RunRecord, str]], accuracy: Mapping[str, Rule]
) -> Iterator[tuple[Served, ServedVerdict]]:
    """The verdict on each load of each cell, over its valid launches, or over the invalid ones if there are no
    others."""
    cells = dict.fromkeys(record.spec.cell for record, _ in ours)
    for cell in cells:
        sound, doubted = ([r for r, s in ours if r.spec.cell == cell and s == status] for status in ("ok", "invalid"))
        left_out = tuple(f"{r.spec.run_id}: {'; '.join(measured.problems(r))}" for r in doubted) if sound else ()
        # Once for each launch: it may have many loads.
        known = {id(record): measured.run_problems(record) for record in sound or doubted}
        for load in gather(sound or doubted):
            problems = [text for record in load.records for text in known[id(record)]]
            yield load, verdict_of(load, accuracy.get(cell), left_out, problems)


def verdict_of(
    served: Served, accuracy: Rule | None = None, left_out: tuple[str, ...] = (), problems: Sequence[str] | None = None
) -> ServedVerdict:
    """The verdict on one load. problems: those of its launches as a whole, if they are known already."""
    if problems is None:
        problems = [problem for record in served.records for problem in measured.run_problems(record)]
    doubts = dict.fromkeys((*problems, *measured.load_problems(served)))
    broken = (*measured.rule_problems(served), *measured.duration_problems(served))
    # Only the whole set has an outcome: a part of it can neither pass nor fail.
    failed = accuracy is not None and accuracy.outcome == NOT_KEPT
    inaccurate = (f"accuracy {accuracy.asked}: {accuracy.seen}",) if accuracy is not None and failed else ()
    reasons = (*doubts, *broken, *inaccurate)
    by_client = all(reason.startswith(f"{CLIENT}: ") for reason in reasons)
    label, count = mlperf_rules.label_of(served), len(served.requests)
    known = [s.stage for s in served.stretches if s.stage and s.stage.headroom_grade in GRADES]
    room = min(known, key=lambda stage: GRADES.index(str(stage.headroom_grade)), default=None)
    return ServedVerdict(
        cell=served.cell,
        axes=served.axes(),
        verdict=VALID if not reasons else INVALID_CLIENT if by_client else INVALID,
        reasons=reasons,
        requests=count,
        failed=count - len(served.answered),
        late=served.late if served.has_limits else None,
        allowed=early_stopping.late_allowed(count, PERCENTILE) if served.has_limits else None,
        runs=served.runs,
        label=label,
        rules=tuple(mlperf_rules.checklist(served, accuracy)) if label else (),
        accuracy=accuracy,
        left_out=left_out,
        ceiling=client_share.use_of(served),
        is_believed=not doubts,
        fails=bool(doubts) and not served.is_tried,
        headroom=room.headroom if room else None,
        headroom_grade=room.headroom_grade if room else None,
        advice=(*(measured.advice(served) if reasons else ()), *((ACCURACY_ADVICE,) if failed else ())),
    )


def _notes(records: Sequence[RunRecord]) -> Iterator[str]:
    """One for each server that serves another model than requested, model of unknown architecture, or server that
    counts other prompt tokens than it was sent."""
    yield from _other_models(records)
    unknown = (r.spec.model_text for r in records if r.evidence and r.evidence.settings.get("shape") == UNKNOWN_SHAPE)
    for model in dict.fromkeys(unknown):
        yield f"the architecture of {model} is {UNKNOWN_SHAPE}: parameters, FLOPs and memory bounds are missing"
    for model, ours in grouped(records, lambda record: record.spec.model_text).items():
        answers = [request for record in ours for request in record.requests if not request.error]
        counted = [r for r in answers if r.prompt_tokens is not None and r.sent_ids is not None]
        wrong = [request for request in counted if request.prompt_tokens != request.sent_ids]
        if wrong:
            first = wrong[0]
            yield (
                f"the server of {model} counts prompt tokens differently than the token ids it was sent in "
                f"{len(wrong):,} of {len(counted):,} answers ({first.prompt_tokens:,} instead of {first.sent_ids:,}): "
                "prompt tokens/s use its count"
            )


def _other_models(records: Sequence[RunRecord]) -> Iterator[str]:
    """What servers say they serve where the experiment requested another model, and cells that mix models."""
    for (served, requested), ours in grouped(records, lambda r: (r.other_model, r.spec.model_text)).items():
        if served is None:
            continue
        words = f"the server says that it serves {served}, but the experiment requested {requested}"
        is_random = any(request.sent_ids is not None for record in ours for request in record.requests)
        prompts = f"; random prompts use the vocabulary of {requested}" if is_random else ""
        yield f"{words}: all numbers are of {served}, and none uses the shape of {requested}{prompts}"
    for cell in grouped(records, lambda record: record.spec.cell).values():
        models = list(dict.fromkeys(", ".join(record.served_models) for record in cell if record.served_models))
        if len(models) > 1:
            yield f"the served model changed between launches of one cell ({' | '.join(models)}): they are merged here"


# --- one run ---


LATENCIES = {"TTFT": ttft_s, "TPOT": tpot_s, "latency": latency_s}


def loads_of_run(record: RunRecord) -> list[LoadOfRun]:
    """The loads of one run, in the order they were applied, before launches are merged. Unreliable ones are included;
    their verdict says so."""
    return [_load_of_run(served) for served in gather([record])]


def _load_of_run(served: Served) -> LoadOfRun:
    """Failure classes are in order of frequency, each with the first known detail."""
    verdict, latencies = verdict_of(served), {}
    missing = (latency_bounds.why_missing(percent, len(served.answered)) for percent in (50, 99))
    for name, quantity in LATENCIES.items():
        if values := [value for request in served.answered if (value := quantity(request)) is not None]:
            latencies[name] = (latency_bounds.percentile(values, 50), latency_bounds.percentile(values, 99))
    by_class = grouped((r for r in served.requests if r.error is not None), lambda request: str(request.error))
    return LoadOfRun(
        scenario=served.scenario,
        name=served.name,
        requests=len(served.requests),
        failures=tuple(
            FailureClass(name=name, count=len(failed), detail=next((r.detail for r in failed if r.detail), None))
            for name, failed in sorted(by_class.items(), key=lambda each: -len(each[1]))
        ),
        late=verdict.late,
        verdict=verdict.verdict,
        reasons=verdict.reasons,
        advice=verdict.advice,
        latencies=latencies,
        few=tuple(text for text in missing if text) if served.answered else (),
    )


def replicas_of_run(record: RunRecord) -> list[ReplicaOfRun]:
    """The replicas as the engine started or found them, each with its requests."""
    return [
        ReplicaOfRun(
            replica=each.replica,
            host=each.host,
            model=", ".join(each.answered_as or (each.model,)),
            requests=sum(request.replica == each.replica for request in record.requests),
            failed=sum(request.replica == each.replica and request.error is not None for request in record.requests),
            died_s=None if each.died_ns is None else each.died_ns / NS,
            reassigned=each.reassigned,
            silent_s=tuple(moment / NS for moment in each.silent_ns),
        )
        for each in record.replicas
    ]
