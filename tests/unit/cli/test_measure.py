"""`paceline measure` is `paceline run` of a file that it writes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
import yaml

from paceline.cli import command, main, scripts


def test_measure_hands_over_every_option_that_run_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[argparse.Namespace] = []

    def note(arguments: argparse.Namespace) -> int:
        seen.append(arguments)
        return 0

    monkeypatch.setattr(scripts, "run_experiment", note)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    words = ["measure", "--out", str(tmp_path), "--repeats", "2", "-v", "--", sys.executable, "train.py", "-v"]
    assert command.main(words) == 0
    (given,) = seen
    known = vars(command.parser("run").parse_args(["run", given.experiment]))
    assert set(known) - set(vars(given)) == {"call"}
    assert given.verbose
    document = yaml.safe_load((tmp_path / "train.yaml").read_text())
    assert document["base"]["command"] == [sys.executable, "train.py", "-v"]
    assert document["repeats"] == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--steps", "0"], "--steps: got 0, expected a number from 1"),
        (["--trace", "4-5"], "step 5 may be measured"),
        (["--steps", "5"], "5 steps leave none after a warm-up of at least 5"),
        (["--name", "a/b"], "--name: got 'a/b', expected a name of letters"),
        (["--name", "_a"], "--name: got '_a', expected a name of letters"),
        (["--name", ""], "--name: got '', expected a name of letters"),
        (["--repeats", "0"], "repeats: got 0, expected a whole number from 1"),
        (["--set", "nonsense=4"], "got the field 'nonsense'"),
    ],
)
def test_what_no_run_could_do_is_refused_before_any(
    words: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(scripts, "run_experiment", lambda _: pytest.fail("it was started"))
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    command = ["--", sys.executable, "train.py"]
    assert main(["measure", *words, "--out", "new", *command]) == 2
    assert expected in capsys.readouterr().err
    assert not Path("new").exists()
    Path("old").mkdir()
    Path("old/train.yaml").write_text("name: mine\n")
    assert main(["measure", *words, "--out", "old", *command]) == 2
    assert Path("old/train.yaml").read_text() == "name: mine\n"


def test_a_command_and_its_options_must_agree_on_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", "train.py"]
    assert main(["measure", "--processes", "2", "--", *command]) == 2
    assert (
        "processes: got 2, expected 3, the number that --nproc-per-node of the command says" in capsys.readouterr().err
    )
    assert not Path("results").exists()


def test_a_plan_names_the_cells_of_a_script_by_its_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    Path("own.yaml").write_text(
        'name: own\nbase: {workload: script, command: [python, train.py, "{rate}"]}\nmatrix: {rate: [1, 2]}\n'
    )
    assert command.main(["plan", "own.yaml"]) == 0
    printed = capsys.readouterr().out
    assert "train.py, rate 1" in printed
    assert "train.py, rate 2" in printed
    assert "reference, " not in printed


@pytest.mark.parametrize(
    ("code", "said", "outcome"),
    [
        (
            0,
            "the gate could have caught 5.3 %",
            "Performance gate at 10 %: **passed**. The gate could have caught 5.3 %.",
        ),
        (1, "regression: 25 %", "Performance gate at 10 %: **failed**. Regression: 25 %."),
        (3, "", "Performance gate at 10 %: **undecided**."),
    ],
)
def test_the_comment_of_the_gate_begins_with_its_outcome(
    code: int,
    said: str,
    outcome: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def compare(_: argparse.Namespace) -> int:
        sys.stdout.write("**B is slower**\n\nA is a, B is b.\n")
        if said:
            sys.stderr.write(f"paceline: {said}\n")
        return code

    monkeypatch.setattr(scripts, "compare", compare)
    comment = tmp_path / "comment.md"
    assert main(["gate", "a", "b", "--limit", "10", "--comment", str(comment)]) == code
    assert comment.read_text() == f"{outcome}\n\n**B is slower**\n\nA is a, B is b.\n"
    printed = capsys.readouterr()
    assert printed.out == "**B is slower**\n"
    assert printed.err == (f"paceline: {said}\n" if said else "")
