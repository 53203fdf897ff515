"""What all launchers share: the environment of ranks, the name of a job, the arguments of the node agent."""

from __future__ import annotations

import hashlib
import json
import re
import socket
from pathlib import Path

from paceline.experiment.spec import RunSpec

# Pod names have at most 63 characters, and a JobSet appends `-node-0-999-abcde`.
LONGEST_NAME = 46
# The module that starts the ranks of a node instead of torchrun, for tests without torch.
RUNNER: str | None = None


def rank_environment(threads: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        # torch 2.13 warns at every collective that DeepSpeed calls by its old name.
        "PYTHONWARNINGS": "ignore::FutureWarning",
    }


def job_name(spec: RunSpec, run_dir: Path) -> str:
    """Return a lower-case DNS label that a controller on another host or path computes too.

    It is derived from the launch id that is stored in the run directory before anything is submitted. Only a plan,
    which submits nothing, has no id.
    """
    launch = spec.lineage or f"{socket.gethostname()}:{run_dir.absolute()}"
    digest = hashlib.sha256(f"{spec.run_id} {launch}".encode()).hexdigest()[:8]
    slug = re.sub(r"[^a-z0-9]+", "-", spec.run_id.lower()).strip("-")
    return f"paceline-{slug[: LONGEST_NAME - 18].strip('-')}-{digest}"


def spec_text(spec: RunSpec) -> str:
    """Return the spec in one line, for engines that pass it in a variable."""
    return json.dumps(spec.to_dict(), separators=(",", ":"))


def agent_arguments(
    *, port: int, shared: Path | None = None, rendezvous: str = "static", controller_link: bool = False
) -> list[str]:
    """Return the Python arguments that start the agent. Without a shared directory, files travel as log lines."""
    arguments = ["-m", "paceline.launchers.node.agent", f"--port={port}", f"--rendezvous={rendezvous}"]
    arguments += [f"--run-dir={shared}"] if shared is not None else ["--relay"]
    arguments += ["--controller-link"] if controller_link else []
    return arguments + ([f"--runner={RUNNER}"] if RUNNER else [])
