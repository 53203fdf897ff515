"""One scheduled run, from the call of its timer to the notification: check that it is due, run, compare, notify.

The run and the comparison are the commands that a user would type, each in its own process: whatever happens to them,
this process survives to record how they ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Any

from paceline.campaign.live import status_page
from paceline.campaign.schedule import agenda, notification
from paceline.campaign.schedule.agenda import Occasion, Schedule
from paceline.campaign.schedule.cron import wall
from paceline.campaign.schedule.notification import Notice
from paceline.errors import RequestError
from paceline.host import redaction
from paceline.host.files import log_text
from paceline.host.processes import end_with_parent, signal_name

LOG = "log.txt"
COMPARISON = "comparison.md"
POLL_S = 0.2
# What `paceline compare` exits with if its gate could not have seen the regression asked for.
TOO_NOISY = 3
# Time between SIGTERM and SIGKILL for a campaign: it may have jobs to cancel on a cluster.
PATIENCE_S = 120.0
OUTCOMES = {0: "ok", 1: "failed", 2: "refused", 130: "interrupted"}
# The message of an interrupted campaign says to repeat the command, but the next occasion has its own directory.
CUT_SHORT = "stopped by a signal; finished runs are kept, and the next occasion starts over"
# Interrupted and refused runs leave nothing to compare.
COMPARED = ("ok", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How an occasion ended; exit_code is that of `paceline schedule run`."""

    outcome: str
    exit_code: int
    sentence: str | None = None
    report: str | None = None
    compared_with: str | None = None
    regression: str | None = None


def run(out: Path, name: str, within: timedelta | None, say: Callable[[str], None]) -> int:
    """Run the schedule once and return the exit code.

    Timers pass `within`: a start for which no scheduled time is due within that period does nothing. Without it, the
    run was started by hand.
    """
    schedule = agenda.read(out, name)
    now = datetime.now(UTC)
    due = None if within is None else agenda.due_time(schedule, agenda.occasions(out, name), now, within)
    if within is not None and due is None:
        return 0
    with agenda.exclusive(out, name) as alone:
        past = agenda.occasions(out, name)
        if not alone:
            # Two campaigns on the same devices would disturb each other.
            running = next((occasion for occasion in reversed(past) if occasion.outcome == "running"), None)
            since = f" of {wall(datetime.fromtimestamp(running.began_at, UTC), schedule.cron.zone)}" if running else ""
            sentence, at = f"skipped: the run{since} is still running", time.time()
            agenda.record(out, name, "skipped", f"skipped-{at:.3f}", at=at, due_at=_stamp(due), sentence=sentence)
            say(f"{name}: {sentence}")
            return 1
        if due is not None and due.timestamp() in {occasion.due_at for occasion in past}:
            return 0  # another start served it while this one waited for the lock
        return _run_occasion(out, schedule, due, past, say)


def _run_occasion(
    out: Path, schedule: Schedule, due: datetime | None, past: Sequence[Occasion], say: Callable[[str], None]
) -> int:
    """Measure, compare and notify, and record each step in the history."""
    began = datetime.now(UTC)
    occasion = (due or began).astimezone(schedule.cron.zone).strftime("%Y-%m-%dT%H%M%S%z")
    folder = agenda.folder_of(out, schedule.name) / occasion
    agenda.record(out, schedule.name, "began", occasion, at=began.timestamp(), due_at=_stamp(due))
    say(f"{schedule.name}: started {occasion}; log in {folder / LOG}")
    environ = dict(os.environ)
    if schedule.env_file is not None:
        # Timers start with almost no variables. A missing file is not an error: what needs a variable reports it.
        with contextlib.suppress(OSError):
            environ |= notification.variables(Path(schedule.env_file).read_text(encoding="utf-8", errors="replace"))
    result = _measure(out, schedule, folder, past, environ)
    facts = {key: getattr(result, key) for key in ("outcome", "exit_code", "sentence", "report", "compared_with")}
    _note(out, schedule, say, "ended", occasion, **facts)
    say(f"{schedule.name}: {result.outcome}" + (f": {result.sentence}" if result.sentence else ""))
    report = str((out / result.report).absolute()) if result.report else None
    notice = Notice(
        name=schedule.name,
        outcome=result.outcome,
        exit_code=result.exit_code,
        report=report,
        regression=result.regression,
        sentence=result.sentence,
    )
    for sentence in notification.send(schedule, notice, environ):
        _note(out, schedule, say, "notified", occasion, sentence=sentence)
        say(f"{schedule.name}: {sentence}")
    status_page.Page(out).write()
    return result.exit_code


def _note(out: Path, schedule: Schedule, say: Callable[[str], None], event: str, occasion: str, **facts: Any) -> None:
    """Record an event if possible: notifications are sent even when the disk is full."""
    try:
        agenda.record(out, schedule.name, event, occasion, at=time.time(), **facts)
    except OSError as error:
        say(f"{schedule.name}: cannot write the history ({error.strerror})")


def _stamp(due: datetime | None) -> float | None:
    return None if due is None else due.timestamp()


# --- measuring ---


def _measure(
    out: Path, schedule: Schedule, folder: Path, past: Sequence[Occasion], environ: Mapping[str, str]
) -> Result:
    """Run the experiment, read how it ended, and compare it with the last good occasion."""
    command = _paceline("run", agenda.experiment_of(out, schedule), "--out", str(folder.absolute()))
    # The user has allowed what the file names when adding the schedule.
    command.append("--allow-modules=all")
    if (launcher := agenda.launcher_of(out, schedule)) is not None:
        command.append(f"--launcher={launcher}")
    command += [f"--set={setting}" for setting in schedule.settings]
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with (folder / LOG).open("ab") as log:
            code = _follow(command, schedule, environ, log, status_page.Page(out).refresh)
    except OSError as error:
        return Result(outcome="failed", exit_code=1, sentence=f"{folder}: {error.strerror}; nothing was started")
    outcome = OUTCOMES.get(code, "failed")
    if code < 0:
        ended_by = f"the campaign was killed by {signal_name(-code)}, by hand or because the host ran out of memory"
        ended_by += f"; see {folder / LOG}"
        return Result(outcome=outcome, exit_code=1, sentence=ended_by)
    reports = sorted(folder.glob("*/report.html"))
    report = str(reports[0].relative_to(out)) if reports else None
    sentence = {"ok": None, "interrupted": CUT_SHORT}.get(
        outcome, _failure_reason(folder / LOG, out / report if report else None)
    )
    result = Result(outcome=outcome, exit_code=code, sentence=sentence, report=report)
    return _compare(out, schedule, folder, past, result) if outcome in COMPARED and report else result


def _paceline(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "paceline.cli", *arguments]


def _follow(
    command: Sequence[str], schedule: Schedule, environ: Mapping[str, str], log: IO[bytes], refresh: Callable[[], None]
) -> int:
    """Run a campaign and return its exit code; SIGTERM and SIGINT are passed on to it as SIGTERM."""
    directory = schedule.directory if Path(schedule.directory).is_dir() else None
    child = subprocess.Popen(
        command,
        env=dict(environ),
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        preexec_fn=lambda: end_with_parent(signal.SIGTERM),
    )
    received: list[int] = []
    previous = {s: signal.signal(s, lambda number, _: received.append(number)) for s in (signal.SIGTERM, signal.SIGINT)}
    kill_at = None
    try:
        while child.poll() is None:
            if received and kill_at is None:
                kill_at = time.monotonic() + PATIENCE_S
                child.send_signal(signal.SIGTERM)
            if kill_at is not None and time.monotonic() > kill_at:
                child.kill()
            refresh()
            time.sleep(POLL_S)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return child.wait()


def _failure_reason(log: Path, report: Path | None) -> str | None:
    """The error message of the campaign; else the last failure in its report, which is not cut to the width of a
    screen as the log may be; else the last line of the log."""
    lines = [line.strip() for line in log_text(log).splitlines() if line.strip()]
    ours = [line.removeprefix("paceline: ") for line in lines if line.startswith("paceline: ")]
    reported = _reported_failure(report.with_suffix(".json")) if report is not None and not ours else None
    failed = [line for line in lines if line.startswith(("\u2717", "\u2260"))]
    reasons = [reported] if reported else (ours or failed or lines)[-1:]
    return redaction.clean_text(reasons[0])[:500] if reasons else None


def _reported_failure(path: Path) -> str | None:
    """The last failed run in report.json, else the last load that is not valid; None if there is neither."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        runs, loads = report["runs"], report.get("served", [])
        failed = [run for run in runs if run["status"] != "ok" and run["reason"]]
        invalid = [load for load in loads if load.get("fails")]
        if failed:
            return f"{failed[-1]['status']} ({len(failed)} of {len(runs)} runs): {failed[-1]['reason']}"
        if not invalid:
            return None
        return f"{invalid[-1]['verdict']} ({len(invalid)} of {len(loads)} loads): {invalid[-1]['reasons'][0]}"
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


# --- comparing ---


def last_good(out: Path, schedule: Schedule, past: Sequence[Occasion]) -> Path | None:
    """The results directory of the newest occasion that ended ok and still exists.

    An occasion with a regression is not a baseline: what got slower counts as slower until someone accepts it.
    """
    folders = (
        (out / occasion.report).parent for occasion in reversed(past) if occasion.outcome == "ok" and occasion.report
    )
    return next((folder for folder in folders if folder.is_dir()), None)


def _compare(out: Path, schedule: Schedule, folder: Path, past: Sequence[Occasion], result: Result) -> Result:
    """The result with the comparison between the last good occasion and this one."""
    before = last_good(out, schedule, past)
    if before is None or result.report is None:
        return result
    after = (out / result.report).parent
    command = _paceline("compare", str(before), str(after))
    if schedule.fail_on_regression is not None:
        command += ["--fail-on-regression", str(schedule.fail_on_regression)]
    page = subprocess.run([*command, "--format", "markdown"], capture_output=True, text=True, check=False)
    document = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, check=False)
    (folder / COMPARISON).write_text(page.stdout or page.stderr, encoding="utf-8")
    errors = document.stderr.splitlines()
    messages = [line.removeprefix("paceline: ") for line in errors if line.startswith("paceline: ")]
    answer = None
    with contextlib.suppress(ValueError, KeyError, TypeError):
        answer = str(json.loads(document.stdout)["answer"])
    sides = f"(A is the run of {before.parent.name}, B this one)"
    gated = schedule.fail_on_regression is not None and document.returncode != 0
    failure = "inconclusive" if document.returncode == TOO_NOISY else "regression"
    # A comparison that was refused must not count as one without regressions.
    regression = f"{(messages or [answer or 'the comparison failed'])[0].rstrip('.')} {sides}" if gated else None
    compared = next(filter(None, (answer, *messages)), None)
    sentence = result.sentence or regression or (f"{compared.rstrip('.')} {sides}" if compared else None)
    return Result(
        outcome=failure if gated and result.outcome == "ok" else result.outcome,
        exit_code=result.exit_code or (TOO_NOISY if failure == "inconclusive" else 1) if gated else result.exit_code,
        sentence=sentence,
        report=result.report,
        compared_with=str(before.relative_to(out)),
        regression=None if failure == "inconclusive" else regression,
    )


# --- adding and removing ---


def add(out: Path, schedule: Schedule, experiment: Path | None, launcher: Path | None, replace: bool) -> str:
    """Store the schedule with a copy of the experiment and install its timer, or change nothing. Returns a message."""
    from paceline.campaign.schedule import timers

    folder = agenda.folder_of(out, schedule.name)
    if (folder / agenda.DEFINITION).exists() and not replace:
        raise RequestError(
            f"--name: got {schedule.name!r}, which exists in {out}; expected another name, or --replace."
        )
    before = agenda.read(out, schedule.name) if (folder / agenda.DEFINITION).exists() else None
    paths = [folder / name for name in (agenda.DEFINITION, agenda.EXPERIMENT, agenda.LAUNCHER)]
    contents = {path: path.read_bytes() if path.is_file() else None for path in paths}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source, target in ((experiment, folder / agenda.EXPERIMENT), (launcher, folder / agenda.LAUNCHER)):
            target.unlink(missing_ok=True)
            if source is not None:
                shutil.copyfile(source, target)
        agenda.write(out, schedule)
        message = str(timers.backend(schedule.backend).install(out, schedule))
    except (RequestError, OSError) as error:
        with contextlib.suppress(OSError):
            for path, content in contents.items():
                path.unlink(missing_ok=True)
                if content is not None:
                    path.write_bytes(content)
        if isinstance(error, OSError):
            raise RequestError(f"--out: cannot write in {folder} ({error.strerror}).") from None
        raise
    if before is not None and before.backend != schedule.backend:
        leftover = timers.backend(before.backend).remove(out, before)
        message = "\n".join(filter(None, (message, leftover)))
    status_page.Page(out).write()
    return message


def remove(out: Path, name: str) -> str | None:
    """Remove the timer and the definition; results and history stay. Returns what is left to do by hand."""
    from paceline.campaign.schedule import timers

    schedule = agenda.read(out, name)
    leftover: str | None = timers.backend(schedule.backend).remove(out, schedule)
    (agenda.folder_of(out, name) / agenda.DEFINITION).unlink(missing_ok=True)
    status_page.Page(out).write()
    return leftover


def adopt(out: Path, name: str, definition: Path) -> None:
    """Copy the definition that a pod mounts into the results directory, where all other code expects it."""
    from paceline.campaign.schedule.timers.kubernetes import definition_in
    from paceline.errors import StoreError

    try:
        schedule = definition_in(definition)
    except StoreError as error:
        raise RequestError(f"--definition: {definition} {error}; expected the directory of a schedule.") from None
    if schedule.name != name:
        raise RequestError(
            f"--definition: got the schedule {schedule.name!r} in {definition}, expected one named {name!r}."
        )
    folder = agenda.folder_of(out, name)
    folder.mkdir(parents=True, exist_ok=True)
    for file in (agenda.EXPERIMENT, agenda.LAUNCHER):
        if (definition / file).is_file():
            shutil.copyfile(definition / file, folder / file)
    agenda.write(out, schedule)
