"""Asked: what one run shall do, complete enough to repeat it years later.

Frozen dataclasses without behaviour beyond their own invariants. A `RunSpec` is one launch; its `cell` is shared by all
repeats of the same configuration, its `work` by all runs whose results must agree whatever the strategy.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from paceline.errors import Scalar as Scalar
from paceline.errors import require as require
from paceline.experiment.choices import Choice as Choice
from paceline.experiment.factorial import Design
from paceline.experiment.identity import NO_CELL, NO_RUN, measured
from paceline.experiment.serving import Serving

SCHEMA = 1
DTYPES = ("fp32", "bf16", "fp16")
CHECKPOINTING = ("none", "full", "selective")
DEVICES = ("cpu", "cuda")
# Workloads that ask a served model: their specs say how.
SERVED = ("inference",)
# Workloads that train nothing: no strategy, and the fields of training neither make their cell nor name their runs.
UNTRAINED = ("collectives", "compute", *SERVED)
# Workloads that test nodes one by one: no strategy joins their processes, and a wrong result is an answer of theirs.
ACCEPTING = ("nodes",)
# Workloads whose runs are not ranked against each other by speed, so need no proof of equal work.
UNCERTIFIED = (*UNTRAINED, *ACCEPTING, "memory", "frontier", "reference")
# Workloads that fine-tune: their specs say how.
TUNED = ("finetune",)
METHODS = ("full", "lora", "qlora")
OPTIMIZERS = ("adamw", "adamw_8bit", "paged_adamw_8bit")
# Projections that may carry an adapter, by the letter or word people use.
TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
# Workloads that look for the limit: a run that is out of memory has given its answer.
PROBING = ("frontier",)

# One reading takes the driver a few milliseconds.
FASTEST_TELEMETRY_HZ = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Which processes take part; one process drives one device."""

    device: str
    nodes: int = 1
    processes_per_node: int = 1

    def __post_init__(self) -> None:
        require(self.device in DEVICES, "device", self.device, " or ".join(DEVICES))
        require(self.nodes >= 1, "nodes", self.nodes, "a whole number from 1")
        require(self.processes_per_node >= 1, "processes", self.processes_per_node, "a whole number from 1")

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """compute: dtype of the matrix products; master weights and Adam's moments are fp32 always.

    reduce: dtype in which gradients are accumulated and cross the network, the same for every strategy of a group.
    """

    compute: str = "fp32"
    reduce: str = "fp32"

    def __post_init__(self) -> None:
        require(self.compute in DTYPES, "precision", self.compute, ", ".join(DTYPES))
        accepted = sorted({"fp32", self.compute})
        require(
            self.reduce in accepted,
            "reduce_dtype",
            self.reduce,
            f"{' or '.join(accepted)} with precision {self.compute}",
        )


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
    compile: bool = False
    bucket_mb: float | None = None
    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    data: Choice = field(default_factory=lambda: Choice("synthetic"))

    def __post_init__(self) -> None:
        for name in ("sequence_length", "micro_batch", "accumulation"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "a whole number from 1")
        require(self.checkpointing in CHECKPOINTING, "checkpointing", self.checkpointing, ", ".join(CHECKPOINTING))
        require(
            self.bucket_mb is None or 0 < self.bucket_mb < math.inf,
            "bucket_mb",
            self.bucket_mb,
            "a positive number, or null for the strategy's default",
        )
        require(0 < self.learning_rate < math.inf, "learning_rate", self.learning_rate, "a positive number")
        require(0 <= self.weight_decay < math.inf, "weight_decay", self.weight_decay, "a number from 0")
        require(0 < self.clip_norm < math.inf, "clip_norm", self.clip_norm, "a positive number")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Fine-tuning: which weights learn, in what the frozen ones are held, and the optimizer of those that learn.

    qlora holds the frozen products in 4 bit (NF4, scales quantised again), lora in the compute dtype; full has no
    adapter, so rank, alpha and targets do not count there.
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
        sound = all(name in TARGETS for name in names) and len(set(names)) == len(names)
        require(sound, "targets", self.targets, f"different ones of {', '.join(TARGETS)}, joined by '+'")

    @property
    def has_adapters(self) -> bool:
        return self.method != "full"


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One launch. Everything that decides what is computed stands here; nothing else reaches the worker.

    design is the plan this run was made for. It decides nothing that is computed, so no identity holds it. Nor is
    lineage part of any: the controller's mark of one launch, by which its job and checkpoints are known again. contents
    are digests of what `model` and `data` name on the disk, so that other data under the same path is other work.
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
    design: Design | None = None
    contents: Mapping[str, str] = field(default_factory=dict)
    lineage: str | None = None

    def __post_init__(self) -> None:
        require(
            bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.experiment)),
            "name",
            self.experiment,
            "letters, digits, '.', '_' and '-'",
        )
        require(self.steps >= 1, "steps", self.steps, "a whole number from 1")
        require(self.reference_steps >= 2, "reference_steps", self.reference_steps, "a whole number from 2")
        require(self.max_restarts >= 0, "max_restarts", self.max_restarts, "a whole number from 0")
        every = self.checkpoint_every
        require(every is None or every >= 1, "checkpoint_every", every, "a number of steps from 1, or null for none")
        require(self.seed >= 0, "seed", self.seed, "a whole number from 0")
        for name in ("timeout_s", "stall_s"):
            require(0 < getattr(self, name) < math.inf, name, getattr(self, name), "a positive number of seconds")
        accepted = f"readings a second up to {FASTEST_TELEMETRY_HZ:g}, or 0 for none"
        require(0 <= self.telemetry_hz <= FASTEST_TELEMETRY_HZ, "telemetry_hz", self.telemetry_hz, accepted)

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step over all processes."""
        return self.training.micro_batch * self.training.accumulation * self.topology.world_size

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.training.sequence_length

    @property
    def is_trained(self) -> bool:
        return self.workload.name not in UNTRAINED

    @property
    def is_certified(self) -> bool:
        """Whether runs of this workload must prove equal work before they are ranked."""
        return self.workload.name not in UNCERTIFIED

    def configuration(self) -> dict[str, Any]:
        """All that decides the cell and nothing else, by field: equal for two specs just where their cells are."""
        unused: tuple[str, ...] = () if self.is_trained else ("training", "warmup", "steps")
        if self.serving:
            # Data and precision stand among the fields of training.
            unused = ("warmup", "steps")
        return self._without(*NO_CELL, *unused)

    @cached_property
    def cell(self) -> str:
        """Same for all repeats of one configuration, whatever the experiment is called and however long it may take."""
        return _digest(self.configuration())

    @cached_property
    def run_id(self) -> str:
        workload = None if self.workload.name == "pretrain" else self.workload.name
        strategy = str(self.strategy) if self.strategy else None
        # Of a directory its last part tells enough: the digest tells the rest, and names of folders have an end.
        name = self.model.name.rstrip("/").rpartition("/")[2][:40]
        model = None if self.workload.name == "collectives" else name
        label = "-".join(filter(None, (workload, strategy, model, f"{self.topology.world_size}x")))
        slug = re.sub(r"[^A-Za-z0-9]+", "-", label).strip("-").lower()
        return f"{slug}-r{self.repeat}-{_digest(self._without(*NO_RUN))[:10]}"

    @cached_property
    def work(self) -> str:
        """Same for all runs that must follow one loss trajectory: model, data, global batch, arithmetic, optimizer."""
        t = self.training
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
            }
        )

    @property
    def model_text(self) -> str:
        """The model as tables name it: of a directory its last part, and what is in it."""
        return _told(self.model, self.contents.get("model"))

    @property
    def data_text(self) -> str:
        return _told(self.training.data, self.contents.get("data"))

    def axes(self) -> dict[str, Scalar]:
        """The flat words by which people tell runs apart, in tables, filters and plots."""
        t = self.training
        places: dict[str, Scalar] = {
            "workload": str(self.workload),
            "strategy": str(self.strategy) if self.strategy else None,
            "model": None if self.workload.name == "collectives" else self.model_text,
            "launcher": self.launcher.name,
            "device": self.topology.device,
            "nodes": self.topology.nodes,
            "world_size": self.topology.world_size,
        }
        if self.serving:
            return {**places, **self._serving_axes(), "seed": self.seed}
        if not self.is_trained:
            return {**places, "seed": self.seed}
        return {
            **places,
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
            **self._tuning_axes(),
            "seed": self.seed,
            "steps": self.steps,
        }

    def _serving_axes(self) -> dict[str, Scalar]:
        assert self.serving is not None
        assert self.engine is not None
        s, engine = self.serving, Choice(self.engine.name, measured(self.engine.name, self.engine.options))
        asked: dict[str, Scalar] = {"rate_per_s": s.rate_per_s, "concurrency": s.concurrency, "requests": s.requests}
        return {
            # Of an address all, of a program its name and a mark that tells its path from others.
            "engine": _told(engine, None) if "executable" in engine.options else str(engine),
            "scenario": s.scenario,
            **asked,
            "max_tokens": s.max_tokens,
            "api": s.api,
            "partition": s.partition,
            "precision": self.training.precision.compute,
            "data": self.data_text,
        }

    def _tuning_axes(self) -> dict[str, Scalar]:
        if self.tuning is None:
            return {}
        t = self.tuning
        rank, targets = (t.rank, t.targets) if t.has_adapters else (None, None)
        return {"method": t.method, "rank": rank, "targets": targets, "optimizer": t.optimizer}

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> RunSpec:
        """The inverse of `to_dict`; the store has migrated older schemas before."""
        values = {key: value for key, value in raw.items() if key != "schema"}
        training = dict(values["training"])
        training |= {"precision": Precision(**training["precision"]), "data": Choice(**training["data"])}
        values |= {
            "topology": Topology(**values["topology"]),
            "warmup": WarmUp(**values["warmup"]),
            "training": Training(**training),
            "tuning": Tuning(**values["tuning"]) if values.get("tuning") else None,
            "serving": Serving(**values["serving"]) if values.get("serving") else None,
            "design": Design.from_dict(values["design"]) if values.get("design") else None,
        }
        for key in ("workload", "model", "strategy", "launcher", "engine"):
            values[key] = Choice(**values[key]) if values.get(key) else None
        return cls(**values)

    def _without(self, *fields: str) -> dict[str, Any]:
        """What makes an identity. A run that tunes or serves nothing, makes no checkpoint or reads no file is what it
        was before there was such a thing."""
        unasked = ("tuning", "contents", "checkpoint_every", "serving", "engine")
        empty = tuple(name for name in unasked if not getattr(self, name))
        found = {key: value for key, value in dataclasses.asdict(self).items() if key not in (*fields, *empty)}
        for part in filter(None, map(found.get, ("launcher", "engine"))):
            part["options"] = measured(part["name"], part["options"])
        return found


def _told(choice: Choice, contents: str | None) -> str:
    """A choice without the folders of its paths, which are nobody's business in a table; a digest tells them apart."""
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


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
