"""The front of one of our own replicas; its model processes are forked from one that has imported transformers."""

from __future__ import annotations

import os
import runpy

from testbed.nursery import fork_programs

if __name__ == "__main__":
    os.environ["NURSERY_KIND"] = "tuned-1"
    fork_programs()
    runpy.run_module("paceline.serving.replica", run_name="__main__", alter_sys=True)
