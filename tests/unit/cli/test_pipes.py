"""The command line as a shell uses it: no verb, `python -m`, and readers that leave early."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paceline import cli


def test_without_a_verb_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert capsys.readouterr().out.startswith("usage: paceline [-h] [--version] VERB ...")


@pytest.mark.parametrize("arguments", [["list", "models"], ["plan", "quick"], ["--help"], []])
def test_a_reader_that_leaves_at_once_is_no_error(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "paceline", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert (child.stderr.read(), child.wait()) == ("", 0)
