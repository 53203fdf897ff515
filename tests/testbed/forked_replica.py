"""The front of a replica of our own, whose model processes are forked where transformers has been imported."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ |= {"NURSERY_PYTHON": sys.executable, "NURSERY_KIND": "tuned-1"}
    sys.executable = str(Path(__file__).with_name("python.sh"))
    runpy.run_module("paceline.serving.replica", run_name="__main__", alter_sys=True)
