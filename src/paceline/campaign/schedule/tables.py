"""Schedules as text and tables: when each is due, how its runs ended, which times were missed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path, PurePosixPath

from paceline.campaign.schedule.agenda import FOLDER, Occasion, ScheduleView
from paceline.campaign.schedule.cron import moment, wall
from paceline.report.tables.table import Cell, Column, Table
from paceline.wording import MISSING, format_duration

# How many occasions of each schedule are shown; history.jsonl has all.
MOST_SHOWN = 5
MOST_RAN = 30
# A start is shown as late from here on.
LATE_S = 120
MISSED = "no start recorded; the host was off, or the timer was removed"
_TONES = {"ok": "good", "running": "", "skipped": "quiet"}


def lines(view: ScheduleView, most: int = MOST_SHOWN) -> Iterator[str]:
    """The lines that `status` and `schedule show` print for one schedule."""
    schedule = view.schedule
    following = f"; next {wall(view.next, schedule.cron.zone)}" if view.next else ""
    when = f"{schedule.cron.expression} {schedule.cron.timezone}"
    yield f"schedule {schedule.name}: {when} ({schedule.backend}){following}"
    for occasion in view.occasions[-most:]:
        verb = {"running": "running since", "skipped": "skipped"}.get(occasion.outcome, "ran")
        outcome = "in progress" if occasion.outcome == "running" else occasion.outcome
        end = "; ".join(filter(None, (outcome, _took(occasion), occasion.sentence, occasion.notified)))
        if occasion.outcome == "skipped":
            end = str(occasion.sentence or "").removeprefix("skipped: ")
        yield f"  {verb} {' '.join(filter(None, began(view, occasion)))}: {end}"
    if view.missed is None:
        yield f"  history is stored on the claim {schedule.place.get('claim')}, not here"
        return
    for due in view.missed[-most:]:
        yield f"  missed {wall(due, schedule.cron.zone)}: {MISSED}"
    if len(view.missed) > most:
        yield f"  and {len(view.missed) - most} more missed before"
    if not view.occasions and not view.missed:
        yield "  not due since it was added"


def began(view: ScheduleView, occasion: Occasion) -> tuple[str, str]:
    """When it was due, and how late it began if that matters."""
    start = wall(moment(occasion.began_at), view.schedule.cron.zone)
    if occasion.due_at is None:
        return start, "by hand"
    late = occasion.began_at - occasion.due_at
    shown = wall(moment(occasion.due_at), view.schedule.cron.zone)
    return shown, f"{format_duration(late)} late" if late >= LATE_S else ""


def _took(occasion: Occasion) -> str:
    return "" if occasion.ended_at is None else format_duration(max(occasion.ended_at - occasion.began_at, 0.0))


# --- the page ---


def schedules(views: Sequence[ScheduleView]) -> Table | None:
    columns = (Column("schedule"), Column("due"), Column("next"), Column("last run"), Column("missed", True))
    rows = []
    for view in views:
        schedule, last = view.schedule, view.last
        row = (
            Cell(schedule.name, f"{schedule.source}, by {schedule.backend}"),
            Cell(schedule.cron.expression, schedule.cron.timezone),
            Cell(wall(view.next, schedule.cron.zone) if view.next else MISSING),
            Cell(last.outcome, began(view, last)[0], _tone(last.outcome)) if last else Cell(MISSING),
            Cell(MISSING if view.missed is None else str(len(view.missed)), tone="bad" if view.missed else ""),
        )
        rows.append(row)
    return Table("Schedules", columns, tuple(rows)) if rows else None


def ran(views: Sequence[ScheduleView]) -> Table | None:
    """The newest occasions of all schedules, including skipped ones."""
    columns = (Column("schedule"), Column("due"), Column("ended"), Column("report"), Column("result", prose=True))
    occasions = sorted(((view, o) for view in views for o in view.occasions), key=lambda each: -each[1].began_at)
    rows = []
    for view, occasion in occasions[:MOST_RAN]:
        link = report_link(occasion)
        row = (
            Cell(view.schedule.name),
            Cell(*began(view, occasion)),
            Cell(occasion.outcome, _took(occasion), _tone(occasion.outcome)),
            Cell("report" if link else MISSING, link=link),
            Cell(occasion.sentence or MISSING, occasion.notified or ""),
        )
        rows.append(row)
    left = len(occasions) - len(rows)
    notes = (f"{left:,} earlier runs are in history.jsonl of each schedule.",) if left else ()
    return Table("Scheduled runs", columns, tuple(rows), notes) if rows else None


def report_link(occasion: Occasion) -> str:
    """The path of the report below the results directory; empty if the history names a path outside of it."""
    path = PurePosixPath(occasion.report or "")
    inside = path.parts[:1] == (FOLDER,) and ".." not in path.parts
    return str(path) if inside else ""


def missed(views: Sequence[ScheduleView]) -> Table | None:
    columns = (Column("schedule"), Column("should have begun"))
    rows = tuple(
        (Cell(view.schedule.name), Cell(wall(due, view.schedule.cron.zone), tone="bad"))
        for view in views
        for due in (view.missed or ())[-MOST_SHOWN:]
    )
    left = sum(len(view.missed or ()) for view in views) - len(rows)
    notes = (f"{MISSED[0].upper()}{MISSED[1:]}.", *([f"{left} more before."] if left else ()))
    return Table("Missed", columns, rows, notes) if rows else None


def _tone(outcome: str) -> str:
    return _TONES.get(outcome, "bad")


def running_folders(out: Path, views: Sequence[ScheduleView]) -> list[Path]:
    """The directories of scheduled campaigns that are running."""
    running = [(view.schedule.name, view.running.id) for view in views if view.running]
    return [out / FOLDER / name / occasion for name, occasion in running if "/" not in occasion]


def due_text(view: ScheduleView, due: datetime) -> str:
    return f"{wall(due, view.schedule.cron.zone)}  {view.schedule.name}"
