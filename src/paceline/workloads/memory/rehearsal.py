"""A rehearsal: the strategy itself, wrapped and stepped on fake tensors, tells what real ones would hold.

Nothing is modelled by formula: DDP's buckets, FSDP2's gathered units, DeepSpeed's flat partitions and the tensors that
autograd saves come from the same code that runs for real. Fake tensors have shapes and no memory, the process group is
fake as well, and a ledger keeps the count. It lives here and not in a package of its own because it calls strategies,
which only their peers on this level may do, by `plugins.load`.

It needs a process to itself: it opens a process group of its own, and replaces what fake tensors cannot do.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import paceline.training.decoder
from paceline.contract import Seat, Trainer
from paceline.experiment.plugins import load
from paceline.experiment.spec import RunSpec
from paceline.results.memory_components import Held, components, largest_fitting
from paceline.workloads.memory.ledger import Ledger
from paceline.workloads.memory.watch import Watched

# Fewer micro batches than these would not show gradients that wait for the next one; more show nothing new.
MICRO_BATCHES = 2
# Steps before the one that counts: the first makes the optimizer's state, DeepSpeed learns its order of layers.
STEPS_BEFORE = 1
# CUDA's caching allocator hands out blocks of this size (kMinBlockSize in c10/cuda/CUDACachingAllocator).
CUDA_BLOCK_BYTES = 512
# How often a search for the largest fitting micro batch refines its guess.
REFINEMENTS = 3


@dataclass(frozen=True)
class Question:
    """One rehearsal. capacity_bytes asks also for peaks around the largest micro batch up to `most` that fits it.

    falling: other batches (sequences, their length) to rehearse one after the other until one, or the spec's own, fits
    goal_bytes.
    """

    spec: RunSpec
    workspace_bytes: int = 0
    capacity_bytes: int | None = None
    most: int = 1
    falling: tuple[tuple[int, int], ...] = ()
    goal_bytes: int = 0


@dataclass(frozen=True)
class Answer:
    """components of the spec's own micro batch, the peak of each micro batch that was rehearsed at the spec's own
    sequence length, and of each of the falling batches."""

    components: dict[str, int | None]
    peaks: dict[int, int]
    falling: dict[tuple[int, int], int] = field(default_factory=dict)


def rehearse(question: Question) -> Answer:
    """Called in a fresh process (see the module's docstring)."""
    spec = question.spec
    stage = Stage(spec, question.workspace_bytes)
    own = spec.training.micro_batch
    with stage.set_up():
        answer = stage.step(own)
        peaks = {own: _known(answer["peak"])}
        if question.capacity_bytes is not None:
            _search(stage, peaks, question.capacity_bytes, question.most)
        falling: dict[tuple[int, int], int] = {}
        for batch in question.falling:
            if min((peaks[own], *falling.values())) <= question.goal_bytes:
                break
            falling[batch] = _known(stage.step(*batch)["peak"])
    return Answer(answer, peaks, falling)


def _known(value: int | None) -> int:
    assert value is not None
    return value


def _search(stage: Stage, peaks: dict[int, int], capacity_bytes: int, most: int) -> None:
    """Add peaks of other micro batches until the guess of the largest fitting one was rehearsed itself."""
    guess: int | None = 2 if 1 in peaks else 1
    for _ in range(1 + REFINEMENTS):
        if guess is None or guess < 1 or guess in peaks:
            return
        peaks[guess] = _known(stage.step(guess)["peak"])
        guess = largest_fitting(peaks, capacity_bytes, most)


class Stage:
    """A trainer on fake tensors, and steps of it with any micro batch."""

    def __init__(self, spec: RunSpec, workspace_bytes: int) -> None:
        accumulation = min(spec.training.accumulation, MICRO_BATCHES)
        self.spec = replace(spec, training=replace(spec.training, accumulation=accumulation))
        self.on_gpu = spec.topology.device == "cuda"
        self.workspace_bytes = workspace_bytes
        self.ledger = FakeLedger(on_gpu=self.on_gpu)
        self.trainer: Trainer | None = None

    @contextlib.contextmanager
    def set_up(self) -> Iterator[None]:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.testing._internal.distributed.fake_pg import FakeStore

        from paceline.training.instruments import attention_backends

        size = self.spec.topology.world_size
        os.environ |= {"DS_ACCELERATOR": "cpu", "DS_SKIP_CUDA_CHECK": "1"}
        os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": str(size)}
        dist.init_process_group("fake", world_size=size, rank=0, store=FakeStore())
        assert self.spec.strategy is not None
        seat = Seat(rank=0, local_rank=0, world_size=size, device="cpu")
        with contextlib.ExitStack() as stack:
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            for context in (stand_ins(self.spec, self.on_gpu), attention_backends("cpu"), fake, self.ledger.counting()):
                stack.enter_context(context)
            self.trainer = load("strategies", self.spec.strategy.name).wrap(self.spec, seat)
            for _ in range(STEPS_BEFORE):
                self._run(self.trainer, 1, self.spec.training.sequence_length)
            yield

    def step(self, micro_batch: int, sequence_length: int | None = None) -> dict[str, int | None]:
        """Components of one steady step; its sequences are as long as the spec's unless said."""
        assert self.trainer is not None
        moments: dict[str, int | None] = {}

        def read(moment: str) -> None:
            moments[moment] = self.ledger.live_bytes + self.workspace_bytes

        watched = Watched(self.trainer, 0, read, self.ledger.reset_peak)
        self._run(watched, micro_batch, sequence_length or self.spec.training.sequence_length)
        held: Held | None = watched.held
        return components(moments, self.ledger.peak_bytes + self.workspace_bytes, held)

    def _run(self, trainer: Trainer, micro_batch: int, sequence_length: int) -> None:
        training = self.spec.training
        normaliser = torch.tensor(1.0)
        for number in range(training.accumulation):
            last = number + 1 == training.accumulation
            loss = trainer.forward(*self._batch(micro_batch, sequence_length), normaliser, last)
            trainer.backward(loss, last)
            del loss
        trainer.update()

    def _batch(self, micro_batch: int, sequence_length: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels as the loop hands them over, as views of one tensor: tuned runs read positions too."""
        if self.spec.tuning is not None:
            batch = torch.zeros(micro_batch, 3, sequence_length, dtype=torch.int64)
            return batch[:, :2], batch[:, 2]
        tokens = torch.zeros(micro_batch, sequence_length + 1, dtype=torch.int64)
        return tokens[:, :-1], tokens[:, 1:]


class FakeLedger(Ledger):  # type: ignore[no-untyped-call]
    """A ledger over fake tensors, which have no values: whoever asks for one (a norm, an overflow) is told 0.

    Memory that a kernel or a collective of the real device takes while it runs is added from a table.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        super().__init__(CUDA_BLOCK_BYTES if on_gpu else 1)
        self.workspaces = _GPU_WORKSPACES if on_gpu else _CPU_WORKSPACES

    def perform(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0.0 if args[0].dtype.is_floating_point else 0
        result = func(*args, **kwargs)
        if func in self.workspaces:
            # Beside the results, which the kernel writes while it holds its workspace.
            written = sum(leaf.untyped_storage().nbytes() for leaf in tree_leaves(result) if self.is_new(leaf))
            self.touch(self.workspaces[func](args) + written)
        return result


def _fp32_query(args: Any) -> int:
    """cuDNN and flash attention add the query's gradient up in fp32, in a buffer of the kernel's own."""
    query = args[1]
    return int(query.numel()) * 4


def _reduced_copy(args: Any) -> int:
    """gloo scatters from a whole copy of its input, which it reduces as in an all-reduce; NCCL needs none."""
    return int(args[1].numel()) * int(args[1].element_size())


_CPU_WORKSPACES = {torch.ops.c10d._reduce_scatter_base_.default: _reduced_copy}
_GPU_WORKSPACES = {
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default: _fp32_query,
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default: _fp32_query,
}


# --- what is replaced ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stand_ins(spec: RunSpec, on_gpu: bool) -> Iterator[None]:
    """Replace what needs values, a real network or a GPU by something that holds the same memory."""
    import torch.distributed.device_mesh as device_mesh
    import torch.nn.parallel as parallel
    import torch.nn.parallel.distributed as data_parallel

    real_mesh = device_mesh.init_device_mesh

    def mesh(*args: Any, **kwargs: Any) -> Any:
        from torch.utils._python_dispatch import _disable_current_modes

        # A mesh looks its own rank up by value.
        with _disable_current_modes():
            return real_mesh(*args, **kwargs)

    with contextlib.ExitStack() as stack:

        def put(owner: Any, name: str, value: Any) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        put(device_mesh, "init_device_mesh", mesh)
        put(data_parallel, "_verify_param_shape_across_processes", lambda *_, **__: None)
        put(data_parallel, "_sync_module_states", lambda *_, **__: None)
        put(parallel, "DistributedDataParallel", _data_parallel())
        # Initial values cost time and hold nothing afterwards.
        put(paceline.training.decoder, "fill", lambda *_, **__: None)
        for name in ("to", "float", "half", "bfloat16"):
            put(paceline.training.decoder.Decoder, name, _cast)
        if on_gpu:
            put(F, "rms_norm", FusedRMSNorm.call)
            put(F, "scaled_dot_product_attention", gpu_attention)
            put(paceline.training.decoder, "_head", paceline.training.decoder.padded_head)
        if spec.tuning is not None:
            put(nn.Module, "to", _cast)
        if spec.tuning is not None and spec.tuning.method == "qlora":
            import bitsandbytes

            for place in (bitsandbytes.nn, bitsandbytes.nn.modules):
                put(place, "Params4bit", Packed)
        if spec.strategy is not None and spec.strategy.name == "zero":
            from deepspeed.runtime.zero import partitioned_param_coordinator

            put(partitioned_param_coordinator, "assert_ints_same_as_other_ranks", lambda *_: None)
        yield


def _cast(module: nn.Module, *targets: Any, dtype: torch.dtype | None = None, **_: Any) -> nn.Module:
    """`Module.to` swaps parameters in place, which fake ones refuse. Devices stay: there is only one."""
    target = next((each for each in targets if isinstance(each, torch.dtype)), dtype)
    for each in module.modules() if target is not None else ():
        for name, parameter in list(each._parameters.items()):
            if parameter is not None and parameter.dtype != target and parameter.is_floating_point():
                cast = parameter.detach().to(target)
                each._parameters[name] = nn.Parameter(cast, requires_grad=parameter.requires_grad)
    return module


class Packed:
    """4-bit weights as a plain parameter: no class of tensors can be made of a fake one. The product of a tuned module
    keeps their scales itself."""

    def __new__(cls, packed: Tensor, *_: Any, **__: Any) -> nn.Parameter:  # type: ignore[misc]
        return nn.Parameter(packed, requires_grad=False)


def _data_parallel() -> Any:
    """DDP whose all-reduce is skipped by a hook (it works in place), and whose buckets are not sorted anew by the order
    seen in backward, which needs values and changes no size."""
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

    # DDP compares annotations with its own types; none are accepted too.
    keep.__annotations__.clear()

    class Rehearsed(DistributedDataParallel):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.register_comm_hook(None, keep)
            self.reducer: Any = Reducer(self.reducer)

    return Rehearsed


class FusedRMSNorm(torch.autograd.Function):
    """What CUDA's fused kernel keeps: its input, the weight and one fp32 number per row. The CPU has no such kernel."""

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
    """The kernel that a GPU takes: cuDNN's for 16 bit, the memory-efficient one (equal head counts only) for fp32."""
    aten: Any = torch.ops.aten
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # Both kernels add a mask, in the dtype of the query.
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype)
    if q.dtype != torch.float32:
        found = aten._scaled_dot_product_cudnn_attention(q, k, v, attn_mask, True, dropout_p, is_causal, False)
        return found[0]  # type: ignore[no-any-return]
    if enable_gqa:
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    found = aten._scaled_dot_product_efficient_attention(q, k, v, attn_mask, True, dropout_p, is_causal)
    return found[0]  # type: ignore[no-any-return]
