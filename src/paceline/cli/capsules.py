"""Verbs for results that outlive their machine: pack them, run them again."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.verbs import OK, SOME_FAILED, add_verb, console

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.campaign.run.replay import Request
    from paceline.results.records import RunRecord

DEFAULT_OUT = "replays"


def add_verbs(verbs: Any) -> None:
    verb = add_verb(
        verbs, "capsule", capsule, "pack sealed runs into one file that can be read and repeated years later"
    )
    verb.add_argument("directory", type=Path, metavar="RUN|DIR", help="a run, an experiment or a results folder")
    verb.add_argument("target", type=Path, metavar="FILE", help="the capsule to write, as out.tar.gz")
    verb.add_argument("--logs", action="store_true", help="also what was printed and how it was started")
    verb.add_argument("--force", action="store_true", help="replace the file if it exists")
    verb = add_verb(verbs, "replay", replay, "run a capsule again and say whether it reproduced within the intervals")
    verb.add_argument("capsule", type=Path, metavar="CAPSULE", help="what `paceline capsule` wrote")
    verb.add_argument(
        "--out", type=Path, default=Path(DEFAULT_OUT), help="folder of the new runs (default: %(default)s)"
    )
    verb.add_argument("--launcher", metavar="NAME", help="where to run; `paceline list launchers`")
    verb.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="another launcher, steps, repeats or limits"
    )
    verb.add_argument("--only", action="append", default=[], metavar="CELL", help="the beginning of a cell or run name")
    verb.add_argument("--dry-run", action="store_true", help="show what would run; nothing is started")
    verb.add_argument("--allow-modules", action="store_true", help="let specs name plugins by module: their code runs")


def capsule(arguments: argparse.Namespace) -> int:
    from paceline.results.capsule import pack

    packed = pack(arguments.directory, arguments.target, logs=arguments.logs, force=arguments.force)
    for note in packed.notes:
        print(note)
    print(f"{packed.path}: {packed.runs} runs, {packed.path.stat().st_size:,} bytes, sha256 {packed.sha256}")
    return OK


def replay(arguments: argparse.Namespace) -> int:
    from paceline.campaign.run import replay as replaying
    from paceline.campaign.run.controller import read_experiment, unsupported
    from paceline.errors import require

    require(not arguments.capsule.is_dir(), "replay", str(arguments.capsule), "a file that `paceline capsule` wrote")
    stored, skipped = read_experiment(arguments.capsule)
    wanted = replaying.request(
        stored, arguments.set, arguments.launcher, arguments.only, foreign=arguments.allow_modules
    )
    for spec in wanted.specs:
        unsupported(spec)
    replaying.require_folder(arguments.out)
    replaying.refuse_originals(arguments.out, stored)
    screen = console()
    for text in (*skipped, *wanted.left_out):
        screen.print(f"left out: {text}", highlight=False, markup=False, soft_wrap=True)
    if arguments.dry_run:
        return _show_plan(screen, stored, wanted, arguments.out)
    return _run_again(screen, stored, wanted, arguments.out)


def _show_plan(screen: Console, stored: Sequence[RunRecord], wanted: Request, out: Path) -> int:
    from paceline.campaign.run.controller import references_of, unsupported
    from paceline.host import machine
    from paceline.report.replay import difference_line
    from paceline.results import store

    for number, spec in enumerate((*references_of(wanted.specs).values(), *wanted.specs), 1):
        reason = unsupported(spec)
        sealed = store.is_sealed(out / spec.experiment / spec.run_id)
        note = f"unsupported: {reason}" if reason else "made by an earlier replay" if sealed else "to run"
        screen.print(f"{number:>3} {spec.run_id}  [{note}]", highlight=False, markup=False, soft_wrap=True)
    facts = next((facts for record in stored for facts in record.machines), None)
    if facts is not None:
        here = machine.to_dict(machine.probe())
        found = machine.fingerprint_diff(facts, here)
        # Stored are the variables of a rank, some of which its launcher has set: this process has none of those.
        found = {path: sides for path, sides in found.items() if not path.startswith("environment.")}
        line = difference_line("this machine", found)
        screen.print(line, highlight=False, markup=False, soft_wrap=True)
    return OK


def _run_again(screen: Console, stored: Sequence[RunRecord], wanted: Request, out: Path) -> int:
    import dataclasses

    from paceline.analysis.reproduction import reproduce
    from paceline.campaign.live import display
    from paceline.campaign.run import replay as replaying
    from paceline.campaign.run.controller import campaign, interruptible, references_of
    from paceline.report.replay import reproduction_lines, reproduction_table
    from paceline.results import store

    known = replaying.known_runs(wanted.specs, out)
    observer = display.observer_for(screen)
    names = dict.fromkeys(spec.experiment for spec in wanted.specs)
    groups = [[spec for spec in wanted.specs if spec.experiment == name] for name in names]
    try:
        for group in groups:
            interruptible(lambda specs=group: campaign(specs, out, observer, retry=True))  # type: ignore[misc]
    finally:
        observer.close()
    references = [spec for group in groups for spec in references_of(group).values()]
    found = reproduce(stored, replaying.replayed(wanted.specs, references, out), wanted.origins)
    store.write_json(out / "replay.json", dataclasses.asdict(found))
    if (table := reproduction_table(found)) is not None:
        screen.print(table)
    if known:
        screen.print(
            f"{known} runs are of an earlier replay in {out}; another --out measures them anew", highlight=False
        )
    for line in reproduction_lines(found):
        screen.print(line, highlight=False, markup=False, soft_wrap=True)
    return OK if found.reproduced else SOME_FAILED
