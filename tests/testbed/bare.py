"""One rank per node in this process, instead of torchrun (`agent --runner testbed.bare`).

Without torchrun's own process torch is imported once a node instead of twice, and the store of the launch is that of
rank 0, which ends with it.
"""

from __future__ import annotations

import os
import sys

from paceline.launchers.node import placement, torchrun
from paceline.workloads import worker


def main(argv: list[str]) -> int:
    known, rest = torchrun.parser().parse_known_args(argv[1:])
    place = placement.here(os.environ)
    os.environ |= torchrun.store_variables(known.master_addr, known.master_port, known.store_fd)
    os.environ |= {"RANK": str(place.node), "WORLD_SIZE": str(place.nodes), "LOCAL_RANK": "0"}
    return worker.main(["paceline.workloads.worker", rest[-1]])


if __name__ == "__main__":
    sys.exit(main(sys.argv))
