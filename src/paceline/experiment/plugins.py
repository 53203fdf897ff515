"""The plugin registry: a module is a plugin, its folder the registry, its first docstring line the description.

`names(kind)` reads the folder without importing anything; the file suite_json.py is the plugin suite-json. A dotted
name is any importable module. Installed packages may register modules under the entry points `paceline.<kind>`.

A plugin states its own properties: functions (CONTRACT, OPTIONAL) and constants (DECLARED). Nothing else in Paceline
lists plugins by name, so adding one is adding one file, inside or outside this repository.
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
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from paceline.errors import RequestError, did_you_mean
from paceline.experiment.choices import Choice
from paceline.host import redaction

if TYPE_CHECKING:
    from importlib import metadata

# Kind of plugin -> the package below `paceline` that contains the shipped ones.
FOLDERS = {
    "workloads": "workloads",
    "strategies": "training.strategies",
    "launchers": "launchers",
    "engines": "serving.engines",
    "exporters": "report.exporters",
}


KINDS = tuple(FOLDERS)
# Of a shipped plugin. A file system refuses to look for a name of more than 255 bytes.
LONGEST_NAME = 100


# Functions that each kind must define, with the arguments they are called with. The contract tests read this table.
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


# Functions that a plugin may define as well, with the arguments they are called with.
OPTIONAL: dict[str, dict[str, tuple[str, ...]]] = {
    "workloads": {"follow": ("spec", "records"), "outline": ("spec",)},
    "strategies": {
        "preload": ("device",),
        "sharded_parts": ("options",),
        "offloads": ("options",),
        "wire_bytes": ("traffic",),
        "reductions_per_step": ("options", "accumulation"),
        "approximation": ("options",),
        "approximates_loss": ("options",),
        "averages_every": ("options",),
        "inline": ("options",),
        "layout": ("options", "world_size"),
        "expand": ("name", "options", "nodes", "processes_per_node"),
    },
    "launchers": {
        "preflight": ("specs",),
        "expect": ("specs",),
        "adopt": ("job", "handle"),
        "collect": ("handle", "run_dir"),
        "offer": ("choice",),
        "attend": ("out", "control"),
        "close": (),
    },
    "engines": {"preflight": ("spec",), "nodes_per_replica": ("spec",), "longest_request": ("spec",)},
    "exporters": {"check": ("directory",)},
}


# Functions of a strategy whose results are stored with its runs if it is not shipped (see `RunSpec.says`).
ANSWERS = ("layout", "approximation", "approximates_loss", "averages_every", "reductions_per_step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a workload is, declared in its module: `TRAITS = Traits(trains=True, certified=True)`.

    trains: it takes optimizer steps. The fields of training (micro_batch, steps, ...) then distinguish its cells, and a
    strategy is chosen for it, unless it tests nodes. certified: its runs are ranked by speed, so they must prove equal
    work against a reference. serves: it sends requests to an engine (fields of `Serving`). fine_tunes: the fields of
    `Tuning` apply. may_fine_tune: they apply where one of them is set. tests_nodes: it measures each node alone; a
    wrong result is a finding and not a failure. probes_limit: it searches for a memory limit, so running out of memory
    is a result. measures_memory: the report shows its runs in the memory tables. measures_network: it needs no model.
    scripted: it runs the user's own training code (`script.Script`), whose work is observed and graded
    (docs/scripts.md), not prescribed.
    """

    trains: bool = False
    certified: bool = False
    serves: bool = False
    fine_tunes: bool = False
    may_fine_tune: bool = False
    tests_nodes: bool = False
    probes_limit: bool = False
    measures_memory: bool = False
    measures_network: bool = False
    scripted: bool = False

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Traits:
        """Ignores names that only another version of Paceline knows."""
        return cls(**{field.name: bool(raw.get(field.name)) for field in dataclasses.fields(cls)})


# Constants that a plugin may declare, with the value that applies where it does not.
# UNMEASURED: options on which no measured number depends, each with what it decides instead; they are not part of the
# run id. AXES: options of a launcher that tables show as an axis where they are set. HERE: ranks are processes of this
# host. STARTS: the engine starts its servers on the devices of its ranks.
# USER_ONLY: options that are never taken from a capsule or an experiment of somebody else, each with what it decides
# (see `foreign`). PADS_SHARDS: the strategy pads what it shards to equal rows per rank. SHORT_NAMES: other names for it
# with some options set, each with a description; its function `expand` returns these options. EIGHT_BIT: the strategy
# trains with 8-bit linear layers (`training.precision`). ALWAYS_NAMED: options that its
# name shows at their default, too.
DECLARED: dict[str, dict[str, Any]] = {
    "workloads": {"TRAITS": Traits()},
    "strategies": {"PADS_SHARDS": False, "EIGHT_BIT": False, "SHORT_NAMES": {}, "USER_ONLY": {}, "ALWAYS_NAMED": ()},
    "launchers": {"UNMEASURED": {}, "HERE": False, "USER_ONLY": {}, "AXES": ()},
    "engines": {"UNMEASURED": {}, "STARTS": False, "USER_ONLY": {}},
    "exporters": {},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a launcher has where an experiment says `device: auto`, `processes: all` or no number of nodes."""

    device: str
    processes: int
    nodes: int = 1


def names(kind: str) -> dict[str, str]:
    """Plugin name -> one-line description, read from the files without importing them."""
    known = {name: (ast.get_docstring(tree) or "").partition("\n")[0] for name, tree in _shipped(kind).items()}
    return known | {point.name: f"from {point.value}" for point in _entry_points(kind)}


def _entry_points(kind: str) -> list[metadata.EntryPoint]:
    """The plugins of this kind in installed packages."""
    return _entry_points_on(tuple(sys.path))[kind]


@functools.cache
def _entry_points_on(path: tuple[str, ...]) -> dict[str, list[metadata.EntryPoint]]:
    """The plugins of each kind in packages on a search path. Cached, and read at once for all kinds: reading the
    metadata of every installed package takes 20 to 100 ms."""
    # Not at the top: it imports the parser of e-mails.
    from importlib import metadata

    points = metadata.entry_points()
    return {kind: list(points.select(group=f"paceline.{kind}")) for kind in KINDS}


def short_names(kind: str) -> dict[str, tuple[str, str]]:
    """Short name -> the shipped plugin it names, and a description."""
    found: dict[str, tuple[str, str]] = {}
    for plugin in _shipped(kind) if "SHORT_NAMES" in DECLARED[kind] else ():
        found |= {short: (plugin, text) for short, text in _literals(kind, plugin)["SHORT_NAMES"].items()}
    return found


def expanded(kind: str, choice: Choice, nodes: int, processes_per_node: int) -> Choice:
    """The choice in its one spelling (see `canonical`), with a short name replaced by its plugin and the options it
    implies, and with the content of files that its options name.

    >>> str(expanded("strategies", Choice("tp", {"sequence": True}), 1, 4))
    'mesh:tp=4'
    """
    plugin, _ = short_names(kind).get(choice.name, (None, ""))
    if plugin is not None:
        options = load(kind, plugin).expand(choice.name, choice.options, nodes, processes_per_node)
        choice = Choice(plugin, options)
    if choice.options and is_shipped(kind, choice.name) and hasattr(load(kind, choice.name), "inline"):
        choice = Choice(choice.name, load(kind, choice.name).inline(choice.options))
    if "." in choice.name:
        # A module is imported where its user names it, and never where a stored run does.
        load(kind, choice.name)
    return canonical(kind, choice)


def canonical(kind: str, choice: Choice) -> Choice:
    """The same choice in one spelling: options in the order of their definition, without those equal to their default.

    Options of ALWAYS_NAMED remain. So do options that the plugin does not have; its `check` refuses them. The options
    of a plugin that is not installed are left as they are.

    >>> str(canonical("strategies", Choice.parse("mesh:pp=2,sequence=true,tp=2")))
    'mesh:tp=2,pp=2'
    >>> str(canonical("strategies", Choice("zero")))
    'zero:stage=1'
    """
    plugin = find(kind, choice.name)
    options_class = getattr(plugin, "Options", None)
    if not dataclasses.is_dataclass(options_class):
        return choice
    shown, options = getattr(plugin, "ALWAYS_NAMED", ()), {}
    for field in dataclasses.fields(options_class):
        default, is_given = field.default, field.name in choice.options
        value = choice.options.get(field.name, default)
        if isinstance(default, float) and type(value) is int:
            value = float(value)
        # True equals 1, but is refused as a number.
        is_default = type(value) is type(default) and value == default
        if field.name in shown or (is_given and not is_default):
            options[field.name] = value
    known = {field.name for field in dataclasses.fields(options_class)}
    return Choice(choice.name, options | {k: v for k, v in choice.options.items() if k not in known})


def _shipped(kind: str) -> dict[str, ast.Module]:
    """The plugins in Paceline's own folder, parsed. Other files in that folder lack a function of the contract."""
    entries = sorted(entry.name.removesuffix(".py") for entry in _folder(kind).iterdir())
    trees = {name.replace("_", "-"): _tree(kind, name.replace("_", "-")) for name in entries}
    return {name: tree for name, tree in trees.items() if tree is not None}


def _folder(kind: str) -> Traversable:
    return resources.files("paceline").joinpath(*FOLDERS[kind].split("."))


@functools.cache
def _tree(kind: str, name: str) -> ast.Module | None:
    """The file of a shipped plugin, parsed; None if there is no such plugin. One file takes 1 to 10 ms, so the others
    are left alone."""
    module = name.replace("-", "_")
    if not module.isidentifier() or module.startswith("_") or len(module) > LONGEST_NAME:
        return None
    folder = _folder(kind)
    for source in (folder.joinpath(f"{module}.py"), folder.joinpath(module, "__init__.py")):
        if source.is_file():
            tree = ast.parse(source.read_text(encoding="utf-8"))
            return tree if _bound(tree) >= set(CONTRACT[kind]) else None
    return None


def _bound(tree: ast.Module) -> set[str]:
    """The names that a module defines or imports at its top level."""
    named: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            named.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            named |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            named |= {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return named


def is_shipped(kind: str, name: str) -> bool:
    """Whether the plugin is part of Paceline."""
    return _tree(kind, name.replace("_", "-")) is not None


def declared(kind: str, name: str, *, imports: bool = False) -> dict[str, Any] | None:
    """The constants of DECLARED as the plugin declares them; None where the plugin is not known.

    Those of a shipped plugin are read from its file, because importing a workload takes 0.2 s; an entry point that
    replaces the plugin does not change them. With `imports` a dotted name is imported; without it, only installed
    plugins are (see `find`).
    """
    if is_shipped(kind, name):
        return _literals(kind, name.replace("_", "-"))
    module = load(kind, name) if imports else find(kind, name)
    if module is None:
        return None
    return {constant: getattr(module, constant, default) for constant, default in DECLARED[kind].items()}


@functools.cache
def _literals(kind: str, name: str) -> dict[str, Any]:
    values, tree = dict(DECLARED[kind]), _tree(kind, name)
    assert tree is not None, name
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            constant = target.id if isinstance(target, ast.Name) else ""
            if constant == "TRAITS" and isinstance(node.value, ast.Call):
                values[constant] = Traits(**{str(k.arg): ast.literal_eval(k.value) for k in node.value.keywords})
            elif constant in values:
                values[constant] = ast.literal_eval(node.value)
    return values


def find(kind: str, name: str) -> Any:
    """The plugin of a stored run, or None where it is not installed.

    A dotted name is not imported: a run folder from elsewhere must not decide which code is executed here.
    """
    installed = is_shipped(kind, name) or name in sys.modules or any(p.name == name for p in _entry_points(kind))
    return load(kind, name) if installed else None


@functools.cache
def load(kind: str, name: str) -> Any:
    """The plugin module; RequestError for an unknown name, or a module that does not fulfil its contract.

    Cached: a campaign loads plugins per cell.
    """
    module = _import(kind, name)
    optional = {each: given for each, given in OPTIONAL.get(kind, {}).items() if hasattr(module, each)}
    wanted = {**CONTRACT[kind], **optional}
    for function, arguments in wanted.items():
        try:
            # A TypeError also if there is no such function.
            inspect.signature(getattr(module, function, None)).bind(*arguments)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            needed = ", ".join(f"{each}({', '.join(given)})" for each, given in wanted.items())
            raise RequestError(f"{kind}: got {name!r}, expected a module with {needed}.") from None
    for constant, default in DECLARED[kind].items():
        value = getattr(module, constant, default)
        if not isinstance(value, type(default)):
            wanted_type = "a plugins.Traits" if constant == "TRAITS" else f"a {type(default).__name__}"
            raise RequestError(f"{name}.{constant}: got {value!r}, expected {wanted_type}.")
    return cast(Any, module)


# The file whose plugins are being loaded, and which modules it may name; empty if it is the user's own.
_limits: list[tuple[str, Callable[[str], bool]]] = []


@contextlib.contextmanager
def imports_limited(source: str, may_import: Callable[[str], bool]) -> Iterator[None]:
    """Inside the block, refuse plugins that are named by module unless `may_import` accepts the name.

    Modules that are already imported are refused too, so that the answer does not depend on what ran before.
    """
    load.cache_clear()
    _limits.append((source, may_import))
    try:
        yield
    finally:
        _limits.pop()


def _import(kind: str, name: str) -> ModuleType:
    for point in _entry_points(kind):
        if point.name == name:
            return cast(ModuleType, point.load())
    if is_shipped(kind, name):
        return importlib.import_module(f"paceline.{FOLDERS[kind]}.{name.replace('-', '_')}")
    if "." in name and all(part.isidentifier() for part in name.split(".")):
        for source, may_import in _limits:
            if not may_import(name):
                raise RequestError(
                    f"{source}: names the module {name!r}, whose code would run here, and is outside of the current "
                    f"directory. Add --allow-modules {name} if you trust it."
                )
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise RequestError(f"{kind}: {name!r} cannot be imported ({error}).") from None
    known = {**names(kind), **{short: text for short, (_, text) in short_names(kind).items()}}
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
        if match is None:
            continue
        options_class: Any = None
        with contextlib.suppress(ImportError):
            options_class = getattr(_import(kind, plugin), "Options", None)
        if not dataclasses.is_dataclass(options_class):
            continue
        numbers = [field.name for field in dataclasses.fields(options_class) if type(field.default) is int]
        option = match[1] if match[1] in numbers else numbers[0] if numbers and not match[1] else None
        if option is None:
            continue
        with contextlib.suppress(RequestError):
            cast(Any, options_class)(**{option: int(match[2])})
            return f" Did you mean '{plugin}:{option}={int(match[2])}'?"
    return ""


Options = TypeVar("Options")


def parse_options(cls: type[Options], choice: Choice | None) -> Options:
    """A plugin's options dataclass filled from a choice; RequestError for unknown names and wrong types."""
    assert choice is not None
    fields = {f.name: f for f in dataclasses.fields(cast(Any, cls))}
    for key, value in choice.options.items():
        if key not in fields:
            accepted = ", ".join(fields) or "no option"
            hint = did_you_mean(str(key), fields)
            raise RequestError(f"option of {choice.name}: got {key!r}, expected {accepted}.{hint}")
        default = fields[key].default
        is_number = isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool)
        if default is not None and type(value) is not type(default) and not is_number:
            accepted = _WORDS[type(default)]
            raise RequestError(f"{choice.name}.{key}: got {json.dumps(value)}, expected {accepted}.")
    chosen = cls(**choice.options)
    # Options are recorded and shown by schedulers, so they must not contain a secret. The error does not repeat it.
    for key, value in choice.options.items():
        if any(redaction.SECRET.search(text) for text in _texts(value)):
            raise RequestError(
                f"{choice.name}.{key}: got what looks like a secret, expected none. Let the nodes read it from a file "
                "or from their own environment."
            )
    return chosen


def _texts(value: object) -> Iterator[str]:
    """Every text inside an option value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in (*value, *value.values()):
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
