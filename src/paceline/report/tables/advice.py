"""Changes predicted to fit after an out-of-memory error."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.analysis.findings import Alternative, MemoryAdvice, Report
from paceline.analysis.findings.cell_axes import describe
from paceline.report.tables.memory import GIB, MIB
from paceline.report.tables.table import Cell, Column, Filled, Table, filled
from paceline.report.text.cells import varying_axes
from paceline.results.memory_components import SPARE_RATIO
from paceline.wording import format_parts

ESTIMATED = "estimated"
OTHER_WORK = "other work"
NOTE = (
    "Predicted by running the strategy on fake tensors after the failure; nothing was measured. A peak fits if it "
    f"leaves {100 * SPARE_RATIO:.0f} % of the memory free. If the failed run itself was predicted to fit, the peak "
    "must be that much below its own prediction."
)
OTHER_WORK_NOTE = f"{OTHER_WORK}: the change uses different batches or arithmetic, so the result is not comparable."


def tables(report: Report) -> tuple[Table, ...]:
    """One row per out-of-memory run with advice; empty if there is none."""
    named = varying_axes(report)
    columns: tuple[Filled[MemoryAdvice], ...] = (
        (
            Column("out of memory", prose=True),
            lambda found: Cell(describe(found.axes, named), f"at {batch_text(found)}, in {size(found.room_bytes)}"),
        ),
        (Column("predicted to fit", prose=True), remedy),
    )
    every = [each for found in report.memory_advice for each in found.alternatives]
    changes = any(each.fits and not each.keeps_work for each in every)
    unpredicted = (f"Not predicted: {each.change} ({each.note})." for each in every if each.peak_bytes is None)
    notes = (NOTE, *((OTHER_WORK_NOTE,) if changes else ()), *dict.fromkeys(unpredicted))
    title = "Out of memory: what is predicted to fit"
    table = filled(title, report.memory_advice, columns, notes, lambda found: (found.cell,))
    return (table,) if table else ()


def sentence(found: MemoryAdvice) -> str:
    """`out of memory at micro batch 8; predicted to fit in 79.1 GiB: micro batch 4 with accumulation 2 (61.2 GiB)`."""
    note = f" ({found.own_note})" if found.own_note else ""
    own = f", where it was predicted to hold {size(found.own_peak_bytes)}{note}" if found.own_peak_bytes else ""
    return f"out of memory at {batch_text(found)}{own}; predicted to fit in {size(found.room_bytes)}: {remedy(found)}"


def batch_text(found: MemoryAdvice) -> str:
    return f"micro batch {found.axes.get('micro_batch')}, sequence length {found.axes.get('sequence_length')}"


def remedy(found: MemoryAdvice) -> str:
    """What fits, in the order of the findings; else the change that came nearest."""
    if found.fitting:
        return ", ".join(f"{each.change} ({_peak(each)})" for each in found.fitting)
    predicted = [each for each in found.alternatives if each.peak_bytes is not None]
    if not predicted:
        return "nothing could be predicted"
    least = min(predicted, key=lambda each: each.peak_bytes or 0)
    return f"none of the changes tried; the smallest is {least.change} ({_peak(least)}): use more or larger devices"


def _peak(each: Alternative) -> str:
    """Its size and qualifiers. The note says how a prediction was made, or why there is none."""
    words = [size(each.peak_bytes), *([ESTIMATED] if each.origin == ESTIMATED else [])]
    return ", ".join([*words, *([each.note] if each.note else []), *([] if each.keeps_work else [OTHER_WORK])])


def lines(found: MemoryAdvice) -> Iterator[str]:
    """For one run: the sentence, and the options that apply the first change."""
    yield sentence(found)
    if found.fitting:
        first = found.fitting[0]
        options = " ".join(f"--set {setting}" for setting in first.settings.split())
        yield f"to apply {first.change}: paceline run ... {options}"


def size(count: int | None) -> str:
    """GiB, or MiB below one."""
    unit = GIB if (count or 0) >= 2**30 else MIB
    return f"{format_parts(count, None, None, unit)[0]} {unit.unit}"
