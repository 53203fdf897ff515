"""torchrun and its ranks, forked from the nursery (`agent --runner testbed.forked_torchrun`)."""

from __future__ import annotations

import sys

from testbed import nursery

if __name__ == "__main__":
    sys.exit(nursery.started("paceline.launchers.node.torchrun", sys.argv[1:]))
