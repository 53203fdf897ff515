"""Plugins: a module is a plugin, its folder the registry, its first docstring line the description.

`names(kind)` reads the folder without importing anything; the word for suite_json.py is suite-json. A dotted name is
any importable module; installed packages may register modules under the entry points `paceline.<kind>`.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata, resources
from types import ModuleType
from typing import Any, TypeVar, cast

from paceline.errors import RequestError, did_you_mean
from paceline.experiment.choices import Choice
from paceline.host import redaction

# Kind of plugin -> the package below `paceline` that holds those shipped with it.
FOLDERS = {
    "workloads": "workloads",
    "strategies": "training.strategies",
    "launchers": "launchers",
    "engines": "serving.engines",
    "exporters": "report.exporters",
}


KINDS = tuple(FOLDERS)


# What each kind's module must define, and the arguments it is called with: the contract tests read this table.
CONTRACT: dict[str, dict[str, tuple[str, ...]]] = {
    "workloads": {"check": ("spec",), "run": ("spec", "seat", "recorder")},
    "strategies": {"check": ("spec",), "wrap": ("spec", "seat")},
    "launchers": {
        "check": ("spec",),
        "prepare": ("spec", "run_dir"),
        "submit": ("job",),
        "poll": ("handle",),
        "cancel": ("handle",),
    },
    "engines": {"check": ("spec",), "open": ("spec", "seat")},
    "exporters": {"export": ("report", "directory")},
}


# What a module of that kind may define besides; one that does is held to these arguments too.
OPTIONAL: dict[str, dict[str, tuple[str, ...]]] = {
    "workloads": {"follow": ("spec", "records"), "outline": ("spec",)},
    "strategies": {"preload": ("device",)},
    "launchers": {
        "preflight": ("specs",),
        "adopt": ("job", "handle"),
        "collect": ("handle", "run_dir"),
        "offer": ("choice",),
        "close": (),
    },
    "engines": {"preflight": ("spec",)},
    "exporters": {"check": ("directory",)},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a launcher has where an experiment says `device: auto`, `processes: all` or no number of nodes."""

    device: str
    processes: int
    nodes: int = 1


def names(kind: str) -> dict[str, str]:
    """Word the user writes -> one-line description, read from the files without importing them."""
    found = {}
    for entry in sorted(
        resources.files("paceline").joinpath(*FOLDERS[kind].split(".")).iterdir(), key=lambda e: e.name
    ):
        name = entry.name.removesuffix(".py")
        source = entry if entry.name.endswith(".py") else entry.joinpath("__init__.py")
        if name.startswith("_") or not source.is_file():
            continue
        tree = ast.parse(source.read_text(encoding="utf-8"))
        if _bound(tree) >= set(CONTRACT[kind]):
            found[name.replace("_", "-")] = (ast.get_docstring(tree) or "").partition("\n")[0]
    for point in metadata.entry_points(group=f"paceline.{kind}"):
        found[point.name] = f"from {point.value}"
    return found


def _bound(tree: ast.Module) -> set[str]:
    """The names that a module defines or imports at its top: a file beside the plugins that is none lacks some."""
    named: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            named.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            named |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            named |= {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return named


@functools.cache
def load(kind: str, name: str) -> Any:
    """The plugin module, which has what its kind must; an unknown name is a sentence with what exists.

    Remembered: reading every installed package's entry points takes 20 ms, and a campaign asks for each cell anew.
    """
    found = _import(kind, name)
    optional = {each: given for each, given in OPTIONAL.get(kind, {}).items() if hasattr(found, each)}
    wanted = {**CONTRACT[kind], **optional}
    for function, arguments in wanted.items():
        if not _takes(getattr(found, function, None), arguments):
            needed = ", ".join(f"{each}({', '.join(given)})" for each, given in wanted.items())
            raise RequestError(f"{kind}: {name!r} was given; accepted is a module with {needed}")
    return cast(Any, found)


def _takes(function: object, arguments: tuple[str, ...]) -> bool:
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError):
        return False
    return True


def _import(kind: str, name: str) -> ModuleType:
    for point in metadata.entry_points(group=f"paceline.{kind}", name=name):
        return cast(ModuleType, point.load())
    if "." not in name and name.replace("_", "-") in names(kind):
        return importlib.import_module(f"paceline.{FOLDERS[kind]}.{name.replace('-', '_')}")
    if "." in name and all(part.isidentifier() for part in name.split(".")):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise RequestError(f"{kind}: {name!r} was given, which cannot be imported ({error})") from None
    known = names(kind)
    where = {"strategies": "strategy"}.get(kind, kind.removesuffix("s"))
    hint = _with_number(kind, name, known) or did_you_mean(name, known)
    raise RequestError(f"{where}: got {name!r}, expected {', '.join(known)} or a dotted module name.{hint}")


def _with_number(kind: str, name: str, known: Iterable[str]) -> str:
    """A suggestion for a known name with a number behind it: `zero3`, `zero-3` and `zero_stage3` are `zero:stage=3`.

    The number is read as the option that the name spells, else as the plugin's first whole-number option. Empty unless
    the plugin accepts that value.
    """
    for plugin in sorted(known, key=len, reverse=True):
        match = re.fullmatch(rf"{re.escape(plugin)}[-_]?([a-z_]*?)[-_]?(\d{{1,9}})", name.lower())
        options_class = getattr(_import_if_possible(kind, plugin), "Options", None) if match else None
        if match is None or not dataclasses.is_dataclass(options_class):
            continue
        numbers = [field.name for field in dataclasses.fields(options_class) if type(field.default) is int]
        option = match[1] if match[1] in numbers else numbers[0] if numbers and not match[1] else None
        if option is None:
            continue
        with contextlib.suppress(RequestError):
            options_class(**{option: int(match[2])})
            return f" Did you mean '{plugin}:{option}={int(match[2])}'?"
    return ""


def _import_if_possible(kind: str, name: str) -> ModuleType | None:
    with contextlib.suppress(ImportError):
        return _import(kind, name)
    return None


Options = TypeVar("Options")


def parse_options(cls: type[Options], choice: Choice) -> Options:
    """Fill a plugin's options dataclass from a choice; unknown names and wrong types are the user's mistake."""
    fields = {f.name: f for f in dataclasses.fields(cast(Any, cls))}
    for key, value in choice.options.items():
        if key not in fields:
            accepted = ", ".join(fields) or "no option"
            hint = did_you_mean(str(key), fields)
            raise RequestError(f"option of {choice.name}: got {key!r}, expected {accepted}.{hint}")
        default = fields[key].default
        if default is not None and not _fits(value, default):
            accepted = _WORDS[type(default)]
            raise RequestError(f"{choice.name}.{key}: got {json.dumps(value)}, expected {accepted}.")
    chosen = cls(**choice.options)
    _refuse_secrets(choice)
    return chosen


def _refuse_secrets(choice: Choice) -> None:
    """Options are recorded, and written where engines show them; the text itself is not repeated."""
    for key, value in choice.options.items():
        if any(redaction.SECRET.search(text) for text in _texts(value)):
            accepted = "no secret: let the nodes read it from a file or from their own environment"
            raise RequestError(f"{choice.name}.{key}: what looks like a got secret, expected {accepted}.")


def _texts(value: object) -> Iterator[str]:
    """Every text of an option, however deep; names too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in (*value, *value.values()):
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _fits(value: object, default: object) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):
        return type(value) is type(default)
    if isinstance(default, float):
        return isinstance(value, int | float)
    return isinstance(value, type(default))
