"""The state of a campaign, read from its directory: the plan, how each run ended, what runs now, the time left.

DIR/<experiment>/campaign.json lists the runs in order and the process that runs them. It only serves displays: results
are the run directories, and a directory without this file can be read too.
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
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.errors import PacelineError
from paceline.experiment.choices import Choice
from paceline.experiment.serving import STAGED_SCENARIOS
from paceline.experiment.spec import RunSpec
from paceline.host.files import open_regular
from paceline.host.trust import Trust, usage_checks
from paceline.host.usage import HostUsage
from paceline.results import safe_text, store
from paceline.results.records import Status
from paceline.results.validity import rule_of, usage_rule

PLAN = "campaign.json"
# A process on another host cannot be checked: after this long without progress it does not count as running.
FRESH_S = 600.0
# The end of a sample file that is read: enough for several steps, and fast enough to read every second.
TAIL_BYTES = 4096
# The same of a file of gauges: several readings of a host with eight GPUs.
GAUGES_TAIL_BYTES = 1 << 15
RECENT_STEPS = 5
# With fewer requests finished, the start of the server would dominate the estimate.
FEWEST_REQUESTS_RATIO = 0.1
# Times of files and of processes come from clocks with different resolution.
CLOCK_S = 2.0
# Counted like a status, though no seal has it.
DAMAGED = "damaged"


# --- the plan ---


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One run of a plan; kin is the same for runs of one workload, model and number of processes. devices is None in
    plans of earlier versions."""

    run: str
    cell: str
    workload: str
    kin: str
    devices: int | None = None

    @classmethod
    def of(cls, spec: RunSpec) -> PlannedRun:
        kin = f"{spec.workload.name} {spec.model} {spec.topology.device} x{spec.topology.world_size}"
        devices = spec.topology.world_size
        return cls(run=spec.run_id, cell=spec.cell, workload=spec.workload.name, kin=kin, devices=devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All runs of a campaign in order, and the process that runs them: its host, pid and start time. usd_per_hour is
    the price of one device, if known."""

    runs: tuple[PlannedRun, ...]
    host: str
    pid: int
    began_at: float
    usd_per_hour: float | None = None

    @property
    def is_driven(self) -> bool | None:
        """Whether its process is alive; None if it is on another host."""
        if self.host != socket.gethostname():
            return None
        # The pid may belong to a newer process by now.
        began_at = _process_began_at(self.pid)
        return began_at is not None and abs(began_at - self.began_at) < CLOCK_S


def _process_began_at(pid: int) -> float | None:
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return None


def write_plan(
    experiment: Path, specs: Sequence[RunSpec], rule: str | None = None, usd_per_hour: float | None = None
) -> None:
    """Replace the plan as a whole; called again when a search or a stopping rule adds runs. rule: when they end."""
    runs = [asdict(PlannedRun.of(spec)) for spec in specs]
    pid = os.getpid()
    about = {"schema": 1, "host": socket.gethostname(), "pid": pid, "began_at": _process_began_at(pid)}
    known = {name: value for name, value in (("rule", rule), ("usd_per_hour", usd_per_hour)) if value is not None}
    store.write_json(experiment / PLAN, {**about, **known, "runs": runs})


def read_plan(experiment: Path) -> Plan | None:
    """The plan; None if there is none or it cannot be read, because the run directories suffice."""
    try:
        raw = store.read_json(experiment / PLAN)
    except PacelineError:
        return None
    plan: dict[str, Any] = {field.name: raw.get(field.name) for field in fields(Plan)}
    if not rule_of(Plan).fits([plan]):
        return None
    return Plan(**{**plan, "runs": tuple(PlannedRun(**run) for run in plan["runs"])})


# --- the current run ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """A run in progress: the position of the slowest rank, the last steps of rank 0, the highest memory of any rank.

    step counts from 0; steps is None for workloads without optimizer steps. Rates cover the last few steps and ignore
    warm-up: they are for display only. note is free text of the workload. trust is the light of the first host over the
    last readings, None if there are not two. An inference run shows rank 0, which sends
    the requests; the other ranks only run replicas.
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
    trust: Trust | None = None

    @property
    def steps(self) -> int | None:
        return self.spec.steps or None if self.spec.is_trained else None

    @property
    def tokens_per_s(self) -> float | None:
        known = self.step_s and self.spec.is_trained and self.spec.script is None
        return self.spec.tokens_per_step / self.step_s if known and self.step_s else None

    @property
    def left_s(self) -> float | None:
        """Time for the remaining steps at the recent rate. For an inference run, time for the remaining requests at the
        mean rate since the start, once enough of them have finished."""
        if self.spec.is_trained:
            known = self.step_s if self.spec.steps else None
            return max(self.spec.steps - self.step, 0) * known if known else None
        whole = requests_planned(self.spec)
        if whole is None or self.phase != "timing" or self.step < FEWEST_REQUESTS_RATIO * whole:
            return None
        return max(self.beat - self.began_at, 0.0) / self.step * max(whole - self.step, 0)


def requests_planned(spec: RunSpec) -> int | None:
    """The number of requests of all loads of a run; None if time or the answers decide it."""
    serving, engine = spec.serving, spec.engine
    if serving is None or engine is None or serving.requests is None or serving.least_s or serving.loadgen != "own":
        return None
    if serving.scenario in STAGED_SCENARIOS:
        return None
    urls = engine.options.get("urls")
    replicas = len(urls) if isinstance(urls, list | tuple) else spec.topology.world_size
    return serving.requests * (2 * replicas if serving.partition == "paired" else 1)


def read_pulse(run_dir: Path, spec: RunSpec, positions: Sequence[store.Progress]) -> Pulse | None:
    """The state of a run in progress; None before any rank has started."""
    if not positions:
        return None
    behind = min(positions, key=lambda p: p.rank if spec.serving else (p.step, p.beat))
    recent = _recent_steps(run_dir / "samples-0.jsonl")
    seconds = [value for step in recent if (value := finite(step.get("duration_s"))) is not None]
    losses = [p.loss for p in positions if p.rank == 0 and math.isfinite(p.loss)]
    return Pulse(
        spec=spec,
        began_at=(run_dir / "spec.json").stat().st_mtime,
        rank=behind.rank,
        # Profiled steps follow the window; requests are not steps.
        step=behind.step if spec.serving or not spec.steps else min(behind.step, spec.steps),
        phase=behind.phase,
        beat=max(p.beat for p in positions),
        step_s=fmean(seconds) if seconds else None,
        loss=losses[0] if losses else None,
        peak_bytes=max((p.peak_bytes for p in positions if p.peak_bytes is not None), default=None),
        note=behind.note,
        trust=_recent_trust(run_dir, spec),
    )


def finite(value: object) -> float | None:
    """A finite number, else None: files of ranks may hold anything, also an integer that no float can hold."""
    try:
        return float(value) if type(value) in (int, float) and math.isfinite(value) else None  # type: ignore[arg-type]
    except OverflowError:
        return None


def _recent_trust(run_dir: Path, spec: RunSpec) -> Trust | None:
    """The trust light over the last readings of the first host that wrote any."""
    first = run_dir / "samples-gauges-0.jsonl"
    # Rank 0 is usually the first of its host; a search in thousands of files takes longer than reading one.
    for path in [first] if first.exists() else sorted(run_dir.glob("samples-gauges-*[0-9].jsonl"))[:1]:
        found = [
            HostUsage.from_dict(safe_text.value(row["usage"]))
            for row in _last_lines(path, GAUGES_TAIL_BYTES)
            if isinstance(row.get("usage"), dict) and usage_rule().fits([row["usage"]])
        ]
        if len(found) > 1:
            elsewhere = spec.engine is not None and not spec.starts_servers
            is_cpu_run = spec.topology.device == "cpu"
            return Trust(tuple(usage_checks(found[0], found[-1], is_cpu_run=is_cpu_run, serves_elsewhere=elsewhere)))
    return None


def _recent_steps(path: Path) -> list[Mapping[str, Any]]:
    return [row for row in _last_lines(path) if row.get("kind") == "step"][-RECENT_STEPS:]


def _last_lines(path: Path, most_bytes: int = TAIL_BYTES) -> list[Mapping[str, Any]]:
    """The last few samples of a file that is being written; incomplete lines are ignored."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            begin = file.seek(max(0, size - most_bytes))
            lines = file.read().split(b"\n")[1 if begin else 0 : -1]
        rows = [json.loads(line) for line in lines]
        return [row for row in rows if isinstance(row, dict)]
    except (OSError, ValueError, RecursionError):
        return []


# --- the time left ---


@dataclass(frozen=True, slots=True)
class EndedRun:
    """How a run ended, and its wall time from start to end. damage: what is wrong with the files of a damaged run.
    reused: an earlier campaign computed it."""

    status: str
    seconds: float
    damage: str | None = None
    reused: bool = False


def forecast_s(
    runs: Iterable[PlannedRun],
    ended: Mapping[str, EndedRun],
    pulse: Pulse | None,
    predicted: Mapping[str, float] | None = None,
) -> float | None:
    """Seconds to the end of the plan; None if the duration of a run cannot be estimated yet.

    A run is expected to take the mean of the repeats of its cell, however they ended; else of ok runs of the same
    workload, model and number of processes; else of ok runs of the same workload. The current run is estimated by its
    recent steps or requests. Without these, and if it already takes longer than expected, there is no estimate.
    predicted has the seconds of runs for which nothing was measured yet.
    """
    planned = tuple(runs)
    current = PlannedRun.of(pulse.spec) if pulse else None
    seen = [(run, ended[run.run]) for run in planned if run.run in ended]
    left = rest = 0.0
    if pulse and current:
        elapsed = max(time.time() - pulse.began_at, 0.0)
        usual = _expected_s(current, seen, predicted)
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
        expected = _expected_s(run, seen, predicted)
        if expected is None:
            return None
        left += expected
    return left + rest


def _expected_s(
    run: PlannedRun, seen: Sequence[tuple[PlannedRun, EndedRun]], predicted: Mapping[str, float] | None = None
) -> float | None:
    ok = [(other, end) for other, end in seen if end.status == Status.OK]
    tiers = (
        [end.seconds for other, end in seen if other.cell == run.cell],
        [end.seconds for other, end in ok if other.kin == run.kin],
        [end.seconds for other, end in ok if other.workload == run.workload],
    )
    return next((fmean(seconds) for seconds in tiers if seconds), (predicted or {}).get(run.run))


def _spent_usd(plan: Plan, ended: Mapping[str, EndedRun], pulses: Iterable[Pulse]) -> float | None:
    """What the devices of a plan have cost so far; None without a price."""
    if plan.usd_per_hour is None or any(run.devices is None for run in plan.runs):
        return None
    devices = {run.run: run.devices or 0 for run in plan.runs}
    device_s = sum(max(end.seconds, 0.0) * devices[run] for run, end in ended.items() if not end.reused)
    device_s += sum(max(time.time() - p.began_at, 0.0) * p.spec.topology.world_size for p in pulses)
    return device_s / 3600 * plan.usd_per_hour


# --- the whole directory ---


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignView:
    """The state of one experiment. planned is None without a plan. ended counts runs by status, with a plan only its
    runs. waiting has the reason for each run whose job has not started. interrupted lists runs that started and have
    no controller any more; left_jobs says for these where a job may still run. damaged says for each run whose files
    are not what was sealed which file it is. usd is what the devices have cost so far, None without a price."""

    experiment: Path
    planned: int | None
    ended: Mapping[str, int]
    pulses: tuple[Pulse, ...]
    starting: tuple[str, ...]
    interrupted: tuple[str, ...]
    running: bool
    left_s: float | None
    usd: float | None = None
    left_jobs: Mapping[str, str] = field(default_factory=dict)
    waiting: Mapping[str, str] = field(default_factory=dict)
    damaged: Mapping[str, str] = field(default_factory=dict)


def read_views(out: Path) -> tuple[CampaignView, ...]:
    """Every experiment at or below a directory, by name."""
    planned = {path.parent for path in out.glob(PLAN)} | {path.parent for path in out.glob(f"*/{PLAN}")}
    return tuple(map(read_view, sorted(planned | {path.parent for path in store.run_dirs(out)})))


def read_view(experiment: Path) -> CampaignView:
    plan = read_plan(experiment)
    driven = plan.is_driven if plan else None
    wanted = {run.run for run in plan.runs} if plan else None
    dirs = [path for path in store.run_dirs(experiment) if wanted is None or path.name in wanted]
    ended = {path.name: end for path in dirs if (end := read_end(path)) is not None}
    unfinished: dict[Path, Pulse | None] = {path: None for path in dirs if path.name not in ended}
    for path in unfinished:
        with contextlib.suppress(PacelineError, OSError, KeyError, TypeError, ValueError):
            unfinished[path] = read_pulse(path, store.read_spec(path), store.read_progress(path))
    alive = [path for path, pulse in unfinished.items() if _is_under_way(path, pulse, plan, driven)]
    # Progress files of a job that went back into the queue belong to an earlier attempt.
    waiting = {path: why for path in alive if (why := _waiting(path)) is not None}
    started = {path: unfinished[path] for path in alive if path not in waiting}
    pulses = tuple(pulse for pulse in started.values() if pulse is not None)
    complete = plan is not None and len(ended) == len(plan.runs)
    running = bool(pulses or waiting) or (bool(driven) and not complete)
    left = [path for path in unfinished if path not in alive]
    return CampaignView(
        experiment=Path(safe_text.text(str(experiment))),
        planned=len(plan.runs) if plan else None,
        ended=dict(sorted(Counter(end.status for end in ended.values()).items())),
        pulses=pulses,
        starting=tuple(safe_text.text(path.name) for path, pulse in started.items() if pulse is None),
        interrupted=tuple(safe_text.text(path.name) for path in left),
        running=running,
        left_s=forecast_s(plan.runs, ended, next(iter(pulses), None)) if plan and running else None,
        usd=_spent_usd(plan, ended, pulses) if plan else None,
        waiting={safe_text.text(path.name): why for path, why in waiting.items()},
        damaged={safe_text.text(run): end.damage for run, end in ended.items() if end.damage is not None},
        left_jobs={safe_text.text(path.name): job for path in left if (job := _left_job(path)) is not None},
    )


def _is_under_way(run_dir: Path, pulse: Pulse | None, plan: Plan | None, driven: bool | None) -> bool:
    """Whether the run is in progress: it was written since the controller started, and the controller is alive. If the
    controller cannot be checked, whether the run made progress recently."""
    if plan is not None and _touched_at(run_dir) < plan.began_at - CLOCK_S:
        return False  # left by an earlier campaign; the current one has not reached it
    if driven is not None:
        return driven
    last = _touched_at(run_dir) if _waiting(run_dir) else pulse.beat if pulse else None
    if last is None or time.time() - last > FRESH_S:
        return False
    return plan is not None or any(_process_began_at(p.pid) for p in store.read_progress(run_dir))


def _touched_at(run_dir: Path) -> float:
    """When a run was last started or made progress. A continued run keeps the spec.json of its first start, and an
    adopted one also its job.json. Uses file times, because the times in progress files come from clocks of nodes."""
    own = (run_dir / "spec.json", run_dir / store.JOB)
    return _newest([*own, *run_dir.glob("progress-*"), *run_dir.glob("samples-*.jsonl")])


def _newest(paths: Iterable[Path]) -> float:
    times = [0.0]
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # a restart may move files aside meanwhile
            times.append(path.stat().st_mtime)
    return max(times)


def _waiting(run_dir: Path) -> str | None:
    """Why the job has not started, as its controller last recorded; None if it has started. Newer progress files win:
    a controller that died can no longer remove its note."""
    try:
        why, noted_at = store.read_json(run_dir / store.JOB).get("waiting"), _newest([run_dir / store.JOB])
    except (PacelineError, AttributeError):
        return None
    if not isinstance(why, str) or _newest(run_dir.glob("progress-*")) > noted_at:
        return None
    return safe_text.text(why)


def _left_job(run_dir: Path) -> str | None:
    """`its job NAME may still run on slurm`; None if the job ends with its controller (local, ssh, ray)."""
    try:
        job = store.read_json(run_dir / store.JOB)
        engine = Choice.parse(str(job["launcher"])).name
        if not job.get("outlives_controller"):
            return None
    except (PacelineError, KeyError, TypeError):
        return None
    handle = job.get("handle")
    name = handle.get("job_id") or handle.get("name") if isinstance(handle, Mapping) else None
    # Without a handle, the controller died while it submitted the job.
    called = f"its job{f' {name}' if name else ''}"
    if _waiting(run_dir):
        return safe_text.text(f"{called} was waiting on {engine} when last seen, and may run by now")
    return safe_text.text(f"{called} may still run on {engine}")


def read_end(run_dir: Path) -> EndedRun | None:
    """How a run ended and how long it took; None if it has not ended, DAMAGED if its files are not what was sealed."""
    if not store.is_sealed(run_dir):
        return None
    try:
        end = store.read_end(run_dir)
        return EndedRun(end.status, end.ended_at - end.started_at, reused=end.reused)
    except PacelineError as error:
        return EndedRun(DAMAGED, 0.0, safe_text.text(str(error).removeprefix(f"{run_dir}: ")))
