"""A disk that only nodes reach: who owns which file there, and how everything is handed over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.experiment.spec import RunSpec
from paceline.launchers.node import log_transport

FILES = ("samples-2.jsonl", "samples-gauges-2.jsonl", "outcome-3.json", "stack-3.txt", "progress-2", "machine-b.json")


@pytest.fixture
def own(make_spec: Callable[..., RunSpec]) -> Callable[[str], bool]:
    return log_transport.own_files(make_spec("ddp", 2, nodes=2), 1, "b")


@pytest.mark.parametrize("name", FILES)
def test_a_node_sends_what_its_ranks_wrote(name: str, own: Callable[[str], bool]) -> None:
    assert own(name)


@pytest.mark.parametrize("name", ["samples-1.jsonl", "samples-gauges-0.jsonl", "machine-a.json", "machine-2.json"])
def test_and_nothing_of_other_nodes(name: str, own: Callable[[str], bool]) -> None:
    assert not own(name)


def test_an_earlier_attempt_is_cleared_by_each_node_for_itself(tmp_path: Path, own: Callable[[str], bool]) -> None:
    for name in ("outcome-1.json", "outcome-2.json", "checkpoint"):
        (tmp_path / name).write_text("old")
    for stale in log_transport.carried(tmp_path, own):
        stale.unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "outcome-1.json"]


def test_what_is_handed_over_comes_whole(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    here.mkdir()
    log_transport.put_spec(there, "{}")
    (there / "outcome-0.json").write_text("zero")
    (there / "outcome-1.json").write_text("one")
    receiver = log_transport.Receiver(here)
    for line in log_transport.hand_over(there, {"host": "b"}):
        assert receiver.feed(line) is None
    assert receiver.missing(1) is None
    assert sorted(path.name for path in here.iterdir()) == ["outcome-0.json", "outcome-1.json"]
