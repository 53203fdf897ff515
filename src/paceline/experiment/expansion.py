"""From an experiment to run specs: complete the fields for this machine, expand the matrix, repeat, shuffle."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import yaml

from paceline.errors import RequestError, did_you_mean, require
from paceline.experiment import design, script, variables
from paceline.experiment.choices import Choice
from paceline.experiment.fields import ALL, Cell, Experiment, build, offered, validate
from paceline.experiment.plugins import Traits
from paceline.experiment.reading import parse_yaml, read, read_launcher
from paceline.experiment.spec import RunSpec, Tuning, check_runs

# `processes: doubling` is 1, 2, 4, ... up to one process per device.
DOUBLING = "doubling"
# Fields that apply to fine-tuning only; elsewhere they are refused, because they would have no effect.
TUNING = {field.name for field in dataclasses.fields(Tuning)}
# Fields that name something with options of its own.
CHOICES = ("workload", "strategy", "launcher", "model", "data", "engine")
# Fields that are not part of a cell, so that they make no axis. Limits of time may differ between equal cells, such as
# those that `--set` makes equal: the first applies.
SETTINGS = ("proof", "reference_steps", "telemetry_hz")
# Fields that are mappings of fields.
GROUPS = ("warmup", "proof")
# The cells that `--benchmark` keeps, by what their workload declares.
BENCHMARKS: dict[str, Callable[[Traits], bool]] = {
    "comm": lambda traits: traits.measures_network,
    "training": lambda traits: traits.certified,
    "memory": lambda traits: traits.measures_memory,
}
# Subdirectories of a results directory that are not experiments.
TAKEN = ("attempts", "schedules")


def load(
    source: str,
    settings: Sequence[str] = (),
    launcher: str | None = None,
    benchmark: str = ALL,
    counts: Mapping[str, int] | None = None,
) -> list[RunSpec]:
    """All runs of a preset or file, in the order in which they are started.

    benchmark keeps the cells of one kind; counts (`warmup`, `iters`) are options of workloads that repeat a kernel.
    """
    raw = variables.flatten_experiment(read(source))
    experiment = validate(Experiment, raw, source)
    accepted = f"another name, because results directories use {' and '.join(TAKEN)} themselves"
    require(experiment.name not in TAKEN, "name", experiment.name, accepted)
    given = variables.flatten(dict(parse_setting(text) for text in settings))
    if launcher is not None:
        given["launcher"] = given_launcher(launcher, experiment.base.get("launcher"))
    requested = given.get("device", experiment.base.get("device", "auto"))
    require(requested in ("auto", "cpu", "cuda"), "device", requested, "auto, cpu or cuda")
    if requested == "auto":
        requested = offered(_launcher({**experiment.base, **given})).device
    device: Literal["cpu", "cuda"] = "cuda" if requested == "cuda" else "cpu"
    over, parts = experiment.devices.get(device, {}), ("base", "matrix", "design", "exclude", "repeats")
    for key in over:
        require(key in parts, "devices", key, ", ".join(parts))
    bases = [part.get("base") or {} for part in (raw, over)]
    for part in bases:
        require(isinstance(part, dict), "base", part, "a mapping of fields")
    experiment = validate(Experiment, {**raw, **over, "base": {**bases[0], **bases[1]}}, source)
    repeats = given.pop("repeats", experiment.repeats)
    require(type(repeats) is int and repeats >= 1, "--set repeats", repeats, "a whole number from 1")
    cells = select(expand(experiment, given, device), benchmark)
    idle = ", ".join(sorted(TUNING & given.keys())) if not any(spec.tuning for spec in cells) else ""
    require(not idle, "--set", idle, "a field that has an effect; these need fine-tuning, as in `workload: finetune`")
    return order(counted(cells, counts or {}), repeats, experiment.order_seed)


def select(cells: Sequence[RunSpec], benchmark: str) -> list[RunSpec]:
    """The cells whose workload belongs to the benchmark: comm, training, memory or all."""
    require(benchmark in (*BENCHMARKS, ALL), "--benchmark", benchmark, f"{', '.join(BENCHMARKS)} or {ALL}")
    kept = [spec for spec in cells if benchmark == ALL or BENCHMARKS[benchmark](spec.traits)]
    present = ", ".join(sorted({spec.workload.name for spec in cells}))
    require(bool(kept), "--benchmark", benchmark, f"a benchmark of which this experiment has a workload ({present})")
    return kept


def counted(cells: Sequence[RunSpec], counts: Mapping[str, int]) -> list[RunSpec]:
    """The cells with `--warmup` and `--iters` as options of the workloads that repeat kernels."""
    if not counts:
        return list(cells)
    given = " ".join(f"--{option} {count}" for option, count in counts.items())
    accepted = "an experiment with a workload that repeats kernels, such as collectives or compute"
    require(any(not spec.is_trained for spec in cells), "iterations", given, accepted)
    choices = [Choice(spec.workload.name, {**spec.workload.options, **counts}) for spec in cells]
    return [s if s.is_trained else replace(s, workload=own) for s, own in zip(cells, choices, strict=True)]


def launcher_of(source: str, settings: Sequence[str] = (), launcher: str | None = None) -> Choice:
    """The launcher of an experiment, or the first one if it has several."""
    experiment = validate(Experiment, variables.flatten_experiment(read(source)), source)
    given = dict(parse_setting(text) for text in settings)
    if launcher is not None:
        given["launcher"] = given_launcher(launcher, experiment.base.get("launcher"))
    return _launcher({**experiment.base, **given})


def given_launcher(text: str, of_file: object) -> str:
    """The launcher that `--launcher` names: a name with options, or a YAML file (`name: kubernetes`, then its options).

    The bare name of the experiment's own launcher keeps the options of the experiment."""
    if text.endswith((".yaml", ".yml")):
        return _choice_text(read_launcher(text))
    own = _plain({"launcher": of_file}).get("launcher")
    return own if isinstance(own, str) and Choice.parse(own).name == text else text


def _launcher(fields: Mapping[str, Any]) -> Choice:
    """The launcher of these fields, with `launcher.OPTION` applied; the first one if there are several."""
    value = _plain(fields).get("launcher", "local")
    text = value[0] if isinstance(value, list) and value else value
    require(isinstance(text, str), "launcher", text, "text, or a mapping with a name")
    choice = Choice.parse(text)
    options = {key.partition(".")[2]: value for key, value in fields.items() if key.startswith("launcher.")}
    return Choice(choice.name, {**choice.options, **options})


def parse_setting(text: str) -> tuple[str, Any]:
    """`key=value` with the value as YAML; a list makes an axis."""
    key, equals, value = text.partition("=")
    require(bool(equals and key.strip()), "--set", text, "key=value")
    try:
        return key.strip(), parse_yaml(value)
    except yaml.YAMLError:
        return key.strip(), value


def expand(experiment: Experiment, given: Mapping[str, Any], device: str) -> list[RunSpec]:
    """One spec per distinct cell. A setting replaces the axis or field of the same name. A list is an axis, or a factor
    if there is a design. An experiment may have the cells of a matrix as well as those of a design."""
    own, given = design.split(given)
    nested = {key: value for key, value in given.items() if "." in key and not key.startswith(variables.PREFIX)}
    axes = {key: value for key, value in given.items() if isinstance(value, list) and key not in nested}
    fixed = {key: value for key, value in given.items() if key not in axes and key not in nested}
    base = _with_groups(experiment.base | fixed, nested)
    # Variables with several values in the base are axes of every matrix that does not set them.
    several = {key: base.pop(key) for key in tuple(base) if _is_variable_axis(key, base[key])}

    def make(fields: Mapping[str, Any]) -> RunSpec:
        plain = script.gather(variables.gather(_plain({**base, **fields})))
        cell = validate(Cell, _with_options(plain, nested), experiment.name)
        return build(experiment.name, cell, device)

    def keeps(fields: Mapping[str, Any]) -> bool:
        plain = _plain({**base, **fields})
        if experiment.exclude and plain.get("processes") == ALL:
            plain["processes"] = offered(_launcher(plain), device).processes
        return not any(
            all(plain.get(key) in (value if isinstance(value, list) else [value]) for key, value in rule.items())
            for rule in experiment.exclude
        )

    block = design.requested(experiment.design, own, {**several, **axes}, fixed)
    specs = design.expand(block, make, keeps) if block else []
    if not block or experiment.matrix:
        most = offered(_launcher({**base, **given}), device).processes
        points = _points(experiment, {**base, **several}, fixed, {} if block else axes, most)
        specs += [make(point) for point in points if keeps(point)]
    if not specs:
        raise RequestError(f"{experiment.name}: the exclusions leave no cell to run. Check `exclude`.")
    distinct: dict[str, RunSpec] = {}
    for spec in specs:
        _check_same(distinct.setdefault(spec.cell, spec), spec)
    return list(distinct.values())


def _check_same(first: RunSpec, other: RunSpec) -> None:
    """RequestError if two specs of one cell differ in a setting that is not part of the cell: only one could apply."""
    for name in SETTINGS:
        own, second = getattr(first, name), getattr(other, name)
        values = "several values" if name == "proof" else f"{own:g} and {second:g}"
        accepted = "one value, because it is not part of the cell"
        if own != second:
            raise RequestError(f"{name}: got {values} for the same cell, expected {accepted}.")


def _points(
    experiment: Experiment, base: Mapping[str, Any], fixed: Mapping[str, Any], axes: Mapping[str, Any], most: int
) -> Iterable[dict[str, Any]]:
    """Every point of every matrix, as changes of the base. most: the last value of an axis that doubles processes."""
    for matrix in experiment.matrix if isinstance(experiment.matrix, list) else [experiment.matrix]:
        several = {key: own for key, own in base.items() if _is_variable_axis(key, own)}
        values = several | {key: own for key, own in matrix.items() if key not in fixed} | dict(axes)
        doubling = matrix.get("processes") == DOUBLING
        for key, own in values.items():
            if key == "processes" and own == DOUBLING:
                values[key] = [2**k for k in range(most.bit_length()) if 2**k <= most]
            else:
                accepted = "a list of at least one value"
                require(isinstance(own, list) and len(own) > 0, f"matrix.{key}", own, accepted)
        check_runs("matrix", math.prod(len(own) for own in values.values()))
        for point in itertools.product(*values.values()):
            fields = dict(zip(values, point, strict=True))
            if doubling:
                # The axis ends where processes cannot share the global batch evenly.
                whole = {**base, **fields}
                batch, share = whole.get("global_batch"), whole.get("micro_batch", 1) * whole["processes"]
                if isinstance(batch, int) and isinstance(share, int) and batch % share:
                    continue
            yield fields


def _is_variable_axis(key: str, value: object) -> bool:
    return key.startswith(variables.PREFIX) and isinstance(value, list)


def _with_groups(base: dict[str, Any], nested: Mapping[str, Any]) -> dict[str, Any]:
    """The base with settings such as `warmup.minimum=3` applied; `_with_options` applies options of a choice."""
    result = dict(base)
    for key, value in nested.items():
        group, _, field = key.partition(".")
        if group not in (*GROUPS, *CHOICES):
            own = ", ".join(f"{name}.FIELD" for name in GROUPS)
            accepted = f"{own}, env.VARIABLE, or NAME.OPTION with NAME one of {', '.join(CHOICES)}"
            hint = did_you_mean(group, (*GROUPS, *CHOICES))
            raise RequestError(f"--set: got {key!r}, expected {accepted}.{hint}")
        if group in GROUPS:
            before = result.get(group, {})
            before = {} if (group, before) == ("proof", "auto") else before
            require(isinstance(before, dict), group, before, "a mapping of its fields")
            result[group] = {**before, field: value}
    return result


def _with_options(fields: Mapping[str, Any], nested: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a cell with settings such as `workload.iters=20` applied."""
    result = dict(fields)
    for key, value in nested.items():
        name, _, option = key.partition(".")
        if name in CHOICES:
            text = result.get(name, Cell.model_fields[name].default)
            require(isinstance(text, str), name, text, "text, or a mapping with a name")
            choice = Choice.parse(text)
            result[name] = str(Choice(choice.name, {**choice.options, option: value}))
    return result


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with choices as text; users may also write `{name: zero, stage: 2}`."""
    return {
        key: _choice_text(value) if isinstance(value, dict) and "name" in value else value
        for key, value in fields.items()
    }


def _choice_text(value: Mapping[str, Any]) -> str:
    return str(Choice(str(value["name"]), {k: v for k, v in value.items() if k != "name"}))


def order(cells: Sequence[RunSpec], repeats: int, seed: int) -> list[RunSpec]:
    """One shuffled round of all cells per repeat, by the recorded seed. Two cells alternate as ABBA: drift cancels."""
    check_runs("repeats", len(cells) * repeats)
    shuffle = random.Random(seed)
    rounds: list[RunSpec] = []
    for repeat in range(repeats):
        turn = list(cells)
        if len(turn) == 2:
            turn = turn[:: -1 if repeat % 2 else 1]
        else:
            shuffle.shuffle(turn)
        rounds += [replace(spec, repeat=repeat) for spec in turn]
    return rounds
