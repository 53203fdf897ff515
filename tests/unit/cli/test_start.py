"""`paceline start`: three questions, as options or from a terminal, become one command."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import yaml

from paceline import cli
from paceline.cli import INTERRUPTED, OK, WRONG_REQUEST, start
from paceline.experiment import reading


def asked(monkeypatch: pytest.MonkeyPatch, answers: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(answers))


def command_in(text: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith("$ paceline ")]
    return line.removeprefix("$ paceline ")


@pytest.mark.parametrize(
    ("have", "want", "time", "command"),
    [
        ("here", "fastest", "5m", "run quick --time-budget 5m"),
        ("here", "2", "2h", "run scaling --time-budget 2h"),
        ("here", "network", "10 m", "run fabric --set timeout_s=600"),
        (
            "slurm 2x8",
            "finetune",
            "1h",
            "run finetune --launcher slurm --set device=cuda --set nodes=2 --set processes=8 --time-budget 1h",
        ),
        (
            "ssh a,b 4",
            "settings",
            "5m",
            'run diagnose-quick --launcher \'ssh:hosts=["a","b"]\' --set device=cuda --set nodes=2 --set processes=4 '
            "--time-budget 5m",
        ),
        (
            "http://gpu1:8000/v1",
            "speed",
            "10m",
            "run inference --set engine.url=http://gpu1:8000/v1 --set repeats=1 --set timeout_s=150",
        ),
        ("HTTPS://gpu1", "limit", "2h", "run inference-search --set engine.url=HTTPS://gpu1 --set timeout_s=7200"),
    ],
)
def test_options_give_the_command(
    have: str, want: str, time: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["start", "--have", have, "--want", want, "--time", time, "--dry-run"]) == OK
    assert command_in(capsys.readouterr().out) == command


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--have", "slurm", "--have: got 'slurm', expected here, `slurm NODESxGPUS`"),
        ("--have", "heer", "Did you mean 'here'?"),
        ("--want", "fastets", "--want: got 'fastets', expected fastest, scaling"),
        ("--want", "9", "--want: got '9'"),
        ("--time", "soon", "--time: got 'soon', expected a time such as 90s, 10m, 2h or 3d."),
    ],
)
def test_a_wrong_option_is_one_sentence(
    option: str, value: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"--have": "here", "--want": "fastest", "--time": "5m"} | {option: value}
    assert cli.main(["start", "--dry-run", *(word for pair in given.items() for word in pair)]) == WRONG_REQUEST
    assert sentence in capsys.readouterr().err


def test_wrong_answers_are_asked_again_and_enter_takes_the_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked(monkeypatch, "\nfastest?\n\nsoon\n5m\n")
    assert cli.main(["start", "--dry-run"]) == OK
    text = capsys.readouterr().out
    assert text.count("2. What do you want to know?") == 2
    assert text.count("3. How long may it take?") == 2
    assert "got 'soon', expected a time" in text
    assert command_in(text) == "run quick --time-budget 5m"


def test_the_end_of_input_starts_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked(monkeypatch, "here\n")
    assert cli.main(["start"]) == WRONG_REQUEST
    assert capsys.readouterr().out.endswith("Give the answers as --have, --want and --time.\n")


def test_ctrl_c_at_a_question_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    assert cli.main(["start"]) == INTERRUPTED
    shown = capsys.readouterr()
    assert shown.out.endswith("Nothing was started.\n")
    assert shown.err == ""


def test_the_command_is_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The preset of the question is a real experiment; here a small one, so that its plan is refused at once."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({"name": "own", "base": {"stratgy": "ddp"}}))
    monkeypatch.setitem(start.TRAINING, "fastest", start.Question("x", "own.yaml"))
    assert cli.main(["start", "--have", "here", "--want", "fastest", "--time", "5m"]) == WRONG_REQUEST
    assert "Did you mean 'strategy'?" in capsys.readouterr().err


def test_every_question_has_its_presets() -> None:
    questions = (*start.TRAINING.values(), *start.SERVING.values())
    named = {name for question in questions for name in (question.preset, question.quick) if name}
    assert named <= set(reading.presets())
