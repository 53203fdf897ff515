"""CPU processes in place of GPUs: what `paceline run compute` and `run fabric` measured, as an accelerator.

No published row trains on CPUs, so the rates come from this machine and the interval of such a prediction is wide by
assumption. It serves to try a choice with real processes where there is no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from paceline.models import arithmetic
from paceline.prediction.hardware import CPU, Accelerator
from paceline.prediction.parameters import Fitted, load
from paceline.results.records import RunRecord

# Messages this large measure bandwidth, not latency.
LARGE_MESSAGE_BYTES = 2**20
# The model counts 2 bytes per number, a CPU trains in 4.
_WIDER = 2.0


def measured_cpu(records: Sequence[RunRecord], fitted: Fitted | None = None) -> Accelerator | None:
    """One process of this machine, from its sweeps; None if products or copies were not measured.

    Without a sweep of collectives the link is taken to be as fast as the memory.
    """
    fit = fitted or load()
    own = [one for one in records if one.machines and not any(m.get("gpus") for m in one.machines)]
    products, copies = _rates(own, "matmul"), _rates(own, "copy")
    if products is None or copies is None:
        return None
    machine = own[0].machines[0]
    cores = int(machine.get("cores") or 1)
    memory = machine.get("memory_bytes")
    link = max(_links(own), default=copies)
    return Accelerator(
        name=CPU,
        gpu=CPU,
        generation=CPU,
        flops=products,
        fp8_flops=products,
        memory_bytes=None if memory is None else memory / cores,
        memory_bytes_per_s=copies / _WIDER,
        link_bytes_per_s=link / _WIDER / math.exp(fit.values["link"]),
        gpus_per_node=cores,
        node_bytes_per_s=link / _WIDER / math.exp(fit.values["nic"]),
        power_w=0.0,
        # The rate was measured: it is what large products reach, and no share of a datasheet's peak.
        matmul_ratio=math.exp(-fit.values["efficiency"]),
    )


def _rates(records: Iterable[RunRecord], kernel: str) -> float | None:
    """FLOP/s of the fastest fp32 products, or bytes/s of the largest copies (they fit no cache), of a typical rank."""
    samples = [
        sample
        for record in records
        for sample in record.kernels
        if sample.kernel == kernel and sample.status == "ok" and sample.durations_s
    ]
    if kernel == "copy":
        largest = max((sample.size or 0 for sample in samples), default=0)
        samples = [sample for sample in samples if sample.size == largest]
    best: dict[int, float] = {}
    for sample in samples:
        work = sample.moved_bytes if kernel == "copy" else sample.flops if sample.dtype == "fp32" else None
        if work:
            best[sample.rank] = max(best.get(sample.rank, 0.0), work / float(np.median(sample.durations_s)))
    return float(np.median(list(best.values()))) if best else None


def _links(records: Iterable[RunRecord]) -> list[float]:
    found = []
    for sample in (sample for record in records for sample in record.collectives):
        large = sample.status == "ok" and sample.size_bytes >= LARGE_MESSAGE_BYTES and sample.durations_s
        if large and sample.operation == "all_reduce" and sample.group_size > 1:
            seconds = float(np.median(sample.durations_s)) / sample.batch
            found.append(arithmetic.wire_factor("all_reduce", sample.group_size) * sample.size_bytes / seconds)
    return found
