"""ZeRO on DeepSpeed: stage 1 shards optimizer state, stage 2 also gradients, stage 3 also weights."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from paceline.contract import Seat, Trainer
from paceline.errors import CheckpointError, MissingPackageError, require
from paceline.experiment.plugins import parse_options
from paceline.experiment.spec import RunSpec
from paceline.models.arithmetic import Traffic
from paceline.training.instruments import collection_paused

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.training.strategies._torch import Subject

# The directory within a checkpoint; any name works.
TAG = "zero"


@dataclass(frozen=True)
class Options:
    """overlap: start reductions while backward still runs. The other options (stage 3) have DeepSpeed's defaults:
    gathered weights are kept for backward within max_live_parameters and max_reuse_distance (0 and 0: every weight is
    gathered twice per micro batch), and weights smaller than persistence_threshold are never sharded."""

    stage: int = 1
    overlap: bool = True
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    persistence_threshold: int = 100_000

    def __post_init__(self) -> None:
        require(self.stage in (1, 2, 3), "zero.stage", self.stage, "1, 2 or 3")


def check(spec: RunSpec) -> str | None:
    assert spec.strategy is not None
    parse_options(Options, spec.strategy)
    if has_adapters(spec) and spec.training.precision.compute == "fp16":
        return "DeepSpeed scales the loss only if the whole model is fp16, and adapters are fp32"
    return None


def sharded_parts(options: Mapping[str, Any]) -> int | None:
    stage = options.get("stage", 1)
    return stage if stage in (1, 2, 3) else None


def reductions_per_step(options: Mapping[str, Any], accumulation: int) -> int:
    return accumulation if options.get("stage", 1) in (2, 3) else 1


def wire_bytes(traffic: Traffic) -> float | None:
    """Stage 1, 2Pr + Pp: one all-reduce of the whole gradient, then an all-gather of the updated weights.

    Stage 2, 2G*Pr + Pp: DeepSpeed all-reduces in buckets after every micro batch. Stage 3, G*(2Pp + Pr), or G*(Pp + Pr)
    for a model within DeepSpeed's reuse window, whose weights are kept from forward to backward. The window is the
    smaller of max_live_parameters and max_reuse_distance (both 1e9 by default). A somewhat larger model is reused in
    part, so beyond the window this is an upper bound. Tensors of at most persistence_threshold elements (1e5 by
    default) stay on every rank and are gathered once per step, after the update.
    """
    options, stage = traffic.options, sharded_parts(traffic.options)
    if stage is None:
        return None
    if stage < 3:
        times = traffic.accumulation if stage == 2 else 1
        return 2 * times * traffic.gradient_bytes + traffic.updated_bytes
    window = min(options.get(name, 1e9) for name in ("max_live_parameters", "max_reuse_distance"))
    kept = sum(size for elements, size in traffic.tensors if elements <= options.get("persistence_threshold", 1e5))
    gathers = traffic.accumulation * (1 if traffic.parameters <= window else 2)
    return kept + gathers * (traffic.weight_bytes - kept) + traffic.accumulation * traffic.gradient_bytes


def has_adapters(spec: RunSpec) -> bool:
    return spec.tuning is not None and spec.tuning.has_adapters


def wrap(spec: RunSpec, seat: Seat) -> Trainer:
    deepspeed = import_deepspeed(seat.device)
    deepspeed.init_distributed(dist_backend="nccl" if seat.device == "cuda" else "gloo", verbose=False)
    from paceline.training.strategies._optimizers import optimizer_of
    from paceline.training.strategies._torch import compile_parts, compile_whole, learning, whole_subject

    assert spec.strategy is not None
    chosen = parse_options(Options, spec.strategy)
    # DeepSpeed would cast by itself, but with both copies on the device at once.
    subject = whole_subject(spec, seat, spec.training.precision.compute)
    if spec.training.compile:
        # Stage 3 fetches weights in hooks between layers, which one graph over the whole model would not see.
        compile_parts(subject) if chosen.stage == 3 else compile_whole(subject)
    config = configuration(spec, chosen)
    optimizer = optimizer_of(spec, learning(subject))
    engine, *_ = deepspeed.initialize(model=subject, optimizer=optimizer, config=config)
    return ZeroTrainer(engine, subject, optimizer, spec, chosen)


def preload(device: str) -> None:
    """Import DeepSpeed ahead of time, for ranks that are forked later."""
    import_deepspeed(device)


def import_deepspeed(device: str) -> Any:
    # By default DeepSpeed guesses its accelerator, looks for CUDA's compiler and compiles a shared-memory operator.
    os.environ.setdefault("DS_ACCELERATOR", device)
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
    try:
        with collection_paused(), _hidden("mlflow"):
            import deepspeed
    except ImportError as error:
        raise MissingPackageError(error.name or "deepspeed", "the strategy zero", "'paceline[zero]'") from None
    # Its Muon optimizer, which every stage imports and nobody here uses, would import torch's compiler.
    deepspeed.runtime.compiler.compile = lambda: deepspeed.runtime.compiler.dummy_decorator
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@contextlib.contextmanager
def _hidden(package: str) -> Iterator[None]:
    """Make a package impossible to import: DeepSpeed's unused autotuner would import all of MLflow."""
    known = package in sys.modules
    sys.modules.setdefault(package, cast(ModuleType, None))
    try:
        yield
    finally:
        if not known:
            del sys.modules[package]


def configuration(spec: RunSpec, chosen: Options) -> dict[str, Any]:
    """DeepSpeed's configuration, with every value that it would otherwise guess: batch sizes, clipping, dtypes."""
    training = spec.training
    compute, reduce = training.precision.compute, training.precision.reduce
    zero: dict[str, Any] = {"stage": chosen.stage, "overlap_comm": chosen.overlap}
    if training.bucket_mb is not None:
        elements = int(training.bucket_mb * 2**20) // (4 if reduce == "fp32" else 2) & ~1
        zero |= {"reduce_bucket_size": elements, "allgather_bucket_size": elements}
    if chosen.stage == 3:
        zero |= {
            "stage3_max_live_parameters": chosen.max_live_parameters,
            "stage3_max_reuse_distance": chosen.max_reuse_distance,
            "stage3_param_persistence_threshold": chosen.persistence_threshold,
            # Its replacement of torch's linear rounds before adding the bias, unlike the other strategies.
            "memory_efficient_linear": False,
        }
    config: dict[str, Any] = {
        "train_batch_size": spec.global_batch,
        "train_micro_batch_size_per_gpu": training.micro_batch,
        "gradient_accumulation_steps": training.accumulation,
        "gradient_clipping": training.clip_norm,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        "communication_data_type": reduce,
        "data_types": {"grad_accum_dtype": reduce},
        "steps_per_print": 1 << 30,
    }
    if has_adapters(spec):
        # The adapters are fp32, DeepSpeed does not touch frozen weights, and the module casts by itself.
        return config
    if compute == "bf16":
        config["bf16"] = {"enabled": True}
    if compute == "fp16":
        # The schedule of torch.amp.GradScaler, so that all strategies scale alike.
        config["fp16"] = {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1}
    return config


class ZeroTrainer:
    """Implements `contract.Trainer`; the engine divides, reduces, clips and updates by itself."""

    def __init__(self, engine: Any, subject: Subject, optimizer: Any, spec: RunSpec, chosen: Options) -> None:
        self.engine, self.subject, self.optimizer = engine, subject, optimizer
        self.spec, self.chosen = spec, chosen

    @property
    def updates(self) -> int:
        return int(self.engine.global_steps - self.engine.skipped_steps)

    def forward(self, tokens: Tensor, labels: Tensor, normaliser: Tensor, last: bool) -> Tensor:
        return self.engine(tokens, labels, normaliser)  # type: ignore[no-any-return]

    def backward(self, loss: Tensor, last: bool) -> None:
        self.engine.backward(loss)
        if not last:
            self.engine.step()

    def update(self) -> Tensor | float:
        self.engine.step()
        return self.engine.get_global_grad_norm()  # type: ignore[no-any-return]

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        import deepspeed

        from paceline.training.strategies._torch import scales_of

        for name, parameter in self.subject.named_parameters():
            # Small parameters stay gathered between steps. Gathering one again would partition it afterwards, which the
            # engine does not expect: it would fail in the next backward pass.
            sharded = self.chosen.stage == 3 and cast(Any, parameter).ds_status.name != "AVAILABLE"
            with deepspeed.zero.GatheredParameters([parameter], enabled=sharded):
                yield name, parameter.detach()
        yield from scales_of(self.subject)

    def master_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the fp32 weights that the optimizer updates; those of the model may be 16-bit copies of them."""
        from deepspeed.utils import safe_get_full_fp32_param

        for name, parameter in self.subject.named_parameters():
            if parameter.requires_grad and (master := safe_get_full_fp32_param(parameter)) is not None:
                yield name, master

    def save(self, folder: Path) -> None:
        # Frozen weights are large and unchanged: the next attempt creates them again.
        self.engine.save_checkpoint(
            str(folder), tag=TAG, save_latest=False, exclude_frozen_parameters=has_adapters(self.spec)
        )

    def load(self, folder: Path) -> None:
        path, _ = self.engine.load_checkpoint(
            str(folder), tag=TAG, load_module_strict=not has_adapters(self.spec), load_lr_scheduler_states=False
        )
        if path is None:
            raise CheckpointError(f"DeepSpeed found no checkpoint in {folder}")

    def declare(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        from paceline.training.strategies._optimizers import DTYPE_NAMES, optimizer_facts, state_dtypes
        from paceline.training.strategies._torch import tuning_facts

        model_dtype, accumulation = self.engine.get_data_types()
        dtypes = {
            "parameters": DTYPE_NAMES[model_dtype],
            "compute": DTYPE_NAMES[self.subject.dtype],
            "gradient": DTYPE_NAMES[accumulation],
            "gradient_reduction": DTYPE_NAMES[self.engine.communication_data_type],
            **state_dtypes(self.optimizer),
        }
        special, more = tuning_facts(self.subject)
        facts = optimizer_facts(self.optimizer, self.engine.gradient_clipping())
        bucket = self.engine.zero_reduce_bucket_size()
        return dtypes | special, facts, {**asdict(self.chosen), "reduce_bucket_elements": bucket, **more}
