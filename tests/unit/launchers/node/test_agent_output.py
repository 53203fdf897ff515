"""Lines of many ranks and of the agent itself come out whole, whoever writes them and however."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from paceline.launchers.node import log_transport
from paceline.launchers.node.agent import LONGEST_PIECE, Output


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def spoken(out: Path, *pieces: bytes, voice_lines: int = 0) -> list[bytes]:
    """What comes out when pieces go through a pipe while the agent speaks too."""
    kept: dict[str, bytes] = {}
    with out.open("wb") as file:
        output = Output(file.fileno(), kept.__setitem__)
        read, write = os.pipe()
        output.pass_on(read)
        agent = threading.Thread(target=lambda: output.write_lines(f"agent {n}" for n in range(voice_lines)))
        agent.start()
        for piece in pieces:
            os.write(write, piece)
        os.close(write)
        agent.join()
        output.finish(30.0)
    for name, data in kept.items():
        (out.parent / name).write_bytes(data)
    return out.read_bytes().split(b"\n")[:-1]


def test_partial_lines_of_ranks_never_tear_those_of_the_agent(out: Path) -> None:
    pieces = [b"ra", b"nk\nrank", b"\n"] * 500
    lines = spoken(out, *pieces, voice_lines=500)
    assert sorted(set(lines)) == sorted({b"rank", *(f"agent {n}".encode() for n in range(500))})
    assert lines.count(b"rank") == 1000


def test_a_line_without_an_end_is_said_in_pieces_and_the_rest_at_last(out: Path) -> None:
    long = b"x" * (LONGEST_PIECE + 1)
    lines = spoken(out, long, b"end")
    assert b"".join(lines) == long + b"end"


def test_a_rank_cannot_speak_as_the_agent(out: Path) -> None:
    assert spoken(out, b"@paceline/1 0 7 end 0\n") == [b" @paceline/1 0 7 end 0"]


def test_a_file_that_a_rank_hands_over_is_kept_and_not_said(out: Path) -> None:
    line = log_transport.file_line("outcome-3.json", b"{}").encode()
    assert spoken(out, b"before\n" + line + b"\nafter\n") == [b"before", b"after"]
    assert (out.parent / "outcome-3.json").read_bytes() == b"{}"


@pytest.mark.parametrize("change", [lambda t: t[:-6], lambda t: t.replace("outcome-3", "../evil"), lambda t: t + " x"])
def test_a_torn_or_hostile_file_stays_a_line(out: Path, change: object) -> None:
    line = change(log_transport.file_line("outcome-3.json", b"{}")).encode()  # type: ignore[operator]
    assert spoken(out, line + b"\n") == [line]


def test_a_reader_that_is_gone_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    Output(write).write_lines(["nobody", "listens"])
    os.close(write)


def test_a_reader_that_hangs_holds_up_only_for_so_long() -> None:
    code = (
        "import os, sys; from paceline.launchers.node import agent; agent.READER_S = 1\n"
        "agent.Output(sys.stdout.fileno()).write_last('x' * 1000 for _ in range(1000))"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert child.wait(60) == -14, "ended by its alarm"
    finally:
        child.kill()
        child.communicate()
