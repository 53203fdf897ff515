"""What Slurm says of a job, by its own commands, and what it means here."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from paceline.errors import LaunchError
from paceline.results.records import Status

# Variables that say where Slurm is. Others would change what sbatch does behind the script's back: those of sbatch
# itself count more than the script, those of an allocation around the controller belong to another job.
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT")
# slurmctld answers within MessageTimeout (10 s by default), and commands try more than once.
COMMAND_S = 90.0
_WIDTHS = {"JobID": 24, "State": 32, "exit_code": 16, "RestartCnt": 8, "Reason": 160, "NodeList": 4096}
_FORGOTTEN = "Invalid job id"
_AWAY = (
    "Unable to contact slurm controller",
    "Socket timed out",
    "Connection refused",
    "Unable to connect",
    "Zero Bytes were transmitted",
    "Slurm backup controller in standby mode",
    "Transport endpoint is not connected",
    "Slurm temporarily unable",
    "Resource temporarily unavailable",
)


class Phase(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Meaning:
    """status: where Slurm knows what no rank could leave behind; None where the ranks' own word is enough."""

    phase: Phase
    status: Status | None = None
    text: str = ""


_WAITING, _RUNNING = Meaning(Phase.WAITING), Meaning(Phase.RUNNING)
STATES: dict[str, Meaning] = {
    "PENDING": _WAITING,
    "CONFIGURING": _WAITING,
    "REQUEUED": _WAITING,
    "REQUEUE_FED": _WAITING,
    "REQUEUE_HOLD": _WAITING,
    "RESV_DEL_HOLD": _WAITING,
    "SPECIAL_EXIT": _WAITING,
    "SUSPENDED": _WAITING,
    "STOPPED": _WAITING,
    "RUNNING": _RUNNING,
    "COMPLETING": _RUNNING,
    "RESIZING": _RUNNING,
    "SIGNALING": _RUNNING,
    "STAGE_OUT": _RUNNING,
    "COMPLETED": Meaning(Phase.ENDED),
    "FAILED": Meaning(Phase.ENDED),
    "TIMEOUT": Meaning(
        Phase.ENDED,
        Status.TIMEOUT,
        # Another limit makes no other run: without the flag the sealed one stands.
        "reached the time limit it had in Slurm; raise launcher.time and add --resume",
    ),
    "DEADLINE": Meaning(Phase.ENDED, Status.TIMEOUT, "missed its deadline"),
    "OUT_OF_MEMORY": Meaning(Phase.ENDED, Status.OOM, "used more host memory than it had; raise launcher.mem"),
    "PREEMPTED": Meaning(Phase.ENDED, Status.PREEMPTED, "was preempted by a job of higher priority"),
    "NODE_FAIL": Meaning(Phase.ENDED, Status.PREEMPTED, "lost a node; `sinfo -R` says which and why"),
    "BOOT_FAIL": Meaning(Phase.ENDED, Status.FAILED, "was given a node that did not boot; `sinfo -R` says which"),
    "LAUNCH_FAILED": Meaning(Phase.ENDED, Status.FAILED, "could not be started on its nodes; see slurmd's log there"),
    "RECONFIG_FAIL": Meaning(Phase.ENDED, Status.FAILED, "was given a node that could not be configured"),
    "CANCELLED": Meaning(Phase.ENDED, Status.FAILED, "was cancelled, not by this controller"),
    "REVOKED": Meaning(Phase.ENDED, Status.FAILED, "was taken by another cluster of the federation"),
}
# Reasons to wait that no waiting ends, or whose name does not tell what to do.
REASONS = {
    "PartitionDown": "the partition is closed; `sinfo` shows those that are up",
    "PartitionInactive": "the partition is inactive; `sinfo` shows those that are up",
    "PartitionNodeLimit": "more nodes are asked for than the partition gives; `scontrol show partition`",
    "PartitionConfig": "the partition cannot give this many nodes, or not for this long; `scontrol show partition`",
    "PartitionTimeLimit": "the partition's limit is shorter than launcher.time; `scontrol show partition`",
    "BadConstraints": "no node can ever satisfy this; `sinfo -o '%N %c %m %G %f'`",
    "ReqNodeNotAvail": "nodes it needs are down, drained or reserved; `sinfo -R`",
    "InvalidAccount": "the account is not one of yours; `sacctmgr show associations user=$USER`",
    "InvalidQOS": "the quality of service is not one of yours; `sacctmgr show associations user=$USER`",
    "JobHeldUser": "it is held; `scontrol release` lets it go",
    "JobHeldAdmin": "an administrator holds it",
    "None": "Slurm has not looked at it yet",
    "Resources": "waits for nodes to become free",
    "Priority": "others in the queue are before it",
    "BeginTime": "may not begin yet; Slurm keeps a job that was put back for two minutes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One answer about a job. exit_code is None where it is not known; nodes is Slurm's own list of them."""

    state: str
    exit_code: int | None = None
    restarts: int = 0
    reason: str = ""
    nodes: str = ""

    @property
    def meaning(self) -> Meaning:
        """By the first word: `CANCELLED by 1000`. One that a newer Slurm has is taken for a job under way."""
        return STATES.get(self.state.split()[0].rstrip("+"), _RUNNING) if self.state else _RUNNING


class Away(Exception):
    """slurmctld does not answer for now."""


def call(*argv: str, timeout_s: float = COMMAND_S, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """One command of Slurm. Away when nobody answers; LaunchError when it is not installed; else as it ended."""
    try:
        done = subprocess.run(
            argv,
            env=environment(),
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError:
        raise LaunchError(f"{argv[0]} is not installed here: run paceline where Slurm's commands are") from None
    except subprocess.TimeoutExpired:
        raise Away(f"{argv[0]} did not answer within {timeout_s:g} s") from None
    if done.returncode and any(word in done.stderr for word in _AWAY):
        raise Away(said(done))
    return done


def environment() -> dict[str, str]:
    """The controller's, without what belongs to an allocation around it."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("SBATCH_", "SLURM_")) or k in _KEPT}


def said(done: subprocess.CompletedProcess[str]) -> str:
    """The last thing a command complained of, without its name before it."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else f"exit code {done.returncode}"
    return last.partition("error: ")[2].strip() or last.strip()


def look(job_id: str) -> Seen | None:
    """What slurmctld knows of a job, else what the accounting does; None when both have forgotten it."""
    done = call("squeue", "--noheader", "--states=all", f"--jobs={job_id}", f"--Format={_format()}")
    found = [_seen(line) for line in done.stdout.splitlines() if line.strip()]
    if found:
        return found[0]
    if done.returncode and _FORGOTTEN not in done.stderr:
        raise Away(said(done))
    return _accounted(job_id)


def _format() -> str:
    return ",".join(f"{name}:{width}" for name, width in _WIDTHS.items())


def _seen(line: str) -> Seen:
    values, begin = {}, 0
    for name, width in _WIDTHS.items():
        values[name] = line[begin : begin + width].strip()
        begin += width
    return Seen(
        state=values["State"],
        exit_code=_exit_code(int(values["exit_code"] or 0)),
        restarts=int(values["RestartCnt"] or 0),
        reason=values["Reason"],
        nodes=values["NodeList"],
    )


def _exit_code(wait_status: int) -> int:
    """As a shell would have it: 128 and the signal for a script that one ended."""
    code, number = wait_status >> 8, wait_status & 0x7F
    return 128 + number if number else code


def _accounted(job_id: str) -> Seen | None:
    """From slurmdbd; where there is none, from the file of ended jobs that some sites keep."""
    for source in ([], ["--completion"]):
        done = call("sacct", *source, "--noheader", "--parsable2", f"--jobs={job_id}", "--format=JobID,State,ExitCode")
        rows = [line.split("|") for line in done.stdout.splitlines() if line.count("|") == 2]
        for identity, state, code in rows:
            if identity == job_id:
                number, _, signal = code.partition(":")
                return Seen(state=state, exit_code=128 + int(signal) if signal not in ("", "0") else int(number or 0))
    return None


def named(name: str) -> list[str]:
    """Numbers of this user's jobs of that name that are waiting or under way, the newest first."""
    done = call("squeue", "--noheader", "--me", f"--name={name}", "--Format=JobID:24")
    if done.returncode:
        raise Away(said(done))
    return sorted(done.stdout.split(), key=int, reverse=True)


def hosts(nodes: str) -> Sequence[str]:
    """The names in Slurm's `n[1-3]`, in its order."""
    return call("scontrol", "show", "hostnames", nodes).stdout.split() if nodes else []
