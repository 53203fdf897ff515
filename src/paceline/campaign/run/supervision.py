"""Watching one job: start it or find it again, follow it to its end, bring home what it left.

How a job is started is the launcher's affair; when one counts as late, as hanging or as lost is decided here, the same
for every engine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from paceline.contract import Job, JobState, Launcher
from paceline.errors import LaunchError, StoreError, StrayJobError
from paceline.experiment.spec import RunSpec
from paceline.host import redaction
from paceline.results import store
from paceline.results.attempts import JOB
from paceline.results.records import Outcome, Status

POLL_S = 0.1
# How often the reason of a job that waits is written down anew; see `campaign.FRESH_S`.
NOTE_S = 60.0


class Observer(Protocol):
    """Whoever watches a campaign: the terminal, a log, a test. begin is called again when runs were added, waiting
    while the engine has not started the job yet, restarting when an attempt was lost and the next one follows (left:
    how many more may), advising while settings that would fit are looked for after a run out of memory."""

    def begin(self, specs: Sequence[RunSpec]) -> None: ...
    def started(self, spec: RunSpec, run_dir: Path) -> None: ...
    def waiting(self, spec: RunSpec, reason: str, seconds: float) -> None: ...
    def moved(self, spec: RunSpec, positions: Sequence[store.Progress]) -> None: ...
    def restarting(self, spec: RunSpec, reason: str, left: int) -> None: ...
    def advising(self, spec: RunSpec, seconds: float) -> None: ...
    def ended(self, spec: RunSpec, status: Status, error: str | None, known: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class Words:
    """What ranks and their starters had said of the end of a job: outcomes, and the text of its log."""

    outcomes: Sequence[Outcome]
    log: str

    @classmethod
    def read(cls, run_dir: Path) -> Words:
        path = run_dir / "log.txt"
        return cls(store.read_outcomes(run_dir), path.read_text(errors="replace") if path.exists() else "")


@dataclass(frozen=True, slots=True)
class End:
    """How a job ended from outside: by itself, by a limit, or because no rank moved any more. missing says which of
    its results could not be brought home.

    before: what had been said when a limit was reached. Nodes are then ended one after another, and ranks of the later
    ones complain of the peers they lost: such words tell nothing of the cause. None where the job ended by itself.
    gone: whether the engine has let go of the job. One that is still there may write into the run folder.
    """

    state: JobState
    limit: Status | None = None
    text: str | None = None
    missing: str | None = None
    before: Words | None = None
    gone: bool = True


@dataclass(frozen=True, slots=True)
class Launch:
    """A job under way, and when it was submitted."""

    handle: Mapping[str, Any]
    submitted_at: float


def start(launcher: Launcher, job: Job, spec: RunSpec, run_dir: Path) -> Launch:
    """Submit the job. What was about to be submitted is written down first: a controller that dies in between leaves
    enough to find the job again, and to start nothing twice."""
    submitted_at = time.time()
    about = {"launcher": str(spec.launcher), "command": str(job), "submitted_at": submitted_at}
    about["outlives_controller"] = hasattr(launcher, "adopt")
    store.write_json(run_dir / JOB, {**about, "handle": None})
    handle = launcher.submit(job)
    with contextlib.ExitStack() as undo:
        # Nobody would follow a job that could not be written down.
        undo.callback(launcher.cancel, handle)
        store.write_json(run_dir / JOB, {**about, "handle": handle})
        undo.pop_all()
    return Launch(handle, submitted_at)


def is_adoptable(launcher: Launcher, run_dir: Path) -> bool:
    """Whether an earlier controller may have left a job of this run with the engine."""
    return hasattr(launcher, "adopt") and not store.is_sealed(run_dir) and (run_dir / JOB).is_file()


def adopt(launcher: Launcher, spec: RunSpec, run_dir: Path) -> Launch | None:
    """The job that an earlier controller has started for this run and did not live to see the end of."""
    if not is_adoptable(launcher, run_dir):
        return None
    try:
        known = store.read_json(run_dir / JOB)
    except StoreError:
        return None
    # Not every launcher has it, see `plugins.Launcher`.
    find = launcher.adopt  # type: ignore[attr-defined]
    handle = find(launcher.prepare(spec, run_dir), known.get("handle"))
    if handle is None:
        return None
    # Somebody watches it again: whoever asks for the status sees that, also while no rank moves yet.
    _amend(run_dir, handle=handle, adopted_at=time.time(), waiting=None)
    return Launch(handle, float(known.get("submitted_at") or time.time()))


def follow(launcher: Launcher, launch: Launch, spec: RunSpec, run_dir: Path, observer: Observer) -> End:
    """Watch a job to its end and bring home what it left; whatever ends this function ends the job."""
    gone = False
    try:
        try:
            end = _wait(launcher, launch, spec, run_dir, observer)
            collect = getattr(launcher, "collect", None)
            end = end if collect is None else replace(end, missing=collect(launch.handle, run_dir))
        finally:
            # A launcher that says nothing has ended it.
            gone = launcher.cancel(launch.handle) is not False
    except KeyboardInterrupt:
        how = "was cancelled" if gone else "could not be cancelled; see log.txt of its run"
        raise KeyboardInterrupt(f"the job under way {how}") from None
    except LaunchError as refusal:
        if gone:
            raise
        raise StrayJobError(str(refusal)) from None
    return replace(end, gone=gone)


@dataclass(slots=True)
class Vigil:
    """When something last moved, by this host's own clock: those of the nodes may be minutes off."""

    beats: dict[int, float] = field(default_factory=dict)
    moved_at: float = field(default_factory=time.monotonic)

    def still_s(self, positions: Sequence[store.Progress]) -> float:
        beats = {p.rank: p.beat for p in positions}
        if beats != self.beats:
            self.beats, self.moved_at = beats, time.monotonic()
        return time.monotonic() - self.moved_at


@dataclass(slots=True)
class QueueNote:
    """Why a job has not begun, kept beside it for whoever asks for the status; renewed while it holds, as another host
    knows by that alone that somebody still waits."""

    run_dir: Path
    told: str | None = None
    told_at: float = float("-inf")

    def keep(self, waiting: str | None) -> None:
        is_old = waiting is not None and time.monotonic() - self.told_at > NOTE_S
        # What could not be written is tried again: a note that was not taken back would hide a job that runs.
        if (waiting != self.told or is_old) and _amend(self.run_dir, waiting=waiting and redaction.clean_text(waiting)):
            self.told, self.told_at = waiting, time.monotonic()


def _wait(launcher: Launcher, launch: Launch, spec: RunSpec, run_dir: Path, observer: Observer) -> End:
    submitted = began = time.monotonic()
    vigil, note, seen = Vigil(), QueueNote(run_dir), False
    while True:
        state = launcher.poll(launch.handle)
        note.keep(state.waiting)
        positions = store.read_progress(run_dir)
        if positions and not seen:
            seen = True
            _note_begin(run_dir)
        if not state.running:
            return End(state)
        if state.waiting is not None:
            # Time in a queue is no time of the run.
            observer.waiting(spec, state.waiting, time.monotonic() - submitted)
            began, vigil = time.monotonic(), Vigil()
        else:
            observer.moved(spec, positions)
        if time.monotonic() - began > spec.timeout_s:
            late = f"did not end within {spec.timeout_s:g} s; {_whereabouts(positions, spec)}"
            return End(state, Status.TIMEOUT, late, before=Words.read(run_dir))
        if vigil.still_s(positions) > spec.stall_s:
            here = getattr(launcher, "HERE", False)
            before = Words.read(run_dir)
            if here:
                dump_stacks(positions)
            who = name_stalled(positions, spec, here)
            return End(state, Status.HANG, f"nothing moved for {spec.stall_s:g} s: {who}", before=before)
        time.sleep(POLL_S)


def _note_begin(run_dir: Path) -> None:
    """When the first rank was seen, for a later controller too: what a restart cost is counted from here."""
    with contextlib.suppress(StoreError):
        if store.read_json(run_dir / JOB).get("began_at") is None:
            _amend(run_dir, began_at=time.time())


def _amend(run_dir: Path, **facts: Any) -> bool:
    """Add to what is written down of a job, and say whether that went well. Nothing depends on it that a full disk
    should end a run for."""
    with contextlib.suppress(StoreError, OSError):
        store.write_json(run_dir / JOB, {**store.read_json(run_dir / JOB), **facts})
        return True
    return False


def _whereabouts(positions: Sequence[store.Progress], spec: RunSpec) -> str:
    seen = [f"rank {p.rank} was at step {p.step} in {p.phase}" for p in positions]
    return "; ".join(seen[:4]) or "no rank had started"


def name_stalled(positions: Sequence[store.Progress], spec: RunSpec, here: bool = True) -> str:
    """Which rank holds the others up: one that never came, one that is stopped, else the one furthest behind.

    here: ranks are processes of this host; elsewhere a number of a process says nothing.
    """
    missing = sorted(set(range(spec.topology.world_size)) - {p.rank for p in positions})
    if missing:
        return f"rank {missing[0]} never started"
    stopped = [p for p in positions if here and _process_state(p.pid) == "stopped"]
    if stopped:
        p = stopped[0]
        return f"rank {p.rank} stopped at step {p.step} in {p.phase} (its process {p.pid} is suspended)"
    order = {phase: number for number, phase in enumerate(store.PHASES)}
    behind = min(positions, key=lambda p: (p.step, order[p.phase], p.beat))
    return (
        f"rank {behind.rank} stopped at step {behind.step} in {behind.phase}; its stack is in stack-{behind.rank}.txt"
    )


def _process_state(pid: int) -> str | None:
    import psutil

    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return None


def dump_stacks(positions: Iterable[store.Progress]) -> None:
    """Ask every rank on this host for its Python stacks before it is ended."""
    for position in positions:
        with contextlib.suppress(OSError):
            os.kill(position.pid, signal.SIGUSR1)
    time.sleep(0.5)
