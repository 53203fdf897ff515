"""A runner in place of torchrun for one rank per node (`agent --runner testbed.bare`).

The rank is forked by the fork server (see `nursery`), or is this process if the server cannot be reached, as in a
container. The store of the launch is that of rank 0 and ends with it.
"""

from __future__ import annotations

import os
import sys

from paceline.launchers.node import placement, torchrun
from testbed import nursery


def main(argv: list[str]) -> int:
    known, rest = torchrun.parser().parse_known_args(argv[1:])
    place = placement.here(os.environ)
    os.environ |= torchrun.store_variables(known.master_addr, known.master_port, known.store_fd)
    os.environ |= {"RANK": str(place.node), "WORLD_SIZE": str(place.nodes), "LOCAL_RANK": "0"}
    if "NURSERY" in os.environ:
        return nursery.started("paceline.workloads.worker", rest[-1:])
    from paceline.workloads import worker

    return worker.main(["paceline.workloads.worker", rest[-1]])


if __name__ == "__main__":
    sys.exit(main(sys.argv))
