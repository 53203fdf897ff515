"""In the place of torchrun under an agent of Ray: this process becomes the one rank that its actor is for.

The rank's own variables (RANK, LOCAL_RANK, MASTER_ADDR, ...) are there already; what torchrun would be told is not
needed.
"""

from __future__ import annotations

import os
import sys


def main(argv: list[str]) -> None:
    os.execv(sys.executable, [sys.executable, "-m", "paceline.workloads.worker", argv[-1]])


if __name__ == "__main__":
    main(sys.argv)
