"""The schedules of a results folder: what is to run when, what ran, and what should have run and did not.

DIR/schedules/<name>/
  schedule.json      what was asked
  experiment.yaml    the experiment as it was when it was scheduled; absent for a preset, which is known by its name
  launcher.yaml      the same of a launcher given as a file
  history.jsonl      one line per event: began, ended, skipped, notified
  log.txt            what the timer's command printed
  <date>/            the results of one occasion, as `paceline run --out` leaves them, with comparison.md

Nothing is kept elsewhere but the timer itself, so a folder tells its whole story on any host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from paceline.campaign.schedule.cron import Cron, moment
from paceline.errors import RequestError, StoreError, require
from paceline.results import safe_text, store

FOLDER = "schedules"
DEFINITION, HISTORY, LOCK, LOG = "schedule.json", "history.jsonl", ".lock", "log.txt"
EXPERIMENT, LAUNCHER = "experiment.yaml", "launcher.yaml"
BACKENDS = ("crontab", "systemd", "kubernetes")
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
NAME_ACCEPTED = "up to 40 lower-case letters, digits and hyphens, such as nightly"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HEADER = re.compile(r"[A-Za-z0-9-]+")
# A start may be this late before its time counts as missed: timers, pods and images take their time.
GRACE = timedelta(minutes=15)
# Missed times are looked for so far back, and never more of them than this.
HORIZON_DAYS, MOST_LOOKED_AT = 60, 500
LOCK_TRIES, LOCK_PAUSE_S = 5, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What was asked. experiment is a preset's name, or experiment.yaml of the schedule's own folder; command, webhook
    and headers say whom to tell (the last two by names of variables, never by values); place is what the backend
    needs to know, directory where relative paths of the experiment begin."""

    name: str
    cron: Cron
    backend: str
    experiment: str
    source: str
    added_at: float
    directory: str
    settings: tuple[str, ...] = ()
    launcher: str | None = None
    fail_on_regression: float | None = None
    command: str | None = None
    webhook: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    env_file: str | None = None
    place: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(bool(NAME.fullmatch(self.name)), "--name", self.name, NAME_ACCEPTED)
        require(self.backend in BACKENDS, "--backend", self.backend, f"one of {', '.join(BACKENDS)}")
        if self.webhook is not None and not _VARIABLE.fullmatch(self.webhook):
            # Not quoted: the address of a hook is a secret, and this sentence may end up in a log.
            raise RequestError(
                "--webhook: something else than a variable's name was given; accepted is the name of the variable that "
                "holds the address, such as PACELINE_WEBHOOK, as an address would be kept beside the results"
            )
        for name, variable in self.headers.items():
            valid = _HEADER.fullmatch(name) and _VARIABLE.fullmatch(variable)
            require(bool(valid), "--webhook-header", name, "NAME=VARIABLE, with the name of the variable that holds it")

    def to_dict(self) -> dict[str, Any]:
        return {"schema": 1, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Schedule:
        """StoreError for what is no schedule."""
        known = {f.name for f in dataclasses.fields(cls)}
        try:
            given = {key: value for key, value in raw.items() if key in known}
            return cls(**given | {"cron": Cron(**raw["cron"]), "settings": tuple(raw["settings"])})
        except (RequestError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(f"is no schedule ({error})") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Occasion:
    """One start, or one that was skipped. due_at is the time it was due, None for one by hand; outcome is running,
    interrupted, skipped, or how it ended: ok, regression, failed, refused."""

    id: str
    due_at: float | None
    began_at: float
    outcome: str
    ended_at: float | None = None
    exit_code: int | None = None
    sentence: str | None = None
    report: str | None = None
    compared_with: str | None = None
    host: str | None = None
    told: str | None = None


# --- folders ---


def folder_of(out: Path, name: str) -> Path:
    return out / FOLDER / name


def names(out: Path) -> list[str]:
    return sorted(path.parent.name for path in (out / FOLDER).glob(f"*/{DEFINITION}"))


def read(out: Path, name: str) -> Schedule:
    """The schedule of that name, or the sentence that says which there are."""
    path = folder_of(out, name) / DEFINITION
    if not NAME.fullmatch(name) or not path.is_file():
        known = ", ".join(names(out)) or "none yet"
        raise RequestError(f"schedule: {name!r} was given; known in {out} are: {known}")
    try:
        return Schedule.from_dict(store.read_json(path))
    except StoreError as error:
        raise RequestError(f"{path} {error}; remove the schedule and add it again") from None


def write(out: Path, schedule: Schedule) -> None:
    store.write_json(folder_of(out, schedule.name) / DEFINITION, schedule.to_dict())


def experiment_of(out: Path, schedule: Schedule) -> str:
    """What `paceline run` is given."""
    own = folder_of(out, schedule.name).absolute() / EXPERIMENT
    return str(own) if schedule.experiment == EXPERIMENT else schedule.experiment


def launcher_of(out: Path, schedule: Schedule) -> str | None:
    own = folder_of(out, schedule.name).absolute() / LAUNCHER
    return str(own) if schedule.launcher == LAUNCHER else schedule.launcher


# --- the lock ---


@contextlib.contextmanager
def exclusive(out: Path, name: str) -> Iterator[bool]:
    """True where no other start of this schedule is at work; the lock ends with the process that holds it."""
    with (folder_of(out, name) / LOCK).open("a") as handle:
        # Whoever looks whether a start is at work holds the lock for a moment too.
        for _ in range(LOCK_TRIES):
            if held := _locked(handle.fileno()):
                break
            time.sleep(LOCK_PAUSE_S)
        yield held


def is_at_work(out: Path, name: str) -> bool:
    try:
        with (folder_of(out, name) / LOCK).open("r") as handle:
            return not _locked(handle.fileno(), fcntl.LOCK_SH)
    except OSError:
        return False


def _locked(handle: int, how: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


# --- history ---


def record(out: Path, name: str, event: str, occasion: str, **facts: Any) -> None:
    """Append one event; OSError where the disk is full. What a full disk cut short stays a line of its own."""
    about = {"event": event, "occasion": occasion, "host": socket.gethostname(), "pid": os.getpid(), **facts}
    line = json.dumps(about, allow_nan=False).encode() + b"\n"
    with (folder_of(out, name) / HISTORY).open("a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        whole = (b"\n" if file.read(1) not in (b"", b"\n") else b"") + line
        if file.write(whole) != len(whole):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def occasions(out: Path, name: str) -> list[Occasion]:
    """Every start, oldest first. One that began and did not end is running while the lock is held; an earlier one, or
    one without a lock, was interrupted."""
    found: dict[str, dict[str, Any]] = {}
    for event in _events(folder_of(out, name) / HISTORY):
        about = found.setdefault(str(event.get("occasion")), {})
        about.update(_told(event, about.get("told")))
    unended = [about for about in found.values() if about.get("outcome") == "running"]
    for number, about in enumerate(reversed(unended)):
        if number or not is_at_work(out, name):
            about["outcome"] = "interrupted"
    complete = (about for about in found.values() if isinstance(about.get("began_at"), int | float))
    known = {f.name for f in dataclasses.fields(Occasion)}
    return [Occasion(**{k: v for k, v in about.items() if k in known}) for about in complete]


def _told(event: Mapping[str, Any], before: str | None) -> dict[str, Any]:
    """What an event adds to its occasion; several may be told of one."""
    what, at = event.get("event"), event.get("at")
    begin = {"id": event.get("occasion"), "due_at": event.get("due_at"), "began_at": at, "host": event.get("host")}
    if what == "began":
        return begin | {"outcome": "running"}
    if what == "skipped":
        return begin | {"outcome": "skipped", "ended_at": at, "sentence": event.get("sentence")}
    if what == "ended":
        kept = ("outcome", "exit_code", "sentence", "report", "compared_with")
        return {"ended_at": at} | {key: event.get(key) for key in kept}
    told = "; ".join(filter(None, (before, str(event.get("sentence")))))
    return {"told": told} if what == "notified" else {}


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """Lines that can be read; one that was cut short by a crash is passed over."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            event = safe_text.document(json.loads(line), line)
            if isinstance(event, dict):
                yield event


def due_time(schedule: Schedule, past: Sequence[Occasion], now: datetime, within: timedelta) -> datetime | None:
    """The scheduled time that a start at this moment serves: the last one, unless it is longer ago than `within`, was
    served already, or lies before the schedule was made."""
    due = schedule.cron.latest(now + timedelta(seconds=1))
    if due is None or now - due > within or due.timestamp() <= schedule.added_at:
        return None
    return None if due.timestamp() in {occasion.due_at for occasion in past} else due


def missed(schedule: Schedule, past: Sequence[Occasion], now: datetime) -> list[datetime]:
    """Scheduled times that no start served, of the last weeks: the host was off, or its timer is gone."""
    days = max(1, min(HORIZON_DAYS, MOST_LOOKED_AT // schedule.cron.per_day))
    start = max(moment(schedule.added_at), now - timedelta(days=days))
    served = {occasion.due_at for occasion in past}
    return [due for due in schedule.cron.between(start, now - GRACE) if due.timestamp() not in served]


# --- everything at this moment ---


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleView:
    """One schedule at this moment. missed is None where its history is kept elsewhere (on a cluster's volume)."""

    schedule: Schedule
    occasions: tuple[Occasion, ...]
    missed: tuple[datetime, ...] | None
    next: datetime | None

    @property
    def running(self) -> Occasion | None:
        return next((o for o in reversed(self.occasions) if o.outcome == "running"), None)

    @property
    def last(self) -> Occasion | None:
        """The newest one that was not skipped."""
        return next((o for o in reversed(self.occasions) if o.outcome != "skipped"), None)


def view(out: Path, name: str, now: datetime) -> ScheduleView:
    schedule = read(out, name)
    past = tuple(occasions(out, name))
    elsewhere = schedule.backend == "kubernetes" and not (folder_of(out, name) / HISTORY).exists()
    return ScheduleView(
        schedule=schedule,
        occasions=past,
        missed=None if elsewhere else tuple(missed(schedule, past, now)),
        next=next(schedule.cron.after(now), None),
    )


def views(out: Path, now: datetime) -> tuple[list[ScheduleView], list[str]]:
    """Every schedule of a results folder, and a sentence for each that cannot be read."""
    found, unreadable = [], []
    for name in names(out):
        try:
            found.append(view(out, name, now))
        except RequestError as error:
            unreadable.append(safe_text.text(str(error)))
    return found, unreadable
