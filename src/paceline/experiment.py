"""YAML to run specs: validate, complete for this machine, expand, repeat, shuffle. The only user of pydantic."""

from __future__ import annotations

import itertools
import os
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline import machine
from paceline.errors import RequestError
from paceline.spec import UNTRAINED, Choice, Precision, RunSpec, Topology, Training, WarmUp, require

# `processes: all` is one per device, `processes: doubling` is 1, 2, 4, ... up to that.
ALL, DOUBLING = "all", "doubling"
# Fields that name a plugin or a row of a table, with options of its own.
CHOICES = ("workload", "strategy", "launcher", "model", "data")
# What `--benchmark` keeps of an experiment, by workload.
BENCHMARKS = {"comm": ("collectives",), "training": ("pretrain",), "memory": ("memory", "frontier")}


class Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-4 is a number, as everyone who writes it expects (YAML 1.1 wants 1.0e-4)."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class WarmUpFields(Strict):
    """What is not given keeps the default of `spec.WarmUp`."""

    minimum: int | None = None
    maximum: int | None = None
    window: int | None = None
    slope_ratio: float | None = None


class Cell(Strict):
    """Every field a user may set, flat, with its default."""

    workload: str = "pretrain"
    model: str = "gpt2-124m"
    strategy: str = "ddp"
    launcher: str = "local"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    nodes: int = 1
    processes: int | Literal["all"] = ALL  # type: ignore[assignment]
    precision: str = "bf16"
    reduce_dtype: str = "fp32"
    sequence_length: int = 1024
    micro_batch: int = 1
    accumulation: int | None = None
    global_batch: int | None = None
    checkpointing: str = "none"
    compile: bool = False
    bucket_mb: float | None = None
    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    data: str = "synthetic"
    steps: int = 100
    warmup: WarmUpFields = WarmUpFields()
    seed: int = 42
    reference_steps: int = 20
    timeout_s: float = 1800.0
    stall_s: float = 300.0


Matrix = dict[str, list[Any] | str]


class Experiment(Strict):
    """The YAML file. `devices.cpu` and `devices.cuda` override base, matrix, exclude and repeats on such a machine."""

    name: str
    description: str = ""
    base: dict[str, Any] = Field(default_factory=dict)
    matrix: Matrix | list[Matrix] = Field(default_factory=dict)
    exclude: list[dict[str, Any]] = Field(default_factory=list)
    repeats: int = Field(default=1, ge=1)
    order_seed: int = 0
    devices: dict[Literal["cpu", "cuda"], dict[str, Any]] = Field(default_factory=dict)


def presets() -> dict[str, str]:
    """Name -> description of the experiments that ship with Paceline."""
    found = {}
    for entry in resources.files("paceline").joinpath("presets").iterdir():
        if entry.name.endswith(".yaml"):
            found[entry.name.removesuffix(".yaml")] = str(_parse(entry.read_text(), entry.name).get("description", ""))
    return dict(sorted(found.items()))


def load(
    source: str,
    settings: Sequence[str] = (),
    launcher: str | None = None,
    benchmark: str = ALL,
    counts: Mapping[str, int] | None = None,
) -> list[RunSpec]:
    """All runs of a preset or file, in the order they shall be started.

    benchmark keeps the cells of one kind; counts (`warmup`, `iters`) are options of workloads that repeat a kernel.
    """
    raw = _read(source)
    experiment = _validate(Experiment, raw, source)
    device = _device(experiment, settings)
    experiment = _validate(Experiment, _overlay(raw, experiment.devices.get(device, {})), source)
    given = dict(parse_setting(text) for text in settings)
    if launcher is not None:
        given["launcher"] = launcher
    repeats = given.pop("repeats", experiment.repeats)
    require(type(repeats) is int and repeats >= 1, "--set repeats", repeats, "a whole number from 1")
    cells = select(expand(experiment, given, device), benchmark)
    return order(counted(cells, counts or {}), repeats, experiment.order_seed)


def select(cells: Sequence[RunSpec], benchmark: str) -> list[RunSpec]:
    """The cells whose workload belongs to the benchmark: comm, training, memory or all."""
    require(benchmark in (*BENCHMARKS, ALL), "--benchmark", benchmark, f"{', '.join(BENCHMARKS)} or {ALL}")
    kept = [spec for spec in cells if benchmark == ALL or spec.workload.name in BENCHMARKS[benchmark]]
    found = sorted({spec.workload.name for spec in cells})
    accepted = f"one whose workload ({' or '.join(BENCHMARKS.get(benchmark, ()))}) is in this experiment"
    require(bool(kept), "--benchmark", benchmark, f"{accepted}, which holds {', '.join(found)}")
    return kept


def counted(cells: Sequence[RunSpec], counts: Mapping[str, int]) -> list[RunSpec]:
    """`--warmup` and `--iters` for the cells that have iterations; the others keep their steps."""
    if not counts:
        return list(cells)
    given = " ".join(f"--{option} {count}" for option, count in counts.items())
    accepted = f"an experiment with a workload out of {', '.join(UNTRAINED)}"
    require(any(not spec.is_trained for spec in cells), "iterations", given, accepted)
    return [spec if spec.is_trained else replace(spec, workload=_with_options(spec.workload, counts)) for spec in cells]


def _with_options(choice: Choice, more: Mapping[str, int]) -> Choice:
    return Choice(choice.name, {**choice.options, **more})


def _device(experiment: Experiment, settings: Sequence[str]) -> Literal["cpu", "cuda"]:
    asked = dict(parse_setting(text) for text in settings).get("device", experiment.base.get("device", "auto"))
    require(asked in ("auto", "cpu", "cuda"), "device", asked, "auto, cpu or cuda")
    found = machine.device_kind() if asked == "auto" else asked
    return "cuda" if found == "cuda" else "cpu"


def _read(source: str) -> dict[str, Any]:
    path = Path(source)
    shipped = resources.files("paceline").joinpath("presets", f"{source}.yaml")
    if "/" not in source and not path.suffix and shipped.is_file():
        return _parse(shipped.read_text(), source)
    if path.is_file():
        return _parse(_text_of(path), source)
    known = ", ".join(sorted(presets()))
    raise RequestError(f"experiment: {source!r} was given; accepted is a YAML file or one of the presets {known}")


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"experiment: {str(path)!r} cannot be read ({error}); accepted is a YAML file") from None


def _yaml(text: str) -> Any:
    return yaml.load(text, Loader)  # noqa: S506 (Loader is a SafeLoader)


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        value = _yaml(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise RequestError(f"{where}: not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(value, dict):
        raise RequestError(
            f"{where}: {type(value).__name__} was given; accepted is a mapping with name, base and matrix"
        )
    return value


def _validate(model: type[Any], raw: Mapping[str, Any], where: str) -> Any:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "(top)"
        given = first.get("input")
        if first["type"] == "extra_forbidden":
            accepted = "one of " + ", ".join(model.model_fields)
            raise RequestError(f"{where}: field {field!r} was given; accepted is {accepted}") from None
        raise RequestError(f"{where}: {field} = {given!r} was given; accepted: {first['msg']}") from None


def _overlay(raw: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    accepted = ("base", "matrix", "exclude", "repeats")
    for key in over:
        require(key in accepted, "devices", key, ", ".join(accepted))
    merged = {**raw, **over}
    for part in (raw.get("base") or {}, over.get("base") or {}):
        require(isinstance(part, dict), "base", part, "a mapping of fields")
    merged["base"] = {**(raw.get("base") or {}), **(over.get("base") or {})}
    return merged


def parse_setting(text: str) -> tuple[str, Any]:
    """`key=value` with the value as YAML; a list makes an axis."""
    key, equals, value = text.partition("=")
    require(bool(equals and key.strip()), "--set", text, "key=value")
    try:
        return key.strip(), _yaml(value)
    except yaml.YAMLError:
        return key.strip(), value


def expand(experiment: Experiment, given: Mapping[str, Any], device: str) -> list[RunSpec]:
    """One spec per distinct cell. A setting replaces the axis or field of its name; a list setting is an axis."""
    nested = {key: value for key, value in given.items() if "." in key}
    axes = {key: value for key, value in given.items() if isinstance(value, list) and key not in nested}
    fixed = {key: value for key, value in given.items() if key not in axes and key not in nested}
    matrices = experiment.matrix if isinstance(experiment.matrix, list) else [experiment.matrix]
    specs: dict[str, RunSpec] = {}
    for matrix in matrices:
        kept = {key: values for key, values in matrix.items() if key not in fixed} | axes
        base = _place(experiment.base | fixed, nested)
        for combination in _product(kept, device):
            fields = base | combination
            if matrix.get("processes") == DOUBLING and not _divides(fields):
                continue
            if not any(_matches(fields, rule) for rule in experiment.exclude):
                cell = _validate(Cell, _optioned(_plain(fields), nested), experiment.name)
                spec = build(experiment.name, cell, device)
                specs.setdefault(spec.cell, spec)
    if not specs:
        raise RequestError(f"{experiment.name}: the matrix and its exclusions leave no cell to run")
    return list(specs.values())


def _divides(fields: Mapping[str, Any]) -> bool:
    """Whether this many processes share the global batch evenly: a doubling axis ends where they no longer can."""
    batch, share = fields.get("global_batch"), fields.get("micro_batch", 1) * fields["processes"]
    return not isinstance(batch, int) or not isinstance(share, int) or batch % share == 0


def _place(base: dict[str, Any], nested: Mapping[str, Any]) -> dict[str, Any]:
    """`warmup.minimum=3` sets a field of the group; options of a choice are laid over each cell by `_options`."""
    result = dict(base)
    for key, value in nested.items():
        group, _, field = key.partition(".")
        accepted = f"warmup.FIELD, or NAME.OPTION with NAME one of {', '.join(CHOICES)}"
        require(group == "warmup" or group in CHOICES, "--set", key, accepted)
        if group == "warmup":
            before = result.get(group, {})
            require(isinstance(before, dict), group, before, "a mapping of its fields")
            result[group] = {**before, field: value}
    return result


def _optioned(fields: Mapping[str, Any], nested: Mapping[str, Any]) -> dict[str, Any]:
    """`workload.iters=20` gives that option to the workload of every cell, over what the cell says itself."""
    result = dict(fields)
    for key, value in nested.items():
        name, _, option = key.partition(".")
        if name in CHOICES:
            text = result.get(name, Cell.model_fields[name].default)
            require(isinstance(text, str), name, text, "text, or a mapping with a name")
            choice = Choice.parse(text)
            result[name] = str(Choice(choice.name, {**choice.options, option: value}))
    return result


def _product(matrix: Mapping[str, list[Any] | str], device: str) -> Iterable[dict[str, Any]]:
    axes = {key: _values(key, values, device) for key, values in matrix.items()}
    return (dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values()))


def _values(key: str, values: list[Any] | str, device: str) -> list[Any]:
    if key == "processes" and values == DOUBLING:
        most = _devices(device)
        return [2**k for k in range(most.bit_length()) if 2**k <= most]
    require(isinstance(values, list) and len(values) > 0, f"matrix.{key}", values, "a list of at least one value")
    return list(values)


def _devices(device: str) -> int:
    """Processes that have a device of their own: GPUs, or cores."""
    return max(1, machine.device_count() if device == "cuda" else _cores())


def _cores() -> int:
    """Cores this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Choices may be written as text or as `{name: zero, stage: 2}`."""
    return {
        key: _choice_text(value) if isinstance(value, dict) and "name" in value else value
        for key, value in fields.items()
    }


def _choice_text(value: Mapping[str, Any]) -> str:
    return str(Choice(str(value["name"]), {k: v for k, v in value.items() if k != "name"}))


def _matches(fields: Mapping[str, Any], rule: Mapping[str, Any]) -> bool:
    return all(
        _plain(fields).get(key) in (value if isinstance(value, list) else [value]) for key, value in rule.items()
    )


def build(name: str, cell: Cell, device: str) -> RunSpec:
    """A run spec from validated fields, with the accumulation that gives the asked global batch."""
    processes = _devices(device) if cell.processes == ALL else int(cell.processes)
    topology = Topology(device=device, nodes=cell.nodes, processes_per_node=processes)
    training = Training(
        sequence_length=cell.sequence_length,
        micro_batch=cell.micro_batch,
        accumulation=_accumulation(cell, topology.world_size),
        precision=Precision(compute=cell.precision, reduce=cell.reduce_dtype),
        checkpointing=cell.checkpointing,
        compile=cell.compile,
        bucket_mb=cell.bucket_mb,
        learning_rate=cell.learning_rate,
        weight_decay=cell.weight_decay,
        clip_norm=cell.clip_norm,
        data=Choice.parse(cell.data),
    )
    workload = Choice.parse(cell.workload)
    return RunSpec(
        experiment=name,
        workload=workload,
        strategy=None if workload.name in UNTRAINED else Choice.parse(cell.strategy),
        launcher=Choice.parse(cell.launcher),
        model=Choice.parse(cell.model),
        topology=topology,
        training=training,
        warmup=WarmUp(**cell.warmup.model_dump(exclude_none=True)),
        steps=cell.steps,
        seed=cell.seed,
        reference_steps=cell.reference_steps,
        timeout_s=cell.timeout_s,
        stall_s=cell.stall_s,
    )


def _accumulation(cell: Cell, world_size: int) -> int:
    """Given, or what the global batch leaves for each process; both at once must agree."""
    if cell.global_batch is None:
        return cell.accumulation or 1
    share = cell.micro_batch * world_size
    accepted = f"a multiple of micro_batch x processes ({cell.micro_batch} x {world_size})"
    require(cell.global_batch > 0 and cell.global_batch % share == 0, "global_batch", cell.global_batch, accepted)
    implied = cell.global_batch // share
    require(
        cell.accumulation in (None, implied),
        "accumulation",
        cell.accumulation,
        f"{implied}, or global_batch without it",
    )
    return implied


def order(cells: Sequence[RunSpec], repeats: int, seed: int) -> list[RunSpec]:
    """Rounds of all cells, each shuffled with the recorded seed; two cells alternate as ABBA, so drift cancels."""
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
