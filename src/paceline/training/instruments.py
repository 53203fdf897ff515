"""Instruments of a rank: clocks, memory readings, digests of weights and wire byte counts.

torch is imported inside functions, so that the controller can import this module without it.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.results.records import MemorySample, WireSample
from paceline.training.attachment.paceline_clocks import CudaClock, HostClock
from paceline.training.attachment.paceline_digests import digest_values
from paceline.training.attachment.paceline_wire import SHORT_NAMES as SHORT_NAMES
from paceline.training.attachment.paceline_wire import WireBytes

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
        by_name[name] = f"{'x'.join(map(str, value.shape))}:{digest_values(value):016x}"
        count += value.numel()
    whole = "\n".join(f"{name} {digest}" for name, digest in sorted(by_name.items()))
    return Weights(hashlib.sha256(whole.encode()).hexdigest()[:16], by_name, count)


# --- memory ---


def release_unused(device: str) -> None:
    """Free memory that only the setup needed, so that later peaks do not include it."""
    gc.collect()
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()


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


class WireCounter(WireBytes):
    """The counted bytes as samples."""

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


def wrappers() -> tuple[type, ...]:
    """Tensors that stand for others: DTensor, and torchao's float8 tensors where a model has them."""
    from torch.distributed.tensor import DTensor

    float8 = {"float8_training_tensor": "Float8TrainingTensor", "fsdp_utils": "WeightWithDynamicFloat8CastTensor"}
    known = [(sys.modules.get(f"torchao.float8.{module}"), name) for module, name in float8.items()]
    return (DTensor, *(getattr(module, name) for module, name in known if module is not None))


def attention_backends(device: str):  # type: ignore[no-untyped-def]
    """A context with fused attention, cuDNN first on a GPU."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if device != "cuda":
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)
