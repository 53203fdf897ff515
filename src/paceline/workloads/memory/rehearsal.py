"""Memory prediction: runs the strategy itself on fake tensors and counts what real ones would use.

No formula is involved: DDP's buckets, FSDP2's gathered units, DeepSpeed's flat partitions and the tensors that autograd
saves come from the code that also runs for real. Fake tensors have shapes and no memory, the process group is fake as
well, and a ledger keeps count.

It needs its own process, because it opens a process group and patches what fake tensors cannot do.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import paceline.training.decoder
from paceline.contract import Seat, Trainer
from paceline.errors import UnsupportedError
from paceline.experiment.layout import KEEP_FOR_EVERY, declared_layout, layout_of
from paceline.experiment.plugins import load
from paceline.experiment.spec import RunSpec
from paceline.host.processes import end_with_parent
from paceline.results.memory_components import components, largest_fitting
from paceline.workloads.memory.ledger import Ledger
from paceline.workloads.memory.memory_trace import TracedTrainer

# With fewer micro batches, accumulated gradients would not show; more would show nothing new.
MICRO_BATCHES = 2
# Steps before the counted one: they create the optimizer's state, and DeepSpeed records the order of layers.
STEPS_BEFORE = 1
# Block size of CUDA's caching allocator (kMinBlockSize in c10/cuda/CUDACachingAllocator).
CUDA_BLOCK_BYTES = 512
# How often the search for the largest fitting micro batch refines its guess.
REFINEMENTS = 3


@dataclass(frozen=True)
class Question:
    """One rehearsal. capacity_bytes: also predict peaks around the largest micro batch, up to `most`, that fits.

    falling: other batches (sequences, their length) to rehearse in order until one, or the spec's own, fits goal_bytes.
    """

    spec: RunSpec
    workspace_bytes: int = 0
    capacity_bytes: int | None = None
    most: int = 1
    falling: tuple[tuple[int, int], ...] = ()
    goal_bytes: int = 0


@dataclass(frozen=True)
class Answer:
    """components: those of the spec's own micro batch. peaks: by rehearsed micro batch, at the spec's sequence length.
    falling: peaks of the falling batches."""

    components: dict[str, int | None]
    peaks: dict[int, int]
    falling: dict[tuple[int, int], int] = field(default_factory=dict)


def rehearse(question: Question) -> Answer:
    """Predict the memory of the process with the highest peak; must be called in a fresh process.

    UnsupportedError if part of it would be in host memory: on fake tensors, all memory is of one device.
    """
    spec = question.spec
    assert spec.strategy is not None
    plugin = load("strategies", spec.strategy.name)
    offloads = hasattr(plugin, "offloads") and plugin.offloads(spec.strategy.options)
    if offloads and spec.topology.device == "cuda":
        raise UnsupportedError("memory is not predicted where weights or optimizer state are offloaded")
    ranks, counts = unlike_ranks(spec), rehearsed_counts(question)
    first, *others = [(_with_count(question, count), rank) for rank in ranks for count in counts]
    # Each in a process of its own: torch keeps what it derived for the tensors of one rank.
    pools = [ProcessPoolExecutor(1, mp_context=get_context("fork"), initializer=end_with_parent) for _ in others]
    with contextlib.ExitStack() as stack:
        futures = [stack.enter_context(pool).submit(_rehearse, *one) for pool, one in zip(pools, others, strict=True)]
        answers = [_rehearse(*first), *(future.result() for future in futures)]
    found = [_at_count(answers[i : i + len(counts)], counts, spec) for i in range(0, len(answers), len(counts))]
    return max(found, key=lambda answer: _known(answer.components["peak"]))


def rehearsed_counts(question: Question) -> tuple[int, ...]:
    """Micro batches per step to rehearse: the spec's, or fewer.

    Most schedules keep at most what three rounds of a pipeline bring, and of every further micro batch its token ids.
    For the others two numbers show how much each adds.
    """
    layout, count = layout_of(question.spec), question.spec.training.accumulation
    plain = question.capacity_bytes is None and not question.falling and not layout.micro_batches
    rounds = (3, 4) if layout.schedule in KEEP_FOR_EVERY else (3,)
    fewer = tuple(n * layout.pp for n in rounds)
    return fewer if plain and layout.pp > 1 and count > sum(fewer) else (count,)


def _with_count(question: Question, count: int) -> Question:
    spec = question.spec
    return replace(question, spec=replace(spec, training=replace(spec.training, accumulation=count)))


def _at_count(answers: Sequence[Answer], counts: Sequence[int], spec: RunSpec) -> Answer:
    """The answer for the spec's own number of micro batches: the only one, or on the line through two others."""
    if len(answers) == 1:
        return answers[0]
    (low, high), (few, more) = (answer.components for answer in answers), counts

    def size(name: str) -> int | None:
        before, after = low[name], high[name]
        if before is None or after is None:
            return None
        return after + (after - before) * (spec.training.accumulation - more) // (more - few)

    found = {name: size(name) for name in high}
    return Answer(found, {spec.training.micro_batch: _known(found["peak"])})


def unlike_ranks(spec: RunSpec) -> tuple[int, ...]:
    """Ranks of which one has the highest peak. All are alike but in a pipeline, whose first rank keeps the activations
    of most micro batches, and whose last one has the logits."""
    layout = layout_of(spec)
    return (0,) if layout.pp == 1 or layout.v_shaped else (0, layout.world_size - layout.world_size // layout.pp)


def _rehearse(question: Question, rank: int) -> Answer:
    spec = question.spec
    stage = Stage(spec, question.workspace_bytes, rank)
    own = spec.training.micro_batch
    with stage.set_up():
        answer = stage.step(own)
        peaks = {own: _known(answer["peak"])}
        if question.capacity_bytes is not None:
            # Add peaks until the guess of the largest fitting micro batch has itself been rehearsed.
            guess: int | None = 2 if 1 in peaks else 1
            for _ in range(1 + REFINEMENTS):
                if guess is None or guess < 1 or guess in peaks:
                    break
                peaks[guess] = _known(stage.step(guess)["peak"])
                guess = largest_fitting(peaks, question.capacity_bytes, question.most)
        falling: dict[tuple[int, int], int] = {}
        for batch in question.falling:
            if min((peaks[own], *falling.values())) <= question.goal_bytes:
                break
            falling[batch] = _known(stage.step(*batch)["peak"])
    return Answer(answer, peaks, falling)


def _known(value: int | None) -> int:
    assert value is not None
    return value


class Stage:
    """The trainer of one rank on fake tensors, that runs steps of any micro batch."""

    def __init__(self, spec: RunSpec, workspace_bytes: int, rank: int) -> None:
        # A pipeline has several micro batches in flight.
        most = spec.training.accumulation if layout_of(spec).pp > 1 else MICRO_BATCHES
        accumulation = min(spec.training.accumulation, most)
        self.spec = replace(spec, training=replace(spec.training, accumulation=accumulation))
        self.rank = rank
        self.on_gpu = spec.topology.device == "cuda"
        self.workspace_bytes = workspace_bytes
        self.ledger = FakeLedger(on_gpu=self.on_gpu)
        self.trainer: Trainer | None = None
        # Of the last step: sequences of a micro batch, and their length.
        self.batch = (spec.training.micro_batch if layout_of(spec).pp > 1 else 1, spec.training.sequence_length)

    @contextlib.contextmanager
    def set_up(self) -> Iterator[None]:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.testing._internal.distributed.fake_pg import FakeStore

        from paceline.training.instruments import attention_backends

        size = self.spec.topology.world_size
        os.environ |= {"DS_ACCELERATOR": "cpu", "DS_SKIP_CUDA_CHECK": "1"}
        os.environ |= {"LOCAL_RANK": "0", "RANK": str(self.rank), "WORLD_SIZE": str(size)}
        dist.init_process_group("fake", world_size=size, rank=self.rank, store=FakeStore())
        assert self.spec.strategy is not None
        seat = Seat(rank=self.rank, local_rank=0, world_size=size, device="cpu")
        with contextlib.ExitStack() as stack:
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            for context in (patched(self.spec, self.on_gpu), attention_backends("cpu"), fake, self.ledger.counting()):
                stack.enter_context(context)
            self.trainer = load("strategies", self.spec.strategy.name).wrap(self.spec, seat)
            for _ in range(STEPS_BEFORE):
                self._run(self.trainer, *self.batch)
            yield

    def step(self, micro_batch: int, sequence_length: int | None = None) -> dict[str, int | None]:
        """Memory components of one step after the first; sequences are as long as the spec's by default."""
        assert self.trainer is not None
        moments: dict[str, int | None] = {}

        def read(moment: str) -> None:
            moments[moment] = self.ledger.live_bytes + self.workspace_bytes

        batch = (micro_batch, sequence_length or self.spec.training.sequence_length)
        if layout_of(self.spec).pp > 1 and batch != self.batch:
            # A pipeline makes its buffers for messages in the first step of a batch size, and keeps them.
            self._run(self.trainer, *batch)
        self.batch = batch
        traced = TracedTrainer(self.trainer, 0, read, self.ledger.reset_peak)
        self._run(traced, *batch)
        return components(moments, self.ledger.peak_bytes + self.workspace_bytes, traced.held)

    def _run(self, trainer: Trainer, micro_batch: int, sequence_length: int) -> None:
        training = self.spec.training
        normaliser = torch.tensor(1.0)
        for number in range(training.accumulation):
            last = number + 1 == training.accumulation
            # Inputs and labels as the loop passes them: views of one tensor; fine-tuning also reads positions.
            if self.spec.tuning is not None:
                batch = torch.zeros(micro_batch, 3, sequence_length, dtype=torch.int64)
                inputs, labels = batch[:, :2], batch[:, 2]
            else:
                batch = torch.zeros(micro_batch, sequence_length + 1, dtype=torch.int64)
                inputs, labels = batch[:, :-1], batch[:, 1:]
            loss = trainer.forward(inputs, labels, normaliser, last)
            del batch, inputs, labels
            trainer.backward(loss, last)
            del loss
        trainer.update()


class FakeLedger(Ledger):  # type: ignore[no-untyped-call]
    """A ledger for fake tensors. They have no values: code that reads one (a norm, an overflow flag) gets 0.

    Memory that a real kernel or collective uses while it runs is added from a table.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        super().__init__(CUDA_BLOCK_BYTES if on_gpu else 1)
        self.workspaces = _GPU_WORKSPACES if on_gpu else _CPU_WORKSPACES

    def perform(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0.0 if args[0].dtype.is_floating_point else 0
        result = func(*args, **kwargs)
        if func in self.workspaces:
            # On top of the results, which the kernel writes while it uses its workspace.
            written = sum(leaf.untyped_storage().nbytes() for leaf in tree_leaves(result) if self.is_new(leaf))
            self.touch(self.workspaces[func](args) + written)
        return result


def _fp32_query(args: Any) -> int:
    """cuDNN and flash attention accumulate the query's gradient in an internal fp32 buffer."""
    return int(args[1].numel()) * 4


# gloo's reduce-scatter all-reduces a whole copy of its input; NCCL needs no copy.
_CPU_WORKSPACES = {torch.ops.c10d._reduce_scatter_base_.default: lambda args: args[1].numel() * args[1].element_size()}
_GPU_WORKSPACES = {
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default: _fp32_query,
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default: _fp32_query,
}


@contextlib.contextmanager
def patched(spec: RunSpec, on_gpu: bool) -> Iterator[None]:
    """Replace what needs values, a real network or a GPU with something that uses the same memory."""
    import torch.distributed.device_mesh as device_mesh
    import torch.distributed.fsdp._fully_shard._fully_shard as fsdp
    import torch.nn.parallel as parallel
    import torch.nn.parallel.distributed as data_parallel

    def with_values(call: Any) -> Any:
        from torch.utils._python_dispatch import _disable_current_modes

        # A mesh looks up its own rank by value.
        def called(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return call(*args, **kwargs)

        return called

    with contextlib.ExitStack() as stack:

        def put(owner: Any, name: str, value: Any) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        for owner, name in (
            (device_mesh, "init_device_mesh"),
            (device_mesh.DeviceMesh, "__getitem__"),
            (device_mesh.DeviceMesh, "_concatenate"),  # torch 2.11 has none
            (fsdp, "_get_post_forward_mesh_info"),  # makes the mesh of `reshard_to`
        ):
            if hasattr(owner, name):
                put(owner, name, with_values(getattr(owner, name)))
        put(data_parallel, "_verify_param_shape_across_processes", lambda *_, **__: None)
        put(data_parallel, "_sync_module_states", lambda *_, **__: None)
        put(parallel, "DistributedDataParallel", _data_parallel())
        # Initial values cost time and use no memory afterwards.
        put(paceline.training.decoder, "fill", lambda *_, **__: None)
        for name in ("to", "float", "half", "bfloat16"):
            put(paceline.training.decoder.Decoder, name, _cast)
        if declared_layout(spec) is not None:
            from torch.distributed.pipelining import schedules

            from paceline.training.strategies._mesh import context
            from paceline.training.strategies._mesh import stage as stages

            put(stages, "fill", _allocate)
            if on_gpu:
                put(context, "kernel_for", lambda q: context.gpu_kernel(q.dtype))
            put(stages.Stage, "to", _cast)
            if hasattr(schedules._PipelineSchedule, "_warmup_p2p"):  # from torch 2.13 on
                put(schedules._PipelineSchedule, "_warmup_p2p", _agree_on_shapes)
        if on_gpu:
            put(F, "rms_norm", FusedRMSNorm.call)
            put(F, "scaled_dot_product_attention", gpu_attention)
            put(paceline.training.decoder, "_head", paceline.training.decoder.padded_head)
        if spec.tuning is not None:
            put(nn.Module, "to", _cast)
        if spec.tuning is not None and spec.tuning.method == "qlora":
            import bitsandbytes

            for module in (bitsandbytes.nn, bitsandbytes.nn.modules):
                put(module, "Params4bit", Packed)
        if spec.strategy is not None and spec.strategy.name == "zero":
            from deepspeed.runtime.zero import partitioned_param_coordinator

            put(partitioned_param_coordinator, "assert_ints_same_as_other_ranks", lambda *_: None)
        yield


def _cast(module: nn.Module, *targets: Any, dtype: torch.dtype | None = None, **_: Any) -> nn.Module:
    """`Module.to` for fake parameters, which cannot be swapped in place. There is only one device."""
    target = next((each for each in targets if isinstance(each, torch.dtype)), dtype)
    for each in module.modules() if target is not None else ():
        for name, parameter in list(each._parameters.items()):
            if parameter is not None and parameter.dtype != target and parameter.is_floating_point():
                cast = parameter.detach().to(target)
                each._parameters[name] = nn.Parameter(cast, requires_grad=parameter.requires_grad)
    return module


def _allocate(stage: Any, *_: Any) -> None:
    """The stage of a mesh with parameters that have memory but no values; `Module.to_empty` cannot swap fake ones."""
    for each in stage.modules():
        for name, parameter in list(each._parameters.items()):
            if parameter is not None:
                each._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="cpu"))
    stage.tie()


def _agree_on_shapes(_schedule: Any, stages: Any, *_: Any, **__: Any) -> None:
    """Ranks of a pipeline vote whether all know the shapes that they exchange. They do; a fake group has no votes."""
    from torch.distributed.pipelining._utils import InferenceMode

    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


class Packed:
    """4-bit weights as a plain parameter: fake tensors cannot be subclassed. `finetuned` stores their scales itself."""

    def __new__(cls, packed: Tensor, *_: Any, **__: Any) -> nn.Parameter:  # type: ignore[misc]
        return nn.Parameter(packed, requires_grad=False)


def _data_parallel() -> Any:
    """DDP without its in-place all-reduce, and without re-sorting buckets by the order of backward, which needs values
    and changes no size."""
    from torch.nn.parallel import DistributedDataParallel

    class Reducer:
        def __init__(self, reducer: Any) -> None:
            self._reducer = reducer

        def __getattr__(self, name: str) -> Any:
            return getattr(self._reducer, name)

        def _rebuild_buckets(self) -> bool:
            return False

    def keep(_state: Any, bucket: Any) -> Any:
        done: Any = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    # DDP checks annotations against its own types, and accepts a hook without any.
    keep.__annotations__.clear()

    class Rehearsed(DistributedDataParallel):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.register_comm_hook(None, keep)
            self.reducer: Any = Reducer(self.reducer)

    return Rehearsed


class FusedRMSNorm(torch.autograd.Function):
    """CUDA's fused kernel, which saves its input, the weight and one fp32 number per row. CPUs have no such kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)

    @staticmethod
    def call(x: Tensor, _shape: Any, weight: Tensor, _eps: float) -> Tensor:
        return FusedRMSNorm.apply(x, weight)  # type: ignore[no-any-return, no-untyped-call]


def gpu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel that a GPU uses: cuDNN for 16 bit, memory-efficient (equal head counts only) for fp32."""
    aten: Any = torch.ops.aten
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # Both kernels expect an additive mask in the dtype of the query.
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype)
    if q.dtype != torch.float32:
        results = aten._scaled_dot_product_cudnn_attention(q, k, v, attn_mask, True, dropout_p, is_causal, False)
        return results[0]  # type: ignore[no-any-return]
    if enable_gqa:
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    results = aten._scaled_dot_product_efficient_attention(q, k, v, attn_mask, True, dropout_p, is_causal)
    return results[0]  # type: ignore[no-any-return]
