"""Why more processes are not as fast as they could be: exposed communication, what the fabric predicts, and the rest.

Nothing is guessed: exposed communication comes from the profile, wire bytes from the counted step, predicted times from
the alpha-beta fits of a sweep on the same kind of device and the same number of ranks; what was not measured is None.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.analysis.compare.recommend import GLOO
from paceline.analysis.compare.scaling import STRONG
from paceline.analysis.findings import SHARED_GPU, CollectiveFit, ScalingExplanation, ScalingPoint, Traffic
from paceline.analysis.machine.ceilings import device_names
from paceline.analysis.machine.sweep import factor_of
from paceline.analysis.training import metrics
from paceline.analysis.training.metrics import Cell, device_kind
from paceline.errors import Scalar
from paceline.experiment.choices import Choice
from paceline.results.records import RunRecord, WireSample

EXCELLENT, GOOD = 0.9, 0.8
BACK_ENDS: Mapping[str, str] = {"cpu": "gloo", "cuda": "nccl"}  # training uses no other
# torch's own calls work on the buffer they are given; the others write to another one.
_IN_PLACE = ("all_reduce", "broadcast", "reduce")
WAITING_RATIO = 1.25  # exposed time beyond the predicted by more than this is said to be waiting


def explain(
    points: Sequence[ScalingPoint], cells: Sequence[Cell], fits: Sequence[CollectiveFit], records: Sequence[RunRecord]
) -> tuple[ScalingExplanation, ...]:
    """One explanation per point beyond its baseline."""
    by_id = {cell.id: cell for cell in cells}
    kinds = {
        record.spec.run_id: device_names(record.spec.topology.device, record.machines)
        for record in records
        if record.collectives
    }
    usable = [
        _Fit(fit, kinds[fit.runs[0]]) for fit in fits if fit.runs[0] in kinds and SHARED_GPU not in (fit.note or "")
    ]
    grown = [p for p in points if p.world_size != p.baseline_world_size]
    return tuple(_explanation(p, by_id[p.cell], by_id[p.baseline], usable) for p in grown)


class _Fit(NamedTuple):
    fit: CollectiveFit
    device_kind: str


@dataclass(frozen=True, slots=True)
class _Split:
    """Seconds per optimizer step; None is not measured."""

    step_s: float
    ideal_s: float
    exposed_s: float | None
    exposed_loss_s: float | None
    certain: bool

    @property
    def loss_s(self) -> float:
        return self.step_s - self.ideal_s

    @property
    def rest_s(self) -> float | None:
        return None if self.exposed_loss_s is None else self.loss_s - self.exposed_loss_s

    @property
    def is_loss(self) -> bool:
        return self.certain and self.loss_s > 0

    def share(self, seconds: float | None) -> float | None:
        """Of the loss, where there is one beyond chance."""
        return None if seconds is None or not self.is_loss else min(max(seconds / self.loss_s, 0.0), 1.0)

    def transfer_s(self, added_s: float | None) -> float | None:
        """What of the newly exposed time the fabric needs more than at the baseline: waiting looks exposed too."""
        if self.exposed_loss_s is None or added_s is None:
            return None
        return min(self.exposed_loss_s, added_s)


def _explanation(point: ScalingPoint, cell: Cell, baseline: Cell, fits: Sequence[_Fit]) -> ScalingExplanation:
    split = _split(point, cell, baseline)
    traffic, notes = _traffic(cell, fits)
    predicted = _predicted_s(traffic)
    before = _predicted_s(_traffic(baseline, fits)[0]) if point.baseline_world_size > 1 else 0.0
    added = None if predicted is None or before is None else max(predicted - before, 0.0)
    efficiency = point.efficiency
    return ScalingExplanation(
        kind=point.kind,
        series=point.series,
        cell=point.cell,
        baseline=point.baseline,
        world_size=point.world_size,
        baseline_world_size=point.baseline_world_size,
        step_s=split.step_s,
        ideal_s=split.ideal_s,
        loss_s=split.loss_s,
        exposed_s=split.exposed_s,
        exposed_loss_s=split.exposed_loss_s,
        rest_s=split.rest_s,
        predicted_s=predicted,
        exposed_share_ratio=split.share(split.exposed_loss_s),
        network_share_ratio=split.share(split.transfer_s(added)),
        karp_flatt_ratio=karp_flatt(point.speedup_ratio, point.world_size / point.baseline_world_size)
        if point.kind == STRONG
        else None,
        grade=grade(efficiency.value or 0.0, efficiency.low, efficiency.high),
        traffic=traffic,
        text=_text(split, predicted, added, cell),
        notes=notes,
        runs=efficiency.runs,
    )


def _predicted_s(traffic: Sequence[Traffic]) -> float | None:
    """Of all collectives of a step, where every one has a fit."""
    known = [t.predicted_s for t in traffic if t.predicted_s is not None]
    return sum(known) if traffic and len(known) == len(traffic) else None


def karp_flatt(speedup: float, growth: float) -> float:
    """e = (1/psi - 1/p) / (1 - 1/p): the part of the baseline's time that did not shrink (Karp and Flatt, 1990).

    p = N/N0 and psi = T_N/T_N0, so one process is no condition; below 0 the speed-up is more than p.
    """
    return (1 / speedup - 1 / growth) / (1 - 1 / growth)


def grade(value: float, low: float | None, high: float | None) -> str:
    """By the whole interval: `between good and excellent` where it spans a limit; by the value where there is none."""
    worst, best = _word(value if low is None else low), _word(value if high is None else high)
    return worst if worst == best else f"between {worst} and {best}"


def _word(efficiency: float) -> str:
    return "excellent" if efficiency > EXCELLENT else "good" if efficiency > GOOD else "poor"


# --- where the time went ---


def _split(point: ScalingPoint, cell: Cell, baseline: Cell) -> _Split:
    """Wall seconds per step, because efficiency is of wall time too: ideal = step * efficiency, exactly."""
    wall = cell.per("wall")
    assert wall is not None, "a scaling point has a throughput, so it has wall time"
    step_s, efficiency = wall.value, point.efficiency.value or 0.0
    ideal_s = step_s * efficiency
    ratio, before = _exposed_ratio(cell), _exposed_ratio(baseline)
    exposed = None if ratio is None else ratio * step_s
    # The baseline's own exposed share is part of the ideal step: only what came on top of it can explain the loss.
    on_top = None if exposed is None or before is None else exposed - before * ideal_s
    high = point.efficiency.high
    return _Split(step_s, ideal_s, exposed, on_top, efficiency < 1 if high is None else high < 1)


def _exposed_ratio(cell: Cell) -> float | None:
    """One process has nobody to talk to: 0, profiled or not."""
    if cell.spec.topology.world_size == 1:
        return 0.0
    found = metrics.estimate(cell, "comm_exposed_ratio")
    return found.value if found else None


# --- what crossed the wire, and what the fabric needs for it ---


def _traffic(cell: Cell, fits: Sequence[_Fit]) -> tuple[tuple[Traffic, ...], tuple[str, ...]]:
    """The busiest rank's collectives per step, each with its predicted time, and what a reader should know of it."""
    samples, steps = _busiest(cell.windows[0].record.wire)
    merged: defaultdict[tuple[str, str, int], list[WireSample]] = defaultdict(list)
    for w in samples:
        merged[w.operation, w.dtype, w.group_size].append(w)
    found, notes = [], []
    for (operation, dtype, size), ours in merged.items():
        calls, payload = sum(w.calls for w in ours) // steps, sum(w.payload_bytes for w in ours) // steps
        factor = factor_of(operation, size)
        fit = _fit_for(operation, dtype, size, cell, fits)
        sent = None if factor is None else payload * factor
        found.append(
            Traffic(
                operation=operation,
                dtype=dtype,
                group_size=size,
                calls=calls,
                payload_bytes=payload,
                sent_bytes=sent,
                predicted_s=_predicted(fit, calls, sent),
            )
        )
        if fit and fit.dtype != dtype:
            notes.append(f"{operation} in {dtype} is predicted by its fit in {fit.dtype}")
        if operation == "reduce_scatter" and cell.spec.topology.device == "cpu":
            notes.append(GLOO)
    return tuple(found), tuple(dict.fromkeys(notes))


def _predicted(fit: CollectiveFit | None, calls: int, sent_bytes: float | None) -> float | None:
    if fit is None or sent_bytes is None:
        return None
    return calls * fit.alpha_s + sent_bytes / fit.beta_bytes_per_s


def _busiest(wire: Sequence[WireSample]) -> tuple[list[WireSample], int]:
    """The samples of the rank that sent most, and how many steps they cover."""
    sent: defaultdict[int, float] = defaultdict(float)
    for w in wire:
        sent[w.rank] += w.payload_bytes * (factor_of(w.operation, w.group_size) or 0.0)
    rank = max(sent, key=lambda r: sent[r], default=None)
    ours = [w for w in wire if w.rank == rank]
    return ours, max(len({w.step for w in ours}), 1)


def _fit_for(operation: str, dtype: str, size: int, cell: Cell, fits: Sequence[_Fit]) -> CollectiveFit | None:
    """Of the same operation and ranks on the same kind of device; the same dtype and place are preferred."""
    places: Mapping[str, object] = {"device": cell.spec.topology.device, "nodes": cell.spec.topology.nodes}
    kind = device_kind(cell)
    alike = [
        fit
        for fit, fitted_kind in fits
        if (fit.operation, fit.world_size) == (operation, size)
        and fitted_kind == kind
        and _back_end(fit) == BACK_ENDS[cell.spec.topology.device]
        and all(fit.axes.get(name) == value for name, value in places.items())
    ]
    return min(alike, key=lambda f: (f.dtype != dtype, f.in_place != (operation in _IN_PLACE)), default=None)


def _back_end(fit: CollectiveFit) -> Scalar:
    """What the sweep asked for, else the device's own."""
    asked = Choice.parse(str(fit.axes["workload"])).options.get("backend")
    return asked or BACK_ENDS[str(fit.axes["device"])]


# --- words ---


def _text(split: _Split, predicted: float | None, added: float | None, cell: Cell) -> str:
    n = cell.spec.topology.world_size
    noun = "GPUs" if cell.spec.topology.device == "cuda" else "processes"
    efficiency = split.ideal_s / split.step_s
    start = f"{n} {noun} take {_ms(split.step_s)} per step where {_ms(split.ideal_s)} would be ideal ({efficiency:.1%})"
    if not split.is_loss:
        return f"{start}: no loss beyond chance."
    return " ".join(filter(None, (f"{start}: {_loss(split)}", _prediction(split, predicted, added))))


def _loss(split: _Split) -> str:
    if split.exposed_loss_s is None or split.rest_s is None:
        return "how much of the loss is communication was not measured."
    if split.exposed_loss_s <= 0:
        return "none of the loss is exposed communication; the step itself got slower."
    if split.rest_s <= 0:
        return f"exposed communication accounts for all of the {_ms(split.loss_s)} lost."
    return (
        f"{_ms(split.exposed_loss_s)} of the {_ms(split.loss_s)} lost ({split.share(split.exposed_loss_s):.0%}) are "
        f"communication that nothing hides, {_ms(split.rest_s)} a step that got slower by itself."
    )


def _prediction(split: _Split, predicted_s: float | None, added_s: float | None) -> str:
    """Tells transfer from waiting where a sweep of this fabric allows it."""
    exposed = split.exposed_s
    if predicted_s is None:
        unknown = "No sweep of this fabric is here to tell transfer from waiting for other ranks."
        return unknown if exposed and split.exposed_loss_s and split.exposed_loss_s > 0 else ""
    start = f"By the fits of this fabric the collectives of a step need {_ms(predicted_s)}"
    if exposed is None or split.exposed_loss_s is None:
        return f"{start}."
    share = split.share(split.transfer_s(added_s))
    if exposed > WAITING_RATIO * predicted_s and share is not None:
        return f"{start}: the network accounts for at most {share:.0%} of the loss, the rest of that is waiting."
    if exposed < predicted_s:
        return f"{start}, of which about {_ms(predicted_s - exposed)} are hidden."
    return f"{start}, about what is exposed: nothing of it is hidden."


def _ms(seconds: float) -> str:
    """Three digits, never an exponent: `1,250 ms`, `0.0312 ms`."""
    return f"{float(f'{seconds * 1e3:.3g}'):,.12g} ms"
