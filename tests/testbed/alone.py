"""This machine, as the launcher local, for one rank without torchrun: a client of endpoints needs no torch."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from paceline.contract import Job
from paceline.experiment.spec import RunSpec
from paceline.launchers import local
from paceline.launchers.local import HERE, cancel, poll, submit

__all__ = ["HERE", "cancel", "check", "poll", "prepare", "submit"]


def check(spec: RunSpec) -> str | None:
    return local.check(spec) if spec.topology.world_size == 1 else "one rank alone"


def prepare(spec: RunSpec, run_dir: Path) -> Job:
    return replace(local.prepare(spec, run_dir), argv=(sys.executable, "-m", "paceline.workloads.worker", str(run_dir)))
