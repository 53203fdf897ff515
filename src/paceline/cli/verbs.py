"""What every verb shares: a parser whose errors are one sentence, exit codes, the console."""

from __future__ import annotations

import argparse
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
    from rich.console import Console

    return Console()
