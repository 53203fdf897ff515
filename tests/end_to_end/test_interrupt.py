"""Ctrl-C, a killed controller and damaged folders: nothing runs on, nothing is lost, and the same command goes on."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from testbed import EXHAUSTIVE

from paceline import cli
from paceline.results import store
from paceline.results.samples import read_samples

pytestmark = pytest.mark.slow

SLOW = "faulty.trouble:how=slow"
# What is interrupted is torchrun, or the process that forks ranks.
TORCHRUN, FORKED = "local:warm=false", "local"
SMALL: dict[str, Any] = {
    "launcher": "testbed.forked",
    "processes": 1,
    "global_batch": 1,
    "steps": 20,
}
# The first attempt would go on for a minute, so that whoever is gone earlier was ended; the second one is quick.
SLOWLY, QUICKLY = {"FAULTY_SLEEP_S": "3"}, {"FAULTY_SLEEP_S": "0", **({} if EXHAUSTIVE else {"FORKED_PROGRAMS": "1"})}


def heed_interrupts() -> None:
    """A shell that starts the tests in the background has them ignore SIGINT, and every child inherits that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def started(file: Path, environment: Callable[..., dict[str, str]]) -> Iterator[subprocess.Popen[str]]:
    """`paceline run FILE`, ended by the test; killed if the test fails. Its warm process has torch from the nursery."""
    module = "paceline.cli" if EXHAUSTIVE else "testbed.forked_cli"
    command = [sys.executable, "-m", module, "run", str(file), "--out", str(file.parent), "--format", "json"]
    child = subprocess.Popen(
        command,
        env=environment(**SLOWLY),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate()


def slow_run(out: Path) -> Path | None:
    """The folder of the slow run, once its rank 0 has done two steps and flushed some of them."""
    for run_dir in store.run_dirs(out):
        if not run_dir.name.startswith("faulty"):
            continue
        moving = [p for p in store.read_progress(run_dir) if p.step >= 2]
        samples = run_dir / "samples-0.jsonl"
        if moving and samples.is_file() and samples.stat().st_size > 0:
            return run_dir
    return None


@pytest.mark.parametrize("launcher", [pytest.param(TORCHRUN, marks=pytest.mark.exhaustive), FORKED])
def test_ctrl_c_and_a_kill_leave_no_process_and_the_same_command_goes_on(
    launcher: str,
    tmp_path: Path,
    experiment_file: Callable[..., Path],
    environment: Callable[..., dict[str, str]],
    eventually: Callable[..., Any],
    living: Callable[[Path], list[str]],
    paceline: Any,
) -> None:
    """One cell to finish, and one to interrupt while it trains; the order of two cells is that of the matrix. The first
    comes with a reference on its quick launcher, which serves the second one too."""
    matrix = [{"strategy": ["ddp"]}, {"strategy": [SLOW], "launcher": [launcher]}]
    # With torchrun itself, one rank makes three processes too.
    ranks = 1 if launcher == TORCHRUN else 2
    file = experiment_file(tmp_path, "stopped", matrix, **SMALL | {"processes": ranks, "global_batch": ranks})
    with started(file, environment) as child:
        run_dir = eventually(lambda: slow_run(tmp_path), "the slow run at step 2")
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=120)
    assert child.returncode == 130, out + err
    assert len(err.strip().splitlines()) == 1
    assert "interrupted" in err
    assert living(tmp_path) == []
    assert not store.is_sealed(run_dir)
    assert list(read_samples(run_dir / "samples-0.jsonl")), "partial samples are kept"
    sealed = {
        path: (path / "status.json").stat().st_mtime_ns for path in store.run_dirs(tmp_path) if store.is_sealed(path)
    }
    assert len(sealed) == 2, "the reference and the finished cell"
    shown = paceline("show", str(run_dir))
    assert shown.returncode == 1
    assert "not finished" in shown.stdout
    assert "interrupted" in paceline("status", "--out", str(tmp_path)).stdout

    with started(file, environment) as child:
        eventually(lambda: (run_dir / "attempts" / "1").is_dir() and slow_run(tmp_path), "the next attempt at step 2")
        second = paceline("run", str(file), "--out", str(tmp_path), "--format", "json")
        assert second.returncode == 2, "two controllers must not write into one experiment"
        assert "in use by another" in second.stderr
        assert len(living(tmp_path)) >= 3, "the controller and two ranks, or torchrun and one"
        child.kill()
        child.wait()
        eventually(lambda: not living(tmp_path), "the end of all ranks")
    assert not store.is_sealed(run_dir)

    again = paceline("run", str(file), "--out", str(tmp_path), "--format", "json", env=QUICKLY)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("already measured") == 2
    assert {path: (path / "status.json").stat().st_mtime_ns for path in sealed} == sealed
    record = store.read_run(run_dir)
    assert record.status == "ok"
    assert len(record.steps) == SMALL["steps"] * ranks
    for attempt in ("1", "2"):
        assert (run_dir / "attempts" / attempt / "samples-0.jsonl").stat().st_size > 0


@pytest.fixture(scope="module")
def measured(campaign: Callable[..., Any]) -> Any:
    """Two good runs, started with a secret in the environment."""
    secrets = {"HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz012345", "WANDB_API_KEY": "0123456789abcdef" * 2 + "01234567"}
    found = campaign("kept", {"strategy": ["ddp", "fsdp2"]}, secrets, processes=1, global_batch=1)
    assert found.code == 0, found.stdout + found.stderr
    return found, secrets


def test_no_result_file_holds_a_secret(measured: Any) -> None:
    found, secrets = measured
    files = [path for path in found.out.rglob("*") if path.is_file()]
    assert len(files) > 20
    for path in files:
        raw = path.read_bytes()
        for value in secrets.values():
            assert value.encode() not in raw, path
        for shape in (b"hf_", b"WANDB_API_KEY", b"ghp_", b"sk-", b"AKIA"):
            assert shape not in raw or path.suffix == ".png", (path, shape)


def test_the_report_regenerated_from_stored_data_is_the_stored_one(measured: Any, paceline: Any) -> None:
    found, _ = measured
    files = [found.directory / name for name in ("report.md", "report.html", "metrics.csv", "cells.csv", "report.json")]
    stored = {path: path.read_bytes() for path in files}
    for path in files:
        path.unlink()
    again = paceline(
        "report", str(found.directory), *(f"--format={form}" for form in ("html", "markdown", "csv", "json"))
    )
    assert again.returncode == 0, again.stderr
    assert {path: path.read_bytes() for path in files} == stored


@pytest.mark.parametrize(
    "damage",
    [
        lambda run: (run / "spec.json").write_text("{"),
        lambda run: (run / "status.json").write_text("[]"),
        lambda run: (run / "steps.npy").write_bytes(b"\x93NUMPY"),
        lambda run: (run / "outcome-0.json").write_bytes(b"\xff\xfe\x00"),
        lambda run: (run / "spec.json").write_text(json.dumps({"schema": 99})),
    ],
    ids=["spec", "status", "sample", "outcome", "newer"],
)
def test_a_damaged_folder_is_reported_and_skipped(
    measured: Any, tmp_path: Path, damage: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verbs are called in this process: what would be a traceback there is an exception here."""
    found, _ = measured
    monkeypatch.setenv("COLUMNS", "200")
    copy = tmp_path / "kept"
    shutil.copytree(found.directory, copy)
    victim = next(path for path in copy.iterdir() if path.name.startswith("fsdp2"))
    damage(victim)
    assert cli.main(["report", str(copy), "--format", "json", "--format", "markdown"]) == 1
    shown = capsys.readouterr().out
    assert "skipped: " in shown
    assert victim.name in shown.replace("\n", "")
    report = json.loads((copy / "report.json").read_text())
    assert len(report["runs"]) == 2, "the reference and the run that is whole"
    assert victim.name in (copy / "report.md").read_text()
    for verb in ("status", "--out", str(copy)), ("compare", str(copy), str(copy)), ("show", str(victim)):
        assert cli.main(verb) in (0, 1, 2)
