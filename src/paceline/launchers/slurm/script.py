"""The batch script of a run: the requested resources, then one agent on each node.

Names of users and directories are quoted everywhere: sbatch reads the `#SBATCH` lines by its own quoting rules, bash
reads the rest.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from paceline.contract import may_be_lost
from paceline.errors import require
from paceline.experiment.spec import RunSpec
from paceline.launchers._job import agent_arguments, rank_environment, spec_text
from paceline.launchers.slurm.options import PLAIN, Options, carries_path
from paceline.launchers.slurm.states import BEGIN
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
_PLAIN = re.compile(r"[A-Za-z0-9_./:=,%+-]+")
_LEFT = ("samples-*", "progress-*", *store.LEFT_BY_RANKS, EXIT)


def render(spec: RunSpec, chosen: Options, name: str, run_dir: Path) -> str:
    lines = ["#!/bin/bash", *(f"#SBATCH {line}" for line in directives(spec, chosen, name, run_dir)), ""]
    variables = rank_environment(chosen.threads) | {key: str(value) for key, value in (chosen.env or {}).items()}
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
    lines += [
        f"{shlex.join(step(spec, chosen, name, run_dir))} --port=$port",
        "code=$?",
        *_farewell(chosen, name, run_dir),
    ]
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
    # c10d numbers nodes by their sorted names, but lost nodes are known by Slurm's number.
    rendezvous = "static" if may_go_on(spec, chosen) else "c10d"
    known = agent_arguments(port=0, shared=run_dir if chosen.shared else None, rendezvous=rendezvous)
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
    if _PLAIN.fullmatch(value):
        return f"--{option}={value}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'--{option}="{escaped}"'


def _farewell(chosen: Options, name: str, run_dir: Path) -> list[str]:
    """Record the exit code, for a controller that asks after Slurm has forgotten the job."""
    if chosen.shared:
        path = shlex.quote(str(run_dir / EXIT))
        return [f'printf "%s %s\\n" "$SLURM_JOB_ID" "$code" > {path}']
    if chosen.output is not None:
        return []
    first = node_output(shlex.quote(chosen.scratch), name, '"$SLURM_JOB_ID"', 0)
    waiting = "# The controller removes this file once it has it. Released nodes may never be available again."
    return [waiting, f"for _ in {{1..{LINGER_S}}}; do", f"  [ -e {first} ] || break", "  sleep 1", "done"]
