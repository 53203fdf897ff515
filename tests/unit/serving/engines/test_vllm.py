"""The engine vllm against a program with vLLM's outside; tests/vllm has the real one."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from testbed.spread import SpreadRanks
from torch.distributed import HashStore

from paceline.contract import Seat, devices_per_rank, may_be_lost
from paceline.errors import LaunchError, RequestError, UnsupportedError
from paceline.experiment.choices import Choice
from paceline.experiment.serving import Serving
from paceline.experiment.spec import RunSpec
from paceline.launchers.node import torchrun
from paceline.models import directory
from paceline.models.arithmetic import load as load_shape
from paceline.models.hf_config import read_shape
from paceline.serving.engines import _server, vllm
from paceline.workloads import inference

TESTS = Path(__file__).parents[3]
SEAT = Seat(rank=0, local_rank=0, world_size=1, device="cpu")


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, Any]]:
    """What the program was given, once it ran."""
    file = tmp_path / "told.json"
    monkeypatch.setenv("STAND_IN_TOLD", str(file))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return lambda: dict(json.loads(file.read_text()))


@pytest.fixture
def program(tmp_path: Path) -> str:
    file = tmp_path / "vllm"
    file.write_text(f'#!/bin/sh\nexec {sys.executable} -m testbed.stand_in_vllm "$@"\n')
    file.chmod(0o755)
    return str(file)


@pytest.fixture
def spec(make_spec: Callable[..., RunSpec]) -> Callable[..., RunSpec]:
    def make(model: str = "tiny-llama", data: str = "synthetic", **options: Any) -> RunSpec:
        engine = Choice("vllm", options)
        asked: dict[str, Any] = {"model": model, "data": Choice.parse(data), "engine": engine, "serving": Serving()}
        return make_spec(None, processes=1, workload="inference", stall_s=100.0, **asked)

    return make


def all_gone(pids: list[int]) -> bool:
    """Waited for with patience: a killed process is there until its parent has seen it."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        living = [pid for pid in pids if psutil.pid_exists(pid) and _state(pid) != psutil.STATUS_ZOMBIE]
        if not living:
            return True
        time.sleep(0.05)
    return False


def _state(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def test_a_server_is_started_and_ended_with_all_its_processes(spec: Any, told: Any, program: str) -> None:
    asked = spec(executable=program, tensor_parallel=2, max_num_seqs=8, arguments=["--block-size", "32"])
    with vllm.open(asked, SEAT) as (endpoint,):
        given = told()
        assert all(psutil.pid_exists(pid) for pid in given["pids"])
        words = dict(zip(given["argv"], given["argv"][1:], strict=False))
        assert endpoint.url == f"http://{words['--host']}:{words['--port']}"
        assert endpoint.model == words["--served-model-name"] == "tiny-llama"
        assert (words["--host"], words["--tensor-parallel-size"], words["--max-num-seqs"]) == ("127.0.0.1", "2", "8")
        assert (words["--dtype"], words["--load-format"], words["--block-size"]) == ("float32", "dummy", "32")
        assert "--no-enable-prefix-caching" in given["argv"]
        assert "--max-model-len" not in given["argv"]
        assert {"config.json", "tokenizer.json", "tokenizer_config.json"} == set(given["files"])
        assert endpoint.facts["body"] == {"ignore_eos": True}
        assert endpoint.facts["version"] == "9.9"
        assert endpoint.facts["tensor_parallel"] == 2
        assert endpoint.facts["ready_s"] > 0
        settings = endpoint.facts["settings"]
        assert (settings["prefix_caching"], settings["block_size"], settings["max_batch"]) == (False, "16", 8)
        assert settings["arguments"] == "--block-size 32"
    assert all_gone(given["pids"])
    assert not Path(given["argv"][2]).exists()


def test_a_replica_is_spread_over_two_nodes(
    spec: Any, told: Any, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = spec(executable=program, tensor_parallel=4, nodes=2)
    asked = replace(asked, topology=replace(asked.topology, nodes=2))
    assert vllm.check(asked) is None
    assert (inference.replicas_of(asked), devices_per_rank(asked), list(may_be_lost(asked))) == (1, 2, [])
    with (ranks := SpreadRanks(asked)).living(monkeypatch):
        (endpoint,) = ranks.served[0]
        assert ranks.served[1] == [], "one replica, however many nodes serve it"
        # The first part of the stand-in waits for no other, unlike that of vLLM.
        second, end = tmp_path / "told.json.1", time.monotonic() + 60
        while not (second.exists() and second.read_text().endswith("}")) and time.monotonic() < end:
            time.sleep(0.02)
        given = [told(), json.loads(second.read_text())]
    words = [dict(itertools.pairwise(each["argv"])) for each in given]
    assert endpoint.url == f"http://{words[0]['--host']}:{words[0]['--port']}"
    for number, each in enumerate(words):
        assert (each["--tensor-parallel-size"], each["--nnodes"], each["--node-rank"]) == ("4", "2", str(number))
        assert each["--distributed-executor-backend"] == "mp"
        assert each["--master-addr"] == words[0]["--host"] == given[number]["env"]["VLLM_HOST_IP"]
    assert words[0]["--master-port"] == words[1]["--master-port"] != words[0]["--port"]
    assert ["--headless" in each["argv"] for each in given] == [False, True]
    assert not {"--host", "--port"} & set(words[1])
    assert (endpoint.facts["tensor_parallel"], endpoint.facts["settings"]["nodes"]) == (4, 2)
    assert all_gone([*given[0]["pids"], *given[1]["pids"]])


def test_a_part_that_ends_says_why(
    spec: Any, told: Any, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first part would only wait in vain for it; port 9 is the discard service, which nobody runs."""
    store = HashStore()
    store.set("paceline/vllm/0", json.dumps(["127.0.0.1", 9, 9]))
    monkeypatch.setattr(torchrun, "launch_store", lambda _timeout_s: store)
    monkeypatch.setenv("STAND_IN", "ends")
    asked = spec(executable=program, tensor_parallel=2, nodes=2)
    asked = replace(asked, topology=replace(asked.topology, nodes=2))
    seat = replace(SEAT, rank=1, world_size=2)
    with pytest.raises(LaunchError, match=r"ended before it answered: .*no room for the cache"), vllm.open(asked, seat):
        pytest.fail("nobody answered")
    assert all_gone(json.loads((tmp_path / "told.json.1").read_text())["pids"])


@pytest.mark.parametrize(
    ("options", "nodes", "processes", "reason"),
    [
        ({"tensor_parallel": 4, "nodes": 3}, 3, 1, "tensor_parallel 4 does not divide over 3 nodes"),
        ({"tensor_parallel": 4, "nodes": 2}, 3, 1, "replicas of 2 nodes do not fit 3 nodes (topology.nodes)"),
        ({"tensor_parallel": 4, "nodes": 2}, 1, 1, "replicas of 2 nodes do not fit 1 nodes (topology.nodes)"),
        (
            {"tensor_parallel": 4, "nodes": 2},
            2,
            4,
            "a replica over several nodes has one rank on each, but there are 4 (topology.processes)",
        ),
    ],
)
def test_a_replica_that_does_not_fit_its_nodes_is_refused(
    spec: Any, options: dict[str, Any], nodes: int, processes: int, reason: str
) -> None:
    asked = spec(**options)
    topology = replace(asked.topology, nodes=nodes, processes_per_node=processes)
    assert vllm.check(replace(asked, topology=topology)) == reason


def test_the_key_is_in_no_command_line_and_no_text(
    spec: Any,
    told: Any,
    program: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    golden: object,
) -> None:
    monkeypatch.setenv("STAND_IN", "ends")
    with pytest.raises(LaunchError) as caught, vllm.open(spec(executable=program), SEAT):
        pytest.fail("it answered")
    given = told()
    key = given["env"]["VLLM_API_KEY"]
    assert len(key) >= 24
    assert not [word for word in given["argv"] if key in word]
    assert str(caught.value) == golden
    assert "ValueError" in str(caught.value)
    printed = capfd.readouterr().err
    assert printed == golden
    assert key not in printed
    assert all_gone(given["pids"])


def test_a_server_that_never_starts_is_reported_with_its_last_lines(tmp_path: Path, golden: object) -> None:
    waits = [sys.executable, "-c", "import time; time.sleep(600)"]
    with _server.started("vllm serve", waits, dict(os.environ), tmp_path / "log", "key") as server:
        with server.log.open("a") as log:
            log.write("OSError: tried again\n(APIServer pid=7) INFO 11-16 10:30:14 [loader.py:2] Loading weights\n\n")
        with pytest.raises(LaunchError) as caught:
            server.wait_until_ready("http://127.0.0.1:9", 0.1)
        assert str(caught.value) == golden
    assert server.process.returncode is not None


def test_a_port_that_somebody_took_meanwhile_is_exchanged(
    spec: Any, told: Any, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN", "taken")
    with vllm.open(spec(executable=program), SEAT) as (endpoint,):
        assert endpoint.url
    assert all_gone(told()["pids"])


def test_a_server_that_ended_during_a_load_is_reported(
    spec: Any, told: Any, program: str, capfd: pytest.CaptureFixture[str], golden: object
) -> None:
    """By its only rank as the end of the run; of several the client goes on with the others."""

    def kill(url: str) -> None:
        os.kill(told()["pids"][0], signal.SIGKILL)
        end = time.monotonic() + 60
        while _server._is_listening(url):
            assert time.monotonic() < end

    with (
        pytest.raises(LaunchError) as caught,
        vllm.open(spec(executable=program), SEAT) as (endpoint,),
    ):
        kill(endpoint.url)
    assert str(caught.value) == golden
    assert all_gone(told()["pids"])
    with vllm.open(spec(executable=program), replace(SEAT, world_size=2)) as (endpoint,):
        kill(endpoint.url)
    assert capfd.readouterr().err == golden


def test_a_killed_rank_leaves_no_server(spec: Any, told: Any, program: str, tmp_path: Path) -> None:
    """Killed, not ended: none of its own clean-up runs."""
    script = """
import json, sys, time
from paceline.models.hf_config import read_shape
from paceline.serving.engines import vllm
from paceline.contract import Seat, devices_per_rank, may_be_lost
from paceline.experiment.spec import RunSpec
spec = RunSpec.from_dict(json.loads(sys.argv[1]))
with vllm.open(spec, Seat(rank=0, local_rank=0, world_size=1, device="cpu")):
    print("ready", flush=True)
    time.sleep(600)
"""
    words = json.dumps(spec(executable=program).to_dict())
    with subprocess.Popen([sys.executable, "-c", script, words], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        os.kill(rank.pid, signal.SIGKILL)
    assert all_gone(told()["pids"])


def test_a_program_that_is_not_there_is_one_sentence(spec: Any, golden: object) -> None:
    with pytest.raises(UnsupportedError) as caught:
        vllm.open(spec(executable="no-such-vllm"), SEAT).__enter__()
    assert str(caught.value) == golden
    assert "no-such-vllm" in str(caught.value)
    assert "engine.executable" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel": 0},
        {"max_num_seqs": True},
        {"gpu_memory_utilization": 1.5},
        {"ready_s": 200},
        {"arguments": "--x"},
        {"arguments": ["--api-key=abc"]},
        {"arguments": ["--tensor_parallel_size", "2"]},
        {"port": 1},
    ],
)
def test_what_cannot_be_is_one_sentence(spec: Any, options: dict[str, Any], golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        vllm.check(spec(**options))
    assert str(caught.value) == golden
    assert "\n" not in str(caught.value)


def test_another_program_makes_another_run_without_telling_its_folder(spec: Any) -> None:
    """It is usually another build; how long it may take to start says nothing."""
    here, there = spec(executable="/a/vllm"), spec(executable="/b/vllm")
    assert here.cell != there.cell
    assert here.run_id != there.run_id
    told = [str(found.axes()["engine"]) for found in (here, there)]
    assert told[0] != told[1]
    assert not any("/" in text for text in told)
    patient = spec(executable="/a/vllm", ready_s=10)
    assert (here.cell, here.run_id, here.axes()) == (patient.cell, patient.run_id, patient.axes())
    assert spec(prefix_caching=True).cell != here.cell


def test_what_does_not_divide_is_refused(spec: Any, golden: object) -> None:
    assert vllm.check(spec(tensor_parallel=4)) is None
    assert vllm.check(spec(tensor_parallel=3)) == golden
    text = vllm.check(spec(model="tiny:gated=true"))
    assert text == golden
    assert "GPT-2" in text
    assert vllm.check(spec(model="tiny-llama:vocab=100")) == golden


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "phi3", "vocab_size": 32064},
        {"model_type": "mllama", "text_config": {"vocab_size": 32064}},
        {"model_type": "llama", "vocab_size": 32064, "quantization_config": {"bits": 4}},
    ],
)
def test_any_architecture_is_left_to_the_server(spec: Any, tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = spec(model=str(tmp_path), tensor_parallel=3)
    assert inference.check(asked) is None
    assert inference.outline(asked).endswith(f"; the architecture of {asked.model_text} is not known")
    assert vllm.model_folder(asked, tmp_path) == tmp_path
    assert max(max(p.token_ids or ()) for p in inference.prompts_of(asked)) < 32064


def test_a_directory_that_does_not_say_its_vocabulary_is_refused(spec: Any, tmp_path: Path, golden: object) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "whisper"}')
    with pytest.raises(RequestError) as caught:
        inference.check(spec(model=str(tmp_path)))
    assert str(caught.value) == golden
    assert "vocab_size" in str(caught.value)
    with pytest.raises(RequestError) as caught:
        inference.check(spec(model=str(tmp_path / "none")))
    assert str(caught.value) == golden
    assert "config.json" in str(caught.value)


def test_gpus_are_those_of_the_rank(golden: object) -> None:
    def own(local_rank: int, tensor_parallel: int, shown: str = "4,5,6,GPU-7") -> tuple[str, ...]:
        seat = Seat(rank=local_rank, local_rank=local_rank, world_size=2, device="cuda")
        return vllm.devices_of(seat, tensor_parallel, {"CUDA_VISIBLE_DEVICES": shown})

    assert (own(0, 2), own(1, 2), own(3, 1)) == (("4", "5"), ("6", "GPU-7"), ("GPU-7",))
    with pytest.raises(UnsupportedError) as caught:
        own(2, 2)
    assert str(caught.value) == golden


def test_the_server_does_not_take_the_rank_s_place_for_its_own(spec: Any) -> None:
    of_rank = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "gpu1", "TORCHELASTIC_RUN_ID": "x", "PATH": "/bin"}
    env = vllm.environment(spec(), (), "key", of_rank)
    assert set(env) & set(of_rank) == {"PATH"}
    assert env["HF_HUB_OFFLINE"] == "1"


def test_a_file_s_answers_end_where_the_model_ends_them(spec: Any, tmp_path: Path) -> None:
    known = str(tmp_path / "model")
    chosen = vllm.Options()
    assert vllm.ignores_eos(spec(model=known), chosen)
    assert not vllm.ignores_eos(spec(model=known, data="summaries:path=x"), chosen)
    assert vllm.ignores_eos(spec(data="summaries:path=x"), chosen)
    assert not vllm.ignores_eos(spec(), vllm.Options(ignore_eos=False))


def test_where_a_server_listens() -> None:
    interfaces = {"eth1": ["fe80::1", "10.1.0.5"], "eth0": ["192.0.2.4"]}
    assert _server.own_address(1, {"GLOO_SOCKET_IFNAME": "eth1"}, interfaces) == "127.0.0.1"
    assert _server.own_address(2, {"GLOO_SOCKET_IFNAME": "eth1"}, interfaces) == "10.1.0.5"
    assert _server.own_address(2, {"MASTER_ADDR": "127.0.0.1"}, interfaces) == "127.0.0.1"
    assert _server.url_of("::1", 80) == "http://[::1]:80"


@pytest.mark.parametrize("model", ["tiny", "tiny-llama", "tiny-llama:bias=true,tied=true,vocab=300"])
def test_a_named_shape_is_read_back_from_its_directory(tmp_path: Path, model: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    shape = load_shape(Choice.parse(model))
    directory.write(tmp_path, shape, "float32")
    assert replace(read_shape(tmp_path), name=shape.name) == shape
    reader = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = reader.encode("größer\n").ids
    assert ids == list("größer\n".encode())
    shown = [reader.decode([number]) for number in range(shape.vocab)]
    assert all(text and "\ufffd" not in text for text in shown)
    assert len(set(shown)) == len(reader.get_vocab()) == shape.vocab
    assert reader.decode(ids) == "".join(shown[number] for number in ids)


def test_a_mixture_is_one_in_its_configuration() -> None:
    told = directory.configuration(load_shape(Choice("mixtral-8x7b")), "bfloat16")
    assert (told["model_type"], told["num_local_experts"], told["num_experts_per_tok"]) == ("mixtral", 8, 2)
