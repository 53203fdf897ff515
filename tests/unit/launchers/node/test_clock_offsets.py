"""Clocks are off by an interval; only what lies beyond doubt is said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.launchers.node import clock_offsets, log_transport
from paceline.launchers.node.clock_offsets import Clock


def clock(low_s: float, high_s: float, node: int = 0) -> Clock:
    return Clock(node=node, host="gpu1", low_s=low_s, high_s=high_s)


def test_what_was_said_was_said_in_between() -> None:
    """Asked at 100, heard at 103; the node said 150 meanwhile, so it is 47 to 50 s ahead."""
    assert clock_offsets.observed(0, "gpu1", node_time_s=150.0, earliest_s=100.0, latest_s=103.0) == clock(47.0, 50.0)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (clock(47.0, 50.0), "the clock of gpu1 is at least 47.0 s ahead of the controller's"),
        (clock(-9.0, -2.5), "the clock of gpu1 is at least 2.5 s behind the controller's"),
        (clock(-30.0, 0.2), None),
        (clock(0.5, 60.0), None),
        (clock(-0.1, 0.1), None),
    ],
)
def test_only_what_is_sure_is_said(found: Clock, sentence: str | None) -> None:
    assert clock_offsets.warning(found) == sentence


def test_what_is_known_grows(tmp_path: Path) -> None:
    assert clock_offsets.read(tmp_path) == []
    clock_offsets.note(tmp_path, [clock(-10.0, 5.0), clock(1.0, 2.0, node=1)])
    clock_offsets.note(tmp_path, [clock(-3.0, 60.0)])
    assert clock_offsets.read(tmp_path) == [clock(-3.0, 5.0), clock(1.0, 2.0, node=1)]
    clock_offsets.note(tmp_path, [clock(7.0, 8.0)])
    assert clock_offsets.read(tmp_path)[0] == clock(7.0, 8.0), "it was set in between"


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"node": 0}]', "nonsense"])
def test_a_foreign_file_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / clock_offsets.FILE).write_text(text)
    assert clock_offsets.read(tmp_path) == []


def test_a_hello_bounds_the_clock_of_its_node(tmp_path: Path) -> None:
    """The spec was written 60 s ago; a node that says a time before that is behind, at least by the difference."""
    spec = tmp_path / "spec.json"
    spec.write_text("{}")
    written_s = spec.stat().st_mtime - 60.0
    os.utime(spec, (written_s, written_s))
    receiver = log_transport.Receiver(tmp_path)
    receiver.feed(log_transport.Sender(None, 3).hello({"host": "gpu1", "wall_s": written_s - 100.0}))
    (found,) = clock_offsets.read(tmp_path)
    assert found.node == 3
    assert found.high_s == pytest.approx(-100.0)
    assert found.low_s <= -160.0
