"""What the verbs share: a parser with one-sentence errors and suggestions, the console."""

from __future__ import annotations

import argparse
import errno
import os
import re
import select
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from paceline.cli.overview import help_text
from paceline.errors import RequestError, did_you_mean
from paceline.results import safe_text

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rich.console import Console

DEFAULT_OUT = "results"
# How check results are marked by `doctor` and `cluster check`.
MARKS = {True: "ok  ", None: "note", False: "BAD "}
_TYPES = {"int": "a whole number", "float": "a number"}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence, with a suggestion where a known name is close.

    summary is the line about this verb in the help of its parent. The root lists verbs by task instead of its help.
    """

    summary = ""
    is_root = False

    def error(self, message: str) -> NoReturn:
        """Raise a RequestError in the form `<where>: got <value>, expected <what>.`"""
        verb = self.prog.partition(" ")[2] or self.prog
        if wrong := re.fullmatch(r"argument (.+?): invalid (\w+) value: (.*)", message):
            message = f"{wrong[1]}: got {wrong[3]}, expected {_TYPES.get(wrong[2], wrong[2])}."
        elif wrong := re.fullmatch(r"argument (.+?): expected (.*)", message):
            message = f"{wrong[1]}: got no value, expected {wrong[2]}."
        elif wrong := re.fullmatch(r"the following arguments are required: (.*)", message):
            message = f"{verb}: got no {wrong[1]}, which {'are' if ', ' in wrong[1] else 'is'} required."
        elif wrong := re.fullmatch(r"argument (.+?): not allowed with argument (.*)", message):
            message = f"{wrong[1]}: got both {wrong[1]} and {wrong[2]}, expected one of them."
        else:
            message = message.removeprefix("argument ")
        raise RequestError(f"{message} See `{self.prog} --help`.")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """As argparse does, but an empty path is an error: `Path("")` is the current directory."""
        if action.type is Path and not arg_string:
            where = action.option_strings[0] if action.option_strings else str(action.metavar or action.dest)
            self.error(f"{where}: got '', expected a path.")
        return super()._get_value(action, arg_string)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            where = action.option_strings[0] if action.option_strings else str(action.metavar or action.dest).lower()
            known = list(map(str, action.choices))
            self.error(f"{where}: got {value!r}, expected {', '.join(known)}.{did_you_mean(str(value), known)}")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, but arguments that are left over are an error of the verb that they were given to."""
        result, left = super().parse_known_args(args, namespace)
        if left:
            known = {*self._option_string_actions} if left[0].startswith("-") else {""}
            kind = "option" if left[0].startswith("-") else "argument"
            verb = self.prog.partition(" ")[2] or self.prog
            start = "" if verb == self.prog else f"{verb}: "
            self.error(f"{start}got the unknown {kind} {left[0]!r}.{did_you_mean(left[0].partition('=')[0], known)}")
        return result, left

    def format_help(self) -> str:
        """The usual help; at the root, the verbs listed by task."""
        return help_text() if self.is_root else super().format_help()


def add_verb(verbs: Any, name: str, call: Callable[[argparse.Namespace], int] | None, text: str) -> Parser:
    """Add a verb, or with call=None a verb that only has actions."""
    verb: Parser = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    verb.summary = text
    if call is not None:
        verb.set_defaults(call=call)
    return verb


def add_out_option(verb: Parser, text: str = "results directory", default: str = DEFAULT_OUT, *aliases: str) -> None:
    help_text = f"{text} (default: %(default)s)"
    verb.add_argument("--out", *aliases, type=Path, default=Path(default), metavar="DIR", help=help_text)


def add_list_option(verb: Parser, name: str, metavar: str, text: str) -> None:
    """An option that may be repeated."""
    verb.add_argument(name, action="append", default=[], metavar=metavar, help=text)


def add_allow_option(verb: Parser, text: str) -> None:
    verb.add_argument(
        "--allow-modules",
        action="append",
        default=[],
        metavar="NAME,...",
        help=f"{text}; its code or program runs here",
    )


def require_directory(out: Path, where: str = "--out") -> None:
    if not out.is_dir():
        raise RequestError(f"{where}: got {str(out)!r}, which is not a directory; expected a results directory.")
    if not os.access(out, os.R_OK | os.X_OK):
        raise RequestError(f"{where}: got {str(out)!r}, which you may not read; expected a results directory.")


def print_checks(checks: Sequence[Any]) -> None:
    """Print each check with its mark and its fix, if it has one."""
    for check in checks:
        fix = f"\n       fix: {check.fix}" if check.fix else ""
        print(f"{MARKS[check.ok]} {check.name}: {check.text}{fix}", flush=True)


def console(*, stderr: bool = False) -> Console:
    """A console that keeps silent once the reader of its output has left, so that the verb finishes its work."""
    from rich.console import Console

    class PipedConsole(Console):
        def on_broken_pipe(self) -> None:
            discard_output()

    return PipedConsole(stderr=stderr)


def waiting(text: str) -> AbstractContextManager[object]:
    """Say what is waited for, on a terminal only, and beside what the command prints."""
    return console(stderr=True).status(text)


def storage_advice(error: OSError) -> str | None:
    """One sentence about a file that a disk or its rights do not allow, and what to do; None for any other error."""
    advice = _STORAGE.get(error.errno or 0)
    if advice is None:
        return None
    where = f"{os.fspath(error.filename)!r}" if isinstance(error.filename, str | Path) else "a file"
    return f"{where} cannot be used ({os.strerror(error.errno or 0)}). Finished runs are kept. {advice}."


_FREE = "Free some space there, then repeat the command"
_ALLOW = "Make it writable or use another directory, then repeat the command"
_PERMIT = "Change its permissions or use another directory, then repeat the command"
_MOUNT = "Check that its disk is mounted and healthy, then repeat the command"
_STORAGE = {
    errno.ENOSPC: _FREE,
    errno.EDQUOT: _FREE,
    errno.EFBIG: _FREE,
    errno.EROFS: _ALLOW,
    errno.EACCES: _PERMIT,
    errno.EPERM: _PERMIT,
    errno.ENOENT: _MOUNT,
    errno.ENOTDIR: _MOUNT,
    errno.EIO: _MOUNT,
    errno.ESTALE: _MOUNT,
    errno.ENODEV: _MOUNT,
    errno.ENXIO: _MOUNT,
    errno.ENOTCONN: _MOUNT,
    errno.EHOSTDOWN: _MOUNT,
    errno.ENAMETOOLONG: "Use shorter names",
}


def discard_output() -> None:
    """Send everything printed from now on to /dev/null, including what Python flushes when it exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def has_reader() -> bool:
    """Whether somebody may still read the output: False once the other end of its pipe is closed."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def print_plain(screen: Console, text: str) -> None:
    """Print a line as it is: no markup, no highlighting, no wrapping, and no control characters of names in it."""
    screen.print(safe_text.text(text), highlight=False, markup=False, soft_wrap=True)


def print_hanging(screen: Console, text: str, indent: int) -> None:
    """Print one line; on a terminal, wrap it to the width and indent the following lines."""
    if screen.is_terminal:
        hang = " " * min(indent, screen.width // 3)
        text = textwrap.fill(text, screen.width, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False)
    print_plain(screen, text)
