"""Where the time of launches went: how much of what a campaign takes is measured steps."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import fields

from paceline.analysis.findings.training import TimeSpent
from paceline.analysis.training.window import Window, step_table
from paceline.results.records import RunRecord, Status


def analyse(records: Iterable[RunRecord], windows: Mapping[str, Window]) -> TimeSpent | None:
    """The sum over launches that ended ok and were started for these results; None if none says when its steps began.

    A restarted launch is left out: what is known of its set-up is that of its last attempt. References that were reused
    took no time. Time between launches is not included, because campaigns are resumed.
    """
    launches: list[TimeSpent] = []
    for record in records:
        if record.status is not Status.OK or record.reused:
            continue
        if record.proves_only:
            launches.append(_of_reference(record))
        elif (window := windows.get(record.spec.run_id)) and (spent := _of_launch(record, window)) is not None:
            launches.append(spent)
    reached = [one.first_measured_s for one in launches if one.first_measured_s is not None]
    if not reached:
        return None
    summed = [field.name for field in fields(TimeSpent) if field.name != "first_measured_s"]
    totals = {name: sum(getattr(one, name) for one in launches) for name in summed}
    return TimeSpent(**totals, first_measured_s=statistics.median(reached))


def _of_reference(record: RunRecord) -> TimeSpent:
    total_s = max(0.0, record.ended_at - record.started_at)
    return TimeSpent(launches=1, total_s=total_s, reference_s=total_s)


def _of_launch(record: RunRecord, window: Window) -> TimeSpent | None:
    evidence = record.evidence
    if evidence is None or evidence.window_began_at_s is None or evidence.window_wall_s is None or record.attempts:
        return None
    total_s = record.ended_at - record.started_at
    setup_s, all_steps_s = evidence.window_began_at_s - record.started_at, evidence.window_wall_s
    # By the clocks of two hosts, which may differ by more than a short launch takes.
    if not 0 <= setup_s <= setup_s + all_steps_s <= total_s:
        return None
    measured_s = min(float(window.seconds.sum()), all_steps_s)
    warmup_s, compilation_s = all_steps_s - measured_s, 0.0
    if record.spec.training.compile and len(window.seconds):
        # Compilation happens in the first step.
        table = step_table(record)
        first_s = max(table.at(table.steps[0], "duration_s"))
        compilation_s = min(warmup_s, max(0.0, first_s - statistics.median(window.seconds.tolist())))
    return TimeSpent(
        launches=1,
        total_s=total_s,
        setup_s=setup_s,
        compilation_s=compilation_s,
        warmup_s=warmup_s - compilation_s,
        measured_s=measured_s,
        checks_s=total_s - setup_s - all_steps_s,
        first_measured_s=setup_s + warmup_s if len(window.seconds) else None,
    )
