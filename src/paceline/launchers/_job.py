"""What all launchers share: the name and environment of a job, the arguments of the node agent, one retry, lost nodes.

A job of served replicas may continue without some nodes. `contract.may_be_lost` says which. Each launcher detects
losses in its own way; the rules at the end of this file are the same for all.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import LaunchError
from paceline.experiment.spec import RunSpec
from paceline.results import store
from paceline.results.records import Status

# Pod names have at most 63 characters, and a JobSet appends `-node-0-999-abcde`.
LONGEST_NAME = 46
# Long enough for a server to restart, or for a switch to relearn its ports.
RETRY_S = 5.0
# The module that starts the ranks of a node instead of torchrun, for tests without torch.
RUNNER: str | None = None
Answer = TypeVar("Answer")


def rank_environment(spec: RunSpec, threads: int, own: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return the variables of every rank: Paceline's, those of the launcher's options, and those of the spec."""
    if spec.script:
        # A script gets the environment that it would have without Paceline.
        return {**{name: str(value) for name, value in (own or {}).items()}, **spec.env}
    return {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        # torch 2.13 warns at every collective that DeepSpeed calls by its old name.
        "PYTHONWARNINGS": "ignore::FutureWarning",
        **{name: str(value) for name, value in (own or {}).items()},
        **spec.env,
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


def agent_arguments(*, port: int, shared: Path | None = None, controller_link: bool = False) -> list[str]:
    """Return the Python arguments that start the agent. Without a shared directory, files travel as log lines."""
    arguments = ["-m", "paceline.launchers.node.agent", f"--port={port}"]
    arguments += [f"--run-dir={shared}"] if shared is not None else ["--relay"]
    arguments += ["--controller-link"] if controller_link else []
    return arguments + ([f"--runner={RUNNER}"] if RUNNER else [])


class NoAnswerError(LaunchError):
    """Nothing answered, which may pass."""


def retry_once(ask: Callable[[], Answer]) -> Answer:
    """Call again after a pause if nothing answered, before a whole campaign is refused. Any other refusal is final."""
    try:
        return ask()
    except NoAnswerError:
        time.sleep(RETRY_S)
    return ask()


# --- lost nodes ---


def is_past_setup(run_dir: Path) -> bool:
    """Whether rank 0 has begun to send requests. From then on it only needs answers from the other nodes."""
    first = next((position for position in store.read_progress(run_dir) if position.rank == 0), None)
    return first is not None and first.phase not in ("start", "setup")


def ranks_of(node: int, ranks: int) -> range:
    """Return the ranks of a node. ranks: per node."""
    return range(node * ranks, (node + 1) * ranks)


def awaited_ranks(nodes: int, lost: Collection[int], ranks: int) -> set[int]:
    """Return the ranks of all nodes that are not lost."""
    return {rank for node in range(nodes) if node not in lost for rank in ranks_of(node, ranks)}


def have_ended(run_dir: Path, awaited: Collection[int]) -> bool:
    """Whether all awaited ranks have written an outcome. Their torchrun would wait minutes for the lost ones."""
    return set(awaited) <= {outcome.rank for outcome in store.sound_outcomes(run_dir)}


def reported_failure(run_dir: Path, ranks: Collection[int]) -> bool:
    """Whether one of these ranks reported a failure itself. That fails the run, so it does not continue."""
    return any(o.rank in ranks and o.status is not Status.OK for o in store.sound_outcomes(run_dir))
