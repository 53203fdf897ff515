"""One scheduled run from the timer's call to its last word: due, alone, measured, compared, told.

Experiment, report and comparison are the commands a user would type, each a process of its own: whatever happens to
one, this one lives to write down how it ended.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from paceline.host.processes import end_with_parent, signal_name

LOG = "log.txt"
COMPARISON = "comparison.md"
POLL_S = 0.2
# Between asking a campaign to end and ending it: it has jobs to cancel elsewhere.
PATIENCE_S = 120.0
OUTCOMES = {0: "ok", 1: "failed", 2: "refused", 130: "interrupted"}
# A campaign says that the same command goes on; a schedule's next one has a folder of its own.
CUT_SHORT = "it was asked to end; what was measured is kept, and the next occasion starts anew"
# What a run of an interrupted or refused experiment leaves is nothing to compare.
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
    """Run the schedule once. within is given by timers: a start that serves no scheduled time of so long ago does
    nothing at all. Without it the run is one by hand. Returns the exit code."""
    schedule = agenda.read(out, name)
    now = datetime.now(UTC)
    due = None if within is None else agenda.due_time(schedule, agenda.occasions(out, name), now, within)
    if within is not None and due is None:
        return 0
    with agenda.exclusive(out, name) as alone:
        past = agenda.occasions(out, name)
        if not alone:
            return _skip(out, schedule, due, past, say)
        if due is not None and due.timestamp() in {occasion.due_at for occasion in past}:
            return 0  # another start has served it while this one waited for the lock
        return _hold(out, schedule, due, past, say)


def _skip(
    out: Path, schedule: Schedule, due: datetime | None, past: Sequence[Occasion], say: Callable[[str], None]
) -> int:
    """Two campaigns on the same devices would measure each other."""
    running = next((occasion for occasion in reversed(past) if occasion.outcome == "running"), None)
    since = f" of {wall(datetime.fromtimestamp(running.began_at, UTC), schedule.cron.zone)}" if running else ""
    sentence = f"skipped: the run{since} is still at work"
    now = time.time()
    agenda.record(out, schedule.name, "skipped", f"skipped-{now:.3f}", at=now, due_at=_stamp(due), sentence=sentence)
    say(f"{schedule.name}: {sentence}")
    return 1


def _hold(
    out: Path, schedule: Schedule, due: datetime | None, past: Sequence[Occasion], say: Callable[[str], None]
) -> int:
    began = datetime.now(UTC)
    occasion = (due or began).astimezone(schedule.cron.zone).strftime("%Y-%m-%dT%H%M%S%z")
    folder = agenda.folder_of(out, schedule.name) / occasion
    agenda.record(out, schedule.name, "began", occasion, at=began.timestamp(), due_at=_stamp(due))
    say(f"{schedule.name}: began {occasion}; see {folder / LOG}")
    environ = _environment(schedule)
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
    for sentence in notification.tell(schedule, notice, environ):
        _note(out, schedule, say, "notified", occasion, sentence=sentence)
        say(f"{schedule.name}: {sentence}")
    status_page.Page(out).write()
    return result.exit_code


def _note(out: Path, schedule: Schedule, say: Callable[[str], None], event: str, occasion: str, **facts: Any) -> None:
    """Write it down if that is possible: whoever is to be told is told even when the disk is full."""
    try:
        agenda.record(out, schedule.name, event, occasion, at=time.time(), **facts)
    except OSError as error:
        say(f"{schedule.name}: the history cannot be written ({error.strerror})")


def _stamp(due: datetime | None) -> float | None:
    return None if due is None else due.timestamp()


def _environment(schedule: Schedule) -> dict[str, str]:
    """This process's own, and the variables of the schedule's file: timers start with next to none."""
    if schedule.env_file is None:
        return dict(os.environ)
    try:
        text = Path(schedule.env_file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return dict(os.environ)  # a run does not fail for it; whoever needs a variable says that it is not set
    return {**os.environ, **notification.variables(text)}


# --- measuring ---


def _measure(
    out: Path, schedule: Schedule, folder: Path, past: Sequence[Occasion], environ: Mapping[str, str]
) -> Result:
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with (folder / LOG).open("ab") as log:
            code = _follow(_command(out, schedule, folder), schedule, environ, log, status_page.Page(out).refresh)
    except OSError as error:
        return Result(outcome="failed", exit_code=1, sentence=f"{folder}: {error.strerror}; nothing was started")
    outcome = OUTCOMES.get(code, "failed")
    if code < 0:
        return Result(outcome=outcome, exit_code=1, sentence=_ended_by(-code, folder))
    found = sorted(folder.glob("*/report.html"))
    report = str(found[0].relative_to(out)) if found else None
    sentence = {"ok": None, "interrupted": CUT_SHORT}.get(
        outcome, _what_went_wrong(folder / LOG, out / report if report else None)
    )
    result = Result(outcome=outcome, exit_code=code, sentence=sentence, report=report)
    return _compare(out, schedule, folder, past, result) if outcome in COMPARED and report else result


def _command(out: Path, schedule: Schedule, folder: Path) -> list[str]:
    command = _paceline("run", agenda.experiment_of(out, schedule), "--out", str(folder.absolute()))
    if (launcher := agenda.launcher_of(out, schedule)) is not None:
        command.append(f"--launcher={launcher}")
    return command + [f"--set={setting}" for setting in schedule.settings]


def _paceline(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "paceline.cli", *arguments]


def _follow(
    command: Sequence[str], schedule: Schedule, environ: Mapping[str, str], log: IO[bytes], look: Callable[[], None]
) -> int:
    """Exit code of a campaign that is watched to its end; asked to end, this process asks it to, and waits for it."""
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
    with _asked_to_end() as asked:
        ended_by = None
        while child.poll() is None:
            if asked and ended_by is None:
                ended_by = time.monotonic() + PATIENCE_S
                child.send_signal(signal.SIGTERM)
            if ended_by is not None and time.monotonic() > ended_by:
                child.kill()
            look()
            time.sleep(POLL_S)
    return child.wait()


@contextlib.contextmanager
def _asked_to_end() -> Iterator[list[int]]:
    """Holds something once this process was told to end."""
    asked: list[int] = []
    previous = {s: signal.signal(s, lambda number, _: asked.append(number)) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _ended_by(number: int, folder: Path) -> str:
    how = f"{signal_name(number)}, by hand, or because the host ran out of memory"
    return f"the campaign was ended by {how}; see {folder / LOG}"


def _what_went_wrong(log: Path, report: Path | None) -> str | None:
    """The campaign's own sentence; else what its report says of the last run that is not ok, as the log may have cut it
    to the width of a screen; else its last words."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    ours = [line.removeprefix("paceline: ") for line in lines if line.startswith("paceline: ")]
    told = _last_reason(report.with_suffix(".json")) if report is not None and not ours else None
    failed = [line for line in lines if line.startswith(("\u2717", "\u2260"))]
    found = [told] if told else (ours or failed or lines)[-1:]
    return redaction.clean_text(found[0])[:500] if found else None


def _last_reason(report: Path) -> str | None:
    """None where the report was not written as JSON, or nothing in it has a reason. A run that is ok may hold loads
    that are not believed."""
    try:
        found = json.loads(report.read_text())
        runs, loads = found["runs"], found.get("served", [])
        wrong = [run for run in runs if run["status"] != "ok" and run["reason"]]
        lost = [load for load in loads if load.get("fails")]
        if wrong:
            return f"{wrong[-1]['status']} ({len(wrong)} of {len(runs)} runs): {wrong[-1]['reason']}"
        return f"{lost[-1]['verdict']} ({len(lost)} of {len(loads)} loads): {lost[-1]['reasons'][0]}" if lost else None
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


# --- comparing ---


def last_good(out: Path, schedule: Schedule, past: Sequence[Occasion]) -> Path | None:
    """The results of the newest occasion that ended ok and is still there. One with a regression is no measure for the
    next: what got slower stays slower until somebody says that it is well."""
    folders = (
        (out / occasion.report).parent for occasion in reversed(past) if occasion.outcome == "ok" and occasion.report
    )
    return next((folder for folder in folders if folder.is_dir()), None)


def _compare(out: Path, schedule: Schedule, folder: Path, past: Sequence[Occasion], result: Result) -> Result:
    """The existing comparison and its gate, between the last good occasion and this one."""
    before = last_good(out, schedule, past)
    if before is None or result.report is None:
        return result
    after = (out / result.report).parent
    command = _paceline("compare", str(before), str(after))
    if schedule.fail_on_regression is not None:
        command += ["--fail-on-regression", str(schedule.fail_on_regression)]
    page = subprocess.run([*command, "--format", "markdown"], capture_output=True, text=True, check=False)
    told = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, check=False)
    (folder / COMPARISON).write_text(page.stdout or page.stderr)
    words = [line.removeprefix("paceline: ") for line in told.stderr.splitlines() if line.startswith("paceline: ")]
    answer = _answer(told.stdout)
    sides = f"(A is the run of {before.parent.name}, B this one)"
    gated = schedule.fail_on_regression is not None and told.returncode != 0
    # A comparison that was refused gates nothing, and must not pass for one that found nothing.
    regression = f"{(words or [answer or 'the comparison failed'])[0].rstrip('.')} {sides}" if gated else None
    compared = next(filter(None, (answer, *words)), None)
    sentence = result.sentence or regression or (f"{compared.rstrip('.')} {sides}" if compared else None)
    return Result(
        outcome="regression" if gated and result.outcome == "ok" else result.outcome,
        exit_code=1 if gated else result.exit_code,
        sentence=sentence,
        report=result.report,
        compared_with=str(before.relative_to(out)),
        regression=regression,
    )


def _answer(text: str) -> str | None:
    try:
        return str(json.loads(text)["answer"])
    except (ValueError, KeyError, TypeError):
        return None


# --- adding and removing ---


def add(out: Path, schedule: Schedule, experiment: Path | None, launcher: Path | None, replace: bool) -> str:
    """Write the schedule down with its own copy of the experiment, then set its timer; all of it or nothing."""
    from paceline.campaign.schedule import timers

    folder = agenda.folder_of(out, schedule.name)
    if (folder / agenda.DEFINITION).exists() and not replace:
        raise RequestError(
            f"--name: {schedule.name!r} was given, which exists in {out}; accepted is another name, or --replace"
        )
    before = agenda.read(out, schedule.name) if (folder / agenda.DEFINITION).exists() else None
    with _restoring(folder):
        _copy(experiment, folder / agenda.EXPERIMENT)
        _copy(launcher, folder / agenda.LAUNCHER)
        agenda.write(out, schedule)
        said = str(timers.backend(schedule.backend).install(out, schedule))
    if before is not None and before.backend != schedule.backend:
        left = timers.backend(before.backend).remove(out, before)
        said = "\n".join(filter(None, (said, left)))
    status_page.Page(out).write()
    return said


@contextlib.contextmanager
def _restoring(folder: Path) -> Iterator[None]:
    """After a refusal the schedule's own files are as they were before."""
    paths = [folder / name for name in (agenda.DEFINITION, agenda.EXPERIMENT, agenda.LAUNCHER)]
    before = {path: path.read_bytes() if path.is_file() else None for path in paths}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except (RequestError, OSError) as error:
        with contextlib.suppress(OSError):
            for path, content in before.items():
                path.unlink(missing_ok=True)
                if content is not None:
                    path.write_bytes(content)
        if isinstance(error, OSError):
            raise RequestError(f"--out: nothing can be written in {folder} ({error.strerror})") from None
        raise


def _copy(source: Path | None, target: Path) -> None:
    """None leaves no file there."""
    target.unlink(missing_ok=True)
    if source is not None:
        shutil.copyfile(source, target)


def remove(out: Path, name: str) -> str | None:
    """The timer and the definition go; results and history stay. Returns what is left to do by hand, if anything."""
    from paceline.campaign.schedule import timers

    schedule = agenda.read(out, name)
    left: str | None = timers.backend(schedule.backend).remove(out, schedule)
    (agenda.folder_of(out, name) / agenda.DEFINITION).unlink(missing_ok=True)
    status_page.Page(out).write()
    return left


def adopt(out: Path, name: str, asked: Path) -> None:
    """Bring what a pod was given into the results folder, where everything else is looked for."""
    from paceline.campaign.schedule.timers.kubernetes import definition_in
    from paceline.errors import StoreError

    try:
        schedule = definition_in(asked)
    except StoreError as error:
        raise RequestError(f"--definition: {asked} {error}; accepted is the folder of a schedule") from None
    if schedule.name != name:
        raise RequestError(
            f"--definition: {asked} holds the schedule {schedule.name!r}; accepted is one named {name!r}"
        )
    folder = agenda.folder_of(out, name)
    folder.mkdir(parents=True, exist_ok=True)
    for file in (agenda.EXPERIMENT, agenda.LAUNCHER):
        if (asked / file).is_file():
            shutil.copyfile(asked / file, folder / file)
    agenda.write(out, schedule)
