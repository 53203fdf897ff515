"""How well more processes pay, and where the rest of the step went."""

from __future__ import annotations

from paceline.analysis.findings import Report, ScalingExplanation, ScalingPoint
from paceline.analysis.findings.cell_axes import describe
from paceline.report.tables.table import Cell, Column, Table
from paceline.report.text.cells import axes_of
from paceline.wording import MISSING, TIMES, Scale, format_number, format_parts, places, scale_of

_TONES = {"excellent": "good", "good": "good", "poor": "bad"}
_MS, _PERCENT = Scale("ms", 1e3), Scale("%", 100.0)


def efficiency(report: Report) -> Table | None:
    """Efficiency of each point and its measured baseline; its grade if the loss is explained."""
    known = {(e.kind, e.cell): e for e in report.explanations}
    points = sorted(report.scaling, key=lambda p: (p.kind, p.series, p.world_size))
    columns = [
        Column("series", prose=True),
        Column("kind"),
        Column("world size", numeric=True),
        Column("measured baseline", priority=3 if known else 0),
        Column("speed-up", numeric=True),
        Column("efficiency, %", numeric=True),
    ]
    rows = [_point(report, p) for p in points]
    if known:
        columns.append(Column("grade", priority=1))
        rows = [(*row, _grade(known.get((p.kind, p.cell)))) for p, row in zip(points, rows, strict=True)]
    if any(e.karp_flatt_ratio is not None for e in report.explanations):
        columns.append(Column("Karp-Flatt, %", numeric=True, priority=2))
        rows = [(*row, _serial(known.get((p.kind, p.cell)))) for p, row in zip(points, rows, strict=True)]
    notes = dict.fromkeys(p.efficiency.note for p in report.scaling if p.efficiency.note)
    about = tuple((p.cell,) for p in points)
    return Table("Scaling", tuple(columns), tuple(rows), tuple(notes), about) if rows else None


def _point(report: Report, p: ScalingPoint) -> tuple[Cell, ...]:
    m = p.efficiency
    speedup = format_parts(p.speedup_ratio, None, None)[0] + TIMES
    shown = Cell(*format_parts(m.value, m.low, m.high, scale_of(m.unit, m.metric)))
    base = Cell(baseline_name(report, p.baseline))
    return Cell(p.series), Cell(p.kind), Cell(str(p.world_size)), base, Cell(speedup), shown


def _grade(found: ScalingExplanation | None) -> Cell:
    return Cell(found.grade, "", _TONES.get(found.grade, "quiet")) if found else Cell(MISSING)


def _serial(found: ScalingExplanation | None) -> Cell:
    return Cell(_number(found.karp_flatt_ratio if found else None, _PERCENT))


def baseline_name(report: Report, cell: str) -> str:
    """`ddp, 1 process`; the text itself where it names no cell of this report."""
    axes = axes_of(report, cell)
    return describe(axes, ("world_size",)) if axes else cell


def explanation(report: Report) -> Table | None:
    """Where the step of each point went, in ms; the largest of each series in words below."""
    found = sorted(report.explanations, key=lambda e: (e.kind, e.series, e.world_size))
    traffic = scale_of("bytes/step", "wire", [_sent(e) for e in found])
    columns = (
        Column("series", prose=True),
        Column("kind"),
        Column("world size", numeric=True),
        Column("step, ms", numeric=True),
        Column("ideal, ms", numeric=True),
        Column("exposed comm., ms", numeric=True),
        Column("rest, ms", numeric=True),
        Column("exposed, % of the loss", numeric=True),
        Column("network, % of the loss", numeric=True, priority=1),
        Column(f"sent, {traffic.unit}", numeric=True, priority=2),
        Column("predicted transfer, ms", numeric=True, priority=2),
    )
    rows = tuple(_explained(e, traffic) for e in found)
    last = {(e.kind, e.series): e for e in found}
    words = [f"{e.series}, {e.kind}: {e.text}" for e in last.values()]
    notes = dict.fromkeys((*words, *(note for e in found for note in e.notes)))
    about = tuple((e.cell,) for e in found)
    return Table("Where the step time goes", columns, rows, tuple(notes), about) if rows else None


def _explained(e: ScalingExplanation, traffic: Scale) -> tuple[Cell, ...]:
    """Exposed communication is what came on top of the baseline's; all parts in the same decimals, so that they add."""
    digits = places(e.step_s * 1e3, None, None)
    parts = (e.step_s, e.ideal_s, e.exposed_loss_s, e.rest_s)
    return (
        Cell(e.series),
        Cell(e.kind),
        Cell(str(e.world_size)),
        *(Cell(format_number(_MS.apply(part), digits)) for part in parts),
        *(Cell(_number(share, _PERCENT)) for share in (e.exposed_share_ratio, e.network_share_ratio)),
        Cell(_number(_sent(e), traffic)),
        Cell(_number(e.predicted_s, _MS)),
    )


def _sent(e: ScalingExplanation) -> float | None:
    """None as soon as one operation's is unknown, or nothing was counted."""
    known = [t.sent_bytes for t in e.traffic if t.sent_bytes is not None]
    return sum(known) if known and len(known) == len(e.traffic) else None


def _number(value: float | None, scale: Scale) -> str:
    return format_parts(value, None, None, scale)[0]
