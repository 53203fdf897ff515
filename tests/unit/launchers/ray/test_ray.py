"""The launcher ray without a cluster: its request, its options, and what its driver concludes from what Ray says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.contract import Job
from paceline.errors import LaunchError, RequestError
from paceline.experiment.choices import Choice
from paceline.experiment.plugins import Offer
from paceline.experiment.serving import Serving
from paceline.experiment.spec import RunSpec
from paceline.host import environment
from paceline.launchers import ray
from paceline.launchers.node import log_transport
from paceline.launchers.ray import cluster, driver
from paceline.launchers.ray.cluster import Request
from paceline.results import store
from paceline.results.records import Status

GOLDEN = Path(__file__).parents[3] / "golden" / "launchers" / "ray.txt"
Make = Callable[..., RunSpec]
HOSTILE = "a'b\"c\n$(touch x)`id`"


def with_options(spec: RunSpec, **options: Any) -> RunSpec:
    import dataclasses

    return dataclasses.replace(spec, launcher=Choice("ray", options))


def request(spec: RunSpec, run_dir: Path = Path("RUN_DIR")) -> Request:
    return Request(**json.loads(ray.prepare(spec, run_dir).files["request.json"]))


# --- the request ---


def test_the_text_of_a_job_is_the_golden_one(make_spec: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "host")
    monkeypatch.setattr(Path, "absolute", lambda self: Path("/results") / self)
    specs = {
        "two CPU nodes": with_options(make_spec("ddp", 1, nodes=2)),
        "two nodes of eight GPUs, from outside": with_options(
            make_spec("fsdp2", 8, nodes=2, device="cuda"),
            address="ray://head:10001",
            cpus=4,
            resources={"rack": 0.5},
            env={"NCCL_DEBUG": "WARN"},
        ),
    }
    jobs = {name: str(ray.prepare(spec, Path("RUN_DIR"))) for name, spec in specs.items()}
    texts = "".join(f"# {name}\n{job.replace(sys.executable, 'PYTHON')}\n" for name, job in jobs.items())
    if os.environ.get("PACELINE_UPDATE_GOLDEN") == "1":
        GOLDEN.write_text(texts)
    assert texts == GOLDEN.read_text(), "set PACELINE_UPDATE_GOLDEN=1 if the change is meant"


def test_a_bundle_is_a_node(make_spec: Make) -> None:
    asked = request(with_options(make_spec("ddp", 8, nodes=2, device="cuda"), cpus=2))
    assert asked.bundle == {"CPU": 16, "GPU": 8}
    assert asked.world_size == 16


def test_preparing_changes_nothing(make_spec: Make, tmp_path: Path) -> None:
    spec = with_options(make_spec())
    assert ray.prepare(spec, tmp_path / "run") == ray.prepare(spec, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_hostile_text_stays_data(make_spec: Make) -> None:
    asked = request(with_options(make_spec(), env={"X": HOSTILE}, scratch=f"/{HOSTILE}"))
    assert asked.env["X"] == HOSTILE
    assert asked.scratch == f"/{HOSTILE}"


@pytest.mark.parametrize(
    "options",
    [
        {"address": "head"},
        {"address": "http://head:1"},
        {"placement": "spread"},
        {"cpus": 0},
        {"gpus": -1},
        {"threads": 0},
        {"port": 70000},
        {"pending_s": 0},
        {"scratch": "here"},
        {"resources": ["rack"]},
        {"resources": {"GPU": 1}},
        {"resources": {"rack": "one"}},
        {"env": "A=1"},
        {"env": {"A B": "1"}},
        {"env": {"A": [1]}},
        {"where": "x"},
    ],
)
def test_a_wrong_option_is_one_sentence(make_spec: Make, options: dict[str, Any], golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        ray.check(with_options(make_spec(), **options))
    assert str(caught.value) == golden
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"), [("HF_TOKEN", "abc"), ("X", "hf_abcdefghijklmnop"), ("X", "aB3" * 12), ("MY_PASSWORD", "x")]
)
def test_a_secret_is_refused_and_not_repeated(make_spec: Make, name: str, value: str, golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        ray.check(with_options(make_spec(), env={name: value}))
    assert str(caught.value) == golden
    assert repr(value) not in str(caught.value)
    assert not environment.is_secret("NCCL_SOCKET_IFNAME", "eth0")


def test_the_offer_is_what_the_options_say() -> None:
    assert ray.offer(Choice("ray")) == Offer(device="cuda", processes=1)
    assert ray.offer(Choice("ray", {"gpus": 8})) == Offer(device="cuda", processes=8)
    assert ray.offer(Choice("ray", {"gpus": 0})) == Offer(device="cpu", processes=1)


def test_a_missing_package_names_its_installation(
    make_spec: Make, monkeypatch: pytest.MonkeyPatch, golden: object
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = ray.check(with_options(make_spec()))
    assert text == golden
    assert text == golden


# --- the driver, as a process that is none ---


def driver_that_says(tmp_path: Path, *lines: str, then: str = "sys.stdin.read()") -> Any:
    said = "".join(line + "\n" for line in lines)
    program = f"import sys; sys.stdin.readline(); sys.stdout.write({said!r}); sys.stdout.flush(); {then}"
    job = Job(argv=(sys.executable, "-c", program), files={"request.json": "{}"}, log=str(tmp_path / "log.txt"))
    return ray.submit(job)


def polled(handle: Any, until: Callable[[Any], bool]) -> Any:
    import time

    for _ in range(600):
        state = ray.poll(handle)
        if until(state):
            return state
        time.sleep(0.05)
    raise AssertionError(state)


def test_states_of_a_driver_are_states_of_the_job(tmp_path: Path) -> None:
    handle = driver_that_says(tmp_path, '{"waiting": "no room"}')
    assert polled(handle, lambda s: s.waiting == "no room").running
    ray.cancel(handle)
    handle = driver_that_says(tmp_path, '{"waiting": "no room"}', '{"running": true}')
    assert polled(handle, lambda s: s.waiting is None).running
    ray.cancel(handle)
    ray.cancel(handle)
    assert not ray.poll(handle).running, "gone, and asked again"


def test_an_end_carries_status_and_what_is_missing(tmp_path: Path) -> None:
    end = {"ended": 1, "status": "preempted", "reason": "taken away", "missing": "node 1 sent nothing", "lost": [2]}
    handle = driver_that_says(tmp_path, json.dumps(end), then="pass")
    state = polled(handle, lambda s: not s.running)
    assert (state.exit_code, state.status, state.reason, state.lost) == (1, Status.PREEMPTED, "taken away", (2,))
    assert ray.collect(handle, tmp_path) == "node 1 sent nothing"
    ray.cancel(handle)


def test_a_refusal_is_raised(tmp_path: Path, golden: object) -> None:
    handle = driver_that_says(tmp_path, '{"refused": "no Ray here"}', then="pass")
    with pytest.raises(LaunchError) as caught:
        polled(handle, lambda s: False)
    assert str(caught.value) == golden
    ray.cancel(handle)


def test_a_driver_that_dies_is_a_failure_with_its_log(tmp_path: Path, golden: object) -> None:
    handle = driver_that_says(tmp_path, then="sys.exit(3)")
    state = polled(handle, lambda s: not s.running)
    assert state.status is Status.FAILED
    assert state.reason == golden
    assert f"{tmp_path / 'log.txt'}" in state.reason
    ray.cancel(handle)


def test_the_launcher_never_imports_ray() -> None:
    code = "import sys; import paceline.launchers.ray; print('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


# --- what Ray says ---

NODES = [
    {"Alive": True, "NodeName": "a", "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 8.0, "memory": 1e9}},
    {"Alive": True, "NodeName": "b", "NodeManagerAddress": "10.0.0.2", "Resources": {"CPU": 8.0, "GPU": 4.0}},
    {"Alive": False, "NodeName": "c", "NodeManagerAddress": "10.0.0.3", "Resources": {"CPU": 8.0, "GPU": 4.0}},
]


def test_what_can_never_be_placed_names_what_is_there(make_spec: Make, golden: object) -> None:
    asked = request(with_options(make_spec("ddp", 4, nodes=2, device="cuda")))
    text = cluster.shortage(asked, NODES, {})
    assert text == golden
    assert "STRICT_SPREAD" in text


def test_what_others_use_now_is_another_sentence(make_spec: Make, golden: object) -> None:
    asked = request(with_options(make_spec("ddp", 4, nodes=2)))
    said = cluster.shortage(asked, NODES, {"CPU": 3.0, "node:10.0.0.1": 1.0})
    assert said == golden


def test_the_name_of_a_node() -> None:
    named = {"NodeName": "gpu-7", "NodeManagerAddress": "10.0.0.1", "NodeManagerHostname": "pod-x"}
    assert cluster.node_name(named) == "gpu-7"
    assert cluster.node_name({**named, "NodeName": "10.0.0.1"}) == "pod-x"


MISMATCH = """Version mismatch: The cluster was started with:
    Ray: 2.60.0
    Python: 3.12.3
This process on node 10.0.0.1 was started with:
    Ray: 2.40.0
    Python: 3.11.9
"""


@pytest.mark.parametrize(
    "words",
    [
        MISMATCH,
        "Could not find any running Ray instance. Please",
        "Can't find a `node_ip_address.json`\n of the raylet",
        "something\n else",
    ],
)
def test_each_refusal_is_one_sentence(words: str, golden: object) -> None:
    said = cluster.refusal("h:1", words)
    assert said == golden
    assert "\n" not in said


# --- what the driver concludes ---


def member(rank: int, **more: Any) -> driver.Member:
    facts = {
        "version": "0.1.0",
        "has_scratch": True,
        "address": "10.0.0.1",
        "port": 4000,
        "gpus": [],
        "interface": None,
    }
    found = driver.Member(rank, rank // 2, actor=None, name=f"n{rank // 2}")
    found.facts = facts | more.pop("facts", {})
    for key, value in more.items():
        setattr(found, key, value)
    return found


def test_ranks_see_the_gpus_of_their_node_in_order(make_spec: Make, tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text("{}")
    asked = request(with_options(make_spec("ddp", 2, nodes=2, device="cuda")), tmp_path)
    gpus = [["3"], ["1"], ["0"], ["2"]]
    crew = [member(rank, facts={"gpus": gpus[rank], "interface": "eth1"}) for rank in range(4)]
    seats = list(driver.seats(asked, crew))
    assert [seat["CUDA_VISIBLE_DEVICES"] for seat in seats] == ["3,1", "3,1", "0,2", "0,2"]
    assert [seat["LOCAL_RANK"] for seat in seats] == ["0", "1", "0", "1"]
    assert {seat["PACELINE_MASTER"] for seat in seats} == {"10.0.0.1"}
    assert {seat["GLOO_SOCKET_IFNAME"] for seat in seats} == {"eth1"}


def test_what_the_user_sets_wins(make_spec: Make, tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text("{}")
    spec = with_options(make_spec("ddp", 1), env={"NCCL_SOCKET_IFNAME": "ib0"})
    (seat,) = driver.seats(request(spec, tmp_path), [member(0, facts={"interface": "eth1"})])
    assert seat["NCCL_SOCKET_IFNAME"] == "ib0"


def test_ranks_of_one_node_use_loopback(make_spec: Make, tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text("{}")
    crew = [member(rank, facts={"interface": "eth1"}) for rank in range(2)]
    seats = list(driver.seats(request(with_options(make_spec("ddp", 2)), tmp_path), crew))
    assert {seat["PACELINE_MASTER"] for seat in seats} == {"127.0.0.1"}
    assert {seat["GLOO_SOCKET_IFNAME"] for seat in seats} == {"lo"}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"version": None}, "the Ray node n0 does not have Paceline"),
        ({"version": "0.0.9"}, "the Ray node n0 has Paceline 0.0.9, this controller"),
        ({"has_scratch": False}, "has no directory '/data'"),
        ({}, None),
    ],
)
def test_a_node_that_cannot_do_the_work_is_refused(make_spec: Make, facts: dict[str, Any], words: str | None) -> None:
    asked = request(with_options(make_spec(), scratch="/data"))
    said = driver.unfit(asked, member(0, facts={"version": asked.version} | facts))
    assert said is None if words is None else words in (said or "")


def test_who_is_to_blame(tmp_path: Path, golden: object) -> None:
    (tmp_path / "outcome-0.json").write_text("{}")
    noticed, killed = member(0, code=1), member(1, code=-9)
    end = driver.conclusion([noticed, killed], tmp_path, None)
    assert end["status"] is Status.FAILED
    assert end["reason"] == golden
    assert "n0" in end["reason"]
    lost = member(1, lost=(Status.PREEMPTED, "its Ray node was pre-empted"))
    assert driver.conclusion([noticed, lost], tmp_path, None)["status"] is Status.PREEMPTED
    spoken = driver.conclusion([noticed, member(1, code=0)], tmp_path, None)
    assert (spoken["ended"], spoken["status"]) == (1, None), "the rank's own word is enough"
    assert driver.conclusion([member(0, code=0)], tmp_path, "half")["missing"] == "half"


# --- replicas that the job goes on without ---


def served(make_spec: Make, run_dir: Path, phase: str) -> Request:
    """Two nodes of two ranks, rank 0 at this phase."""
    serving = {"workload": "inference", "serving": Serving(), "engine": Choice("vllm")}
    asked = request(with_options(make_spec(None, 2, nodes=2, **serving)), run_dir)
    store.ProgressFile(run_dir, 0).mark(0, phase)
    return asked


def spared(asked: Request, members: list[driver.Member]) -> list[int]:
    with (Path(asked.run_dir) / "log.txt").open("a") as log:
        driver.spare(asked, members, driver.Inbox(log_transport.Receiver(Path(asked.run_dir)), log))
    return [each.rank for each in members if each.is_spared]


def test_replicas_on_other_nodes_may_be_lost_once_rank_0_asks(make_spec: Make, tmp_path: Path, golden: object) -> None:
    asked = served(make_spec, tmp_path, "warmup")
    gone = (Status.FAILED, "rank 3 on n1: its node has left the Ray cluster")
    crew = [member(0, code=0), member(1, code=0), member(2, code=-9), member(3, lost=gone)]
    assert spared(asked, crew) == [2, 3]
    assert spared(asked, crew) == [2, 3], "and are told of once"
    told = (tmp_path / "log.txt").read_text().splitlines()
    assert told == golden
    end = driver.conclusion(crew, tmp_path, None)
    assert end == {"ended": 0, "status": None, "reason": None, "missing": None, "lost": [1]}


def test_nobody_is_spared_on_the_node_of_the_client_or_before_it_asks(
    make_spec: Make, tmp_path: Path, golden: object
) -> None:
    crew = [member(0), member(1, code=-9), member(2), member(3, code=-9)]
    assert spared(served(make_spec, tmp_path, "setup"), crew) == []
    assert spared(served(make_spec, tmp_path, "warmup"), crew) == [3]
    text = driver.conclusion(crew, tmp_path, None)["reason"]
    assert text == golden
    assert "n0" in text


def test_a_rank_that_says_what_went_wrong_is_not_spared(make_spec: Make, tmp_path: Path, make_outcome: Make) -> None:
    asked = served(make_spec, tmp_path, "warmup")
    store.write_outcome(tmp_path, make_outcome(2, Status.OOM))
    assert spared(asked, [member(0), member(1), member(2, code=1), member(3, code=-9)]) == [3]


def test_a_training_run_spares_nobody(make_spec: Make, tmp_path: Path) -> None:
    asked = request(with_options(make_spec("ddp", 2, nodes=2)), tmp_path)
    store.ProgressFile(tmp_path, 0).mark(3, "forward")
    assert spared(asked, [member(0), member(1), member(2, code=-9), member(3)]) == []
