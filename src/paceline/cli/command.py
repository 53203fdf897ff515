"""Find the verb of a command line, call it, and turn what goes wrong into one sentence and an exit code."""

from __future__ import annotations

import argparse
import importlib
import io
import re
import sys
from collections.abc import Callable, Sequence

from paceline import __version__
from paceline.cli.overview import CLOSING, DESCRIPTION, INTERRUPTED, OK, VERBS, WRONG_REQUEST
from paceline.cli.verbs import Parser, discard_output, storage_advice
from paceline.errors import LONGEST_SHOWN, PacelineError
from paceline.results import safe_text

LONGEST_MESSAGE = 2000


def main(words: Sequence[str]) -> int:
    """The exit code of a command line (see `paceline.cli.main`)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal without UTF-8 shows `?` instead of ending the command.
            stream.reconfigure(errors="replace")
    try:
        try:
            arguments = parser(words[0] if words else None).parse_args(words)
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
        print(f"paceline: {safe_text.text(_shortened(advice))}", file=sys.stderr)
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
    """A message that repeats a huge value, without most of it."""
    message = re.sub(r"\S{400,}", lambda found: f"{found[0][:LONGEST_SHOWN]}... ({len(found[0])} characters)", message)
    if len(message) <= LONGEST_MESSAGE:
        return message
    half = LONGEST_MESSAGE // 2
    return f"{message[:half]} ... {message[-half:]}"


def parser(verb: str | None = None) -> Parser:
    """The parser of all verbs, or only of those in the module of a known verb: importing the others takes longer than
    many verbs do."""
    root = Parser(prog="paceline", description=DESCRIPTION, epilog=CLOSING)
    root.add_argument("--version", action="version", version=f"paceline {__version__}")
    root.is_root = True

    def print_help(_: argparse.Namespace) -> int:
        root.print_help()
        return OK

    root.set_defaults(call=print_help)
    verbs = root.add_subparsers(metavar="VERB", parser_class=Parser)
    modules = {name: module for listed in VERBS.values() for name, (module, _) in listed.items()}
    for module in (modules[verb],) if verb in modules else dict.fromkeys(modules.values()):
        importlib.import_module(f"paceline.cli.{module}").add_verbs(verbs)
    return root
