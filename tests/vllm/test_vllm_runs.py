"""vLLM on CPU over a tiny Llama: scenarios, parallel forms, the same answers as other engines, and every way to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from testbed import llama_cpp, tiny_llama
from testbed.spread import SpreadRanks
from testbed.waiting import until

from paceline.contract import Endpoint, Seat
from paceline.errors import LaunchError
from paceline.experiment.choices import Choice
from paceline.experiment.serving import Serving
from paceline.experiment.spec import RunSpec
from paceline.results import store
from paceline.results.records import RunRecord
from paceline.serving.engines import vllm

# One start takes half a minute alone on two cores, and several where others work beside it.
LONG_S = 1800.0
SMALL = {"max_model_len": 512, "max_num_seqs": 16, "eager": True, "kv_cache_bytes": 64 << 20, "ready_s": 900}
DATA = "synthetic:prompt=uniform,prompt_mean=12,prompt_spread=0.5,answer_mean=8"
REQUESTS = 24
MARK = "PACELINE_TEST_MARK"


class Family:
    """Processes that were started with a mark in their environment, and those in the sessions of their guardians: vLLM
    renames its own, and writes the new names over their environment."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self._sessions: set[int] = set()

    def living(self) -> list[psutil.Process]:
        processes = [process for process in psutil.process_iter() if _words(process) is not None]
        marked = [process for process in processes if _mark_of(process) == self.mark]
        self._sessions |= {each.pid for each in marked if "paceline.host.process_guard" in (_words(each) or ())}
        return [*marked, *(each for each in processes if each not in marked and _session_of(each) in self._sessions)]

    def kill_servers(self) -> None:
        """Their API processes alone, by the one signal that nobody answers."""
        found = [(each, _words(each) or []) for each in self.living()]
        servers = [each for each, words in found if "serve" in words and "paceline.host.process_guard" not in words]
        assert servers
        for server in servers:
            server.kill()


def _words(process: psutil.Process) -> list[str] | None:
    """Its command line; None where it has ended."""
    try:
        return process.cmdline() if process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None


def _mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARK)
    except (psutil.Error, OSError):
        return None


def _session_of(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except OSError:
        return None


@dataclass
class Campaign:
    """One `paceline run`, and the processes of it."""

    out: Path
    process: subprocess.Popen[str]
    family: Family

    def wait(self) -> tuple[int, str]:
        until(
            lambda: self.family.living() is not None and self.process.poll() is not None, "the end of the run", LONG_S
        )
        return self.process.returncode, (self.out / "output.txt").read_text()

    @property
    def records(self) -> list[RunRecord]:
        records, skipped = store.read_runs(self.out / "served")
        assert not skipped
        return records

    def is_timing(self) -> bool:
        runs = [file.parent for file in (self.out / "served").glob("*/spec.json")]
        return any(p.phase.startswith("timing") for run in runs for p in store.read_progress(run))


@pytest.fixture(scope="session")
def start(
    tmp_path_factory: pytest.TempPathFactory, program: str, environment: Any
) -> Iterator[Callable[..., Campaign]]:
    begun: list[Campaign] = []

    def begin(matrix: list[dict[str, Any]], model: str, options: dict[str, Any] | None = None, **base: Any) -> Campaign:
        out, family = tmp_path_factory.mktemp("served"), Family()
        engine = str(Choice("vllm", {"executable": program, **SMALL, **(options or {})}))
        usual = {"workload": "inference", "engine": engine, "model": model, "device": "cpu", "processes": 1}
        usual |= {"requests": REQUESTS, "max_tokens": 8, "data": DATA, "precision": "fp32", "keeps_text": True}
        usual |= {"warmup_requests": 2, "request_timeout_s": 300, "timeout_s": LONG_S, "stall_s": 1000}
        (out / "served.yaml").write_text(yaml.safe_dump({"name": "served", "base": usual | base, "matrix": matrix}))
        command = [sys.executable, "-m", "paceline.cli", "run", str(out / "served.yaml"), "--out", str(out)]
        with (out / "output.txt").open("w") as output:
            process = subprocess.Popen(
                [*command, "--format", "json"],
                env=environment(**{MARK: family.mark}),
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )
        begun.append(Campaign(out, process, family))
        return begun[-1]

    yield begin
    for campaign in begun:
        # One that a failed test left under way; it ends what it started.
        if campaign.process.poll() is None:
            campaign.process.send_signal(signal.SIGINT)
        campaign.process.wait(LONG_S)


@pytest.fixture(scope="module")
def questions(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """Words as token ids, and the file with them. With ids by chance a prompt may end within a character, and vLLM then
    tells the end of the prompt once more as the beginning of its answer."""
    asked = [tiny_llama.token_ids(model, tiny_llama.words(2 + number % 9, number)) for number in range(REQUESTS)]
    file = tmp_path_factory.mktemp("asked") / "words.jsonl"
    file.write_text("\n".join(json.dumps({"token_ids": ids, "max_tokens": 8}) for ids in asked))
    return file, asked


@pytest.fixture(scope="module")
def scenarios(start: Callable[..., Campaign], model: Path, questions: tuple[Path, Any]) -> list[RunRecord]:
    closed, offered = {"scenario": ["concurrency"], "concurrency": [4]}, {"scenario": ["server"], "rate_per_s": [20]}
    campaign = start([{"scenario": ["offline"]}, closed, offered], str(model), data=f"jsonl:path={questions[0]}")
    campaign.wait()
    assert not campaign.family.living()
    return campaign.records


def test_every_scenario_is_answered_once_and_whole(scenarios: list[RunRecord]) -> None:
    assert {record.spec.serving.scenario for record in scenarios if record.spec.serving} == {
        "offline",
        "concurrency",
        "server",
    }
    for record in scenarios:
        # On a busy machine the client may say against itself that it was late.
        assert record.error is None or record.error.startswith("client: ")
        assert sorted(request.sample for request in record.requests) == list(range(REQUESTS))
        assert {(request.error, request.tokens) for request in record.requests} == {(None, 8)}
        # Tokens that were ready together share an event where vLLM's front is behind its engine.
        assert all(1 <= request.pieces <= 8 for request in record.requests)


def test_vllm_transformers_and_llama_cpp_give_the_same_text(
    scenarios: list[RunRecord], questions: tuple[Any, list[list[int]]], model: Path, tmp_path: Path
) -> None:
    asked = questions[1]
    by_transformers = [tiny_llama.text(model, tiny_llama.continuation(model, prompt, 8)) for prompt in asked]
    with llama_cpp.server(llama_cpp.write(model, tmp_path / "tiny.gguf")) as url:
        by_llama_cpp = [complete(url, "tiny", prompt, 8) for prompt in asked]
    assert by_llama_cpp == by_transformers
    for each in scenarios:
        by_vllm = [request.text for request in sorted(each.requests, key=lambda request: request.sample)]
        assert by_vllm == by_transformers


def complete(url: str, model: str, prompt: list[int], tokens: int, key: str | None = None) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0}
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def test_tensor_parallel_keeps_the_text_and_a_killed_server_leaves_nothing(
    make_spec: Callable[..., RunSpec], program: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = Family()
    monkeypatch.setenv(MARK, family.mark)
    engine = Choice("vllm", {"executable": program, **SMALL, "tensor_parallel": 2})
    asked: dict[str, Any] = {"serving": Serving(), "engine": engine, "stall_s": 1000.0, "data": Choice.parse(DATA)}
    spec = make_spec(None, processes=1, workload="inference", model=str(model), **asked)
    prompt = list(range(20, 60))

    def ask_and_kill(endpoint: Endpoint) -> None:
        assert endpoint.facts["version"]
        assert endpoint.facts["tensor_parallel"] == 2
        assert endpoint.facts["settings"]["prefix_caching"] is False
        with pytest.raises(urllib.error.HTTPError, match="401"):
            complete(endpoint.url, "tiny", prompt, 1)
        told = complete(endpoint.url, "tiny", prompt, 32, endpoint.secret)
        assert told == tiny_llama.text(model, tiny_llama.continuation(model, prompt, 32))
        assert len(family.living()) >= 5, "guardian, server, engine and two workers"
        family.kill_servers()
        until(lambda: not family.living(), "the end of all of its processes", 120)

    opened = vllm.open(spec, Seat(rank=0, local_rank=0, world_size=1, device="cpu"))
    with pytest.raises(LaunchError, match="ended during the load"), opened as (endpoint,):
        ask_and_kill(endpoint)


def test_a_replica_over_two_nodes_gives_the_same_text(
    make_spec: Callable[..., RunSpec], program: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both nodes are this host; vLLM connects their parts as it does between hosts."""
    family = Family()
    monkeypatch.setenv(MARK, family.mark)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    engine = Choice("vllm", {"executable": program, **SMALL, "tensor_parallel": 2, "nodes": 2})
    asked: dict[str, Any] = {"serving": Serving(), "engine": engine, "stall_s": 1000.0, "data": Choice.parse(DATA)}
    spec = make_spec(None, processes=1, nodes=2, workload="inference", model=str(model), **asked)
    assert vllm.check(spec) is None
    prompt = list(range(20, 60))
    with (ranks := SpreadRanks(spec, limit_s=LONG_S)).living(monkeypatch):
        assert not ranks.errors
        (endpoint,) = ranks.served[0]
        assert ranks.served[1] == []
        told = complete(endpoint.url, "tiny", prompt, 32, endpoint.secret)
        assert told == tiny_llama.text(model, tiny_llama.continuation(model, prompt, 32))
        assert (endpoint.facts["tensor_parallel"], endpoint.facts["settings"]["nodes"]) == (2, 2)
        assert len(family.living()) >= 7, "two guardians, two servers, an engine and a worker for each node"
    assert not ranks.errors
    until(lambda: not family.living(), "the end of all of its processes", 120)


def test_two_replicas_of_a_named_shape_share_the_samples(start: Callable[..., Campaign]) -> None:
    campaign = start([{"scenario": ["offline"]}], "tiny-llama", {"max_model_len": 128}, processes=2)
    _, output = campaign.wait()
    (record,) = campaign.records
    assert record.error is None or "client: " in record.error, output
    assert sorted(request.sample for request in record.requests) == list(range(REQUESTS))
    assert {(request.error, request.tokens) for request in record.requests} == {(None, 8)}
    assert not campaign.family.living()


@pytest.mark.parametrize(
    ("options", "words"),
    [({}, "Cannot find any model weights"), ({"arguments": ["--no-such"]}, "unrecognized arguments: --no-such")],
)
def test_one_that_cannot_start_says_why_in_one_sentence(
    start: Callable[..., Campaign], model: Path, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (empty / name).write_bytes((model / name).read_bytes())
    campaign = start([{"scenario": ["offline"]}], str(empty), options)
    code, _ = campaign.wait()
    (record,) = campaign.records
    assert code == 1
    assert record.error is not None
    assert record.error.startswith("LaunchError: vllm serve ended before it answered: ")
    assert words in record.error
    assert not campaign.family.living()


@pytest.mark.parametrize("how", ["the server is killed", "Ctrl-C"])
def test_an_end_in_the_middle_leaves_nothing_running(start: Callable[..., Campaign], model: Path, how: str) -> None:
    long = {"data": "synthetic:prompt=fixed,prompt_mean=8,answer_mean=300", "max_tokens": 300, "requests": 64}
    campaign = start([{"scenario": ["concurrency"], "concurrency": [2]}], str(model), **long)
    until(lambda: campaign.is_timing() or campaign.process.poll() is not None, "the timed load", LONG_S)
    assert campaign.process.poll() is None, campaign.wait()[1]
    time.sleep(1)
    if how == "Ctrl-C":
        campaign.process.send_signal(signal.SIGINT)
        campaign.wait()
    else:
        campaign.family.kill_servers()
        assert campaign.wait()[0] == 1
        (record,) = campaign.records
        assert record.error is not None
        assert record.error.startswith("LaunchError: vllm serve ended while it was asked")
        answered = [request.sample for request in record.requests if request.error is None]
        assert len(answered) == len(set(answered)) < 64
    until(lambda: not campaign.family.living(), "the end of all of its processes", 120)
