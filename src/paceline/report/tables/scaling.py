"""Scaling efficiency, and where the rest of the step time goes."""

from __future__ import annotations

from paceline.analysis.findings import Report, ScalingExplanation, ScalingPoint
from paceline.analysis.findings.cell_axes import describe
from paceline.report.tables.table import Cell, Column, Filled, Table, filled, numeric
from paceline.report.text.cells import axes_of
from paceline.wording import MISSING, TIMES, Scale, format_number, format_parts, places, scale_of

_TONES = {"excellent": "good", "good": "good", "poor": "bad"}
_MS, _PERCENT = Scale("ms", 1e3), Scale("%", 100.0)


def efficiency(report: Report) -> Table | None:
    """Efficiency of each point and its measured baseline; its grade if the loss is explained."""
    known = {(e.kind, e.cell): e for e in report.explanations}

    def shown(p: ScalingPoint) -> Cell:
        m = p.efficiency
        return Cell(*format_parts(m.value, m.low, m.high, scale_of(m.unit, m.metric)))

    def grade(p: ScalingPoint) -> Cell:
        found = known.get((p.kind, p.cell))
        return Cell(found.grade, "", _TONES.get(found.grade, "quiet")) if found else Cell(MISSING)

    def serial(p: ScalingPoint) -> str:
        found = known.get((p.kind, p.cell))
        return _number(found.karp_flatt_ratio if found else None, _PERCENT)

    columns: list[Filled[ScalingPoint]] = [
        (Column("series", prose=True), lambda p: p.series),
        (Column("kind"), lambda p: p.kind),
        (numeric("world size"), lambda p: str(p.world_size)),
        (Column("measured baseline", priority=3 if known else 0), lambda p: baseline_name(report, p.baseline)),
        (numeric("speed-up"), lambda p: format_parts(p.speedup_ratio, None, None)[0] + TIMES),
        (numeric("efficiency, %"), shown),
    ]
    if known:
        columns.append((Column("grade", priority=1), grade))
    if any(e.karp_flatt_ratio is not None for e in report.explanations):
        columns.append((numeric("Karp-Flatt, %", 2), serial))
    notes = dict.fromkeys(p.efficiency.note for p in report.scaling if p.efficiency.note)
    points = sorted(report.scaling, key=lambda p: (p.kind, p.series, p.world_size))
    return filled("Scaling", points, columns, notes, lambda p: (p.cell,))


def baseline_name(report: Report, cell: str) -> str:
    """`ddp, 1 process`; the argument itself if it is not a cell of this report."""
    axes = axes_of(report, cell)
    return describe(axes, ("world_size",)) if axes else cell


def explanation(report: Report) -> Table | None:
    """Where the step of each point went, in ms; the largest of each series in words below.

    Exposed communication is what exceeds the baseline's. All parts have the same decimals, so that they add up.
    """
    found = sorted(report.explanations, key=lambda e: (e.kind, e.series, e.world_size))
    traffic = scale_of("bytes/step", "wire", [_sent(e) for e in found])

    def part(e: ScalingExplanation, seconds: float | None) -> str:
        return format_number(_MS.apply(seconds), places(e.step_s * 1e3, None, None))

    columns: tuple[Filled[ScalingExplanation], ...] = (
        (Column("series", prose=True), lambda e: e.series),
        (Column("kind"), lambda e: e.kind),
        (numeric("world size"), lambda e: str(e.world_size)),
        (numeric("step, ms"), lambda e: part(e, e.step_s)),
        (numeric("ideal, ms"), lambda e: part(e, e.ideal_s)),
        (numeric("exposed comm., ms"), lambda e: part(e, e.exposed_loss_s)),
        (numeric("rest, ms"), lambda e: part(e, e.rest_s)),
        (numeric("exposed, % of the loss"), lambda e: _number(e.exposed_share_ratio, _PERCENT)),
        (numeric("network, % of the loss", 1), lambda e: _number(e.network_share_ratio, _PERCENT)),
        (numeric(f"sent, {traffic.unit}", 2), lambda e: _number(_sent(e), traffic)),
        (numeric("predicted transfer, ms", 2), lambda e: _number(e.predicted_s, _MS)),
    )
    last = {(e.kind, e.series): e for e in found}
    words = [f"{e.series}, {e.kind}: {e.text}" for e in last.values()]
    notes = dict.fromkeys((*words, *(note for e in found for note in e.notes)))
    return filled("Where the step time goes", found, columns, notes, lambda e: (e.cell,))


def _sent(e: ScalingExplanation) -> float | None:
    """Bytes sent per step; None if those of an operation are unknown, or nothing was counted."""
    known = [t.sent_bytes for t in e.traffic if t.sent_bytes is not None]
    return sum(known) if known and len(known) == len(e.traffic) else None


def _number(value: float | None, scale: Scale) -> str:
    return format_parts(value, None, None, scale)[0]
