"""What a user may ask of Slurm, and what of it can be carried to sbatch unchanged."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import require
from paceline.host.environment import is_secret

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Minutes, minutes:seconds, hours:minutes:seconds, or any of them after days and a hyphen; or no limit.
_TIME = re.compile(r"(\d+-)?\d+(:\d{1,2}){0,2}|infinite|UNLIMITED", re.IGNORECASE)
_GPUS = re.compile(r"(?:^|,)gpu(?::[^:,()]+)?(?::(\d+))?(?=$|[,(])")
# Written as they are behind the option of the same name.
PLAIN = ("account", "partition", "qos", "constraint", "nodelist", "exclude", "reservation", "comment")


@dataclass(frozen=True)
class Options:
    """account, partition, qos, constraint, nodelist, exclude, reservation, comment: as sbatch takes them.

    gpus: GPUs of each node; by default one for each process where the device is cuda. gres: written in its place,
    where a type or another resource is wanted (`gpu:h100:8`).
    time: the limit Slurm keeps, as sbatch takes it; by default five minutes above the run's own timeout_s, which ends
    the run first and says where it was.
    exclusive: whole nodes. On by default: whoever else works on a node is in the numbers.
    mem: memory of each node (`64G`); by default all of an exclusive node, else what the site gives.
    cpus_per_task: cores of each node; by default `threads` for each process, and all of an exclusive node.
    requeue: a job that Slurm takes from its nodes goes back into the queue and begins anew there. By default it ends
    as preempted, and `max_restarts` decides.
    shared: the run folder is on a disk that every node sees under the same path. Where it is not, ranks write to the
    temporary folder of their node, and what they leave travels in the output of each node's step.
    output: where Slurm writes that output when shared is false: a folder that nodes and controller see. Without it
    Slurm writes to `scratch` on each node, and the controller fetches it with srun.
    scratch: a folder that is there on every node.
    port: where ranks meet on the first node; by default one that follows from the number of the job.
    pending_s: how long the job may wait in the queue; by default for ever.
    patience_s: how long slurmctld may be away. poll_s: seconds between two questions to it.
    python: the interpreter on the nodes; by default the controller's own, in a container `python3`.
    container_image, container_mounts: given to srun for pyxis and enroot; a shared run folder is mounted besides.
    env: variables of the ranks. Secrets do not belong here: sbatch hands on the controller's environment as it is.
    setup: lines of shell before srun (`module load cuda`), the one place where what is written is run by a shell.
    srun_arguments: more words for srun. threads: CPU threads of each process.
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
            _require_line(f"slurm.{name}", getattr(self, name))
        for name in ("gpus", "cpus_per_task", "port"):
            _require_count(f"slurm.{name}", getattr(self, name), 0 if name == "gpus" else 1)
        # YAML reads 1:30:00 as the number 5400, which Slurm would take for minutes.
        timed = self.time is None or (isinstance(self.time, str) and bool(_TIME.fullmatch(self.time)))
        require(timed, "slurm.time", self.time, "minutes, H:M:S or D-H:M:S as text, in quotation marks")
        _require_folder("slurm.output", self.output)
        _require_folder("slurm.scratch", self.scratch)
        waits = self.pending_s is None or _is_positive(self.pending_s)
        require(waits, "slurm.pending_s", self.pending_s, "a positive number, or null to wait for ever")
        for name in ("patience_s", "poll_s"):
            require(_is_positive(getattr(self, name)), f"slurm.{name}", getattr(self, name), "a positive number")
        require(self.threads >= 1, "slurm.threads", self.threads, "a whole number from 1")
        for name in ("container_mounts", "setup", "srun_arguments"):
            _require_lines(f"slurm.{name}", getattr(self, name))
        _require_variables(self.env)
        require(not (self.shared and self.output), "slurm.output", self.output, "null, or a folder with shared: false")

    @property
    def gpus_per_node(self) -> int | None:
        """As the options say it; None where they say nothing of GPUs."""
        if self.gres is None:
            return None if self.gpus is None else int(self.gpus)
        counts = [int(count or 1) for count in _GPUS.findall(str(self.gres))]
        return sum(counts) if counts else None


def _require_line(where: str, value: object) -> None:
    """One line of text, or a number: a line break would begin a line of the script that nobody has written."""
    fits = value is None or (isinstance(value, str | int) and not isinstance(value, bool))
    require(fits and is_one_line(str(value)), where, value, "text of one line")


def is_one_line(text: str) -> bool:
    return bool(text) and text.isprintable()


def _require_lines(where: str, values: object) -> None:
    listed = isinstance(values, list | tuple) and all(isinstance(v, str) and is_one_line(v) for v in values)
    require(values is None or listed, where, values, "a list of texts of one line each")


def _require_count(where: str, value: object, least: int) -> None:
    fits = value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= least)
    require(fits, where, value, f"a whole number from {least}")


def _require_folder(where: str, value: object) -> None:
    fits = value is None or (isinstance(value, str) and value.startswith("/") and carries_path(value))
    require(fits, where, value, "an absolute path of one line without a backslash")


def carries_path(path: str) -> bool:
    """Whether Slurm takes this path as it is: a backslash switches off what it does with %."""
    return is_one_line(path) and "\\" not in path


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _require_variables(env: object) -> None:
    require(env is None or isinstance(env, Mapping), "slurm.env", env, "a mapping of names to values")
    for name, value in (env or {}).items() if isinstance(env, Mapping) else ():
        named = isinstance(name, str) and bool(_VARIABLE.fullmatch(name))
        require(named, "slurm.env", name, "a name of letters, digits and _")
        where = f"slurm.env.{name}"
        # The value is not repeated: it may be what must not be shown.
        require(
            not is_secret(name, str(value)),
            where,
            "a secret",
            "a variable without one: export it where paceline is started",
        )
        scalar = isinstance(value, str | int | float) and not isinstance(value, bool)
        require(scalar and "\0" not in str(value), where, value, "text or a number")
