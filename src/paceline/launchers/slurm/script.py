"""The batch script of a run: what Slurm shall give, then one agent on each node.

Whatever a user or a folder is called stays data: sbatch reads the lines `#SBATCH` by quoting rules of its own, bash
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
from paceline.launchers._start import agent_arguments, rank_environment, spec_text
from paceline.launchers.slurm.losses import BEGIN
from paceline.launchers.slurm.options import PLAIN, Options, carries_path
from paceline.results import store

SCRIPT = "job.sh"
EXIT = "exit.txt"
# Above the run's own limit, which says where the ranks were.
MARGIN_S = 300.0
# After the first node has ended, by itself or not: ranks elsewhere may hang in a call that nobody answers any more.
WAIT_S = 60
# How long nodes are kept after the ranks have ended, for the controller to fetch what lies on their disks.
LINGER_S = 120
_MEETING = r"""# Ranks meet where Slurm itself reaches the first node, which is the one that runs this script.
address=$(scontrol show node -o "$SLURMD_NODENAME" | sed -n 's/.* NodeAddr=\([^ ]*\) .*/\1/p')
export PACELINE_MASTER="${PACELINE_MASTER:-${address:-$SLURMD_NODENAME}}"
"""
_ANEW = """# Slurm has put the job back into the queue: what the first attempt left is not of this one.
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
    lines += [f"export {key}={shlex.quote(value)}" for key, value in _environment(spec, chosen).items()]
    lines += [_MEETING.rstrip()]
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
    """Whether Slurm shall let the job go on when a node is lost. What lies on the nodes' own disks is fetched from each
    by its place in the job, which a loss would shift."""
    return bool(may_be_lost(spec)) and (chosen.shared or chosen.output is not None)


def step(spec: RunSpec, chosen: Options, name: str, run_dir: Path) -> list[str]:
    """One agent on each node. Its port is not known before the job has a number."""
    nodes = spec.topology.nodes
    words = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    words += ["--wait=0", "--kill-on-bad-exit=0", "--no-kill"] if may_go_on(spec, chosen) else [f"--wait={WAIT_S}"]
    # Without it a task keeps to one core, and all ranks of the node with it.
    words += ["--cpu-bind=none"]
    # Slurm 22.05 and later do not hand it on from sbatch.
    words += [f"--cpus-per-task={chosen.cpus_per_task}"] if chosen.cpus_per_task else []
    if not chosen.shared:
        # By the node's own slurmstepd: through srun the pieces of long lines of several nodes would mix.
        folder = _pattern(chosen.output or chosen.scratch)
        words += [f"--output={node_output(folder, name, '%j', '%n')}", "--open-mode=truncate"]
    if chosen.container_image is not None:
        words += [f"--container-image={chosen.container_image}", *_mounts(chosen, run_dir)]
    words += chosen.srun_arguments or ()
    python = chosen.python or ("python3" if chosen.container_image is not None else sys.executable)
    # By c10d torchrun numbers nodes as their names sort; whom the job goes on without is known by Slurm's number of it.
    rendezvous = "static" if may_go_on(spec, chosen) else "c10d"
    known = agent_arguments(port=0, shared=run_dir if chosen.shared else None, rendezvous=rendezvous)
    return [*words, str(python), *(word for word in known if word != "--port=0")]


def _mounts(chosen: Options, run_dir: Path) -> list[str]:
    own = [f"{run_dir}:{run_dir}"] if chosen.shared else []
    require(
        not own or not set(str(run_dir)) & {",", ":"}, "run folder", str(run_dir), "a path without , and : to mount"
    )
    mounts = [*own, *(chosen.container_mounts or ())]
    return [f"--container-mounts={','.join(mounts)}"] if mounts else []


def node_output(folder: str, name: str, job: str, node: int | str) -> str:
    """Where the output of a node's agent goes, when no disk is shared."""
    return f"{folder}/{name}-{job}-node{node}.log"


def batch_output(folder: str, name: str, job: str) -> str:
    """Where the script's own output goes, when no disk is shared."""
    return f"{folder}/{name}-{job}-batch.log"


def _pattern(path: str) -> str:
    """A path in Slurm's patterns, whose signs begin with %: a folder's name may hold one too."""
    require(carries_path(path), "run folder", path, "a path of one line without a backslash, which Slurm can write to")
    return path.replace("%", "%%")


def _directive(option: str, value: str) -> str:
    """sbatch knows both quotation marks, and takes a backslash for an escape within either."""
    if _PLAIN.fullmatch(value):
        return f"--{option}={value}"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'--{option}="{escaped}"'


def _environment(spec: RunSpec, chosen: Options) -> dict[str, str]:
    given = {key: str(value) for key, value in (chosen.env or {}).items()}
    carried = {} if chosen.shared else {"PACELINE_SPEC": spec_text(spec)}
    return {**rank_environment(chosen.threads), **given, **carried}


def _farewell(chosen: Options, name: str, run_dir: Path) -> list[str]:
    """How the ranks ended, for a controller that asks when Slurm has forgotten the job."""
    if chosen.shared:
        path = shlex.quote(str(run_dir / EXIT))
        return [f'printf "%s %s\\n" "$SLURM_JOB_ID" "$code" > {path}']
    if chosen.output is not None:
        return []
    first = node_output(shlex.quote(chosen.scratch), name, '"$SLURM_JOB_ID"', 0)
    waiting = "# The controller removes this file once it has it; nodes that are given back may never be had again."
    return [waiting, f"for _ in {{1..{LINGER_S}}}; do", f"  [ -e {first} ] || break", "  sleep 1", "done"]
