"""What the image starts (`python -m paceline.cli.entry`): a node of a job where an engine has given it one, else the
command line.

An engine gives a node its job in the variable PACELINE_SPEC, and its place in whatever it calls it (see `places`):
completion index, Slurm, MPI, torchrun. So one image serves every engine, and `docker run IMAGE doctor` a person.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

SPEC = "PACELINE_SPEC"


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """The exit code of the node or of the verb. Arguments after a verb's name are always the verb's."""
    words = list(argv[1:])
    if environ.get(SPEC) and not (words and not words[0].startswith("-")):
        from paceline.launchers.node import agent

        return agent.main([argv[0], "--relay", *words])
    from paceline import cli

    return cli.main(words)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv, os.environ))
