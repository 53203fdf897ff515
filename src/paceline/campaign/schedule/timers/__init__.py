"""The timers that start schedules: the user's crontab, a systemd user timer, a Kubernetes CronJob.

Each module has `install(out, schedule)`, which returns a message, and `remove(out, schedule)`, which may be called
twice and returns what is left to do by hand, or None. All of them start the same command, which checks whether the
schedule is due.
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
    """The command of a timer on this host, with absolute paths: timers do not inherit directory and PATH."""
    run = [sys.executable, "-m", "paceline.cli", "schedule", "run", schedule.name]
    return [*run, "--out", str(out.absolute()), "--due-within", str(within_s)]


def mark(out: Path, schedule: Schedule) -> str:
    """The name of the timer, unique for a schedule name and a results directory."""
    digest = hashlib.sha256(str(out.absolute()).encode()).hexdigest()[:8]
    return f"paceline-{schedule.name}-{digest}"


def one_line(text: str, where: str) -> str:
    """The path if it fits on a line of a timer file, else RequestError: a line break would begin another line."""
    if "\n" in text or "\r" in text or "\0" in text:
        raise RequestError(f"{where}: got {text!r}, expected a path without line breaks.")
    return text


def answer(command: Sequence[str], given: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a system command. Its stdout can be passed back unchanged, whatever the encoding; stderr is printable."""
    content = given and given.encode(errors="surrogateescape")
    try:
        done = subprocess.run(command, input=content, capture_output=True, timeout=ANSWER_S, check=False)
    except FileNotFoundError:
        raise RequestError(
            f"--backend: the command {command[0]!r} was not found on this host. Choose another backend."
        ) from None
    except subprocess.TimeoutExpired:
        raise RequestError(f"--backend: `{' '.join(command)}` did not answer within {ANSWER_S} s.") from None
    stdout, stderr = done.stdout.decode(errors="surrogateescape"), done.stderr.decode(errors="replace")
    return subprocess.CompletedProcess(command, done.returncode, stdout, stderr)
