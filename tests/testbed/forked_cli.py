"""`paceline`, whose torchrun and warm process are forked from the nursery: `python -m testbed.forked_cli ARGUMENTS`."""

from __future__ import annotations

import sys

from paceline import cli
from testbed.nursery import fork_programs

if __name__ == "__main__":
    fork_programs()
    sys.exit(cli.main())
