"""Verbs that read results: report, show one run, its logs, compare two directories, follow cells over time."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.overview import INTERRUPTED, OK, SOME_FAILED, TOO_NOISY
from paceline.cli.verbs import (
    Parser,
    add_out_option,
    add_verb,
    console,
    has_reader,
    print_hanging,
    print_plain,
    require_directory,
)
from paceline.errors import DAMAGED, DamagedRunError, RequestError

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.analysis.cost.training import Costing
    from paceline.analysis.findings import Between, Report
    from paceline.analysis.machine.nodes import Baseline
    from paceline.report.exporters import Exporter
    from paceline.report.tables.table import Table

DEFAULT_FORMATS = ("html", "markdown", "csv", "json", "plots")
# Formats of `compare` and `history`.
FORMATS = ("terminal", "html", "markdown", "json")
MOST_TOKENS = 10**18
_SIZES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_CAPSULE_SUFFIX = re.compile(r"\.(tar\.gz|tgz)$")


def add_verbs(verbs: Any) -> None:
    verb = add_verb(verbs, "report", report, "analyse stored runs and write tables, plots and files")
    verb.add_argument(
        "directory", type=Path, metavar="DIR", help="a results directory, one experiment in it, or a capsule"
    )
    add_report_options(verb)
    verb = add_verb(verbs, "show", show, "show one run: its settings, measurements and certificate")
    verb.add_argument("run", type=Path, metavar="RUN", help="a run directory: DIR/<experiment>/<run id>")
    verb.add_argument("--samples", action="store_true", help="print its raw samples as JSON lines instead")
    verb = add_verb(verbs, "logs", logs, "print the output of all ranks of a run, on all nodes")
    verb.add_argument("run", type=Path, metavar="RUN", help="a run directory: DIR/<experiment>/<run id>")
    verb.add_argument("-f", "--follow", action="store_true", help="continue until the run ends")
    verb.add_argument("--rank", type=int, metavar="N", help="only the lines of this rank")
    verb = add_verb(verbs, "compare", compare, "compare two results directories cell by cell")
    verb.add_argument("a", type=Path, metavar="DIR_A", help="the baseline")
    verb.add_argument("b", type=Path, metavar="DIR_B", help="the results to judge")
    verb.add_argument(
        "--fail-on-regression",
        type=float,
        metavar="PCT",
        help="exit with code 1 if the verdict on B is worse by more than PCT percent or a cell is missing in B, and "
        "with code 3 if a regression of PCT percent could not have been seen",
    )
    verb.add_argument(
        "--day-spread",
        type=float,
        metavar="PCT",
        help="standard deviation to assume between launches of different days or nodes (default: 1)",
    )
    verb.add_argument("--across-devices", action="store_true", help="also compare different kinds of device")
    verb.add_argument(
        "-v", "--verbose", action="store_true", help="list rows that are equal and the reason of each verdict, too"
    )
    verb.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="default: %(default)s")
    verb = add_verb(verbs, "history", history, "show cells over time and where their level changed")
    verb.add_argument("directories", type=Path, nargs="+", metavar="DIR", help="results directories, or their parent")
    verb.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="default: %(default)s")
    verb = add_verb(verbs, "ui", ui, "browse a results directory and watch campaigns in a web browser")
    verb.add_argument("directory", type=Path, nargs="?", metavar="DIR", help="a results directory (default: --out)")
    add_out_option(verb)
    verb.add_argument(
        "--listen",
        default="127.0.0.1:8501",
        metavar="HOST:PORT",
        help="address to listen on; a random token is needed if other hosts can reach it (default: %(default)s)",
    )
    verb.add_argument("--open", action="store_true", help="open the page in the default browser")


def add_report_options(verb: Parser) -> None:
    """The options of every verb that ends with a report: formats, cost, baseline."""
    verb.add_argument(
        "--format",
        action="append",
        metavar="NAME",
        help=f"an exporter; repeat it for several (default: {', '.join(DEFAULT_FORMATS)})",
    )
    verb.add_argument(
        "--price", metavar="USD|NAME|FILE", help="USD per GPU-hour, a name from `paceline list prices`, or a .toml file"
    )
    verb.add_argument("--train-tokens", metavar="N", help="estimate time and cost to train on N tokens: 300M, 1B, 15T")
    verb.add_argument("--train-samples", metavar="N", help="estimate time and cost to fine-tune on N samples: 10K, 1M")
    verb.add_argument(
        "--busy-hours",
        metavar="H",
        help="hours per day in which reserved GPUs serve requests, for the cost of served tokens (default: 8)",
    )
    verb.add_argument(
        "--baseline", type=Path, metavar="DIR|FILE", help="compare nodes with a healthy result instead of their peers"
    )
    verb.add_argument("-v", "--verbose", action="store_true", help="print every table, note and recommendation")


def costing_of(arguments: argparse.Namespace) -> Costing:
    """The cost options; wrong values are rejected before anything is read or run."""
    from paceline.analysis.cost.training import Costing
    from paceline.host import prices

    price = prices.chosen(arguments.price) if arguments.price is not None else None
    tokens, samples = arguments.train_tokens, arguments.train_samples
    return Costing(
        price,
        None if tokens is None else token_count(tokens),
        None if samples is None else sample_count(samples),
        *(() if arguments.busy_hours is None else (hours(arguments.busy_hours),)),
    )


def hours(text: str) -> float:
    """`--busy-hours` as a number of hours per day."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 24:
        raise RequestError(f"--busy-hours: got {text!r}, expected a number of hours above 0, up to 24.")
    return value


def token_count(text: str, option: str = "--train-tokens") -> int:
    """`1.5B` is 1,500,000,000."""
    return _count(text, option, "a whole number of tokens up to 1,000,000T, such as 300M, 1.5B or 15T")


def sample_count(text: str) -> int:
    """`50K` is 50,000."""
    return _count(text, "--train-samples", "a whole number of samples up to 1,000,000T, such as 10000, 50K or 1M")


def _count(text: str, option: str, accepted: str) -> int:
    match = re.fullmatch(r"(\d{1,30}(?:\.\d{1,30})?)([KMBGT]?)", text.strip().upper(), re.ASCII)
    count = Fraction(match[1]) * _SIZES[match[2]] if match else Fraction(0)
    if not (count.denominator == 1 and 1 <= count <= MOST_TOKENS):
        raise RequestError(f"{option}: got {text!r}, expected {accepted}.")
    return int(count)


def baseline_of(arguments: argparse.Namespace) -> Baseline | None:
    """The healthy result to compare nodes with; rejected before anything is measured if it is not one."""
    if arguments.baseline is None:
        return None
    from paceline.analysis.machine import nodes
    from paceline.results.launches import read_experiment

    return nodes.baseline_of(read_experiment(arguments.baseline)[0], str(arguments.baseline))


def exporters_of(formats: Sequence[str] | None) -> list[Exporter]:
    """The exporters; an unknown name is rejected before anything is measured."""
    from paceline.experiment.plugins import load

    return [load("exporters", name) for name in formats or DEFAULT_FORMATS]


def report(arguments: argparse.Namespace) -> int:
    baseline = baseline_of(arguments)
    costing = costing_of(arguments)
    return conclude(console(), arguments.directory, arguments.format, costing, baseline, verbose=arguments.verbose)


def conclude(
    screen: Console,
    directory: Path,
    formats: Sequence[str] | None,
    costing: Costing,
    baseline: Baseline | None = None,
    requested: Collection[str] | None = None,
    verbose: bool = False,
) -> int:
    """Build the report of a directory, print it and write its files.

    Exit code 1 if a run failed or nothing was measured. requested limits that to these runs: the directory may contain
    runs of earlier commands. verbose prints every table, otherwise the one that answers the question.
    """
    from paceline import report as presentation
    from paceline.campaign.run.findings import report_of
    from paceline.host.processes import collection_paused
    from paceline.report import summary
    from paceline.report.tables import time_spent

    exporters = exporters_of(formats)
    for exporter in exporters:
        if hasattr(exporter, "check"):
            exporter.check(directory)
    report = report_of(directory, costing, baseline)
    # Print before saying what could not be written: a full disk must not hide the answer.
    with collection_paused(), _exporting(report, exporters, directory) as exported:
        asks_cost = costing.prices is not None or costing.goal is not None
        brief = presentation.brief_group(report, with_cost=asks_cost)
        screen.print(presentation.section_group(report) if verbose else brief)
        lines = presentation.recommendation_lines(report) if verbose else presentation.brief_lines(report)
        # The headline may be the whole answer.
        headline = summary.headline(report)
        lines = [line for line in lines if verbose or line.rstrip(".") != headline]
        for line in (*lines, *(f"skipped: {text}" for text in report.skipped)):
            screen.print(line, highlight=False, markup=False)
        files = exported()
    page = [path for path in files if path.suffix == ".html"]
    shown = files if verbose or not page else page
    print_plain(screen, f"Report: {' '.join(map(str, shown))}")
    if requested is not None and (spent := time_spent.sentence(report)):
        print_hanging(screen, spent, 2)
    runs = [r for r in report.runs if requested is None or r.run in requested]
    refused = [node for node in report.nodes if node.is_refused and (requested is None or node.run in requested)]
    lost = [load for load in report.served if load.fails and (requested is None or set(load.runs) & set(requested))]
    bad = [*(r for r in runs if r.is_failure), *refused, *lost]
    ended_ok = [r for r in runs if r.status == "ok" and not r.proves_only]
    measured = {m.cell for m in report.measurements}
    # A run whose warm-up left no timed step ended ok but measured nothing.
    blank = [r for r in ended_ok if r.is_certified and r.cell not in measured]
    return OK if ended_ok and not (bad or blank or report.skipped) else SOME_FAILED


# With fewer runs, starting a process takes longer than it saves.
_EXPORTED_APART_FROM = 100
_Export = Callable[[int], list[Path]]
_export_here: _Export


@contextlib.contextmanager
def _exporting(report: Report, exporters: Sequence[Exporter], source: Path) -> Iterator[Callable[[], list[Path]]]:
    """Exports the report; what is yielded returns the files and directories written, each once. Files of a capsule go
    to a directory beside it.

    A large report is exported by a second process while this one prints it.
    """
    directory = source
    if source.is_file():
        directory = source.with_name(f"{_CAPSULE_SUFFIX.sub('', source.name)}-report")

    def export(number: int) -> list[Path]:
        try:
            directory.mkdir(exist_ok=True)
            return exporters[number].export(report, directory)
        except OSError as error:
            path = error.filename or directory
            raise RequestError(f"report: cannot write {str(path)!r} ({error.strerror or error}).") from None

    def named(exported: Iterable[list[Path]]) -> list[Path]:
        written = [path for paths in exported for path in paths]
        inside = [path.relative_to(directory).parts[0] for path in written if path.is_relative_to(directory)]
        outside = [path for path in written if not path.is_relative_to(directory)]
        return [*(directory / name for name in dict.fromkeys(inside)), *outside]

    count = len(exporters)
    if len(report.runs) < _EXPORTED_APART_FROM or count < 2 or (os.cpu_count() or 1) < 2 or sys.platform != "linux":
        yield lambda: named(map(export, range(count)))
        return
    from paceline.host.processes import forked_pool

    with forked_pool(1, _prepare_export, export) as pool:
        theirs, future = 0, pool.submit(_export_apart, 0)

        def finish() -> list[Path]:
            nonlocal theirs, future
            found: dict[int, list[Path]] = {}
            waiting = deque(range(1, count))
            while waiting or theirs not in found:
                if waiting and not future.done():
                    number = waiting.pop()
                    found[number] = export(number)
                    continue
                # What failed there fails here, and says why.
                found[theirs] = paths if (paths := future.result()) is not None else export(theirs)
                if waiting:
                    theirs, future = (number := waiting.popleft()), pool.submit(_export_apart, number)
            return named(found[number] for number in range(count))

        yield finish


def _prepare_export(export: _Export) -> None:
    global _export_here
    _export_here = export


def _export_apart(number: int) -> list[Path] | None:
    with contextlib.suppress(Exception):
        return _export_here(number)
    return None


def show(arguments: argparse.Namespace) -> int:
    from paceline.campaign.run.findings import run_lines
    from paceline.results import safe_text, store

    if not (arguments.run / "spec.json").is_file():
        raise RequestError(f"show: got {str(arguments.run)!r}, expected a run directory (DIR/<experiment>/<run id>).")
    if not store.is_sealed(arguments.run):
        positions = store.read_progress(arguments.run)
        files = len(list(arguments.run.glob("samples-*.jsonl")))
        unknown = f"{files} sample file{'s' if files > 1 else ''}, no progress" if files else "no rank started"
        where = "; ".join(f"rank {p.rank} at step {p.step} in {p.phase}" for p in positions) or unknown
        print(safe_text.text(f"{arguments.run}: not finished (running or interrupted): {where}"))
        return SOME_FAILED
    try:
        if arguments.samples:
            sys.stdout.writelines(store.sample_lines(store.read_run(arguments.run)))
        else:
            print("\n".join(run_lines(arguments.run)))
    except DamagedRunError as error:
        print(f"paceline: {safe_text.text(str(error))}. `paceline run` repeats it.", file=sys.stderr)
        return SOME_FAILED
    return OK


def logs(arguments: argparse.Namespace) -> int:
    """Print the log of a run. Ctrl-C ends it like any pager: nothing was interrupted."""
    from paceline.campaign.live import logs as run_logs

    def notify(sentence: str) -> None:
        print(f"paceline: {sentence}", file=sys.stderr, flush=True)

    run_logs.check(arguments.run, arguments.rank)
    try:
        for line in run_logs.read(arguments.run, arguments.rank, arguments.follow, notify, has_reader):
            print(line, flush=arguments.follow)
    except KeyboardInterrupt:
        return INTERRUPTED
    return OK


def compare(arguments: argparse.Namespace) -> int:
    from paceline.analysis.statistics.verdict import BETWEEN_DAYS
    from paceline.campaign.run.findings import comparison_of
    from paceline.report import gate
    from paceline.report.exporters.json import plain
    from paceline.report.tables import comparison as table

    limit = arguments.fail_on_regression
    spread = BETWEEN_DAYS
    if arguments.day_spread is not None:
        spread = gate.checked_percent(arguments.day_spread, "--day-spread") / 100
    if limit is not None:
        gate.checked_percent(limit)
    comparison, skipped = comparison_of(arguments.a, arguments.b, arguments.across_devices, spread)
    regressions = () if limit is None else gate.regressions(comparison, limit)
    answer = table.sentence(comparison)
    if arguments.format == "json":
        document = {"schema": 1, "answer": answer, **plain(comparison)}
        _print_json(document | {"regressions": plain(regressions), "skipped": skipped})
    elif arguments.format == "html":
        from paceline.report.exporters._other_pages import compare_page

        below = [*(f"regression: {r.text}" for r in regressions), *(f"skipped: {text}" for text in skipped)]
        print_plain(console(), answer)
        _write_page(arguments.b, "compare.html", compare_page(comparison, below))
    else:
        names = f"A is {comparison.first}, B is {comparison.second}."
        brief = not arguments.verbose
        lines = [*(table.equal_lines(comparison) if brief else ()), *table.lines(comparison)]
        lines += [f"regression: {r.text}" for r in regressions]
        lines += [f"skipped: {text}" for text in skipped]
        _show(
            arguments.format,
            answer,
            names,
            table.tables(comparison, brief=brief, reasons=not brief or arguments.format == "markdown"),
            lines,
        )
    if regressions:
        more = f"; and {len(regressions) - 1} more" if len(regressions) > 1 else ""
        print(f"paceline: regression beyond {limit:g} %: {regressions[0].text}{more}", file=sys.stderr)
    damaged = [] if limit is None else [text for text in skipped if DAMAGED in text]
    if damaged:
        print(f"paceline: the gate cannot pass with damaged runs: {damaged[0]}", file=sys.stderr)
    if regressions or damaged or not comparison.changes:
        return SOME_FAILED
    return OK if limit is None or _could_catch(comparison, limit) else TOO_NOISY


def _could_catch(comparison: Between, limit: float) -> bool:
    """Print the smallest regression that the gate could have caught; False if it is larger than the limit."""
    from paceline.report import gate
    from paceline.wording import short_percent

    least = gate.least_visible(comparison)
    if least is None:
        return True
    smallest = gate.catchable(least)
    where = f"in {least.label}" + (f", {least.row}" if least.row else "")
    is_enough = smallest * 100 <= limit
    if math.isinf(smallest):
        text = f"the gate could not have caught any regression {where}: {least.reason}"
    else:
        text = f"the gate could have caught a regression of {short_percent(smallest)} or more {where}"
    if not is_enough and not math.isinf(smallest):
        quieter = "the same day and node or more days" if comparison.occasions else "a quieter machine"
        text += f", which is more than the {limit:g} % asked for: use more launches, {quieter}, or a larger limit"
    print(f"paceline: {text}", file=sys.stderr)
    return is_enough


def history(arguments: argparse.Namespace) -> int:
    from paceline.campaign.run.findings import history_of
    from paceline.report.exporters.json import plain
    from paceline.report.tables import history as table

    found = history_of(arguments.directories)
    answer = table.sentence(found.series)
    if arguments.format == "json":
        document = {"schema": 1, "answer": answer, "histories": plain(found.series)}
        _print_json(document | {"dropped": found.dropped, "skipped": list(found.skipped)})
    elif arguments.format == "html":
        from paceline.report.exporters._other_pages import history_page

        print_plain(console(), answer)
        page = history_page(found.title, found.series, found.names, found.lines)
        _write_page(arguments.directories[0], "history.html", page)
    else:
        _show(arguments.format, answer, found.names, table.tables(found.series), found.lines)
    return OK


def ui(arguments: argparse.Namespace) -> int:
    """Serve the pages until Ctrl-C."""
    import signal
    import webbrowser

    from paceline.campaign.ui.library import Library
    from paceline.campaign.ui.routes import App
    from paceline.campaign.ui.server import serving

    directory = arguments.directory or arguments.out
    require_directory(directory, "ui" if arguments.directory else "--out")
    with serving(App(Library(directory)), arguments.listen) as address:
        print(f"{address}\nEnd it with Ctrl-C.", flush=True)
        if arguments.open:
            webbrowser.open(address)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
    return OK


def _write_page(source: Path, name: str, text: str) -> None:
    """Write a page into a results directory, or beside a capsule, and print where it is."""
    from paceline.host.files import write_atomically

    path = (source if source.is_dir() else source.parent) / name
    try:
        write_atomically(path, text)
    except OSError as error:
        raise RequestError(f"--format html: cannot write {str(path)!r} ({error.strerror or error}).") from None
    print_plain(console(), f"Page: {path}")


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False))


def _show(form: str, answer: str, names: str, tables: Sequence[Table], lines: Iterable[str]) -> None:
    """Print the answer, its evidence and the notes: on a terminal, or as Markdown for a pull request."""
    from paceline import report
    from paceline.report.exporters import markdown

    if form == "markdown":
        page = markdown.Page()
        parts = [f"**{markdown.escape(answer)}**", markdown.escape(names)]
        parts += [page.titled(table, level=3) for table in tables]
        print("\n\n".join([*parts, page.bullets(tuple(lines))]).strip())
        return
    screen = console()
    for text in (answer, names):
        print_plain(screen, text)
    screen.print(report.drawn(tables))
    for line in lines:
        print_plain(screen, line)
