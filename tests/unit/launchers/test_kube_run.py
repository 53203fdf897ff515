"""One run on a cluster whose answers are known: how long it may wait, what is taken over, what comes home."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline import depot, parcel, store
from paceline.errors import LaunchError
from paceline.launchers import _kube_run, kubernetes
from paceline.launchers._kube_client import Away, Cluster, Gone, Taken
from paceline.launchers._kube_logs import Logs
from paceline.launchers._kube_manifests import Resource
from paceline.plugins import Job
from paceline.records import Status
from paceline.spec import Choice, RunSpec

Make = Callable[..., RunSpec]
RUNNING = {"running": {}}
DONE = {"terminated": {"exitCode": 0, "reason": "Completed"}}


class KnownCluster(Cluster):
    """Objects in a dictionary, pods in a list, a log for each."""

    def __init__(self) -> None:
        super().__init__(context=None, namespace="bench", patience_s=1.0)
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.running: list[dict[str, Any]] = []
        self.logs: dict[str, list[list[bytes]]] = {}
        self.deleted: list[tuple[str, str]] = []
        self.told: list[dict[str, Any]] = []
        self.refusal: LaunchError | None = None

    def create(self, resource: Resource, manifest: Mapping[str, Any]) -> dict[str, Any]:
        key = (resource.plural, manifest["metadata"]["name"])
        if key in self.objects:
            raise Taken("there already")
        kept = json.loads(json.dumps(manifest))
        kept["metadata"]["uid"] = f"uid-{len(self.objects)}"
        self.objects[key] = kept
        return kept

    def read(self, resource: Resource, name: str) -> dict[str, Any] | None:
        return self.objects.get((resource.plural, name))

    def delete(self, resource: Resource, name: str) -> None:
        if self.refusal:
            raise self.refusal
        self.deleted.append((resource.plural, name))
        self.objects.pop((resource.plural, name), None)
        self.running = []

    def pods(self, selector: str) -> list[dict[str, Any]]:
        wanted = selector.partition("=")[2]
        return [pod for pod in self.running if pod["metadata"]["labels"] == wanted]

    def pod(self, name: str) -> dict[str, Any] | None:
        return next((pod for pod in self.running if pod["metadata"]["name"] == name), None)

    def events(self, uid: str) -> list[dict[str, Any]]:
        return self.told

    def log(self, pod: str, container: str, follow: bool) -> Iterator[bytes]:
        """Each reading in its turn; the last one again and again."""
        readings = self.logs.get(pod)
        if not readings:
            raise Gone("no such pod")
        yield from readings.pop(0) if len(readings) > 1 else readings[0]

    def start(self, job: str, state: Mapping[str, Any], nodes: int = 2, **status: Any) -> None:
        uid = self.objects["jobs", job]["metadata"]["uid"]
        for index in range(nodes):
            about = {"name": f"{job}-{index}-x", "labels": job, "uid": f"p{index}", "ownerReferences": [{"uid": uid}]}
            containers = [{"name": "node", "state": state}]
            self.running.append({"metadata": about, "status": {"containerStatuses": containers, **status}})

    def say(self, job: str, kind: str, **more: str) -> None:
        self.objects["jobs", job]["status"] = {"conditions": [{"type": kind, "status": "True", **more}]}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> KnownCluster:
    known = KnownCluster()
    monkeypatch.setattr(Cluster, "reach", lambda *_: known)
    monkeypatch.setattr(_kube_run, "LOOK_S", 0.0)
    monkeypatch.setattr(_kube_run, "EVENTS_S", 0.0)
    # What is removed goes through a client of its own, with a patience of its own.
    monkeypatch.setattr(_kube_run, "Cluster", lambda *_: known)
    return known


@pytest.fixture
def job(make_spec: Make, tmp_path: Path, request: pytest.FixtureRequest) -> Job:
    options = {"image": "paceline:1", "pending_s": 3600, **getattr(request, "param", {})}
    spec = dataclasses.replace(make_spec("ddp", 1, nodes=2), launcher=Choice("kubernetes", options))
    return kubernetes.prepare(spec, tmp_path)


def parcel_of(folder: Path, node: int) -> bytes:
    """The log of a node whose rank has ended well."""
    folder.mkdir()
    (folder / f"outcome-{node}.json").write_text("{}")
    (folder / f"samples-{node}.jsonl").write_text("{}\n" * 100)
    sender = parcel.Sender(folder, node)
    lines = [sender.hello({"host": f"n{node}"}), "a line of its own", *sender.changes(), *sender.farewell(0)]
    return "".join(f"{line}\n" for line in lines).encode()


def test_a_run_from_submission_to_removal(cluster: KnownCluster, job: Job, tmp_path: Path) -> None:
    handle = kubernetes.submit(job)
    name = handle["name"]
    assert json.loads(json.dumps(handle)) == handle, "it is written into job.json"
    owner = cluster.objects["services", name]["metadata"]["ownerReferences"][0]
    assert owner["uid"] == cluster.objects["jobs", name]["metadata"]["uid"]
    assert "0 of 2 pods" in str(kubernetes.poll(handle).waiting)
    cluster.start(name, DONE)
    for node in range(2):
        cluster.logs[f"{name}-{node}-x"] = [[parcel_of(tmp_path / f"n{node}", node)]]
    state = kubernetes.poll(handle)
    assert state.running
    assert state.waiting is None
    cluster.say(name, "Complete")
    assert kubernetes.poll(handle).exit_code == 0
    assert kubernetes.collect(handle, tmp_path) is None
    assert (tmp_path / "outcome-1.json").read_text() == "{}"
    assert (tmp_path / "log.txt").read_text() == "a line of its own\n" * 2
    kubernetes.cancel(handle)
    kubernetes.cancel(handle)
    assert not cluster.objects
    assert (tmp_path / "log.txt").read_text() == "a line of its own\n" * 2, "a second removal touches no result"


@pytest.mark.parametrize("job", [{"pending_s": 0.001}], indirect=True)
def test_pods_that_wait_too_long_end_the_run_with_the_reason(cluster: KnownCluster, job: Job) -> None:
    handle = kubernetes.submit(job)
    cluster.told = [{"type": "Warning", "reason": "FailedCreate", "message": "exceeded quota: gpus"}]
    while (state := kubernetes.poll(handle)).running:
        assert state.waiting
    assert state.status is Status.FAILED
    assert state.reason == "after 0.001 s 0 of 2 pods have started: FailedCreate: exceeded quota: gpus"
    kubernetes.cancel(handle)


def test_pods_that_never_came_are_the_reason_and_not_those_that_waited_for_them(
    cluster: KnownCluster, job: Job
) -> None:
    handle = kubernetes.submit(job)
    cluster.start(handle["name"], {"terminated": {"exitCode": 1}}, nodes=1)
    cluster.told = [{"type": "Warning", "reason": "FailedCreate", "message": "exceeded quota: gpus"}]
    assert kubernetes.poll(handle).waiting == "1 of 2 pods have started: FailedCreate: exceeded quota: gpus"
    cluster.say(handle["name"], "Failed", reason="BackoffLimitExceeded")
    state = kubernetes.poll(handle)
    assert state.status is Status.FAILED
    assert state.reason == "it ended while 1 of 2 pods have started: FailedCreate: exceeded quota: gpus"


def test_an_image_that_does_not_come_is_not_waited_for_as_long(
    cluster: KnownCluster, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_kube_run, "STUCK_S", 0.0)
    handle = kubernetes.submit(job)
    assert kubernetes.poll(handle).running
    cluster.start(handle["name"], {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}})
    while (state := kubernetes.poll(handle)).running:
        assert state.waiting
    assert "ImagePullBackOff: not found" in str(state.reason)
    kubernetes.cancel(handle)


@pytest.mark.parametrize("job", [{"pending_s": 0.001, "queue": "team-a"}], indirect=True)
def test_time_in_a_queue_is_not_pending_and_being_sent_back_is_preemption(cluster: KnownCluster, job: Job) -> None:
    handle = kubernetes.submit(job)
    main = cluster.objects["jobs", handle["name"]]
    assert "suspended" in str(kubernetes.poll(handle).waiting)
    main["spec"]["suspend"] = False
    cluster.start(handle["name"], RUNNING)
    assert kubernetes.poll(handle).waiting is None
    main["spec"]["suspend"] = True
    cluster.running = []
    state = kubernetes.poll(handle)
    assert state.status is Status.PREEMPTED
    assert "the queue has taken the job" in str(state.reason)
    kubernetes.cancel(handle)


def test_a_job_of_the_same_run_folder_is_taken_over_and_nothing_starts_twice(cluster: KnownCluster, job: Job) -> None:
    first = kubernetes.submit(job)
    del cluster.objects["services", first["name"]]
    assert kubernetes.submit(job) == first, "created once, however often the request is repeated"
    assert kubernetes.adopt(job, None) == first, "the controller died before it wrote the handle down"
    assert kubernetes.adopt(job, first) == first
    assert ("services", first["name"]) in cluster.objects, "what it had not come to is done now"
    cluster.objects["jobs", first["name"]]["metadata"]["deletionTimestamp"] = "now"
    assert kubernetes.adopt(job, first) is None


def test_a_job_of_somebody_else_is_not_touched(cluster: KnownCluster, job: Job) -> None:
    kubernetes.submit(job)
    known = cluster.objects["jobs", str(job.name)]
    known["metadata"]["annotations"]["paceline.dev/run-folder"] = "/elsewhere"
    assert kubernetes.adopt(job, None) is None
    with pytest.raises(LaunchError, match="belongs to /elsewhere"):
        kubernetes.submit(job)
    assert not cluster.deleted


def test_a_finished_job_of_an_earlier_attempt_makes_room(cluster: KnownCluster, job: Job) -> None:
    kubernetes.submit(job)
    cluster.say(str(job.name), "Failed")
    uid = cluster.objects["jobs", str(job.name)]["metadata"]["uid"]
    kubernetes.submit(job)
    assert ("jobs", str(job.name)) in cluster.deleted
    assert cluster.objects["jobs", str(job.name)].get("status") is None
    assert uid


def test_pods_of_an_earlier_job_of_the_same_name_do_not_count(cluster: KnownCluster, job: Job) -> None:
    handle = kubernetes.submit(job)
    cluster.start(handle["name"], RUNNING)
    for pod in cluster.running:
        pod["metadata"]["ownerReferences"] = [{"uid": "another"}]
    assert "0 of 2" in str(kubernetes.poll(handle).waiting)


def test_a_refused_log_ends_the_run_with_the_refusal(cluster: KnownCluster, job: Job) -> None:
    handle = kubernetes.submit(job)
    cluster.start(handle["name"], RUNNING)

    def refuse(*_: Any, **__: Any) -> Iterator[bytes]:
        raise LaunchError("not permitted to get pods/log")

    cluster.log = refuse  # type: ignore[method-assign]
    kubernetes.poll(handle)
    kubernetes._runs["bench", handle["name"]].logs.drain(30)
    with pytest.raises(LaunchError, match="pods/log"):
        kubernetes.poll(handle)


def test_a_removal_that_is_not_possible_now_is_told_in_the_log(cluster: KnownCluster, job: Job, tmp_path: Path) -> None:
    handle = kubernetes.submit(job)
    cluster.refusal = Away("the API server does not answer")
    kubernetes.cancel(handle)
    said = (tmp_path / "log.txt").read_text()
    assert "does not answer; the job may be there still: kubectl delete jobs" in said


def test_a_job_that_is_given_up_is_told_to_end_before_its_logs_are_closed(cluster: KnownCluster, job: Job) -> None:
    handle = kubernetes.submit(job)
    assert kubernetes.poll(handle).running
    assert "node 0 sent nothing" in str(kubernetes.collect(handle, Path(handle["run_dir"])))
    assert ("jobs", handle["name"]) in cluster.deleted


def broken(text: bytes, at: int) -> list[bytes]:
    """The beginning of a log, in pieces that end anywhere, until the connection breaks."""
    return [text[begin : begin + 7] for begin in range(0, at, 7)]


def test_a_stream_that_breaks_is_read_again_and_nothing_is_written_twice(cluster: KnownCluster, tmp_path: Path) -> None:
    text = parcel_of(tmp_path / "n0", 0)
    home = tmp_path / "home"
    home.mkdir()
    logs = Logs(cluster, home)
    cluster.logs["p"] = [broken(text, len(text) // 2), broken(text, 20), [text]]
    for _ in range(3):
        logs.read("p", follow=True)
    assert logs.receiver.missing(1) is None
    assert (home / "samples-0.jsonl").read_text() == "{}\n" * 100
    assert (home / "log.txt").read_text() == "a line of its own\n"


def test_a_rotated_log_is_known_and_its_end_is_enough(cluster: KnownCluster, tmp_path: Path) -> None:
    text = parcel_of(tmp_path / "n0", 0)
    home = tmp_path / "home"
    home.mkdir()
    logs = Logs(cluster, home)
    cluster.logs["p"] = [[text[: text.index(b" whole ") - 20]]]
    logs.read("p", follow=False)
    assert "its log ends early" in str(logs.receiver.missing(1))
    cluster.logs["p"] = [[text[text.index(b" part ") + 10 :]]]
    logs = Logs(cluster, home)
    logs.read("p", follow=False)
    assert logs.receiver.arrivals[0].gaps == 1
    assert logs.receiver.missing(1) is None, "all files came once more after the end"


@pytest.mark.parametrize("job", [{"results_claim": "results"}], indirect=True)
def test_what_a_log_lost_comes_from_the_claim(cluster: KnownCluster, job: Job, tmp_path: Path, make_spec: Make) -> None:
    claim = tmp_path / "claim"
    claim.mkdir()
    spec = make_spec("ddp", 1, nodes=2)
    depot.enter(claim, json.dumps(spec.to_dict()))
    assert store.read_spec(claim) == spec
    for node in range(2):
        (claim / f"outcome-{node}.json").write_text('{"of": "the claim"}')
    handle = kubernetes.submit(job)
    cluster.start(handle["name"], DONE)
    kubernetes.poll(handle)
    reader = handle["reader"]["metadata"]["name"]
    printed = ["".join(f"{line}\n" for line in depot.hand_over(claim, {"host": "n"})).encode()]
    create = cluster.create

    def created(resource: Resource, manifest: Mapping[str, Any]) -> dict[str, Any]:
        made = create(resource, manifest)
        cluster.start(reader, DONE, nodes=1)
        cluster.say(reader, "Complete")
        cluster.logs[f"{reader}-0-x"] = [printed]
        return made

    cluster.create = created  # type: ignore[method-assign]
    cluster.say(handle["name"], "Complete")
    kubernetes.poll(handle)
    assert kubernetes.collect(handle, tmp_path) is None
    assert json.loads((tmp_path / "outcome-1.json").read_text()) == {"of": "the claim"}
    assert ("jobs", reader) in cluster.deleted
    printed[0] = printed[0][:50]
    assert "the claim did not hold it whole" in str(kubernetes.collect(handle, tmp_path))
