"""`paceline logs`: one run, by rank, finished, growing, restarted, interrupted; readers that leave and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.campaign.live import logs
from paceline.host import rank_lines
from paceline.results import campaign_file, store
from paceline.results.records import Status

LINES = "paceline: ranks begin\n[rank 0] loss 5.1\n[rank 1] loss 5.2\nhost:77:78 [1] NCCL INFO ring\n"


@pytest.fixture
def run_dir(make_spec: Callable[..., Any], tmp_path: Path) -> Path:
    """A run in progress, whose controller is this process."""
    spec = make_spec()
    folder = store.create(tmp_path, spec)
    campaign_file.write_plan(folder.parent, [spec])
    store.ProgressFile(folder, 1).mark(0, "forward")
    raw = (folder / "progress-1").read_bytes()
    (folder / "progress-1").write_bytes((77).to_bytes(4, sys.byteorder) + raw[4:])
    assert store.read_progress(folder)[0].pid == 77
    (folder / "log.txt").write_text(LINES)
    return folder


def seal(run_dir: Path) -> None:
    store.seal(run_dir, Status.FAILED, "it was made up", time.time(), time.time())


def collected(run_dir: Path, rank: int | None = None) -> tuple[list[str], list[str]]:
    said: list[str] = []
    return list(logs.read(run_dir, rank, follow=False, notify=said.append, has_reader=lambda: True)), said


def test_lines_have_their_rank_and_one_rank_can_be_chosen(run_dir: Path) -> None:
    everything = ["[job] paceline: ranks begin", "[rank 0] loss 5.1", "[rank 1] loss 5.2"]
    native = "[rank 1] host:77:78 [1] NCCL INFO ring"
    assert collected(run_dir)[0] == [*everything, native]
    assert collected(run_dir, 1)[0] == [everything[2], native]
    seal(run_dir)
    assert collected(run_dir, 0)[0] == [everything[1]]


def test_a_last_line_without_an_end_and_control_characters_are_shown_safely(run_dir: Path) -> None:
    (run_dir / "log.txt").write_bytes(b"[rank 0] \x1b[2J\xff half a li")
    assert collected(run_dir)[0] == ["[rank 0] \ufffd[2J\ufffd half a li"]
    (run_dir / "log.txt").unlink()
    assert collected(run_dir)[0] == [], "its job has printed nothing yet"


def test_logs_of_earlier_attempts_are_named(run_dir: Path) -> None:
    earlier = run_dir / "restarts" / "1" / "log.txt"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("lost\n")
    assert collected(run_dir)[1] == [f"the log of an earlier attempt is in {earlier}"]


def test_following_ends_with_the_run_and_loses_no_line(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run moves on each time the reader sleeps: it grows, a restart replaces its log, and it ends."""
    log = run_dir / "log.txt"

    def grow() -> Iterator[None]:
        log.write_text(LINES + "[rank 0] half ")
        yield
        log.write_text(LINES + "[rank 0] half a line\n")
        yield
        log.rename(run_dir / "old.txt")
        yield
        log.write_text("[rank 0] second attempt\n")
        yield
        with log.open("a") as file:
            file.write("[rank 1] last words")
        seal(run_dir)
        yield

    steps, said = grow(), list[str]()
    monkeypatch.setattr(time, "sleep", lambda _: next(steps))
    lines = list(logs.read(run_dir, None, follow=True, notify=said.append, has_reader=lambda: True))
    assert lines[4:] == ["[rank 0] half a line", "[rank 0] second attempt", "[rank 1] last words"]
    assert said == ["the run ended: failed"]


def test_a_run_without_a_controller_ends_the_following_and_says_so(
    run_dir: Path, make_spec: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign_file.Plan, "is_driven", False)
    said: list[str] = []
    lines = list(logs.read(run_dir, 0, follow=True, notify=said.append, has_reader=lambda: True))
    assert lines == ["[rank 0] loss 5.1"]
    assert said == ["no controller follows this run. Repeat its command to continue it"]


def test_a_waiting_job_is_said_once(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run_dir / "progress-1").unlink()
    why = "Slurm job 7 is pending: Resources"
    store.write_json(run_dir / store.JOB, {"launcher": "slurm", "waiting": why})
    monkeypatch.setattr(logs, "STATE_S", 0.0)
    steps: Iterator[Callable[[], None]] = iter([lambda: None, lambda: None, lambda: seal(run_dir)])
    monkeypatch.setattr(time, "sleep", lambda _: next(steps)())
    said: list[str] = []
    list(logs.read(run_dir, None, follow=True, notify=said.append, has_reader=lambda: True))
    assert said == [f"the job waits: {why}", "the run ended: failed"]


@pytest.mark.parametrize("arguments", [["."], [".", "--rank", "2"], [".", "--rank", "-1"], ["nowhere"]])
def test_a_wrong_request_is_one_sentence(
    run_dir: Path, arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_dir if "--rank" in arguments else run_dir.parent)
    assert cli.main(["logs", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "expected" in error


def following(run_dir: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "paceline", "logs", "-f", str(run_dir)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ctrl_c_ends_following_without_a_word(run_dir: Path) -> None:
    with following(run_dir) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == "[job] paceline: ranks begin\n"
        os.kill(child.pid, signal.SIGINT)
        assert child.wait(30) == cli.INTERRUPTED
        assert child.stderr.read() == ""


def test_a_reader_that_leaves_a_silent_run_ends_the_following(run_dir: Path) -> None:
    with following(run_dir) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == "[job] paceline: ranks begin\n"
        child.stdout.close()
        assert child.wait(30) == cli.OK
        assert child.stderr.read() == ""


def test_a_log_that_is_a_pipe_or_has_a_line_of_any_length_is_read_in_pieces(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_lines, "LONGEST_LINE", 8)
    (run_dir / "log.txt").write_text("x" * 20)
    assert collected(run_dir)[0] == ["[job] xxxxxxxx", "[job] xxxxxxxx", "[job] xxxx"]
    (run_dir / "log.txt").unlink()
    os.mkfifo(run_dir / "log.txt")
    with pytest.raises(OSError, match="not a regular file"):
        collected(run_dir)
