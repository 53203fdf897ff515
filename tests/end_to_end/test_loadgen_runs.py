"""LoadGen after our own load, from the spec to the report, against a server of known law."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.analysis import report
from paceline.experiment.fields import Cell, build
from paceline.results import store
from paceline.results.records import Status
from paceline.serving.client import mlcommons
from paceline.serving.mock import Latencies, serve_until_signalled

FIELDS = {
    "workload": "inference",
    "device": "cpu",
    "processes": 1,
    "model": "tiny",
    "requests": 24,
    "max_tokens": 8,
    "data": "synthetic:prompt=fixed,prompt_mean=6,answer_mean=8",
    "request_timeout_s": 60,
    "warmup_requests": 1,
    "scenario": "server",
    "rate_per_s": 50,
    "loadgen": "mlcommons",
}


@pytest.fixture
def url() -> Iterator[str]:
    context = multiprocessing.get_context("fork")
    ports = context.Queue()
    law = Latencies(ttft_s=0.01, itl_s=0.001)
    server = context.Process(target=serve_until_signalled, args=(law, "127.0.0.1", 0, ports.put), daemon=True)
    server.start()
    yield f"http://127.0.0.1:{ports.get(timeout=60)}"
    server.terminate()
    server.join()


@pytest.mark.skipif(not mlcommons.is_installed(), reason="the package mlcommons-loadgen is not installed")
def test_two_verdicts_of_one_run(url: str, tmp_path: Path) -> None:
    """The rank as a launcher starts it; torchrun adds nothing to one process."""
    spec = build("twice", Cell(**FIELDS, engine=f"openai:url={json.dumps(url)}"), "cpu")
    run_dir = store.create(tmp_path, spec)
    began = time.time()
    subprocess.run([sys.executable, "-m", "paceline.workloads.worker", str(run_dir)], check=True, timeout=200)
    store.seal(run_dir, Status.OK, None, began, time.time())
    (record,) = store.read_runs(tmp_path / "twice")[0]
    # Its requests are not among ours: each of those is one sample, once.
    assert sorted(request.sample for request in record.requests) == list(range(24))
    (told,) = record.loadgens
    assert (told.scenario, told.verdict, told.asked, dict(told.errors)) == ("Server", "INVALID", 24, {})
    (found,) = report.build([record], title="twice").loadgen
    assert (found.theirs.verdict, found.ours.verdict) == ("INVALID", "INVALID")
    kept = run_dir / mlcommons.DETAIL
    assert kept.read_text().startswith(":::MLLOG")
    assert mlcommons.read_back(kept).numbers == told.numbers
