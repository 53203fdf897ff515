"""The front of a replica of our own, whose model processes are forked where transformers has been imported."""

from __future__ import annotations

import os
import runpy

from testbed.nursery import fork_programs

if __name__ == "__main__":
    os.environ["NURSERY_KIND"] = "tuned-1"
    fork_programs()
    runpy.run_module("paceline.serving.replica", run_name="__main__", alter_sys=True)
