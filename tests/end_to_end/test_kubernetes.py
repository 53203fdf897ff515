"""Runs on Kubernetes to their end, good or bad: each sealed with the right status and sentence, nothing left behind.

The cluster is the double of `testbed.kube_api`, whose pods are real processes; the controller has the rights of
`paceline cluster init` and no others. Runs with faults have ranks without torch and go on at the same time.
"""

from __future__ import annotations

import base64
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from testbed import EXHAUSTIVE, ONE_SUM
from testbed.kube_api import Cluster, kueue
from testbed.kube_api.jobs import index_of
from testbed.kube_api.kueue import LOCAL_QUEUES
from testbed.kube_api.resources import CLAIMS, JOBS, SECRETS, TRAIN_JOBS
from testbed.kube_api.sandbox import why_not
from testbed.kube_bed import Bed, open_bed
from testbed.kube_scenarios import (
    LONG,
    PENDING_S,
    Scenario,
    delete_job,
    delete_namespace,
    delete_pod,
    empty,
    judge,
    limit_jobs,
    limit_pods,
    moving,
    outlive_restart,
    played,
    rotate,
    without_namespace,
)
from testbed.observers import live_looks, seen_live
from testbed.plain_answers import plain_answer
from testbed.waiting import WAIT_S, until

from paceline.experiment.choices import Choice
from paceline.experiment.serving import Serving
from paceline.experiment.spec import RunSpec, Training
from paceline.launchers._job import is_past_setup
from paceline.launchers.kubernetes.cluster import CONTROLLER_ACCOUNT
from paceline.results import store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

# So many runs at a time: each has a handful of processes.
AT_ONCE = 6
# A queue lets its jobs wait for longer than pods may.
QUEUED_S = PENDING_S + 2.0


def evict(bed: Bed, name: str, spec: RunSpec) -> None:
    bed.cluster.evict(moving(bed, name, spec)[1])


def preempt(bed: Bed, name: str, spec: RunSpec) -> None:
    bed.cluster.preempt(moving(bed, name, spec)[1])


def lose_node(bed: Bed, name: str, spec: RunSpec) -> None:
    bed.cluster.lose_node(moving(bed, name, spec)[1]["spec"]["nodeName"])


def silence_node(bed: Bed, name: str, spec: RunSpec) -> None:
    bed.cluster.silence_node(moving(bed, name, spec)[1]["spec"]["nodeName"])


def fill_memory(bed: Bed, name: str, spec: RunSpec) -> None:
    bed.cluster.run_out_of_memory(moving(bed, name, spec)[1])


def forbid_jobs(bed: Bed, name: str) -> None:
    bed.cluster.forbid(name, CONTROLLER_ACCOUNT, "jobs", "create")


def forbid_logs(bed: Bed, name: str) -> None:
    bed.cluster.forbid(name, CONTROLLER_ACCOUNT, "pods/log", "get")


def hide_namespace(bed: Bed, name: str) -> None:
    bed.users[name] = (bed.users["admin"][0], "absent")
    bed.cluster.contexts(bed.kubeconfig, bed.users)


def take_image_away(bed: Bed, name: str) -> None:
    bed.cluster.kubelet.missing_images.add("registry.example/none:1")


def set_clock_back(bed: Bed, name: str) -> None:
    bed.cluster.kubelet.clock_offset_s[f"{name}-b"] = -7200.0


def add_queue(bed: Bed, name: str) -> None:
    spec = {"clusterQueue": "everybody", "stopPolicy": "Hold"}
    bed.cluster.state.create(LOCAL_QUEUES, name, {"metadata": {"name": "team"}, "spec": spec})


def admit_late(bed: Bed, name: str, spec: RunSpec) -> None:
    """Later than pods may wait for a node; what the queue says is shown meanwhile."""
    shown = bed.run_dir(spec) / store.JOB
    until(lambda: shown.exists() and "CreatedWorkload" in str(store.read_json(shown).get("waiting")), "a queue's word")
    time.sleep(QUEUED_S)
    kueue.hold(bed.cluster.state, name, "team", "None")


def admit_and_take_back(bed: Bed, name: str, spec: RunSpec) -> None:
    kueue.hold(bed.cluster.state, name, "team", "None")
    moving(bed, name, spec)
    kueue.hold(bed.cluster.state, name, "team")
    (job,) = bed.cluster.state.list(TRAIN_JOBS, name)
    kueue.take_back(bed.cluster.state, TRAIN_JOBS, job)


def add_claim(bed: Bed, name: str) -> None:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    bed.cluster.state.create(CLAIMS, name, {"metadata": {"name": "kept"}, "spec": spec, "status": {"phase": "Bound"}})


SCENARIOS = {
    "plain": Scenario("ok"),
    "jobset": Scenario("ok", options={"kind": "jobset"}),
    "trainjob": Scenario("ok", options={"kind": "trainjob"}),
    "claimed": Scenario("ok", options={"results_claim": "kept"}, before=add_claim),
    "killed": Scenario("failed", r"^rank 1 on killed-. was killed by signal 9", env={"LIGHT_FAULT": "die:1"}),
    "evicted": Scenario("preempted", r"pod .* on evicted-. was evicted: .*low on resource", LONG, meanwhile=evict),
    "again": Scenario(
        "ok",
        env={"LIGHT_S": "8"},
        options={"results_claim": "kept"},
        fields={"max_restarts": 1},
        before=add_claim,
        meanwhile=evict,
    ),
    "preempted": Scenario(
        "preempted", r"PreemptionByScheduler|DisruptionTarget", LONG, {"kind": "jobset"}, meanwhile=preempt
    ),
    "lost": Scenario("preempted", r"DeletionByPodGC|DisruptionTarget", LONG, {"kind": "trainjob"}, meanwhile=lose_node),
    "silent": Scenario("preempted", r"DeletionByTaintManager|DisruptionTarget", LONG, meanwhile=silence_node),
    "memory": Scenario("oom", r"pod .* on memory-. exceeded its memory limit: OOMKilled", LONG, meanwhile=fill_memory),
    "plucked": Scenario(
        "preempted",
        r"^pod paceline-\S+ on plucked-. was deleted while the job was running",
        LONG,
        {"kind": "jobset"},
        meanwhile=delete_pod,
    ),
    "dissolved": Scenario("failed", without_namespace("dissolved"), LONG, meanwhile=delete_namespace),
    "overdrawn": Scenario(
        "failed",
        r"after 4 s \d of 2 pods have started: FailedCreate: .*exceeded quota: team, requested: requests.cpu=1, "
        r"used: requests.cpu=1, limited: requests.cpu=1",
        options={"pending_s": PENDING_S},
        before=limit_pods,
    ),
    "uncounted": Scenario(
        "failed",
        r"cannot create jobs in namespace uncounted .*exceeded quota: team.*kubectl describe quota",
        before=limit_jobs,
    ),
    "queued": Scenario(
        "ok",
        options={"kind": "jobset", "queue": "team", "pending_s": PENDING_S},
        before=add_queue,
        meanwhile=admit_late,
    ),
    "reclaimed": Scenario(
        "preempted",
        r"the queue has suspended the job paceline-\S+ again: .*Stopped: Preempted to accommodate a workload",
        LONG,
        {"kind": "trainjob", "queue": "team"},
        before=add_queue,
        meanwhile=admit_and_take_back,
    ),
    "rotated": Scenario("ok", env={"LIGHT_S": "3"}, meanwhile=rotate),
    "deleted": Scenario("failed", r"the job paceline-.* is gone: somebody else deleted it", LONG, meanwhile=delete_job),
    "greedy": Scenario(
        "failed",
        r"after 4 s 0 of 2 pods have started: Unschedulable: 0/\d+ nodes are available: .*2 Insufficient cpu",
        options={"pending_s": PENDING_S, "cpu_request": 900.0, "cpu_limit": 900.0},
    ),
    "imageless": Scenario(
        "failed",
        r"after 4 s 0 of 2 pods have started: (ErrImagePull|ImagePullBackOff|Failed): .*none:1: not found",
        options={"pending_s": PENDING_S, "image": "registry.example/none:1"},
        before=take_image_away,
    ),
    "nowhere": Scenario("failed", r'in namespace absent \(namespaces "absent" not found\)', before=hide_namespace),
    "unable": Scenario(
        "failed",
        r"not permitted to create jobs in namespace unable .*kubectl auth can-i create jobs",
        before=forbid_jobs,
    ),
    "deaf": Scenario("failed", r"not permitted to get pods/log in namespace deaf", LONG, before=forbid_logs),
    "late": Scenario("timeout", r"did not end within 15 s; rank 0 was at step", LONG, fields={"timeout_s": 15.0}),
    "full": Scenario("failed", r"rank 0 on full-.: OSError: No space left on device", env={"LIGHT_FAULT": "full:0"}),
    "hung": Scenario(
        "hang",
        r"no progress for 10 s: rank 0 stopped at step 3 in forward",
        {"LIGHT_S": "1", "LIGHT_FAULT": "hang:0"},
        fields={"stall_s": 10.0},
    ),
    "cut": Scenario("failed", r"results are incomplete: node \d \(cut-.\): its log is incomplete"),
    "cut-kept": Scenario("ok", options={"results_claim": "kept"}, before=add_claim),
    "skewed": Scenario("ok", env={"LIGHT_S": "3"}, fields={"stall_s": 30.0}, before=set_clock_back),
}


# Each kind of job, and each way to end once. The others are more causes of the same ends.
USUAL = (
    "plain",
    "jobset",
    "trainjob",
    "claimed",
    "killed",
    "evicted",
    "queued",
    "greedy",
    "unable",
    "cut",
)
if not EXHAUSTIVE:
    SCENARIOS = {name: SCENARIOS[name] for name in USUAL}
REQUESTS = 40


def asked_by_rank_0(bed: Bed, name: str, spec: RunSpec) -> dict[int, Any]:
    """Pods by the numbers of their nodes, once rank 0 asks the replicas of both."""
    run_dir = bed.run_dir(spec)
    until(lambda: store.is_sealed(run_dir) or is_past_setup(run_dir), f"the first request of {name}")
    assert not store.is_sealed(run_dir), (run_dir / "status.json").read_text()
    return {index_of(pod): pod for pod in bed.pods(name)}


def lose_second_node(bed: Bed, name: str, spec: RunSpec) -> None:
    bed.cluster.lose_node(asked_by_rank_0(bed, name, spec)[1]["spec"]["nodeName"])


def delete_second_pod(bed: Bed, name: str, spec: RunSpec) -> None:
    bed.cluster.delete_pod(asked_by_rank_0(bed, name, spec)[1])


def mute_second_node(bed: Bed, name: str, spec: RunSpec) -> None:
    bed.cluster.mute_node(asked_by_rank_0(bed, name, spec)[1]["spec"]["nodeName"])


def evict_client(bed: Bed, name: str, spec: RunSpec) -> None:
    bed.cluster.evict(asked_by_rank_0(bed, name, spec)[0])


# Replicas on two nodes, whose ranks meet on the claim; the load does not end before the second node does.
SERVED: dict[str, Any] = {
    # No name is looked up while the double may be writing its hosts files; its pods share one network.
    "env": {"LIGHT_MEETING": "/results", "MASTER_ADDR": "127.0.0.1"},
    "options": {"results_claim": "kept"},
    "fields": {
        "workload": Choice("inference"),
        "engine": Choice("testbed.held", {"dies_after": 6}),
        "serving": Serving(
            scenario="concurrency", concurrency=4, requests=REQUESTS, max_tokens=4, request_timeout_s=120.0
        ),
        "training": Training(
            sequence_length=32,
            micro_batch=1,
            data=Choice("synthetic", {"prompt": "fixed", "prompt_mean": 6, "answer_mean": 4}),
        ),
    },
    "before": add_claim,
}
GONE = "is gone; rank 0 continues with the other replicas"
# What is said of the second node.
WITHOUT = {"bereft": GONE, "widowed": GONE, "unheard": "is silent: it has not ended 4 s after the client"}
BEREAVED = {
    "bereft": Scenario("ok", **SERVED, meanwhile=lose_second_node),
    "widowed": Scenario("ok", **SERVED, meanwhile=delete_second_pod),
    "unheard": Scenario("ok", **SERVED, meanwhile=mute_second_node),
    "headless": Scenario("preempted", **SERVED, meanwhile=evict_client),
}


if not EXHAUSTIVE:
    WITHOUT, BEREAVED = {"widowed": WITHOUT["widowed"]}, {"widowed": BEREAVED["widowed"]}


def lost_lines(pod: dict[str, Any]) -> re.Pattern[bytes] | None:
    """Of the runs that are to lose some, those with all files; a pod that reads them from the claim loses nothing."""
    cut = pod["metadata"]["namespace"].startswith("cut") and "-read" not in pod["metadata"]["name"]
    return re.compile(rb"^@paceline/1 \d+ \d+ (whole|part) ") if cut else None


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory, make_spec: Callable[..., RunSpec]) -> Iterator[Bed]:
    folder = tmp_path_factory.mktemp("kubernetes")
    with open_bed(Cluster(folder / "cluster", nodes=()), folder, make_spec) as opened:
        opened.cluster.kubelet.lossy = lost_lines
        yield opened


@pytest.fixture(scope="module")
def records(bed: Bed, request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Any]]]:
    yield from played(bed, {**BEREAVED, **SCENARIOS}, AT_ONCE, request.session.items)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_run_ends_with_the_right_word_and_leaves_nothing(
    name: str, bed: Bed, records: dict[str, Future[Any]]
) -> None:
    judge(records[name].result(), SCENARIOS[name])
    if name == "silent":
        left = until(lambda: len(bed.cluster.leftovers(name)) <= 2 and bed.cluster.leftovers(name), "one pod left")
        assert [word.partition("/")[0].partition(" ")[0] for word in left] == ["Pod", "folder"], left
        # Only its node could confirm its end, or somebody who deletes the node.
        bed.cluster.lose_node(bed.cluster.pods(name)[0]["spec"]["nodeName"])
    empty(bed, name)


def created_jobs(bed: Bed, name: str) -> list[str]:
    """Of every Job that ever was in a namespace."""
    told = [c for c in bed.cluster.state.history if c.resource == JOBS and c.how == "ADDED"]
    return [c.object["metadata"]["name"] for c in told if c.object["metadata"]["namespace"] == name]


def test_an_api_server_that_restarts_costs_nothing(bed: Bed) -> None:
    outlive_restart(bed, "restarted", env={"LIGHT_S": "3"})
    assert len(created_jobs(bed, "restarted")) == 1


@pytest.mark.exhaustive
def test_a_launch_after_an_outage_removes_the_job_that_the_outage_left(bed: Bed) -> None:
    """The API server was away for longer than the patience: the run failed and its job could not be deleted."""
    name = "outlasted"
    bed.prepare(name)
    spec = bed.spec_of(name, env={"LIGHT_S": "10"}, patience_s=4.0, kind="trainjob")
    with ThreadPoolExecutor(1) as aside:
        running = aside.submit(bed.run, spec)
        moving(bed, name, spec)
        bed.cluster.stop_api_server()
        record = running.result()
        assert record.status == "failed"
        assert "does not answer" in str(record.error)
        bed.cluster.start_api_server()
        (left,) = created_jobs(bed, name)
        assert len(bed.pods(name)) == 2, "its pods have noticed nothing"
        before = {pod["metadata"]["uid"] for pod in bed.pods(name)}
        record = bed.run(spec)
    assert (record.status, record.error) == ("ok", None)
    history = [c for c in bed.cluster.state.history if c.object["metadata"].get("namespace") == name]
    added = next(
        i
        for i, c in enumerate(history)
        if c.resource == JOBS and c.how == "ADDED" and c.object["metadata"]["name"] != left
    )
    gone = {c.object["metadata"]["uid"] for c in history[:added] if c.how == "DELETED"}
    assert before <= gone, "no pod of the earlier launch was left when the next one was submitted"
    empty(bed, name)


@pytest.mark.parametrize("name", WITHOUT)
def test_replicas_go_on_without_a_node_that_was_lost(name: str, bed: Bed, records: dict[str, Future[Any]]) -> None:
    record = records[name].result()
    assert sorted(request.sample for request in record.requests) == list(range(REQUESTS)), record.error
    assert {request.error for request in record.requests} == {None}
    assert [replica.died_ns is not None for replica in record.replicas] == [False, True]
    assert record.replicas[1].reassigned >= 1
    assert record.lost_nodes == (1,)
    assert [(outcome.rank, outcome.status) for outcome in record.outcomes] == [(0, "ok")]
    # A client that was late on a busy machine says so itself, and only that.
    assert record.status == "ok" or str(record.error).startswith("client: "), record.error
    log = (bed.run_dir(record.spec) / "log.txt").read_text()
    assert re.search(rf"paceline: node 1 \({name}-.\) {WITHOUT[name]}", log), log
    if name == "unheard":
        # Only its node could confirm its end, or somebody who deletes the node.
        (left,) = bed.cluster.pods(name)
        bed.cluster.lose_node(left["spec"]["nodeName"])
    empty(bed, name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["headless"])
def test_nothing_goes_on_without_the_node_of_the_client(name: str, bed: Bed, records: dict[str, Future[Any]]) -> None:
    record = records[name].result()
    assert record.status == "preempted", record.error
    assert re.search(r"pod .* on headless-. was evicted: .*low on resource", record.error), record.error
    assert record.lost_nodes == ()
    empty(bed, name)


@pytest.fixture
def controller(bed: Bed, environment: Callable[..., dict[str, str]]) -> Iterator[Callable[[RunSpec], Any]]:
    """A controller in a process of its own; one that is left over is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(spec: RunSpec) -> subprocess.Popen[str]:
        file = bed.folder / f"{spec.experiment}.json"
        file.write_text(json.dumps(spec.to_dict()))
        child = subprocess.Popen(
            [sys.executable, "-m", "testbed.kube_bed", str(bed.folder / "out"), str(file)],
            env=environment(KUBECONFIG=str(bed.kubeconfig)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # type: ignore[arg-type,return-value]
        )
        started.append(child)
        return child

    yield start
    for child in started:
        if child.poll() is None:
            child.kill()
        child.communicate()


def test_a_controller_that_was_killed_finds_its_job_again(bed: Bed, controller: Callable[[RunSpec], Any]) -> None:
    name = "orphaned"
    bed.prepare(name)
    spec = bed.spec_of(name, env={"LIGHT_S": "8"})
    child = controller(spec)
    before = {pod["metadata"]["uid"] for pod in moving(bed, name, spec)}
    child.kill()
    child.wait()
    assert {pod["metadata"]["uid"] for pod in bed.pods(name)} == before, "the job outlives its controller"
    # As after a power cut: for a moment, the next controller has no rights on a server that starts.
    bed.cluster.stop_api_server()
    bed.cluster.start_api_server()
    record = bed.run(spec)
    assert (record.status, record.error) == ("ok", None)
    assert {sample.rank for sample in record.steps} == {0, 1}
    assert len(record.steps) == 2 * spec.steps
    assert len(created_jobs(bed, name)) == 1, "nothing is started twice"
    empty(bed, name)


@pytest.mark.exhaustive
def test_ctrl_c_removes_everything_and_keeps_what_was_measured(bed: Bed, controller: Callable[[RunSpec], Any]) -> None:
    name = "stopped"
    bed.prepare(name)
    spec = bed.spec_of(name, env=LONG)
    child = controller(spec)
    moving(bed, name, spec)
    child.send_signal(signal.SIGINT)
    said, _ = child.communicate(timeout=WAIT_S)
    assert child.returncode == 130, said
    assert not store.is_sealed(bed.run_dir(spec))
    assert bed.cluster.pods(name) == []
    empty(bed, name)


@pytest.fixture
def campaign_in_pods(bed: Bed, experiment_file: Callable[..., Path], paceline: Any) -> Callable[..., Path]:
    """A campaign of real ranks in a namespace of its name, started by torchrun or this runner in two pods that find
    each other by name, with a secret that must stay one; the folder with its results."""

    def run(name: str, matrix: dict[str, Any], runner: str | None = None, **base: Any) -> Path:
        secret = "hf_abcdefghijklmnopqrstuvwxyz012345"
        bed.prepare(name)
        bed.cluster.state.create(SECRETS, name, {"metadata": {"name": "hub"}, "data": {"token": b64(secret)}})
        launcher = {
            "secret_env": {"HF_TOKEN": {"secret": "hub", "key": "token"}},
            "env": {"HOSTILE": "'\"; echo $(HOME) $(touch /tmp/x) #\n"},
        }
        folder = bed.campaign((experiment_file, paceline), name, matrix, launcher, runner, **base)
        for path in folder.parent.rglob("*"):
            assert not path.is_file() or secret.encode() not in path.read_bytes(), path
        until(lambda: not bed.cluster.leftovers(name) or bed.cluster.leftovers(name) == ["Secret/hub"], "the end")
        return folder

    return run


def test_real_ranks_in_two_pods_meet_and_are_reported(bed: Bed, campaign_in_pods: Callable[..., Path]) -> None:
    with live_looks(bed.folder / "campaign-summed") as looks:
        folder = campaign_in_pods("summed", {"workload": [ONE_SUM]}, runner="testbed.bare", global_batch=2)
    assert seen_live(looks) == {"summed-a", "summed-b"}
    ((record,), skipped) = store.read_runs(folder)
    assert not skipped
    assert (record.status, record.error) == ("ok", None)
    assert {outcome.host for outcome in record.outcomes} == {"summed-a", "summed-b"}
    assert {(row.rank, row.operation, row.wrong) for row in record.collectives} == {
        (r, "all_reduce", 0) for r in (0, 1)
    }
    assert [run["status"] for run in json.loads((folder / "report.json").read_text())["runs"]] == ["ok"]


@pytest.mark.exhaustive
def test_a_certified_campaign_on_two_pods_ends_with_a_report(
    campaign_in_pods: Callable[..., Path], smaller: dict[str, Any]
) -> None:
    folder = campaign_in_pods("certified", {"strategy": ["ddp"]}, **smaller)
    records, skipped = store.read_runs(folder)
    assert not skipped
    assert {(str(r.spec.strategy), r.status) for r in records} == {("None", "ok"), ("ddp", "ok")}
    trained = next(r for r in records if r.spec.strategy is not None)
    assert {outcome.host for outcome in trained.outcomes} == {"certified-a", "certified-b"}
    report = json.loads((folder / "report.json").read_text())
    assert all(run["certificate"]["valid"] for run in report["runs"] if run.get("certificate"))


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("transformers") is None, reason="pip install 'paceline[finetune]'")
def test_a_replica_over_two_pods_answers_as_one_process_does(campaign_in_pods: Callable[..., Path]) -> None:
    """Tensor parallelism over two nodes: each pod has half of every layer, and the first one answers."""
    asked = {"workload": "inference", "model": "tiny-llama", "precision": "fp32", "scenario": "concurrency"}
    asked |= {"data": "synthetic:prompt=uniform,prompt_mean=9,answer_mean=6", "requests": 12, "max_tokens": 6}
    asked |= {"concurrency": 3, "warmup_requests": 1, "request_timeout_s": 120, "keeps_text": True, "stall_s": 200}
    folder = campaign_in_pods("spread", {"engine": ["transformers:tensor_parallel=2,nodes=2,max_batch=4"]}, **asked)
    ((record,), _) = store.read_runs(folder)
    assert {outcome.host for outcome in record.outcomes} == {"spread-a", "spread-b"}
    assert [replica.rank for replica in record.replicas] == [0], "one replica, which the client reaches in its own pod"
    assert sorted(request.sample for request in record.requests) == list(range(12))
    for request in record.requests[:4]:
        assert request.text == plain_answer(record, request.sample)[1]


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
