"""What a checkpoint costs, and the goodput that gives at a stated failure rate or on spot capacity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.analysis.findings import CheckpointCost, ExpectedGoodput, Report, SpotOffer
from paceline.analysis.findings.cell_axes import describe, distinguishing_axes
from paceline.errors import Scalar
from paceline.report.tables.table import Cell, Column, Filled, Table, filled, numeric
from paceline.wording import MISSING, format_duration, format_size

_NOTES = (
    "Pause: no step runs. Lost: the pause, and what steps take longer than in the same cell without checkpoints; 95 % "
    "interval over launches. Restart: detection, start and loading, per restart, after ranks "
    "were killed or the command was repeated.",
)
_FORMULA = (
    "Goodput by Daly (2006) for failures at random times: interval / (M e^(restart/M) (e^((interval + lost)/M) - 1)), "
    "M: mean time between failures. Young's interval is sqrt(2 lost M); Daly's adds higher terms.",
)


def tables(report: Report) -> tuple[Table, ...]:
    """The measured cost of checkpoints; empty if no run wrote one."""
    named = _named([cost.axes for cost in report.checkpoints])
    columns: tuple[Filled[CheckpointCost], ...] = (
        (Column("cell", prose=True), lambda row: describe(row.axes, named)),
        (Column("written"), _how),
        (numeric("every, steps"), lambda row: str(row.every)),
        (numeric("pause, s"), lambda row: f"{row.pause_s:.3g}"),
        (numeric("lost per checkpoint, s"), _lost),
        (numeric("restart, s"), lambda row: _seconds(row.restart_s)),
        (numeric("redone, s", 1), lambda row: _seconds(row.redone_s)),
        (numeric("goodput, %", 1), lambda row: _percent(row.goodput_ratio)),
        (numeric("size", 2), lambda row: MISSING if row.bytes is None else format_size(row.bytes)),
    )
    notes = list(_NOTES)
    if any(not row.is_beside_none for row in report.checkpoints):
        notes.append(
            "Cells that were not measured without checkpoints have the pause as lost time: add null to the axis."
        )
    notes.append("`paceline goodput DIR --mtbf 24h` finds the best interval and the goodput at a failure rate.")
    table = filled("Checkpoints", report.checkpoints, columns, notes, lambda row: (row.cell,))
    return (table,) if table is not None else ()


def _steps(count: int) -> str:
    """A number of steps in words.

    >>> _steps(1), _steps(1200)
    ('1 step', '1,200 steps')
    """
    return f"{count:,} step{'' if count == 1 else 's'}"


def expected(rows: Sequence[ExpectedGoodput]) -> Table | None:
    """Goodput at the chosen interval and at the best one."""
    named = _named([row.cost.axes for row in rows])
    columns: tuple[Filled[ExpectedGoodput], ...] = (
        (Column("cell", prose=True), lambda row: describe(row.cost.axes, named)),
        (Column("written"), lambda row: _how(row.cost)),
        (Column("failures", prose=True), lambda row: f"one in {format_duration(row.mtbf_s)}"),
        (numeric("interval"), lambda row: format_duration(row.chosen_s)),
        (numeric("goodput, %"), lambda row: _percent(row.chosen_ratio)),
        (numeric("Daly's interval"), lambda row: Cell(format_duration(row.daly_s), f"({_steps(row.daly_steps)})")),
        (numeric("goodput there, %"), lambda row: _percent(row.daly_ratio)),
        (numeric("Young's interval", 1), lambda row: format_duration(row.young_s)),
        (numeric("restart, s", 1), lambda row: _seconds(row.restart_s)),
    )
    return filled("Goodput at this failure rate", rows, columns, _FORMULA, lambda row: (row.cost.cell,))


def spot(rows: Sequence[SpotOffer]) -> Table | None:
    """On demand against spot, per hour of steps that count."""
    named = _named([row.cost.axes for row in rows])
    columns: tuple[Filled[SpotOffer], ...] = (
        (Column("cell", prose=True), lambda row: describe(row.cost.axes, named)),
        (Column("written"), lambda row: _how(row.cost)),
        (numeric("on demand, USD per useful hour"), lambda row: f"{row.usd_per_useful_h:.3g}"),
        (numeric("spot, USD per useful hour"), lambda row: f"{row.spot_usd_per_useful_h:.3g}"),
        (numeric("spot goodput, %"), lambda row: _percent(row.spot_ratio)),
        (numeric("spot pays up to, interruptions/h"), _break_even),
    )
    note = "Each at its own best interval. The restart time is as measured or given: new capacity may take longer."
    return filled("Spot capacity", rows, columns, (note,), lambda row: (row.cost.cell,))


def sentence(rows: Sequence[ExpectedGoodput], offers: Sequence[SpotOffer]) -> str:
    """The cell with the highest goodput, and what spot capacity saves."""
    best = max(rows, key=lambda row: row.daly_ratio)
    name = describe(best.cost.axes, _named([row.cost.axes for row in rows]))
    text = (
        f"{name}, written {_how(best.cost)}: {best.daly_ratio:.1%} goodput with a checkpoint every "
        f"{format_duration(best.daly_s)} ({_steps(best.daly_steps)}), {best.chosen_ratio:.1%} as chosen (every "
        f"{_steps(best.cost.every)})."
    )
    offer = next((offer for offer in offers if offer.cost is best.cost), None)
    if offer is None:
        return text
    saved = 1 - offer.spot_usd_per_useful_h / offer.usd_per_useful_h
    word = f"costs {saved:.0%} less" if saved > 0 else f"costs {-saved:.0%} more"
    return f"{text} Spot capacity {word} per hour of steps that count."


def _named(axes: Sequence[Mapping[str, Scalar]]) -> list[str]:
    named = distinguishing_axes(axes) if axes else ()
    return [name for name in named if name not in ("checkpoint_async", "checkpoint_every")]


def _how(row: CheckpointCost) -> str:
    return "in the background" if row.is_async else "between steps"


def _lost(row: CheckpointCost) -> Cell:
    low, high = row.lost_low_s, row.lost_high_s
    interval = f"[{low:.3g}, {high:.3g}]" if low is not None and high is not None else ""
    return Cell(f"{row.lost_s:.3g}", interval)


def _seconds(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3g}"


def _percent(ratio: float | None) -> str:
    return MISSING if ratio is None else f"{100 * ratio:.1f}"


def _break_even(row: SpotOffer) -> str:
    return MISSING if row.break_even_per_h is None else f"{row.break_even_per_h:.2g}"
