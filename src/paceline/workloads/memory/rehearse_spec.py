"""Rehearse the memory of one training run: its spec as JSON on stdin, bytes by component as JSON on stdout.

Used as `python -m paceline.workloads.memory.rehearse_spec MAJOR`, by callers that do not import torch and may end it
when its time is up. MAJOR: first number of the GPU's compute capability, 0 for a CPU.
"""

from __future__ import annotations

import json
import os
import sys

from paceline.errors import UnsupportedError
from paceline.experiment.spec import RunSpec
from paceline.workloads import memory


def main() -> None:
    major, spec = int(sys.argv[1]), RunSpec.from_dict(json.load(sys.stdin))
    # Libraries print while they are imported; only the answer is for the caller.
    answer_to = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    memory.begin_rehearsals()
    from paceline.workloads.memory.rehearsal import Question, rehearse

    workspace = memory.gpu_workspace_bytes(major) if major else 0
    try:
        answer = rehearse(Question(spec, workspace))
    except UnsupportedError as reason:
        raise SystemExit(str(reason)) from None
    json.dump(answer.components, answer_to)
    answer_to.close()


if __name__ == "__main__":
    main()
