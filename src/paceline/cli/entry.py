"""The entry point of the container image (`python -m paceline.cli.entry`): a node of a job, or the command line.

An engine passes the job in PACELINE_SPEC and the node rank in a variable of its own (completion index, Slurm, MPI,
torchrun; see `launchers.node.placement`). So one image works for every engine, and `docker run IMAGE doctor` works too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

SPEC = "PACELINE_SPEC"


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Exit code of the node or of the verb. Arguments that begin with a verb always go to the command line."""
    arguments = list(argv[1:])
    if environ.get(SPEC) and not (arguments and not arguments[0].startswith("-")):
        from paceline.launchers.node import agent

        return agent.main([argv[0], "--relay", *arguments])
    from paceline import cli

    return cli.main(arguments)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv, os.environ))
