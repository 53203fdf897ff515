"""Directories whose names are control sequences or markup of the terminal: names stay text in every verb that reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline import cli
from paceline.experiment.spec import RunSpec

NAME = "a\x1b]0;title\x07[/b][bold]\x9b31m"


@pytest.mark.parametrize(
    "verb", [["report", "--format", "csv"], ["history"], ["status"], ["history", "--format", "html"]]
)
def test_a_name_moves_no_cursor_and_is_no_markup(
    tmp_path: Path,
    make_spec: Callable[..., RunSpec],
    make_run: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    verb: list[str],
) -> None:
    out = tmp_path / NAME
    run = make_run(out, make_spec("ddp"))
    assert cli.main([verb[0], str(run.parent), *verb[1:]]) in (0, 1)
    assert cli.main(["show", str(run)]) in (0, 1)
    shown = "".join(capsys.readouterr())
    assert "title" in shown
    assert "[/b][bold]" in shown
    assert not {"\x1b", "\x07", "\x9b"} & set(shown)
