"""Every field a user may set, with its default: checked by pydantic, then turned into a run spec."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from paceline.errors import RequestError, Scalar, did_you_mean, require, shown
from paceline.experiment import plugins, variables
from paceline.experiment import script as scripts
from paceline.experiment.choices import Choice
from paceline.experiment.compilation import canonical
from paceline.experiment.input_digests import digests
from paceline.experiment.layout import layout_on
from paceline.experiment.plugins import Offer, Traits, declared, load
from paceline.experiment.proof import AUTO, MODES, Proof
from paceline.experiment.serving import Serving
from paceline.experiment.spec import DEFAULT_WORKLOAD, Precision, RunSpec, Topology, Training, Tuning, WarmUp
from paceline.host import machine

# `processes: all` is one process per device.
ALL = "all"


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class WarmUpFields(Strict):
    """Fields that are not given keep the default of `spec.WarmUp`."""

    minimum: int | None = None
    maximum: int | None = None
    window: int | None = None
    slope_ratio: float | None = None


class ProofFields(Strict):
    """`auto`, `never`, or the sizes of a proof group and the memory of a reference; see `proof.Proof`."""

    mode: str = AUTO
    layers: int | None = None
    sequence_length: int | None = None
    global_batch: int | None = None
    limit_gib: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_mode(cls, value: Any) -> Any:
        return {"mode": value} if isinstance(value, str) else value


class OwnFields(Strict):
    """Every field a user may set, with its default, except those of `Serving`."""

    workload: str = DEFAULT_WORKLOAD
    model: str = "gpt2-124m"
    strategy: str = "ddp"
    launcher: str = "local"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    nodes: int | None = None
    processes: int | Literal["all"] = ALL  # type: ignore[assignment]
    precision: str = "bf16"
    reduce_dtype: str = "fp32"
    sequence_length: int = 1024
    micro_batch: int = 1
    accumulation: int | None = None
    global_batch: int | None = None
    checkpointing: str = "none"
    compile: bool | str = False
    bucket_mb: float | None = None
    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    data: str = "synthetic"
    method: str = "qlora"
    rank: int = 16
    alpha: float = 32.0
    targets: str = "q+k+v+o"
    optimizer: str = "paged_adamw_8bit"
    steps: int = 100
    warmup: WarmUpFields = WarmUpFields()
    seed: int = 42
    reference_steps: int = 20
    proof: ProofFields = ProofFields()
    timeout_s: float = 1800.0
    stall_s: float = 300.0
    telemetry_hz: float = 2.0
    engine: str = "openai"
    max_restarts: int = 0
    checkpoint_every: int | None = None
    checkpoint_async: bool = False
    env: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    command: list[Any] = Field(default_factory=list)
    parameters: dict[str, Any] = Field(default_factory=dict)
    files: dict[str, Any] = Field(default_factory=dict)
    work: list[str] = Field(default_factory=list)


# The fields of `Serving` are defined there, with their defaults.
_TYPES = get_type_hints(Serving)
_SERVING: dict[str, Any] = {field.name: (_TYPES[field.name], field.default) for field in dataclasses.fields(Serving)}
_TUNING = [field.name for field in dataclasses.fields(Tuning)]
# Fields with the same name in `Training` and in `RunSpec`.
_TRAINING = (
    *("sequence_length", "micro_batch", "checkpointing", "compile", "bucket_mb"),
    *("learning_rate", "weight_decay", "clip_norm"),
)
_RUN = (
    *("steps", "seed", "reference_steps", "timeout_s", "stall_s", "telemetry_hz"),
    *("max_restarts", "checkpoint_every", "checkpoint_async"),
)
Cell = create_model("Cell", __base__=OwnFields, __doc__="Every field a user may set, with its default.", **_SERVING)


Matrix = dict[str, list[Any] | str]


class DesignFields(Strict):
    """factors: field -> its levels, the baseline first. combined: further points as changes from the baseline, each
    with a `name`. resolution: the minimum for a fraction."""

    kind: Literal["one-at-a-time", "factorial", "fractional"] = "one-at-a-time"
    factors: dict[str, list[Any]] = Field(default_factory=dict)
    combined: list[dict[str, Any]] = Field(default_factory=list)
    resolution: Literal[3, 4, 5] | None = None


class Experiment(Strict):
    """The YAML file. `devices.cpu` and `devices.cuda` override base, matrix, design, exclude and repeats on machines of
    that kind."""

    name: str
    description: str = ""
    base: dict[str, Any] = Field(default_factory=dict)
    matrix: Matrix | list[Matrix] = Field(default_factory=dict)
    design: DesignFields | None = None
    exclude: list[dict[str, Any]] = Field(default_factory=list)
    repeats: int = Field(default=1, ge=1)
    order_seed: int = 0
    devices: dict[Literal["cpu", "cuda"], dict[str, Any]] = Field(default_factory=dict)


# Of a reference; runs of fewer steps have shorter ones.
LEAST_REFERENCE_STEPS = 10
# Fields whose value may have options.
_CHOICES = ("strategy", "workload", "launcher", "engine", "model")
# What pydantic expected, by its type of error; its own words otherwise.
_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "greater_than_equal": "a whole number from 1",
}


def validate(model: type[Any], raw: Mapping[str, Any], where: str) -> Any:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"] if part not in ("[key]", "int", "bool", "str")) or "(top)"
        given = first.get("input")
        if first["type"] == "extra_forbidden":
            known = _known_fields(model, first["loc"])
            name = str(first["loc"][-1])
            if issubclass(model, Cell) and name in Experiment.model_fields:
                accepted = "it beside base and matrix"
                raise RequestError(f"{where}: got {name} among the fields of a cell, expected {accepted}.") from None
            hint = did_you_mean(name, known)
            accepted = "a known field" if hint else f"one of {', '.join(known)}"
            if issubclass(model, Cell) and raw.get("command"):
                accepted = f"a known field, or a parameter that the command contains as {{{name}}}"
            raise RequestError(f"{where}: got the field {shown(field)}, expected {accepted}.{hint}") from None
        if first["type"] == "missing":
            raise RequestError(f"{where}: the field {field!r} is missing.") from None
        expected = _EXPECTED.get(first["type"], first["msg"].removeprefix("Input should be "))
        if first["type"] == "string_type" and isinstance(given, Mapping) and first["loc"][-1] in _CHOICES:
            expected = "a name, such as 'zero:stage=2', or a mapping with name and options"
        if first["type"] == "model_type":
            known = _known_fields(model, (*first["loc"], ""))
            modes = f"{', '.join(MODES)} or " if first["loc"][-1] == "proof" else ""
            expected = f"{modes}a mapping with {', '.join(name for name in known if not (modes and name == 'mode'))}"
        raise RequestError(f"{where}: {field}: got {shown(given)}, expected {expected}.") from None


def _known_fields(model: type[Any], location: Sequence[int | str]) -> list[str]:
    """Fields of the model at this location, which may be nested: `design.kind` is a field of DesignFields."""
    for part in location[:-1]:
        field = model.model_fields.get(part)
        parts = () if field is None else (field.annotation, *get_args(field.annotation))
        model = next((each for each in parts if isinstance(each, type) and issubclass(each, BaseModel)), model)
    return list(model.model_fields)


def build(name: str, cell: OwnFields, device: str) -> RunSpec:
    """A run spec from validated fields, for one kind of device."""
    workload, launcher, engine = Choice.parse(cell.workload), Choice.parse(cell.launcher), Choice.parse(cell.engine)
    traits, offer = _traits(workload.name), offered(launcher, device)
    if traits.serves and not (declared("engines", engine.name, imports=True) or {}).get("STARTS"):
        # The endpoints already run elsewhere: one process sends the requests.
        offer = Offer(device=device, processes=offer.processes if "processes" in cell.model_fields_set else 1)
    processes = offer.processes if cell.processes == ALL else int(cell.processes)
    if traits.scripted and "processes" not in cell.model_fields_set:
        processes = scripts.processes_of(cell.command, cell.parameters, offer.processes)
    elif traits.scripted:
        scripts.require_processes(cell.command, cell.parameters, processes)
    topology = Topology(device=device, nodes=cell.nodes or offer.nodes, processes_per_node=processes)
    # A test of nodes fine-tunes if its own training does.
    training_of_nodes = str(workload.options.get("training"))
    trained_by = _traits(training_of_nodes) if plugins.is_shipped("workloads", training_of_nodes) else Traits()
    fine_tunes = trained_by.fine_tunes if traits.tests_nodes else traits.fine_tunes
    fine_tunes |= traits.may_fine_tune and not cell.model_fields_set.isdisjoint(_TUNING)
    serving = {field: getattr(cell, field) for field in _SERVING}
    # `engine.loadgen` is another way to write the field `loadgen`, and not an option of any engine.
    loadgen = engine.options.get("loadgen", serving["loadgen"])
    options = {key: value for key, value in engine.options.items() if key != "loadgen"}
    script = _script(cell, topology) if traits.scripted else None
    model, data = _expand_home(Choice.parse(cell.model)), _expand_home(Choice.parse(cell.data))
    few = f"at least {LEAST_REFERENCE_STEPS}: fewer show too little of a trajectory"
    require(cell.reference_steps >= LEAST_REFERENCE_STEPS, "reference_steps", cell.reference_steps, few)
    strategy = None
    if traits.trains and not traits.tests_nodes and script is None:
        strategy = plugins.expanded("strategies", Choice.parse(cell.strategy), topology.nodes, processes)
    return RunSpec(
        experiment=name,
        workload=workload,
        strategy=strategy,
        script=script,
        launcher=launcher,
        model=model if script is None or "model" in cell.model_fields_set else Choice(scripts.UNKNOWN_MODEL),
        topology=topology,
        training=Training(
            accumulation=_accumulation(cell, topology.world_size, strategy),
            precision=Precision(compute=cell.precision, reduce=cell.reduce_dtype),
            data=data,
            **{field: getattr(cell, field) for field in _TRAINING} | {"compile": canonical(cell.compile)},
        ),
        tuning=Tuning(**{field: getattr(cell, field) for field in _TUNING}) if fine_tunes else None,
        serving=Serving(**serving | {"loadgen": str(loadgen)}) if traits.serves else None,
        engine=Choice(engine.name, options) if traits.serves else None,
        warmup=WarmUp(**cell.warmup.model_dump(exclude_none=True)),
        contents={} if script else digests(model, data),
        env=variables.checked(cell.env, launcher),
        proof=Proof(**cell.proof.model_dump()),
        **{field: getattr(cell, field) for field in _RUN if field != "steps"},
        steps=cell.steps if script is None or "steps" in cell.model_fields_set else 0,
    )


def _script(cell: OwnFields, topology: Topology) -> scripts.Script:
    """The command of a cell. Fields that Paceline's own training loop reads would have no effect on it."""
    require(bool(cell.command), "command", cell.command, "the words of a command, such as [train.py, --lr, 0.1]")
    idle = sorted(
        {*_TRAINING, *_TUNING, "strategy", "precision", "reduce_dtype", "accumulation", "global_batch", "data", "proof"}
    )
    given = [name for name in idle if name in cell.model_fields_set and name != "model"]
    accepted = "fields that have an effect on a script, or names that its command contains in braces"
    require(not given, cell.workload, ", ".join(given), accepted)
    run: dict[str, Scalar] = {
        "device": topology.device,
        "nodes": topology.nodes,
        "processes": topology.processes_per_node,
    }
    return scripts.build(cell.model_dump(), {**run, "seed": cell.seed, "steps": cell.steps, "repeat": 0})


def _traits(workload: str) -> Traits:
    """What the workload declares; RequestError for an unknown workload."""
    constants = declared("workloads", workload, imports=True)
    return cast(Traits, constants["TRAITS"]) if constants else Traits()


def _expand_home(choice: Choice) -> Choice:
    """`~/model` and `path=~/train.jsonl` with the home directory, which the shell does not expand inside a setting."""

    def full(value: Scalar) -> Scalar:
        return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~/") else value

    return Choice(str(full(choice.name)), {key: full(value) for key, value in choice.options.items()})


def _accumulation(cell: OwnFields, world_size: int, strategy: Choice | None) -> int:
    """As given, or as the global batch requires; if both are given they must agree."""
    if cell.global_batch is None:
        return cell.accumulation or 1
    # Ranks that split a model work on the same samples.
    layout = layout_on(strategy, world_size)
    replicas = layout.dp
    if layout.world_size != world_size:
        # The check of the strategy says which factors are wrong; a message about the batch would hide it.
        return cell.accumulation or max(1, cell.global_batch // max(1, cell.micro_batch * replicas))
    share = cell.micro_batch * replicas
    what = "processes" if replicas == world_size else "data parallel replicas"
    expected = f"a multiple of micro_batch x {what} ({cell.micro_batch} x {replicas})"
    require(cell.global_batch > 0 and cell.global_batch % share == 0, "global_batch", cell.global_batch, expected)
    implied = cell.global_batch // share
    expected = f"{implied}, or global_batch without accumulation"
    require(cell.accumulation in (None, implied), "accumulation", cell.accumulation, expected)
    return implied


def offered(launcher: Choice, device: str | None = None) -> Offer:
    """What the launcher offers: on this machine one process per GPU or core, elsewhere what the launcher says."""
    plugin = load("launchers", launcher.name)
    if hasattr(plugin, "offer"):
        return cast(Offer, plugin.offer(launcher))
    device = device or machine.device_kind()
    count = machine.device_count() if device == "cuda" else machine.usable_cores() or 1
    return Offer(device=device, processes=max(1, count))
