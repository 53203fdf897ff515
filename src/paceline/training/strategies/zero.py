"""ZeRO on DeepSpeed: stage 1 shards optimizer state, stage 2 also gradients, stage 3 also weights."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from paceline.contract import Seat, Trainer
from paceline.errors import (
    CLOSE,
    CheckpointError,
    MissingPackageError,
    RequestError,
    UnsupportedError,
    did_you_mean,
    require,
    shown,
)
from paceline.experiment import compilation
from paceline.experiment.plugins import parse_options
from paceline.experiment.spec import RunSpec
from paceline.host.files import document_of
from paceline.host.processes import collection_paused
from paceline.models.arithmetic import Traffic

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.training.strategies._torch import Subject

# The directory within a checkpoint; any name works.
TAG = "zero"
ALWAYS_NAMED = ("stage",)
USER_ONLY = {
    "config": "more of DeepSpeed's configuration, which can name files to write",
    "offload": "where optimizer state and weights are kept",
}


OF_STAGE_3 = ("max_live_parameters", "max_reuse_distance", "persistence_threshold", "prefetch_bucket")


@dataclass(frozen=True)
class Options:
    """overlap: start reductions while backward still runs. The other options (stage 3) have DeepSpeed's defaults:
    gathered weights are kept for backward within max_live_parameters and max_reuse_distance (0 and 0: every weight is
    gathered twice per micro batch), weights smaller than persistence_threshold are never sharded, and prefetch_bucket
    elements are gathered ahead. hpz (ZeRO++): weights are partitioned a second time over so many neighbouring ranks,
    such as those of a node, and gathered for backward among them alone. qwz and qgz (ZeRO++) are not equal work:
    weights are gathered in 8 bit, and gradients are reduced in 4 bit inside and between nodes.

    offload: `cpu` keeps the optimizer state (stage 3: the weights too) in host memory, a directory keeps it on that
    disk. config: more of DeepSpeed's own configuration, as a JSON file or object; it must not change the work."""

    stage: int = 1
    overlap: bool = True
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    persistence_threshold: int = 100_000
    prefetch_bucket: int = 50_000_000
    hpz: int = 1
    qwz: bool = False
    qgz: bool = False
    offload: str = ""
    config: Any = None

    def __post_init__(self) -> None:
        require(self.stage in (1, 2, 3), "zero.stage", self.stage, "1, 2 or 3")
        known = self.offload in ("", "cpu") or "/" in self.offload
        require(known, "zero.offload", self.offload, "cpu, or a directory on a disk (with a slash)")
        require(self.hpz >= 1, "zero.hpz", self.hpz, "a number of ranks from 1")
        for name in OF_STAGE_3:
            require(getattr(self, name) >= 0, f"zero.{name}", getattr(self, name), "a number of elements from 0")
        if self.config is not None:
            check_config(self.config)


# Parts of DeepSpeed's configuration that the experiment sets, or that would change the work.
FIXED = frozenset(
    (
        *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
        *("optimizer", "scheduler", "fp16", "bf16", "amp", "data_types", "communication_data_type"),
        *("prescale_gradients", "gradient_predivide_factor", "sparse_gradients", "compression_training"),
        *("curriculum_learning", "data_efficiency", "progressive_layer_drop", "eigenvalue", "pipeline"),
        *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "tensor_parallel", "elasticity"),
    )
)
# Other names of its first level, to find those that are misspelt.
SECTIONS = frozenset(
    (
        *("zero_optimization", "activation_checkpointing", "aio", "compile", "hybrid_engine"),
        *("comms_logger", "flops_profiler", "tensorboard", "wandb", "comet", "csv_monitor", "checkpoint"),
        *("wall_clock_breakdown", "steps_per_print", "memory_breakdown", "dump_state", "disable_allgather"),
    )
)
# Of `zero_optimization`: an option of the strategy, quantised traffic, which is other arithmetic, and another order of
# the partitions, in which the certificate would not find the master weights.
FIXED_OF_ZERO = frozenset(("stage", "zero_quantized_weights", "zero_quantized_gradients", "round_robin_gradients"))


def inline(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the content of the file that `config` names, so that the record and its id cover it."""
    name = options.get("config")
    if not isinstance(name, str):
        return dict(options)
    path = Path(name).expanduser()
    try:
        content = json.loads(document_of(path), object_pairs_hook=_unique)
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"zero.config: got {name!r}, expected a JSON file ({why}).") from None
    check_config(content)
    return {**options, "config": content}


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; ValueError if a key occurs twice, of which Python would keep the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} occurs twice")
    return found


def check_config(content: Any) -> None:
    """Refuse what is not an object, and settings that would make this run other work than the rest."""
    require(
        isinstance(content, dict), "zero.config", content, "a JSON object with DeepSpeed's configuration, or a file"
    )
    for name in content.keys() - SECTIONS - FIXED:
        # DeepSpeed ignores what it does not know: the run would not be what its name says.
        if hint := did_you_mean(name, (*SECTIONS, *FIXED), CLOSE):
            raise RequestError(f"zero.config: got {name}, which DeepSpeed does not know.{hint}")
    inner = content.get("zero_optimization", {})
    require(isinstance(inner, dict), "zero.config: zero_optimization", inner, "an object")
    for name in (*sorted(FIXED & content.keys()), *sorted(FIXED_OF_ZERO & inner.keys())):
        value = content.get(name, inner.get(name))
        raise RequestError(
            f"zero.config: got {name} {json.dumps(value)}, expected none: the experiment sets it, it would change the "
            "work, or the certificate could not follow it. Remove it from the file."
        )


def check(spec: RunSpec) -> str | None:
    assert spec.strategy is not None
    chosen = parse_options(Options, spec.strategy)
    if chosen.offload not in ("", "cpu") and chosen.stage != 3:
        return f"DeepSpeed keeps state on a disk at stage 3 only, got stage {chosen.stage}"
    for name in OF_STAGE_3:
        if chosen.stage != 3 and getattr(chosen, name) != getattr(Options, name):
            return f"{name} is an option of stage 3 and has no effect at stage {chosen.stage}; leave it out"
    if chosen.hpz > 1 and chosen.stage != 3:
        return f"hpz partitions weights, which DeepSpeed shards at stage 3 only, got stage {chosen.stage}"
    if (reason := _unquantised(spec, chosen)) is not None:
        return reason
    if spec.topology.world_size % chosen.hpz:
        return f"hpz={chosen.hpz} does not divide {spec.topology.world_size} ranks"
    if has_adapters(spec) and spec.training.precision.compute == "fp16":
        return "DeepSpeed scales the loss only if the whole model is fp16, and adapters are fp32"
    wanted, device = spec.training.compilation, spec.topology.device
    return compilation.refusal(wanted, f"zero:stage={chosen.stage}", device, per_block=chosen.stage == 3, graphs=False)


def _unquantised(spec: RunSpec, chosen: Options) -> str | None:
    """Why DeepSpeed would not quantise what is sent, or not correctly; None if it does, or need not."""
    names = " and ".join(name for name in ("qwz", "qgz") if getattr(chosen, name))
    if not names:
        return None
    if chosen.stage != 3:
        return f"DeepSpeed quantises what stage 3 sends, got stage {chosen.stage} with {names}"
    if spec.topology.device == "cpu":
        return f"{names}: DeepSpeed quantises with CUDA kernels only, and this run is on a CPU"
    if chosen.qgz and spec.training.precision.reduce != "fp16":
        # csrc/quantization/pt_binding.cpp reads the gradients as __half without a conversion.
        return (
            f"DeepSpeed's kernel for qgz reads fp16 gradients only, got reduce_dtype {spec.training.precision.reduce}"
        )
    return None


def approximation(options: Mapping[str, Any]) -> str | None:
    """What is quantised on purpose, so that runs are no equal work."""
    parts = ["weights gathered in 8 bit"] if options.get("qwz") is True else []
    parts += ["gradients of matrices reduced in 4 bit, inside and between nodes"] if options.get("qgz") is True else []
    return " and ".join(parts) or None


def approximates_loss(options: Mapping[str, Any]) -> bool:
    """Weights that were gathered in 8 bit give another loss."""
    return options.get("qwz") is True


def sharded_parts(options: Mapping[str, Any]) -> int | None:
    stage = options.get("stage", 1)
    return stage if stage in (1, 2, 3) else None


def offloads(options: Mapping[str, Any]) -> bool:
    return bool(options.get("offload"))


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
    if stage is None or options.get("config") or options.get("hpz", 1) > 1 or approximation(options):
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
    from paceline.training.strategies._torch import compile_subject, learning, whole_subject

    assert spec.strategy is not None
    chosen = parse_options(Options, spec.strategy)
    require_fp16(deepspeed, spec)
    if chosen.qwz or chosen.qgz:
        require_quantisation(deepspeed, seat, chosen)
    if chosen.offload not in ("", "cpu"):
        require_disk(deepspeed)
    # DeepSpeed would cast by itself, but with both copies on the device at once.
    subject = whole_subject(spec, seat, spec.training.precision.base)
    # Stage 3 fetches weights in hooks between layers, which one graph over the whole model would not see.
    compile_subject(subject, spec.training.compilation, per_block=chosen.stage == 3)
    config = merged(configuration(spec, chosen), chosen.config)
    require_large(spec, [parameter.numel() for parameter in learning(subject)])
    optimizer = optimizer_of(spec, learning(subject))
    with refusals_as_requests():
        engine, *_ = deepspeed.initialize(model=subject, optimizer=optimizer, config=config)
    return ZeroTrainer(engine, subject, optimizer, spec, chosen)


def require_fp16(deepspeed: Any, spec: RunSpec) -> None:
    """UnsupportedError in fp16 on a device for which DeepSpeed has none, such as most CPUs."""
    if spec.training.precision.compute == "fp16" and not deepspeed.accelerator.get_accelerator().is_fp16_supported():
        raise UnsupportedError(f"DeepSpeed has no fp16 on this {spec.topology.device}; use precision bf16 or fp32")


@contextlib.contextmanager
def refusals_as_requests() -> Iterator[None]:
    """Name the setting of the user's configuration that DeepSpeed refuses."""
    import pydantic

    try:
        yield
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        got = shown(first.get("input"))
        raise RequestError(f"zero.config: {name}: got {got}, which DeepSpeed refuses: {first['msg']}.") from None


def preload(device: str) -> None:
    """Import DeepSpeed ahead of time, for ranks that are forked later. On a GPU it would start CUDA."""
    if device == "cpu":
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


def require_quantisation(deepspeed: Any, seat: Seat, chosen: Options) -> None:
    """UnsupportedError where DeepSpeed has no kernels that quantise, or would silently send whole gradients."""
    if seat.device != "cuda":
        raise UnsupportedError("qwz and qgz need CUDA: DeepSpeed has no kernels that quantise on other devices")
    if chosen.qgz:
        import torch

        # As DeepSpeed counts them (`__avg_scatter_grads` in runtime/zero/stage3.py).
        devices = torch.cuda.device_count()
        if seat.world_size // devices < 2:
            raise UnsupportedError(
                f"qgz quantises gradients on two or more nodes only; {seat.world_size} ranks with {devices} GPUs on "
                "this one would send them whole"
            )
    # Its builder reads architectures as numbers, and fails at one with a suffix, such as 9.0a.
    if listed := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        os.environ["TORCH_CUDA_ARCH_LIST"] = re.sub(r"(\d)[a-z]\b", r"\1", listed)
    builders = importlib.import_module("deepspeed.ops.op_builder.builder")
    try:
        deepspeed.ops.op_builder.QuantizerBuilder().load(verbose=False)
    except (builders.MissingCUDAException, builders.CUDAMismatchException, RuntimeError, OSError) as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise UnsupportedError(
            f"DeepSpeed cannot compile its kernels that quantise ({reason}); they need nvcc"
        ) from None


def require_large(spec: RunSpec, sizes: Sequence[int]) -> None:
    """UnsupportedError for 8-bit moments of small tensors: bitsandbytes would keep those in fp32, but sees one large
    tensor, because DeepSpeed joins them all."""
    from paceline.training.strategies._optimizers import SMALLEST_8BIT, is_8bit

    if is_8bit(spec) and (smallest := min(sizes)) < SMALLEST_8BIT:
        raise UnsupportedError(
            f"the strategy zero joins all trained tensors: moments of a tensor of {smallest:,} elements would have "
            f"8 bit, which stay fp32 below {SMALLEST_8BIT:,} elements elsewhere; use optimizer adamw or larger adapters"
        )


def require_disk(deepspeed: Any) -> None:
    """UnsupportedError without libaio, with which DeepSpeed compiles its access to disks: it would fail or wait for
    minutes."""
    if not deepspeed.ops.op_builder.AsyncIOBuilder().is_compatible(verbose=False):
        raise UnsupportedError(
            "zero.offload: DeepSpeed keeps state on a disk with libaio and its headers; try: apt-get install libaio-dev"
        )


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
    compute, reduce = training.precision.base, training.precision.reduce
    zero: dict[str, Any] = {"stage": chosen.stage, "overlap_comm": chosen.overlap}
    if training.bucket_mb is not None:
        elements = int(training.bucket_mb * 2**20) // (4 if reduce == "fp32" else 2) & ~1
        zero |= {"reduce_bucket_size": elements, "allgather_bucket_size": elements}
    if chosen.stage == 3:
        zero |= {
            "stage3_max_live_parameters": chosen.max_live_parameters,
            "stage3_max_reuse_distance": chosen.max_reuse_distance,
            "stage3_param_persistence_threshold": chosen.persistence_threshold,
            "stage3_prefetch_bucket_size": chosen.prefetch_bucket,
            **({"zero_hpz_partition_size": chosen.hpz} if chosen.hpz > 1 else {}),
            **({"zero_quantized_weights": True} if chosen.qwz else {}),
            **({"zero_quantized_gradients": True} if chosen.qgz else {}),
            # Its replacement of torch's linear rounds before adding the bias, unlike the other strategies.
            "memory_efficient_linear": False,
        }
    zero |= offloading(chosen, spec.topology.device)
    config: dict[str, Any] = {
        "train_batch_size": spec.global_batch,
        "train_micro_batch_size_per_gpu": training.micro_batch,
        "gradient_accumulation_steps": training.accumulation,
        "gradient_clipping": training.clip_norm,
        "zero_allow_untested_optimizer": True,
        # All strategies have torch's AdamW; offloading would replace it with DeepSpeed's.
        "zero_force_ds_cpu_optimizer": False,
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


def offloading(chosen: Options, device: str) -> dict[str, Any]:
    """Where optimizer state and, at stage 3, weights are kept; pinned memory needs a GPU."""
    if not chosen.offload:
        return {}
    place: dict[str, Any] = {"device": "cpu", "pin_memory": device == "cuda"}
    if chosen.offload != "cpu":
        place = {"device": "nvme", "nvme_path": chosen.offload, "pin_memory": device == "cuda"}
    found = {"offload_optimizer": place}
    return found | {"offload_param": place} if chosen.stage == 3 else found


def merged(config: dict[str, Any], more: Mapping[str, Any] | None) -> dict[str, Any]:
    """Our configuration with the user's additions; inside `zero_optimization` the user's values win."""
    both = {**config, **(more or {})}
    return {**both, "zero_optimization": {**config["zero_optimization"], **(more or {}).get("zero_optimization", {})}}


def _facts(chosen: Options) -> dict[str, Any]:
    """The options for the record, with an own configuration as text."""
    config = {"config": json.dumps(chosen.config, sort_keys=True)} if chosen.config is not None else {}
    return {**asdict(chosen), "config": None, **config}


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
        from paceline.training.precision import compute_name
        from paceline.training.strategies._optimizers import DTYPE_NAMES, optimizer_facts, state_dtypes
        from paceline.training.strategies._torch import tuning_facts

        model_dtype, accumulation = self.engine.get_data_types()
        dtypes = {
            "parameters": DTYPE_NAMES[model_dtype],
            "compute": compute_name(self.subject, DTYPE_NAMES[self.subject.dtype]),
            "gradient": DTYPE_NAMES[accumulation],
            "gradient_reduction": DTYPE_NAMES[self.engine.communication_data_type],
            **state_dtypes(self.optimizer),
        }
        special, more = tuning_facts(self.subject)
        facts = optimizer_facts(self.optimizer, self.engine.gradient_clipping())
        bucket = self.engine.zero_reduce_bucket_size()
        return dtypes | special, facts, {**_facts(self.chosen), "reduce_bucket_elements": bucket, **more}
