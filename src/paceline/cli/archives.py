"""Verbs for results that outlive their machine: pack runs, replay them, import published tables."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from paceline.cli.overview import OK, SOME_FAILED
from paceline.cli.verbs import add_allow_option, add_list_option, add_out_option, add_verb, console, print_plain
from paceline.results import safe_text


def add_verbs(verbs: Any) -> None:
    verb = add_verb(
        verbs, "capsule", capsule, "pack finished runs into one archive that can be read and replayed later"
    )
    verb.add_argument("directory", type=Path, metavar="RUN|DIR", help="a run, an experiment or a results directory")
    verb.add_argument("target", type=Path, metavar="FILE", nargs="?", help="the archive to write, such as out.tar.gz")
    verb.add_argument("--logs", action="store_true", help="include the logs and the start commands")
    verb.add_argument("--force", action="store_true", help="replace FILE if it exists")
    verb.add_argument(
        "--verify", action="store_true", help="check an archive instead: `capsule --verify FILE --digest HEX`"
    )
    verb.add_argument("--digest", metavar="HEX", help="the digest that was printed when the archive was written")
    verb = add_verb(verbs, "replay", replay, "run a capsule again and check whether it reproduces within the intervals")
    verb.add_argument("capsule", type=Path, metavar="CAPSULE", help="an archive written by `paceline capsule`")
    add_out_option(verb, "directory for the new runs", "replays")
    verb.add_argument("--launcher", metavar="NAME", help="where to run; see `paceline list launchers`")
    add_list_option(verb, "--set", "KEY=VALUE", "change the launcher, steps, repeats or limits")
    add_list_option(verb, "--only", "CELL", "replay only cells or runs whose name begins so")
    verb.add_argument("--dry-run", action="store_true", help="show what would run, start nothing")
    add_allow_option(verb, "a module, or a setting such as launcher or engine.url, that may come from the capsule")
    verb = add_verb(verbs, "import", import_claims, "import a published results table as claims, never ranked")
    verb.add_argument("table", type=Path, metavar="CSV", help="one row per claimed run; see docs/seed-table.md")
    add_out_option(verb)


def capsule(arguments: argparse.Namespace) -> int:
    from paceline.errors import RequestError, require
    from paceline.results.capsule import pack, verify

    if arguments.verify:
        require(arguments.target is None, "capsule --verify", str(arguments.target), "one archive")
        packed = verify(arguments.directory, arguments.digest)
    else:
        if arguments.target is None:
            raise RequestError("capsule: got no FILE, expected an archive to write, such as out.tar.gz.")
        require(arguments.digest is None, "--digest", arguments.digest, "--verify beside it")
        packed = pack(arguments.directory, arguments.target, logs=arguments.logs, force=arguments.force)
    for note in packed.notes:
        print(safe_text.text(note))
    print(f"{packed.path}: {packed.runs} runs, {packed.path.stat().st_size:,} bytes, sha256 {packed.sha256}")
    print(f"digest {packed.digest}")
    if arguments.verify:
        print(f"Every file is as it was packed{', and the digest is the one given' if arguments.digest else ''}.")
    return OK


def import_claims(arguments: argparse.Namespace) -> int:
    from paceline.results.claims import import_table

    directory, count = import_table(arguments.table, arguments.out)
    print(f"Imported {count} claimed runs into {directory}. Next: paceline report {directory}")
    return OK


def replay(arguments: argparse.Namespace) -> int:
    """Check the request as a whole, run what is left of it, and compare the new runs with the stored ones."""
    import dataclasses

    from paceline.analysis.reproduction import reproduce
    from paceline.campaign.live import display
    from paceline.campaign.run import replay as replaying
    from paceline.campaign.run.controller import campaign, interruptible
    from paceline.campaign.run.proofs import Proving
    from paceline.campaign.run.references import references_of, unsupported
    from paceline.errors import require
    from paceline.experiment import foreign
    from paceline.host import machine
    from paceline.report.replay import difference_line, reproduction_lines, reproduction_table
    from paceline.results import store
    from paceline.results.launches import read_experiment

    out: Path = arguments.out
    require(arguments.capsule.is_file(), "replay", str(arguments.capsule), "a file written by `paceline capsule`")
    stored, skipped = read_experiment(arguments.capsule)
    request = replaying.request(
        stored,
        arguments.set,
        arguments.launcher,
        arguments.only,
        allowed=foreign.allowed_names(arguments.allow_modules),
    )
    for spec in request.specs:
        unsupported(spec)
    replaying.require_directory(out)
    replaying.refuse_originals(out, stored)
    screen = console()
    for text in (*skipped, *request.left_out):
        print_plain(screen, f"left out: {text}")
    for text in request.dropped:
        print_plain(screen, f"not taken from the capsule: {text}")
    if arguments.dry_run:
        for number, spec in enumerate((*Proving(request.specs).runs, *request.specs), 1):
            reason = unsupported(spec)
            sealed = store.is_sealed(out / spec.experiment / spec.run_id)
            note = f"unsupported: {reason}" if reason else "finished by an earlier replay" if sealed else "to run"
            print_plain(screen, f"{number:>3} {spec.run_id}  [{note}]")
        facts = next((facts for record in stored for facts in record.machines), None)
        if facts is not None:
            differences = machine.fingerprint_diff(facts, machine.to_dict(machine.probe()))
            # The stored environment is that of a rank: its launcher set variables that this process does not have.
            differences = {path: sides for path, sides in differences.items() if not path.startswith("environment.")}
            print_plain(screen, difference_line("this machine", differences))
        return OK
    known = replaying.known_runs(request.specs, out)
    observer = display.observer_for(screen)
    names = dict.fromkeys(spec.experiment for spec in request.specs)
    groups = [[spec for spec in request.specs if spec.experiment == name] for name in names]
    try:
        for group in groups:
            interruptible(lambda specs=group: campaign(specs, out, observer, retry=True))  # type: ignore[misc]
    finally:
        observer.close()
    references = [spec for group in groups for spec in references_of(group).values()]
    reproduction = reproduce(stored, replaying.replayed(request.specs, references, out), request.origins)
    store.write_json(out / "replay.json", dataclasses.asdict(reproduction))
    if (table := reproduction_table(reproduction)) is not None:
        screen.print(table)
    if known:
        print_plain(
            screen, f"{known} runs come from an earlier replay in {out}; use another --out to measure them again"
        )
    for line in reproduction_lines(reproduction):
        print_plain(screen, line)
    return OK if reproduction.reproduced else SOME_FAILED
