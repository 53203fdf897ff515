"""Machine ceilings: matrix products, memory and host-device copies, and attention on each device alone.

This module plans the rows and computes their work; `kernels` measures them. Every rank measures its own device. Ranks
wait for each other between rows, never inside one, so that all devices of a host are loaded alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from paceline.contract import Recorder, Seat
from paceline.experiment.plugins import Traits, parse_options
from paceline.experiment.spec import RunSpec
from paceline.models.arithmetic import attention_flops_per_token, parameters
from paceline.models.arithmetic import load as load_shape
from paceline.models.shape import Shape
from paceline.results.machine_samples import Kernel
from paceline.results.records import Evidence
from paceline.workloads import collectives
from paceline.workloads.compute.options import DTYPES, KERNELS, Options, Row

TRAITS = Traits()
# Equal to decoder.VOCAB_MULTIPLE, which needs torch to import; a test compares them.
HEAD_MULTIPLE = 64
KIB, MIB, GIB = 2**10, 2**20, 2**30
# A backward costs two forwards, as in F of MFU; recomputation in fused kernels is not counted.
BACKWARD_OVER_FORWARD = 2
ELEMENT_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True)
class Ranges:
    """Defaults of the options on one kind of device. sides, copies, bus and lengths are (first, last)."""

    dtypes: tuple[str, ...]
    sides: tuple[int, int]
    copies: tuple[int, int]
    bus: tuple[int, int]
    lengths: tuple[int, int]
    backends: tuple[str, ...]
    attention_dtypes: tuple[str, ...]
    tokens: int


RANGES = {
    "cuda": Ranges(
        dtypes=DTYPES,
        sides=(256, 16384),
        copies=(MIB, GIB),
        bus=(64 * KIB, GIB),
        lengths=(512, 8192),
        backends=("flash", "cudnn", "efficient"),
        attention_dtypes=("bf16", "fp16", "fp32"),
        tokens=8192,
    ),
    "cpu": Ranges(
        dtypes=("fp32", "bf16"),
        sides=(64, 2048),
        copies=(MIB, 256 * MIB),
        bus=(64 * KIB, 64 * KIB),
        lengths=(128, 1024),
        backends=("flash",),
        attention_dtypes=("fp32", "bf16", "fp16"),
        tokens=512,
    ),
}


def check(spec: RunSpec) -> str | None:
    parse_options(Options, spec.workload)
    if load_shape(spec.model).experts:
        return f"{spec.model} is a mixture of experts, whose matrix products have no fixed shape"
    return None


def run(spec: RunSpec, seat: Seat, recorder: Recorder) -> None:
    import torch.distributed as dist

    from paceline.workloads.compute.kernels import Bench

    recorder.progress(0, "setup")
    shape, chosen = load_shape(spec.model), parse_options(Options, spec.workload)
    bench = Bench(seat, shape, chosen, spec.topology.processes_per_node, spec.seed)
    for number, row in enumerate(plan(shape, chosen, seat.device)):
        recorder.progress(number, "forward")
        dist.barrier()
        recorder.add(bench.measure(row))
    recorder.conclude(evidence(seat, shape))


def evidence(seat: Seat, shape: Shape) -> Evidence:
    """Evidence without training: what could have slowed the device down."""
    import torch

    observed = collectives.evidence(seat, None)
    settings = {"threads": torch.get_num_threads(), **observed.settings}
    return replace(observed, parameters=parameters(shape), settings=settings, shape=asdict(shape))


def plan(shape: Shape, chosen: Options, device: str) -> tuple[Row, ...]:
    """All rows in the order of measurement, small ones first; the same on every rank."""
    ranges = RANGES[device]
    kernels = KERNELS if chosen.kernels == "all" else tuple(k for k in KERNELS if k in chosen.kernels.split("+"))
    dtypes = ranges.dtypes if chosen.dtypes == "all" else tuple(d for d in DTYPES if d in chosen.dtypes.split("+"))
    tokens = chosen.tokens or ranges.tokens
    rows: list[Row] = []
    if "matmul" in kernels:
        sides = _ladder(ranges.sides, chosen.largest_matmul, 2)
        rows += (_product(dtype, "NT", (side, side, side), size=side) for dtype in dtypes for side in sides)
        rows += (row for dtype in dtypes for row in model_products(shape, tokens, dtype, padded=device == "cuda"))
    if "copy" in kernels:
        rows += (_copy("copy", "", size) for size in _ladder(ranges.copies, chosen.largest_copy_bytes, 4))
    for way in ("h2d", "d2h"):
        sizes = _ladder(ranges.bus, chosen.largest_copy_bytes, 4) if way in kernels else []
        rows += (_copy(way, variant, size) for variant in ("pinned", "pageable") for size in sizes)
    if "attention" in kernels:
        dtype = next((d for d in ranges.attention_dtypes if d in dtypes), ranges.attention_dtypes[0])
        lengths = _ladder(ranges.lengths, chosen.longest_sequence, 2)
        rows += (
            row for backend in ranges.backends for s in lengths for row in attention(shape, tokens, s, dtype, backend)
        )
    return tuple(rows)


def _ladder(ends: tuple[int, int], largest: int | None, factor: int) -> list[int]:
    """Powers of `factor` from the first to the last value; the last one is always included."""
    last = largest or ends[1]
    steps = [min(ends[0], last)]
    while steps[-1] * factor <= last:
        steps.append(steps[-1] * factor)
    return steps if steps[-1] == last else [*steps, last]


def model_products(shape: Shape, tokens: int, dtype: str, padded: bool = False) -> Iterator[Row]:
    """The products of each linear layer of the decoder in training, on row-major tensors: y = x W' (NT), dx = dy W
    (NN), dW = dy' x (TN). All three are 2 * tokens * in * out FLOPs."""
    for name, out, into in linear_layers(shape, padded):
        yield _product(dtype, "NT", (tokens, out, into), f"{name} forward")
        yield _product(dtype, "NN", (tokens, into, out), f"{name} grad input")
        yield _product(dtype, "TN", (out, into, tokens), f"{name} grad weight")


def linear_layers(shape: Shape, padded: bool = False) -> tuple[tuple[str, int, int], ...]:
    """Name, outputs and inputs of each layer. As in the decoder, q, k, v are one product, and so are both halves of a
    gated MLP; the head is padded on a GPU."""
    heads, wide = shape.heads * shape.head_dim, shape.ffn * (2 if shape.gated else 1)
    return (
        ("qkv", heads + 2 * shape.kv_heads * shape.head_dim, shape.hidden),
        ("attention output", shape.hidden, heads),
        ("mlp in", wide, shape.hidden),
        ("mlp out", shape.hidden, shape.ffn),
        ("head", shape.vocab + (-shape.vocab % HEAD_MULTIPLE if padded else 0), shape.hidden),
    )


def _product(dtype: str, layout: str, dims: tuple[int, int, int], name: str = "", size: int | None = None) -> Row:
    """A matrix product of 2mnk FLOPs. fp8 kernels support one layout only, NT."""
    m, n, k = dims
    wide = ELEMENT_BYTES["bf16"] if dtype == "fp8" else ELEMENT_BYTES[dtype]
    operands = (m * k + n * k) * ELEMENT_BYTES[dtype]
    return Row(
        kernel="matmul",
        dtype=dtype,
        label=", ".join(filter(None, (name, f"{m} x {n} x {k}"))),
        variant="NT, fast accumulation" if dtype == "fp8" else layout,
        dims=dims,
        size=size,
        flops=2 * m * n * k,
        # An fp8 operand is rounded from a wider one, which needs memory at the same time.
        needed_bytes=operands + m * n * wide + (max(m, n) * k * wide if dtype == "fp8" else 0),
    )


def _copy(kernel: Kernel, variant: str, size: int) -> Row:
    """A copy of `size` bytes. In device memory each byte is read and written; over the bus it moves once."""
    moved = 2 * size if kernel == "copy" else size
    return Row(
        kernel=kernel,
        dtype="bytes",
        label=bytes_text(size),
        variant=variant,
        dims=(size,),
        size=size,
        moved_bytes=moved,
        needed_bytes=moved,
    )


def attention(shape: Shape, tokens: int, length: int, dtype: str, backend: str) -> Iterator[Row]:
    """Causal attention of one layer, forward and backward, with equal tokens at every length and the FLOPs of MFU."""
    batch = max(1, tokens // length)
    forward = attention_flops_per_token(shape, length) // shape.layers * batch * length
    one = batch * length * shape.head_dim * ELEMENT_BYTES[dtype]
    tensors = 2 * shape.heads + 2 * shape.kv_heads
    passes: tuple[tuple[Kernel, int, int], ...] = (
        ("attention_forward", 1, 1),
        ("attention_backward", BACKWARD_OVER_FORWARD, 2),
    )
    for kernel, factor, sets in passes:
        yield Row(
            kernel=kernel,
            dtype=dtype,
            label=f"sequence {length}, batch {batch}",
            variant=backend,
            dims=(batch, length),
            size=length,
            flops=factor * forward,
            needed_bytes=one * tensors * sets,
        )


def bytes_text(size: int) -> str:
    """`64 KiB` or `1 GiB`; in bytes if no such unit divides it."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} bytes"
