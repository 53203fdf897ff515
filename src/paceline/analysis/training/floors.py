"""The least time that the kernels of a step need, by ceilings that were measured on the same kind of device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paceline.analysis.findings import SHARED_GPU, Measurement
from paceline.analysis.machine import ceilings
from paceline.analysis.training import metrics
from paceline.analysis.training.metrics import Cell
from paceline.errors import RequestError
from paceline.models.adapters import DTYPE_BYTES
from paceline.results.records import RunRecord

# Adam reads and writes two fp32 moments and the fp32 weight; the gradient it also reads is counted by its dtype.
ADAM_BYTES = 2 * (4 + 4 + 4)
# Strategies whose optimizer works on 1/n of the parameters, and those where it works on all.
_SHARDED, _WHOLE = ("fsdp2", "zero"), ("single", "ddp")
CEILINGS_FROM = "`paceline run compute` into the same results folder, then `paceline report` of that folder, does"
NO_CEILINGS = f"the ceilings of this device were not measured: {CEILINGS_FROM}"

COPY_RATE = ceilings.METRICS["copy"][0]

Copies = Mapping[ceilings.Device, Measurement]


def copies_by_device(records: Sequence[RunRecord], measured: Sequence[Measurement]) -> Copies:
    """The largest device copy of each kind of device: smaller ones may lie in a cache."""
    devices = {r.spec.run_id: ceilings.device_of(r) for r in records if r.kernels and not r.shares_gpu}
    found: dict[ceilings.Device, Measurement] = {}
    for m in measured:
        if m.metric == COPY_RATE and m.axes["rank"] is None and m.value and m.runs[0] in devices:
            known = found.setdefault(devices[m.runs[0]], m)
            found[devices[m.runs[0]]] = max(known, m, key=lambda one: float(one.axes["size"] or 0))
    return found


class Floor(NamedTuple):
    """seconds is None where it is not known, and text then says why."""

    seconds: float | None
    text: str
    runs: tuple[str, ...] = ()


def products(cell: Cell) -> Floor:
    """FLOPs of a step on one device, recomputed ones included, at the best product that was reached there."""
    peak, note = metrics.measured_peak(cell)
    tokens = cell.per("tokens")
    dtype = cell.spec.training.precision.compute
    if peak is None or tokens is None:
        return Floor(None, _no_ceiling(cell, f"{dtype} products"))
    try:
        flops = metrics.flops_per_token(cell, recomputed=True)
    except RequestError as error:
        return Floor(None, str(error))
    seconds = flops * tokens.value / cell.spec.topology.world_size / peak
    text = f"its products need at least {milliseconds(seconds)} at {note.removeprefix('of ')}"
    return Floor(seconds, text, cell.achievable[dtype].runs)


def optimizer(cell: Cell, copies: Copies) -> Floor:
    """Bytes that Adam must move on one device at the measured copy rate, never more than the optimizer's phase took."""
    devices = {ceilings.device_of(w.record) for w in cell.windows}
    ceiling = copies.get(next(iter(devices))) if len(devices) == 1 and not cell.shared_gpu else None
    if ceiling is None or not ceiling.value:
        return Floor(None, _no_ceiling(cell, "memory copies"))
    moved = _optimizer_bytes(cell)
    if moved is None:
        return Floor(None, f"how much the optimizer of {cell.spec.strategy} moves is not known")
    phase = cell.per("optimizer_s")
    seconds = min(moved / ceiling.value, phase.value if phase else math.inf)
    rate = f"{ceiling.value / 1e9:,.0f} GB/s"
    text = f"the optimizer's {moved / 1e9:.3g} GB need at least {milliseconds(seconds)} at the {rate} of a copy here"
    return Floor(seconds, text, ceiling.runs)


def _no_ceiling(cell: Cell, what: str) -> str:
    if cell.shared_gpu:
        return SHARED_GPU
    return f"{what} were not measured on this device: {CEILINGS_FROM}" if cell.achievable else NO_CEILINGS


def _optimizer_bytes(cell: Cell) -> float | None:
    strategy, evidence = cell.spec.strategy, cell.windows[0].record.evidence
    if strategy is None or evidence is None or strategy.name not in (*_SHARDED, *_WHOLE) or cell.spec.tuning:
        return None
    owners = cell.spec.topology.world_size if strategy.name in _SHARDED else 1
    per_parameter = ADAM_BYTES + DTYPE_BYTES[cell.spec.training.precision.reduce]
    return evidence.parameters * per_parameter / owners


def milliseconds(seconds: float) -> str:
    """Three digits, never an exponent."""
    return f"{float(f'{seconds * 1e3:.3g}'):,.12g} ms"
