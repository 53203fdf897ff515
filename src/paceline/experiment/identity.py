"""Which fields and options make another run: those on which a measured number may depend, and no others.

A run that is asked for again is known by what was asked (`RunSpec.run_id`), and repeats by their cell. An option that
decides how long is waited, who pays or who is let in makes neither another. In doubt an option stays: a partition, a
queue of Kueue or a namespace may lead to other nodes, a quality of service to another partition, to neighbours or to a
job that is suspended meanwhile, a pull policy to another image of the same name, a jump host or an ssh_config to
another machine, the path of a program to another build of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Fields of a spec that make no other run: its name, how long it may take, how often gauges are read beside it and how
# often it may be restarted, the plan it is a point of, and the mark of one launch.
NO_RUN = ("experiment", "timeout_s", "stall_s", "telemetry_hz", "max_restarts", "design", "lineage")
# Fields that make no other cell: in these, repeats of one configuration may differ too.
NO_CELL = (*NO_RUN, "repeat", "reference_steps")
# Of every launcher and engine: how long to wait.
WAITING = ("connect_s", "keep_s", "patience_s", "pending_s", "poll_s", "ready_s")
_MEETING = "where ranks meet before they choose ports of their own"
# Launcher -> its other options on which nothing measured depends, each with what it decides instead.
UNMEASURED: dict[str, dict[str, str]] = {
    "kubernetes": {
        "image_pull_secrets": "who may pull the image, not which one it is",
        "priority_class": "when pods begin, and for whom they make room",
        "service_account": "rights, of which pods use none",
        "port": _MEETING,
    },
    "slurm": {
        "account": "who pays",
        "comment": "what `squeue` shows",
        "time": "when Slurm ends the job",
        "requeue": "whether a job that was taken away begins anew",
        "port": _MEETING,
    },
    "ssh": {
        "key": "who is let in",
        "known_hosts": "which host keys are accepted",
        "port": _MEETING,
    },
    "ray": {"port": _MEETING},
    "local": {},
}


def measured(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a launcher or an engine that belong to what was measured."""
    left_out = (*WAITING, *UNMEASURED.get(name, ()))
    return {key: value for key, value in options.items() if key not in left_out}
