"""Logs of pods that break, rotate and go on too long: what was sent comes home once, and nothing after the end."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from testbed.known_cluster import KnownCluster, parcel_of

from paceline.launchers.kubernetes.client import Unavailable
from paceline.launchers.kubernetes.run import Logs


@pytest.fixture
def cluster() -> KnownCluster:
    return KnownCluster()


def broken(text: bytes, at: int) -> list[bytes]:
    """The beginning of a log, in pieces that end anywhere, until the connection breaks."""
    return [text[begin : begin + 7] for begin in range(0, at, 7)]


def test_a_stream_that_breaks_is_read_again_and_nothing_is_written_twice(cluster: KnownCluster, tmp_path: Path) -> None:
    text = parcel_of(tmp_path / "n0", 0)
    home = tmp_path / "home"
    home.mkdir()
    logs = Logs(cluster, home)
    cluster.logs["p"] = [broken(text, len(text) // 2), broken(text, 20), [text]]
    for _ in range(3):
        logs.read("p", follow=True)
    assert logs.receiver.missing(1) is None
    assert (home / "samples-0.jsonl").read_text() == "{}\n" * 100
    assert (home / "log.txt").read_text() == "a line of its own\n"


@pytest.mark.parametrize("node_size", [100, 30_000])
def test_a_stream_may_break_anywhere_and_the_run_is_whole(
    cluster: KnownCluster, tmp_path: Path, node_size: int
) -> None:
    """Within every line once: a part, a piece of the whole, the last piece, a line of a rank."""
    text = parcel_of(tmp_path / "n0", 0, random.Random(1).randbytes(node_size))
    ends = [at for at, byte in enumerate(text) if byte == ord("\n")]
    for end in ends:
        home = tmp_path / f"home-{end}"
        home.mkdir()
        logs = Logs(cluster, home)
        cluster.logs["p"] = [broken(text, end - 2), [text]]
        logs.read("p", follow=True)
        logs.read("p", follow=False)
        assert logs.receiver.missing(1) is None, text[:end].splitlines()[-1][:60]
        assert logs.receiver.arrivals[0].gaps == 0
        assert (home / "samples-0.jsonl").read_text() == "{}\n" * 100
        assert (home / "log.txt").read_text() == "a line of its own\n"


def test_a_log_that_breaks_after_the_end_of_its_pod_is_not_all(cluster: KnownCluster, tmp_path: Path) -> None:
    text = parcel_of(tmp_path / "n0", 0)

    def breaking(*_: Any, **__: Any) -> Iterator[bytes]:
        yield text[: len(text) // 2]
        raise Unavailable("the log of pod p broke off")

    logs = Logs(cluster, tmp_path)
    cluster.log = breaking  # type: ignore[method-assign]
    assert logs._read_once("p") is False
    del cluster.log
    cluster.logs["p"] = [[text]]
    assert logs._read_once("p") is True
    assert logs.receiver.missing(1) is None


def test_a_log_that_was_stopped_writes_no_more(cluster: KnownCluster, tmp_path: Path) -> None:
    """A thread that waits for its next chunk when the folder passes to the next attempt."""
    text, going, more = parcel_of(tmp_path / "n0", 0), threading.Event(), threading.Event()
    home = tmp_path / "home"
    home.mkdir()

    def slow(*_: Any, **__: Any) -> Iterator[bytes]:
        yield b"first\n"
        going.set()
        more.wait(60)
        yield text

    cluster.log = slow  # type: ignore[method-assign]
    logs = Logs(cluster, home)
    reading = threading.Thread(target=logs.read, args=("p", True))
    reading.start()
    assert going.wait(60)
    logs.stop()
    more.set()
    reading.join(60)
    assert {path.name: path.read_text() for path in home.iterdir()} == {"log.txt": "first\n"}


def test_a_rotated_log_is_known_and_its_end_is_enough(cluster: KnownCluster, tmp_path: Path, golden: object) -> None:
    text = parcel_of(tmp_path / "n0", 0)
    home = tmp_path / "home"
    home.mkdir()
    logs = Logs(cluster, home)
    cluster.logs["p"] = [[text[: text.index(b" whole ") - 20]]]
    logs.read("p", follow=False)
    assert str(logs.receiver.missing(1)) == golden
    cluster.logs["p"] = [[text[text.index(b" part ") + 10 :]]]
    logs = Logs(cluster, home)
    logs.read("p", follow=False)
    assert logs.receiver.arrivals[0].gaps == 1
    assert logs.receiver.missing(1) is None, "all files came once more after the end"
