"""The command line as a shell uses it: no verb, `python -m`, and readers that leave early."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paceline import cli
from paceline.cli import command, overview


def test_without_a_verb_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Usage: paceline VERB [options]")
    assert [*overview.VERBS["Run experiments"]][:2] == ["start", "run"]
    verbs = {name for names in overview.VERBS.values() for name in names}
    listed = {line.split()[0] for line in text.splitlines() if line.startswith("  ") and line[2].isalpha()}
    assert listed == verbs


def test_every_verb_is_listed_and_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """Every verb of the parser is in one group with its summary, and every option of every verb has a help text."""
    root = command.parser()
    verbs = next(action for action in root._actions if action.choices)
    listed = {name: entry for group in overview.VERBS.values() for name, entry in group.items()}
    assert {name: each.summary for name, each in verbs.choices.items()} == {n: text for n, (_, text) in listed.items()}  # type: ignore[union-attr]
    for name, (module, _) in listed.items():
        alone = next(action.choices for action in command.parser(name)._actions if action.choices)
        assert name in alone, f"{name} is not in {module}"  # type: ignore[operator]
    silent = []
    for parser in verbs.choices.values():  # type: ignore[union-attr]
        inner = next((action.choices for action in parser._actions if isinstance(action.choices, dict)), None)
        for each in inner.values() if inner else (parser,):
            silent += [f"{each.prog} {action.dest}" for action in each._actions if not action.help]
    assert not silent


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["rnu", "quick"], "verb: got 'rnu', expected start, run, "),
        (["rnu", "quick"], "Did you mean 'run'? See `paceline --help`."),
        (["schedule", "ad"], "action: got 'ad', expected add, list, show, next, remove, run. Did you mean 'add'?"),
        (["run", "quick", "--laucher", "slurm"], "run: got the unknown option '--laucher'. Did you mean '--launcher'?"),
        (["run", "quick", "--pirce=3"], "Did you mean '--price'? See `paceline run --help`."),
        (["cluster", "check", "--jsn"], "cluster check: got the unknown option '--jsn'. Did you mean '--json'?"),
        (["plan", "quick", "slow"], "plan: got the unknown argument 'slow'. See `paceline plan --help`."),
        (["compare", "a", "b", "--format", "md"], "--format: got 'md', expected terminal, html, markdown, json."),
        (["monitor", "--count", "two"], "--count: got 'two', expected a whole number. See `paceline monitor --help`."),
        (["run"], "run: got no PRESET|FILE, which is required."),
        (["choose"], "choose: got no --gpu, --gpus, which are required."),
        (["run", "quick", "--set"], "--set: got no value, expected one argument."),
    ],
)
def test_wrong_verbs_and_options_get_a_suggestion(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["list", "models"], ["plan", "quick"], ["--help"], []])
def test_a_reader_that_leaves_at_once_is_no_error(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "paceline", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert (child.stderr.read(), child.wait()) == ("", 0)
