"""The commands of Slurm and the meaning of their answers: job states, waiting reasons, refusals, lost nodes."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from paceline.errors import LaunchError
from paceline.host.files import log_text
from paceline.launchers._job import is_past_setup, ranks_of, reported_failure
from paceline.launchers.slurm.script import BEGIN, Options
from paceline.results import store
from paceline.results.records import Status

# Variables that say where Slurm is. The others are removed: those of sbatch would override the script, and those of an
# allocation around the controller belong to another job.
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT")
# slurmctld answers within MessageTimeout (10 s by default), and commands retry.
COMMAND_S = 90.0
_WIDTHS = {"JobID": 24, "State": 32, "exit_code": 16, "RestartCnt": 8, "Reason": 160, "NodeList": 4096}
_FORGOTTEN = "Invalid job id"
_UNAVAILABLE = (
    *("Unable to contact slurm controller", "Socket timed out", "Connection refused", "Unable to connect"),
    *("Zero Bytes were transmitted", "Slurm backup controller in standby mode", "Slurm temporarily unable"),
    *("Transport endpoint is not connected", "Resource temporarily unavailable"),
)


class Phase(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Meaning:
    """status: set if Slurm knows what no rank could report; None if the outcomes of the ranks decide."""

    phase: Phase
    status: Status | None = None
    text: str = ""


_RAISE_TIME = "raise launcher.time and add --resume"
_WAITING, _RUNNING = Meaning(Phase.WAITING), Meaning(Phase.RUNNING)
STATES: dict[str, Meaning] = {
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD"), _WAITING),
    **dict.fromkeys(("RESV_DEL_HOLD", "SPECIAL_EXIT", "SUSPENDED", "STOPPED"), _WAITING),
    **dict.fromkeys(("RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT"), _RUNNING),
    **dict.fromkeys(("COMPLETED", "FAILED"), Meaning(Phase.ENDED)),
    # The time limit is not part of the run id, so without --resume the sealed run is kept.
    "TIMEOUT": Meaning(Phase.ENDED, Status.TIMEOUT, f"reached its time limit in Slurm; {_RAISE_TIME}"),
    "DEADLINE": Meaning(Phase.ENDED, Status.TIMEOUT, "missed its deadline"),
    "OUT_OF_MEMORY": Meaning(Phase.ENDED, Status.OOM, "exceeded its host memory; raise launcher.mem"),
    "PREEMPTED": Meaning(Phase.ENDED, Status.PREEMPTED, "was preempted by a job of higher priority"),
    "NODE_FAIL": Meaning(Phase.ENDED, Status.PREEMPTED, "lost a node; `sinfo -R` shows which and why"),
    "BOOT_FAIL": Meaning(Phase.ENDED, Status.FAILED, "had a node that did not boot; `sinfo -R` shows which"),
    "LAUNCH_FAILED": Meaning(Phase.ENDED, Status.FAILED, "could not be started on its nodes; see slurmd's log there"),
    "RECONFIG_FAIL": Meaning(Phase.ENDED, Status.FAILED, "had a node that could not be configured"),
    "CANCELLED": Meaning(Phase.ENDED, Status.FAILED, "was cancelled, not by this controller"),
    "REVOKED": Meaning(Phase.ENDED, Status.FAILED, "was taken by another cluster of the federation"),
}
# Waiting reasons that do not resolve themselves, or whose name does not say what to do.
REASONS = {
    "PartitionDown": "the partition is down; `sinfo` shows those that are up",
    "PartitionInactive": "the partition is inactive; `sinfo` shows those that are up",
    "PartitionNodeLimit": "more nodes are requested than the partition allows; `scontrol show partition`",
    "PartitionConfig": "the partition does not allow this many nodes, or this much time; `scontrol show partition`",
    "PartitionTimeLimit": "the partition's limit is shorter than launcher.time; `scontrol show partition`",
    "BadConstraints": "no node can ever satisfy this; `sinfo -o '%N %c %m %G %f'`",
    "ReqNodeNotAvail": "required nodes are down, drained or reserved; `sinfo -R`",
    "InvalidAccount": "the account is not one of yours; `sacctmgr show associations user=$USER`",
    "InvalidQOS": "the quality of service is not one of yours; `sacctmgr show associations user=$USER`",
    "JobHeldUser": "it is held; `scontrol release` releases it",
    "JobHeldAdmin": "an administrator holds it",
    "None": "Slurm has not considered it yet",
    "Resources": "waits for free nodes",
    "Priority": "other jobs in the queue have higher priority",
    "BeginTime": "may not start yet; Slurm delays requeued jobs by two minutes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Slurm's answer about a job. exit_code is None if unknown; nodes is Slurm's own node list."""

    state: str
    exit_code: int | None = None
    restarts: int = 0
    reason: str = ""
    nodes: str = ""

    @property
    def meaning(self) -> Meaning:
        """By the first word of `CANCELLED by 1000`. A state of a newer Slurm counts as running."""
        return STATES.get(self.state.split()[0].rstrip("+"), _RUNNING) if self.state else _RUNNING


class Unavailable(Exception):
    """slurmctld does not answer at the moment."""


# --- commands ---


def call(*argv: str, timeout_s: float = COMMAND_S, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a Slurm command. Raises Unavailable if slurmctld does not answer, LaunchError if it is not installed."""
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
        raise LaunchError(f"{argv[0]} is not installed here: run paceline on a host with Slurm's commands") from None
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{argv[0]} did not answer within {timeout_s:g} s") from None
    if done.returncode and any(text in done.stderr for text in _UNAVAILABLE):
        raise Unavailable(last_error(done))
    return done


def environment() -> dict[str, str]:
    """Return the controller's environment without the variables of an allocation around it."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("SBATCH_", "SLURM_")) or k in _KEPT}


def last_error(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last error line of a command, without the command's name."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else f"exit code {done.returncode}"
    return last.partition("error: ")[2].strip() or last.strip()


def look_up(job_id: str) -> Seen | None:
    """Return what slurmctld, or else the accounting, knows of a job; None if both have forgotten it."""
    widths = ",".join(f"{name}:{width}" for name, width in _WIDTHS.items())
    done = call("squeue", "--noheader", "--states=all", f"--jobs={job_id}", f"--Format={widths}")
    # A site may have squeue print other lines, too.
    line = next((line for line in done.stdout.splitlines() if line.split()[:1] == [job_id]), None)
    if line is not None:
        values, begin = {}, 0
        for name, width in _WIDTHS.items():
            values[name] = line[begin : begin + width].strip()
            begin += width
        return Seen(
            state=values["State"],
            exit_code=_exit_code(_number(values["exit_code"])),
            restarts=_number(values["RestartCnt"]),
            reason=values["Reason"],
            nodes=values["NodeList"],
        )
    if done.returncode and _FORGOTTEN not in done.stderr:
        raise Unavailable(last_error(done))
    # From slurmdbd; without one, from the file of ended jobs that some sites keep.
    for source in ([], ["--completion"]):
        done = call("sacct", *source, "--noheader", "--parsable2", f"--jobs={job_id}", "--format=JobID,State,ExitCode")
        rows = [line.split("|") for line in done.stdout.splitlines() if line.count("|") == 2]
        for identity, state, exit_code in rows:
            if identity == job_id:
                status, _, signal = exit_code.partition(":")
                return Seen(state=state, exit_code=128 + _number(signal) if _number(signal) else _number(status))
    return None


def _number(text: str) -> int:
    """A number that Slurm prints, 0 if it prints something else."""
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0


def _exit_code(wait_status: int) -> int:
    """Return the exit code as a shell does: 128 plus the signal for a script that a signal ended."""
    code, number = wait_status >> 8, wait_status & 0x7F
    return 128 + number if number else code


def named(name: str) -> list[str]:
    """Return the ids of this user's waiting and running jobs of that name, newest first."""
    done = call("squeue", "--noheader", "--me", f"--name={name}", "--Format=JobID:24")
    if done.returncode:
        raise Unavailable(last_error(done))
    return sorted(re.findall(r"^\s*([0-9]{1,18})\s*$", done.stdout, re.MULTILINE), key=int, reverse=True)


def hosts(nodes: str) -> Sequence[str]:
    """Return the names in Slurm's `n[1-3]`, in its order."""
    return call("scontrol", "show", "hostnames", nodes).stdout.split() if nodes else []


# --- refusals of sbatch ---

# Messages of sbatch that apply to every run with the same options -> those options, and the command that shows what is
# accepted. The first match counts, because the message about an account also mentions the partition. Other refusals (a
# time limit, nodes that are down, busy or too few) may not apply to another run, or may pass.
_CERTAIN: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (r"invalid account", ("account",), "sacctmgr show associations user=$USER"),
    (r"invalid qos", ("qos",), "sacctmgr show associations user=$USER"),
    (r"invalid partition|no partition specified", ("partition",), "sinfo"),
    (r"reservation is invalid|invalid reservation", ("reservation",), "scontrol show reservation"),
    (r"invalid feature", ("constraint",), "sinfo -o '%N %f'"),
    (r"invalid node name", ("nodelist", "exclude"), "sinfo -N"),
    (r"invalid (generic resource|gres)", ("gres", "gpus"), "sinfo -o '%N %G'"),
    (r"configuration source", (), "ls /etc/slurm; echo $SLURM_CONF"),
)


def certain_refusal(done: subprocess.CompletedProcess[str], chosen: Options) -> str | None:
    """Return a sentence if sbatch would refuse every run with these options.

    Returns None if Slurm would accept the job, may accept it later, or refuses it for a reason that differs between
    runs.
    """
    if done.returncode == 0:
        return None
    message = re.sub(r"^(sbatch: )?((error|fatal|allocation failure): )*", "", last_error(done))
    for pattern, names, command in _CERTAIN:
        if not re.search(pattern, message, re.IGNORECASE):
            continue
        given = [f"slurm.{name}: got {value!r}" for name in names if (value := getattr(chosen, name)) is not None]
        where = f"{', '.join(given) or f'slurm.{names[0]}: got nothing'}; " if names else ""
        partitions: list[str] = []
        if names == ("partition",):
            # Other lists are too long, or only the accounting has them.
            with contextlib.suppress(Unavailable, LaunchError):
                partitions = call("sinfo", "--all", "--noheader", "--format=%R").stdout.split()
        known = f"; expected one of {', '.join(dict.fromkeys(partitions))}" if partitions else ""
        return f"{where}Slurm says: {message}{known}; try: {command}"
    return None


# --- lost nodes ---

_NODES = re.compile(rf"^{BEGIN}(\S+)$", re.MULTILINE)
# There is one task per node, numbered as the nodes are. srun reports tasks that ended alike in one line. An incomplete
# line of a rank may precede it.
_TASKS = re.compile(r"\bsrun: error: \S{1,253}: tasks? ([0-9]{1,7}(?:[,-][0-9]{1,7})*): ")
_NODE = re.compile(r"\bsrun: error: Node failure on (\S+)")


@dataclass(frozen=True, slots=True)
class Losses:
    """Node ranks. spared: the job continues without them. fatal: it cannot. vanished: fatal ones that Slurm lost."""

    spared: tuple[int, ...] = ()
    fatal: tuple[int, ...] = ()
    vanished: tuple[int, ...] = ()


def read_losses(handle: Mapping[str, Any], hosts: Callable[[str], Sequence[str]]) -> Losses:
    """Find nodes that ended before the others, by srun's messages in the log of the run.

    Only for jobs of served replicas: Slurm lets these continue (`--no-kill`), so the controller must end a job that
    cannot. Everything is read from the run directory, so a later controller sees the same. A node whose ranks all
    succeeded is not lost, however its agent ended. Once the job cannot continue, all nodes are ended and none is
    spared. hosts: expands Slurm's node list.
    """
    run_dir, ranks = Path(handle["run_dir"]), int(handle["ranks"])
    text = log_text(run_dir / "log.txt")
    starts = list(_NODES.finditer(text))
    if not starts:
        return Losses()
    # Lines before the last start belong to the user's own steps or to an earlier attempt.
    text = text[starts[-1].end() :]
    ended: set[int] = set()
    for part in filter(None, ",".join(_TASKS.findall(text)).split(",")):
        # srun writes `1,3-5`.
        first, _, last = part.partition("-")
        # A rank may print such a line, with any numbers.
        ended |= set(range(int(first), min(int((last or first).partition("-")[0]) + 1, int(handle["nodes"]))))
    names = set(_NODE.findall(text))
    vanished = {node for node, name in enumerate(hosts(starts[-1][1]) if names else ()) if name in names}
    succeeded = {outcome.rank for outcome in store.sound_outcomes(run_dir) if outcome.status is Status.OK}
    failed = [node for node in sorted(ended | vanished) if not succeeded.issuperset(ranks_of(node, ranks))]
    continues = bool(failed) and is_past_setup(run_dir)
    expendable = [node for node in failed if continues and node in handle["expendable"]]
    spared = [node for node in expendable if not reported_failure(run_dir, ranks_of(node, ranks))]
    fatal = [node for node in failed if node not in spared]
    return Losses(() if fatal else tuple(spared), tuple(fatal), tuple(node for node in fatal if node in vanished))
