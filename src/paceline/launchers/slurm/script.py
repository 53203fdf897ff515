"""The options of the Slurm launcher, and the batch script of a run: the resources, then one agent on each node.

Names of users and directories are quoted everywhere: sbatch reads the `#SBATCH` lines by its own quoting rules, bash
reads the rest.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.contract import may_be_lost
from paceline.errors import require
from paceline.experiment.spec import RunSpec
from paceline.host.environment import is_secret
from paceline.launchers._job import agent_arguments, rank_environment, spec_text
from paceline.results import store

SCRIPT = "job.sh"
EXIT = "exit.txt"
# Added to the run's own limit, which ends the run first and says where the ranks were.
MARGIN_S = 300.0
# How long other nodes may continue after the first has ended: their ranks may hang in a collective.
WAIT_S = 60
# How long nodes are kept after the ranks have ended, so that the controller can fetch the files on their disks.
LINGER_S = 120
_RENDEZVOUS = r"""# Use the address by which Slurm reaches the first node, which runs this script.
address=$(scontrol show node -o "$SLURMD_NODENAME" | sed -n 's/.* NodeAddr=\([^ ]*\) .*/\1/p')
export PACELINE_MASTER="${PACELINE_MASTER:-${address:-$SLURMD_NODENAME}}"
"""
_ANEW = """# Slurm has requeued the job: move the files of the earlier attempt aside.
if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ]; then
  aside={run_dir}/attempts/requeued-$SLURM_RESTART_COUNT
  mkdir -p "$aside"
  find {run_dir} -maxdepth 1 -type f \\( {names} \\) -exec mv -t "$aside" {{}} +
fi
"""
_UNQUOTED = re.compile(r"[A-Za-z0-9_./:=,%+-]+")
_LEFT = ("samples-*", "progress-*", *store.LEFT_BY_RANKS, EXIT)
# Printed by the script before it starts the agents, followed by Slurm's list of nodes.
BEGIN = "paceline: ranks begin on "
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Minutes, minutes:seconds or hours:minutes:seconds, optionally after days and a hyphen; or no limit.
_TIME = re.compile(r"(\d+-)?\d+(:\d{1,2}){0,2}|infinite|UNLIMITED", re.IGNORECASE)
_GPUS = re.compile(r"(?:^|,)gpu(?::[^:,()]+)?(?::(\d+))?(?=$|[,(])")
# Passed unchanged as the sbatch option of the same name.
PLAIN = ("account", "partition", "qos", "constraint", "nodelist", "exclude", "reservation", "comment")


@dataclass(frozen=True)
class Options:
    """account, partition, qos, constraint, nodelist, exclude, reservation, comment: as sbatch takes them.

    gpus: GPUs per node; default: one per process if the device is cuda. gres: replaces it, for a GPU type or another
    resource (`gpu:h100:8`).
    time: Slurm's time limit, as sbatch takes it; default: five minutes more than the run's timeout_s, which ends the
    run first and says where it was.
    exclusive: whole nodes. On by default, because other work on a node distorts the measurement.
    mem: memory per node (`64G`); default: all of an exclusive node, else the site's default.
    cpus_per_task: cores per node; default: `threads` per process, and all of an exclusive node.
    requeue: a preempted job goes back into the queue and starts over. By default it ends as preempted, and
    `max_restarts` decides.
    shared: every node sees the run directory under the same path. If not, ranks write to the temporary directory of
    their node, and their files travel in the output of each node's step.
    output: where Slurm writes that output if shared is false: a directory that nodes and controller see. Without it
    Slurm writes to `scratch` on each node, and the controller fetches it with srun.
    scratch: a directory that exists on every node.
    port: rendezvous port on the first node; default: derived from the job id.
    pending_s: how long the job may wait in the queue; default: forever.
    patience_s: how long slurmctld may be unavailable. poll_s: seconds between two polls.
    python: the interpreter on the nodes; default: the controller's own, in a container `python3`.
    container_image, container_mounts: passed to srun for pyxis and enroot; a shared run directory is mounted too.
    env: variables of the ranks. No secrets: sbatch passes on the controller's environment anyway.
    setup: lines of shell before srun (`module load cuda`), the only text that a shell interprets.
    srun_arguments: more arguments for srun. threads: CPU threads per process.
    """

    account: Any = None
    partition: Any = None
    qos: Any = None
    constraint: Any = None
    nodelist: Any = None
    exclude: Any = None
    reservation: Any = None
    comment: Any = None
    gpus: Any = None
    gres: Any = None
    time: Any = None
    exclusive: bool = True
    mem: Any = None
    cpus_per_task: Any = None
    requeue: bool = False
    shared: bool = True
    output: Any = None
    scratch: str = "/tmp"
    port: Any = None
    pending_s: Any = None
    patience_s: float = 300.0
    poll_s: float = 2.0
    python: Any = None
    container_image: Any = None
    container_mounts: Any = None
    env: Any = None
    setup: Any = None
    srun_arguments: Any = None
    threads: int = 1

    def __post_init__(self) -> None:
        for name in (*PLAIN, "gres", "mem", "python", "container_image"):
            # A line break would start another line of the script.
            value = getattr(self, name)
            fits = value is None or (isinstance(value, str | int) and not isinstance(value, bool))
            require(fits and is_one_line(str(value)), f"slurm.{name}", value, "text of one line")
        for name in ("gpus", "cpus_per_task", "port"):
            value, least = getattr(self, name), 0 if name == "gpus" else 1
            fits = value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= least)
            require(fits, f"slurm.{name}", value, f"a whole number, {least} or more")
        # YAML reads 1:30:00 as the number 5400, which Slurm would read as minutes.
        fits = self.time is None or (isinstance(self.time, str) and bool(_TIME.fullmatch(self.time)))
        require(fits, "slurm.time", self.time, "minutes, H:M:S or D-H:M:S as text in quotation marks")
        _require_folder("slurm.output", self.output)
        _require_folder("slurm.scratch", self.scratch)
        fits = self.pending_s is None or _is_positive(self.pending_s)
        require(fits, "slurm.pending_s", self.pending_s, "a positive number, or null to wait forever")
        for name in ("patience_s", "poll_s"):
            require(_is_positive(getattr(self, name)), f"slurm.{name}", getattr(self, name), "a positive number")
        require(self.threads >= 1, "slurm.threads", self.threads, "a whole number, 1 or more")
        for name in ("container_mounts", "setup", "srun_arguments"):
            value = getattr(self, name)
            is_list = isinstance(value, list | tuple) and all(isinstance(v, str) and is_one_line(v) for v in value)
            require(value is None or is_list, f"slurm.{name}", value, "a list of texts of one line each")
        require(
            self.env is None or isinstance(self.env, Mapping), "slurm.env", self.env, "a mapping of names to values"
        )
        for name, value in (self.env or {}).items():
            is_name = isinstance(name, str) and bool(_VARIABLE.fullmatch(name))
            require(is_name, "slurm.env", name, "a name of letters, digits and _")
            # The value is not repeated, because it may be the secret.
            accepted = "no secret; export it in the environment that starts paceline"
            require(not is_secret(name, str(value)), f"slurm.env.{name}", "a value that looks like a secret", accepted)
            scalar = isinstance(value, str | int | float) and not isinstance(value, bool)
            require(scalar and "\0" not in str(value), f"slurm.env.{name}", value, "text or a number")
        accepted = "null, or a directory with shared: false"
        require(not (self.shared and self.output), "slurm.output", self.output, accepted)

    @property
    def gpus_per_node(self) -> int | None:
        """The number that the options give, or None."""
        if self.gres is None:
            return None if self.gpus is None else int(self.gpus)
        counts = [int(count or 1) for count in _GPUS.findall(str(self.gres))]
        return sum(counts) if counts else None


def is_one_line(text: str) -> bool:
    return bool(text) and text.isprintable()


def _require_folder(where: str, value: object) -> None:
    fits = value is None or (isinstance(value, str) and value.startswith("/") and carries_path(value))
    require(fits, where, value, "an absolute path of one line without a backslash")


def carries_path(path: str) -> bool:
    """Whether Slurm uses this path unchanged: a backslash disables its % patterns."""
    return is_one_line(path) and "\\" not in path


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


# --- the script ---


def render(spec: RunSpec, chosen: Options, name: str, run_dir: Path) -> str:
    lines = ["#!/bin/bash", *(f"#SBATCH {line}" for line in directives(spec, chosen, name, run_dir)), ""]
    variables = rank_environment(spec, chosen.threads, chosen.env)
    variables |= {} if chosen.shared else {"PACELINE_SPEC": spec_text(spec)}
    lines += [f"export {key}={shlex.quote(value)}" for key, value in variables.items()]
    lines += [_RENDEZVOUS.rstrip()]
    lines += [f"port={chosen.port or '$((20000 + SLURM_JOB_ID % 10000))'}"]
    if chosen.requeue and chosen.shared:
        names = " -o ".join(f"-name {shlex.quote(pattern)}" for pattern in _LEFT)
        lines += [_ANEW.format(run_dir=shlex.quote(str(run_dir)), names=names).rstrip()]
    lines += chosen.setup or ()
    if may_go_on(spec, chosen):
        lines += [f'echo "{BEGIN}$SLURM_JOB_NODELIST"']
    lines += [f"{shlex.join(step(spec, chosen, name, run_dir))} --port=$port", "code=$?"]
    if chosen.shared:
        # For a controller that asks after Slurm has forgotten the job.
        lines += [f'printf "%s %s\\n" "$SLURM_JOB_ID" "$code" > {shlex.quote(str(run_dir / EXIT))}']
    elif chosen.output is None:
        first = node_output(shlex.quote(chosen.scratch), name, '"$SLURM_JOB_ID"', 0)
        lines += ["# The controller removes this file once it has it. Released nodes may never be available again."]
        lines += [f"for _ in {{1..{LINGER_S}}}; do", f"  [ -e {first} ] || break", "  sleep 1", "done"]
    return "\n".join([*lines, 'exit "$code"', ""])


def directives(spec: RunSpec, chosen: Options, name: str, run_dir: Path) -> Iterator[str]:
    nodes, processes = spec.topology.nodes, spec.topology.processes_per_node
    yield f"--job-name={name}"
    yield f"--nodes={nodes}"
    yield f"--ntasks={nodes}"
    yield "--ntasks-per-node=1"
    yield f"--time={chosen.time or math.ceil((spec.timeout_s + MARGIN_S) / 60)}"
    yield "--requeue" if chosen.requeue else "--no-requeue"
    if may_go_on(spec, chosen):
        yield "--no-kill"
    if chosen.exclusive:
        yield "--exclusive"
    if chosen.mem is not None or chosen.exclusive:
        yield _directive("mem", "0" if chosen.mem is None else str(chosen.mem))
    if chosen.cpus_per_task or not chosen.exclusive:
        yield f"--cpus-per-task={chosen.cpus_per_task or processes * chosen.threads}"
    gpus = chosen.gpus if chosen.gpus is not None else processes if spec.topology.device == "cuda" else 0
    if chosen.gres is not None or gpus:
        yield _directive("gres", str(chosen.gres or f"gpu:{gpus}"))
    for option in PLAIN:
        if getattr(chosen, option) is not None:
            yield _directive(option, str(getattr(chosen, option)))
    folder = _pattern(chosen.output or chosen.scratch)
    log = _pattern(str(run_dir / "log.txt")) if chosen.shared else batch_output(folder, name, "%j")
    yield _directive("output", log)
    yield "--open-mode=append"


def may_go_on(spec: RunSpec, chosen: Options) -> bool:
    """Whether Slurm should let the job continue when a node is lost.

    Not if files are fetched from the nodes' disks: srun addresses nodes by their index, which a loss would shift.
    """
    return bool(may_be_lost(spec)) and (chosen.shared or chosen.output is not None)


def step(spec: RunSpec, chosen: Options, name: str, run_dir: Path) -> list[str]:
    """Return the srun command: one agent per node. The port is added by the script, because it needs the job id."""
    nodes = spec.topology.nodes
    words = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    words += ["--wait=0", "--kill-on-bad-exit=0", "--no-kill"] if may_go_on(spec, chosen) else [f"--wait={WAIT_S}"]
    # Otherwise the task, and all ranks of the node, are bound to one core.
    words += ["--cpu-bind=none"]
    # Slurm 22.05 and later do not pass it on from sbatch.
    words += [f"--cpus-per-task={chosen.cpus_per_task}"] if chosen.cpus_per_task else []
    if not chosen.shared:
        # Written by the node's own slurmstepd: srun would mix pieces of long lines of several nodes.
        folder = _pattern(chosen.output or chosen.scratch)
        words += [f"--output={node_output(folder, name, '%j', '%n')}", "--open-mode=truncate"]
    if chosen.container_image is not None:
        own = [f"{run_dir}:{run_dir}"] if chosen.shared else []
        fits = not own or not set(str(run_dir)) & {",", ":"}
        require(fits, "run directory", str(run_dir), "a path without , and : to mount")
        mounts = [*own, *(chosen.container_mounts or ())]
        words += [f"--container-image={chosen.container_image}"]
        words += [f"--container-mounts={','.join(mounts)}"] if mounts else []
    words += chosen.srun_arguments or ()
    python = chosen.python or ("python3" if chosen.container_image is not None else sys.executable)
    known = agent_arguments(port=0, shared=run_dir if chosen.shared else None)
    return [*words, str(python), *(word for word in known if word != "--port=0")]


def node_output(folder: str, name: str, job: str, node: int | str) -> str:
    """Path of the output of a node's agent, without a shared disk."""
    return f"{folder}/{name}-{job}-node{node}.log"


def batch_output(folder: str, name: str, job: str) -> str:
    """Path of the script's own output, without a shared disk."""
    return f"{folder}/{name}-{job}-batch.log"


def _pattern(path: str) -> str:
    """Escape a path for Slurm's file name patterns, which begin with %."""
    require(carries_path(path), "run directory", path, "a path of one line without a backslash")
    return path.replace("%", "%%")


def _directive(option: str, value: str) -> str:
    """Quote a value for sbatch, which accepts both quotation marks and treats a backslash as an escape in either."""
    if _UNQUOTED.fullmatch(value):
        return f"--{option}={value}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'--{option}="{escaped}"'
