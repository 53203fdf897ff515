"""What `status` shows: the campaigns of a results folder as they are at this moment, from its files alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.campaign.live.progress import left_text, pulse_text, title
from paceline.campaign.schedule import agenda
from paceline.campaign.schedule import tables as schedules
from paceline.results import safe_text
from paceline.results.campaign_file import CampaignView, read_views

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST_NAMED = 8
REFRESH_S = 2.0


def folder_lines(out: Path) -> tuple[list[str], bool]:
    """A line per experiment and per unfinished run, then what is scheduled, and whether anything is running."""
    planned, unreadable = agenda.views(out, datetime.now(UTC))
    views = campaigns(out, planned)
    lines = [line for view in views for line in view_lines(view)]
    lines += [safe_text.text(line) for schedule in planned for line in schedules.lines(schedule)] + unreadable
    return lines or [f"{out}: no run yet"], any(view.running for view in views)


def campaigns(out: Path, planned: Sequence[agenda.ScheduleView]) -> list[CampaignView]:
    """Every experiment of the folder; of those that schedules have left only the ones under way. Each day adds one, the
    schedule's history tells how they ended, and to read them all would take longer than a look may."""
    folders = [out]
    if (out / agenda.FOLDER).is_dir():
        folders = sorted(path for path in out.iterdir() if path.is_dir() and path.name != agenda.FOLDER)
    folders += schedules.running_folders(out, planned)
    return [view for folder in folders for view in read_views(folder)]


def view_lines(view: CampaignView) -> Iterator[str]:
    yield f"{view.experiment}: {standing_text(view)}"
    for pulse in view.pulses:
        yield f"  running: {title(pulse.spec)}: {pulse_text(pulse)}"
    for run, why in view.waiting.items():
        yield f"  waiting: {run}: {why}"
    for run in view.starting:
        yield f"  starting: {run}"
    for run in view.interrupted[:MOST_NAMED]:
        yield f"  interrupted: {run}{_left_job(view, run)}"
    if len(view.interrupted) > MOST_NAMED:
        yield f"  and {len(view.interrupted) - MOST_NAMED} more interrupted"


def left_jobs_text(view: CampaignView) -> str:
    """Every job that may still run without a controller; nothing where there is none."""
    return "; ".join(f"{run}: {job}" for run, job in view.left_jobs.items())


def _left_job(view: CampaignView, run: str) -> str:
    job = view.left_jobs.get(run)
    who = "this campaign" if view.running else "the same command"
    return f" ({job}; {who} takes it up again)" if job else ""


def standing_text(view: CampaignView) -> str:
    """How its runs ended, and what a reader would do next."""
    return f"{_counts(view)}{_standing(view)}"


def _counts(view: CampaignView) -> str:
    by_status = ", ".join(f"{count} {status}" for status, count in view.ended.items()) or "none ended"
    if view.planned is None:
        return by_status
    return f"{sum(view.ended.values())} of {view.planned} runs ended ({by_status})"


def _standing(view: CampaignView) -> str:
    """What a reader would do next: wait, go on, or read the report."""
    if view.running:
        return f"; running, {left_text(view.left_s)}" if view.planned is not None else "; running"
    if view.planned is None:
        return f", {len(view.interrupted)} not sealed" if view.interrupted else ""
    left = view.planned - sum(view.ended.values())
    return f"; not running, {left} left: the same command goes on from here" if left else "; complete"


def screen(out: Path) -> tuple[RenderableType, bool]:
    """The same for a terminal: a bar per experiment above its lines, each cut where the terminal ends."""
    from rich.console import Group
    from rich.text import Text

    planned, unreadable = agenda.views(out, datetime.now(UTC))
    views = campaigns(out, planned)
    parts = [part for view in views for part in _panel(view)]
    told = (*(line for schedule in planned for line in schedules.lines(schedule)), *unreadable)
    parts += [Text(safe_text.text(line), no_wrap=True, overflow="ellipsis") for line in told]
    return Group(*parts) if parts else Text(f"{out}: no run yet"), any(view.running for view in views)


def _panel(view: CampaignView) -> Sequence[RenderableType]:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    first, *rest = view_lines(view)
    lines = [
        Text(line, style="" if number == 0 else "dim", no_wrap=True, overflow="ellipsis")
        for number, line in enumerate((first, *rest))
    ]
    if view.planned is None:
        return lines
    bar = Table.grid()  # a bar alone does not end its line
    bar.add_row(ProgressBar(total=view.planned, completed=sum(view.ended.values()), width=40))
    return [lines[0], bar, *lines[1:]]
