"""One small campaign packed, carried off and run again: the work is proved equal to the stored one, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def quick_launcher(folder: Path) -> dict[str, str]:
    """Forked ranks in the place of torchrun, as an installed package could put a launcher there."""
    info = folder / "quick-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: quick\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[paceline.launchers]\nlocal = testbed.forked\n")
    return {"PYTHONPATH": str(folder)}


def test_a_capsule_of_a_real_run_replays(
    campaign: Callable[..., Any], paceline: Callable[..., Any], smaller: dict[str, Any], tmp_path: Path
) -> None:
    # A replay refuses a capsule that names a module, such as the launcher of most tests: here that has a name.
    env = quick_launcher(tmp_path / "installed")
    first = campaign("packed", {"strategy": ["single"]}, env, **smaller | {"processes": 1, "launcher": "local"})
    assert first.code == 0, first.stdout + first.stderr
    packed = paceline("capsule", str(first.directory), str(tmp_path / "runs.tar.gz"))
    assert packed.returncode == 0, packed.stderr

    done = paceline("replay", str(tmp_path / "runs.tar.gz"), "--out", str(tmp_path / "again"), env=env)
    (cell,) = json.loads((tmp_path / "again" / "replay.json").read_text())["cells"]
    assert cell["certificate"]["reference"] == first.record(None).spec.run_id
    assert all(check["ok"] for check in cell["certificate"]["checks"])
    # The same arithmetic on the same machine: not one bit of any loss differs.
    assert cell["trajectory"] == {"steps": 3, "equal_steps": 3, "largest_ratio": 0.0}
    assert cell["differences"] == {}
    assert {m["metric"] for m in cell["metrics"]} == {"tokens_per_s", "step_time_s", "peak_memory_bytes"}
    # Whether the times agree depends on who else uses the machine; that the exit code tells it does not.
    assert done.returncode == (0 if cell["verdict"] == "reproduced" else 1), done.stderr
    assert f"{int(cell['verdict'] == 'reproduced')} of 1 cells within their 95 % intervals" in done.stdout

    refused = paceline("replay", str(tmp_path / "runs.tar.gz"), "--out", str(first.out))
    assert refused.returncode == 2
    assert "the original runs of this capsule" in refused.stderr
