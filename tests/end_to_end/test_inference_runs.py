"""Endpoints asked from the command line to a report, against a server of known law in a process of its own."""

from __future__ import annotations

import json
import multiprocessing
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.results import store
from paceline.results.served_samples import CeilingSample
from paceline.serving import client_ceiling
from paceline.serving.mock import Latencies, serve_until_signalled

Start = Callable[..., str]
FILE = """
name: asked
base: {workload: inference, engine: openai, device: cpu, processes: 1, model: tiny, requests: 24, max_tokens: 8,
       data: "synthetic:prompt=fixed,prompt_mean=6,answer_mean=8", request_timeout_s: 30, warmup_requests: 2}
matrix:
  - scenario: [offline]
  - {scenario: [server], rate_per_s: [100]}
"""
# Both lines of the matrix made one cell, whose rank needs no torchrun: the test of both has it.
OFFLINE = ("scenario=offline", "rate_per_s=100", "launcher=testbed.alone")


@pytest.fixture
def start() -> Iterator[Start]:
    """A replica of the law given; its URL."""
    context = multiprocessing.get_context("fork")
    servers: list[Any] = []

    def make(**law: Any) -> str:
        ports = context.Queue()
        made = Latencies(**{"ttft_s": 0.02, "itl_s": 0.002, **law})
        servers.append(
            context.Process(target=serve_until_signalled, args=(made, "127.0.0.1", 0, ports.put), daemon=True)
        )
        servers[-1].start()
        return f"http://127.0.0.1:{ports.get(timeout=60)}"

    yield make
    for server in servers:
        server.terminate()
        server.join()


@pytest.fixture
def asked(tmp_path: Path, paceline: Any) -> Callable[..., Any]:
    def run(*settings: str) -> Any:
        (tmp_path / "asked.yaml").write_text(FILE)
        given = [word for setting in settings for word in ("--set", setting)]
        return paceline("run", str(tmp_path / "asked.yaml"), "--out", str(tmp_path), *given, "--format", "json")

    return run


def test_two_replicas_answer_every_sample_once(start: Start, asked: Any, tmp_path: Path) -> None:
    known = CeilingSample(rank=0, processes=1, events_per_s=1e6, streams=9, measured_at_s=1.7e9)
    client_ceiling.keep(known)
    asked(f"engine.urls=[{start()}, {start()}]")
    records, skipped = store.read_runs(tmp_path / "asked")
    assert not skipped
    assert len(records) == 2
    for record in records:
        assert sorted(request.sample for request in record.requests) == list(range(24))
        assert {request.error for request in record.requests} == {None}
        assert {request.replica for request in record.requests} == {0, 1}
        assert {(request.tokens, request.pieces) for request in record.requests} == {(8, 8)}
        assert all(request.first_ns is not None and request.first_ns > 0 for request in record.requests)
        assert len({client.plan for client in record.clients}) == 1
        assert known in record.client_ceilings
    report = json.loads((tmp_path / "asked" / "report.json").read_text())
    # On a busy machine the client may say against itself that it was late: then nothing is measured, and it says why.
    assert all("of the client ceiling (1,000,000 events/s" in v["ceiling"]["text"] for v in report["served"])
    for run in report["runs"]:
        assert run["status"] == "ok" or "client: " in run["reason"]
    measured = {m["cell"] for m in report["measurements"] if m["metric"] == "ttft_p50_s"}
    assert measured == {run["cell"] for run in report["runs"] if run["status"] == "ok"}


def test_a_replica_that_fails_half_of_its_requests_is_reported(start: Start, asked: Any, tmp_path: Path) -> None:
    asked(f"engine.url={start(mode='fail')}", *OFFLINE, "warmup_requests=0")
    (record,) = store.read_runs(tmp_path / "asked")[0]
    assert sum(request.error == "http_500" for request in record.requests) == 12
    assert len({request.number for request in record.requests}) == 24


def test_nobody_there_and_another_model(start: Start, asked: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    done = asked(f"engine.url=http://127.0.0.1:{port}", *OFFLINE)
    assert done.returncode == 2
    assert f"engine openai: http://127.0.0.1:{port} does not answer" in done.stderr
    done = asked(f"engine.url={start()}", "engine.model=other", *OFFLINE)
    assert done.returncode == 2
    assert "has no model 'other'; it has mock" in done.stderr
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("engine.url=ftp://x", "openai.url: got 'ftp://x'"),
        ("engine.url=http://user:secret@x", "expected http://HOST:PORT"),
        ("scenario=fast", "scenario: got 'fast', expected offline"),
        ("engine=vllm2", "engine: got 'vllm2'"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    setting: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "asked.yaml").write_text(FILE)
    assert cli.main(["run", str(tmp_path / "asked.yaml"), "--out", str(tmp_path), "--set", setting]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.strip().splitlines()) == 1
