"""A campaign as its folder tells it: what is planned, how each run ended, what runs now, how long the rest may take.

DIR/<experiment>/campaign.json holds the runs in order, and which process makes them. It is a convenience of whoever
watches: results are the run folders alone, and a folder without it is read as well as it can be.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.errors import PacelineError
from paceline.experiment.choices import Choice
from paceline.experiment.serving import STAGED_SCENARIOS
from paceline.experiment.spec import RunSpec
from paceline.results import safe_text, store
from paceline.results.records import Status

PLAN = "campaign.json"
# On another host a process cannot be asked for: whoever has not moved for this long is not called running.
FRESH_S = 600.0
# Enough of a sample file's end for several steps, little enough to read every second beside a run.
TAIL_BYTES = 4096
RECENT_STEPS = 5
# Before so many of its requests have ended, the time that a served model took to start would be taken for theirs.
TELLING_SHARE = 0.1
# Times of files and of processes are rounded by different clocks.
CLOCK_S = 2.0


# --- the plan ---


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One run of a plan; kin is the same for runs of one workload, model and number of processes."""

    run: str
    cell: str
    workload: str
    kin: str

    @classmethod
    def of(cls, spec: RunSpec) -> PlannedRun:
        kin = f"{spec.workload.name} {spec.model} {spec.topology.device} x{spec.topology.world_size}"
        return cls(run=spec.run_id, cell=spec.cell, workload=spec.workload.name, kin=kin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All runs of a campaign in order, and the process that makes them: where it runs and when it began."""

    runs: tuple[PlannedRun, ...]
    host: str
    pid: int
    began_at: float

    @property
    def is_driven(self) -> bool | None:
        """Whether its process still lives; None where it is another host's to say."""
        if self.host != socket.gethostname():
            return None
        # A number given to a newer process is not the one that wrote the plan.
        began_at = _process_began_at(self.pid)
        return began_at is not None and abs(began_at - self.began_at) < CLOCK_S


def _process_began_at(pid: int) -> float | None:
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return None


def write_plan(experiment: Path, specs: Sequence[RunSpec]) -> None:
    """Replace the plan as a whole; called again when a search adds runs."""
    runs = [asdict(PlannedRun.of(spec)) for spec in specs]
    pid = os.getpid()
    about = {"schema": 1, "host": socket.gethostname(), "pid": pid, "began_at": _process_began_at(pid)}
    store.write_json(experiment / PLAN, {**about, "runs": runs})


def read_plan(experiment: Path) -> Plan | None:
    """None where there is none, or none that can be read: it only adds to what the run folders say."""
    try:
        raw = store.read_json(experiment / PLAN)
        runs = tuple(PlannedRun(**run) for run in raw["runs"])
        return Plan(runs=runs, host=raw["host"], pid=int(raw["pid"]), began_at=float(raw["began_at"]))
    except (PacelineError, KeyError, TypeError, ValueError):
        return None


# --- the run of this moment ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """A run under way: the rank furthest behind, the last steps of rank 0, the most memory any rank has held.

    step counts from 0; steps is None for workloads without optimizer steps. Rates are of the last few steps, without
    any warm-up rule: a look, not a measurement. note is what the workload says in words of its own. Of a served model
    rank 0 speaks, which asks; the others only hold their replicas.
    """

    spec: RunSpec
    began_at: float
    rank: int
    step: int
    phase: str
    beat: float
    step_s: float | None
    loss: float | None
    peak_bytes: int | None
    note: str = ""

    @property
    def steps(self) -> int | None:
        return self.spec.steps if self.spec.is_trained else None

    @property
    def tokens_per_s(self) -> float | None:
        return self.spec.tokens_per_step / self.step_s if self.step_s and self.spec.is_trained else None

    @property
    def left_s(self) -> float | None:
        """Time for the steps that are left, by the last ones; of a served model for the requests that are left, by all
        so far and the start before them, once enough of them have ended to tell."""
        if self.spec.is_trained:
            return max(self.spec.steps - self.step, 0) * self.step_s if self.step_s else None
        whole = requests_planned(self.spec)
        if whole is None or self.phase != "timing" or self.step < TELLING_SHARE * whole:
            return None
        return max(self.beat - self.began_at, 0.0) / self.step * max(whole - self.step, 0)


def requests_planned(spec: RunSpec) -> int | None:
    """Of all loads of a run; None where time or the answers decide how many they are."""
    asked, engine = spec.serving, spec.engine
    if asked is None or engine is None or asked.requests is None or asked.least_s or asked.loadgen != "own":
        return None
    if asked.scenario in STAGED_SCENARIOS:
        return None
    urls = engine.options.get("urls")
    replicas = len(urls) if isinstance(urls, list | tuple) else spec.topology.world_size
    return asked.requests * (2 * replicas if asked.partition == "paired" else 1)


def read_pulse(run_dir: Path, spec: RunSpec, positions: Sequence[store.Progress]) -> Pulse | None:
    """None before any rank has started."""
    if not positions:
        return None
    behind = min(positions, key=lambda p: p.rank if spec.serving else (p.step, p.beat))
    recent = _recent_steps(run_dir / "samples-0.jsonl")
    seconds = [float(step["duration_s"]) for step in recent]
    losses = [p.loss for p in positions if p.rank == 0 and math.isfinite(p.loss)]
    return Pulse(
        spec=spec,
        began_at=(run_dir / "spec.json").stat().st_mtime,
        rank=behind.rank,
        # After the window come steps that are watched by other means; requests are no steps.
        step=behind.step if spec.serving else min(behind.step, spec.steps),
        phase=behind.phase,
        beat=max(p.beat for p in positions),
        step_s=fmean(seconds) if seconds else None,
        loss=losses[0] if losses else None,
        peak_bytes=max((p.peak_bytes for p in positions if p.peak_bytes is not None), default=None),
        note=behind.note,
    )


def _recent_steps(path: Path) -> list[Mapping[str, Any]]:
    """The last few step samples of a file that is being written; whatever is cut off at either end is not looked at."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin = file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().split(b"\n")[1 if begin else 0 : -1]
        rows = [json.loads(line) for line in lines]
    except (OSError, ValueError, RecursionError):
        return []
    return [row for row in rows if row.get("kind") == "step"][-RECENT_STEPS:]


# --- how long the rest may take ---


@dataclass(frozen=True, slots=True)
class EndedRun:
    """How a run ended, and its wall time from its folder's making to its seal."""

    status: str
    seconds: float


def forecast_s(runs: Iterable[PlannedRun], ended: Mapping[str, EndedRun], pulse: Pulse | None) -> float | None:
    """Seconds to the end of the plan; None while it holds a run like none that was seen.

    A run is expected to take the mean of its own cell's repeats, however they ended; else of ended-ok runs of the same
    workload, model and number of processes; else of the same workload. The one under way counts by its last steps or
    requests; one that tells of neither and already takes longer than expected is like none that was seen.
    """
    planned = tuple(runs)
    current = PlannedRun.of(pulse.spec) if pulse else None
    seen = [(run, ended[run.run]) for run in planned if run.run in ended]
    left = rest = 0.0
    if pulse and current:
        elapsed = max(time.time() - pulse.began_at, 0.0)
        usual = _expected_s(current, seen)
        if pulse.left_s is not None:
            rest = pulse.left_s
        elif usual is not None and usual > elapsed:
            rest = usual - elapsed
        else:
            return None
        if usual is None:
            seen.append((current, EndedRun(Status.OK, elapsed + rest)))
    for run in planned:
        if run.run in ended or (current and run.run == current.run):
            continue
        expected = _expected_s(run, seen)
        if expected is None:
            return None
        left += expected
    return left + rest


def _expected_s(run: PlannedRun, seen: Sequence[tuple[PlannedRun, EndedRun]]) -> float | None:
    ok = [(other, end) for other, end in seen if end.status == Status.OK]
    tiers = (
        [end.seconds for other, end in seen if other.cell == run.cell],
        [end.seconds for other, end in ok if other.kin == run.kin],
        [end.seconds for other, end in ok if other.workload == run.workload],
    )
    return next((fmean(seconds) for seconds in tiers if seconds), None)


# --- the whole folder ---


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignView:
    """One experiment at this moment. planned is None where the folder does not tell; ended counts runs by status, of
    the plan where there is one. waiting says of runs whose job the engine has not begun why. interrupted are runs that
    began and nobody watches to their end; left_jobs says of those whose job may outlive its controller where that is.
    """

    experiment: Path
    planned: int | None
    ended: Mapping[str, int]
    pulses: tuple[Pulse, ...]
    starting: tuple[str, ...]
    interrupted: tuple[str, ...]
    running: bool
    left_s: float | None
    left_jobs: Mapping[str, str] = field(default_factory=dict)
    waiting: Mapping[str, str] = field(default_factory=dict)


def read_views(out: Path) -> tuple[CampaignView, ...]:
    """Every experiment at or below a folder, by name."""
    planned = {path.parent for path in out.glob(PLAN)} | {path.parent for path in out.glob(f"*/{PLAN}")}
    return tuple(map(read_view, sorted(planned | {path.parent for path in store.run_dirs(out)})))


def read_view(experiment: Path) -> CampaignView:
    plan = read_plan(experiment)
    driven = plan.is_driven if plan else None
    wanted = {run.run for run in plan.runs} if plan else None
    dirs = [path for path in store.run_dirs(experiment) if wanted is None or path.name in wanted]
    ended = {path.name: end for path in dirs if (end := read_end(path)) is not None}
    unsealed = {path: _pulse_of(path) for path in dirs if path.name not in ended}
    alive = [path for path, pulse in unsealed.items() if _is_under_way(path, pulse, plan, driven)]
    # What ranks left before their job went back into the queue is of an earlier attempt.
    waiting = {path: why for path in alive if (why := _waiting(path)) is not None}
    pulses = tuple(pulse for path in alive if path not in waiting and (pulse := unsealed[path]) is not None)
    complete = plan is not None and len(ended) == len(plan.runs)
    running = bool(pulses or waiting) or (bool(driven) and not complete)
    left = [path for path in unsealed if path not in alive]
    return CampaignView(
        experiment=Path(safe_text.text(str(experiment))),
        planned=len(plan.runs) if plan else None,
        ended=dict(sorted(Counter(end.status for end in ended.values()).items())),
        pulses=pulses,
        starting=tuple(safe_text.text(path.name) for path in alive if unsealed[path] is None and path not in waiting),
        interrupted=tuple(safe_text.text(path.name) for path in left),
        running=running,
        left_s=forecast_s(plan.runs, ended, next(iter(pulses), None)) if plan and running else None,
        waiting={safe_text.text(path.name): why for path, why in waiting.items()},
        left_jobs={safe_text.text(path.name): job for path in left if (job := _left_job(path)) is not None},
    )


def _is_under_way(run_dir: Path, pulse: Pulse | None, plan: Plan | None, driven: bool | None) -> bool:
    """Moved since the process began that is at work now; where that cannot be asked, by how lately the run moved."""
    if plan is not None and _touched_at(run_dir) < plan.began_at - CLOCK_S:
        return False  # left by an earlier campaign; the present one will come to it
    if driven is not None:
        return driven
    heard_at = _touched_at(run_dir) if _waiting(run_dir) else pulse.beat if pulse else None
    if heard_at is None or time.time() - heard_at > FRESH_S:
        return False
    ours = plan is None and not any(_process_began_at(p.pid) for p in store.read_progress(run_dir))
    return not ours


def _touched_at(run_dir: Path) -> float:
    """When a run last was begun, started again or heard of. A run that goes on keeps the spec.json of its first start,
    and one that is adopted its job.json too. Times of files, as beats are by the clocks of nodes."""
    asked = (run_dir / "spec.json", run_dir / store.JOB)
    return _newest([*asked, *run_dir.glob("progress-*"), *run_dir.glob("samples-*.jsonl")])


def _newest(paths: Iterable[Path]) -> float:
    times = [0.0]
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # a restart sets files aside meanwhile
            times.append(path.stat().st_mtime)
    return max(times)


def _waiting(run_dir: Path) -> str | None:
    """Why the engine has not begun the job, as its controller last wrote it down; None for one that has begun. Ranks
    that moved since are the newer word: a controller that died meanwhile takes its note back no more."""
    try:
        why, told_at = store.read_json(run_dir / store.JOB).get("waiting"), _newest([run_dir / store.JOB])
    except (PacelineError, AttributeError):
        return None
    if not isinstance(why, str) or _newest(run_dir.glob("progress-*")) > told_at:
        return None
    return safe_text.text(why)


def _left_job(run_dir: Path) -> str | None:
    """`its job NAME may still run on slurm`, or was waiting there; None where a job ends with its controller, as those
    of local, ssh and ray."""
    try:
        job = store.read_json(run_dir / store.JOB)
        engine = Choice.parse(str(job["launcher"])).name
        if not job.get("outlives_controller"):
            return None
    except (PacelineError, KeyError, TypeError):
        return None
    handle = job.get("handle")
    name = handle.get("job_id") or handle.get("name") if isinstance(handle, Mapping) else None
    # Without a handle the controller died while it handed the job over.
    called = f"its job{f' {name}' if name else ''}"
    if _waiting(run_dir):
        return safe_text.text(f"{called} was waiting on {engine} when last seen, and may run by now")
    return safe_text.text(f"{called} may still run on {engine}")


def read_end(run_dir: Path) -> EndedRun | None:
    """How a run ended and how long it took; None where it has not, status `damaged` where its seal cannot be read."""
    if not store.is_sealed(run_dir):
        return None
    try:
        raw = store.read_json(run_dir / "status.json")
        return EndedRun(str(raw["status"]), float(raw["ended_at"]) - float(raw["started_at"]))
    except (PacelineError, KeyError, TypeError, ValueError):
        return EndedRun("damaged", 0.0)


def _pulse_of(run_dir: Path) -> Pulse | None:
    try:
        return read_pulse(run_dir, store.read_spec(run_dir), store.read_progress(run_dir))
    except (PacelineError, OSError, KeyError, TypeError, ValueError):
        return None
