"""Some inputs of each kind, each time the same, ten times as many in `make test-all`; more by hand: see `fuzz.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from testbed import EXHAUSTIVE

COUNTS = {"experiments": 40, "runs": 20, "streams": 120, "live": 20}
if EXHAUSTIVE:
    COUNTS = {target: 20 * count for target, count in COUNTS.items()}


@pytest.mark.parametrize("target", COUNTS)
def test_nothing_ends_in_a_traceback(target: str, environment: Callable[..., dict[str, str]]) -> None:
    command = [sys.executable, str(Path(__file__).with_name("fuzz.py")), target, str(COUNTS[target])]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert summary["inputs"] == COUNTS[target]
    assert summary["failures"] == 0
    # Inputs that are all refused at the door would show nothing.
    assert len(summary["outcomes"]) > 1
