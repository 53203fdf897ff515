"""The command line: one module per group of verbs, and the only package that prints.

May import everything. `main` answers `paceline --help` itself (`overview`) and leaves the rest to `command`,
which imports the module of the verb only. `verbs` has what the verbs share (the parser, the console). A verb parses its
arguments, calls one function of a lower package and prints the result.
"""

from __future__ import annotations

import sys

from paceline.cli.overview import INTERRUPTED, OK, SOME_FAILED, WRONG_REQUEST, help_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["INTERRUPTED", "OK", "SOME_FAILED", "WRONG_REQUEST", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 all runs ok and valid, 1 a run failed or is invalid, 2 the request was wrong, 130 interrupted.

    Without a verb it prints the help and returns 0. A reader that closes the pipe early (`| head -1`) is not an error.
    A disk that is full, read-only or gone is for the user to fix: one sentence and exit code 2.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words in ([], ["-h"], ["--help"]) and _is_printed(help_text()):
        return OK
    from paceline.cli import command

    return command.main(words)


def _is_printed(text: str) -> bool:
    """Whether the whole text could be printed; `command` knows what to do otherwise."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except (OSError, UnicodeError):
        return False
    return True
