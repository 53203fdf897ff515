"""The launcher ray with ranks that need no torch (see `light`): `launcher: testbed.light_ray`, options as of ray.

LIGHT_RAY_NET names a network namespace (a file) where the driver shall run: a cluster under test has one of its own.
The rank's variable LIGHT_RAY_VERSION makes the driver one of another version of Ray. The same module is what an agent
starts in the place of the rank: one process, which is the rank itself.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from paceline.contract import Job
from paceline.experiment.spec import RunSpec
from paceline.launchers import ray
from paceline.launchers.ray import cancel, check, collect, offer, poll, submit
from paceline.results import store
from testbed import light

__all__ = ["cancel", "check", "collect", "offer", "poll", "prepare", "submit"]

_OTHER = "import sys, ray; ray.__version__ = sys.argv[1]; from paceline.launchers.ray.driver import main; main()"


def prepare(spec: RunSpec, run_dir: Path) -> Job:
    """The job of the launcher ray with another runner. Jobs are prepared in many threads, which share no variable."""
    job = ray.prepare(spec, run_dir)
    request = {**json.loads(job.files["request.json"]), "runner": "testbed.light_ray"}
    version = (spec.launcher.options.get("env") or {}).get("LIGHT_RAY_VERSION")
    argv = (sys.executable, "-c", _OTHER, version) if version else job.argv
    place = os.environ.get("LIGHT_RAY_NET")
    if place:
        argv = ("nsenter", f"--net={place}", *argv)
    return replace(job, argv=argv, files={**job.files, "request.json": json.dumps(request)})


def main(argv: list[str]) -> int:
    run_dir, rank = Path(argv[-1]), int(os.environ["RANK"])
    return light.live(store.read_spec(run_dir), run_dir, rank)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
