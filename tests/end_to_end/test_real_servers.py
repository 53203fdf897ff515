"""Real model servers over real (tiny, random) weights: what they answer, and that they are counted as they count."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from testbed import llama_cpp, tiny_llama

from paceline.results import store
from paceline.results.records import RunRecord
from paceline.serving.prompts import Prompt, open_prompts

PACKAGES = ("transformers", "gguf", "xllamacpp")
pytestmark = pytest.mark.skipif(not all(map(find_spec, PACKAGES)), reason="pip install 'paceline[dev,finetune]'")

# More requests on one connection than llama.cpp takes before it closes it (100).
FILE = """
name: real
base: {workload: inference, engine: openai, device: cpu, processes: 1, launcher: testbed.alone, requests: 110,
       max_tokens: 3, keeps_text: true,
       data: "synthetic:prompt=uniform,prompt_mean=12,prompt_spread=0.5,answer_mean=3", precision: fp32,
       request_timeout_s: 120, warmup_requests: 2}
matrix:
  - {scenario: [concurrency], concurrency: [1]}
  - scenario: [offline]
"""


@dataclass(frozen=True)
class Served:
    directory: Path
    url: str


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    directory = tiny_llama.write(folder / "tiny")
    with llama_cpp.server(llama_cpp.write(directory, folder / "tiny.gguf")) as url:
        yield Served(directory, url)


def run(served: Served, out: Path, paceline: Any, *settings: str) -> list[RunRecord]:
    (out / "real.yaml").write_text(FILE)
    asked = [f"engine.url={served.url}", f"model={served.directory}", *settings]
    given = [word for setting in asked for word in ("--set", setting)]
    done = paceline("run", str(out / "real.yaml"), "--out", str(out), *given, "--format", "json")
    records, skipped = store.read_runs(out / "real")
    assert not skipped, done.stderr
    return records


@pytest.fixture(scope="module")
def records(served: Served, tmp_path_factory: pytest.TempPathFactory, paceline: Any) -> list[RunRecord]:
    return run(served, tmp_path_factory.mktemp("out"), paceline)


def prompts_of(record: RunRecord) -> list[Prompt]:
    return open_prompts(
        record.spec.training.data, count=110, seed=record.spec.seed, vocab=tiny_llama.VOCAB, max_tokens=3
    )


def test_every_sample_is_answered_once_over_connections_that_the_server_closes(records: list[RunRecord]) -> None:
    assert {record.spec.serving.scenario for record in records if record.spec.serving} == {"concurrency", "offline"}
    for record in records:
        assert sorted(request.sample for request in record.requests) == list(range(110))
        assert {request.error for request in record.requests} == {None}


def test_tokens_are_counted_as_the_server_counts_them(records: list[RunRecord]) -> None:
    """Its usage rides on the last event with a choice, and every token is an event."""
    for record in records:
        asked = prompts_of(record)
        assert {(request.tokens, request.pieces) for request in record.requests} == {(3, 3)}
        for request in record.requests:
            assert request.prompt_tokens == len(asked[request.sample].token_ids or ())
            assert request.finish == "length"


def test_the_answers_are_those_of_transformers(served: Served, records: list[RunRecord]) -> None:
    """Whatever was batched with whatever."""
    for record in records:
        asked = prompts_of(record)
        for request in sorted(record.requests, key=lambda each: each.sample)[:6]:
            told = tiny_llama.continuation(served.directory, list(asked[request.sample].token_ids or ()), 3)
            assert request.text == tiny_llama.text(served.directory, told)


def test_text_and_chat_go_through_the_model_s_own_tokenizer(served: Served, tmp_path: Path, paceline: Any) -> None:
    said = [tiny_llama.words(count, seed=count) for count in (3, 8)]
    lines = [json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 3}) for text in said]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    chat = (f"data=jsonl:path={tmp_path / 'chat.jsonl'}", "api=chat", "requests=2")
    (record,) = run(served, tmp_path, paceline, *chat, "scenario=offline", "concurrency=1")
    for request in record.requests:
        told = tiny_llama.answer(served.directory, [{"role": "user", "content": said[request.sample]}], 3)
        assert (request.error, request.text, request.tokens) == (None, told, 3)
