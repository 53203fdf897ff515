"""A replay as text: the verdict in one sentence, each cell's metrics beside the stored ones, and what else differs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from paceline.analysis.findings.reproduction import (
    CellReproduction,
    Remeasured,
    ReplayVerdict,
    Reproduction,
    Trajectory,
)
from paceline.report.tables.table import CROSS, TICK, Cell, Column, Table
from paceline.report.text.measurements import format_measurement
from paceline.wording import DIGITS_OF_RATIO, MISSING, TIMES, format_number, places

if TYPE_CHECKING:
    from rich.console import RenderableType

_TONES = {True: "good", False: "bad", None: "quiet"}
_MARKS = {True: f"{TICK} within", False: f"{CROSS} beyond", None: "undecided"}
MOST_DIFFERENCES = 12


def reproduction_table(found: Reproduction) -> RenderableType | None:
    """For a terminal; None if no metric was compared."""
    from paceline.report.terminal import Fitted

    table = metrics_table(found)
    return Fitted(table) if table.rows else None


def metrics_table(found: Reproduction) -> Table:
    rows = tuple(
        (
            Cell(cell.label),
            Cell(m.metric),
            Cell(format_measurement(m.stored) if m.stored else MISSING),
            Cell(format_measurement(m.replayed) if m.replayed else MISSING),
            _ratio(m),
            Cell(_MARKS[m.within], "", _TONES[m.within]),
            Cell(m.reason),
        )
        for cell in found.cells
        for m in cell.metrics
    )
    columns = (Column("cell", prose=True), Column("metric"), Column("stored", True, 2), Column("replayed", True, 2))
    return Table(
        "Replayed over stored", (*columns, Column("ratio"), Column("verdict"), Column("reason", priority=1)), rows
    )


def _ratio(m: Remeasured) -> Cell:
    if m.ratio is None:
        return Cell(MISSING)
    digits = min(places(m.ratio, m.low, m.high), DIGITS_OF_RATIO)
    interval = ""
    if m.low is not None and m.high is not None:
        interval = f"[{format_number(m.low, digits)}, {format_number(m.high, digits)}]"
    return Cell(f"{format_number(m.ratio, digits)}{TIMES}", interval, _TONES[m.within])


def reproduction_lines(found: Reproduction) -> Iterator[str]:
    """One line per cell and proof, then the machines, then the verdict."""
    for cell in found.cells:
        yield f"{cell.verdict}: {cell.label}: {cell.reason}"
        if cell.certificate is not None and cell.trajectory is not None:
            yield f"  {_work_line(cell, cell.trajectory)}"
    yield from _machine_lines(found)
    yield verdict_sentence(found)


def _work_line(cell: CellReproduction, losses: Trajectory) -> str:
    checks = {check.name: check.ok for check in cell.certificate.checks} if cell.certificate else {}
    exact = [
        f"{name} {'equal' if checks[name] else 'UNEQUAL'}" for name in ("initial weights", "data") if name in checks
    ]
    if losses.equal_steps == losses.steps:
        loss = f"the loss of all {losses.steps} steps equal to the last bit"
    else:
        loss = f"the loss within {losses.largest_ratio:.2g} of the stored one at {losses.steps} steps"
    proof = f"{sum(checks.values())} of {len(checks)} checks hold against the stored reference"
    return "; ".join((proof, *exact, loss))


def _machine_lines(found: Reproduction) -> Iterator[str]:
    """Once where every cell that ran says the same."""
    ran = [cell for cell in found.cells if cell.verdict is not ReplayVerdict.UNSUPPORTED and cell.replayed_runs]
    if not ran:
        return
    if all(cell.differences == ran[0].differences for cell in ran):
        yield difference_line("the machine", ran[0].differences)
        return
    for cell in ran:
        yield difference_line(f"the machine of {cell.label}", cell.differences)


def difference_line(what: str, differences: Any) -> str:
    """Each fact as `stored, now`; what a side does not have is a dash."""
    if not differences:
        return f"{what} is the same by every recorded fact"
    shown = [f"{path} {_fact(a)}, now {_fact(b)}" for path, (a, b) in differences.items()]
    more = f"; and {len(shown) - MOST_DIFFERENCES} more" if len(shown) > MOST_DIFFERENCES else ""
    return f"{what} differs: {'; '.join(shown[:MOST_DIFFERENCES])}{more}"


def _fact(value: object) -> str:
    return MISSING if value is None else str(value)


def verdict_sentence(found: Reproduction) -> str:
    """What was reproduced, how much this data could have missed, and what was not."""
    total, good = len(found.cells), found.count(ReplayVerdict.REPRODUCED)
    if found.count(ReplayVerdict.UNSUPPORTED) == total:
        return f"Not replayed: this machine can run none of the {total} cells."
    none = "Not reproduced" if found.count(ReplayVerdict.DIFFERS) else "Undecided"
    lead = "Reproduced" if good == total else "Reproduced in part" if good else none
    rest = [
        f"{count} {word}"
        for verdict, word in (
            (ReplayVerdict.DIFFERS, "not"),
            (ReplayVerdict.UNDECIDED, "undecided"),
            (ReplayVerdict.UNSUPPORTED, "could not be run here"),
        )
        if (count := found.count(verdict))
    ]
    return (
        f"{lead}: {good} of {total} cells within their 95 % intervals{_power(found)}{''.join(f'; {r}' for r in rest)}."
    )


def _power(found: Reproduction) -> str:
    good = [cell for cell in found.cells if cell.verdict is ReplayVerdict.REPRODUCED]
    effects = [m.detectable_ratio for cell in good for m in cell.metrics if m.detectable_ratio is not None]
    return f" (a difference under {max(effects) * 100:.2g} % could have gone unseen)" if effects else ""
