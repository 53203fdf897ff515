"""A Slurm cluster: one batch job per run, an agent on each node, state from squeue and the accounting."""

from __future__ import annotations

import contextlib
import subprocess
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
from paceline.launchers._losses import awaited_ranks, have_ended
from paceline.launchers._start import job_name
from paceline.launchers.slurm import losses as _slurm_losses
from paceline.launchers.slurm import refusals, states
from paceline.launchers.slurm import script as _slurm_script
from paceline.launchers.slurm.lines import Lines
from paceline.launchers.slurm.losses import BEGIN, Losses
from paceline.launchers.slurm.options import Options
from paceline.launchers.slurm.states import Away, Phase, Seen
from paceline.results.records import Status

# Options on which no measured number depends, each with what it decides.
UNMEASURED = {
    "account": "who pays",
    "comment": "what `squeue` shows",
    "time": "when Slurm ends the job",
    "requeue": "whether a preempted job starts again",
    "port": "where ranks rendezvous before they choose their own ports",
}
# Between two tries to reach slurmctld that only wait for it.
RETRY_S = 1.0
# What is waited for an ended job to leave its nodes: KillWait is 30 s by default, and an epilog may follow.
LEAVING_S = 180.0
# How long `cancel` tries to reach slurmctld: somebody has pressed Ctrl-C and waits.
CANCEL_S = 30.0
# How long agents may take to end their ranks when they are asked to, and to send what these left.
FAREWELL_S = 30.0

Answer = TypeVar("Answer")


@dataclass(slots=True)
class Watch:
    """What this process knows of a job between two looks."""

    seen: Seen | None = None
    asked_at: float = float("-inf")
    answered_at: float = field(default_factory=time.monotonic)
    lines: Lines | None = None
    losses: Losses = field(default_factory=Losses)
    trouble_at: float | None = None
    asked_at_end: float | None = None


_watches: dict[str, Watch] = {}


def check(spec: RunSpec) -> str | None:
    chosen = parse_options(Options, spec.launcher)
    gpus, processes = chosen.gpus_per_node, spec.topology.processes_per_node
    if spec.topology.device == "cuda" and gpus is not None and processes > gpus:
        return f"{processes} processes on a node need as many GPUs; the launcher slurm was given {gpus}"
    if chosen.requeue and spec.max_restarts:
        return "launcher.requeue begins anew where max_restarts would go on: one of the two, not both"
    if chosen.requeue and spec.checkpoint_every:
        return "launcher.requeue begins anew where checkpoint_every would go on: one of the two, not both"
    return None


def offer(choice: Choice) -> Offer:
    chosen = parse_options(Options, choice)
    if chosen.gpus_per_node:
        return Offer(device="cuda", processes=chosen.gpus_per_node)
    return Offer(device="cpu", processes=max(1, (chosen.cpus_per_task or 1) // chosen.threads))


def preflight(specs: Sequence[RunSpec]) -> None:
    """sbatch itself is asked, with the script of the smallest run, for what it would refuse from any of them. It reads
    the script from its input: nothing is written, as no folder may be writable before the first run."""
    chosen, smallest = parse_options(Options, specs[0].launcher), min(specs, key=lambda spec: spec.topology.world_size)
    (script,) = prepare(smallest, Path(smallest.run_id)).files.values()
    words = ("sbatch", "--test-only", "--parsable")
    done = _patiently(lambda: states.call(*words, stdin=script), chosen.patience_s)
    if sentence := refusals.sentence(done, chosen):
        raise LaunchError(sentence)


def prepare(spec: RunSpec, run_dir: Path) -> Job:
    chosen = parse_options(Options, spec.launcher)
    run_dir = run_dir.absolute()
    name = job_name(spec, run_dir)
    script = _slurm_script.render(spec, chosen, name, run_dir)
    settings = {
        "run_dir": str(run_dir),
        "nodes": spec.topology.nodes,
        "folder": None if chosen.shared else chosen.output or chosen.scratch,
        "fetched": not chosen.shared and chosen.output is None,
        "pending_s": chosen.pending_s,
        "patience_s": chosen.patience_s,
        "poll_s": chosen.poll_s,
        "limits": _limits(chosen),
        "expendable": list(may_be_lost(spec)) if _slurm_script.may_go_on(spec, chosen) else [],
        "ranks": spec.topology.processes_per_node,
    }
    path = run_dir / _slurm_script.SCRIPT
    argv = ("sbatch", "--parsable", str(path))
    return Job(argv=argv, files={str(path): script}, name=name, settings=settings)


def _limits(chosen: Options) -> list[str]:
    """What a later job on the same nodes needs to be let in there."""
    names = ("account", "partition", "qos", "reservation")
    return [f"--{name}={getattr(chosen, name)}" for name in names if getattr(chosen, name) is not None]


def submit(job: Job) -> Mapping[str, Any]:
    """LaunchError with Slurm's own sentence when it refuses. A slurmctld that may have taken the job before it fell
    silent is asked for it by its name, so that nothing is submitted twice; one that was taken while this was being
    interrupted is ended."""
    for path, text in job.files.items():
        Path(path).write_text(text)
    tried = False

    def hand_over() -> str:
        nonlocal tried
        taken = states.named(str(job.name))
        if taken and not tried:
            raise LaunchError(f"Slurm still has job {taken[0]} of this run: try scancel {taken[0]}")
        tried = True
        return taken[0] if taken else _accepted(states.call(*job.argv))

    with contextlib.ExitStack() as undo:
        undo.callback(lambda: _withdraw(str(job.name)) if tried else None)
        handle = _handle(job, _patiently(hand_over, job.settings["patience_s"]))
        undo.pop_all()
    return handle


def _withdraw(name: str) -> None:
    """One try: a slurmctld that is away now is asked for the name again by the next controller."""
    with contextlib.suppress(Away, LaunchError):
        for job_id in states.named(name):
            states.call("scancel", job_id)


def _accepted(done: subprocess.CompletedProcess[str]) -> str:
    """The number of the job; a cluster of a federation says its own name besides."""
    if done.returncode:
        raise LaunchError(f"Slurm did not take the job: {states.said(done)}")
    return done.stdout.strip().partition(";")[0]


def _patiently(ask: Callable[[], Answer], patience_s: float) -> Answer:
    """Ask until slurmctld answers, or patience ends."""
    began = time.monotonic()
    while True:
        try:
            return ask()
        except Away as silence:
            if time.monotonic() - began > patience_s:
                raise LaunchError(f"slurmctld cannot be reached: {silence}; try: scontrol ping") from None
        time.sleep(RETRY_S)


def _handle(job: Job, job_id: str) -> dict[str, Any]:
    return {"job_id": job_id, "name": job.name, "submitted_at": time.time(), **job.settings}


def adopt(job: Job, handle: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The job of an earlier controller, under way or ended by itself. One that was cancelled is none: whoever asks for
    the run again wants another. Nothing is started anew while nobody can say whether it runs."""
    return _patiently(lambda: _found(job, handle), job.settings["patience_s"])


def _found(job: Job, handle: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    # What is under way comes first: the file may be of an attempt before it.
    job_id = str(handle["job_id"]) if handle else next(iter(states.named(str(job.name))), None) or _left(job)
    if job_id is None:
        return None
    known = handle or _handle(job, job_id)
    seen = states.look(job_id) or _remembered(known)
    return None if seen is None or seen.state.startswith("CANCELLED") else known


def _left(job: Job) -> str | None:
    """The number of a job that has ended before anybody wrote it down, from the file it left."""
    words = _exit_words(job.settings["run_dir"])
    return words[0] if words else None


def _exit_words(run_dir: str) -> list[str] | None:
    path = Path(run_dir) / _slurm_script.EXIT
    words = path.read_text().split() if path.is_file() else []
    return words if len(words) == 2 and all(word.isdigit() for word in words) else None


def _remembered(handle: Mapping[str, Any]) -> Seen | None:
    """How the job ended by the file it left, where Slurm has forgotten it."""
    words = _exit_words(handle["run_dir"])
    if words is None or words[0] != handle["job_id"]:
        return None
    return Seen(state="FAILED" if int(words[1]) else "COMPLETED", exit_code=int(words[1]))


def poll(handle: Mapping[str, Any]) -> JobState:
    watch = _watches.setdefault(str(handle["job_id"]), Watch())
    _receive(handle, watch)
    ended = watch.seen is not None and watch.seen.meaning.phase is Phase.RUNNING and _remembered(handle) is not None
    if ended or time.monotonic() - watch.asked_at >= handle["poll_s"]:
        _ask(handle, watch)
        _see_losses(handle, watch)
    state = _state(handle, watch.seen)
    if not state.running:
        _receive(handle, watch)
        # What came last may tell of one.
        _see_losses(handle, watch)
        state = _without_lost(handle, state, watch.losses)
    return state


def _see_losses(handle: Mapping[str, Any], watch: Watch) -> None:
    """End a job that waits for nobody but lost nodes: politely, then by Slurm's own means. Starters of ranks would wait
    minutes for peers that are gone, and rank 0 without end for a replica that never came up."""
    if not handle.get("expendable"):
        # Slurm itself ends what has lost a node.
        return
    with contextlib.suppress(Away):
        watch.losses = _slurm_losses.read(handle, states.hosts)
        now, losses = time.monotonic(), watch.losses
        watch.trouble_at = (watch.trouble_at or now) if losses.fatal else None
        awaited = awaited_ranks(handle["nodes"], losses.spared, handle["ranks"])
        over = bool(losses.spared) and have_ended(Path(handle["run_dir"]), awaited)
        over = over or (watch.trouble_at is not None and now - watch.trouble_at > _slurm_script.WAIT_S)
        if not over or watch.seen is None or watch.seen.meaning.phase is not Phase.RUNNING:
            return
        if watch.asked_at_end is None:
            watch.asked_at_end = now
            states.call("scancel", "--signal=TERM", str(handle["job_id"]))
        elif now - watch.asked_at_end > FAREWELL_S:
            states.call("scancel", str(handle["job_id"]))


def _without_lost(handle: Mapping[str, Any], state: JobState, losses: Losses) -> JobState:
    if losses.vanished and state.status is None:
        gone = states.STATES["NODE_FAIL"]
        return replace(state, status=gone.status, reason=f"Slurm job {handle['job_id']} {gone.text}")
    return replace(state, lost=losses.spared)


def _ask(handle: Mapping[str, Any], watch: Watch) -> None:
    """Look once; a slurmctld that is away leaves what was seen last, for as long as there is patience."""
    watch.asked_at = time.monotonic()
    try:
        seen = states.look(str(handle["job_id"])) or _remembered(handle)
    except Away as silence:
        if time.monotonic() - watch.answered_at > handle["patience_s"]:
            raise LaunchError(f"slurmctld has been away for {handle['patience_s']:g} s: {silence}") from None
        return
    if seen is None:
        raise LaunchError(f"Slurm no longer knows job {handle['job_id']}, and nothing says how it ended")
    if watch.lines is not None and watch.seen is not None and seen.restarts > watch.seen.restarts:
        watch.lines.forget()
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
        return _still_waiting(handle, why)
    if meaning.status is not None:
        reason = f"Slurm job {job_id} {meaning.text} ({seen.state})"
        return JobState(running=False, exit_code=seen.exit_code, status=meaning.status, reason=reason)
    word = _last_word(Path(handle["run_dir"])) if seen.exit_code else None
    if word is None:
        return JobState(running=False, exit_code=seen.exit_code)
    reason = f"Slurm job {job_id} ended with exit code {seen.exit_code} before any rank had a word: {word}"
    return JobState(running=False, exit_code=seen.exit_code, status=Status.FAILED, reason=reason)


def _last_word(run_dir: Path) -> str | None:
    """Why no rank began (no such Python, a module that is not there): srun's own last lines only repeat the exit code.
    None where a rank or torchrun has told more."""
    log = run_dir / "log.txt"
    text = log.read_text(errors="replace") if log.is_file() else ""
    told = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(("srun: ", BEGIN))]
    known = any(run_dir.glob("outcome-*")) or any(run_dir.glob("progress-*")) or "Root Cause" in text
    return None if known or not told else told[-1][:300]


def _still_waiting(handle: Mapping[str, Any], why: str) -> JobState:
    limit_s = handle["pending_s"]
    if limit_s is None or time.time() - handle["submitted_at"] <= limit_s:
        return JobState(running=True, waiting=why)
    reason = f"{why}; it did not begin within {limit_s:g} s (launcher.pending_s)"
    return JobState(running=False, status=Status.FAILED, reason=reason)


def _receive(handle: Mapping[str, Any], watch: Watch) -> None:
    """What the nodes' lines hold by now, where no disk is shared."""
    if handle["folder"] is None:
        return
    if watch.lines is None:
        watch.lines = Lines(handle)
    if watch.seen is not None and watch.seen.meaning.phase is not Phase.WAITING:
        watch.lines.take(under_way=watch.seen.meaning.phase is Phase.RUNNING)


def collect(handle: Mapping[str, Any], run_dir: Path) -> str | None:
    """What did not come home; nothing can be missing of a shared disk."""
    if handle["folder"] is None:
        return None
    watch = _watches.setdefault(str(handle["job_id"]), Watch())
    if watch.lines is None:
        watch.lines = Lines(handle)
    return watch.lines.last(watch.seen.nodes if watch.seen else "", but=watch.losses.spared)


def cancel(handle: Mapping[str, Any]) -> bool:
    """End the job and wait until it has left its nodes; then remove the output it left elsewhere."""
    job_id = str(handle["job_id"])
    gone = _end(job_id, handle["poll_s"])
    if not gone:
        _note(handle, f"job {job_id} could not be ended: try scancel {job_id}")
    watch = _watches.pop(job_id, None)
    if watch is not None and watch.lines is not None:
        watch.lines.remove()
    return gone


def _end(job_id: str, poll_s: float) -> bool:
    """Whether the job is gone. It is asked to end once: whoever clears up must not be interrupted by being asked again,
    and Slurm itself ends those that do not listen."""
    began, asked = time.monotonic(), False
    while time.monotonic() - began < LEAVING_S:
        try:
            seen = states.look(job_id)
            if seen is None or seen.meaning.phase is Phase.ENDED:
                return True
            if not asked and seen.state != "COMPLETING":
                asked = states.call("scancel", job_id).returncode == 0
        except Away:
            if time.monotonic() - began > CANCEL_S:
                return False
        time.sleep(min(RETRY_S, poll_s))
    return False


def _note(handle: Mapping[str, Any], sentence: str) -> None:
    with (Path(handle["run_dir"]) / "log.txt").open("a") as log:
        log.write(f"paceline: {sentence}\n")
