"""A TorchX component: a Paceline experiment inside a job of any TorchX scheduler.

    torchx run -s slurm $(python -m paceline.launchers.here.start --torchx-component):run --experiment quick --out DIR

TorchX reads this file by its path, possibly with a Python of its own: it imports nothing of Paceline.
"""
# ruff: noqa: UP006, UP035, UP045 (TorchX accepts only these forms of the types)

import shlex
import sys
from typing import Dict, List, Optional

import torchx.specs as specs


def run(
    experiment: str,
    out: str,
    options: str = "",
    nodes: int = 1,
    processes: int = 1,
    python: str = "",
    image: str = "",
    cpu: int = -1,
    gpu: int = -1,
    memMB: int = -1,
    h: Optional[str] = None,
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
) -> specs.AppDef:
    """Run a Paceline experiment on the nodes of one job.

    Args:
        experiment: a preset or a YAML file that all nodes can read
        out: results directory, which all nodes share
        options: more options of `paceline run` in one text, as in "--set steps=5 --format html"
        nodes: number of nodes, one replica each
        processes: processes on each node, one per GPU
        python: the Python with Paceline on the nodes (default: this one, or python3 of the image)
        image: container image, for schedulers that use one
        cpu: CPUs of each node
        gpu: GPUs of each node (default: processes are on CPUs)
        memMB: memory of each node in MB
        h: a registered named resource instead of cpu, gpu and memMB
        env: variables of the job
        mounts: mounts as in dist.ddp, for results on a volume
    """
    words = ["-m", "paceline.launchers.here.start", "--job", specs.macros.app_id, "--nodes", str(nodes)]
    words += ["--node-rank", specs.macros.replica_id, "--processes", str(processes), "--"]
    words += ["run", experiment, "--launcher", "here", "--out", out, *shlex.split(options)]
    return specs.AppDef(
        name="paceline",
        roles=[
            specs.Role(
                name="paceline",
                image=image,
                entrypoint=python or ("python3" if image else sys.executable),
                args=words,
                num_replicas=nodes,
                env={"PYTHONUNBUFFERED": "1", **(env or {})},
                resource=specs.resource(cpu=cpu, gpu=gpu, memMB=memMB, h=h),
                mounts=specs.parse_mounts(mounts) if mounts else [],
            )
        ],
    )
