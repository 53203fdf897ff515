"""Python code with the observer of scripts, where torch has been imported before: `observed CODE ARGUMENTS`.

A process that imports torch itself attaches the observer then (tests/unit/workloads/script/test_observed.py).
"""

from __future__ import annotations

import atexit
import importlib
import sys
from pathlib import Path

from paceline.training import attachment

if __name__ == "__main__":
    sys.path.insert(0, str(Path(attachment.__file__).parent))
    importlib.import_module("paceline_observer").attach()
    code, sys.argv = sys.argv[1], ["-c", *sys.argv[2:]]
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    finally:
        # The nursery ends its programs at once.
        atexit._run_exitfuncs()
