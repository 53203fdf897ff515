"""What cannot be served as asked is one sentence before anything is started, not a sealed run for each cell."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from testbed.observers import Unseen

from paceline.campaign.run import controller
from paceline.campaign.run.references import unsupported
from paceline.cli import main
from paceline.errors import RequestError, UnsupportedError
from paceline.experiment.choices import Choice
from paceline.experiment.fields import Cell, build
from paceline.experiment.spec import RunSpec
from paceline.host import machine
from paceline.serving.engines import openai
from paceline.serving.engines.openai import Options
from paceline.workloads import inference

ELSEWHERE = 'ssh:hosts=["node-a"]'


def asked(**more: Any) -> RunSpec:
    values = {"workload": "inference", "model": "tiny", "processes": 1, "nodes": 1, "requests": 2}
    return build("test", Cell(**{**values, **more}), "cpu")


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        '{"prompt": "x"}\nnot json',
        '{"question": "x"}',
        '{"messages": [{"role": "user", "content": "x"}]}',
    ],
)
def test_a_file_is_read_before_anything_starts(tmp_path: Path, content: str | None, golden: object) -> None:
    if content is not None:
        (tmp_path / "f").write_text(content)
    with pytest.raises(RequestError) as caught:
        unsupported(asked(data=f"jsonl:path={tmp_path / 'f'}"))
    assert str(caught.value) == golden


def test_a_corrected_file_is_read_again(tmp_path: Path, golden: object) -> None:
    spec = asked(data=f"jsonl:path={tmp_path / 'f'}")
    (tmp_path / "f").write_text('{"prompt": "x"}\n')
    assert unsupported(spec) is None
    (tmp_path / "f").write_text("no JSON any more")
    with pytest.raises(RequestError) as caught:
        unsupported(spec)
    assert str(caught.value) == golden


def test_a_file_of_other_hosts_is_left_to_them(tmp_path: Path, golden: object) -> None:
    spec = asked(data=f"jsonl:path={tmp_path / 'there'}", launcher=ELSEWHERE)
    assert inference.check(spec) is None
    (tmp_path / "there").write_text("no JSON")
    with pytest.raises(RequestError) as caught:
        inference.check(spec)
    assert str(caught.value) == golden


def test_one_replica_has_no_pair(golden: object) -> None:
    assert unsupported(asked(partition="paired")) == golden
    assert unsupported(asked(partition="paired", engine='openai:urls=["http://a:1","http://b:1"]')) is None


@pytest.mark.parametrize(
    "urls",
    [
        [],
        ["http://a:1", "http://b:1", "http://a:1/v1/"],
    ],
)
def test_urls_are_a_replica_each(urls: list[str], golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        Options(urls=tuple(urls))
    assert str(caught.value) == golden


def test_a_port_that_nobody_can_listen_at(capsys: pytest.CaptureFixture[str], golden: object) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["mock-replica", "--port", str(port)]) == 2
    text = capsys.readouterr().err
    assert text == golden
    assert f"{port}" in text
    assert "127.0.0.1" in text
    assert main(["mock-replica", "--port", "99999"]) == 2
    assert "--port: got 99999, expected 0 to 65535" in capsys.readouterr().err


def test_endpoints_that_are_away_are_one_sentence_for_all_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: object
) -> None:
    dead, there = asked(engine="openai:url=http://dead"), asked(engine="openai:url=http://there")

    def found(url: str, _chosen: Options) -> None:
        if url == "http://dead":
            raise UnsupportedError(f"{url} does not answer")

    monkeypatch.setattr(openai, "_endpoint", found)
    with pytest.raises(RequestError) as caught:
        controller.campaign([dead, replace(dead, repeat=1)], tmp_path, Unseen())
    assert str(caught.value) == golden
    assert not list(tmp_path.iterdir())
    # What holds for some runs only is left to their records, and what others than this host see is not asked here.
    controller.ask_plugins([dead, there])
    controller.ask_plugins([replace(dead, launcher=Choice.parse(ELSEWHERE))])


def test_endpoints_are_loaded_from_one_process_by_default(monkeypatch: pytest.MonkeyPatch, golden: object) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 4)

    def made(**more: Any) -> RunSpec:
        return build("test", Cell(**{"workload": "inference", "model": "tiny", "requests": 2, **more}), "cpu")

    assert made().topology.world_size == 1
    assert unsupported(made()) is None
    assert made(launcher='ssh:hosts=["a","b"]').topology.world_size == 1
    assert made(engine="transformers").topology.world_size == 4
    reason = unsupported(made(processes="all"))
    assert reason is not None
    assert reason == golden
