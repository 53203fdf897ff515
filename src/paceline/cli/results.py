"""Verbs that read results: conclude from them, show one run."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.money import add_cost_options, costing_of
from paceline.cli.verbs import OK, SOME_FAILED, Parser, add_verb, console
from paceline.errors import RequestError

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.analysis.cost.training import Costing
    from paceline.analysis.findings import Report
    from paceline.analysis.machine.nodes import Baseline
    from paceline.report.exporters import Exporter

DEFAULT_FORMATS = ("html", "markdown", "csv", "json", "plots")
_CAPSULE_SUFFIX = re.compile(r"\.(tar\.gz|tgz)$")


def add_verbs(verbs: Any) -> None:
    verb = add_verb(verbs, "report", report, "conclude from stored runs: tables, plots, files")
    verb.add_argument("directory", type=Path, help="a results folder, an experiment in it, or a capsule")
    add_format_option(verb)
    add_cost_options(verb)
    add_baseline_option(verb)
    add_verb(verbs, "show", show, "one run: what was asked, observed and concluded").add_argument("run", type=Path)


def report(arguments: argparse.Namespace) -> int:
    baseline = baseline_of(arguments)
    return conclude(console(), arguments.directory, arguments.format, costing_of(arguments), baseline)


def add_format_option(verb: Parser) -> None:
    verb.add_argument(
        "--format", action="append", metavar="NAME", help=f"exporter; default: {', '.join(DEFAULT_FORMATS)}"
    )


def add_baseline_option(verb: Parser) -> None:
    text = "compare nodes with those of a healthy result (folder or capsule), not with their peers"
    verb.add_argument("--baseline", type=Path, metavar="DIR|FILE", help=text)


def baseline_of(arguments: argparse.Namespace) -> Baseline | None:
    """Read before anything is measured: a result that is no baseline is refused at once."""
    from paceline.analysis.machine import nodes
    from paceline.campaign.run.controller import read_experiment

    if arguments.baseline is None:
        return None
    return nodes.baseline_of(read_experiment(arguments.baseline)[0], str(arguments.baseline))


def exporters_of(formats: Sequence[str] | None) -> list[Exporter]:
    """A name that is no exporter is refused here, before anything is measured."""
    from paceline.experiment.plugins import load

    return [load("exporters", name) for name in formats or DEFAULT_FORMATS]


def conclude(
    screen: Console,
    directory: Path,
    formats: Sequence[str] | None,
    costing: Costing,
    baseline: Baseline | None = None,
    asked: Collection[str] | None = None,
) -> int:
    """Build the report of a folder, print it, write its files; the exit code says whether all is well, of the runs that
    were asked for where there is more in the folder."""
    from paceline.analysis.report import build
    from paceline.campaign.run.controller import read_launches
    from paceline.results import safe_text, store

    exporters = exporters_of(formats)
    for exporter in exporters:
        if hasattr(exporter, "check"):
            exporter.check(directory)
    launches, unreadable = read_launches(directory)
    records, earlier, _ = store.newest(launches)
    title = safe_text.text(directory.resolve().name)
    found = build(records, title, unreadable, costing=costing, earlier=earlier, baseline=baseline)
    # First: an answer must not be lost because a disk is full.
    _print_report(screen, found)
    files = _write(found, exporters, directory)
    screen.print(f"Report: {' '.join(map(str, files))}", highlight=False, soft_wrap=True)
    runs = [r for r in found.runs if asked is None or r.run in asked]
    refused = [node for node in found.nodes if node.is_refused and (asked is None or node.run in asked)]
    lost = [load for load in found.served if load.fails and (asked is None or set(load.runs) & set(asked))]
    bad = [*(r for r in runs if r.is_failure), *refused, *lost]
    ended_ok = [r for r in runs if r.status == "ok" and not r.is_reference]
    known = {m.cell for m in found.measurements}
    # A run whose warm-up left no step ended ok, and shows nothing.
    blank = [r for r in ended_ok if r.is_certified and r.cell not in known]
    return OK if ended_ok and not (bad or blank or found.skipped) else SOME_FAILED


def _write(found: Report, exporters: Sequence[Exporter], source: Path) -> list[Path]:
    """The files and folders that were written, each named once; those of a capsule stand beside it, as it is never
    written to."""
    folder = source
    if source.is_file():
        folder = source.with_name(f"{_CAPSULE_SUFFIX.sub('', source.name)}-report")
    try:
        folder.mkdir(exist_ok=True)
        written = [path for exporter in exporters for path in exporter.export(found, folder)]
    except OSError as error:
        place = error.filename or folder
        raise RequestError(f"report: {str(place)!r} cannot be written ({error.strerror or error})") from None
    inside = [path.relative_to(folder).parts[0] for path in written if path.is_relative_to(folder)]
    outside = [path for path in written if not path.is_relative_to(folder)]
    return [*(folder / name for name in dict.fromkeys(inside)), *outside]


def _print_report(screen: Console, found: Report) -> None:
    from paceline import report as present

    parts = (
        present.ranked_table(found),
        present.scaling_table(found),
        present.verdicts_group(found),
        present.machine_group(found),
        present.cost_group(found),
        present.failures_table(found),
    )
    for part in parts:
        if part is not None:
            screen.print(part)
    for line in (*present.recommendation_lines(found), *(f"skipped: {text}" for text in found.skipped)):
        screen.print(line, highlight=False, markup=False)


def show(arguments: argparse.Namespace) -> int:
    from paceline.analysis.served import run as served
    from paceline.analysis.training import memory
    from paceline.analysis.training.certificate import certify_all
    from paceline.analysis.training.goodput import goodput
    from paceline.launchers.node import clock_offsets
    from paceline.report.tables import advice as present
    from paceline.report.tables import one_served_run
    from paceline.report.tables.one_run import record_lines
    from paceline.results import safe_text, store

    if not (arguments.run / "spec.json").is_file():
        raise RequestError(f"{str(arguments.run)!r} was given; accepted is a run folder (DIR/<experiment>/<run_id>)")
    if not store.is_sealed(arguments.run):
        positions = store.read_progress(arguments.run)
        files = len(list(arguments.run.glob("samples-*.jsonl")))
        unknown = f"{files} file{'s' if files > 1 else ''} of samples, no progress" if files else "no rank started"
        where = "; ".join(f"rank {p.rank} at step {p.step} in {p.phase}" for p in positions) or unknown
        print(safe_text.text(f"{arguments.run}: not sealed (running or interrupted): {where}"))
        return SOME_FAILED
    record = store.read_run(arguments.run)
    group = [run for run in store.read_runs(arguments.run.resolve().parent)[0] if run.spec.work == record.spec.work]
    for line in record_lines(record, certify_all(group).get(record.spec.run_id)):
        print(safe_text.text(line))
    for line in one_served_run.lines(served.loads(record), served.replicas(record)):
        print(safe_text.text(line))
    for warning in filter(None, map(clock_offsets.warning, clock_offsets.read(arguments.run))):
        print(safe_text.text(f"  warning: {warning}"))
    if held := goodput(record):
        print(f"  {held.text}")
    found = memory.advice(record)
    for line in present.lines(found) if found else ():
        print(safe_text.text(f"  {line}"))
    return OK
