"""What sbatch says of a job that Slurm would never take, as a sentence about the option that is wrong."""

from __future__ import annotations

import re
import subprocess

from paceline.errors import LaunchError
from paceline.launchers import _slurm_states
from paceline.launchers._slurm_options import Options

# Words of sbatch -> the options they are about, and the command that shows what is accepted. The first that fits
# counts: the sentence about an account speaks of the partition too.
_ABOUT: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (r"account", ("account",), "sacctmgr show associations user=$USER"),
    (r"qos", ("qos",), "sacctmgr show associations user=$USER"),
    (r"partition", ("partition",), "sinfo"),
    (r"reservation", ("reservation",), "scontrol show reservation"),
    (r"feature", ("constraint",), "sinfo -o '%N %f'"),
    (r"node name", ("nodelist", "exclude"), "sinfo -N"),
    (r"gres|generic resource", ("gres", "gpus"), "sinfo -o '%N %G'"),
)
# What is invalid stays so. Nodes that are down, busy or not enough may be back, or do for another run of the campaign.
_CERTAIN = re.compile(r"\binvalid\b|\bfatal\b", re.IGNORECASE)


def sentence(done: subprocess.CompletedProcess[str], chosen: Options) -> str | None:
    """None for a job that Slurm would take, or may take later."""
    if done.returncode == 0 or not _CERTAIN.search(done.stderr):
        return None
    said = re.sub(r"^(sbatch: )?((error|fatal|allocation failure): )*", "", _slurm_states.said(done))
    for words, names, shown in _ABOUT:
        if re.search(words, said, re.IGNORECASE):
            given = [f"slurm.{name}: {getattr(chosen, name)!r}" for name in names if getattr(chosen, name) is not None]
            if given:
                return f"{', '.join(given)} was given, and Slurm says: {said}{_known(names[0])}; try: {shown}"
    return f"Slurm would not take a job: {said}; try: scontrol ping"


def _known(name: str) -> str:
    """The partitions there are; other lists are long, or only an accounting has them."""
    if name != "partition":
        return ""
    try:
        found = _slurm_states.call("sinfo", "--all", "--noheader", "--format=%R").stdout.split()
    except (_slurm_states.Away, LaunchError):
        return ""
    return f"; accepted is one of {', '.join(dict.fromkeys(found))}" if found else ""
