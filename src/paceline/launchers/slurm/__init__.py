"""Slurm: one batch job per run, an agent on each node, state from squeue and the accounting."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from paceline.contract import Job, JobState, may_be_lost
from paceline.errors import LaunchError
from paceline.experiment.choices import Choice
from paceline.experiment.plugins import Offer, parse_options
from paceline.experiment.spec import RunSpec
from paceline.host.files import log_text
from paceline.launchers._job import awaited_ranks, have_ended, job_name
from paceline.launchers.slurm import script as batch_script
from paceline.launchers.slurm import states
from paceline.launchers.slurm.output_files import OutputFiles
from paceline.launchers.slurm.script import BEGIN, Options
from paceline.launchers.slurm.states import Losses, Phase, Seen, Unavailable
from paceline.results.records import Status

# Options on which no measured number depends, each with what it decides.
UNMEASURED = {
    "account": "who pays",
    "comment": "what `squeue` shows",
    "time": "when Slurm ends the job",
    "requeue": "whether a preempted job starts again",
    "port": "where ranks rendezvous before they choose their own ports",
}
# Between two attempts to reach slurmctld.
RETRY_S = 1.0
# How long an ended job may take to leave its nodes: KillWait is 30 s by default, and an epilog may follow.
LEAVING_S = 180.0
# How long `cancel` tries to reach slurmctld: the user has pressed Ctrl-C and waits.
CANCEL_S = 30.0
# How long agents may take to end their ranks and send their files.
FAREWELL_S = 30.0

_LIMITS = ("account", "partition", "qos", "reservation")

Answer = TypeVar("Answer")


@dataclass(slots=True)
class Watch:
    """What this process knows of a job between two polls."""

    seen: Seen | None = None
    asked_at: float = float("-inf")
    answered_at: float = field(default_factory=time.monotonic)
    output: OutputFiles | None = None
    losses: Losses = field(default_factory=Losses)
    failed_at: float | None = None
    end_requested_at: float | None = None


_watches: dict[str, Watch] = {}


def check(spec: RunSpec) -> str | None:
    chosen = parse_options(Options, spec.launcher)
    gpus, processes = chosen.gpus_per_node, spec.topology.processes_per_node
    if spec.topology.device == "cuda" and gpus is not None and processes > gpus:
        return f"{processes} processes per node need {processes} GPUs; the launcher slurm requests {gpus}"
    if chosen.requeue and spec.max_restarts:
        return "launcher.requeue starts over, max_restarts continues from a checkpoint: use one of them"
    if chosen.requeue and spec.checkpoint_every:
        return "launcher.requeue starts over, checkpoint_every continues from a checkpoint: use one of them"
    return None


def offer(choice: Choice) -> Offer:
    chosen = parse_options(Options, choice)
    if chosen.gpus_per_node:
        return Offer(device="cuda", processes=chosen.gpus_per_node)
    return Offer(device="cpu", processes=max(1, (chosen.cpus_per_task or 1) // chosen.threads))


def preflight(specs: Sequence[RunSpec]) -> None:
    """Ask `sbatch --test-only` with the script of the smallest run whether Slurm would refuse every run.

    sbatch reads the script from its input, so nothing is written.
    """
    chosen, smallest = parse_options(Options, specs[0].launcher), min(specs, key=lambda spec: spec.topology.world_size)
    (script,) = prepare(smallest, Path(smallest.run_id)).files.values()
    words = ("sbatch", "--test-only", "--parsable")
    done = _retry(lambda: states.call(*words, stdin=script), chosen.patience_s)
    if sentence := states.certain_refusal(done, chosen):
        raise LaunchError(sentence)


def prepare(spec: RunSpec, run_dir: Path) -> Job:
    chosen = parse_options(Options, spec.launcher)
    run_dir = run_dir.absolute()
    name = job_name(spec, run_dir)
    script = batch_script.render(spec, chosen, name, run_dir)
    settings = {
        "run_dir": str(run_dir),
        "nodes": spec.topology.nodes,
        "folder": None if chosen.shared else chosen.output or chosen.scratch,
        "fetched": not chosen.shared and chosen.output is None,
        "pending_s": chosen.pending_s,
        "patience_s": chosen.patience_s,
        "poll_s": chosen.poll_s,
        # A later job needs these to run on the same nodes.
        "limits": [f"--{name}={getattr(chosen, name)}" for name in _LIMITS if getattr(chosen, name) is not None],
        "expendable": list(may_be_lost(spec)) if batch_script.may_go_on(spec, chosen) else [],
        "ranks": spec.topology.processes_per_node,
    }
    path = run_dir / batch_script.SCRIPT
    argv = ("sbatch", "--parsable", str(path))
    return Job(argv=argv, files={str(path): script}, name=name, settings=settings)


def submit(job: Job) -> Mapping[str, Any]:
    """Submit the job. Raises LaunchError with Slurm's own message if it refuses.

    If slurmctld may have accepted the job before it stopped answering, the job is looked up by name, so that nothing is
    submitted twice. If this function is interrupted, an accepted job is cancelled.
    """
    for path, text in job.files.items():
        Path(path).write_text(text, encoding="utf-8")
    tried = False

    def submit_once() -> str:
        nonlocal tried
        accepted = states.named(str(job.name))
        if accepted and not tried:
            raise LaunchError(f"Slurm still has job {accepted[0]} of this run: try scancel {accepted[0]}")
        tried = True
        if accepted:
            return accepted[0]
        done = states.call(*job.argv)
        if done.returncode:
            raise LaunchError(f"Slurm rejected the job: {states.last_error(done)}")
        # A cluster of a federation appends its name to the job id.
        return done.stdout.strip().partition(";")[0]

    def withdraw() -> None:
        # One attempt: if slurmctld is unavailable, the next controller looks up the name again.
        with contextlib.suppress(Unavailable, LaunchError):
            for job_id in states.named(str(job.name)) if tried else ():
                states.call("scancel", job_id)

    with contextlib.ExitStack() as undo:
        undo.callback(withdraw)
        handle = _handle(job, _retry(submit_once, job.settings["patience_s"]))
        undo.pop_all()
    return handle


def _retry(ask: Callable[[], Answer], patience_s: float) -> Answer:
    """Call until slurmctld answers, or the patience ends."""
    began = time.monotonic()
    while True:
        try:
            return ask()
        except Unavailable as trouble:
            if time.monotonic() - began > patience_s:
                raise LaunchError(f"slurmctld cannot be reached: {trouble}; try: scontrol ping") from None
        time.sleep(RETRY_S)


def _handle(job: Job, job_id: str) -> dict[str, Any]:
    return {"job_id": job_id, "name": job.name, "submitted_at": time.time(), **job.settings}


def adopt(job: Job, handle: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return a handle for the job of an earlier controller, active or ended by itself. A cancelled job is not adopted.

    Waits for slurmctld, so that no second job is started while the first may run.
    """

    def find() -> Mapping[str, Any] | None:
        job_id = str(handle["job_id"]) if handle else next(iter(states.named(str(job.name))), None)
        if job_id is None and (words := _exit_words(job.settings["run_dir"])):
            # The job ended before a controller stored its id. Active jobs come first: this file may be older.
            job_id = words[0]
        if job_id is None:
            return None
        known = handle or _handle(job, job_id)
        seen = states.look_up(job_id) or _remembered(known)
        return None if seen is None or seen.state.startswith("CANCELLED") else known

    return _retry(find, job.settings["patience_s"])


def _exit_words(run_dir: str) -> list[str] | None:
    path = Path(run_dir) / batch_script.EXIT
    words = path.read_text().split() if path.is_file() else []
    return words if len(words) == 2 and all(re.fullmatch(r"[0-9]{1,18}", word) for word in words) else None


def _remembered(handle: Mapping[str, Any]) -> Seen | None:
    """Return how the job ended by its exit file, for a job that Slurm has forgotten."""
    words = _exit_words(handle["run_dir"])
    if words is None or words[0] != handle["job_id"]:
        return None
    return Seen(state="FAILED" if int(words[1]) else "COMPLETED", exit_code=int(words[1]))


def _watch_of(handle: Mapping[str, Any]) -> Watch:
    """Return what this process knows of the job. Without a shared disk, it receives the output of the nodes."""
    job_id = str(handle["job_id"])
    if job_id not in _watches:
        _watches[job_id] = Watch(output=None if handle["folder"] is None else OutputFiles(handle))
    return _watches[job_id]


def poll(handle: Mapping[str, Any]) -> JobState:
    watch = _watch_of(handle)
    _receive(watch)
    ended = watch.seen is not None and watch.seen.meaning.phase is Phase.RUNNING and _remembered(handle) is not None
    if ended or time.monotonic() - watch.asked_at >= handle["poll_s"]:
        _ask(handle, watch)
        _note_losses(handle, watch)
    state = _state(handle, watch.seen)
    if not state.running:
        _receive(watch)
        # The last lines may report a loss.
        _note_losses(handle, watch)
        if watch.losses.vanished and state.status is None:
            gone = states.STATES["NODE_FAIL"]
            return replace(state, status=gone.status, reason=f"Slurm job {handle['job_id']} {gone.text}")
        state = replace(state, lost=watch.losses.spared)
    return state


def _note_losses(handle: Mapping[str, Any], watch: Watch) -> None:
    """End a job that only waits for lost nodes, first with SIGTERM, then with scancel.

    torchrun would wait minutes for lost peers, and rank 0 forever for a replica that never started.
    """
    if not handle.get("expendable"):
        # Slurm itself ends other jobs that lose a node.
        return
    with contextlib.suppress(Unavailable):
        watch.losses = states.read_losses(handle, states.hosts)
        now, losses = time.monotonic(), watch.losses
        watch.failed_at = (watch.failed_at or now) if losses.fatal else None
        awaited = awaited_ranks(handle["nodes"], losses.spared, handle["ranks"])
        over = bool(losses.spared) and have_ended(Path(handle["run_dir"]), awaited)
        over = over or (watch.failed_at is not None and now - watch.failed_at > batch_script.WAIT_S)
        if not over or watch.seen is None or watch.seen.meaning.phase is not Phase.RUNNING:
            return
        if watch.end_requested_at is None:
            watch.end_requested_at = now
            states.call("scancel", "--signal=TERM", str(handle["job_id"]))
        elif now - watch.end_requested_at > FAREWELL_S:
            states.call("scancel", str(handle["job_id"]))


def _ask(handle: Mapping[str, Any], watch: Watch) -> None:
    """Poll once. While slurmctld is unavailable, the last state stays, until the patience ends."""
    watch.asked_at = time.monotonic()
    try:
        seen = states.look_up(str(handle["job_id"])) or _remembered(handle)
    except Unavailable as trouble:
        if time.monotonic() - watch.answered_at > handle["patience_s"]:
            raise LaunchError(f"slurmctld has been unavailable for {handle['patience_s']:g} s: {trouble}") from None
        return
    if seen is None:
        raise LaunchError(f"Slurm no longer knows job {handle['job_id']}, and no file says how it ended")
    if watch.output is not None and watch.seen is not None and seen.restarts > watch.seen.restarts:
        watch.output.restart()
    watch.seen, watch.answered_at = seen, time.monotonic()


def _state(handle: Mapping[str, Any], seen: Seen | None) -> JobState:
    if seen is None:
        return JobState(running=True, waiting="slurmctld has not answered yet")
    meaning, job_id = seen.meaning, handle["job_id"]
    if meaning.phase is Phase.RUNNING:
        return JobState(running=True)
    if meaning.phase is Phase.WAITING:
        hint = states.REASONS.get(seen.reason.split(",")[0])
        why = f"Slurm job {job_id} is {seen.state.lower()}: {seen.reason}{f' ({hint})' if hint else ''}"
        limit_s = handle["pending_s"]
        if limit_s is None or time.time() - handle["submitted_at"] <= limit_s:
            return JobState(running=True, waiting=why)
        reason = f"{why}; it did not start within {limit_s:g} s (launcher.pending_s)"
        return JobState(running=False, status=Status.FAILED, reason=reason)
    if meaning.status is not None:
        reason = f"Slurm job {job_id} {meaning.text} ({seen.state})"
        return JobState(running=False, exit_code=seen.exit_code, status=meaning.status, reason=reason)
    run_dir = Path(handle["run_dir"])
    text = log_text(run_dir / "log.txt") if seen.exit_code else ""
    # Lines of srun only repeat the exit code.
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(("srun: ", BEGIN))]
    has_started = any(run_dir.glob("outcome-*")) or any(run_dir.glob("progress-*")) or "Root Cause" in text
    if has_started or not lines:
        return JobState(running=False, exit_code=seen.exit_code)
    # No such Python, or a missing module.
    reason = f"Slurm job {job_id} ended with exit code {seen.exit_code} before any rank started: {lines[-1][:300]}"
    return JobState(running=False, exit_code=seen.exit_code, status=Status.FAILED, reason=reason)


def _receive(watch: Watch) -> None:
    """Take the new output of the nodes."""
    if watch.output is not None and watch.seen is not None and watch.seen.meaning.phase is not Phase.WAITING:
        watch.output.take(is_running=watch.seen.meaning.phase is Phase.RUNNING)


def collect(handle: Mapping[str, Any], run_dir: Path) -> str | None:
    """Return a sentence about missing files. With a shared disk, none can be missing."""
    watch = _watch_of(handle)
    if watch.output is None:
        return None
    return watch.output.take_last(watch.seen.nodes if watch.seen else "", but=watch.losses.spared)


def cancel(handle: Mapping[str, Any]) -> bool:
    """End the job, wait until it has left its nodes, then remove its output files."""
    job_id = str(handle["job_id"])
    gone = _end(job_id, handle["poll_s"])
    if not gone:
        with (Path(handle["run_dir"]) / "log.txt").open("a", encoding="utf-8") as log:
            log.write(f"paceline: job {job_id} could not be ended: try scancel {job_id}\n")
    watch = _watches.pop(job_id, None)
    if watch is not None and watch.output is not None:
        watch.output.remove()
    return gone


def _end(job_id: str, poll_s: float) -> bool:
    """Return whether the job is gone. scancel is sent once, because another signal would interrupt the cleanup; Slurm
    itself kills processes that do not end."""
    began, is_cancelled = time.monotonic(), False
    while time.monotonic() - began < LEAVING_S:
        try:
            seen = states.look_up(job_id)
            if seen is None or seen.meaning.phase is Phase.ENDED:
                return True
            if not is_cancelled and seen.state != "COMPLETING":
                is_cancelled = states.call("scancel", job_id).returncode == 0
        except Unavailable:
            if time.monotonic() - began > CANCEL_S:
                return False
        time.sleep(min(RETRY_S, poll_s))
    return False
