"""Files are replaced as a whole, and links that somebody planted in their place are not followed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.errors import RequestError
from paceline.host import files
from paceline.results import store
from paceline.training.strategies import zero


def test_a_planted_link_is_replaced_and_its_target_kept(tmp_path: Path) -> None:
    """Under the name of the file, and under that of the temporary file before it."""
    victim, page = tmp_path / "victim", tmp_path / "report.html"
    victim.write_text("keep")
    for name in ("report.html", f".report.html.{os.getpid()}.tmp"):
        (tmp_path / name).symlink_to(victim)
    files.write_atomically(page, "page")
    assert (page.read_text(), page.is_symlink(), victim.read_text()) == ("page", False, "keep")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "victim"]


def test_a_lock_that_is_a_link_empties_no_file(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("keep")
    (tmp_path / ".lock").symlink_to(tmp_path / "victim")
    with store.exclusive(tmp_path):
        assert (tmp_path / "victim").read_text() == "keep"


def test_a_document_larger_than_any_of_ours_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text("{}")
    assert files.document_of(path) == b"{}"
    os.truncate(path, files.LARGEST_DOCUMENT_BYTES + 1)
    with pytest.raises(OSError, match="larger than 32 MiB"):
        files.document_of(path)


def test_a_device_or_a_pipe_is_no_document(tmp_path: Path) -> None:
    """An experiment names the file of `zero:config`; `paceline import` reads tables of others."""
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/zero"), tmp_path / "pipe"):
        with pytest.raises(OSError, match="not a regular file"):
            files.document_of(path)
        with pytest.raises(RequestError, match=r"zero\.config: got .*not a regular file"):
            zero.inline({"config": str(path)})


def test_a_long_log_is_read_at_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks may print gigabytes: the controller reads why a run failed without the memory for it."""
    monkeypatch.setattr(files, "LOG_BEGIN_BYTES", 4)
    monkeypatch.setattr(files, "LOG_END_BYTES", 3)
    path = tmp_path / "log.txt"
    assert files.log_text(path) == ""
    for text, expected in (("1234567", "1234567"), ("12345678", "1234\n678"), ("12", "12")):
        path.write_text(text)
        assert files.log_text(path) == expected
