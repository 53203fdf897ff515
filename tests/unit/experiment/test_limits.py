"""Files that would take hours or all memory if they were believed are refused before any work is done for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from paceline.cli import main
from paceline.errors import RequestError
from paceline.experiment import plugins
from paceline.experiment.reading import MOST_FILE_BYTES, parse_yaml

BASE = "name: x\nbase: {model: tiny, strategy: ddp, steps: 2, device: cpu}\n"
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
)


def refusal(text: str, folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """The sentence with which `paceline plan` refuses this file."""
    path = folder / "stranger.yaml"
    path.write_text(text)
    assert main(["plan", str(path), "--out", str(folder / "out"), *more]) == 2
    sentence = capsys.readouterr().err
    assert sentence.startswith("paceline: ")
    assert len(sentence) < 1000
    return sentence


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{BASE}repeats: 1000000000\n", "repeats: got 1000000000 runs, expected at most 10,000"),
        (f"{BASE}repeats: {10**300}\n", "repeats: got"),
        (f"{BASE}matrix: {{seed: {list(range(200))}, steps: {list(range(1, 200))}}}\n", "matrix: got 39800 runs"),
        (
            f"{BASE}design: {{kind: factorial, factors: {{micro_batch: {list(range(1, 200))}, "
            f"sequence_length: {list(range(8, 208))}}}}}\n",
            "design.factors: got 39800 runs",
        ),
        (BASE.replace("steps: 2", "steps: 2, nodes: 1000000000"), "nodes: got 1000000000, expected at most 100,000"),
        (BASE.replace("steps: 2", "steps: 2, processes: 1000000000"), "processes: got 1000000000"),
        (BASE.replace("steps: 2", f"steps: {10**30}"), "expected a whole number up to 1,000,000,000"),
        (BASE.replace("steps: 2", f"steps: 2, micro_batch: {10**26}"), "expected at most 1,000,000,000,000 tokens"),
        (BASE.replace("steps: 2", f"steps: 2, seed: {10**26}"), "seed: got"),
        (BASE.replace("steps: 2", "steps: 2, nodes: 1000, processes: 1000"), "nodes x processes: got 1000000"),
        (f"{LAUGHS}{BASE}", "more than 100,000 values"),
        (f"{BASE}matrix: &m {{seed: [*m]}}\n", "an alias that contains itself"),
        (f"{BASE}repeats: {'9' * 5000}\n", "a number of 5,000 characters"),
        # Base 60 of YAML 1.1.
        (f"{BASE}repeats: 1{':59' * 1000}\n", "a number of 3,001 characters"),
        (f"{BASE}matrix: {'[' * 5000}{']' * 5000}\n", "nested too deeply"),
        (f"{BASE}order_seed: 2001-99-99\n", "month must be in 1..12"),
        (f"{BASE}#{'x' * MOST_FILE_BYTES}\n", "got more than 1 MiB"),
        (f"{BASE}repeats: {'x' * 100_000}\n", "expected a whole number"),
        (f"{BASE}? {'x' * 100_000}\n: 1\n", "expected one of name"),
        (f"name: {'x' * 100_000}/\n", "name: got"),
    ],
)
def test_a_file_that_asks_for_too_much_is_refused(
    text: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in refusal(text, tmp_path, capsys)


def test_settings_have_the_same_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for setting in ("repeats=1000000000", f"repeats={'9' * 5000}", f"repeats={'[' * 5000}", "nodes=1000000000"):
        refusal(BASE, tmp_path, capsys, "--set", setting)


def test_aliases_of_ordinary_files_still_work() -> None:
    assert parse_yaml("a: &a {x: 1}\nb: [*a, *a]") == {"a": {"x": 1}, "b": [{"x": 1}, {"x": 1}]}
    with pytest.raises(yaml.YAMLError, match="more than 100,000"):
        parse_yaml(LAUGHS)


@pytest.mark.parametrize("kind", plugins.KINDS)
def test_a_plugin_name_longer_than_a_file_name_is_an_unknown_plugin(kind: str) -> None:
    with pytest.raises(RequestError, match="got 'aaaa"):
        plugins.load(kind, "a" * 300)


@pytest.mark.parametrize(
    "words", [["plan", "a" * 10**5], ["report", "a" * 10**5], ["plan", "quick", "--set", f"model=./{'a' * 10**5}"]]
)
def test_an_error_of_the_disk_does_not_repeat_a_giant_name(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert len(capsys.readouterr().err) < 2100


@pytest.mark.parametrize(
    "words", [("list",), ("run", "quick", "--set"), ("predict", "--gpu", "h100", "--gpus", "8", "--model")]
)
def test_an_error_repeats_the_beginning_of_a_giant_word(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    value = "b" * 3000
    assert main([*words, f"strategy={value}" if "--set" in words else value]) == 2
    sentence = capsys.readouterr().err
    assert "b" * 150 in sentence
    assert "b" * 250 not in sentence
