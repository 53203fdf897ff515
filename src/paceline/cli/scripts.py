"""Verbs about the user's own training code: measure it, gate its changes, and write the winner as files."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.cli.experiments import run_experiment
from paceline.cli.overview import OK, SOME_FAILED, TOO_NOISY
from paceline.cli.results import add_report_options, compare
from paceline.cli.verbs import DEFAULT_OUT, add_list_option, add_out_option, add_verb
from paceline.errors import RequestError, require

DEFAULT_REPEATS = 3
# What the comment of the gate calls its exit codes.
GATE = {OK: "passed", SOME_FAILED: "failed", TOO_NOISY: "undecided"}
_EXIT = re.compile(r"the script (?:ended with exit code (\d+)|was ended by signal (\d+))")


def add_verbs(verbs: Any) -> None:
    verb = add_verb(verbs, "measure", measure, "measure a training script, unchanged: paceline measure -- CMD ...")
    verb.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD ...", help="the command as you start it")
    add_out_option(verb, "results directory", DEFAULT_OUT)
    verb.add_argument("--name", metavar="NAME", help="name of the experiment (default: that of the script)")
    verb.add_argument(
        "--repeats", type=int, default=DEFAULT_REPEATS, metavar="N", help="launches (default: %(default)s)"
    )
    verb.add_argument("--steps", type=int, metavar="N", help="end the script after N optimizer steps")
    verb.add_argument("--processes", type=int, metavar="N", help="ranks, if the command does not say it")
    verb.add_argument("--trace", metavar="STEPS", help="keep the profiler trace of these warm-up steps, such as 2-3")
    verb.add_argument("--resume", action="store_true", help="also repeat runs that did not end ok")
    add_list_option(verb, "--set", "KEY=VALUE", "set a field; a list of values makes an axis")
    add_report_options(verb)
    verb = add_verb(verbs, "gate", gate, "fail a build if results are slower than a baseline, with a comment for it")
    verb.add_argument("a", type=Path, metavar="BASELINE", help="results of the baseline")
    verb.add_argument("b", type=Path, metavar="DIR", help="the results to judge")
    verb.add_argument(
        "--limit",
        type=float,
        default=5.0,
        metavar="PCT",
        help="largest accepted loss in percent (default: %(default)g)",
    )
    verb.add_argument("--comment", type=Path, metavar="FILE", help="write the comparison as Markdown")
    verb = add_verb(verbs, "recipe", recipe, "write the winning configuration as files for another tool")
    verb.add_argument("directory", type=Path, metavar="DIR", help="a results directory or capsule")
    verb.add_argument(
        "--for",
        dest="tool",
        required=True,
        metavar="TOOL",
        help="accelerate, deepspeed, huggingface, torchrun, torchtitan",
    )
    verb.add_argument("--to", type=Path, default=Path("recipe"), metavar="DIR", help="where (default: %(default)s)")


def measure(arguments: argparse.Namespace) -> int:
    """Write the experiment file of the command and run it. A failed script gives its own exit code."""
    command = [word for number, word in enumerate(arguments.command) if number or word != "--"]
    require(bool(command), "measure", None, "a command behind --, such as -- python train.py")
    # The script itself, or the one behind `python`: what an option of another program means is not known.
    script = next((word for word in command[:2] if word.endswith(".py") and "{" not in word), None)
    require(
        script is None or Path(script).is_file(), "measure", script, "a script that exists, seen from this directory"
    )
    if command[0] != "-m" and not command[0].endswith(".py"):
        is_program = "{" in command[0] or shutil.which(command[0]) is not None
        require(is_program, "measure", command[0], "a program on the PATH, or a .py file")
    require(arguments.steps is None or arguments.steps > 0, "measure: --steps", arguments.steps, "a number from 1")
    with written_experiment(command, arguments) as source:
        require_possible(source, arguments.set)
        code = run_experiment(
            argparse.Namespace(
                experiment=str(source),
                launcher=None,
                benchmark="all",
                warmup=None,
                iters=None,
                allow_modules=["command"],
                keep_going=False,
                no_cache=True,
                relaunch=None,
                until=None,
                time_budget=None,
                **{name: getattr(arguments, name) for name in ("out", "set", "resume", *REPORT_OPTIONS)},
            )
        )
    return code if code == 0 else script_exit_code(source.parent / source.stem) or code


REPORT_OPTIONS = ("format", "price", "train_tokens", "train_samples", "busy_hours", "baseline", "verbose")


@contextlib.contextmanager
def written_experiment(command: list[str], arguments: argparse.Namespace) -> Iterator[Path]:
    """The experiment as a file beside its results, so that `paceline run` can repeat and change it.

    If the command is refused, the file is again what it was before, or absent.
    """
    import yaml

    from paceline.experiment.script import Script, require_no_secret
    from paceline.host import files

    require_no_secret(command, {})
    name = _name_of(Script(command=tuple(command)).title) if arguments.name is None else arguments.name
    accepted = "a name of letters, digits, '.', '_' and '-', beginning with a letter or digit"
    require(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) is not None, "--name", name, accepted)
    trace = {} if arguments.trace is None else {"trace": arguments.trace}
    given = {"steps": arguments.steps, "processes": arguments.processes}
    base = {
        "workload": {"name": "script", **trace} if trace else "script",
        "command": command,
        **{field: value for field, value in given.items() if value is not None},
    }
    document = {"name": name, "base": base, "repeats": arguments.repeats}
    path = Path(arguments.out) / f"{name}.yaml"
    is_new = not path.parent.exists()
    try:
        before = path.read_bytes() if path.exists() else None
        files.write_atomically(path, yaml.safe_dump(document, sort_keys=False, allow_unicode=True))
    except OSError as error:
        raise RequestError(f"--out: {str(path)!r} cannot be written ({error.strerror}).") from None
    try:
        yield path
    except RequestError:
        if before is not None:
            files.write_atomically(path, before)
        else:
            path.unlink(missing_ok=True)
        if is_new:
            # Other files of the command may be there.
            with contextlib.suppress(OSError):
                path.parent.rmdir()
        raise


def _name_of(title: str) -> str:
    """The name of an experiment with this script.

    >>> _name_of("train.py"), _name_of("_my train.py"), _name_of("⚡.py")
    ('train', 'my-train', 'script')
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", title.removesuffix(".py")).strip("._-") or "script"


def require_possible(source: Path, settings: list[str]) -> None:
    """RequestError if no run of the experiment is possible. `paceline run` makes a record of each of them instead."""
    from paceline.campaign.run.controller import load_own
    from paceline.experiment import plugins

    specs = load_own(str(source), settings, None, "all", {}, allow=["command"])
    refusals = [plugins.load("workloads", spec.workload.name).check(spec) for spec in specs]
    if all(refusals):
        raise RequestError(f"measure: {refusals[0]}.")


def gate(arguments: argparse.Namespace) -> int:
    """As `compare --fail-on-regression`, with the same exit codes; the comment is its Markdown below the outcome."""
    from paceline.report.gate import checked_percent

    checked_percent(arguments.limit, "--limit")
    text, said = io.StringIO(), io.StringIO()
    options = {"across_devices": False, "verbose": True, "day_spread": None, "fail_on_regression": arguments.limit}
    wanted = argparse.Namespace(a=arguments.a, b=arguments.b, format="markdown", **options)
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(said):
        code = compare(wanted)
    print(said.getvalue(), end="", file=sys.stderr)
    if arguments.comment is None:
        print(text.getvalue(), end="")
    else:
        reasons = [line.removeprefix("paceline: ") for line in said.getvalue().splitlines()]
        why = "".join(f" {reason[:1].upper()}{reason[1:]}." for reason in reasons)
        outcome = f"Performance gate at {arguments.limit:g} %: **{GATE[code]}**.{why}"
        arguments.comment.write_text(f"{outcome}\n\n{text.getvalue()}", encoding="utf-8")
        print(text.getvalue().strip().partition("\n")[0])
    return code


def recipe(arguments: argparse.Namespace) -> int:
    from paceline.analysis.report import build
    from paceline.report import handover
    from paceline.results.launches import read_experiment

    known = handover.tools()
    require(arguments.tool in known, "--for", arguments.tool, ", ".join(known))
    records, skipped = read_experiment(arguments.directory)
    files = handover.files_for(arguments.tool, handover.winner_of(build(records, title="", skipped=skipped)))
    arguments.to.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (arguments.to / name).write_text(content, encoding="utf-8")
        print(arguments.to / name)
    return OK


def script_exit_code(directory: Path) -> int | None:
    """The exit code of the first run in which the script failed, 128 + N for signal N as in a shell; None if none
    did."""
    from paceline.results.launches import read_experiment

    for record in read_experiment(directory)[0] if directory.is_dir() else ():
        if match := _EXIT.search(record.error or ""):
            return int(match[1]) if match[1] else 128 + int(match[2])
    return None
