"""`choose --measure` with real processes: interrupted, continued, and a recommendation that cites its runs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline import cli
from paceline.results import store

pytestmark = pytest.mark.slow

COMPUTE = (
    "compute:iters=5,warmup=1,budget_s=0.05,kernels=matmul+copy,dtypes=fp32,largest_matmul=64,"
    "largest_copy_bytes=4194304,tokens=32"
)
MODEL = "tiny:layers=2,hidden=32"


@pytest.fixture(scope="module")
def measured_machine(campaign: Callable[..., Any]) -> Path:
    done = campaign("compute", [{"workload": [COMPUTE]}], formats=("json",))
    assert done.code == 0, done.stdout + done.stderr
    return Path(done.out)


def question(machine: Path, out: Path) -> list[str]:
    words = ["choose", "--model", MODEL, "--gpu", "cpu", "--gpus", "2", "--global-batch", "4", "--micro-batch", "1"]
    words += ["--seq", "8", "--checkpointing", "none", "--anchor", str(machine), "--out", str(out), "--json"]
    return [*words, "--rehearse", "0", "--measure", "--launcher", "testbed.forked"]


def sealed(out: Path) -> dict[str, float]:
    return {str(path): path.stat().st_mtime for path in out.rglob("status.json")}


def heed_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.exhaustive
def test_an_interrupted_choice_continues_and_cites_its_runs(
    measured_machine: Path, tmp_path: Path, environment: Callable[..., dict[str, str]]
) -> None:
    command = [sys.executable, "-m", "paceline.cli", *question(measured_machine, tmp_path)]
    child = subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )
    until = time.monotonic() + 200
    while not sealed(tmp_path) and child.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=200)
    assert child.returncode == cli.INTERRUPTED, stderr
    assert "repeat the command to continue" in stderr
    before = sealed(tmp_path)
    assert before

    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert before.items() <= sealed(tmp_path).items()  # what was finished is not run again
    found: dict[str, Any] = json.loads(done.stdout)
    runs = {
        record.spec.run_id: record for path in tmp_path.glob("choose-*steps") for record in store.read_runs(path)[0]
    }
    first = found["rounds"][0]["measured"]
    assert len(first) >= 2
    assert all(runs[row["run"]].status == "ok" for each in found["rounds"] for row in each["measured"])
    best = found["options"][0]
    assert best["verdict"].startswith("measured: best")
    assert best["run"] in runs
    last = [row for each in found["rounds"] for row in each["measured"] if row["run"] == best["run"]]
    assert best["step_time_s"]["value"] == pytest.approx(last[-1]["step_time_s"])
    text = " ".join(found["recommendation"])
    assert f"It rests on run {best['run']}" in text
    assert "Predicted before the runs" in text
    (file,) = found["files"]
    assert yaml.safe_load(Path(file).read_text(encoding="utf-8"))["base"]["device"] == "cpu"
