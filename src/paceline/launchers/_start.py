"""What every launcher gives its processes: their environment, the name of their job, the command of a node."""

from __future__ import annotations

import hashlib
import json
import re
import socket
from pathlib import Path

from paceline.experiment.spec import RunSpec

# Names of pods end at 63 characters; those of a JobSet append `-node-0-999-abcde`.
LONGEST_NAME = 46
# The module that starts the ranks of a node, where it is not torchrun: tests of engines need no torch.
RUNNER: str | None = None


def rank_environment(threads: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        # torch 2.13 warns at every collective that DeepSpeed still calls it by its older name.
        "PYTHONWARNINGS": "ignore::FutureWarning",
    }


def job_name(spec: RunSpec, run_dir: Path) -> str:
    """A lower-case DNS label, which a controller on another host or path finds too: it comes from the mark that stands
    in the run folder before anything is submitted. Only a plan, which submits nothing, has no mark."""
    launch = spec.lineage or f"{socket.gethostname()}:{run_dir.absolute()}"
    mark = hashlib.sha256(f"{spec.run_id} {launch}".encode()).hexdigest()[:8]
    slug = re.sub(r"[^a-z0-9]+", "-", spec.run_id.lower()).strip("-")
    return f"paceline-{slug[: LONGEST_NAME - 18].strip('-')}-{mark}"


def spec_text(spec: RunSpec) -> str:
    """The spec on one line, for engines that carry it in a variable."""
    return json.dumps(spec.to_dict(), separators=(",", ":"))


def agent_arguments(
    *, port: int, shared: Path | None = None, rendezvous: str = "static", controller_link: bool = False
) -> list[str]:
    """Arguments that start the agent with the node's Python. Without a shared folder, files travel as log lines."""
    arguments = ["-m", "paceline.launchers.node.agent", f"--port={port}", f"--rendezvous={rendezvous}"]
    arguments += [f"--run-dir={shared}"] if shared is not None else ["--relay"]
    arguments += ["--controller-link"] if controller_link else []
    return arguments + ([f"--runner={RUNNER}"] if RUNNER else [])
