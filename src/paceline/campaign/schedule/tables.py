"""Schedules in words and tables: when each is due, how its runs ended, which times were missed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path, PurePosixPath

from paceline.campaign.schedule.agenda import FOLDER, Occasion, ScheduleView
from paceline.campaign.schedule.cron import moment, wall
from paceline.report.tables.table import Cell, Column, Table
from paceline.wording import MISSING, format_duration

# Of each schedule the newest are told; its history holds all.
MOST_SHOWN = 5
MOST_RAN = 30
# A start is called late from here on.
LATE_S = 120
MISSED = "no start is recorded: the host was off, or its timer is gone"
_TONES = {"ok": "good", "running": "", "skipped": "quiet"}


def lines(view: ScheduleView, most: int = MOST_SHOWN) -> Iterator[str]:
    """What `status` and `schedule show` print of one schedule."""
    schedule = view.schedule
    following = f"; next {wall(view.next, schedule.cron.zone)}" if view.next else ""
    when = f"{schedule.cron.expression} {schedule.cron.timezone}"
    yield f"schedule {schedule.name}: {when} ({schedule.backend}){following}"
    for occasion in view.occasions[-most:]:
        yield f"  {_verb(occasion)} {' '.join(filter(None, began(view, occasion)))}: {_end(occasion)}"
    if view.missed is None:
        yield f"  its history is kept on the claim {schedule.place.get('claim')}, not here"
        return
    for due in view.missed[-most:]:
        yield f"  missed {wall(due, schedule.cron.zone)}: {MISSED}"
    if len(view.missed) > most:
        yield f"  and {len(view.missed) - most} more missed before"
    if not view.occasions and not view.missed:
        yield "  not due yet since it was added"


def _verb(occasion: Occasion) -> str:
    return {"running": "running since", "skipped": "skipped"}.get(occasion.outcome, "ran")


def began(view: ScheduleView, occasion: Occasion) -> tuple[str, str]:
    """The time it was due, and how late it began where that is worth a word."""
    start = wall(moment(occasion.began_at), view.schedule.cron.zone)
    if occasion.due_at is None:
        return start, "by hand"
    late = occasion.began_at - occasion.due_at
    shown = wall(moment(occasion.due_at), view.schedule.cron.zone)
    return shown, f"{format_duration(late)} late" if late >= LATE_S else ""


def _end(occasion: Occasion) -> str:
    if occasion.outcome == "skipped":
        return str(occasion.sentence or "").removeprefix("skipped: ")
    took = _took(occasion)
    parts = (occasion.outcome if occasion.outcome != "running" else "under way", took, occasion.sentence, occasion.told)
    return "; ".join(filter(None, parts))


def _took(occasion: Occasion) -> str:
    return "" if occasion.ended_at is None else format_duration(max(occasion.ended_at - occasion.began_at, 0.0))


# --- the page ---


def schedules(views: Sequence[ScheduleView]) -> Table | None:
    columns = (Column("schedule"), Column("due"), Column("next"), Column("last run"), Column("missed", True))
    rows = tuple(_schedule_row(view) for view in views)
    return Table("Schedules", columns, rows) if rows else None


def _schedule_row(view: ScheduleView) -> tuple[Cell, ...]:
    schedule, last = view.schedule, view.last
    ran = Cell(MISSING) if last is None else Cell(last.outcome, began(view, last)[0], _tone(last.outcome))
    count = MISSING if view.missed is None else str(len(view.missed))
    return (
        Cell(schedule.name, f"{schedule.source}, by {schedule.backend}"),
        Cell(schedule.cron.expression, schedule.cron.timezone),
        Cell(wall(view.next, schedule.cron.zone) if view.next else MISSING),
        ran,
        Cell(count, tone="bad" if view.missed else ""),
    )


def ran(views: Sequence[ScheduleView]) -> Table | None:
    """The newest starts of all schedules, and those that were skipped."""
    columns = (Column("schedule"), Column("due"), Column("ended"), Column("report"), Column("result", prose=True))
    found = sorted(((o.began_at, view, o) for view in views for o in view.occasions), key=lambda each: -each[0])
    rows = tuple(_ran_row(view, occasion) for _, view, occasion in found[:MOST_RAN])
    left = len(found) - len(rows)
    notes = (f"{left:,} earlier ones are in each schedule's history.jsonl.",) if left else ()
    return Table("Scheduled runs", columns, rows, notes) if rows else None


def _ran_row(view: ScheduleView, occasion: Occasion) -> tuple[Cell, ...]:
    link = report_link(occasion)
    return (
        Cell(view.schedule.name),
        Cell(*began(view, occasion)),
        Cell(occasion.outcome, _took(occasion), _tone(occasion.outcome)),
        Cell("report" if link else MISSING, link=link),
        Cell(occasion.sentence or MISSING, occasion.told or ""),
    )


def report_link(occasion: Occasion) -> str:
    """The report's path below the results folder; nothing that leads out of it, whatever a history says."""
    path = PurePosixPath(occasion.report or "")
    inside = path.parts[:1] == (FOLDER,) and ".." not in path.parts
    return str(path) if inside else ""


def missed(views: Sequence[ScheduleView]) -> Table | None:
    columns = (Column("schedule"), Column("should have begun"))
    found = [(view, due) for view in views for due in (view.missed or ())[-MOST_SHOWN:]]
    rows = tuple(
        (Cell(view.schedule.name), Cell(wall(due, view.schedule.cron.zone), tone="bad")) for view, due in found
    )
    left = sum(len(view.missed or ()) for view in views) - len(rows)
    notes = (f"{MISSED[0].upper()}{MISSED[1:]}.", *([f"{left} more before."] if left else ()))
    return Table("Missed", columns, rows, notes) if rows else None


def _tone(outcome: str) -> str:
    return _TONES.get(outcome, "bad")


def running_folders(out: Path, views: Sequence[ScheduleView]) -> list[Path]:
    """Where scheduled campaigns write at this moment."""
    running = [(view.schedule.name, view.running.id) for view in views if view.running]
    return [out / FOLDER / name / occasion for name, occasion in running if "/" not in occasion]


def due_text(view: ScheduleView, due: datetime) -> str:
    return f"{wall(due, view.schedule.cron.zone)}  {view.schedule.name}"
