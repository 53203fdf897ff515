"""What every verb shares: a parser whose errors are one sentence, exit codes, the console."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from paceline.errors import RequestError

if TYPE_CHECKING:
    from rich.console import Console

OK, SOME_FAILED, WRONG_REQUEST, INTERRUPTED = 0, 1, 2, 130
DEFAULT_OUT = "results"


class Parser(argparse.ArgumentParser):
    """Argparse whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{message}; see `{self.prog} --help`")


def add_verb(verbs: Any, name: str, call: Callable[[argparse.Namespace], int], text: str) -> Parser:
    verb: Parser = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    verb.set_defaults(call=call)
    return verb


def console() -> Console:
    """A console that goes on in silence when the reader of its output has left: the verb still ends its work."""
    from rich.console import Console

    class PipedConsole(Console):
        def on_broken_pipe(self) -> None:
            discard_output()

    return PipedConsole()


def discard_output() -> None:
    """Send what is printed from now on to nowhere, also what Python flushes when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def print_hanging(screen: Console, text: str, indent: int) -> None:
    """One line for another program to read; on a terminal as wide as it is, what follows the first line indented."""
    if screen.is_terminal:
        hang = " " * min(indent, screen.width // 3)
        text = textwrap.fill(text, screen.width, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False)
    screen.print(text, highlight=False, markup=False, soft_wrap=True)
