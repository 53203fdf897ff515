"""`paceline measure` is `paceline run` of a file that it writes."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import yaml

from paceline.cli import command, scripts


def test_measure_hands_over_every_option_that_run_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[argparse.Namespace] = []

    def note(arguments: argparse.Namespace) -> int:
        seen.append(arguments)
        return 0

    monkeypatch.setattr(scripts, "run_experiment", note)
    words = ["measure", "--out", str(tmp_path), "--repeats", "2", "-v", "--", "python", "train.py", "-v"]
    assert command.main(words) == 0
    (given,) = seen
    known = vars(command.parser("run").parse_args(["run", given.experiment]))
    assert set(known) - set(vars(given)) == {"call"}
    assert given.verbose
    document = yaml.safe_load((tmp_path / "train.yaml").read_text())
    assert document["base"]["command"] == ["python", "train.py", "-v"]
    assert document["repeats"] == 2
