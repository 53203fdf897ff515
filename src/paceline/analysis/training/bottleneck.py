"""What a step mostly waits for, by rules that a reader can check (docs/recommendations.md).

A step is divided on the rank that waits least for others. Network, input and launch overhead are measured times. If the
profile classifies kernels, so are dequantisation and kernels without a product, which are memory bound. For products
and attention a floor is certain: their FLOPs at the measured matmul ceiling are compute; the rest may be compute or
memory bandwidth. Without classified kernels, only floors are certain: products at that ceiling, and the optimizer's
bytes at the measured copy ceiling. The bottleneck is the kind whose certain share exceeds everything any other may
have.
"""

from __future__ import annotations

import math
import statistics as stdlib_statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paceline.analysis.findings import SHARED_GPU, Bottleneck, Measurement, ShareOfStep
from paceline.analysis.findings.training import (
    BOTTLENECKS,
    COMPUTE,
    DEQUANTISATION,
    INPUT,
    LAUNCH,
    MEMORY,
    NETWORK,
    UNDECIDED,
)
from paceline.analysis.grouping import grouped
from paceline.analysis.machine import ceilings
from paceline.analysis.statistics.intervals import student_t
from paceline.analysis.training import metrics
from paceline.analysis.training.metrics import Cell
from paceline.analysis.training.window import STEP_COLUMNS, Window
from paceline.errors import RequestError
from paceline.models import arithmetic
from paceline.models.adapters import DTYPE_BYTES
from paceline.results.records import RunRecord
from paceline.wording import listed

# Adam reads and writes two fp32 moments and the fp32 weight; the gradient it reads is counted by its dtype.
ADAM_BYTES = 2 * (4 + 4 + 4)
CEILINGS_FROM = "run `paceline run compute` into the same results folder, then `paceline report` on that folder"
NO_CEILINGS = f"the ceilings of this device were not measured: {CEILINGS_FROM}"

COPY_RATE = ceilings.METRICS["copy"][0]

Copies = Mapping[ceilings.Device, Measurement]


def copies_by_device(records: Sequence[RunRecord], measured: Sequence[Measurement]) -> Copies:
    """The largest device copy of each kind of device: smaller ones may fit in a cache."""
    devices = {r.spec.run_id: ceilings.device_of(r) for r in records if r.kernels and not r.shares_gpu}
    copies = [m for m in measured if m.metric == COPY_RATE and m.axes["rank"] is None and m.value]
    by_device = grouped((m for m in copies if m.runs[0] in devices), lambda m: devices[m.runs[0]])
    return {device: max(own, key=lambda m: float(m.axes["size"] or 0)) for device, own in by_device.items()}


class Floor(NamedTuple):
    """Least time; seconds is None if unknown, and text then says why."""

    seconds: float | None
    text: str
    runs: tuple[str, ...] = ()


def products(cell: Cell) -> Floor:
    """FLOPs of a step on one device, including recomputed ones, at the best product reached there."""
    peak, note = metrics.measured_peak(cell)
    dtype = metrics.compute_dtype(cell)
    if peak is None or (tokens := cell.per("tokens")) is None:
        return Floor(None, _no_ceiling(cell, f"{dtype} products"))
    try:
        flops = metrics.flops_per_token(cell, recomputed=True)
    except RequestError as error:
        return Floor(None, str(error))
    seconds = flops * tokens.value / cell.spec.topology.world_size / peak
    text = f"its products need at least {milliseconds(seconds)} at {note.removeprefix('of ')}"
    return Floor(seconds, text, cell.achievable[dtype].runs)


def optimizer(cell: Cell, copies: Copies) -> Floor:
    """Bytes that Adam must move on one device at the measured copy rate, at most the time of the optimizer phase."""
    devices = {ceilings.device_of(w.record) for w in cell.windows}
    ceiling = copies.get(next(iter(devices))) if len(devices) == 1 and not cell.shared_gpu else None
    if ceiling is None or not ceiling.value:
        return Floor(None, _no_ceiling(cell, "memory copies"))
    strategy, evidence = cell.spec.strategy, cell.windows[0].record.evidence
    parts = None if strategy is None else arithmetic.sharded_parts(strategy)
    if parts is None or evidence is None or cell.spec.tuning:
        return Floor(None, f"the memory traffic of the optimizer of {cell.spec.strategy} is unknown")
    owners = cell.spec.topology.world_size if parts else 1
    per_parameter = ADAM_BYTES + DTYPE_BYTES[cell.spec.training.precision.reduce]
    moved = evidence.parameters * per_parameter / owners
    phase = cell.per("optimizer_s")
    seconds = min(moved / ceiling.value, phase.value if phase else math.inf)
    rate = f"{ceiling.value / 1e9:,.0f} GB/s"
    text = f"the optimizer's {moved / 1e9:.3g} GB need at least {milliseconds(seconds)} at {rate}, the copy rate here"
    return Floor(seconds, text, ceiling.runs)


def _no_ceiling(cell: Cell, what: str) -> str:
    if cell.shared_gpu:
        return SHARED_GPU
    return f"{what} were not measured on this device: {CEILINGS_FROM}" if cell.achievable else NO_CEILINGS


def milliseconds(seconds: float) -> str:
    """Three significant digits, never an exponent.

    >>> milliseconds(1.2504), milliseconds(3.12e-05)
    ('1,250 ms', '0.0312 ms')
    """
    return f"{float(f'{seconds * 1e3:.3g}'):,.12g} ms"


# Shares closer than this are not separated, and a smaller one is never the bottleneck: the profile covers two steps
# outside the window, whose times differ from those of the window by a few percent.
RESOLUTION_RATIO = 0.05
NO_PROFILE = "no step was profiled, so device idle time and exposed communication are unknown"
NO_CLASSES = "the profile does not classify kernels, so dequantisation time is unknown"


def judge(
    cells: Sequence[Cell], records: Sequence[RunRecord], measured: Sequence[Measurement]
) -> tuple[Bottleneck, ...]:
    """One verdict per cell; records and measured are those of the ceilings."""
    copies = copies_by_device(records, measured)
    return tuple(_bottleneck(cell, copies) for cell in cells)


def _bottleneck(cell: Cell, copies: Copies) -> Bottleneck:
    floors = {COMPUTE: products(cell), MEMORY: optimizer(cell, copies)}
    divisions = [_divide(window, floors) for window in cell.windows]
    missing = _missing(cell, floors)
    shown = [kind for kind in BOTTLENECKS if kind != DEQUANTISATION or _is_quantised(cell)]
    shares = tuple(_share(kind, cell, divisions, floors, missing) for kind in shown)
    # Some share is at least this: of kinds that divide time between them, one has no less than the average.
    averages = []
    for division in divisions:
        pools = (
            (time + sum(division.certain.get(k, 0.0) for k in kinds), kinds) for time, kinds in division.unassigned
        )
        averages.append(max((total / len(kinds) for total, kinds in pools), default=0.0))
    leading = max(*(share.low for share in shares), stdlib_statistics.fmean(averages) - _half_width(averages))
    kind, contenders = _verdict(shares, leading, missing)
    return Bottleneck(
        cell=cell.id,
        kind=kind,
        share_ratio=contenders[0].share_ratio if kind in BOTTLENECKS else None,
        evidence=shares,
        text=_text(kind, contenders, missing),
        missing=tuple(dict.fromkeys(missing.values())),
        axes=cell.axes,
        runs=cell.runs,
        told_apart=_is_classified(cell),
    )


def _is_quantised(cell: Cell) -> bool:
    """Whether weights are quantised, by the spec or by what ran."""
    ran = any(t.dequantisation_s for w in cell.windows for t in w.record.traces)
    return ran or _is_qlora(cell.windows[0].record)


def _is_qlora(record: RunRecord) -> bool:
    return record.spec.tuning is not None and record.spec.tuning.method == "qlora"


# --- where one launch's step went ---


class Division(NamedTuple):
    """Shares of a step that certainly belong to a kind, and shares that belong to one of several kinds."""

    certain: Mapping[str, float]
    unassigned: tuple[tuple[float, frozenset[str]], ...]

    def claimable(self, kind: str) -> float:
        return sum(share for share, kinds in self.unassigned if kind in kinds)


class _Pace(NamedTuple):
    """Seconds per profiled step on the rank that waits least for others, which sets the pace.

    matrix_s is products and attention; it and dequantisation_s are None if kernels were not classified.
    """

    compute_s: float
    exposed_s: float
    h2d_s: float
    matrix_s: float | None
    dequantisation_s: float | None


def _divide(window: Window, floors: Mapping[str, Floor]) -> Division:
    """Where the step of one launch went."""
    step_s = float(window.steps[:, STEP_COLUMNS.index("wall")].mean())
    waited = float(window.steps[:, STEP_COLUMNS.index("data_wait_s")].mean())
    wait = None if math.isnan(waited) else waited / step_s
    known = {kind: floor.seconds / step_s for kind, floor in floors.items() if floor.seconds is not None}
    pace = _pace(window.record)
    if pace is None:
        # On a CPU nothing else happens while a batch is awaited; on a GPU the wait may be hidden.
        topology = window.record.spec.topology
        stalled = wait if wait is not None and topology.device == "cpu" else None
        certain = _within(known, 1 - (stalled or 0.0)) | ({} if stalled is None else {INPUT: stalled})
        open_to = {COMPUTE, MEMORY, LAUNCH}
        open_to |= {NETWORK} if topology.world_size > 1 else set()
        open_to |= {DEQUANTISATION} if _is_qlora(window.record) else set()
        open_to |= {INPUT} if stalled is None else set()
        return Division(certain, ((1 - sum(certain.values()), frozenset(open_to)),))
    return _profiled(pace, step_s, wait, known, quantised=_is_qlora(window.record))


def _pace(record: RunRecord) -> _Pace | None:
    ranks = []
    for rank in {trace.rank for trace in record.traces}:
        ours = [t for t in record.traces if t.rank == rank]
        steps = sum(t.steps for t in ours)
        if steps > 0:
            plain = (
                sum(x) / steps for x in zip(*((t.compute_s, t.exposed_s, t.h2d_s or 0.0) for t in ours), strict=True)
            )
            matrix = [_sum(t.products_s, t.attention_s) for t in ours]
            classified = (_sum(*matrix), _sum(*(t.dequantisation_s for t in ours)))
            ranks.append(_Pace(*plain, *(None if x is None else x / steps for x in classified)))
    return min(ranks, key=lambda p: (p.exposed_s, -p.compute_s), default=None)


def _sum(*values: float | None) -> float | None:
    """The sum; None if a value is missing."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _profiled(
    pace: _Pace, step_s: float, wait: float | None, floors: Mapping[str, float], *, quantised: bool
) -> Division:
    """Device times of the profile relative to the step of the window: the profiler slows the host, not the kernels.

    Idle time of the device is first the wait for a batch, then launch overhead.
    """
    busy = (pace.compute_s + pace.exposed_s) / step_s
    fitted = min(1.0, 1 / busy) / step_s if busy > 0 else 0.0  # a profiled step may be the longer one
    idle = 1 - (pace.compute_s + pace.exposed_s) * fitted
    kernels = (pace.compute_s - pace.h2d_s) * fitted
    stalled = 0.0 if wait is None else min(wait, idle)
    if pace.matrix_s is None or pace.dequantisation_s is None:
        known = _within(floors, kernels)
        may_be = {COMPUTE, MEMORY, *((DEQUANTISATION,) if quantised else ())}
    else:
        matrix = min(pace.matrix_s * fitted, kernels)
        dequantisation = min(pace.dequantisation_s * fitted, kernels - matrix)
        known = {
            COMPUTE: min(floors.get(COMPUTE, 0.0), matrix),
            DEQUANTISATION: dequantisation,
            MEMORY: kernels - matrix - dequantisation,
        }
        may_be = {COMPUTE, MEMORY}
    certain = {
        **known,
        NETWORK: pace.exposed_s * fitted,
        INPUT: pace.h2d_s * fitted + stalled,
        LAUNCH: 0.0 if wait is None else idle - stalled,
    }
    rest = kernels - sum(known.values())
    gaps = ((idle, frozenset((INPUT, LAUNCH))),) if wait is None else ()
    return Division(certain, ((rest, frozenset(may_be)), *gaps))


def _within(floors: Mapping[str, float], limit: float) -> dict[str, float]:
    """Scale floors to fit the available time: a ceiling measured too low would give floors above it."""
    total = sum(floors.values())
    factor = limit / total if total > limit else 1.0
    return {kind: share * factor for kind, share in floors.items()}


# --- shares and the verdict ---


def _missing(cell: Cell, floors: Mapping[str, Floor]) -> dict[str, str]:
    """Why a kind has no number, by kind."""
    found = {kind: floor.text for kind, floor in floors.items() if floor.seconds is None}
    if cell.shared_gpu:
        return dict.fromkeys(BOTTLENECKS, SHARED_GPU)
    if _is_classified(cell):
        found.pop(MEMORY, None)
    elif _is_quantised(cell):
        found[DEQUANTISATION] = NO_CLASSES
    if any(_pace(w.record) is None for w in cell.windows):
        on_gpu, alone = cell.spec.topology.device == "cuda", cell.spec.topology.world_size == 1
        blind = [LAUNCH, *(() if alone else (NETWORK,)), *((INPUT,) if on_gpu else ())]
        found |= dict.fromkeys(blind, NO_PROFILE)
    if cell.per("data_wait_s") is None:
        found |= {kind: "the wait for data was not recorded" for kind in (INPUT, LAUNCH) if kind not in found}
    return found


def _is_classified(cell: Cell) -> bool:
    return all((pace := _pace(w.record)) and pace.matrix_s is not None for w in cell.windows)


def _share(
    kind: str, cell: Cell, divisions: Sequence[Division], floors: Mapping[str, Floor], missing: Mapping[str, str]
) -> ShareOfStep:
    certain = [d.certain.get(kind, 0.0) for d in divisions]
    value, half = stdlib_statistics.fmean(certain), _half_width(certain)
    claimable = stdlib_statistics.fmean(d.claimable(kind) for d in divisions)
    floor = None if kind == MEMORY and _is_classified(cell) else floors.get(kind)
    return ShareOfStep(
        kind=kind,
        share_ratio=None if kind in missing else value,
        low=max(0.0, value - half),
        high=min(1.0, value + half + claimable),
        text=missing.get(kind) or (floor.text if floor else _measured_text(kind, value, cell)),
        runs=(*cell.runs, *(floor.runs if floor else ())),
    )


def _half_width(values: Sequence[float]) -> float:
    """Half of the 95 % interval over launches; 0 for one launch, whose spread is unknown."""
    # The second is exact, and takes a hundredth of the time.
    if len(values) < 2 or values.count(values[0]) == len(values):
        return 0.0
    return student_t(len(values) - 1) * stdlib_statistics.stdev(values) / math.sqrt(len(values))


def _verdict(
    shares: Sequence[ShareOfStep], leading: float, missing: Mapping[str, str]
) -> tuple[str, list[ShareOfStep]]:
    """The kind, and the competing shares, largest first."""
    threshold = max(leading - RESOLUTION_RATIO, RESOLUTION_RATIO)
    contenders = sorted((s for s in shares if s.high > threshold), key=lambda s: (-(s.share_ratio or 0.0), -s.high))
    if any(s.kind in missing for s in contenders):
        return UNDECIDED, contenders
    if len(contenders) == 1:
        return contenders[0].kind, contenders
    return f"between {listed([s.kind for s in contenders])}", contenders


# --- texts ---


def _measured_text(kind: str, share: float, cell: Cell) -> str:
    wall = cell.per("wall")
    took = milliseconds(share * (wall.value if wall else 0.0))
    if kind == NETWORK and cell.spec.topology.world_size == 1:
        return "one process does not communicate"
    return {
        NETWORK: f"{took} of exposed communication, on the rank that waits least",
        MEMORY: f"{took} in kernels without a matrix product: norms, activations, the loss, the optimizer, copies",
        DEQUANTISATION: f"{took} converting quantised weights for the matrix products",
        INPUT: f"{took} waiting for batches and copying them",
    }.get(kind, f"the device was idle for {took} while the host prepared its work")


def _text(kind: str, contenders: Sequence[ShareOfStep], missing: Mapping[str, str]) -> str:
    first = contenders[0]
    if kind in BOTTLENECKS:
        return f"{kind}, at least {first.share_ratio:.0%} of the step: {first.text}."
    if kind == UNDECIDED:
        reasons = dict.fromkeys(missing[s.kind] for s in contenders if s.kind in missing)
        return f"undecided between {listed([s.kind for s in contenders])}: {'; '.join(reasons)}."
    spans = "; ".join(f"{s.kind} {s.low:.0%} to {s.high:.0%} ({s.text})" for s in contenders)
    return f"{kind}: their shares of the step overlap: {spans}."
