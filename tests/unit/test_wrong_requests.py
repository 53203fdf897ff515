"""What cannot be served as asked is one sentence before anything is started, not a sealed run for each cell."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from testbed.observers import Unseen

from paceline import machine, run
from paceline.cli import main
from paceline.engines import openai
from paceline.engines.openai import Options
from paceline.errors import RequestError, UnsupportedError
from paceline.experiment.fields import Cell, build
from paceline.run import unsupported
from paceline.spec import Choice, RunSpec
from paceline.workloads import inference

ELSEWHERE = 'ssh:hosts=["node-a"]'


def asked(**more: Any) -> RunSpec:
    values = {"workload": "inference", "model": "tiny", "processes": 1, "nodes": 1, "requests": 2}
    return build("test", Cell(**{**values, **more}), "cpu")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist; accepted is jsonl:path=FILE"),
        ("", "accepted is a file that holds at least one prompt"),
        ('{"prompt": "x"}\nnot json', "line 2: no JSON was given"),
        ('{"question": "x"}', "question was given; accepted is prompt"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "accepted is chat for prompts of messages"),
    ],
)
def test_a_file_is_read_before_anything_starts(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "f").write_text(content)
    with pytest.raises(RequestError, match=words):
        unsupported(asked(data=f"jsonl:path={tmp_path / 'f'}"))


def test_a_file_that_was_mended_is_read_again(tmp_path: Path) -> None:
    spec = asked(data=f"jsonl:path={tmp_path / 'f'}")
    (tmp_path / "f").write_text('{"prompt": "x"}\n')
    assert unsupported(spec) is None
    (tmp_path / "f").write_text("no JSON any more")
    with pytest.raises(RequestError, match="no JSON was given"):
        unsupported(spec)


def test_a_file_of_other_hosts_is_left_to_them(tmp_path: Path) -> None:
    spec = asked(data=f"jsonl:path={tmp_path / 'there'}", launcher=ELSEWHERE)
    assert inference.check(spec) is None
    (tmp_path / "there").write_text("no JSON")
    with pytest.raises(RequestError, match="no JSON was given"):
        inference.check(spec)


def test_one_replica_has_no_pair() -> None:
    assert unsupported(asked(partition="paired")) == "a paired run compares replicas, and there is one alone"
    assert unsupported(asked(partition="paired", engine='openai:urls=["http://a:1","http://b:1"]')) is None


@pytest.mark.parametrize(
    ("urls", "words"),
    [
        ([], r"openai.urls: \[\] was given; accepted is at least one URL"),
        (
            ["http://a:1", "http://b:1", "http://a:1/v1/"],
            "openai.urls: 'http://a:1' was given; accepted is each URL once",
        ),
    ],
)
def test_urls_are_a_replica_each(urls: list[str], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        Options(urls=tuple(urls))


def test_a_port_that_nobody_can_listen_at(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["mock-replica", "--port", str(port)]) == 2
    assert f"127.0.0.1:{port} was given, where nobody can listen (Address already in use)" in capsys.readouterr().err
    assert main(["mock-replica", "--port", "99999"]) == 2
    assert "--port: 99999 was given; accepted is 0 to 65535" in capsys.readouterr().err


def test_endpoints_that_are_away_are_one_sentence_for_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead, there = asked(engine="openai:url=http://dead"), asked(engine="openai:url=http://there")

    def found(url: str, _chosen: Options) -> None:
        if url == "http://dead":
            raise UnsupportedError(f"{url} does not answer")

    monkeypatch.setattr(openai, "_found", found)
    with pytest.raises(RequestError, match="engine openai: http://dead does not answer"):
        run.campaign([dead, replace(dead, repeat=1)], tmp_path, Unseen())
    assert not list(tmp_path.iterdir())
    # What holds for some runs only is left to their records, and what others than this host see is not asked here.
    run.ask_engines([dead, there])
    run.ask_engines([replace(dead, launcher=Choice.parse(ELSEWHERE))])


def test_endpoints_are_asked_from_one_process_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 4)

    def made(**more: Any) -> RunSpec:
        return build("test", Cell(**{"workload": "inference", "model": "tiny", "requests": 2, **more}), "cpu")

    assert made().topology.world_size == 1
    assert unsupported(made()) is None
    assert made(launcher='ssh:hosts=["a","b"]').topology.world_size == 1
    assert made(engine="transformers").topology.world_size == 4
    reason = unsupported(made(processes="all"))
    assert reason is not None
    assert "from one process (nodes: 1, processes: 1)" in reason
