"""Every field a user may set, with its default, checked by pydantic and turned into a run spec."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from paceline.errors import RequestError, Scalar, did_you_mean, require
from paceline.experiment import plugins
from paceline.experiment.choices import Choice
from paceline.experiment.input_digests import digests
from paceline.experiment.plugins import Offer, Traits, declared, load
from paceline.experiment.serving import Serving
from paceline.experiment.spec import DEFAULT_WORKLOAD, Precision, RunSpec, Topology, Training, Tuning, WarmUp
from paceline.host import machine

# `processes: all` is one per device.
ALL = "all"


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class WarmUpFields(Strict):
    """What is not given keeps the default of `spec.WarmUp`."""

    minimum: int | None = None
    maximum: int | None = None
    window: int | None = None
    slope_ratio: float | None = None


class OwnFields(Strict):
    """Every field a user may set, flat, with its default, but those about asking a served model."""

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
    compile: bool = False
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
    timeout_s: float = 1800.0
    stall_s: float = 300.0
    telemetry_hz: float = 2.0
    engine: str = "openai"
    max_restarts: int = 0
    checkpoint_every: int | None = None


# Those stand in `Serving` alone, with their defaults.
_TYPES = get_type_hints(Serving)
_ASKED: dict[str, Any] = {field.name: (_TYPES[field.name], field.default) for field in dataclasses.fields(Serving)}
Cell = create_model("Cell", __base__=OwnFields, __doc__="Every field a user may set, flat, with its default.", **_ASKED)


Matrix = dict[str, list[Any] | str]


class DesignFields(Strict):
    """factors: field -> its levels, the baseline first. combined: further points, as changes from the baseline, each
    under a `name`. resolution: the least that a fraction must have."""

    kind: Literal["one-at-a-time", "factorial", "fractional"] = "one-at-a-time"
    factors: dict[str, list[Any]] = Field(default_factory=dict)
    combined: list[dict[str, Any]] = Field(default_factory=list)
    resolution: Literal[3, 4, 5] | None = None


class Experiment(Strict):
    """The YAML file. `devices.cpu` and `devices.cuda` override base, matrix, design, exclude and repeats on such a
    machine."""

    name: str
    description: str = ""
    base: dict[str, Any] = Field(default_factory=dict)
    matrix: Matrix | list[Matrix] = Field(default_factory=dict)
    design: DesignFields | None = None
    exclude: list[dict[str, Any]] = Field(default_factory=list)
    repeats: int = Field(default=1, ge=1)
    order_seed: int = 0
    devices: dict[Literal["cpu", "cuda"], dict[str, Any]] = Field(default_factory=dict)


def validate(model: type[Any], raw: Mapping[str, Any], where: str) -> Any:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "(top)"
        given = first.get("input")
        if first["type"] == "extra_forbidden":
            known = _known_fields(model, first["loc"])
            hint = did_you_mean(str(first["loc"][-1]), known)
            accepted = "a known field" if hint else f"one of {', '.join(known)}"
            raise RequestError(f"{where}: got the field {field!r}, expected {accepted}.{hint}") from None
        raise RequestError(f"{where}: {field} = {given!r} was given; accepted: {first['msg']}") from None


def _known_fields(model: type[Any], location: Sequence[int | str]) -> list[str]:
    """Fields of the model at this location, which may be nested: `design.kind` is a field of DesignFields."""
    for part in location[:-1]:
        field = model.model_fields.get(part)
        parts = () if field is None else (field.annotation, *get_args(field.annotation))
        model = next((each for each in parts if isinstance(each, type) and issubclass(each, BaseModel)), model)
    return list(model.model_fields)


def build(name: str, cell: OwnFields, device: str) -> RunSpec:
    """A run spec from validated fields, with the accumulation that gives the asked global batch."""
    workload, launcher = Choice.parse(cell.workload), Choice.parse(cell.launcher)
    traits = traits_of(workload)
    topology = _topology(cell, device, offered(launcher, device), traits)
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
        data=_at_home(Choice.parse(cell.data)),
    )
    model = _at_home(Choice.parse(cell.model))
    return RunSpec(
        experiment=name,
        workload=workload,
        strategy=Choice.parse(cell.strategy) if traits.trains and not traits.tests_nodes else None,
        launcher=launcher,
        model=model,
        topology=topology,
        training=training,
        tuning=_tuning(cell) if _fine_tunes(workload, traits) else None,
        serving=_serving(cell) if traits.serves else None,
        engine=_engine(cell) if traits.serves else None,
        warmup=WarmUp(**cell.warmup.model_dump(exclude_none=True)),
        steps=cell.steps,
        seed=cell.seed,
        reference_steps=cell.reference_steps,
        timeout_s=cell.timeout_s,
        stall_s=cell.stall_s,
        telemetry_hz=cell.telemetry_hz,
        max_restarts=cell.max_restarts,
        checkpoint_every=cell.checkpoint_every,
        contents=digests(model, training.data),
    )


def _topology(cell: OwnFields, device: str, offer: Offer, traits: Traits) -> Topology:
    """As given; what is not is all that the launcher has, or one process where endpoints that already run are asked."""
    if traits.serves and not (declared("engines", Choice.parse(cell.engine).name, imports=True) or {}).get("STARTS"):
        offer = Offer(device=device, processes=offer.processes if "processes" in cell.model_fields_set else 1)
    processes = offer.processes if cell.processes == ALL else int(cell.processes)
    return Topology(device=device, nodes=cell.nodes or offer.nodes, processes_per_node=processes)


def _at_home(choice: Choice) -> Choice:
    """`~/model` and `path=~/train.jsonl` as a shell would take them, which does not look inside a setting."""

    def full(value: Scalar) -> Scalar:
        return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~/") else value

    return Choice(str(full(choice.name)), {key: full(value) for key, value in choice.options.items()})


def traits_of(workload: Choice) -> Traits:
    """What the workload declares; RequestError where there is no such workload."""
    constants = declared("workloads", workload.name, imports=True)
    return cast(Traits, constants["TRAITS"]) if constants else Traits()


def _fine_tunes(workload: Choice, traits: Traits) -> bool:
    """A test of nodes fine-tunes if its own training does."""
    if traits.tests_nodes:
        training = str(workload.options.get("training"))
        return plugins.is_shipped("workloads", training) and traits_of(Choice(training)).fine_tunes
    return traits.fine_tunes


def _tuning(cell: OwnFields) -> Tuning:
    return Tuning(method=cell.method, rank=cell.rank, alpha=cell.alpha, targets=cell.targets, optimizer=cell.optimizer)


def _serving(cell: OwnFields) -> Serving:
    given = {name: getattr(cell, name) for name in _ASKED}
    asks = Choice.parse(cell.engine).options.get("loadgen", given["loadgen"])
    return Serving(**{**given, "loadgen": str(asks)})


def _engine(cell: OwnFields) -> Choice:
    """Without who asks it: `engine.loadgen` says the same as the field, and is no option of any engine."""
    whole = Choice.parse(cell.engine)
    return Choice(whole.name, {key: value for key, value in whole.options.items() if key != "loadgen"})


def _accumulation(cell: OwnFields, world_size: int) -> int:
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


def offered(launcher: Choice, device: str | None = None) -> Offer:
    """What the launcher has of a device: on this machine one process per GPU or core, elsewhere what it says itself."""
    plugin = load("launchers", launcher.name)
    if hasattr(plugin, "offer"):
        return cast(Offer, plugin.offer(launcher))
    device = device or machine.device_kind()
    count = machine.device_count() if device == "cuda" else machine.usable_cores() or 1
    return Offer(device=device, processes=max(1, count))
