"""The schedules of a results directory: what runs when, what ran, and what was missed.

DIR/schedules/<name>/
  schedule.json      the definition
  experiment.yaml    a copy of the experiment from when it was scheduled; absent for a preset
  launcher.yaml      a copy of the launcher file, if one was given
  history.jsonl      one line per event: began, ended, skipped, notified
  log.txt            output of the timer's command
  <date>/            results of one occasion, as `paceline run --out` writes them, and comparison.md

Only the timer itself is stored elsewhere, so the directory can be read on any host.
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
from paceline.errors import RequestError, StoreError, did_you_mean, require
from paceline.host.files import document_of
from paceline.results import safe_text, store
from paceline.results.validity import rule_of

FOLDER = "schedules"
DEFINITION, HISTORY, LOCK, LOG = "schedule.json", "history.jsonl", ".lock", "log.txt"
EXPERIMENT, LAUNCHER = "experiment.yaml", "launcher.yaml"
BACKENDS = ("crontab", "systemd", "kubernetes")
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
NAME_ACCEPTED = "up to 40 lower-case letters, digits and hyphens, such as nightly"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HEADER = re.compile(r"[A-Za-z0-9-]+")
# A start may be this late before it counts as missed: pods and images take time to come up.
GRACE = timedelta(minutes=15)
# How far back, and for how many times, missed runs are searched.
HORIZON_DAYS, MOST_LOOKED_AT = 60, 500
LOCK_TRIES, LOCK_PAUSE_S = 5, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The definition of a schedule.

    experiment: a preset, or experiment.yaml in the directory of the schedule. command, webhook, headers: notifications;
    the last two are names of environment variables, never values. place: options of the backend. directory: base of
    relative paths in the experiment.
    """

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
            # The value is not quoted: the URL of a webhook is a secret, and this message may end up in a log.
            raise RequestError(
                "--webhook: got something that is not a variable name, expected the name of the environment variable "
                "with the URL, such as PACELINE_WEBHOOK. A URL would be stored beside the results."
            )
        for name, variable in self.headers.items():
            valid = _HEADER.fullmatch(name) and _VARIABLE.fullmatch(variable)
            require(bool(valid), "--webhook-header", name, "NAME=VARIABLE with the name of an environment variable")

    def to_dict(self) -> dict[str, Any]:
        return {"schema": 1, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Schedule:
        """The schedule from its JSON; StoreError if it is not one."""
        known = {f.name for f in dataclasses.fields(cls)}
        try:
            given = {key: value for key, value in raw.items() if key in known}
            if problem := rule_of(Schedule).problem(given):
                raise StoreError(f"is not a schedule ({problem})")
            return cls(**given | {"cron": Cron(**raw["cron"]), "settings": tuple(raw["settings"])})
        except (RequestError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(f"is not a schedule ({error})") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Occasion:
    """One start, or one that was skipped.

    due_at: when it was due, None if started by hand. outcome: running, interrupted, skipped, ok, regression,
    inconclusive, failed or refused. notified: what happened with the notifications.
    """

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
    notified: str | None = None


# --- folders ---


def folder_of(out: Path, name: str) -> Path:
    return out / FOLDER / name


def names(out: Path) -> list[str]:
    return sorted(path.parent.name for path in (out / FOLDER).glob(f"*/{DEFINITION}"))


def read(out: Path, name: str) -> Schedule:
    """The schedule of that name; RequestError with the known names if there is none."""
    path = folder_of(out, name) / DEFINITION
    if not NAME.fullmatch(name) or not path.is_file():
        known = ", ".join(names(out)) or "none yet"
        hint = did_you_mean(name, names(out))
        raise RequestError(f"schedule: got {name!r}, expected a schedule in {out}: {known}.{hint}")
    try:
        return Schedule.from_dict(store.read_json(path))
    except StoreError as error:
        raise RequestError(f"{path} {error}. Remove the schedule and add it again.") from None


def write(out: Path, schedule: Schedule) -> None:
    store.write_json(folder_of(out, schedule.name) / DEFINITION, schedule.to_dict())


def experiment_of(out: Path, schedule: Schedule) -> str:
    """The experiment argument for `paceline run`."""
    own = folder_of(out, schedule.name).absolute() / EXPERIMENT
    return str(own) if schedule.experiment == EXPERIMENT else schedule.experiment


def launcher_of(out: Path, schedule: Schedule) -> str | None:
    own = folder_of(out, schedule.name).absolute() / LAUNCHER
    return str(own) if schedule.launcher == LAUNCHER else schedule.launcher


# --- the lock ---


@contextlib.contextmanager
def exclusive(out: Path, name: str) -> Iterator[bool]:
    """True if no other start of this schedule is running; the lock ends with the process that has it."""
    with (folder_of(out, name) / LOCK).open("a") as handle:
        # `is_at_work` takes the lock for a moment too.
        for _ in range(LOCK_TRIES):
            if is_locked := _locked(handle.fileno()):
                break
            time.sleep(LOCK_PAUSE_S)
        yield is_locked


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
    """Append one event; OSError if the disk is full. A truncated line stays a line of its own."""
    about = {"event": event, "occasion": occasion, "host": socket.gethostname(), "pid": os.getpid(), **facts}
    line = json.dumps(about, allow_nan=False).encode() + b"\n"
    with (folder_of(out, name) / HISTORY).open("a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        whole = (b"\n" if file.read(1) not in (b"", b"\n") else b"") + line
        if file.write(whole) != len(whole):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def occasions(out: Path, name: str) -> list[Occasion]:
    """Every start, oldest first.

    The newest start without an end is running while the lock is taken; all others without an end were interrupted.
    """
    by_id: dict[str, dict[str, Any]] = {}
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = document_of(folder_of(out, name) / HISTORY).decode(errors="replace").splitlines()
    for line in lines:
        event = None
        with contextlib.suppress(ValueError, RecursionError):
            event = safe_text.document(json.loads(line), line)
        if not isinstance(event, dict):
            continue  # a crash truncated this line
        about = by_id.setdefault(str(event.get("occasion")), {})
        what, at, sentence = event.get("event"), event.get("at"), event.get("sentence")
        if what in ("began", "skipped"):
            about |= {"id": event.get("occasion"), "due_at": event.get("due_at"), "began_at": at}
            about |= {"host": event.get("host"), "outcome": "running"}
        if what == "skipped":
            about |= {"outcome": "skipped", "ended_at": at, "sentence": sentence}
        elif what == "ended":
            kept = ("outcome", "exit_code", "sentence", "report", "compared_with")
            about |= {"ended_at": at} | {key: event.get(key) for key in kept}
        elif what == "notified":
            about["notified"] = "; ".join(filter(None, (about.get("notified"), str(sentence))))
    unended = [about for about in by_id.values() if about.get("outcome") == "running"]
    for number, about in enumerate(reversed(unended)):
        if number or not is_at_work(out, name):
            about["outcome"] = "interrupted"
    return [Occasion(**about) for about in by_id.values() if rule_of(Occasion).fits([about])]


def due_time(schedule: Schedule, past: Sequence[Occasion], now: datetime, within: timedelta) -> datetime | None:
    """The scheduled time for a start at this moment: the latest one, unless it is longer ago than `within`, was served
    already, or lies before the schedule was added."""
    due = schedule.cron.latest(now + timedelta(seconds=1))
    if due is None or now - due > within or due.timestamp() <= schedule.added_at:
        return None
    return None if due.timestamp() in {occasion.due_at for occasion in past} else due


def missed(schedule: Schedule, past: Sequence[Occasion], now: datetime) -> list[datetime]:
    """Scheduled times of the last weeks without a start: the host was off, or the timer was removed."""
    days = max(1, min(HORIZON_DAYS, MOST_LOOKED_AT // schedule.cron.per_day))
    start = max(moment(schedule.added_at), now - timedelta(days=days))
    served = {occasion.due_at for occasion in past}
    return [due for due in schedule.cron.between(start, now - GRACE) if due.timestamp() not in served]


# --- everything at this moment ---


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleView:
    """One schedule at this moment. missed is None if its history is on a volume of a cluster."""

    schedule: Schedule
    occasions: tuple[Occasion, ...]
    missed: tuple[datetime, ...] | None
    next: datetime | None

    @property
    def running(self) -> Occasion | None:
        return next((o for o in reversed(self.occasions) if o.outcome == "running"), None)

    @property
    def last(self) -> Occasion | None:
        """The newest occasion that was not skipped."""
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
    """Every schedule of a results directory, and a message for each that cannot be read."""
    schedules, unreadable = [], []
    for name in names(out):
        try:
            schedules.append(view(out, name, now))
        except RequestError as error:
            unreadable.append(safe_text.text(str(error)))
    return schedules, unreadable
