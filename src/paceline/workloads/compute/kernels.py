"""Kernels and copies of the workload compute: prepared, verified and timed one row at a time.

Data are random: a matrix of zeros draws less power, and the device would keep a higher clock than in real use. On CUDA
the L2 cache is overwritten before every iteration, outside the timing, so that operands start in memory ("cold"). On a
CPU nothing is flushed, so rows that fit into its caches show cache speed ("warm").
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline.contract import Seat
from paceline.errors import UnsupportedError
from paceline.models.shape import Shape
from paceline.results.machine_samples import KernelSample
from paceline.training.instruments import Clock, clock_for, release_unused
from paceline.workloads.compute.options import FEWEST_ITERATIONS, Options, Row

TORCH_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
# An element is wrong if its error exceeds this times (its magnitude + the rms of the result). Each value is several
# times the rounding error of the dtype; that of fp32 is far below the error of TF32, so TF32 cannot pass as fp32.
TOLERANCES = {"fp32": 1e-4, "tf32": 5e-3, "bf16": 3e-2, "fp16": 1e-2, "fp8": 8e-2}
# Output, then gradients, which are sums of rounded differences. Correct bf16 kernels of a CPU reach 1.0e-2 and 4.6e-2
# (fp16: 1.8e-3 and 7.3e-3) on such data; with a missing mask or scale, nearly all elements are off by several rms.
ATTENTION_TOLERANCES = {"fp32": (1e-3, 1e-3), "bf16": (2e-2, 1e-1), "fp16": (5e-3, 2e-2)}
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
SAMPLED = 16
PROVED_LENGTH = 256
# A row whose fewest iterations would take more than this many budgets is skipped.
MOST_BUDGETS = 10
USABLE_MEMORY_RATIO = 0.8
_OOM = re.compile(r"out of memory|can't allocate memory|DefaultCPUAllocator", re.IGNORECASE)
# Errors of a broken device; any other error of a first call means that the kernel is not supported.
_BROKEN = re.compile(r"CUDA error|(CUBLAS|CUDNN)_STATUS_(EXECUTION|INTERNAL|MAPPING)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Kernel:
    """call is timed, inside context; wrong counts elements of its result that differ from the exact one."""

    call: Callable[[], object]
    wrong: Callable[[], int]
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


class Refused(Exception):
    """A row cannot be measured: its status and the reason."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Bench:
    """Measures rows on one device; an error becomes the status of its row, and the next row continues."""

    def __init__(self, seat: Seat, shape: Shape, chosen: Options, processes: int, seed: int) -> None:
        self.seat, self.shape, self.chosen, self.processes = seat, shape, chosen, processes
        self.device = torch.device(seat.torch_device)
        self.clock = clock_for(seat.device)
        self.flush: Callable[[], object] = lambda: None
        if self.device.type == "cuda":
            # Overwrite twice the L2 cache, so that the next iteration finds no operand there.
            cache_bytes = int(getattr(torch.cuda.get_device_properties(self.device), "L2_cache_size", 0)) or 64 * 2**20
            self.flush = torch.empty(2 * cache_bytes, dtype=torch.uint8, device=self.device).zero_
        self.flops_per_s: dict[tuple[str, str, str], float] = {}
        torch.manual_seed(seed)

    def measure(self, row: Row) -> KernelSample:
        status, error, wrong = "ok", None, None
        durations: tuple[float, ...] = ()
        try:
            self._require_affordable(row)
            wrong, durations = self._time(row)
            if row.flops and durations:
                rate, key = row.flops / sorted(durations)[len(durations) // 2], _speed_class(row)
                self.flops_per_s[key] = max(rate, self.flops_per_s.get(key, 0.0))
        except Refused as refusal:
            status, error = refusal.status, str(refusal)
            release_unused(self.seat.device)
        return KernelSample(
            rank=self.seat.rank,
            kernel=row.kernel,
            dtype=row.dtype,
            label=row.label,
            variant=row.variant,
            size=row.size,
            flops=row.flops,
            moved_bytes=row.moved_bytes,
            durations_s=durations,
            wrong=wrong,
            status=status,
            error=error,
        )

    def _require_affordable(self, row: Row) -> None:
        """Reject rows that need too much memory (a full host kills the process without an error) or time."""
        if self.device.type == "cuda":
            # Memory that the allocator caches is freed before it runs out.
            idle = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            free = float(torch.cuda.mem_get_info()[0]) + idle
        else:
            import psutil

            free = psutil.virtual_memory().available / self.processes
        if row.needed_bytes > USABLE_MEMORY_RATIO * free:
            raise Refused("oom", f"needs {row.needed_bytes / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free")
        rate = self.flops_per_s.get(_speed_class(row))
        expected_s = FEWEST_ITERATIONS * row.flops / rate if rate and row.flops else 0.0
        if expected_s > MOST_BUDGETS * self.chosen.budget_s:
            raise Refused("skipped", f"{FEWEST_ITERATIONS} iterations would take about {expected_s:.0f} s")

    def _time(self, row: Row) -> tuple[int, tuple[float, ...]]:
        """Wrong elements and durations. Missing support shows in the first call."""
        chosen = self.chosen
        try:
            kernel = prepare(row, self.shape, self.device)
            with kernel.context():
                kernel.call()
                self.clock.drain()
        except UnsupportedError as error:
            raise Refused("unsupported", str(error)) from None
        except (RuntimeError, ValueError) as error:
            raise _refusal(error, "unsupported") from None
        try:
            with kernel.context():
                one_s = max(timed(kernel.call, self.clock, self.flush, 1)[0], 1e-9)
                warmup = min(chosen.warmup, math.ceil(chosen.budget_s / 5 / one_s))
                timed(kernel.call, self.clock, self.flush, warmup)
                count = min(chosen.iters, max(FEWEST_ITERATIONS, int(chosen.budget_s / one_s)))
                durations = timed(kernel.call, self.clock, self.flush, count)
                return kernel.wrong(), durations
        except RuntimeError as error:
            raise _refusal(error, "failed") from None


def _speed_class(row: Row) -> tuple[str, str, str]:
    """Groups rows of about equal speed: products by dtype, attention also by backend."""
    return row.kernel, row.dtype, "" if row.kernel == "matmul" else row.variant


def timed(call: Callable[[], object], clock: Clock, flush: Callable[[], object], count: int) -> tuple[float, ...]:
    """Seconds of each call, between its own two marks; the host waits for the device only after the last."""
    spans = []
    for _ in range(count):
        flush()
        begin = clock.mark()
        call()
        spans.append((begin, clock.mark()))
    clock.drain()
    return tuple(clock.elapsed_s(begin, end) for begin, end in spans)


def _refusal(error: Exception, otherwise: str) -> Refused:
    line = str(error).strip().split("\n")[0] or type(error).__name__
    if _OOM.search(line):
        return Refused("oom", line)
    return Refused("failed" if _BROKEN.search(line) else otherwise, line)


# --- one row's kernel ---


def prepare(row: Row, shape: Shape, device: torch.device) -> Kernel:
    if row.kernel == "matmul":
        return _matmul(row, device)
    if row.kernel == "copy":
        return _copy(_random_bytes(row.dims[0], device), device)
    if row.kernel not in ("h2d", "d2h"):
        return _attention(row, shape, device)
    # Pinned copies between host and device are queued like a kernel; pageable ones block the host.
    if device.type != "cuda":
        raise UnsupportedError("a CPU has no separate device memory")
    host, pinned = torch.device("cpu"), row.variant == "pinned"
    if row.kernel == "h2d":
        return _copy(_random_bytes(row.dims[0], host, pinned), device, asynchronous=pinned)
    return _copy(_random_bytes(row.dims[0], device), host, pinned, asynchronous=pinned)


def count_wrong(found: Tensor, exact: Tensor, tolerance: float) -> int:
    """Number of elements whose error exceeds the tolerance; NaN is always wrong."""
    exact = exact.to(found.device)
    allowed = tolerance * (exact.abs() + exact.square().mean().sqrt())
    return int((~((found.double() - exact).abs() <= allowed)).sum().item())


def _matmul(row: Row, device: torch.device) -> Kernel:
    """A product with operands stored by their layout: N is row-major, T is transposed."""
    if row.dtype in ("tf32", "fp8") and device.type != "cuda":
        raise UnsupportedError(f"{row.dtype} products need a CUDA device")
    least = {"tf32": (8, 0), "fp8": (8, 9)}.get(row.dtype)
    if least and (capability := torch.cuda.get_device_capability(device)) < least:
        needed, found = (".".join(map(str, version)) for version in (least, capability))
        raise UnsupportedError(f"{row.dtype} products need compute capability {needed}; this device has {found}")
    m, n, k = row.dims
    left, right = row.variant[0], row.variant[1]
    a = _random((k, m) if left == "T" else (m, k), row.dtype, device)
    b = _random((n, k) if right == "T" else (k, n), row.dtype, device)
    a, b = (a.t() if left == "T" else a), (b.t() if right == "T" else b)
    wide = torch.bfloat16 if row.dtype == "fp8" else TORCH_DTYPES[row.dtype]
    out = torch.empty((m, n), dtype=wide, device=device)
    scale = torch.ones((), device=device)

    def wrong() -> int:
        """Compare a grid of at least 16 x 16 elements (or all) of the product with float64."""
        multiply(a, b, out, scale)
        rows, columns = slice(None, None, max(1, m // SAMPLED)), slice(None, None, max(1, n // SAMPLED))
        exact = a[rows].to(torch.float32).double() @ b[:, columns].to(torch.float32).double()
        return count_wrong(out[rows, columns], exact, TOLERANCES[row.dtype])

    context = _tensor_float_32 if row.dtype == "tf32" else contextlib.nullcontext
    return Kernel(lambda: multiply(a, b, out, scale), wrong, context)


def multiply(a: Tensor, b: Tensor, out: Tensor, scale: Tensor) -> None:
    """The timed product. fp8 is e4m3 with one scale per tensor, bf16 result and fast accumulation, for which peaks are
    quoted; training may use the slower, more exact accumulation."""
    if a.dtype is torch.float8_e4m3fn:
        torch._scaled_mm(a, b, scale, scale, out_dtype=out.dtype, use_fast_accum=True, out=out)
    else:
        torch.mm(a, b, out=out)


@contextlib.contextmanager
def _tensor_float_32() -> Any:
    """TF32 for this row only; everything else computes fp32 in fp32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _random(size: tuple[int, ...], dtype: str, device: torch.device) -> Tensor:
    if dtype == "fp8":
        return torch.randn(size, dtype=torch.bfloat16, device=device).to(torch.float8_e4m3fn)
    return torch.randn(size, dtype=TORCH_DTYPES[dtype], device=device)


def _random_bytes(size: int, device: torch.device, pinned: bool = False) -> Tensor:
    """Random bytes, drawn as 64-bit words, which is several times faster."""
    words = torch.empty(math.ceil(size / 8), dtype=torch.int64, device=device, pin_memory=pinned)
    return words.random_().view(torch.uint8)[:size]


def _copy(source: Tensor, device: torch.device, pinned: bool = False, asynchronous: bool = False) -> Kernel:
    target = torch.zeros(source.numel(), dtype=torch.uint8, device=device, pin_memory=pinned)

    def wrong() -> int:
        return int((target.cpu() != source.cpu()).sum().item())

    return Kernel(lambda: target.copy_(source, non_blocking=asynchronous), wrong)


# --- attention ---


def _attention(row: Row, shape: Shape, device: torch.device) -> Kernel:
    """Attention on q, k and v in the memory layout of the decoder (batch, length, heads, head_dim)."""
    if row.variant != "flash" and device.type != "cuda":
        raise UnsupportedError(f"the {row.variant} backend needs a CUDA device")
    batch, length = row.dims
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (
        _random((batch, length, h, shape.head_dim), row.dtype, device).transpose(1, 2).requires_grad_() for h in heads
    )
    gradient = _random((batch, length, shape.heads, shape.head_dim), row.dtype, device).transpose(1, 2)
    of_output, of_gradients = ATTENTION_TOLERANCES[row.dtype]

    def context() -> AbstractContextManager[Any]:
        return sdpa_kernel([BACKENDS[row.variant]])

    def wrong() -> int:
        """Compare output and gradients of the first sequence, cut to 256 tokens, with float64."""
        cut = [t.detach()[:1, :, :PROVED_LENGTH].clone() for t in (q, k, v, gradient)]
        found = _with_gradients(attend, cut)
        exact = _with_gradients(_attend_exactly, [t.double() for t in cut])
        limits = (of_output, *[of_gradients] * 3)
        return sum(count_wrong(f, e, limit) for f, e, limit in zip(found, exact, limits, strict=True))

    if row.kernel == "attention_forward":
        return Kernel(lambda: attend(q, k, v), wrong, context)
    with context():
        out = attend(q, k, v)
    return Kernel(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True), wrong, context)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def _attend_exactly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k' / sqrt(d), causal) v in plain operations."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(-1) @ v


def _with_gradients(attention: Callable[[Tensor, Tensor, Tensor], Tensor], tensors: list[Tensor]) -> list[Tensor]:
    inputs = [t.detach().requires_grad_() for t in tensors[:3]]
    out = attention(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, tensors[3])]
