"""status.md and status.html of a results directory: what is running, what ran, what was missed.

They are written rarely and atomically, because a run is being measured: a reader never sees half a page, and a full
disk costs the page, not the run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from paceline import __version__
from paceline.campaign.live import status
from paceline.campaign.live.progress import left_text, pulse_text, title
from paceline.campaign.run.supervision import Observer
from paceline.campaign.schedule import agenda
from paceline.campaign.schedule import tables as schedule_tables
from paceline.experiment.spec import RunSpec
from paceline.host.files import write_atomically
from paceline.report.exporters import markdown
from paceline.report.exporters._page_parts import document, paragraph, policy, render
from paceline.report.exporters.html import asset
from paceline.report.tables.table import Cell, Column, Table
from paceline.results.campaign_file import CampaignView
from paceline.results.records import Status
from paceline.results.store import Progress
from paceline.wording import MISSING

REFRESH_S = 5.0
# Writing takes at most one part in this many of the controller's time.
LEAST_PAUSE = 20
HTML, MARKDOWN = "status.html", "status.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A results directory at one moment."""

    out: Path
    at: datetime
    campaigns: tuple[CampaignView, ...]
    schedules: tuple[agenda.ScheduleView, ...]
    unreadable: tuple[str, ...] = ()

    @property
    def running(self) -> list[CampaignView]:
        return [view for view in self.campaigns if view.running]


def read_state(out: Path) -> State:
    now = datetime.now(UTC)
    schedules, unreadable = agenda.views(out, now)
    campaigns = tuple(status.campaigns(out, schedules))
    return State(out=out, at=now, campaigns=campaigns, schedules=tuple(schedules), unreadable=tuple(unreadable))


# --- content ---


def headline(now: State) -> str:
    """What is running, then what went wrong."""
    names = ", ".join(_name(now, view) for view in now.running)
    sentences = [f"Running: {names}." if names else "Nothing is running."]
    count = sum(len(view.missed or ()) for view in now.schedules)
    if count:
        sentences.append(f"{count} scheduled run{' was' if count == 1 else 's were'} missed.")
    refused = {v.schedule.name: v.last.sentence for v in now.schedules if v.last and v.last.outcome == "refused"}
    # Nothing was measured, and no report says why.
    sentences += [f"The last run of {name} was refused: {why or 'see its log.txt'}." for name, why in refused.items()]
    fine = ("ok", "running", "refused")
    if bad := [v.schedule.name for v in now.schedules if v.last and v.last.outcome not in fine]:
        sentences.append(f"The last run of {', '.join(bad)} did not end ok.")
    return " ".join(sentences)


def tables(now: State) -> Iterator[Table]:
    """What runs, the schedules, then every experiment that does not run; without empty tables."""
    rows: list[tuple[Cell, ...]] = []
    for view in now.running:
        ended = sum(view.ended.values())
        count = str(ended) if view.planned is None else f"{ended} of {view.planned}"
        activity = [f"{title(pulse.spec)}: {pulse_text(pulse)}" for pulse in view.pulses]
        activity += [f"{run} is waiting: {why}" for run, why in view.waiting.items()]
        activity += [f"starting {run}" for run in view.starting]
        left = MISSING if view.left_s is None else left_text(view.left_s).removesuffix(" left")
        rows.append((Cell(_name(now, view)), Cell(count), Cell("; ".join(activity) or "between runs"), Cell(left)))
    if rows:
        columns = (Column("experiment"), Column("ended", True), Column("now", prose=True), Column("left"))
        yield Table("Running", columns, tuple(rows))
    made = (make(now.schedules) for make in (schedule_tables.missed, schedule_tables.schedules, schedule_tables.ran))
    yield from filter(None, made)
    rows = []
    for view in (view for view in now.campaigns if not view.running):
        report = f"{_name(now, view)}/report.html"
        is_bad = set(view.ended) - {Status.OK, Status.UNSUPPORTED} or view.interrupted
        name = Cell(_name(now, view), link=report if (now.out / report).is_file() else "")
        text, notes = status.state_text(view), [f"{run}: {what}" for run, what in view.damaged.items()]
        notes = [*filter(None, [status.left_jobs_text(view)]), *notes]
        rows.append((name, Cell(text, "; ".join(notes), "bad" if is_bad else "")))
    if rows:
        yield Table("Experiments", (Column("experiment"), Column("state", prose=True)), tuple(rows))


def _name(now: State, view: CampaignView) -> str:
    experiment = Path(view.experiment)
    return str(experiment.relative_to(now.out)) if experiment.is_relative_to(now.out) else str(experiment)


# --- files ---


def html_text(now: State) -> str:
    sections = "".join(f"<section><h2>{escape(table.title)}</h2>{render(table)}</section>" for table in tables(now))
    # The browser reloads by itself, without a script, while something runs.
    refresh = f'<meta http-equiv="refresh" content="{REFRESH_S:g}">\n' if now.running else ""
    name = now.out.absolute().name or str(now.out)
    body = (
        f'<header><div class="top"><h1>{escape(name)}</h1></div>{paragraph(headline(now), "answer")}</header>'
        f"{sections}{''.join(paragraph(text, 'bad') for text in now.unreadable)}<footer>{escape(_made(now))}</footer>"
    )
    rules = policy("default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'")
    return document(f"{name}: Paceline status", f"{rules}\n{refresh}<style>{asset('page.css')}</style>", body)


def markdown_text(now: State) -> str:
    page = markdown.Page()
    parts = [f"# {markdown.escape(now.out.absolute().name)}", f"**{markdown.escape(headline(now))}**"]
    parts += [page.titled(table) for table in tables(now)]
    parts += [markdown.escape(text) for text in now.unreadable]
    return "\n\n".join([*parts, f"<sub>{markdown.escape(_made(now))}</sub>"]) + "\n"


def _made(now: State) -> str:
    made = f"Paceline {__version__}, {now.at:%Y-%m-%d %H:%M:%S} UTC."
    return f"{made} `paceline status` shows the same at any time."


class Page:
    """The two files of one results directory."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.due = 0.0

    def refresh(self) -> None:
        """Write them if they are due."""
        if time.monotonic() >= self.due:
            self.write()

    def write(self) -> None:
        """Write both files; errors are ignored, because nothing depends on them."""
        began = time.monotonic()
        with contextlib.suppress(OSError):
            now = read_state(self.out)
            write_atomically(self.out / MARKDOWN, markdown_text(now))
            write_atomically(self.out / HTML, html_text(now))
        ended = time.monotonic()
        self.due = ended + max(REFRESH_S, LEAST_PAUSE * (ended - began))


class Paged:
    """An observer that also updates the status page of its directory."""

    def __init__(self, observer: Observer, out: Path) -> None:
        self.observer, self.page = observer, Page(out)
        self.is_begun = False

    def begin(self, specs: Sequence[RunSpec]) -> None:
        self.is_begun = True
        self.observer.begin(specs)

    def close(self) -> None:
        """Write the final page, unless the campaign was refused before it began."""
        if self.is_begun:
            self.page.write()

    def started(self, spec: RunSpec, run_dir: Path) -> None:
        self.observer.started(spec, run_dir)
        self.page.refresh()

    def waiting(self, spec: RunSpec, reason: str, seconds: float) -> None:
        self.observer.waiting(spec, reason, seconds)
        self.page.refresh()

    def moved(self, spec: RunSpec, positions: Sequence[Progress]) -> None:
        self.observer.moved(spec, positions)
        self.page.refresh()

    def restarting(self, spec: RunSpec, reason: str, left: int) -> None:
        self.observer.restarting(spec, reason, left)
        self.page.refresh()

    def advising(self, spec: RunSpec, seconds: float) -> None:
        self.observer.advising(spec, seconds)
        self.page.refresh()

    def ended(self, spec: RunSpec, status: Status, error: str | None, known: bool) -> None:
        self.observer.ended(spec, status, error, known)
        self.page.refresh()
