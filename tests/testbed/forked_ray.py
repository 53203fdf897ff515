"""The launcher ray with ranks forked from the nursery: `launcher: testbed.forked_ray`, options as of ray."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from paceline.contract import Job
from paceline.experiment.spec import RunSpec
from paceline.launchers import ray
from paceline.launchers.ray import actor, cancel, check, collect, offer, poll, submit
from testbed.nursery import fork_programs

__all__ = ["cancel", "check", "collect", "offer", "poll", "prepare", "submit"]


def prepare(spec: RunSpec, run_dir: Path) -> Job:
    job = ray.prepare(spec, run_dir)
    request = {**json.loads(job.files["request.json"]), "runner": "testbed.forked_ray"}
    return replace(job, files={**job.files, "request.json": json.dumps(request)})


if __name__ == "__main__":
    # In the place of the rank, as an agent starts it.
    fork_programs()
    actor.main(sys.argv)
