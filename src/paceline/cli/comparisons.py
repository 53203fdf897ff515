"""Verbs that set results beside other results: two folders, or folders over time."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.verbs import OK, SOME_FAILED, add_verb, console

if TYPE_CHECKING:
    from paceline.analysis.findings import Between, Regression
    from paceline.report.tables.table import Table

MOST_REASONS = 5
FORMATS = ("terminal", "markdown", "json")


def add_verbs(verbs: Any) -> None:
    verb = add_verb(verbs, "compare", compare, "two result folders, cell by cell: what changed, and what else differs")
    verb.add_argument("a", type=Path, metavar="DIR_A", help="the folder to compare with")
    verb.add_argument("b", type=Path, metavar="DIR_B", help="the folder that is judged")
    verb.add_argument(
        "--fail-on-regression",
        type=float,
        metavar="PCT",
        help="exit code 1 where B is worse by more than PCT percent over the whole interval, lost a cell, or seems "
        "worse where nothing could be decided",
    )
    verb.add_argument("--across-devices", action="store_true", help="also compare different kinds of device")
    verb.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="default: %(default)s")
    verb = add_verb(verbs, "history", history, "cells over time, with the launches at which their level changed")
    verb.add_argument("directories", type=Path, nargs="+", metavar="DIR", help="results of several days, or above them")
    verb.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="default: %(default)s")


def compare(arguments: argparse.Namespace) -> int:
    from paceline.analysis.compare import folders
    from paceline.campaign.run.controller import read_experiment
    from paceline.report import gate

    limit = arguments.fail_on_regression
    if limit is not None:
        gate.checked_percent(limit)
    (a, skipped_a), (b, skipped_b) = read_experiment(arguments.a), read_experiment(arguments.b)
    found = folders.compare_experiments(a, b, (str(arguments.a), str(arguments.b)), arguments.across_devices)
    failing = () if limit is None else gate.regressions(found, limit)
    _show_comparison(found, failing, (*skipped_a, *skipped_b), arguments.format)
    if failing:
        more = f"; and {len(failing) - 1} more" if len(failing) > 1 else ""
        print(f"paceline: regression beyond {limit:g} %: {failing[0].text}{more}", file=sys.stderr)
    blind = limit is not None and _told_blind(found, limit)
    return SOME_FAILED if failing or blind or not found.changes else OK


def _told_blind(found: Between, limit: float) -> bool:
    """Says what the gate could not judge; True where nothing else could have shown it, so that to pass would mean
    nothing."""
    from paceline.report import gate
    from paceline.report.tables.comparison import change_text

    losses, unseen = gate.undecided_losses(found, limit), gate.unseen_losses(found, limit)
    if not losses:
        return False
    looked_at = gate.gated(found)
    undecided = sum(c.verdict is None for c in looked_at)
    said = f"{undecided} {'comparison has' if undecided == 1 else 'comparisons have'} no verdict"
    said += f"; the largest change for the worse is {change_text((unseen or losses)[0])}"
    if unseen:
        blind_to = "nothing" if undecided == len(looked_at) else "no latency of this load"
        said += f"; {blind_to} was decided, so this fails"
    print(f"paceline: {said}", file=sys.stderr)
    return bool(unseen)


def _show_comparison(found: Between, failing: Sequence[Regression], skipped: Sequence[str], form: str) -> None:
    from paceline.report.exporters.json import plain
    from paceline.report.tables import comparison as folders

    answer = folders.sentence(found)
    if form == "json":
        told = {"schema": 1, "answer": answer, **plain(found)}
        _print_json(told | {"regressions": plain(failing), "skipped": skipped})
        return
    names = f"A is {found.first}, B is {found.second}."
    lines = (*folders.lines(found), *(f"regression: {r.text}" for r in failing), *(f"skipped: {s}" for s in skipped))
    _show(form, answer, names, folders.tables(found), lines)


def history(arguments: argparse.Namespace) -> int:
    from paceline.analysis.compare import history as over_time
    from paceline.campaign.run.controller import read_launches
    from paceline.report.exporters.json import plain
    from paceline.report.tables import history as history_tables

    read = [read_launches(directory) for directory in arguments.directories]
    launches, skipped = ([one for side in sides for one in side] for sides in zip(*read, strict=True))
    judged = over_time.judge(launches)
    found = over_time.analyse(judged.windows, fewest=1, asked=judged.asked)
    answer = history_tables.sentence(found)
    if arguments.format == "json":
        told = {"schema": 1, "answer": answer, "histories": plain(found)}
        _print_json(told | {"dropped": dict(judged.dropped), "skipped": skipped})
        return OK
    asked, where = sum(map(over_time.is_kept, launches)), ", ".join(map(str, arguments.directories))
    names = f"{asked} launches in {where}; {judged.count} of them ok and certified."
    lines = (*_dropped(judged.dropped), *(f"skipped: {text}" for text in skipped))
    _show(arguments.format, answer, names, history_tables.tables(found), lines)
    return OK


def _dropped(reasons: Mapping[str, int]) -> Iterator[str]:
    """The most frequent first; JSON holds all."""
    counted = [f"{count} of them: {reason}" for reason, count in reasons.items()]
    yield from (f"not counted, {text}" for text in counted[:MOST_REASONS])
    if len(counted) > MOST_REASONS:
        yield f"not counted, for {len(counted) - MOST_REASONS} more reasons; --format json holds all"


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False))


def _show(form: str, answer: str, names: str, tables: Sequence[Table], lines: Iterable[str]) -> None:
    """The answer, its evidence, what else to know: on a terminal, or as Markdown for a pull request."""
    from paceline import report
    from paceline.report.exporters import markdown

    if form == "markdown":
        page = markdown.Page()
        parts = [f"**{markdown.escape(answer)}**", markdown.escape(names)]
        parts += [page.section(table.title, table).replace("## ", "### ", 1) for table in tables]
        print("\n\n".join([*parts, page.bullets(tuple(lines))]).strip())
        return
    screen = console()
    for text in (answer, names):
        screen.print(text, highlight=False, markup=False, soft_wrap=True)
    screen.print(report.drawn(tables))
    for line in lines:
        screen.print(line, highlight=False, markup=False, soft_wrap=True)
