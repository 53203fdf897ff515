"""What `paceline status` shows: the campaigns of a results directory at this moment, from its files alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.campaign.live.progress import left_text, pulse_text, spent_text, title
from paceline.campaign.schedule import agenda
from paceline.campaign.schedule import tables as schedules
from paceline.results import safe_text
from paceline.results.campaign_file import CampaignView, read_views

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST_NAMED = 8
REFRESH_S = 2.0


def folder_lines(out: Path) -> tuple[list[str], bool]:
    """A line per experiment and per unfinished run, then the schedules; and whether anything is running."""
    planned, unreadable = agenda.views(out, datetime.now(UTC))
    views = campaigns(out, planned)
    lines = [line for view in views for line in view_lines(view)]
    lines += [safe_text.text(line) for schedule in planned for line in schedules.lines(schedule)] + unreadable
    return lines or [_nothing(out)], any(view.running for view in views)


def _nothing(out: Path) -> str:
    return f"{out}: no runs yet. Begin with `paceline start`."


def campaigns(out: Path, planned: Sequence[agenda.ScheduleView]) -> list[CampaignView]:
    """Every experiment of the directory, but of scheduled ones only those that are running.

    The history of a schedule has the others; there may be one per day, too many to read each time.
    """
    folders = [out]
    if (out / agenda.FOLDER).is_dir():
        folders = sorted(path for path in out.iterdir() if path.is_dir() and path.name != agenda.FOLDER)
    folders += schedules.running_folders(out, planned)
    return [view for folder in folders for view in read_views(folder)]


def view_lines(view: CampaignView) -> Iterator[str]:
    yield f"{view.experiment}: {state_text(view)}"
    for pulse in view.pulses:
        yield f"  running: {title(pulse.spec)}: {pulse_text(pulse)}"
    for run, why in view.waiting.items():
        yield f"  waiting: {run}: {why}"
    for run in view.starting:
        yield f"  starting: {run}"
    for run in view.interrupted[:MOST_NAMED]:
        job, resumer = view.left_jobs.get(run), "this campaign" if view.running else "the same command"
        yield f"  interrupted: {run}" + (f" ({job}; {resumer} will adopt it)" if job else "")
    if len(view.interrupted) > MOST_NAMED:
        yield f"  and {len(view.interrupted) - MOST_NAMED} more interrupted"
    for run, what in list(view.damaged.items())[:MOST_NAMED]:
        yield f"  {run}: {what}"
    if len(view.damaged) > MOST_NAMED:
        yield f"  and {len(view.damaged) - MOST_NAMED} more damaged"


def left_jobs_text(view: CampaignView) -> str:
    """The jobs that may still run without a controller; empty if there are none."""
    return "; ".join(f"{run}: {job}" for run, job in view.left_jobs.items())


def state_text(view: CampaignView) -> str:
    """How its runs ended, and what to do next: wait, continue, or read the report."""
    ended = sum(view.ended.values())
    by_status = ", ".join(f"{count} {status}" for status, count in view.ended.items()) or "none ended"
    if view.planned is None:
        unfinished = f", {len(view.interrupted)} not finished" if view.interrupted else ""
        return f"{by_status}; running" if view.running else f"{by_status}{unfinished}"
    text = f"{ended} of {view.planned} runs ended ({by_status})"
    if view.running:
        return f"{text}; running, {left_text(view.left_s)}{spent_text(view.usd)}"
    # Damaged runs are run again.
    left = view.planned - ended + len(view.damaged)
    if left:
        return f"{text}; not running{spent_text(view.usd)}, {left} left: repeat the command to continue"
    return f"{text}; complete" + ("" if view.usd is None else f", {view.usd:.2f} USD")


def screen(out: Path) -> tuple[RenderableType, bool]:
    """The same for a terminal: a bar per experiment above its lines, each cut to the width of the terminal."""
    from rich.console import Group
    from rich.text import Text

    planned, unreadable = agenda.views(out, datetime.now(UTC))
    views = campaigns(out, planned)
    parts = [part for view in views for part in _panel(view)]
    lines = (*(line for schedule in planned for line in schedules.lines(schedule)), *unreadable)
    parts += [Text(safe_text.text(line), no_wrap=True, overflow="ellipsis") for line in lines]
    return Group(*parts) if parts else Text(_nothing(out)), any(view.running for view in views)


def _panel(view: CampaignView) -> Sequence[RenderableType]:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    lines = [
        Text(line, style="dim" if number else "", no_wrap=True, overflow="ellipsis")
        for number, line in enumerate(view_lines(view))
    ]
    if view.planned is None:
        return lines
    bar = Table.grid()  # a bar alone does not end its line
    bar.add_row(ProgressBar(total=view.planned, completed=sum(view.ended.values()), width=40))
    return [lines[0], bar, *lines[1:]]
