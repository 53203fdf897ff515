"""The launcher local with new interpreters, whose ranks can be killed once (see `mortal`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from paceline.contract import Job
from paceline.experiment.spec import RunSpec
from paceline.launchers import local
from paceline.launchers.local import HERE, cancel, check, poll, submit

__all__ = ["HERE", "cancel", "check", "poll", "prepare", "submit"]


def prepare(spec: RunSpec, run_dir: Path) -> Job:
    job = local.prepare(spec, run_dir)
    words = ("testbed.mortal" if word == "paceline.workloads.worker" else word for word in job.argv)
    return replace(job, argv=tuple(words), settings={})
