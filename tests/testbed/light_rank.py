"""One rank without torch, for launchers that start every rank themselves (`python -m testbed.light_rank RUN_DIR`).

With `paceline ARGUMENTS` instead, it is the command line, whose launcher `here` then starts such ranks.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path

from paceline.host.processes import end_with_parent
from paceline.results import store
from testbed import light


def main(argv: list[str]) -> int:
    if argv[1] == "paceline":
        # Only here: a rank has no need of them.
        from paceline import cli
        from paceline.launchers.here import processes_of_job, ranks
        from paceline.workloads import reference

        ranks.WORKER = "testbed.light_rank"
        processes_of_job.PATIENCE_S = float(os.environ.get("LIGHT_PATIENCE_S", "60"))
        reference.check = lambda spec: None
        return cli.main(argv[2:])
    end_with_parent()
    run_dir, rank = Path(argv[1]), int(os.environ["RANK"])
    with (run_dir / f"stack-{rank}.txt").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        return light.live(store.read_spec(run_dir), run_dir, rank)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
