"""One rank per node, instead of torchrun (`agent --runner testbed.bare`): forked from the nursery, or this process
where there is no way to the nursery, as in a container.

There is no process of torchrun, and the store of the launch is that of rank 0, which ends with it.
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
