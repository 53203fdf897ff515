"""Whoever wakes a schedule up: the user's crontab, a systemd user timer, a CronJob of Kubernetes.

Each module has `install(out, schedule)`, which returns what was done in one sentence, and `remove(out, schedule)`,
which may be called twice and returns what is left to do by hand, or None. All of them start the same command, which
itself decides whether the schedule is due.
"""

from __future__ import annotations

import hashlib
import importlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from paceline.campaign.schedule.agenda import Schedule
from paceline.errors import RequestError

ANSWER_S = 60


def backend(name: str) -> ModuleType:
    return importlib.import_module(f"paceline.campaign.schedule.timers.{name}")


def command(out: Path, schedule: Schedule, within_s: int) -> list[str]:
    """What a timer of this host starts: absolute, as timers have neither this shell's folder nor its PATH."""
    run = [sys.executable, "-m", "paceline.cli", "schedule", "run", schedule.name]
    return [*run, "--out", str(out.absolute()), "--due-within", str(within_s)]


def mark(out: Path, schedule: Schedule) -> str:
    """A name for the timer: the same schedule name in two results folders makes two."""
    place = hashlib.sha256(str(out.absolute()).encode()).hexdigest()[:8]
    return f"paceline-{schedule.name}-{place}"


def one_line(text: str, where: str) -> str:
    """A path as it may stand in a line of a timer's file; a line break would begin another line."""
    if "\n" in text or "\r" in text or "\0" in text:
        raise RequestError(f"{where}: {text!r} was given; accepted is a path without line breaks")
    return text


def answer(command: Sequence[str], given: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command of the system that answers at once. What it writes can be handed back to it as it was, whatever
    its encoding and its line ends; what it complains of is text that can be printed."""
    content = given and given.encode(errors="surrogateescape")
    try:
        done = subprocess.run(command, input=content, capture_output=True, timeout=ANSWER_S, check=False)
    except FileNotFoundError:
        raise RequestError(
            f"--backend: the command {command[0]!r} is not on this host; choose another backend"
        ) from None
    except subprocess.TimeoutExpired:
        raise RequestError(f"--backend: `{' '.join(command)}` did not answer within {ANSWER_S} s") from None
    told, complaint = done.stdout.decode(errors="surrogateescape"), done.stderr.decode(errors="replace")
    return subprocess.CompletedProcess(command, done.returncode, told, complaint)
