"""What one run does, complete enough to repeat it years later.

Frozen dataclasses without behaviour beyond their own invariants. A `RunSpec` is one launch. Its `cell` is shared by all
repeats of one configuration, its `work` by all runs whose results must agree whatever the strategy.

A run is identified by its spec (`RunSpec.run_id`). Fields and options on which no measured number depends are not part
of that: how long to wait, who pays, who may log in. If in doubt, an option is part of it: a partition, a queue or a
namespace may lead to other nodes, a quality of service to other neighbours, a pull policy to another image of the same
name, a jump host to another machine, the path of a program to another build.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, cast

from paceline.errors import RequestError, shown
from paceline.errors import Scalar as Scalar
from paceline.errors import require as require
from paceline.experiment import plugins
from paceline.experiment.choices import Choice as Choice
from paceline.experiment.compilation import Compilation, compilation
from paceline.experiment.factorial import Design
from paceline.experiment.layout import Layout, layout_of
from paceline.experiment.plugins import Traits
from paceline.experiment.proof import Proof, Reduction
from paceline.experiment.script import UNKNOWN_MODEL, Script
from paceline.experiment.serving import Serving

SCHEMA = 1
# Precision of the matrix products -> dtype of all other values: activations, and weights where they are used.
PRECISIONS: Mapping[str, str] = {
    "fp32": "fp32",
    "tf32": "fp32",
    "bf16": "bf16",
    "fp16": "fp16",
    **dict.fromkeys(("float8", "float8_rowwise", "float8_rowwise_gw_hp", "mxfp8"), "bf16"),
}
CHECKPOINTING = ("none", "full", "selective")
# What a user may ask for instead: the controller replaces it by one of these (`campaign/run/checkpointing.py`).
AUTO_CHECKPOINTING = "auto"
DEVICES = ("cpu", "cuda")
METHODS = ("full", "lora", "qlora")
OPTIMIZERS = ("adamw", "adamw_8bit", "paged_adamw_8bit")
# Projections that may carry an adapter, by their usual names.
TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
# The workload of an experiment that names none; run ids do not repeat its name.
DEFAULT_WORKLOAD = "pretrain"
# Characters of a strategy and its options in a run id: file names have a limit.
LONGEST_STRATEGY = 120
# One reading takes the driver a few milliseconds.
FASTEST_TELEMETRY_HZ = 50.0

# Fields that are not part of the run id: the name of the experiment, how long it may take, how often gauges are read
# and the run is restarted, the design it is a point of, how its work is proved, the mark of one launch, and what its
# plugins declare.
NO_RUN = (
    "experiment",
    "timeout_s",
    "stall_s",
    "telemetry_hz",
    "max_restarts",
    "design",
    "proof",
    "lineage",
    "declared",
)
# Fields that are not part of the cell either: repeats of one configuration may differ in them.
NO_CELL = (*NO_RUN, "repeat", "reference_steps")
# Options of any launcher or engine that only say how long to wait.
WAITING = ("connect_s", "keep_s", "patience_s", "pending_s", "poll_s", "ready_s")


def measured(options: Mapping[str, Any], unmeasured: Collection[str]) -> dict[str, Any]:
    """The options of a launcher or an engine on which a measured number may depend.

    >>> measured({"partition": "gpu", "account": "physics", "poll_s": 2}, ["account"])
    {'partition': 'gpu'}
    """
    return {key: value for key, value in options.items() if key not in (*WAITING, *unmeasured)}


# More than anyone has or waits for. Checked before anything is done for each of them.
MOST_PROCESSES = 100_000
MOST_RUNS = 10_000
MOST_STEPS = 10**9
MOST_TOKENS = 10**12
# What every generator of random numbers takes, also numpy's old one.
MOST_SEED = 2**32 - 1


def check_runs(where: str, count: int) -> None:
    """Refuse more runs than an experiment may have, before any of them is made."""
    if count > MOST_RUNS:
        raise RequestError(f"{where}: got {shown(count)} runs, expected at most {MOST_RUNS:,} in one experiment.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The processes of a run; one process drives one device."""

    device: str
    nodes: int = 1
    processes_per_node: int = 1

    def __post_init__(self) -> None:
        require(self.device in DEVICES, "device", self.device, " or ".join(DEVICES))
        require(self.nodes >= 1, "nodes", self.nodes, "a whole number from 1")
        require(self.processes_per_node >= 1, "processes", self.processes_per_node, "a whole number from 1")
        accepted = f"at most {MOST_PROCESSES:,} processes in all"
        for name, count in (("nodes", self.nodes), ("processes", self.processes_per_node)):
            require(count <= MOST_PROCESSES, name, count, accepted)
        require(self.world_size <= MOST_PROCESSES, "nodes x processes", self.world_size, accepted)

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """compute: precision of the matrix products, one of PRECISIONS. Master weights and Adam's moments are always fp32.

    The 8-bit ones apply to the linear layers of the blocks; attention and the head stay in bf16. float8 has one scale
    per tensor, float8_rowwise one per row, float8_rowwise_gw_hp the same with gradients of weights in bf16, mxfp8 one
    per 32 values. reduce: dtype in which gradients are accumulated and sent, the same for every strategy of a group.
    """

    compute: str = "fp32"
    reduce: str = "fp32"

    def __post_init__(self) -> None:
        require(self.compute in PRECISIONS, "precision", self.compute, ", ".join(PRECISIONS))
        accepted = sorted({"fp32", self.base})
        require(
            self.reduce in accepted,
            "reduce_dtype",
            self.reduce,
            f"{' or '.join(accepted)} with precision {self.compute}",
        )

    @property
    def base(self) -> str:
        """The dtype of activations, and of weights where they are used."""
        return PRECISIONS[self.compute]

    @property
    def is_8bit(self) -> bool:
        return self.compute.startswith(("float8", "mxfp8"))

    @property
    def side_multiple(self) -> int:
        """What the sides of its 8-bit matrices are multiples of."""
        return 32 if self.compute == "mxfp8" else 16


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Warm-up ends at the first step where the rolling median over `window` steps changes by less than `slope_ratio`
    over the next `window` steps, never before `minimum` steps and never after `maximum`."""

    minimum: int = 5
    maximum: int = 50
    window: int = 10
    slope_ratio: float = 0.01

    def __post_init__(self) -> None:
        require(self.minimum >= 1, "warmup.minimum", self.minimum, "a whole number from 1")
        require(
            self.maximum >= self.minimum, "warmup.maximum", self.maximum, f"at least warmup.minimum ({self.minimum})"
        )
        require(self.window >= 2, "warmup.window", self.window, "a whole number from 2")
        require(0 < self.slope_ratio < 1, "warmup.slope_ratio", self.slope_ratio, "a number between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One optimizer step: `accumulation` micro batches of `micro_batch` sequences on every process."""

    sequence_length: int
    micro_batch: int
    accumulation: int = 1
    precision: Precision = field(default_factory=Precision)
    checkpointing: str = "none"
    compile: bool | str = False
    bucket_mb: float | None = None
    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    data: Choice = field(default_factory=lambda: Choice("synthetic"))

    def __post_init__(self) -> None:
        for name in ("sequence_length", "micro_batch", "accumulation"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "a whole number from 1")
        tokens = self.micro_batch * self.accumulation * self.sequence_length
        accepted = f"at most {MOST_TOKENS:,} tokens of a process in a step"
        require(tokens <= MOST_TOKENS, "micro_batch x accumulation x sequence_length", tokens, accepted)
        modes = (*CHECKPOINTING, AUTO_CHECKPOINTING)
        require(self.checkpointing in modes, "checkpointing", self.checkpointing, ", ".join(modes))
        compilation(self.compile)
        require(
            self.bucket_mb is None or 0 < self.bucket_mb < math.inf,
            "bucket_mb",
            self.bucket_mb,
            "a positive number, or null for the strategy's default",
        )
        require(0 < self.learning_rate < math.inf, "learning_rate", self.learning_rate, "a positive number")
        require(0 <= self.weight_decay < math.inf, "weight_decay", self.weight_decay, "a number from 0")
        require(0 < self.clip_norm < math.inf, "clip_norm", self.clip_norm, "a positive number")

    @property
    def compilation(self) -> Compilation | None:
        """How the model is compiled; None if it is not."""
        return compilation(self.compile)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Fine-tuning: which weights learn, how the frozen ones are stored, and the optimizer.

    qlora stores the frozen matrices in 4 bit (NF4, with quantised scales), lora in the compute dtype. full trains every
    weight without adapters, so rank, alpha and targets have no effect.
    """

    method: str = "qlora"
    rank: int = 16
    alpha: float = 32.0
    targets: str = "q+k+v+o"
    optimizer: str = "paged_adamw_8bit"

    def __post_init__(self) -> None:
        require(self.method in METHODS, "method", self.method, ", ".join(METHODS))
        require(self.optimizer in OPTIMIZERS, "optimizer", self.optimizer, ", ".join(OPTIMIZERS))
        require(self.rank >= 1, "rank", self.rank, "a whole number from 1")
        require(0 < self.alpha < math.inf, "alpha", self.alpha, "a positive number")
        names = self.targets.split("+")
        valid = all(name in TARGETS for name in names) and len(set(names)) == len(names)
        require(valid, "targets", self.targets, f"some of {', '.join(TARGETS)}, each once, joined by '+'")

    @property
    def has_adapters(self) -> bool:
        return self.method != "full"


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One launch. Everything that decides what is computed is in here; nothing else reaches the worker.

    design: the experimental design of which this run is a point. lineage: the controller's mark of one launch, by which
    it recognises its job and checkpoints. contents: digests of the files that `model` and `data` name, so that changed
    data under the same path is different work. env: variables of the ranks (see `variables`). proof: what to do if the
    reference does not fit. reduction: the mark of a run of a proof group. declared: what plugins from other
    packages declared when the run was stored, so that it can be read where they are not installed; None before: kind ->
    name -> constants of plugins.DECLARED, and strategies -> strategy -> results of plugins.ANSWERS. Neither design,
    proof, lineage nor declared is part of an identity.
    """

    experiment: str
    workload: Choice
    model: Choice
    topology: Topology
    training: Training
    steps: int
    strategy: Choice | None = None
    tuning: Tuning | None = None
    serving: Serving | None = None
    engine: Choice | None = None
    script: Script | None = None
    launcher: Choice = field(default_factory=lambda: Choice("local"))
    warmup: WarmUp = field(default_factory=WarmUp)
    repeat: int = 0
    seed: int = 42
    reference_steps: int = 20
    timeout_s: float = 1800.0
    stall_s: float = 300.0
    telemetry_hz: float = 2.0
    max_restarts: int = 0
    checkpoint_every: int | None = None
    checkpoint_async: bool = False
    design: Design | None = None
    contents: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    proof: Proof = field(default_factory=Proof)
    reduction: Reduction | None = None
    lineage: str | None = None
    declared: Mapping[str, Mapping[str, Mapping[str, Any]]] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        require(
            bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.experiment)),
            "name",
            self.experiment,
            "letters, digits, '.', '_' and '-', beginning with a letter or digit",
        )
        # 0: a script runs until it ends by itself.
        require(self.steps >= (0 if self.script else 1), "steps", self.steps, "a whole number from 1")
        require(self.steps <= MOST_STEPS, "steps", self.steps, f"a whole number up to {MOST_STEPS:,}")
        require(self.reference_steps >= 2, "reference_steps", self.reference_steps, "a whole number from 2")
        require(self.max_restarts >= 0, "max_restarts", self.max_restarts, "a whole number from 0")
        every = self.checkpoint_every
        require(every is None or every >= 1, "checkpoint_every", every, "a number of steps from 1, or null for none")
        has_any = every is not None or not self.checkpoint_async
        require(has_any, "checkpoint_async", self.checkpoint_async, "false, or a number of steps as checkpoint_every")
        require(0 <= self.seed <= MOST_SEED, "seed", self.seed, f"a whole number from 0 to {MOST_SEED:,}")
        require(type(self.repeat) is int and self.repeat >= 0, "repeat", self.repeat, "a whole number from 0")
        for name in ("env", "contents"):
            value = getattr(self, name)
            is_text = isinstance(value, Mapping) and all(isinstance(v, str) for pair in value.items() for v in pair)
            require(is_text, name, value, "a mapping of names to text")
        for name in ("timeout_s", "stall_s"):
            require(0 < getattr(self, name) < math.inf, name, getattr(self, name), "a positive number of seconds")
        accepted = f"readings a second up to {FASTEST_TELEMETRY_HZ:g}, or 0 for none"
        require(0 <= self.telemetry_hz <= FASTEST_TELEMETRY_HZ, "telemetry_hz", self.telemetry_hz, accepted)

    @cached_property
    def global_batch(self) -> int:
        """Sequences per optimizer step over all data parallel replicas."""
        return self.training.micro_batch * self.training.accumulation * layout_of(self).dp

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.training.sequence_length

    def _declaration(self, kind: str, name: str) -> Mapping[str, Any] | None:
        """What a plugin of this run declares; None where the run does not say and the plugin is not installed."""
        recorded = (self.declared or {}).get(kind, {}).get(name)
        if recorded is None or plugins.is_shipped(kind, name):
            with contextlib.suppress(RequestError):
                return plugins.declared(kind, name, imports=self.declared is None)
            return None
        return {**recorded, **({"TRAITS": Traits.from_dict(recorded.get("TRAITS", {}))} if kind == "workloads" else {})}

    @cached_property
    def traits(self) -> Traits:
        """What the workload declares about itself.

        A workload that is neither installed nor recorded, as in runs stored before workloads declared anything, is
        taken as certified training if it has a strategy.
        """
        declared = self._declaration("workloads", self.workload.name)
        if declared is None:
            return Traits(trains=self.strategy is not None, certified=self.strategy is not None)
        return cast(Traits, declared["TRAITS"])

    @property
    def is_trained(self) -> bool:
        return self.traits.trains

    @property
    def is_certified(self) -> bool:
        """Whether runs of this workload must prove equal work before they are ranked."""
        return self.traits.certified

    @cached_property
    def approximation(self) -> str | None:
        """What the strategy does on purpose instead of the reference's arithmetic, in words; None if nothing.

        Such runs are not equal work: they are compared by speed, bytes and loss together (`compare.tradeoffs`).
        """
        described: str | None = self.says("approximation")
        return described

    def says(self, function: str) -> Any:
        """What one of `plugins.ANSWERS` of the strategy returns for this run; None if the strategy does not have it.

        A strategy that is not installed here is known by what it said when the run was stored.
        """
        strategy = self.strategy
        if strategy is None:
            return None
        plugin = plugins.find("strategies", strategy.name)
        if plugin is None:
            return (self.declared or {}).get("strategies", {}).get(str(strategy), {}).get(function)
        more = {"layout": [self.topology.world_size], "reductions_per_step": [self.training.accumulation]}
        answer = getattr(plugin, function, None)
        return None if answer is None else answer(strategy.options, *more.get(function, []))

    def _answers(self) -> dict[str, Any]:
        """What the strategy says about this run, as spec.json stores it; empty for a shipped one."""
        if self.strategy is None or plugins.is_shipped("strategies", self.strategy.name):
            return {}
        said = {function: self.says(function) for function in plugins.ANSWERS}
        plain = {name: dataclasses.asdict(x) if isinstance(x, Layout) else x for name, x in said.items()}
        return {name: answer for name, answer in plain.items() if answer is not None}

    @property
    def starts_servers(self) -> bool:
        """Whether the engine runs on this run's devices; otherwise its endpoints are elsewhere, as are their gauges."""
        declared = self._declaration("engines", self.engine.name) if self.engine else None
        return bool(declared and declared.get("STARTS"))

    def configuration(self) -> dict[str, Any]:
        """The fields that make the cell: equal for two specs if and only if their cells are equal."""
        unused: tuple[str, ...] = () if self.is_trained else ("training", "warmup", "steps")
        if self.script:
            unused = ("training",)
        if self.serving:
            # Data and precision are fields of `training`.
            unused = ("warmup", "steps")
        fields = self._without(*NO_CELL, *unused)
        if self.strategy:
            fields["strategy"] = _plain(plugins.canonical("strategies", self.strategy))
        if self.script:
            # Two versions of a script are one cell, so that they can be compared.
            del fields["script"]["code"]
        return fields

    @cached_property
    def cell(self) -> str:
        """Same for all repeats of one configuration, whatever the experiment is called and however long it may run."""
        return _digest(self.configuration())

    @cached_property
    def run_id(self) -> str:
        workload = None if self.workload.name == DEFAULT_WORKLOAD else self.workload.name
        # The digest covers what is cut off.
        strategy = str(self.strategy)[:LONGEST_STRATEGY] if self.strategy else None
        # For a directory, the last path component is enough: the digest covers the rest. File names have a limit.
        model = None if self.traits.measures_network else str(_last_part(self.model.name))[:40]
        model = self.script.title.removesuffix(".py")[:40] if self.script else model
        proof = "proof" if self.reduction else None
        label = "-".join(filter(None, (proof, workload, strategy, model, f"{self.topology.world_size}x")))
        slug = re.sub(r"[^A-Za-z0-9]+", "-", label).strip("-").lower()
        return f"{slug}-r{self.repeat}-{_digest(self._without(*NO_RUN))[:10]}"

    @cached_property
    def work(self) -> str:
        """Same for all runs that must follow one loss trajectory: model, data, global batch, dtypes and optimizer."""
        t = self.training
        if self.script:
            script = {name: self.script.parameters[name] for name in self.script.work}
            return _digest({"script": script, "model": str(self.model), "device": self.topology.device})
        return _digest(
            {
                "model": str(self.model),
                "seed": self.seed,
                "device": self.topology.device,
                "global_batch": self.global_batch,
                "sequence_length": t.sequence_length,
                "precision": dataclasses.asdict(t.precision),
                "data": str(t.data),
                "optimizer": [t.learning_rate, t.weight_decay, t.clip_norm],
                **({"tuning": dataclasses.asdict(self.tuning)} if self.tuning else {}),
                **({"contents": dict(self.contents)} if self.contents else {}),
                **({"reduction": dataclasses.asdict(self.reduction)} if self.reduction else {}),
            }
        )

    @property
    def group_work(self) -> str:
        """Same for the runs of one work and for those of its proof group, which are judged together."""
        return self.reduction.work if self.reduction else self.work

    @property
    def proves_only(self) -> bool:
        """Whether the run only proves others: a reference, or a run of a proof group. Its speed is not measured."""
        return self.workload.name == "reference" or self.reduction is not None

    @property
    def strategy_text(self) -> str | None:
        """The strategy as tables name it. Runs that were stored with options equal to their default say the same."""
        return str(plugins.canonical("strategies", self.strategy)) if self.strategy else None

    @property
    def model_text(self) -> str:
        """The model as tables name it: for a directory, its last path component and a digest of its content."""
        return _short_name(self.model, self.contents.get("model"))

    def is_model(self, name: str) -> bool:
        """Whether a server's name for its model is the requested one: directories and case do not count."""
        last = [text.rstrip("/").rpartition("/")[2].casefold() for text in (name, self.model.name, self.model_text)]
        return last[0] in last[1:]

    @property
    def _is_model_unknown(self) -> bool:
        return self.script is not None and self.model.name == UNKNOWN_MODEL

    @property
    def data_text(self) -> str:
        return _short_name(self.training.data, self.contents.get("data"))

    @property
    def launcher_axes(self) -> dict[str, Scalar]:
        """Options of the launcher that are part of the setting, such as the rate of an emulated network."""
        declared = (self._declaration("launchers", self.launcher.name) or {}).get("AXES", ())
        return {name: self.launcher.options[name] for name in declared if name in self.launcher.options}

    def axes(self) -> dict[str, Scalar]:
        """The flat fields by which people distinguish runs in tables, filters and plots."""
        return dict(self._axes)

    @cached_property
    def _axes(self) -> Mapping[str, Scalar]:
        t, s = self.training, self.serving
        axes: dict[str, Scalar] = {
            "workload": str(self.workload),
            "strategy": self.strategy_text,
            "model": None if self.traits.measures_network or self._is_model_unknown else self.model_text,
            "launcher": self.launcher.name,
            "device": self.topology.device,
            "nodes": self.topology.nodes,
            "world_size": self.topology.world_size,
        }
        if s:
            assert self.engine is not None
            engine = Choice(self.engine.name, self._measured("engines", self.engine))
            axes |= {
                # An address in full; a program by its name and a digest of its path.
                "engine": _short_name(engine, None) if "executable" in engine.options else str(engine),
                "scenario": s.scenario,
                "rate_per_s": s.rate_per_s,
                "concurrency": s.concurrency,
                "requests": s.requests,
                "max_tokens": s.max_tokens,
                "api": s.api,
                "partition": s.partition,
                "precision": t.precision.compute,
                "data": self.data_text,
            }
        elif self.script:
            axes |= {"script": self.script.title, "arguments": self.script.arguments or None, **self.script.parameters}
        elif self.is_trained:
            axes |= {
                "precision": t.precision.compute,
                "reduce_dtype": t.precision.reduce,
                "sequence_length": t.sequence_length,
                "micro_batch": t.micro_batch,
                "accumulation": t.accumulation,
                "global_batch": self.global_batch,
                "checkpointing": t.checkpointing,
                "compile": t.compile,
                "bucket_mb": t.bucket_mb,
                "data": self.data_text,
            }
            if self.tuning:
                rank, targets = (self.tuning.rank, self.tuning.targets) if self.tuning.has_adapters else (None, None)
                axes |= {"method": self.tuning.method, "rank": rank, "targets": targets}
                axes["optimizer"] = self.tuning.optimizer
        axes |= self.launcher_axes
        if self.env:
            axes["env"] = " ".join(f"{name}={value}" for name, value in self.env.items())
        if self.checkpoint_every:
            axes |= {"checkpoint_every": self.checkpoint_every, "checkpoint_async": self.checkpoint_async}
        if not self.script:
            axes["seed"] = self.seed
        # A script without a limit runs until it ends: its number of steps is not known before.
        return axes | {"steps": self.steps} if self.is_trained and self.steps and not s else axes

    def to_dict(self) -> dict[str, Any]:
        """As spec.json stores it. Shipped plugins are not recorded in `declared`: their files say it."""
        values = {"schema": SCHEMA, **dataclasses.asdict(self)}
        for name in ("env", "script", "checkpoint_async", "reduction"):
            if not getattr(self, name):
                del values[name]
        if self.proof == Proof():
            del values["proof"]
        declared: dict[str, dict[str, Any]] = {}
        for kind, choice in (("workloads", self.workload), ("launchers", self.launcher), ("engines", self.engine)):
            constants = None
            if choice is not None and not plugins.is_shipped(kind, choice.name):
                constants = self._declaration(kind, choice.name)
            if choice is not None and constants is not None:
                plain = {k: dataclasses.asdict(v) if isinstance(v, Traits) else v for k, v in constants.items()}
                declared.setdefault(kind, {})[choice.name] = plain
        if answers := self._answers():
            declared["strategies"] = {str(self.strategy): answers}
        if declared:
            return {**values, "declared": declared}
        del values["declared"]
        return values

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> RunSpec:
        """The inverse of `to_dict`. The store migrates older schemas first."""
        values = {"declared": {}, **{key: value for key, value in raw.items() if key != "schema"}}
        if answers := values["declared"].get("strategies"):
            read = {name: _with_layout(said) for name, said in answers.items()}
            values["declared"] = {**values["declared"], "strategies": read}
        training = dict(values["training"])
        training |= {"precision": Precision(**training["precision"]), "data": Choice(**training["data"])}
        values |= {
            "topology": Topology(**values["topology"]),
            "warmup": WarmUp(**values["warmup"]),
            "training": Training(**training),
            "tuning": Tuning(**values["tuning"]) if values.get("tuning") else None,
            "serving": Serving(**values["serving"]) if values.get("serving") else None,
            "script": Script.from_dict(values["script"]) if values.get("script") else None,
            "design": Design.from_dict(values["design"]) if values.get("design") else None,
            "proof": Proof(**values.get("proof") or {}),
            "reduction": Reduction(**values["reduction"]) if values.get("reduction") else None,
        }
        for key in ("workload", "model", "strategy", "launcher", "engine"):
            values[key] = Choice(**values[key]) if values.get(key) else None
        return cls(**values)

    def _without(self, *fields: str) -> dict[str, Any]:
        """The fields that make an identity. Fields that were added later count only where they are set, so that older
        runs keep their ids."""
        later: tuple[str, ...] = ("tuning", "contents", "checkpoint_every", "checkpoint_async", "serving", "engine")
        later += ("env", "script", "reduction")
        empty = tuple(name for name in later if not getattr(self, name))
        left_out = {*fields, *empty}
        values = {name: _plain(getattr(self, name)) for name in _field_names(RunSpec) if name not in left_out}
        for kind, key in (("launchers", "launcher"), ("engines", "engine")):
            if values.get(key):
                values[key]["options"] = self._measured(kind, Choice(**values[key]))
        return values

    def _measured(self, kind: str, choice: Choice) -> dict[str, Any]:
        declared = self._declaration(kind, choice.name) or {}
        return measured(choice.options, declared.get("UNMEASURED", ()))


def _short_name(choice: Choice, contents: str | None) -> str:
    """A choice without the directories of its paths, which do not belong in a table; a digest tells them apart."""
    paths = [text for text in (choice.name, *choice.options.values()) if isinstance(text, str) and "/" in text]
    if not paths and contents is None:
        return str(choice)
    mark = f"@{(contents or _digest(paths))[:8]}"
    last = {key: _last_part(value) for key, value in choice.options.items()}
    if "path" in last:
        last["path"] = f"{last['path']}{mark}"
        return str(Choice(choice.name, last))
    return str(Choice(f"{_last_part(choice.name)}{mark}", last))


def _last_part(value: Scalar) -> Scalar:
    return value.rstrip("/").rpartition("/")[2] if isinstance(value, str) else value


def _with_layout(said: Mapping[str, Any]) -> dict[str, Any]:
    """What a strategy said about a run, from spec.json."""
    return {**said, "layout": Layout.from_dict(said["layout"])} if said.get("layout") else dict(said)


def _plain(value: Any) -> Any:
    """As `dataclasses.asdict`, which copies every number and text, too: that takes most of the time of an id."""
    if isinstance(value, _LEAVES):
        return value
    if names := _field_names(value.__class__):
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


_LEAVES = (str, int, float, type(None))


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
