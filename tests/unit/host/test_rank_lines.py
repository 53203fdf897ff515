"""Lines of several ranks in one log."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from paceline.host import rank_lines
from paceline.host.rank_lines import LineSplitter, RankStream, marked_output, split_rank


def test_every_line_begins_with_its_rank_however_it_was_written() -> None:
    beneath = io.StringIO()
    stream = RankStream(beneath, 3)
    assert stream.write("one\ntw") == 6
    stream.flush()
    assert beneath.getvalue() == "[rank 3] one\n", "a line that has not ended may still grow"
    stream.writelines(["o\n", "\n", "three"])
    stream.finish()
    assert beneath.getvalue() == "[rank 3] one\n[rank 3] two\n[rank 3] \n[rank 3] three\n"
    assert stream.getvalue() == beneath.getvalue(), "all else is that of the stream beneath"


def test_a_line_that_never_ends_is_shown_in_pieces() -> None:
    beneath = io.StringIO()
    RankStream(beneath, 0).write("x" * (rank_lines.LONGEST_PIECE + 1))
    assert beneath.getvalue().startswith("[rank 0] xx")


def test_lines_of_threads_stay_whole() -> None:
    beneath = io.StringIO()
    stream = RankStream(beneath, 0)
    threads = [threading.Thread(target=lambda n=n: [stream.write(f"{n}\n") for _ in range(200)]) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = beneath.getvalue().splitlines()
    assert sorted(set(lines)) == [f"[rank 0] {n}" for n in range(4)]
    assert len(lines) == 800


def test_output_is_marked_inside_the_block_only(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with marked_output(1):
        sys.stdout.write("out\n")
        sys.stderr.write("err without an end")
    sys.stdout.write("after\n")
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr() == ("[rank 1] out\nafter\n", "[rank 1] err without an end\n")


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("[rank 12] loss 5.1", 12),
        ("[rank2]:[W1117 19:32:20 ProcessGroupNCCL.cpp:1] late", 2),
        ("gpu-1.cluster:4711:4802 [0] NCCL INFO Connected all rings", 1),
        ("USDT:2026-11-17 19:32:20 4711:4711 SyncActivityProfilerHandler.cpp:52] profiler_start", 1),
        ("gpu1:99:100 [0] NCCL INFO of another process", None),
        ("W1117 19:32:20.1 4711 torch/distributed/run.py:766] torchrun itself", None),
        ("[rank x] no rank", None),
        (" [rank 3] quoted", None),
        ("", None),
    ],
)
def test_lines_are_attributed_by_mark_or_process(line: str, rank: int | None) -> None:
    assert split_rank(line, {4711: 1})[0] == rank


def test_a_line_of_any_length_is_cut_at_the_same_bytes_however_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_lines, "LONGEST_LINE", 4)
    text = b"one\n" + b"x" * 11 + b"\n\nlast1"
    for size in range(1, len(text)):
        splitter = LineSplitter()
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        lines = [line for piece in pieces for line in splitter.add(piece)]
        assert [*lines, *splitter.last()] == [b"one", b"xxxx", b"xxxx", b"xxx", b"", b"last", b"1"]
        assert splitter.last() == []
