"""What sbatch says of a job that Slurm would never take, as a sentence about the option that is wrong."""

from __future__ import annotations

import re
import subprocess

from paceline.errors import LaunchError
from paceline.launchers.slurm import states
from paceline.launchers.slurm.options import Options

# Words of sbatch that stay true for every run of the same options -> those options, and the command that shows what is
# accepted. The first that fits counts: the sentence about an account speaks of the partition too. What else sbatch
# refuses (a time limit, nodes that are down, busy or too few) may do for another run, or pass.
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


def sentence(done: subprocess.CompletedProcess[str], chosen: Options) -> str | None:
    """None for a job that Slurm would take, or may take later, or may refuse for what differs between runs."""
    if done.returncode == 0:
        return None
    said = re.sub(r"^(sbatch: )?((error|fatal|allocation failure): )*", "", states.said(done))
    for words, names, shown in _CERTAIN:
        if re.search(words, said, re.IGNORECASE):
            return f"{_given(chosen, names)}Slurm says: {said}{_known(names)}; try: {shown}"
    return None


def _given(chosen: Options, names: tuple[str, ...]) -> str:
    given = [f"slurm.{name}: {value!r}" for name in names if (value := getattr(chosen, name)) is not None]
    return f"{', '.join(given) or f'slurm.{names[0]}: nothing'} was given, and " if names else ""


def _known(names: tuple[str, ...]) -> str:
    """The partitions there are; other lists are long, or only an accounting has them."""
    if names != ("partition",):
        return ""
    try:
        found = states.call("sinfo", "--all", "--noheader", "--format=%R").stdout.split()
    except (states.Away, LaunchError):
        return ""
    return f"; accepted is one of {', '.join(dict.fromkeys(found))}" if found else ""
