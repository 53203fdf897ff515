"""What a file of somebody else may decide here: the work, but neither which code and programs run nor where data goes.

A capsule is always somebody else's. An experiment file is the user's own if it is below the current directory, or ships
with Paceline. A launcher file is always the user's own, because `--launcher` names it.

A plugin declares the options that only the user may set as `USER_ONLY`. Of the launchers, only one whose ranks run on
this host (`HERE`) is taken from somebody else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import RequestError, shown
from paceline.experiment import plugins
from paceline.experiment.choices import Choice
from paceline.experiment.spec import RunSpec

# A variable with the same meaning as the option `--allow-modules`, for commands that others start.
ALLOWED = "PACELINE_ALLOW_MODULES"
ALL = "all"
# Variables that tune a library. Not: its plugins, tools, files, interfaces, addresses and identities.
_TUNING = re.compile(r"(NCCL|TORCH_NCCL|GLOO|OMP|MKL|KMP|DS)_[A-Z0-9_]+")
_NO_TUNING = re.compile(r"PLUGIN|TOOL|FILE|PATH|DIR|LIB|CONF|IFNAME|ADDR|HOSTID|COMM_ID|TUNER|PROFILER|NET$")
_PLAIN = re.compile(r"[A-Za-z0-9_.,:^=+-]{0,64}")


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that only the user may decide. name: as `--allow-modules` takes it. field: launcher, engine,
    strategy or env."""

    name: str
    field: str
    value: Any
    decides: str


def is_own(source: str) -> bool:
    """Whether an experiment is the user's own: a preset, or a file below the current directory."""
    path = Path(source)
    return not path.is_file() or path.resolve().is_relative_to(Path.cwd().resolve())


def allowed_names(given: Collection[str], environ: Mapping[str, str] | None = None) -> frozenset[str]:
    """The names that the user allows, from `--allow-modules A,B` and the variable."""
    texts = (*given, (os.environ if environ is None else environ).get(ALLOWED, ""))
    return frozenset(name.strip() for text in texts for name in text.split(",") if name.strip())


def is_allowed(name: str, allowed: Collection[str]) -> bool:
    """Whether a module, its package, or an option is among the allowed names.

    >>> is_allowed("lab.engines.fast", ["lab.engines"]), is_allowed("labs.engines", ["lab"])
    (True, False)
    """
    parts = name.split(".")
    return ALL in allowed or any(".".join(parts[:count]) in allowed for count in range(1, len(parts) + 1))


def settings_of(spec: RunSpec) -> Iterator[Setting]:
    """Everything in a spec that only the user may decide, except modules."""
    if not _constants("launchers", spec.launcher).get("HERE"):
        name = spec.launcher.name if "." in spec.launcher.name else "launcher"
        yield Setting(name, "launcher", str(spec.launcher), "where the runs are started, and by which programs")
    chosen = (
        ("launcher", "launchers", spec.launcher),
        ("engine", "engines", spec.engine),
        ("strategy", "strategies", spec.strategy),
    )
    for name, kind, choice in chosen:
        if choice is None:
            continue
        for option, decides in _constants(kind, choice).get("USER_ONLY", {}).items():
            if option in choice.options:
                yield Setting(f"{name}.{option}", name, choice.options[option], decides)
    if spec.script is not None:
        yield Setting("command", "command", " ".join(spec.script.command), "the program that the run starts")
    for variable, value in spec.env.items():
        if not _TUNING.fullmatch(variable) or _NO_TUNING.search(variable) or not _PLAIN.fullmatch(value):
            yield Setting(f"env.{variable}", "env", value, "a variable of the ranks")


def _constants(kind: str, choice: Choice) -> Mapping[str, Any]:
    """What a plugin declares. One that is not installed decides nothing here, because it cannot run."""
    return plugins.declared(kind, choice.name) or {}


def stripped(spec: RunSpec, allowed: Collection[str]) -> tuple[RunSpec, list[Setting]]:
    """The spec without the settings that only the user may decide, and these settings."""
    dropped = [setting for setting in settings_of(spec) if not is_allowed(setting.name, allowed)]
    names = {setting.name for setting in dropped}
    launcher, engine = spec.launcher, spec.engine
    is_ours = {"launcher", launcher.name}.isdisjoint(names)
    launcher = _without("launcher", launcher, names) if is_ours else Choice("local")
    engine = _without("engine", engine, names) if engine else None
    strategy = _without("strategy", spec.strategy, names) if spec.strategy else None
    env = {variable: value for variable, value in spec.env.items() if f"env.{variable}" not in names}
    script = None if "command" in names else spec.script
    changed = replace(
        spec, launcher=launcher, engine=engine, strategy=strategy, env=env, script=script, steps=spec.steps or 1
    )
    return (changed, dropped) if dropped else (spec, [])


def _without(name: str, choice: Choice, names: Collection[str]) -> Choice:
    return Choice(choice.name, {key: value for key, value in choice.options.items() if f"{name}.{key}" not in names})


def require_own(source: str, specs: Collection[RunSpec], given: Collection[str], allowed: Collection[str]) -> None:
    """RequestError if a file outside the current directory decides what only the user may decide.

    given: the names that the user set on the command line, such as `launcher` or `engine.url`.
    """
    if is_own(source):
        return
    for setting in (setting for spec in specs for setting in settings_of(spec)):
        if setting.field not in given and not is_allowed(setting.name, {*allowed, *given}):
            raise RequestError(
                f"{source}: {setting.name}: got {shown(setting.value)} ({setting.decides}) from a file outside of the "
                f"current directory. Add --allow-modules {setting.name} if you trust it."
            )
