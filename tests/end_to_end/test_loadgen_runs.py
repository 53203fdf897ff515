"""LoadGen after our own load, from the command line to the report, against a server of known law."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import store
from paceline.loadgen import mlcommons
from paceline.mock_replica import Law, serve_until_told

FILE = """
name: twice
base: {workload: inference, engine: openai, device: cpu, processes: 1, model: tiny, requests: 24, max_tokens: 8,
       data: "synthetic:prompt=fixed,prompt_mean=6,answer_mean=8", request_timeout_s: 60, warmup_requests: 1,
       scenario: server, rate_per_s: 50}
"""


@pytest.fixture
def url() -> Iterator[str]:
    context = multiprocessing.get_context("fork")
    ports = context.Queue()
    law = Law(ttft_s=0.01, itl_s=0.001)
    server = context.Process(target=serve_until_told, args=(law, "127.0.0.1", 0, ports.put), daemon=True)
    server.start()
    yield f"http://127.0.0.1:{ports.get(timeout=60)}"
    server.terminate()
    server.join()


@pytest.mark.skipif(not mlcommons.is_installed(), reason="the package mlcommons-loadgen is not installed")
def test_two_verdicts_of_one_run(url: str, tmp_path: Path, paceline: Any) -> None:
    (tmp_path / "twice.yaml").write_text(FILE)
    settings = ["--set", f"engine.url={url}", "--set", "engine.loadgen=mlcommons"]
    done = paceline("run", str(tmp_path / "twice.yaml"), "--out", str(tmp_path), *settings, "--format", "json")
    (record,) = store.read_runs(tmp_path / "twice")[0]
    # Its requests are not among ours: each of those is one sample, once.
    assert sorted(request.sample for request in record.requests) == list(range(24))
    (told,) = record.loadgens
    assert (told.scenario, told.verdict, told.asked, dict(told.errors)) == ("Server", "INVALID", 24, {})
    assert "LoadGen beside Paceline" in done.stdout
    (found,) = json.loads((tmp_path / "twice" / "report.json").read_text())["loadgen"]
    assert (found["theirs"]["verdict"], found["ours"]["verdict"]) == ("INVALID", "INVALID")
    kept = Path(record.path, mlcommons.DETAIL).read_text()
    assert mlcommons.read_back(Path(record.path, mlcommons.DETAIL)).verdict == told.verdict
    assert kept.startswith(":::MLLOG")
