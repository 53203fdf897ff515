"""One run on a cluster whose answers are known: how long it may wait, what is taken over, what comes home."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from testbed.known_cluster import DONE, RUNNING, KnownCluster, parcel_of

from paceline.contract import Job
from paceline.errors import LaunchError
from paceline.experiment.choices import Choice
from paceline.experiment.spec import RunSpec
from paceline.launchers import _job, kubernetes
from paceline.launchers.kubernetes import run
from paceline.launchers.kubernetes.client import Cluster, Unavailable
from paceline.launchers.kubernetes.manifests import Resource
from paceline.launchers.node import log_transport
from paceline.results import attempts, store
from paceline.results.records import Status

Make = Callable[..., RunSpec]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> KnownCluster:
    known = KnownCluster()
    monkeypatch.setattr(Cluster, "reach", lambda *_: known)
    monkeypatch.setattr(run, "POLL_S", 0.0)
    monkeypatch.setattr(run, "EVENTS_S", 0.0)
    # What is removed goes through a client of its own, with a patience of its own.
    monkeypatch.setattr(run, "Cluster", lambda *_: known)
    return known


@pytest.fixture
def job(make_spec: Make, tmp_path: Path, request: pytest.FixtureRequest) -> Job:
    options = {"image": "paceline:1", "pending_s": 3600, **getattr(request, "param", {})}
    spec = dataclasses.replace(make_spec("ddp", 1, nodes=2), launcher=Choice("kubernetes", options))
    return kubernetes.prepare(spec, tmp_path)


def test_a_run_from_submission_to_removal(cluster: KnownCluster, job: Job, tmp_path: Path, golden: object) -> None:
    handle = kubernetes.submit(job)
    name = handle["name"]
    assert json.loads(json.dumps(handle)) == handle, "it is written into job.json"
    owner = cluster.objects["services", name]["metadata"]["ownerReferences"][0]
    assert owner["uid"] == cluster.objects["jobs", name]["metadata"]["uid"]
    assert str(kubernetes.poll(handle).waiting) == golden
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
def test_pods_that_wait_too_long_end_the_run_with_the_reason(cluster: KnownCluster, job: Job, golden: object) -> None:
    handle = kubernetes.submit(job)
    cluster.told = [{"type": "Warning", "reason": "FailedCreate", "message": "exceeded quota: gpus"}]
    while (state := kubernetes.poll(handle)).running:
        assert state.waiting
    assert state.status is Status.FAILED
    assert state.reason == golden
    assert "0.001" in state.reason
    assert "FailedCreate" in state.reason
    kubernetes.cancel(handle)


def test_pods_that_never_came_are_the_reason_and_not_those_that_waited_for_them(
    cluster: KnownCluster, job: Job, golden: object
) -> None:
    handle = kubernetes.submit(job)
    cluster.start(handle["name"], {"terminated": {"exitCode": 1}}, nodes=1)
    cluster.told = [{"type": "Warning", "reason": "FailedCreate", "message": "exceeded quota: gpus"}]
    text = kubernetes.poll(handle).waiting
    assert text == golden
    assert "FailedCreate" in text
    cluster.say(handle["name"], "Failed", reason="BackoffLimitExceeded")
    state = kubernetes.poll(handle)
    assert state.status is Status.FAILED
    assert state.reason == golden
    assert "FailedCreate" in state.reason


def test_an_image_that_does_not_come_is_not_waited_for_as_long(
    cluster: KnownCluster, job: Job, monkeypatch: pytest.MonkeyPatch, golden: object
) -> None:
    monkeypatch.setattr(run, "STUCK_S", 0.0)
    handle = kubernetes.submit(job)
    assert kubernetes.poll(handle).running
    cluster.start(handle["name"], {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}})
    while (state := kubernetes.poll(handle)).running:
        assert state.waiting
    assert str(state.reason) == golden
    assert "ImagePullBackOff" in str(state.reason)
    kubernetes.cancel(handle)


@pytest.mark.parametrize("job", [{"pending_s": 0.001, "queue": "team-a"}], indirect=True)
def test_time_in_a_queue_is_not_pending_and_being_sent_back_is_preemption(
    cluster: KnownCluster, job: Job, golden: object
) -> None:
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
    assert str(state.reason) == golden
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


def test_a_job_of_somebody_else_is_not_touched(cluster: KnownCluster, job: Job, golden: object) -> None:
    kubernetes.submit(job)
    known = cluster.objects["jobs", str(job.name)]
    known["metadata"]["annotations"] = {"paceline.dev/run-folder": "/elsewhere"}
    assert kubernetes.adopt(job, None) is None
    with pytest.raises(LaunchError) as caught:
        kubernetes.submit(job)
    assert str(caught.value) == golden
    assert not cluster.deleted


def test_a_finished_job_of_an_earlier_attempt_makes_room(cluster: KnownCluster, job: Job) -> None:
    kubernetes.submit(job)
    cluster.say(str(job.name), "Failed")
    uid = cluster.objects["jobs", str(job.name)]["metadata"]["uid"]
    kubernetes.submit(job)
    assert ("jobs", str(job.name)) in cluster.deleted
    assert cluster.objects["jobs", str(job.name)].get("status") is None
    assert uid


def test_a_controller_elsewhere_finds_the_job_by_what_was_written_down(
    cluster: KnownCluster, job: Job, make_spec: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = kubernetes.submit(job)
    monkeypatch.setattr(_job.socket, "gethostname", lambda: "another-host")
    monkeypatch.setattr(kubernetes, "job_name", lambda *_: "paceline-named-otherwise")
    spec = dataclasses.replace(make_spec("ddp", 1, nodes=2), launcher=Choice("kubernetes", {"image": "paceline:1"}))
    elsewhere = kubernetes.prepare(spec, tmp_path / "mounted")
    assert kubernetes.adopt(elsewhere, first) == {**first, "run_dir": str(tmp_path / "mounted")}
    assert list(cluster.objects) == [("jobs", first["name"]), ("services", first["name"])], "nothing was created"


def test_whose_a_job_is_does_not_depend_on_where_its_controller_runs(
    cluster: KnownCluster, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = kubernetes.submit(job)
    notes = cluster.objects["jobs", first["name"]]["metadata"]["annotations"]
    notes |= {"paceline.dev/run-folder": "/another/path", "paceline.dev/controller": "another-host"}
    assert kubernetes.adopt(job, None) == first


def test_the_job_of_an_earlier_attempt_is_not_taken_for_the_next_one(
    cluster: KnownCluster, job: Job, make_spec: Make, tmp_path: Path
) -> None:
    kubernetes.submit(job)
    attempts.close(tmp_path, "preempted", "a node was lost")
    options = {"image": "paceline:1", "pending_s": 3600}
    spec = dataclasses.replace(make_spec("ddp", 1, nodes=2), launcher=Choice("kubernetes", options))
    following = kubernetes.prepare(spec, tmp_path)
    assert following.name == job.name
    assert kubernetes.adopt(following, None) is None
    kubernetes.submit(following)
    assert ("jobs", str(job.name)) in cluster.deleted
    assert cluster.objects["jobs", str(job.name)]["metadata"]["annotations"]["paceline.dev/attempt"] == "2"


def next_launch(make_spec: Make, run_dir: Path, out: Path) -> Job:
    """The same run again, after its directory was sealed: a launch with another name."""
    spec = dataclasses.replace(
        make_spec("ddp", 1, nodes=2), launcher=Choice("kubernetes", {"image": "paceline:1"}), lineage="another launch"
    )
    store.set_aside(run_dir)
    return kubernetes.prepare(spec, out)


@pytest.mark.parametrize("known_by", ["label", "handle"])
def test_the_job_of_an_earlier_launch_is_removed_before_the_next_one_starts(
    cluster: KnownCluster, job: Job, make_spec: Make, tmp_path: Path, known_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage outlasted the patience: the run was sealed as failed, and its job could not be removed."""
    handle = kubernetes.submit(job)
    cluster.start(handle["name"], RUNNING)
    if known_by == "handle":
        # The directory is mounted on another host, so that its label is another; and a queue has stopped the pods.
        store.write_json(tmp_path / "job.json", {"handle": handle})
        monkeypatch.setattr("socket.gethostname", lambda: "another-host")
        cluster.running = []
    following = next_launch(make_spec, tmp_path, tmp_path)
    assert following.name != job.name
    at_creation = []
    create = cluster.create

    def created(resource: Resource, manifest: Mapping[str, Any]) -> dict[str, Any]:
        at_creation.append((set(cluster.objects), list(cluster.running)))
        return create(resource, manifest)

    cluster.create = created  # type: ignore[method-assign]
    kubernetes.submit(following)
    assert at_creation[0] == (set(), []), "nothing of the earlier launch is left when the next one is created"
    assert ("jobs", str(job.name)) in cluster.deleted


def test_jobs_of_other_directories_and_owners_are_not_removed(
    cluster: KnownCluster, job: Job, make_spec: Make, tmp_path: Path
) -> None:
    handle = kubernetes.submit(job)
    cluster.start(handle["name"], RUNNING)
    kubernetes.submit(next_launch(make_spec, tmp_path, tmp_path / "elsewhere"))
    assert ("jobs", handle["name"]) in cluster.objects
    cluster.objects["jobs", handle["name"]]["metadata"]["annotations"]["paceline.dev/owner"] = "somebody"
    store.write_json(tmp_path / "attempts" / "1" / "job.json", {"handle": handle})
    cluster.running = []
    kubernetes.submit(next_launch(make_spec, tmp_path, tmp_path))
    assert ("jobs", handle["name"]) in cluster.objects
    assert not cluster.deleted


def test_an_earlier_launch_that_does_not_end_stops_the_next_one(
    cluster: KnownCluster, job: Job, make_spec: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "REMOVAL_S", 0.0)
    kubernetes.submit(job)
    cluster.start(str(job.name), RUNNING)
    pods = cluster.running
    following = next_launch(make_spec, tmp_path, tmp_path)
    monkeypatch.setattr(cluster, "pods", lambda _: pods)
    with pytest.raises(LaunchError, match=f"jobs {job.name} of an earlier launch of this run did not end within 0 s"):
        kubernetes.submit(following)
    assert ("jobs", str(following.name)) not in cluster.objects


def test_no_attempt_starts_beside_pods_of_an_earlier_one(
    cluster: KnownCluster, job: Job, monkeypatch: pytest.MonkeyPatch, golden: object
) -> None:
    monkeypatch.setattr(run, "REMOVAL_S", 0.0)
    kubernetes.submit(job)
    cluster.start(str(job.name), RUNNING)
    cluster.objects.clear()
    with pytest.raises(LaunchError) as caught:
        kubernetes.submit(job)
    assert str(caught.value) == golden
    assert not cluster.objects


@pytest.mark.parametrize("job", [{"kind": "jobset"}, {"kind": "trainjob"}], indirect=True)
def test_the_failed_job_of_an_earlier_attempt_is_gone_before_the_next_one_is_created(
    cluster: KnownCluster, job: Job
) -> None:
    """The cluster removes the Job of a deleted JobSet or TrainJob later than that: it must not end the next attempt."""
    resource = run.RESOURCES[str(job.settings["kind"])]
    child = resource.child.format(name=job.name)
    failed = {
        "metadata": {"name": child, "uid": "old"},
        "status": {"conditions": [{"type": "Failed", "status": "True"}]},
    }
    cluster.objects["jobs", child] = failed
    read, readings = cluster.read, []

    def read_and_remove(wanted: Resource, name: str) -> Any:
        if (wanted.plural, name) == ("jobs", child):
            assert not [key for key in cluster.objects if key[0] == resource.plural], "created too early"
            readings.append(name)
            if len(readings) == 3:
                del cluster.objects["jobs", child]
        return read(wanted, name)

    cluster.read = read_and_remove  # type: ignore[method-assign]
    kubernetes.submit(job)
    assert len(readings) >= 3
    assert (resource.plural, str(job.name)) in cluster.objects


@pytest.mark.parametrize("stop", [LaunchError("not permitted to create"), KeyboardInterrupt()])
@pytest.mark.parametrize(
    ("job", "plural"),
    [({"kind": "job"}, "services"), ({"kind": "trainjob"}, "trainjobs"), ({"kind": "job"}, "jobs")],
    indirect=["job"],
)
def test_a_submission_that_fails_halfway_leaves_nothing(
    cluster: KnownCluster, job: Job, plural: str, stop: BaseException
) -> None:
    create = cluster.create

    def refuse(resource: Resource, manifest: Mapping[str, Any]) -> dict[str, Any]:
        if resource.plural == plural:
            if isinstance(stop, KeyboardInterrupt):
                # The server has done it, and only its answer was not waited for.
                create(resource, manifest)
            raise stop
        return create(resource, manifest)

    cluster.create = refuse  # type: ignore[method-assign]
    with pytest.raises(type(stop)):
        kubernetes.submit(job)
    assert not cluster.objects


def test_what_a_failed_submission_could_not_remove_is_said(cluster: KnownCluster, job: Job, golden: object) -> None:
    def refuse(*_: Any) -> None:
        cluster.refusal = Unavailable("the API server does not answer")
        raise LaunchError("not permitted to create services")

    cluster.create_service = refuse  # type: ignore[method-assign]
    with pytest.raises(LaunchError) as caught:
        kubernetes.submit(job)
    assert str(caught.value) == golden


def test_a_removal_says_whether_everything_is_gone(
    cluster: KnownCluster, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "REMOVAL_S", 0.0)
    handle = kubernetes.submit(job)
    stuck = [{"metadata": {"name": "p", "labels": handle["name"]}, "status": {}}]
    monkeypatch.setattr(cluster, "pods", lambda _: stuck)
    assert kubernetes.cancel(handle) is False
    assert "its pods did not end within 0 s" in (tmp_path / "log.txt").read_text()
    stuck[0]["status"] = {"conditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert kubernetes.cancel(handle) is True, "one on a lost node never says that it is gone"
    cluster.refusal = Unavailable("the API server does not answer")
    assert kubernetes.cancel(handle) is False


def test_pods_of_an_earlier_job_of_the_same_name_do_not_count(cluster: KnownCluster, job: Job) -> None:
    handle = kubernetes.submit(job)
    cluster.start(handle["name"], RUNNING)
    for pod in cluster.running:
        pod["metadata"]["ownerReferences"] = [{"uid": "another"}]
    assert "0 of 2" in str(kubernetes.poll(handle).waiting)


def test_a_namespace_that_is_deleted_is_the_cause_and_a_pod_that_is_deleted_alone_a_preemption(
    cluster: KnownCluster, job: Job
) -> None:
    """The cluster deletes the pods first. The Job fails for that, and is deleted after them."""
    handle = kubernetes.submit(job)
    name = handle["name"]
    cluster.start(name, RUNNING)
    assert kubernetes.poll(handle).running
    cluster.running[1]["metadata"]["deletionTimestamp"] = "2026-11-17T12:00:35Z"
    assert kubernetes.poll(handle).running
    cluster.say(name, "FailureTarget", reason="BackoffLimitExceeded", lastTransitionTime="2026-11-17T12:00:38Z")

    def judged() -> tuple[Status | None, str, bool]:
        followed = kubernetes._runs["bench", name]
        followed.state, followed.polled_at = dataclasses.replace(followed.state, running=True), float("-inf")
        state = kubernetes.poll(handle)
        return state.status, str(state.reason), state.recurs

    assert judged() == (Status.PREEMPTED, f"pod {name}-1-x was deleted while the job was running", False)
    cluster.is_being_deleted = True
    reason = f"the job {name} is being deleted: somebody deleted its namespace bench"
    assert judged() == (Status.FAILED, f"{reason}; try: paceline cluster init --namespace bench --apply", True)


def test_a_refused_log_ends_the_run_with_the_refusal(cluster: KnownCluster, job: Job, golden: object) -> None:
    handle = kubernetes.submit(job)
    cluster.start(handle["name"], RUNNING)

    def refuse(*_: Any, **__: Any) -> Iterator[bytes]:
        raise LaunchError("not permitted to get pods/log")

    cluster.log = refuse  # type: ignore[method-assign]
    kubernetes.poll(handle)
    kubernetes._runs["bench", handle["name"]].logs.drain(30)
    with pytest.raises(LaunchError) as caught:
        kubernetes.poll(handle)
    assert str(caught.value) == golden


def test_a_removal_that_fails_for_now_is_logged(cluster: KnownCluster, job: Job, tmp_path: Path) -> None:
    handle = kubernetes.submit(job)
    cluster.refusal = Unavailable("the API server does not answer")
    kubernetes.cancel(handle)
    said = (tmp_path / "log.txt").read_text()
    assert "does not answer; the job may still exist: kubectl delete jobs" in said


def test_an_abandoned_job_is_stopped_before_its_logs_are_closed(
    cluster: KnownCluster, job: Job, golden: object
) -> None:
    handle = kubernetes.submit(job)
    assert kubernetes.poll(handle).running
    assert str(kubernetes.collect(handle, Path(handle["run_dir"]))) == golden
    assert ("jobs", handle["name"]) in cluster.deleted


@pytest.mark.parametrize("seen", [True, False], ids=["followed", "adopted when its pods were gone"])
@pytest.mark.parametrize("job", [{"results_claim": "results"}], indirect=True)
def test_what_a_log_lost_comes_from_the_claim(
    cluster: KnownCluster, job: Job, tmp_path: Path, make_spec: Make, seen: bool, golden: object
) -> None:
    claim = tmp_path / "claim"
    claim.mkdir()
    spec = make_spec("ddp", 1, nodes=2)
    log_transport.put_spec(claim, json.dumps(spec.to_dict()))
    assert store.read_spec(claim) == spec
    for node in range(2):
        (claim / f"outcome-{node}.json").write_text('{"of": "the claim"}')
    handle = kubernetes.submit(job)
    if seen:
        cluster.start(handle["name"], DONE)
        kubernetes.poll(handle)
    reader = handle["reader"]["metadata"]["name"]
    printed = ["".join(f"{line}\n" for line in log_transport.hand_over(claim, {"host": "n"})).encode()]
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
    assert str(kubernetes.collect(handle, tmp_path)) == golden
