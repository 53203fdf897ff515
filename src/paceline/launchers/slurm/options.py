"""The options of the Slurm launcher, checked before anything is submitted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import require
from paceline.host.environment import is_secret

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
