"""Replicas that we start ourselves: real processes over real weights, asked over HTTP and by a whole run."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from testbed.plain_answers import plain_answer
from testbed.spread import SpreadRanks

from paceline.contract import Endpoint, Seat
from paceline.errors import LaunchError, UnsupportedError
from paceline.experiment.choices import Choice
from paceline.experiment.plugins import load
from paceline.results import store
from paceline.serving.engines import _server
from paceline.serving.engines import deepspeed as engine
from paceline.serving.engines import transformers as plain_engine

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="pip install 'paceline[finetune]'")

SEAT = Seat(rank=0, local_rank=0, world_size=1, device="cpu")
TESTS = Path(__file__).parents[1]
TEXT = "the pace of a line is the pace of its slowest node"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of two layers with weights large enough to tell answers apart, and a tokenizer made of one sentence."""
    import tokenizers
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("models") / "little"
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<e>"], initial_alphabet=alphabet)
    words.train_from_iterator([TEXT], trainer)
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<e>", chat_template=TEMPLATE)
    wrapped.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=False,
        eos_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reference(directory: Path) -> Any:
    """Text of the plain loop over the same directory: the whole context again for every token."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    words = transformers.AutoTokenizer.from_pretrained(directory)

    def answer(prompt: list[int] | str, count: int) -> str:
        tokens = words(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
        said: list[int] = []
        for _ in range(count):
            said.append(int(model(input_ids=torch.tensor([tokens + said])).logits[0, -1].argmax()))
        return str(words.decode(said, skip_special_tokens=True))

    return answer


def spec_of(make_spec: Any, directory: Path, named: str) -> Any:
    return make_spec(None, 1, workload="inference", model=str(directory), engine=Choice.parse(named))


@pytest.fixture(scope="module")
def forked_models() -> Iterator[None]:
    """Model processes that have torch and transformers from the nursery: importing them is most of their start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_server, "COMMAND", (sys.executable, "-m", "testbed.forked_replica", "front"))
        patch.setenv("PYTHONPATH", os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", ""))))
        yield


@pytest.fixture(scope="module")
def replica(directory: Path, make_spec: Any, forked_models: None) -> Iterator[Endpoint]:
    """DeepSpeed over two processes."""
    pytest.importorskip("deepspeed")
    spec = spec_of(make_spec, directory, "deepspeed:tensor_parallel=2,max_batch=3")
    assert engine.check(spec) is None
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with engine.open(spec, SEAT) as (endpoint,):
        yield endpoint
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def ask(endpoint: Endpoint, path: str = "/v1/completions", **body: Any) -> Any:
    request = urllib.request.Request(
        endpoint.url + path,
        json.dumps({"model": endpoint.model, "ignore_eos": True, "max_tokens": 12, **body}).encode(),
        {"Authorization": f"Bearer {endpoint.secret}"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def test_two_processes_answer_together_as_a_plain_loop_does(replica: Endpoint, reference: Any) -> None:
    prompts: list[Any] = [[5, 6, 7], TEXT, [9], [3] * 20, "pace"]
    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(lambda prompt: ask(replica, prompt=prompt), prompts))
    assert [answer["choices"][0]["text"] for answer in answers] == [reference(prompt, 12) for prompt in prompts]
    assert {answer["usage"]["completion_tokens"] for answer in answers} == {12}
    assert answers[3]["usage"]["prompt_tokens"] == 20


@pytest.mark.parametrize("name", ["transformers", pytest.param("deepspeed", marks=pytest.mark.exhaustive)])
def test_a_replica_over_two_nodes_answers_as_a_plain_loop_does(
    name: str,
    directory: Path,
    reference: Any,
    make_spec: Any,
    monkeypatch: pytest.MonkeyPatch,
    forked_models: None,
) -> None:
    """Each node has a rank that starts its part; the parts meet in the launch's store, and the first one answers. It
    does not outlive the other part."""
    chosen, spread = Choice.parse(f"{name}:tensor_parallel=2,nodes=2,max_batch=3"), load("engines", name)
    spec = make_spec(None, 1, nodes=2, workload="inference", model=str(directory), engine=chosen)
    assert spread.check(spec) is None
    ranks, before = SpreadRanks(spec, spread, limit_s=120.0), {child.pid for child in psutil.Process().children()}
    with ranks.living(monkeypatch):
        assert not ranks.errors
        (endpoint,), none = ranks.served[0], ranks.served[1]
        assert none == []
        prompts: list[Any] = [[5, 6, 7], TEXT, [9], [3] * 20]
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda prompt: ask(endpoint, prompt=prompt), prompts))
        assert [answer["choices"][0]["text"] for answer in answers] == [reference(prompt, 12) for prompt in prompts]
        assert (endpoint.facts["devices"], endpoint.facts["settings"]["nodes"]) == (2, 2)
        fronts = [child for child in psutil.Process().children() if child.pid not in before]
        assert [len(front.children()) for front in fronts] == [1, 1], "a model process on each node"
        (other,) = [front for front in fronts if not front.net_connections("tcp")]
        other.children()[0].kill()
        with pytest.raises((OSError, http.client.HTTPException)):
            ask(endpoint, prompt=[5, 6, 7])
        wait_for_the_end_of_others(before)
    assert list(ranks.errors) == [0]
    assert "the replica ended during the load" in str(ranks.errors[0])
    assert not [front for front in fronts if front.is_running()]


def test_messages_go_through_the_chat_template(replica: Endpoint, reference: Any) -> None:
    answer = ask(replica, "/v1/chat/completions", messages=[{"role": "user", "content": "pace"}])
    assert answer["choices"][0]["message"]["content"] == reference("user: pace\nassistant:", 12)


def test_facts_say_what_changes_the_speed(replica: Endpoint) -> None:
    assert replica.facts["tensor_parallel"] == replica.facts["devices"] == 2
    assert replica.facts["version"].startswith("deepspeed ")
    told = replica.facts["settings"]
    assert (told["batching"], told["max_batch"], told["max_length"]) == ("continuous", 3, 128)
    assert (told["dtype"], told["prefix_caching"], told["compiled"]) == ("fp32", False, "none")
    assert replica.secret not in json.dumps(replica.facts)


def test_without_the_key_nothing_is_answered(replica: Endpoint) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{replica.url}/v1/models", timeout=60)
    assert refused.value.code == 401
    refused.value.close()


RUN = """
name: own
base: {workload: inference, engine: "transformers:max_batch=4", device: cpu, processes: 1, model: tiny-llama,
       launcher: testbed.alone, precision: fp32, requests: 12, max_tokens: 6,
       data: "synthetic:prompt=uniform,prompt_mean=9,answer_mean=6", request_timeout_s: 120, warmup_requests: 1,
       keeps_text: true, stall_s: 200}
"""


@pytest.mark.exhaustive
def test_a_whole_run_asks_a_replica_of_random_weights(paceline: Any, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(RUN)
    paceline("run", str(tmp_path / "own.yaml"), "--out", str(tmp_path), "--format", "json")
    (record,) = store.read_runs(tmp_path / "own")[0]
    assert {(each.tokens, each.pieces, each.error) for each in record.requests} == {(6, 6, None)}
    assert sorted(each.sample for each in record.requests) == list(range(12))
    for each in record.requests[:3]:
        prompt, text = plain_answer(record, each.sample)
        assert (each.text, each.prompt_tokens) == (text, len(prompt))


def test_a_model_that_is_killed_while_it_is_built_ends_the_waiting(make_spec: Any) -> None:
    spec = make_spec(None, 1, workload="inference", model="tiny-llama", engine=Choice("transformers"))
    mine = psutil.Process()
    before = {child.pid for child in mine.children(recursive=True)}

    def kill() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            for child in mine.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.pid not in before and child.cmdline()[-1:] == ["model"]:
                        child.kill()
                        return
            time.sleep(0.02)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(kill)
        words = "the replica ended before it was ready; its last output: none"
        with pytest.raises(LaunchError, match=words), plain_engine.open(spec, SEAT):
            pass
    assert {child.pid for child in mine.children(recursive=True)} <= before


@pytest.mark.parametrize(
    ("program", "raised", "words"),
    [
        ("time.sleep(60)", LaunchError, "not ready within 0.5 s; its last output: none"),
        ("sys.stderr.write('a\\nno room\\n')", LaunchError, "ended before it was ready; its last output: no room"),
        ("print(json.dumps({'failed': 'no such GPU'}))", UnsupportedError, "no such GPU"),
        (
            "READY; sys.stderr.write('no more'); sys.stderr.flush(); os.kill(os.getpid(), 9)",
            LaunchError,
            "ended by signal 9 during the load; its last output: no more",
        ),
    ],
)
def test_one_that_fails_is_one_sentence_with_its_last_words(
    make_spec: Any, monkeypatch: pytest.MonkeyPatch, program: str, raised: type[Exception], words: str
) -> None:
    started = "import json, os, sys, time; sys.stdin.readline(); "
    program = program.replace("READY", "print(json.dumps({'port': 9, 'facts': {}}), flush=True)")
    monkeypatch.setattr(_server, "COMMAND", (sys.executable, "-c", started + program))
    # Too short a time only for the one that is never ready.
    patience = 0.5 if "sleep" in program else 60.0
    spec = make_spec(
        None, 1, workload="inference", model="tiny-llama", engine=Choice("deepspeed", {"ready_s": patience})
    )
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(raised, match=words), engine.open(spec, SEAT):
        wait_for_the_end_of_others(before)


def wait_for_the_end_of_others(before: set[int]) -> None:
    """Until every child that came later has ended, whether or not anybody has asked how."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        later = [child for child in psutil.Process().children() if child.pid not in before]
        if all(child.status() == psutil.STATUS_ZOMBIE for child in later):
            return
        time.sleep(0.02)


ORPHANED = """
from paceline.experiment.fields import Cell, build
from paceline.contract import Seat
from paceline.experiment.plugins import load

cell = Cell(workload="inference", engine="transformers", model="tiny-llama", precision="fp32", processes=1)
seat = Seat(rank=0, local_rank=0, world_size=1, device="cpu")
with load("engines", "transformers").open(build("orphaned", cell, "cpu"), seat):
    pass
"""


def test_all_of_it_ends_with_the_rank_that_started_it(environment: Any) -> None:
    rank = psutil.Popen([sys.executable, "-c", ORPHANED], env=environment(), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    below: list[psutil.Process] = []
    while len(below) < 2 and time.monotonic() < deadline:
        below = rank.children(recursive=True)
        time.sleep(0.02)
    assert len(below) == 2
    # Both have asked the kernel to end them before they read what they are told.
    time.sleep(0.5)
    rank.kill()
    rank.wait()
    _, alive = psutil.wait_procs(below, 60)
    assert not alive


@pytest.mark.parametrize(
    ("named", "model", "words"),
    [
        ("transformers:tensor_parallel=3", "tiny-llama", "tensor_parallel 3 does not divide the 4 heads of tiny-llama"),
        ("transformers:tensor_parallel=2", "tiny", "needs a model of the llama family"),
        ("transformers:max_length=300", "tiny-llama", "exceeds the 256 positions of tiny-llama"),
        ("transformers", "mixtral-8x7b", "is a mixture of experts"),
        ("transformers:graph=true", "tiny-llama", "needs a GPU"),
        ("transformers:tensor_parallel=2,nodes=4", "tiny-llama", "tensor_parallel 2 does not divide over 4 nodes"),
        ("transformers:tensor_parallel=2,nodes=2", "tiny-llama", "replicas of 2 nodes do not fit 1 nodes"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_before_the_start(
    make_spec: Any, named: str, model: str, words: str
) -> None:
    spec = make_spec(None, 1, workload="inference", model=model, engine=Choice.parse(named))
    assert words in str(plain_engine.check(spec))
