"""Overlap: times a collective alone, matrix products of about the same time alone, then both at once."""

from __future__ import annotations

import functools

import torch

from paceline.results.machine_samples import OverlapSample
from paceline.workloads.collectives.ensemble import Ensemble, affordable
from paceline.workloads.collectives.operations import OPERATIONS, Launch
from paceline.workloads.collectives.options import Options
from paceline.workloads.collectives.payload import Payload

OPERATION = OPERATIONS["all_reduce"]
LARGEST_BYTES = {"cuda": 64 << 20, "cpu": 4 << 20}
# Wide enough to fill a device; halved until a whole number of products is close to the collective's time.
WIDTH, LEAST_WIDTH = {"cuda": 2048, "cpu": 256}, 32


def measure_overlap(ensemble: Ensemble, options: Options, number: int) -> None:
    """Record one sample per chosen dtype that supports sums and matrix products."""
    for dtype in (d for d in options.chosen_dtypes if d in ("fp32", "bf16", "fp16")):
        ensemble.recorder.progress(number, "timing")
        size_bytes = min(options.most_bytes or ensemble.size_limit_bytes(), LARGEST_BYTES[ensemble.seat.device])
        _measure_dtype(ensemble, options, dtype, size_bytes)


def _measure_dtype(ensemble: Ensemble, options: Options, dtype: str, size_bytes: int) -> None:
    seat, place = ensemble.seat, ensemble.place
    count = OPERATION.count(size_bytes, 4 if dtype == "fp32" else 2, place.ranks)
    buffers, _ = ensemble.allocate(OPERATION, dtype, count, True)
    if buffers is None:
        return
    Payload(place, dtype, True, seat.torch_device).fill(buffers)
    begin = OPERATION.bind(buffers, place, None, True)

    def communicate() -> None:
        begin().wait()

    (alone_s,) = ensemble.largest([_settled_s(ensemble, communicate)])
    # Most CPUs emulate 16-bit products, far slower than any network, so products on a CPU are always fp32.
    product, product_s = _fitting_product(ensemble, alone_s, buffers.receive.dtype if seat.device == "cuda" else None)
    products = max(1, round(alone_s / product_s))

    def compute() -> None:
        for _ in range(products):
            product()

    def both() -> None:
        work = begin()
        compute()
        work.wait()

    iterations = affordable(options.iters, alone_s, options.budget_s)
    collective_s, compute_s, together_s = (ensemble.durations(f, iterations) for f in (communicate, compute, both))
    ensemble.recorder.add(
        OverlapSample(
            rank=place.rank,
            operation=OPERATION.name,
            dtype=dtype,
            size_bytes=buffers.receive.nbytes,
            group_size=place.ranks,
            collective_s=collective_s,
            compute_s=compute_s,
            together_s=together_s,
        )
    )


def _fitting_product(ensemble: Ensemble, alone_s: float, dtype: torch.dtype | None) -> tuple[Launch, float]:
    """Collective: the widest product that takes at most half as long as the collective, and its seconds."""
    width = WIDTH[ensemble.seat.device]
    while True:
        device = ensemble.seat.torch_device
        left, right, out = (torch.ones(width, width, dtype=dtype or torch.float32, device=device) for _ in range(3))
        product = functools.partial(torch.mm, left, right, out=out)
        (seconds,) = ensemble.largest([_settled_s(ensemble, product)])
        if seconds <= alone_s / 2 or width <= LEAST_WIDTH:
            return product, seconds
        width //= 2


def _settled_s(ensemble: Ensemble, launch: Launch) -> float:
    """Seconds of the fastest of three launches: the first still selects algorithms and fills caches."""
    return min(ensemble.wall_s(launch) for _ in range(3))
