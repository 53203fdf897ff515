"""A replay as text: the verdict in one sentence, the metrics beside the stored ones, and what else differs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from paceline.analysis.findings.reproduction import CellReproduction, Remeasured, ReplayVerdict, Reproduction
from paceline.report.tables.table import CROSS, TICK, Cell, Column, Filled, Table, filled, numeric
from paceline.report.text.measurements import format_measurement
from paceline.wording import DIGITS_OF_RATIO, MISSING, TIMES, format_number, places, short_percent

if TYPE_CHECKING:
    from rich.console import RenderableType

_TONES = {True: "good", False: "bad", None: "quiet"}
_MARKS = {True: f"{TICK} within", False: f"{CROSS} beyond", None: "undecided"}
MOST_DIFFERENCES = 12


def reproduction_table(found: Reproduction) -> RenderableType | None:
    """For a terminal; None if no metric was compared."""
    from paceline.report.terminal import Fitted

    table = metrics_table(found)
    return Fitted(table) if table else None


def metrics_table(found: Reproduction) -> Table | None:
    columns: tuple[Filled[tuple[CellReproduction, Remeasured]], ...] = (
        (Column("cell", prose=True), lambda pair: pair[0].label),
        (Column("metric"), lambda pair: pair[1].metric),
        (numeric("stored", 2), lambda pair: format_measurement(pair[1].stored) if pair[1].stored else MISSING),
        (numeric("replayed", 2), lambda pair: format_measurement(pair[1].replayed) if pair[1].replayed else MISSING),
        (Column("ratio"), lambda pair: _ratio(pair[1])),
        (Column("verdict"), lambda pair: Cell(_MARKS[pair[1].within], "", _TONES[pair[1].within])),
        (Column("reason", priority=1), lambda pair: pair[1].reason),
    )
    return filled("Replayed over stored", [(cell, m) for cell in found.cells for m in cell.metrics], columns)


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
            checks = {check.name: check.ok for check in cell.certificate.checks}
            names = [name for name in ("initial weights", "data") if name in checks]
            exact = [f"{name} {'equal' if checks[name] else 'UNEQUAL'}" for name in names]
            losses = cell.trajectory
            loss = f"the loss within {losses.largest_ratio:.2g} of the stored one at {losses.steps} steps"
            if losses.equal_steps == losses.steps:
                loss = f"the loss of all {losses.steps} steps equal to the last bit"
            level = f", {cell.certificate.level}" if cell.certificate.level else ""
            proof = f"{sum(checks.values())} of {len(checks)} checks hold against the stored reference{level}"
            yield f"  {'; '.join((proof, *exact, loss))}"
    ran = [cell for cell in found.cells if cell.verdict is not ReplayVerdict.UNSUPPORTED and cell.replayed_runs]
    if ran and all(cell.differences == ran[0].differences for cell in ran):
        yield difference_line("the machine", ran[0].differences)
    else:
        yield from (difference_line(f"the machine of {cell.label}", cell.differences) for cell in ran)
    yield verdict_sentence(found)


def difference_line(what: str, differences: Any) -> str:
    """Each fact as `stored, now`; what a side does not have is a dash."""
    if not differences:
        return f"{what} is the same by every recorded fact"
    sides = {path: [MISSING if fact is None else str(fact) for fact in pair] for path, pair in differences.items()}
    shown = [f"{path} {stored}, now {now}" for path, (stored, now) in sides.items()]
    more = f"; and {len(shown) - MOST_DIFFERENCES} more" if len(shown) > MOST_DIFFERENCES else ""
    return f"{what} differs: {'; '.join(shown[:MOST_DIFFERENCES])}{more}"


def verdict_sentence(found: Reproduction) -> str:
    """What was reproduced, how much this data could have missed, and what was not."""
    total, good = len(found.cells), found.count(ReplayVerdict.REPRODUCED)
    if found.count(ReplayVerdict.UNSUPPORTED) == total:
        return f"Not replayed: this machine can run none of the {total} cells."
    none = "Not reproduced" if found.count(ReplayVerdict.DIFFERS) else "Undecided"
    lead = "Reproduced" if good == total else "Reproduced in part" if good else none
    cells = [cell for cell in found.cells if cell.verdict is ReplayVerdict.REPRODUCED]
    effects = [m.detectable_ratio for cell in cells for m in cell.metrics if m.detectable_ratio is not None]
    power = f" (a difference under {short_percent(max(effects))} could have gone unseen)" if effects else ""
    rest = [
        f"; {count} {word}"
        for verdict, word in (
            (ReplayVerdict.DIFFERS, "not"),
            (ReplayVerdict.UNDECIDED, "undecided"),
            (ReplayVerdict.UNSUPPORTED, "could not be run here"),
        )
        if (count := found.count(verdict))
    ]
    return f"{lead}: {good} of {total} cells within their 95 % intervals{power}{''.join(rest)}."
