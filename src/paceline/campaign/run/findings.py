"""Findings of results directories: the report of one, the comparison of two, the history of several.

`paceline report`, `compare` and `history` print what these functions return, and `paceline ui` shows it as pages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.analysis.compare import folders
from paceline.analysis.compare import history as over_time
from paceline.analysis.cost.training import Costing
from paceline.analysis.findings import Between, HistorySeries, Report
from paceline.analysis.machine.nodes import Baseline
from paceline.analysis.report import Judged, build, judge
from paceline.analysis.served import verdicts
from paceline.analysis.statistics.verdict import BETWEEN_DAYS
from paceline.analysis.training import memory, trust
from paceline.analysis.training.certificate import certify_all
from paceline.analysis.training.goodput import goodput
from paceline.errors import StoreError
from paceline.host.processes import collection_paused
from paceline.launchers.node import clock_offsets
from paceline.prediction import stored
from paceline.report.tables import advice as advice_table
from paceline.report.tables.one_run import record_lines, served_lines
from paceline.results import safe_text, store
from paceline.results.launches import read_experiment, read_judged, read_launches
from paceline.results.records import RunRecord

MOST_REASONS = 5
MOST_DIRECTORIES = 3


def report_of(directory: Path, costing: Costing | None = None, baseline: Baseline | None = None) -> Report:
    """The report of a results directory or capsule; RequestError if it contains no runs."""
    with collection_paused():
        return _report_of(directory, costing, baseline)


def _report_of(directory: Path, costing: Costing | None, baseline: Baseline | None) -> Report:
    launches, unreadable, judged = read_judged(directory, _judged)
    records, earlier, _ = store.newest(launches)
    title = safe_text.text(directory.resolve().name)
    predictions = [row for one in (directory.parent, directory) for row in stored.read(one)]
    return build(
        records,
        title,
        unreadable,
        costing=costing or Costing(),
        earlier=earlier,
        baseline=baseline,
        predictions=predictions,
        judged=judged,
    )


def _judged(launches: list[RunRecord]) -> Judged:
    """What is known of a part of the launches alone, in the process that read them."""
    found = judge(store.newest(launches)[0])
    for cell in found.cells:
        # Kept by the cell. Of its bottleneck, the process that builds the report would draw the resampled sums again.
        _ = cell.measurements, cell.per("wall")
    return found


def run_lines(run_dir: Path) -> list[str]:
    """One finished run: its settings, how it ended, its measurements and certificate. DamagedRunError if it is."""
    with collection_paused():
        return _run_lines(run_dir)


def _run_lines(run_dir: Path) -> list[str]:
    record = store.read_run(run_dir)
    group = _beside(run_dir.resolve(), record)
    loads = verdicts.loads_of_run(record)
    lines = [
        *record_lines(record, certify_all(group).get(record.spec.run_id), trust.finding(record), loads),
        *served_lines(loads, verdicts.replicas_of_run(record)),
    ]
    offsets = clock_offsets.read(run_dir)
    lines += [f"  warning: {warning}" for warning in filter(None, map(clock_offsets.warning, offsets))]
    if share := goodput(record):
        lines.append(f"  {share.text}")
    fitting = memory.advice(record)
    lines += [f"  {line}" for line in (advice_table.lines(fitting) if fitting else ())]
    return [safe_text.text(line) for line in lines]


def _beside(run_dir: Path, record: RunRecord) -> list[RunRecord]:
    """The runs of the same experiment and work, or of its proof group, with this one, which was read already; only
    these are read."""
    folders = []
    for folder in store.run_dirs(run_dir.parent):
        with contextlib.suppress(StoreError):
            if folder == run_dir or store.read_spec(folder).group_work == record.spec.group_work:
                folders.append(folder)
    read = iter(store.read_each([folder for folder in folders if folder != run_dir]))
    launches = [record if folder == run_dir else next(read) for folder in folders]
    return store.newest(launch for launch in launches if isinstance(launch, RunRecord))[0]


def comparison_of(
    a: Path, b: Path, across_devices: bool = False, spread: float = BETWEEN_DAYS
) -> tuple[Between, tuple[str, ...]]:
    """B against A cell by cell, and the reasons for runs that were skipped."""
    (first, skipped_a), (second, skipped_b) = read_experiment(a), read_experiment(b)
    found = folders.compare_experiments(first, second, (str(a), str(b)), across_devices, spread)
    return found, (*skipped_a, *skipped_b)


@dataclass(frozen=True, slots=True)
class OverTime:
    """Cells over time. names: what was read. lines: what was not counted, the most frequent reason first."""

    title: str
    series: tuple[HistorySeries, ...]
    names: str
    lines: tuple[str, ...]
    dropped: Mapping[str, int]
    skipped: tuple[str, ...]


def history_of(directories: Sequence[Path]) -> OverTime:
    """The levels of every cell in these directories and where they changed."""
    read = [read_launches(directory) for directory in directories]
    launches, skipped = ([one for side in sides for one in side] for sides in zip(*read, strict=True))
    judged = over_time.judge(launches)
    histories = over_time.analyse(judged.windows, fewest=1, asked=judged.asked)
    count, where = sum(map(over_time.is_kept, launches)), ", ".join(map(str, directories[:MOST_DIRECTORIES]))
    if len(directories) > MOST_DIRECTORIES:
        where += f" and {len(directories) - MOST_DIRECTORIES} more"
    lines = [f"not counted: {count} launches, {reason}" for reason, count in judged.dropped.items()]
    if len(lines) > MOST_REASONS:
        lines[MOST_REASONS:] = [f"not counted: {len(lines) - MOST_REASONS} more reasons; see --format json"]
    first = directories[0].resolve()
    return OverTime(
        title=safe_text.text(f"History of {first.name if len(directories) == 1 else first.parent.name}"),
        series=tuple(histories),
        names=safe_text.text(f"{count} launches in {where}; {judged.count} of them ok and certified."),
        lines=(*lines, *(f"skipped: {text}" for text in skipped)),
        dropped=dict(judged.dropped),
        skipped=tuple(map(str, skipped)),
    )
