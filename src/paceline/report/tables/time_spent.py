"""Where the time of launches went, as a sentence and a table."""

from __future__ import annotations

from paceline.analysis.findings import Report, TimeSpent
from paceline.report.tables.table import Column, Filled, Table, filled, numeric
from paceline.wording import format_duration

# In the order in which a campaign spends it.
PARTS = {
    "reference_s": ("references", "the same work on one process, once for each work, and proofs on less"),
    "setup_s": ("set-up", "start of the processes, imports, model, process group"),
    "compilation_s": ("compilation", "first step of a compiled model, without a usual step"),
    "warmup_s": ("warm-up", "steps before the measured ones, and waits between steps"),
    "measured_s": ("measured steps", "what the numbers of the report are made of"),
    "checks_s": ("checks and end", "steps after the window, digests, end of the processes"),
}


def sentence(report: Report) -> str:
    """`Of 18 s in 3 launches: references 47 %, set-up 20 %, measured steps 33 %.`; empty if it is not known."""
    spent = report.time_spent
    if spent is None or spent.total_s <= 0:
        return ""
    shares = [f"{name} {100 * getattr(spent, part) / spent.total_s:.0f} %" for part, (name, _) in PARTS.items()]
    shown = ", ".join(share for share in shares if not share.endswith(" 0 %"))
    launches = f"{spent.launches} launch{'' if spent.launches == 1 else 'es'}"
    return f"Of {format_duration(spent.total_s)} in {launches}: {shown}.{_first(spent)}"


def details(report: Report) -> tuple[Table, ...]:
    spent = report.time_spent
    if spent is None or spent.total_s <= 0:
        return ()
    parts = [part for part in PARTS if getattr(spent, part) > 0]
    columns: tuple[Filled[str], ...] = (
        (Column("part"), lambda part: PARTS[part][0]),
        (numeric("time, s"), lambda part: f"{getattr(spent, part):.1f}"),
        (numeric("share, %"), lambda part: f"{100 * getattr(spent, part) / spent.total_s:.1f}"),
        (Column("what it is", prose=True), lambda part: PARTS[part][1]),
    )
    note = f"Launches that ended ok, without the time between them; reused references took none.{_first(spent)}"
    found = filled("Where the time of launches went", parts, columns, (note,))
    return (found,) if found is not None else ()


def _first(spent: TimeSpent) -> str:
    if spent.first_measured_s is None:
        return ""
    return f" A launch reaches its first measured step after {format_duration(spent.first_measured_s)} (median)."
