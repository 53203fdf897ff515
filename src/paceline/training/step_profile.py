"""Exposed communication and time by kernel class, from a profile of a few steps after the timed window.

Communication is exposed while a collective runs and nothing computes. On CUDA both are kernels on the device. On a CPU,
compute is the operators of torch and bitsandbytes, and a collective lasts from its start to its completion in gloo.
Operators may be nested and kernels may overlap: each moment counts for the first class in PRECEDENCE that runs then, so
that the classes add up to compute.
"""

from __future__ import annotations

import contextlib
import re
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from paceline.host.processes import collection_paused
from paceline.results.records import ExposureSample, TimelineSample, TraceSample
from paceline.training.instruments import Clock, wrappers

Span = tuple[float, float]

ATTENTION, DEQUANTISATION, PRODUCTS = "attention", "dequantisation", "products"
COPIES, ELEMENTWISE = "copies", "elementwise"
# On a GPU, a copy next to a kernel costs nothing. On a CPU, a copy is nested in the operator that needs it.
PRECEDENCE: Mapping[str, tuple[str, ...]] = {
    "cuda": (ATTENTION, DEQUANTISATION, PRODUCTS, ELEMENTWISE, COPIES),
    "cpu": (ATTENTION, DEQUANTISATION, PRODUCTS, COPIES, ELEMENTWISE),
}
# Matched in this order: Inductor names fused elementwise kernels after everything they serve (triton_poi_fused_mm_..),
# and fused attention uses the same libraries as matrix products (fmha_cutlassF). Kernels:
# FlashAttention (flash_fwd, flash_bwd), cuDNN (sdpa), memory-efficient (fmha); bitsandbytes (kDequantizeBlockwise);
# cuBLAS (gemm, gemv, nvjet on Hopper and later, splitKreduce), CUTLASS, Triton's templates.
_CLASSES: Sequence[tuple[str, re.Pattern[str]]] = (
    (ELEMENTWISE, re.compile(r"^triton_(poi|red|per|for)_")),
    (ATTENTION, re.compile(r"flash|fmha|sdpa|attention", re.IGNORECASE)),
    (DEQUANTISATION, re.compile(r"dequant", re.IGNORECASE)),
    (PRODUCTS, re.compile(r"gemm|gemv|cutlass|nvjet|cublas|xmma|splitk|triton_tem|_mm_|::matmul", re.IGNORECASE)),
    (COPIES, re.compile(r"^Memcpy|^Unified Memory")),
)
# CPU operators by their full names.
_OPERATORS: Mapping[str, str] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "mv", "addmv", "dot"), PRODUCTS),
    # bitsandbytes' product contains its dequantisation as a separate operator, unless the kernel is fused.
    **dict.fromkeys(("mkldnn_linear", "_mkl_linear", "gemm_4bit", "gemv_4bit"), PRODUCTS),
    **dict.fromkeys(("copy_", "_to_copy", "to", "clone", "contiguous"), COPIES),
}
_LIBRARIES = ("aten::", "bitsandbytes::", "mkldnn::", "mkl::")


def class_of(name: str, device: str) -> str:
    """The class of a GPU kernel or CPU operator; elementwise if no other matches."""
    operator = name.rpartition("::")[2]
    if device == "cpu" and operator in _OPERATORS:
        return _OPERATORS[operator]
    classes = _CLASSES if device == "cuda" else [c for c in _CLASSES if c[0] in (ATTENTION, DEQUANTISATION)]
    return next((kind for kind, pattern in classes if pattern.search(name)), ELEMENTWISE)


class Profile:
    """Profiles the block `recording()` and splits its time by class."""

    def __init__(self, device: str, clock: Clock) -> None:
        self.device, self.clock = device, clock
        self.computing: dict[str, list[Span]] = {kind: [] for kind in PRECEDENCE[device]}
        self.communication: list[Span] = []
        self.batches: list[Span] = []
        self.wall_s = 0.0
        # When the ranks had lined up, on the profiler's clock.
        self.begin_s = 0.0

    def activities(self) -> list[Any]:
        from torch.profiler import ProfilerActivity

        return [ProfilerActivity.CUDA if self.device == "cuda" else ProfilerActivity.CPU]

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        import torch.distributed as dist
        from torch.profiler import profile

        with profile(activities=self.activities()) as profiler:
            # Ranks arrive at different times; waiting for the last one is not communication.
            if dist.is_initialized():
                dist.barrier()
            self.clock.drain()
            begin = time.perf_counter()
            yield
            self.clock.drain()
            self.wall_s = time.perf_counter() - begin
        # The raw events: building torch's tree of them takes longer than training a small model.
        results: Any = profiler.profiler.kineto_results if profiler.profiler else None
        with collection_paused():
            for event in results.events() if results else ():
                self.add(event, results.trace_start_ns())
        if self.device == "cuda" and self.communication:
            barrier = min(self.communication)  # NCCL runs it as a reduction
            self.communication.remove(barrier)
            self.begin_s = barrier[1]

    def add(self, event: Any, origin_ns: int = 0) -> None:
        """Sort one raw event of the profiler into communication, compute and batch copies."""
        if self.device == "cuda" and "CUDA" not in str(event.device_type()):
            return  # calls on the host (launching, waiting) are not work of the device
        name, begin_s = event.name(), (event.start_ns() - origin_ns) / 1e9
        span = (begin_s, begin_s + event.duration_ns() / 1e9)
        if name.startswith("Memcpy HtoD"):
            self.batches.append(span)
        if name == "gloo:barrier":
            self.begin_s = max(self.begin_s, span[1])
            return
        if name.startswith(("nccl", "gloo:")):
            self.communication.append(span)
        elif self.device == "cuda" or name.startswith(_LIBRARIES):
            self.computing[class_of(name, self.device)].append(span)

    def sample(self, rank: int, steps: int, batches: int = 0, batch_bytes: int = 0) -> TraceSample:
        """The profile as a sample. batches: how many host-to-device copies are token batches (the longest ones)."""
        everything = [span for spans in self.computing.values() for span in spans]
        compute = covered_s(everything)
        copies = sorted((end - begin for begin, end in self.batches), reverse=True)[:batches]
        complete = len(copies) == batches > 0
        classes = divided_s(self.computing)
        return TraceSample(
            rank=rank,
            steps=steps,
            wall_s=self.wall_s,
            compute_s=compute,
            communication_s=covered_s(self.communication),
            exposed_s=covered_s([*everything, *self.communication]) - compute,
            h2d_s=sum(copies) if complete else None,
            h2d_bytes=batches * batch_bytes if complete else None,
            products_s=classes[PRODUCTS],
            attention_s=classes[ATTENTION],
            dequantisation_s=classes[DEQUANTISATION],
            elementwise_s=classes[ELEMENTWISE],
            copies_s=classes[COPIES],
        )


# Slots of a timeline: what a reader can tell apart on a screen, and a few hundred bytes per rank.
SLOTS = 100
COMPUTE, COMMUNICATION = "compute", "communication"


def timeline(
    profile: Profile, rank: int, steps: int, sent: Mapping[str, Sequence[Span]] | None = None
) -> TimelineSample:
    """What filled most of each slot of the profiled steps. sent: communication by dimension, if that is known."""
    computing = [span for spans in profile.computing.values() for span in spans]
    kinds = {COMPUTE: computing, **(sent or {COMMUNICATION: profile.communication})}
    begin = profile.begin_s or min((span[0] for spans in kinds.values() for span in spans), default=0.0)
    filled, before, reached = list[list[float]](), list[Span](), [0.0] * SLOTS
    for spans in kinds.values():
        before += spans
        total = covered_by_slot(before, begin, profile.wall_s / SLOTS, SLOTS)
        filled.append([now - earlier for now, earlier in zip(total, reached, strict=True)])
        reached = total
    filled.append([profile.wall_s / SLOTS - covered for covered in reached])
    slots = tuple(max(range(len(filled)), key=lambda kind: filled[kind][slot]) for slot in range(SLOTS))
    return TimelineSample(rank=rank, steps=steps, wall_s=profile.wall_s, kinds=tuple(kinds), slots=slots)


def covered_by_slot(spans: Iterable[Span], begin: float, width: float, count: int) -> list[float]:
    """The length of the union of the spans in each slot.

    >>> covered_by_slot([(0.0, 1.5), (1.0, 2.0), (3.5, 9.0)], 0.0, 1.0, 4)
    [1.0, 1.0, 0.0, 0.5]
    """
    found, reached = [0.0] * count, begin
    if width <= 0:
        return found
    for start, end in sorted(spans):
        at = max(start, reached)
        slot = int((at - begin) / width)
        while at < end and slot < count:
            until = max(at, min(end, begin + (slot + 1) * width))
            found[slot] += until - at
            at, slot = until, slot + 1
        reached = max(reached, end)
    return found


# The least share of the communication of which must be known where it belongs.
LEAST_KNOWN = 0.9
# Prefix of the profiler's ranges around what is sent over a mesh dimension; alone, over none. Norms and losses are sent
# over all ranks, and wait for the slowest.
_RANGE = "paceline:"
# Prefix of calls of CUDA's runtime and driver (cudaLaunchKernelExC, cuLaunchKernelEx, cudaStreamSynchronize).
_CALLS = "cu"


class DimensionProfile(Profile):
    """Also splits communication by mesh dimension, with a range around every collective when it is started.

    On CUDA a kernel of NCCL belongs to the range in which the host launched it; messages are launched together, after
    their ranges. On a CPU a collective of gloo belongs to the range in which it starts. Point-to-point messages of gloo
    have no event that lasts until they arrive: waiting for them counts.
    """

    def __init__(self, device: str, clock: Clock) -> None:
        super().__init__(device, clock)
        self.ranges: list[tuple[Span, str]] = []
        # On CUDA: kernels of NCCL with two numbers, and when events of the host with these numbers began. CUPTI numbers
        # launches, torch numbers its operators, and both count from 1.
        self.kernels: list[tuple[Span, str, int, int]] = []
        self.launches: dict[int, float] = {}
        self.operators: dict[int, float] = {}

    def activities(self) -> list[Any]:
        from torch.profiler import ProfilerActivity

        return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device == "cuda" else [])]

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        with super().recording(), _marked(), _marked_waits() if self.device == "cpu" else contextlib.nullcontext():
            yield

    def add(self, event: Any, origin_ns: int = 0) -> None:
        name, begin_s, on_device = (
            event.name(),
            (event.start_ns() - origin_ns) / 1e9,
            "CUDA" in str(event.device_type()),
        )
        span = begin_s, begin_s + event.duration_ns() / 1e9
        if name.startswith(_RANGE):
            if not on_device:
                self.ranges.append((span, name.removeprefix(_RANGE)))
            return
        if self.device == "cuda":
            if event.is_user_annotation():
                return  # NCCL's own ranges, which the device shows once more
            if on_device and name.startswith("nccl"):
                self.kernels.append((span, name, event.correlation_id(), event.linked_correlation_id()))
            elif not on_device and name.startswith(_CALLS):
                if "Launch" in name:
                    self.launches[event.correlation_id()] = begin_s
            elif not on_device:
                self.operators[event.correlation_id()] = begin_s
        super().add(event, origin_ns)

    def spans(self) -> dict[str, list[Span]]:
        """When something was sent, by dimension; "" is none of them."""
        found: defaultdict[str, list[Span]] = defaultdict(list)
        starts = sorted(self.ranges)
        if self.device == "cuda":
            known = ((span, name, self._launched_at(launch, operator)) for span, name, launch, operator in self.kernels)
            began = [(span, at, "SendRecv" in name) for span, name, at in known if at is not None]
        else:
            began = [(span, span[0], False) for span in self.communication]
        for span, at, is_message in began:
            # Ranges are short and not nested: the last one that began before is the only candidate.
            position = bisect_right(starts, at, key=lambda one: one[0][0]) - 1
            if position >= 0 and (is_message or at <= starts[position][0][1]):
                found[starts[position][1]].append(span)
        for span, name in self.ranges:
            if name.startswith(_WAIT):
                found[name.removeprefix(_WAIT)].append(span)
        return found

    def _launched_at(self, launch: int, operator: int) -> float | None:
        """When the host launched a kernel; if that was not recorded, when its operator began. Messages
        that are launched together have none."""
        return self.launches.get(launch, self.operators.get(operator) if operator else None)

    def samples(self, rank: int, steps: int, dimensions: Iterable[str]) -> list[ExposureSample]:
        """One sample per dimension; each moment counts for the first dimension that is exposed then. None at all if the
        dimension of some communication is not known: 0 s would be wrong."""
        sent = covered_s(span for spans in self.spans().values() for span in spans)
        if self.device == "cuda" and sent < LEAST_KNOWN * covered_s(self.communication):
            return []
        before = [span for spans in self.computing.values() for span in spans]
        reached, spans, samples = covered_s(before), self.spans(), []
        for name in dimensions:
            before += spans.get(name, [])
            total = covered_s(before)
            samples.append(
                ExposureSample(
                    rank=rank,
                    steps=steps,
                    dimension=name,
                    wall_s=self.wall_s,
                    communication_s=covered_s(spans.get(name, [])),
                    exposed_s=total - reached,
                )
            )
            reached = total
        return samples


_WAIT = "wait "


@contextlib.contextmanager
def _marked() -> Iterator[None]:
    """Put a range around every collective, with the name of its mesh dimension if it has one."""
    from torch.profiler import record_function
    from torch.utils._python_dispatch import TorchDispatchMode

    from paceline.training.attachment.paceline_wire import group_of

    inner = wrappers()

    class Mark(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(issubclass(each, inner) for each in types):
                return NotImplemented
            sends = func.namespace in ("c10d", "_c10d_functional") and "wait" not in str(func)
            with record_function(_RANGE + group_of(args)[1]) if sends else contextlib.nullcontext():
                return func(*args, **(kwargs or {}))

    with Mark():  # type: ignore[no-untyped-call]
        yield


class _Waited:
    """A message on its way, with a range around the wait for it."""

    def __init__(self, work: Any, dimension: str) -> None:
        self._work, self._dimension = work, dimension

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *args: Any) -> Any:
        from torch.profiler import record_function

        with record_function(_RANGE + _WAIT + self._dimension):
            return self._work.wait(*args)


@contextlib.contextmanager
def _marked_waits() -> Iterator[None]:
    """Mark the waits for point-to-point messages over mesh dimensions."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    from paceline.training.attachment.paceline_wire import dimension_of

    def waited(send: Any) -> Any:
        def started(tensor: Any, peer: Any = None, group: Any = None, *args: Any, **kwargs: Any) -> Any:
            work, dimension = send(tensor, peer, group, *args, **kwargs), dimension_of(group) if group else ""
            return _Waited(work, dimension) if work is not None and dimension else work

        return started

    with contextlib.ExitStack() as stack:
        for name in ("isend", "irecv"):
            original, replacement = getattr(dist, name), waited(getattr(dist, name))
            # Messages name the function that starts them, and torch compares it with its own.
            for owner in (dist, distributed_c10d):
                stack.callback(setattr, owner, name, original)
                setattr(owner, name, replacement)
        yield


def divided_s(classes: Mapping[str, Sequence[Span]]) -> dict[str, float]:
    """Seconds of each class in which no earlier class runs; their sum is the length of the union."""
    seconds, before, reached = {}, list[Span](), 0.0
    for kind, spans in classes.items():
        before += spans
        total = covered_s(before)
        seconds[kind], reached = total - reached, total
    return seconds


def covered_s(spans: Iterable[Span]) -> float:
    """Length of the union of the spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
