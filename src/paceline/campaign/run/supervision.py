"""One run on an engine: start its job or find it again, follow it, judge how it ended, and restart it if that may help.

    run_attempts ── start / adopt ── follow ── judge ── is_retryable ── the next attempt, or the end

How a job is started is up to the launcher. When a job is late, hangs or is lost is decided here, the same way for every
engine. A restart cancels and submits the same job in the same run directory; the ranks decide what they resume from
(`workloads`).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from paceline.contract import Job, JobState, Launcher
from paceline.errors import LaunchError, StoreError, StrayJobError
from paceline.experiment.spec import RunSpec
from paceline.host import redaction
from paceline.host.files import log_text
from paceline.host.processes import how_it_ended
from paceline.launchers.node import placement
from paceline.results import attempts, store
from paceline.results.attempts import JOB
from paceline.results.records import Outcome, Status

POLL_S = 0.1
# How often the reason of a waiting job is written again; see `campaign_file.FRESH_S`.
NOTE_S = 60.0
# Pause after an attempt in which no rank started: an engine that lost a node needs a moment.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended. lost: the nodes that the last attempt continued without. recurs: see `contract.JobState`."""

    status: Status
    error: str | None
    lost: tuple[int, ...] = ()
    recurs: bool = False


class Observer(Protocol):
    """What watches a campaign: the terminal, a log, a test.

    begin is called again when runs were added. waiting: the engine has not started the job yet. restarting: an attempt
    was lost, and `left` more are allowed after the next one. advising: a run was out of memory, and Paceline looks for
    settings that fit. ended: known is true for a run that an earlier command finished.
    """

    def begin(self, specs: Sequence[RunSpec]) -> None: ...
    def started(self, spec: RunSpec, run_dir: Path) -> None: ...
    def waiting(self, spec: RunSpec, reason: str, seconds: float) -> None: ...
    def moved(self, spec: RunSpec, positions: Sequence[store.Progress]) -> None: ...
    def restarting(self, spec: RunSpec, reason: str, left: int) -> None: ...
    def advising(self, spec: RunSpec, seconds: float) -> None: ...
    def ended(self, spec: RunSpec, status: Status, error: str | None, known: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class RankReports:
    """What ranks and their starters reported by the end of a job: outcomes, and the text of the log."""

    outcomes: Sequence[Outcome]
    log: str

    @classmethod
    def read(cls, run_dir: Path) -> RankReports:
        return cls(store.reported_outcomes(run_dir), log_text(run_dir / "log.txt"))

    @property
    def failures(self) -> list[Outcome]:
        """Outcomes of ranks that did not end ok, the earliest first."""
        return sorted((o for o in self.outcomes if o.status is not Status.OK), key=lambda o: o.ended_at)


@dataclass(frozen=True, slots=True)
class End:
    """How a job ended: by itself, by a limit, or because no rank moved any more.

    missing: which results could not be collected.
    before: the reports when a limit was reached, None if the job ended by itself. Nodes are then stopped one after
    another, and later ranks report lost peers, which says nothing about the cause.
    gone: the engine has released the job. A job that is still there may write into the run directory.
    """

    state: JobState
    limit: Status | None = None
    text: str | None = None
    missing: str | None = None
    before: RankReports | None = None
    gone: bool = True


@dataclass(frozen=True, slots=True)
class Launch:
    """A job in progress, and when it was submitted."""

    handle: Mapping[str, Any]
    submitted_at: float


def run_attempts(launcher: Launcher, launch: Launch | None, spec: RunSpec, run_dir: Path, observer: Observer) -> Ended:
    """Follow the current attempt, or start one, and restart it up to `max_restarts` times while that may help."""
    while True:
        error: str | None
        lost: tuple[int, ...] = ()
        recurs = False
        try:
            if launch is None:
                launch = start(launcher, launcher.prepare(spec, run_dir), spec, run_dir)
            end = follow(launcher, launch, spec, run_dir, observer)
        except LaunchError as refusal:
            # An engine that accepted this job before may accept it again.
            status, error, retryable = Status.FAILED, str(refusal), bool(attempts.ended(run_dir))
            gone, recurs = not isinstance(refusal, StrayJobError), refusal.recurs
        else:
            status, error = judge(spec, run_dir, end)
            retryable, gone, lost = is_retryable(status, spec, run_dir, end), end.gone, end.state.lost
            recurs = end.state.recurs and status is Status.FAILED
        restarts = attempts.restarts(run_dir)
        if retryable and restarts < spec.max_restarts and not gone:
            # Two jobs would write into one directory.
            retryable, error = False, f"{error}; not restarted: its job could not be cancelled and may still be running"
        if not retryable or restarts >= spec.max_restarts:
            break
        began = bool(store.read_progress(run_dir))
        attempts.close(run_dir, status, error)
        observer.restarting(spec, error or str(status), spec.max_restarts - restarts - 1)
        if not began:
            time.sleep(min(FIRST_PAUSE_S * 2**restarts, LONGEST_PAUSE_S))
        launch = None
    attempts.conclude(run_dir, status, error)
    if retryable and restarts:
        error = f"{error}; restarted {restarts} time{'' if restarts == 1 else 's'}, the limit of max_restarts"
    return Ended(status, error, lost, recurs)


# --- start it, or find it again ---


def start(launcher: Launcher, job: Job, spec: RunSpec, run_dir: Path) -> Launch:
    """Submit the job.

    job.json is written first: a controller that dies in between leaves enough to find the job again.
    """
    submitted_at = time.time()
    about = {"launcher": str(spec.launcher), "command": str(job), "submitted_at": submitted_at}
    about["outlives_controller"] = hasattr(launcher, "adopt")
    store.write_json(run_dir / JOB, {**about, "handle": None})
    handle = launcher.submit(job)
    with contextlib.ExitStack() as undo:
        # A job that could not be written down would be lost.
        undo.callback(launcher.cancel, handle)
        store.write_json(run_dir / JOB, {**about, "handle": handle})
        undo.pop_all()
    return Launch(handle, submitted_at)


def is_adoptable(launcher: Launcher, run_dir: Path) -> bool:
    """Whether an earlier controller may have left a job of this run with the engine."""
    return hasattr(launcher, "adopt") and not store.is_sealed(run_dir) and (run_dir / JOB).is_file()


def adopt(launcher: Launcher, spec: RunSpec, run_dir: Path) -> Launch | None:
    """The job that an earlier controller started for this run and did not live to see end."""
    if not is_adoptable(launcher, run_dir):
        return None
    try:
        known = store.read_json(run_dir / JOB)
    except StoreError:
        return None
    # Optional, see `contract.Launcher`.
    find = launcher.adopt  # type: ignore[attr-defined]
    handle = find(launcher.prepare(spec, run_dir), known.get("handle"))
    if handle is None:
        return None
    # `paceline status` shows that the job is watched again, even before a rank moves.
    _amend(run_dir, handle=handle, adopted_at=time.time(), waiting=None)
    return Launch(handle, float(known.get("submitted_at") or time.time()))


def _amend(run_dir: Path, **facts: Any) -> bool:
    """Add facts to job.json and return whether that worked. A full disk must not end a run for this."""
    with contextlib.suppress(StoreError, OSError):
        store.write_json(run_dir / JOB, {**store.read_json(run_dir / JOB), **facts})
        return True
    return False


# --- follow it ---


def follow(launcher: Launcher, launch: Launch, spec: RunSpec, run_dir: Path, observer: Observer) -> End:
    """Watch a job to its end and collect its results; however this function ends, the job is cancelled."""
    gone = False
    try:
        try:
            end = _wait(launcher, launch, spec, run_dir, observer)
            collect = getattr(launcher, "collect", None)
            end = end if collect is None else replace(end, missing=collect(launch.handle, run_dir))
        finally:
            # A launcher that returns nothing has ended the job.
            gone = launcher.cancel(launch.handle) is not False
    except KeyboardInterrupt:
        how = "was cancelled" if gone else "could not be cancelled, see log.txt of its run"
        raise KeyboardInterrupt(f"the running job {how}") from None
    except LaunchError as refusal:
        if gone:
            raise
        raise StrayJobError(str(refusal), recurs=refusal.recurs) from None
    return replace(end, gone=gone)


@dataclass(slots=True)
class StallClock:
    """How long no rank has moved, by this host's clock: clocks of nodes may be minutes off."""

    beats: dict[int, float] = field(default_factory=dict)
    moved_at: float = field(default_factory=time.monotonic)

    def still_s(self, positions: Sequence[store.Progress]) -> float:
        beats = {p.rank: p.beat for p in positions}
        if beats != self.beats:
            self.beats, self.moved_at = beats, time.monotonic()
        return time.monotonic() - self.moved_at


@dataclass(slots=True)
class QueueNote:
    """Why a job waits, written to job.json for `paceline status`. It is renewed while the job waits: other hosts see
    only by its age that a controller is still there."""

    run_dir: Path
    written: str | None = None
    written_at: float = float("-inf")

    def keep(self, waiting: str | None) -> None:
        is_old = waiting is not None and time.monotonic() - self.written_at > NOTE_S
        text = waiting and redaction.clean_text(waiting)
        # A failed write is tried again: a stale note would hide a running job.
        if (waiting != self.written or is_old) and _amend(self.run_dir, waiting=text):
            self.written, self.written_at = waiting, time.monotonic()


def _wait(launcher: Launcher, launch: Launch, spec: RunSpec, run_dir: Path, observer: Observer) -> End:
    """Poll the job until it ends, exceeds its time limit or stalls."""
    submitted = began = time.monotonic()
    stall_clock, note, seen = StallClock(), QueueNote(run_dir), False
    while True:
        state = launcher.poll(launch.handle)
        note.keep(state.waiting)
        positions = store.read_progress(run_dir)
        if positions and not seen:
            seen = True
            # The cost of a restart is counted from here, also by a later controller.
            with contextlib.suppress(StoreError):
                if store.read_json(run_dir / JOB).get("began_at") is None:
                    _amend(run_dir, began_at=time.time())
        if not state.running:
            return End(state)
        if state.waiting is not None:
            # Time in a queue is not part of the run.
            observer.waiting(spec, state.waiting, time.monotonic() - submitted)
            began, stall_clock = time.monotonic(), StallClock()
        else:
            observer.moved(spec, positions)
        if time.monotonic() - began > spec.timeout_s:
            where = "; ".join(f"rank {p.rank} was at step {p.step} in {p.phase}" for p in positions[:4])
            late = f"did not end within {spec.timeout_s:g} s; {where or 'no rank had started'}"
            return End(state, Status.TIMEOUT, late, before=RankReports.read(run_dir))
        if stall_clock.still_s(positions) > spec.stall_s:
            here = getattr(launcher, "HERE", False)
            before = RankReports.read(run_dir)
            if here:
                # Every rank on this host writes its Python stacks before it is stopped.
                for position in positions:
                    with contextlib.suppress(OSError):
                        os.kill(position.pid, signal.SIGUSR1)
                time.sleep(0.5)
            stalled = name_stalled(positions, spec, here)
            return End(state, Status.HANG, f"no progress for {spec.stall_s:g} s: {stalled}", before=before)
        time.sleep(POLL_S)


def name_stalled(positions: Sequence[store.Progress], spec: RunSpec, here: bool = True) -> str:
    """Which rank blocks the others: one that never started, one that is suspended, else the one furthest behind.

    here: the ranks are processes of this host; otherwise their process ids say nothing.
    """
    missing = sorted(set(range(spec.topology.world_size)) - {p.rank for p in positions})
    if missing:
        return f"rank {missing[0]} never started"
    for p in positions:
        if here and _process_state(p.pid) == "stopped":
            return f"rank {p.rank} stopped at step {p.step} in {p.phase} (its process {p.pid} is suspended)"
    order = {phase: number for number, phase in enumerate(store.PHASES)}
    behind = min(positions, key=lambda p: (p.step, order[p.phase], p.beat))
    where = f"rank {behind.rank} stopped at step {behind.step} in {behind.phase}"
    return f"{where}; its stack is in stack-{behind.rank}.txt"


def _process_state(pid: int) -> str | None:
    import psutil

    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return None


# --- judge how it ended ---


def judge(spec: RunSpec, run_dir: Path, end: End) -> tuple[Status, str | None]:
    """Status and reason of a job that has ended, from what its ranks reported and what the engine says."""
    reports = end.before or RankReports.read(run_dir)
    failures = reports.failures
    if end.limit is not None and not failures:
        return end.limit, end.text
    # The job continued without these nodes, so no outcome of their ranks is expected.
    per_node = spec.topology.processes_per_node
    excused = {rank for node in end.state.lost for rank in range(node * per_node, (node + 1) * per_node)}
    is_complete = {outcome.rank for outcome in reports.outcomes} | excused == set(range(spec.topology.world_size))
    if end.state.status is not None and (failures or not is_complete):
        # The engine knows why ranks vanished; the remaining ranks only noticed.
        return end.state.status, end.state.reason or f"the engine reports the job as {end.state.status}"
    deaths = {rank: code for rank, code in _deaths(reports).items() if rank not in excused}
    if failures and not deaths:
        first = failures[0]
        if spec.topology.world_size == 1 or first.status is Status.UNSUPPORTED:
            return first.status, first.error or "it left no reason"
        return first.status, f"rank {first.rank} on {first.host}: {first.error}"
    if is_complete and end.missing is None:
        return Status.OK, None
    if deaths:
        rank, code = next(iter(deaths.items()))
        host = placement.host_of(rank, reports.log)
        return Status.FAILED, how_it_ended(f"rank {rank}{f' on {host}' if host else ''}", code, run_dir / "log.txt")
    if end.missing is not None:
        return Status.FAILED, f"results are incomplete: {end.missing}"
    lines = [line for line in reports.log.splitlines() if line.strip() and not placement.RAN_ON.search(line)]
    exit_code = end.state.exit_code
    how = "without an exit code" if exit_code is None else f"with exit code {exit_code}"
    return Status.FAILED, f"the job ended {how}: {lines[-1][:300] if lines else 'it printed nothing'}"


# What ranks report when a peer is gone: messages of torch, gloo and NCCL.
_LOST_PEER = re.compile(
    r"connection (was )?(reset|closed|refused)|broken pipe|remote process exited|network error|nccl|gloo|"
    r"Dist(Backend|Network|Store)Error|timed out|socket",
    re.IGNORECASE,
)


def is_retryable(status: Status, spec: RunSpec, run_dir: Path, end: End) -> bool:
    """Whether the same job may end better next time: a rank or a node was lost, pre-empted or hung.

    An error that a rank raised itself would repeat, and so would a job in which no rank ever started.
    """
    if status in (Status.PREEMPTED, Status.HANG):
        return True
    positions = store.read_progress(run_dir)
    if status is not Status.FAILED or not positions:
        return False
    reports = end.before or RankReports.read(run_dir)
    if _deaths(reports):
        return True
    failures = reports.failures
    if not failures:
        return len(reports.outcomes) < spec.topology.world_size
    stepped = any(position.phase not in ("start", "setup") for position in positions)
    return stepped and spec.topology.world_size > 1 and _LOST_PEER.search(failures[0].error or "") is not None


# Lines of torchrun's failure summary. The text before them on a line is a node name that srun or a log follower added.
_RANK = re.compile(r"^(.*?)\s*\brank\s*:\s*(\d+) \(local_rank")
_EXIT = re.compile(r"^(.*?)\s*\bexitcode\s*:\s*(-?\d+)\b")
_SECTION = re.compile(r"^(.*?)\s*\b(Failures:|Root Cause\b)")
# Exit codes after SIGTERM: of a rank that it ends, and of one that ends the command of a script first.
_STOPPED = (-signal.SIGTERM, 128 + signal.SIGTERM)


def _deaths(reports: RankReports) -> dict[int, int]:
    """Exit codes of ranks that died without an outcome, from torchrun's log, the likeliest cause first.

    These are the root cause of every node and the others that torchrun did not stop itself. Such a rank is the cause:
    its peers only reported that it was gone. A rank that received SIGTERM comes last: something else ended first.
    """
    reported = {outcome.rank for outcome in reports.outcomes}
    deaths: dict[int, int] = {}
    rank_of: dict[str, int] = {}
    in_root: dict[str, bool] = {}
    for line in reports.log.splitlines():
        if section := _SECTION.match(line):
            in_root[section[1]] = section[2] != "Failures:"
        elif named := _RANK.match(line):
            rank_of[named[1]] = int(named[2])
        elif ended := _EXIT.match(line):
            rank, code = rank_of.pop(ended[1], None), int(ended[2])
            stopped_by_torchrun = code in _STOPPED and not in_root.get(ended[1], False)
            if rank is not None and rank not in reported and not stopped_by_torchrun:
                deaths[rank] = code
    return dict(sorted(deaths.items(), key=lambda death: (death[1] in _STOPPED, death[0])))
