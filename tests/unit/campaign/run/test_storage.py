"""Disks that are full, read-only or gone: one sentence, exit code 2, nothing half-sealed, finished runs are kept."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.results import store
from paceline.results.records import Status

Make = Callable[..., Any]
# Sealed without a launch: one process too many for the strategy.
EXPERIMENT = """
name: many
base: {model: tiny, strategy: single, processes: 2, device: cpu, steps: 2, sequence_length: 32}
repeats: 20
"""
# Two processes and their reference: each is launched, and fails as its launcher says.
LAUNCHED = "name: many\nbase: {model: tiny, strategy: ddp, processes: 1, device: cpu, steps: 2, sequence_length: 32}\n"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of a few pages."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if _mount("-t", "tmpfs", "-o", "size=64k", "none", str(folder)):
        pytest.skip("this container allows no mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)


def _mount(*arguments: str) -> int:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def call(out: Path, experiment: str = EXPERIMENT) -> tuple[int, str]:
        path = tmp_path / "many.yaml"
        path.write_text(experiment)
        code = cli.main(["run", str(path), "--out", str(out), "--format", "json"])
        return code, capsys.readouterr().err

    return call


def require_sentence(said: str, *words: str) -> None:
    (line,) = [line for line in said.splitlines() if line.startswith("paceline: ")]
    assert said.endswith(f"{line}\n")
    for word in words:
        assert word in line


def sealed(out: Path) -> dict[Path, int]:
    """The sealed runs, each of which must be whole, and when they were sealed."""
    found = [path for path in store.run_dirs(out) if store.is_sealed(path)]
    assert all(store.read_run(path).status is Status.UNSUPPORTED for path in found)
    return {path: (path / "status.json").stat().st_mtime_ns for path in found}


def test_a_disk_that_fills_up_keeps_what_is_finished(disk: Path, run: Make) -> None:
    code, said = run(disk / "results")
    assert code == 2
    require_sentence(said, "No space left on device", "Finished runs are kept", "repeat the command")
    before = sealed(disk / "results")
    assert 0 < len(before) < 20
    assert not list(disk.rglob("*.tmp"))
    assert _mount("-o", "remount,size=4m", str(disk)) == 0
    code, said = run(disk / "results")
    assert code == 1
    assert said == ""
    after = sealed(disk / "results")
    assert len(after) == 20
    assert before.items() <= after.items()


def test_a_disk_that_becomes_read_only_leaves_no_seal(
    disk: Path, run: Make, launcher: Make, make_outcome: Make
) -> None:
    def leave(run_dir: Path) -> None:
        store.write_outcome(run_dir, make_outcome(0, Status.FAILED, "x"))
        # A disk whose files are open for writing does not become read-only by itself.
        assert _mount("--bind", str(run_dir), str(run_dir)) == 0
        assert _mount("-o", "remount,ro,bind", str(run_dir)) == 0

    launcher(leave)
    try:
        code, said = run(disk / "results", LAUNCHED)
        assert code == 2
        require_sentence(said, "Read-only file system", "Make it writable")
        assert not sealed(disk / "results")
    finally:
        for run_dir in store.run_dirs(disk):
            subprocess.run(["umount", "-l", str(run_dir)], capture_output=True, check=False)


def test_a_directory_that_is_read_only_is_refused_before_anything_runs(disk: Path, run: Make) -> None:
    assert _mount("-o", "remount,ro", str(disk)) == 0
    code, said = run(disk / "results")
    assert code == 2
    require_sentence(said, "--out", "Read-only file system")


def test_a_mount_that_vanishes_leaves_nothing_in_its_place(
    disk: Path, run: Make, launcher: Make, make_outcome: Make
) -> None:
    """What is below the mount is another disk: a seal there would be one of a run without files."""

    def leave(run_dir: Path) -> None:
        store.write_outcome(run_dir, make_outcome(0, Status.FAILED, "x"))
        subprocess.run(["umount", "-l", str(disk)], check=True)

    launcher(leave)
    code, said = run(disk / "results", LAUNCHED)
    assert code == 2
    require_sentence(said, "No such file or directory", "disk is mounted")
    assert not list(disk.rglob("status.json"))


@pytest.mark.parametrize("code", [errno.EDQUOT, errno.EIO, errno.ESTALE])
def test_any_failure_of_the_disk_while_sealing_is_a_sentence(
    tmp_path: Path, run: Make, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A quota, a broken disk, a file server that was replaced. The third run cannot be sealed."""
    synced, fsync = [], os.fsync

    def fail(handle: int) -> None:
        synced.append(handle)
        if len(synced) > 10:
            raise OSError(code, os.strerror(code))
        fsync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        exit_code, said = run(tmp_path / "results")
    assert exit_code == 2
    require_sentence(said, os.strerror(code))
    assert len(sealed(tmp_path / "results")) == 2
    assert run(tmp_path / "results")[0] == 1
    assert len(sealed(tmp_path / "results")) == 20
