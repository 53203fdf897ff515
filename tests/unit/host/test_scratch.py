"""A node's own folder is gone after it, at the latest when the next one comes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.host import scratch
from paceline.host.scratch import PREFIX, own_folder, sweep

KILLED = """
import os, sys
from pathlib import Path
from paceline.host.scratch import own_folder
with own_folder(Path(sys.argv[1])) as own:
    (own / "samples-0.jsonl").write_text("left")
    os.kill(os.getpid(), 9)
"""


def test_gone_afterwards_however_it_ends(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), own_folder(tmp_path) as own:
        (own / "file").write_text(str(1 / 0))
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_node_left_is_removed_by_the_next(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    (left,) = tmp_path.iterdir()
    with own_folder(tmp_path) as own:
        assert not left.exists()
        assert own.exists()


def test_files_in_use_or_of_others_are_kept(tmp_path: Path) -> None:
    stranger = tmp_path / f"{PREFIX}stranger"
    stranger.mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(stranger)
    with own_folder(tmp_path) as own:
        sweep(tmp_path)
        assert own.exists()
    assert {path.name for path in tmp_path.iterdir()} == {f"{PREFIX}stranger", f"{PREFIX}link"}


def test_a_folder_that_is_not_locked_yet_is_not_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = scratch.fcntl.flock

    def meanwhile(file: object, how: int) -> None:
        monkeypatch.setattr(scratch.fcntl, "flock", lock)
        sweep(tmp_path)
        lock(file, how)  # type: ignore[arg-type]

    monkeypatch.setattr(scratch.fcntl, "flock", meanwhile)
    with own_folder(tmp_path) as own:
        assert own.exists()
        assert own.name.startswith(PREFIX), "a later sweep finds it"
