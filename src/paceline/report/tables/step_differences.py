"""Why a step of one layout takes longer than one of another, in sentences."""

from __future__ import annotations

from paceline.analysis.findings import Report, StepDifference
from paceline.analysis.grouping import grouped
from paceline.report.tables.table import Column, Filled, Table, filled, numeric
from paceline.wording import Scale, format_parts

TITLE = "Why steps differ"
_MS, _GIB = Scale("ms", 1e3), Scale("GiB", 2.0**-30)
_NOTES = (
    "The times are of measured steps, the terms of profiled ones: a few steps after the measured window, which the "
    "profiler slows. The terms are those of the rank that computes most, so they add up to its step. Compute is the "
    "mean over ranks; what that rank computes beyond it is uneven compute. Exposed communication runs while nothing "
    "computes, and is divided by dimension in the shares of one more step, in which every operator is observed. "
    "Host gaps: nothing computes or sends (docs/layouts.md).",
)


def tables(report: Report) -> tuple[Table, ...]:
    """One table for each group: every cell against the one with the shortest step."""
    by_group = grouped(report.step_differences, lambda found: found.group_key)
    titles = [f"{TITLE}: {found[0].group}" if len(by_group) > 1 else TITLE for found in by_group.values()]
    made = zip(titles, by_group.values(), strict=True)
    return tuple(table for title, found in made if (table := _table(title, found)))


def _table(title: str, found: list[StepDifference]) -> Table | None:
    columns: tuple[Filled[StepDifference], ...] = (
        (Column("what"), lambda each: each.label),
        (numeric("longer, ms"), lambda each: format_parts(each.difference_s, None, None, _MS)[0]),
        (numeric("peak memory, GiB", 1), lambda each: format_parts(each.peak_bytes, None, None, _GIB)[0]),
        (Column("why", prose=True), lambda each: each.text),
    )
    first = found[0]
    peak = format_parts(first.other_peak_bytes, None, None, _GIB)[0]
    notes = (
        f"Longer than a step of {first.other_label}, the shortest, with a peak memory of {peak} GiB.",
        *_NOTES,
        f"From the runs {', '.join(dict.fromkeys(run for each in found for run in each.runs))}.",
    )
    return filled(title, found, columns, notes, lambda each: (each.cell, each.other))
