"""The command line: one module for each group of verbs, and the only package that prints.

May import everything. Start with `__init__.main`, which finds the verb, then `verbs`, which holds what verbs share
(exit codes, the console). A verb parses its arguments, calls one function of a lower package and prints the result.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from paceline import __version__
from paceline.cli import (
    advice,
    capsules,
    cluster,
    comparisons,
    experiments,
    images,
    imports,
    machines,
    results,
    schedules,
    serving,
)
from paceline.cli.verbs import INTERRUPTED, OK, SOME_FAILED, WRONG_REQUEST, Parser, discard_output
from paceline.errors import PacelineError
from paceline.results import safe_text

__all__ = ["INTERRUPTED", "OK", "SOME_FAILED", "WRONG_REQUEST", "main", "parser"]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 all ok and valid, 1 some run failed or is invalid, 2 the request was wrong, 130 interrupted.

    Without a verb it prints the help and returns 0. A reader that leaves early (`| head -1`) is no error.
    """
    try:
        try:
            arguments = parser().parse_args(argv)
            call: Callable[[argparse.Namespace], int] = arguments.call
            return call(arguments)
        finally:
            sys.stdout.flush()
    except PacelineError as error:
        # It may quote a file, and one that could not be read was not made harmless.
        print(f"paceline: {safe_text.text(str(error))}", file=sys.stderr)
        return WRONG_REQUEST
    except KeyboardInterrupt as stop:
        done = f"{stop}; " if str(stop) else ""
        kept = "what was measured is kept, and the same command goes on from here"
        print(f"paceline: interrupted; {done}{kept}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        discard_output()
        return OK


def parser() -> Parser:
    what = "Compare ways of training language models on work proved equal; ask served ones by a schedule."
    root = Parser(prog="paceline", description=what)
    root.add_argument("--version", action="version", version=f"paceline {__version__}")
    root.set_defaults(call=lambda _: _print_help(root))
    verbs = root.add_subparsers(metavar="VERB", parser_class=Parser)
    beyond = (cluster, images, schedules, serving)
    for module in (experiments, results, comparisons, advice, capsules, imports, machines, *beyond):
        module.add_verbs(verbs)
    return root


def _print_help(root: Parser) -> int:
    root.print_help()
    return OK
