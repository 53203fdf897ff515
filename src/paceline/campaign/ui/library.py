"""The campaigns and runs of a results directory, by the names that appear in addresses.

A name in an address is only looked up here, never joined to a path, so no address leads out of the directory.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote_from_bytes, unquote_to_bytes

from paceline.campaign.live.progress import title
from paceline.errors import PacelineError
from paceline.results import campaign_file, safe_text, store
from paceline.results.records import Status

# How long a list of campaigns is used before the directory is read again.
FRESH_S = 2.0
# Reading takes at most one part in this many of the time: a directory may hold thousands of runs.
LEAST_PAUSE = 20
RUNNING, UNFINISHED = "running", "not finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """An experiment of the directory. name is its path below the directory, and slug the same in an address."""

    name: str
    slug: str
    path: Path
    runs: tuple[Path, ...]

    @property
    def title(self) -> str:
        return safe_text.text(self.name)

    @property
    def state(self) -> tuple[tuple[str, int], ...]:
        """Changes whenever a run ends, is repeated or is removed."""
        return tuple((run.name, _changed_ns(run / "status.json")) for run in self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A run as a line of a list. began_at is None if it never started, seconds if it has not ended."""

    campaign: Campaign
    name: str
    slug: str
    title: str
    workload: str
    status: str
    began_at: float | None
    seconds: float | None
    error: str


def due_after(began: float) -> float:
    """When to read again what was read from `began` until now."""
    now = time.monotonic()
    return now + max(FRESH_S, LEAST_PAUSE * (now - began))


def slug_of(name: str) -> str:
    """A name as one segment of an address; any bytes that a file name may have."""
    return quote_from_bytes(os.fsencode(name), safe="")


def name_of(slug: str) -> str:
    return os.fsdecode(unquote_to_bytes(slug))


class Library:
    """Reads a results directory. Safe to use from several threads."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._campaigns: dict[str, Campaign] = {}
        self._due = float("-inf")
        self._rows: dict[Path, tuple[tuple[int, int], RunRow]] = {}

    def campaigns(self) -> dict[str, Campaign]:
        """By name. A directory that a link puts elsewhere is not one of them."""
        with self._lock:
            began = time.monotonic()
            if began > self._due:
                self._campaigns = self._found()
                self._due = due_after(began)
            return self._campaigns

    def _found(self) -> dict[str, Campaign]:
        real, by_path = self.root.resolve(), dict[Path, list[Path]]()
        for plan in (*self.root.glob(campaign_file.PLAN), *self.root.glob(f"*/{campaign_file.PLAN}")):
            by_path.setdefault(plan.parent, [])
        for run in store.run_dirs(self.root):
            by_path.setdefault(run.parent, []).append(run)
        found = {}
        for path, runs in sorted(by_path.items()):
            inside = path.is_relative_to(self.root) and path.resolve().is_relative_to(real)
            if not inside:
                continue  # also the case if the directory is itself a run
            inner = path.relative_to(self.root).as_posix()
            name = real.name if inner == "." else inner
            found[name] = Campaign(name=name, slug=slug_of(name), path=path, runs=tuple(runs))
        return found

    def campaign(self, slug: str) -> Campaign | None:
        return self.campaigns().get(name_of(slug))

    def run(self, campaign: Campaign, slug: str) -> Path | None:
        name = name_of(slug)
        return next((path for path in campaign.runs if path.name == name), None)

    def file(self, path: Path) -> Path | None:
        """The path if it is a file below the directory; None for a link that leads elsewhere."""
        return path if path.is_file() and path.resolve().is_relative_to(self.root.resolve()) else None

    def rows(self, campaigns: tuple[Campaign, ...] | None = None) -> list[RunRow]:
        """Every run, the newest first."""
        chosen = tuple(self.campaigns().values()) if campaigns is None else campaigns
        rows = [row for campaign in chosen for run in campaign.runs if (row := self._row(campaign, run)) is not None]
        return sorted(rows, key=lambda row: (-(row.began_at or 0.0), row.name))

    def _row(self, campaign: Campaign, run: Path) -> RunRow | None:
        state = _changed_ns(run / "spec.json"), _changed_ns(run / "status.json")
        known = self._rows.get(run)
        if known is None or known[0] != state or known[1].campaign is not campaign:
            try:
                row = _read_row(campaign, run)
            except FileNotFoundError:  # a restart may move files aside meanwhile
                return None
            known = self._rows[run] = state, row
        return known[1]


def _read_row(campaign: Campaign, run: Path) -> RunRow:
    name = safe_text.text(run.name)
    label, workload, error, began_at, seconds = name, "", "", None, None
    try:
        spec = store.read_spec(run)
        label, workload = title(spec), spec.workload.name
        status, began_at = UNFINISHED, (run / "spec.json").stat().st_mtime
        if store.is_sealed(run):
            end = store.read_end(run)
            status, error = end.status, end.error or ""
            began_at, seconds = end.started_at, end.ended_at - end.started_at
    except PacelineError as damage:
        status, error = campaign_file.DAMAGED, safe_text.text(str(damage).removeprefix(f"{run}: "))
    return RunRow(
        campaign=campaign,
        name=name,
        slug=slug_of(run.name),
        title=label,
        workload=workload,
        status=status,
        began_at=began_at,
        seconds=seconds,
        error=error,
    )


def is_bad(status: str) -> bool:
    return status not in (Status.OK, Status.UNSUPPORTED, RUNNING, UNFINISHED)


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
