"""Replaces torchrun under an agent of Ray: this process becomes the one rank of its actor.

The variables of the rank (RANK, LOCAL_RANK, ...) are already set, so the arguments of torchrun are ignored.
"""

from __future__ import annotations

import os
import sys


def main(argv: list[str]) -> None:
    os.execv(sys.executable, [sys.executable, "-m", "paceline.workloads.worker", argv[-1]])


if __name__ == "__main__":
    main(sys.argv)
