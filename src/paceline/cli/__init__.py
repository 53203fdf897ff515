"""The command line: one module per group of verbs, and the only package that prints.

May import everything. Start with `main`, which finds the verb, then read `verbs`, which has what the verbs share (exit
codes, the parser, the console). A verb parses its arguments, calls one function of a lower package and prints the
result.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Sequence

from paceline import __version__
from paceline.cli import (
    archives,
    choices,
    cluster,
    experiments,
    goodput,
    machines,
    predictions,
    results,
    schedules,
    scripts,
    serving,
    start,
)
from paceline.cli.verbs import INTERRUPTED, OK, SOME_FAILED, WRONG_REQUEST, Parser, discard_output, storage_advice
from paceline.errors import PacelineError
from paceline.results import safe_text

__all__ = ["INTERRUPTED", "OK", "SOME_FAILED", "WRONG_REQUEST", "main", "parser"]

DESCRIPTION = (
    "Benchmark distributed LLM training and inference. Paceline compares training strategies only after certifying "
    "that they did equal work, and load-tests model servers on a fixed schedule."
)
# The order of the verbs in `paceline --help`.
GROUPS = {
    "Run experiments": ("start", "run", "measure", "plan", "status", "logs", "stream", "schedule"),
    "Predict before running": ("predict", "choose"),
    "Read and compare results": ("ui", "report", "show", "compare", "gate", "history", "recipe", "goodput"),
    "Archive, reproduce, import": ("capsule", "replay", "import"),
    "Check and watch this machine": ("doctor", "monitor"),
    "Prepare clusters and images": ("cluster", "image"),
    "Test the load generator": ("selftest", "mock-replica"),
    "Look things up": ("list",),
}
LONGEST_MESSAGE = 2000
CLOSING = "New here? `paceline start` asks three questions. `paceline VERB --help` explains one verb."


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 all runs ok and valid, 1 a run failed or is invalid, 2 the request was wrong, 130 interrupted.

    Without a verb it prints the help and returns 0. A reader that closes the pipe early (`| head -1`) is not an error.
    A disk that is full, read-only or gone is for the user to fix: one sentence and exit code 2.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal without UTF-8 shows `?` instead of ending the command.
            stream.reconfigure(errors="replace")
    try:
        try:
            arguments = parser().parse_args(argv)
            call: Callable[[argparse.Namespace], int] = arguments.call
            return call(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        return OK
    except OSError as error:
        if (advice := storage_advice(error)) is None:
            raise
        print(f"paceline: {safe_text.text(advice)}", file=sys.stderr)
        return WRONG_REQUEST
    except PacelineError as error:
        # The message may quote the content of a file.
        print(f"paceline: {safe_text.text(_shortened(str(error)))}", file=sys.stderr)
        return WRONG_REQUEST
    except KeyboardInterrupt as stop:
        done = f"{stop}; " if str(stop) else ""
        print(f"paceline: interrupted; {done}finished runs are kept, repeat the command to continue", file=sys.stderr)
        return INTERRUPTED


def _shortened(message: str) -> str:
    """A message that repeats a huge value, without the middle of it."""
    if len(message) <= LONGEST_MESSAGE:
        return message
    half = LONGEST_MESSAGE // 2
    return f"{message[:half]} ... {message[-half:]}"


def parser() -> Parser:
    root = Parser(prog="paceline", description=DESCRIPTION, epilog=CLOSING)
    root.add_argument("--version", action="version", version=f"paceline {__version__}")

    def print_help(_: argparse.Namespace) -> int:
        root.print_help()
        return OK

    root.set_defaults(call=print_help)
    verbs = root.add_subparsers(metavar="VERB", parser_class=Parser)
    for module in (
        start,
        experiments,
        scripts,
        predictions,
        choices,
        results,
        goodput,
        archives,
        machines,
        cluster,
        schedules,
        serving,
    ):
        module.add_verbs(verbs)
    root.groups = {title: {name: verbs.choices[name].summary for name in names} for title, names in GROUPS.items()}
    return root
