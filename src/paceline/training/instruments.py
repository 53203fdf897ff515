"""Instruments of a rank: clocks, memory readings, digests of weights and wire byte counts.

torch is imported inside functions, so that the controller can import this module without it.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from paceline.results.records import MemorySample, WireSample
from paceline.training.data.digests import _MASK64

if TYPE_CHECKING:
    from torch import Tensor

Mark = Any
PHASES = ("h2d", "forward", "backward", "optimizer")


class Clock(Protocol):
    """Marks points in a rank's work. On CUDA a mark is an event on the stream, and reading it does not stall it."""

    def mark(self) -> Mark: ...
    def elapsed_s(self, begin: Mark, end: Mark) -> float: ...
    def passed(self, mark: Mark) -> bool: ...
    def drain(self) -> None: ...


class HostClock:
    """perf_counter: on a CPU, work is complete when the call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed_s(self, begin: float, end: float) -> float:
        return end - begin

    def passed(self, mark: float) -> bool:
        return True

    def drain(self) -> None:
        """Nothing is queued on a CPU."""


class CudaClock:
    """CUDA events on the current stream: device time, however far ahead the host has run."""

    def mark(self) -> Any:
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def elapsed_s(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3

    def passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def drain(self) -> None:
        import torch

        torch.cuda.synchronize()


def clock_for(device: str) -> Clock:
    """The clock of this kind of device."""
    return CudaClock() if device == "cuda" else HostClock()


class Stopwatch:
    """Marks the phases of one step; durations are read later, once the device has passed the marks."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.start = clock.mark()
        self.spans: list[tuple[str, Mark, Mark]] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = self.clock.mark()
        yield
        self.spans.append((name, begin, self.clock.mark()))

    def seconds(self, name: str) -> float | None:
        """Total time of the phase; None if the step did not have it."""
        spans = [self.clock.elapsed_s(begin, end) for phase, begin, end in self.spans if phase == name]
        return sum(spans) if spans else None


# --- digests ---


@dataclass(frozen=True, slots=True)
class Weights:
    """Digest of a whole model, digests of its parameters by name, and the number of their elements."""

    digest: str
    by_name: dict[str, str]
    count: int


def digest_parameters(parameters: Iterable[tuple[str, Tensor]]) -> Weights:
    """Digests of whole, unsharded weights. Values are read as fp32, so that 16-bit copies of equal weights agree.

    The bits of each element are multiplied by an odd function of its position and summed modulo 2**64.
    """
    by_name, count = {}, 0
    for name, value in parameters:
        by_name[name] = f"{'x'.join(map(str, value.shape))}:{_digest_values(value):016x}"
        count += value.numel()
    whole = "\n".join(f"{name} {digest}" for name, digest in sorted(by_name.items()))
    return Weights(hashlib.sha256(whole.encode()).hexdigest()[:16], by_name, count)


def _digest_values(value: Tensor, chunk: int = 1 << 22) -> int:
    import torch

    flat = value.detach().reshape(-1)
    total = 0
    for start in range(0, flat.numel(), chunk):
        bits = flat[start : start + chunk].float().contiguous().view(torch.int32).to(torch.int64)
        position = torch.arange(start, start + bits.numel(), device=bits.device, dtype=torch.int64)
        total += int(((bits + 1) * (position * 0x9E3779B97F4A7C1 | 1)).sum().item())
    return total & _MASK64


# --- memory ---


def release_unused(device: str) -> None:
    """Free memory that only the setup needed, so that later peaks do not include it."""
    gc.collect()
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """No garbage collection inside: scanning the million objects of torch takes a sixth of its import."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def reset_peak(device: str) -> None:
    """Reset the peak counters, without stalling the device."""
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def read_memory(rank: int, moment: str, device: str, *, peak: bool) -> MemorySample:
    """Memory now, or its peak since `reset_peak`; None where the platform does not report it."""
    allocated = reserved = whole = None
    if device == "cuda":
        import torch

        allocated = torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
        reserved = torch.cuda.max_memory_reserved() if peak else torch.cuda.memory_reserved()
        free, total = torch.cuda.mem_get_info()
        whole = total - free
    return MemorySample(
        rank=rank,
        moment=moment,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        device_bytes=whole,
        resident_bytes=_resident_bytes("VmHWM" if peak else "VmRSS"),
    )


def peak_bytes(device: str) -> int:
    """Peak memory of this process: the CUDA allocator's since its reset, or on a CPU the resident memory.

    For monitoring, not for records: getrusage takes 1 us and /proc takes 200, but the peak of getrusage includes that
    of the launcher at the moment it started this process.
    """
    if device == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _resident_bytes(field: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        import resource
        import sys

        # macOS has no /proc; its ru_maxrss is in bytes, and always a peak.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if field == "VmHWM" and sys.platform == "darwin" else None
    values = [line.split()[1] for line in lines if line.startswith(field + ":")]
    return int(values[0]) * 1024 if values else None


# --- bytes on the wire ---

# c10d operator -> (operation, the argument with the payload that nccl-tests calls S)
_OPERATIONS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "all_reduce_coalesced": ("all_reduce", 0),
    "all_reduce_coalesced_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "all_gather_into_tensor": ("all_gather", "result"),
    "all_gather_into_tensor_coalesced": ("all_gather", "result"),
    "all_gather_into_tensor_out": ("all_gather", "result"),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "alltoall_base_": ("all_to_all", 1),
    "alltoall_": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 0),
    "broadcast_": ("broadcast", 0),
    "broadcast": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 0),
    "send": ("send", 0),
    "isend": ("send", 0),
}
# Their argument is one rank's part; S is that of the whole group, which only the root has.
_PARTS = ("gather_", "scatter_")
SHORT_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# Operators that send nothing: the sender counts what is received.
_SILENT = (
    *("barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd", "check_for_nan"),
    *("recv_", "recv_any_source_", "irecv"),
)


class WireCounter:
    """Counts payload bytes of every collective in this process, whoever starts it (DDP, DeepSpeed, ...).

    Unknown operators are counted under their own name, so that the total is not mistaken for complete.
    """

    def __init__(self) -> None:
        # By operation, dtype, group size and mesh dimension ("" if none).
        self.bytes: Counter[tuple[str, str, int, str]] = Counter()
        self.calls: Counter[tuple[str, str, int, str]] = Counter()

    def add(self, operator: str, args: Any, result: Any) -> None:
        if operator in _SILENT:
            return
        operation, position = _OPERATIONS.get(operator, (operator, "all"))
        payload = {"result": result, "all": args}[position] if isinstance(position, str) else args[position]
        size, dimension = _group_of(args)
        parts = size if operator in _PARTS else 1
        moved: Counter[tuple[str, str, int, str]] = Counter()
        for tensor in _tensors(payload):
            dtype = str(tensor.dtype).removeprefix("torch.")
            key = operation, SHORT_NAMES.get(dtype, dtype), size, dimension
            moved[key] += parts * tensor.numel() * tensor.element_size()
        if not moved and operator not in _OPERATIONS:
            moved[operation, "unknown", size, dimension] = 0
        for key, moved_bytes in moved.items():
            self.bytes[key] += moved_bytes
            self.calls[key] += 1

    def samples(self, rank: int, step: int) -> list[WireSample]:
        return [
            WireSample(
                rank=rank,
                step=step,
                operation=operation,
                dtype=dtype,
                group_size=size,
                calls=self.calls[operation, dtype, size, dimension],
                payload_bytes=payload,
                dimension=dimension or None,
            )
            for (operation, dtype, size, dimension), payload in sorted(self.bytes.items())
        ]


def _tensors(value: Any) -> Iterator[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


# How `torch.distributed.device_mesh` describes the groups of a dimension.
_MESH = "mesh_"


def _group_of(args: Any) -> tuple[int, str]:
    """Size and mesh dimension of an operator's process group, passed as an object (c10d) or by name
    (_c10d_functional)."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    for argument in args:
        group: Any = None
        if isinstance(argument, torch.ScriptObject):
            with contextlib.suppress(RuntimeError, TypeError, AttributeError):
                group = dist.ProcessGroup.unbox(argument)
        if isinstance(argument, str):
            with contextlib.suppress(KeyError, RuntimeError, ValueError):
                group = cast(Any, distributed_c10d)._resolve_process_group(argument)
        if group is not None:
            text = str(group.group_desc)
            return int(group.size()), text.removeprefix(_MESH) if text.startswith(_MESH) else ""
    return dist.get_world_size(), ""


def attention_backends(device: str):  # type: ignore[no-untyped-def]
    """A context with fused attention, cuDNN first on a GPU."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if device != "cuda":
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)
