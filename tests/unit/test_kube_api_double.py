"""The Kubernetes double against documented behaviour, through the official client."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from testbed import waiting
from testbed.kube_api import Cluster, Node
from testbed.kube_api.logs import ContainerLog, LogQuery
from testbed.kube_api.sandbox import why_not
from testbed.kube_api.variables import expand

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

NODES = (Node(name="node-a", cpu=8, gpus=1), Node(name="node-b", cpu=8))
NAMESPACE = "default"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), NODES) as found:
        yield found


@pytest.fixture(scope="module")
def api(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The client of the cluster's admin; its parts by their class."""
    return client_of(cluster, tmp_path_factory.mktemp("config") / "admin")


def client_of(cluster: Cluster, path: Path, **more: str) -> Any:
    from kubernetes import client, config

    configuration = client.Configuration()
    config.load_kube_config(str(cluster.kubeconfig(path, **more)), client_configuration=configuration)
    connection = client.ApiClient(configuration)

    class Parts:
        core, batch = client.CoreV1Api(connection), client.BatchV1Api(connection)
        custom, reviews = client.CustomObjectsApi(connection), client.AuthorizationV1Api(connection)

    return Parts


def job(name: str, script: str, indexes: int = 1, **spec: Any) -> dict[str, Any]:
    container = {"name": "main", "image": "paceline", "command": ["sh", "-c", script], **spec.pop("container", {})}
    # The first process of a container heeds no signal that it does not ask for: `sleep` waits for the grace to end.
    usual_pod = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0}
    pod = {**usual_pod, "containers": [container], **spec.pop("pod", {})}
    usual = {"completions": indexes, "parallelism": indexes, "completionMode": "Indexed", "backoffLimit": 0}
    template = {"metadata": {"labels": {"app": name}}, "spec": pod}
    return {"metadata": {"name": name}, "spec": {**usual, **spec, "template": template}}


def until(condition: Callable[[], Any]) -> Any:
    return waiting.until(condition, "what the double should do", 60.0, 0.02)


def ended(api: Any, name: str) -> dict[str, str]:
    """The reasons of a Job's conditions once it is complete or failed."""

    def conditions() -> dict[str, str] | None:
        found = api.batch.read_namespaced_job(name, NAMESPACE).status.conditions or []
        by_type = {c.type: c.reason for c in found}
        return by_type if {"Complete", "Failed"} & set(by_type) else None

    return until(conditions)  # type: ignore[no-any-return]


def pods_of(api: Any, name: str) -> list[Any]:
    return list(api.core.list_namespaced_pod(NAMESPACE, label_selector=f"app={name}").items)


def removed(api: Any, name: str) -> None:
    api.batch.delete_namespaced_job(name, NAMESPACE, propagation_policy="Background")
    until(lambda: not pods_of(api, name))


def refusal(call: Callable[[], Any]) -> tuple[int, dict[str, Any]]:
    from kubernetes.client.exceptions import ApiException

    with pytest.raises(ApiException) as caught:
        call()
    return caught.value.status, json.loads(caught.value.body)


def test_an_indexed_job_gives_each_pod_its_number_its_name_and_its_peers(api: Any, cluster: Cluster) -> None:
    service = {"clusterIP": "None", "selector": {"app": "pair"}, "publishNotReadyAddresses": True}
    api.core.create_namespaced_service(NAMESPACE, {"metadata": {"name": "pair"}, "spec": service})
    env = [{"name": "A", "value": "a"}, {"name": "B", "value": "$(A)b $(C) $$(A)"}, {"name": "C", "value": "c"}]
    env += [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]
    script = 'echo "$(hostname) $JOB_COMPLETION_INDEX [$B] $1 $NODE"; test ! -e /tmp/x && touch /tmp/x'
    container = {
        "command": ["sh", "-c", script.replace("$(", "$$("), "sh", "$(JOB_COMPLETION_INDEX)"],
        "env": env,
        "volumeMounts": [{"name": "scratch", "mountPath": "/tmp"}],
    }
    pod = {"subdomain": "pair", "volumes": [{"name": "scratch", "emptyDir": {}}]}
    # A pod may look up its peer before the peer has an address: this one waits.
    container["command"][2] = "until getent hosts pair-1.pair; do sleep 0.05; done; " + container["command"][2]
    api.batch.create_namespaced_job(NAMESPACE, job("pair", script, 2, container=container, pod=pod))
    assert ended(api, "pair") == {
        "SuccessCriteriaMet": "CompletionsReached",
        "Complete": "CompletionsReached",
    }
    for found in pods_of(api, "pair"):
        index = found.metadata.annotations["batch.kubernetes.io/job-completion-index"]
        text = api.core.read_namespaced_pod_log(found.metadata.name, NAMESPACE)
        assert f"pair-{index} {index} [ab $(C) $(A)] {index} {found.spec.node_name}" in text
        assert "pair-1.pair" in text
    done = api.batch.read_namespaced_job("pair", NAMESPACE)
    assert (done.status.completed_indexes, done.status.succeeded) == ("0,1", 2)
    removed(api, "pair")
    api.core.delete_namespaced_service("pair", NAMESPACE)
    until(lambda: not cluster.leftovers(NAMESPACE))


def test_refusals_are_written_as_the_real_server_writes_them(api: Any) -> None:
    api.core.create_namespaced_config_map(NAMESPACE, {"metadata": {"name": "twice"}, "data": {"a": "1"}})
    code, body = refusal(lambda: api.core.create_namespaced_config_map(NAMESPACE, {"metadata": {"name": "twice"}}))
    assert (code, body["reason"], body["message"]) == (409, "AlreadyExists", 'configmaps "twice" already exists')
    code, body = refusal(lambda: api.batch.read_namespaced_job("nobody", NAMESPACE))
    assert (code, body["message"]) == (404, 'jobs.batch "nobody" not found')
    assert body["details"] == {"name": "nobody", "group": "batch", "kind": "jobs"}
    code, body = refusal(lambda: api.batch.create_namespaced_job("nowhere", job("lost", "true")))
    assert (code, body["message"]) == (404, 'namespaces "nowhere" not found')
    code, body = refusal(lambda: api.batch.create_namespaced_job(NAMESPACE, job("Upper", "true")))
    assert (code, body["reason"]) == (422, "Invalid")
    assert body["message"].startswith(
        'Job.batch "Upper" is invalid: metadata.name: Invalid value: "Upper": a lowercase'
    )
    code, body = refusal(
        lambda: api.batch.create_namespaced_job(NAMESPACE, job("always", "true", pod={"restartPolicy": "Always"}))
    )
    assert code == 422
    assert "spec.template.spec.restartPolicy" in body["message"]
    code, body = refusal(
        lambda: api.custom.create_namespaced_custom_object(
            "batch", "v1", NAMESPACE, "jobs", job("odd", "", paralelism=2)
        )
    )
    assert (code, 'unknown field "spec.paralelism"' in body["message"]) == (400, True)
    api.core.delete_namespaced_config_map("twice", NAMESPACE)


def test_a_write_on_an_old_version_is_a_conflict_and_a_dry_run_writes_nothing(api: Any) -> None:
    first = api.core.create_namespaced_config_map(NAMESPACE, {"metadata": {"name": "shared"}, "data": {"a": "1"}})
    api.core.patch_namespaced_config_map("shared", NAMESPACE, {"data": {"b": "2"}})
    first.data = {"a": "3"}
    code, body = refusal(lambda: api.core.replace_namespaced_config_map("shared", NAMESPACE, first))
    assert (code, body["reason"]) == (409, "Conflict")
    assert "the object has been modified; please apply your changes to the latest version" in body["message"]
    assert api.core.read_namespaced_config_map("shared", NAMESPACE).data == {"a": "1", "b": "2"}
    api.batch.create_namespaced_job(NAMESPACE, job("dry", "true"), dry_run="All")
    assert refusal(lambda: api.batch.read_namespaced_job("dry", NAMESPACE))[0] == 404
    api.core.delete_namespaced_config_map("shared", NAMESPACE)


def test_a_watch_sends_every_change_in_order_and_an_error_when_it_is_too_old(api: Any, cluster: Cluster) -> None:
    from kubernetes import watch
    from kubernetes.client.exceptions import ApiException

    version = api.core.list_namespaced_config_map(NAMESPACE).metadata.resource_version
    api.core.create_namespaced_config_map(NAMESPACE, {"metadata": {"name": "seen"}, "data": {"n": "0"}})
    api.core.patch_namespaced_config_map("seen", NAMESPACE, {"data": {"n": "1"}})
    api.core.delete_namespaced_config_map("seen", NAMESPACE)
    told = []
    stream = watch.Watch()
    for event in stream.stream(
        api.core.list_namespaced_config_map, NAMESPACE, resource_version=version, timeout_seconds=20
    ):
        told.append((event["type"], event["object"].data["n"]))
        if len(told) == 3:
            stream.stop()
    assert told == [("ADDED", "0"), ("MODIFIED", "1"), ("DELETED", "1")]
    cluster.state.compact()
    with pytest.raises(ApiException) as caught:
        next(
            watch.Watch().stream(
                api.core.list_namespaced_config_map, NAMESPACE, resource_version=version, timeout_seconds=20
            )
        )
    assert caught.value.status == 410


def test_a_log_is_followed_to_its_end_and_is_refused_before_its_beginning(api: Any, cluster: Cluster) -> None:
    cluster.kubelet.start_delay_s = 0.5
    api.batch.create_namespaced_job(NAMESPACE, job("talks", "for i in 1 2 3; do echo line $i; sleep 0.2; done"))
    name = until(lambda: [p.metadata.name for p in pods_of(api, "talks") if p.spec.node_name])[0]
    code, body = refusal(lambda: api.core.read_namespaced_pod_log(name, NAMESPACE))
    assert code == 400
    assert body["message"] == f'container "main" in pod "{name}" is waiting to start: ContainerCreating'
    cluster.kubelet.start_delay_s = 0.0
    until(lambda: pods_of(api, "talks")[0].status.phase == "Running")
    stream = api.core.read_namespaced_pod_log(name, NAMESPACE, follow=True, _preload_content=False)
    assert b"".join(stream.stream()).decode().splitlines() == ["line 1", "line 2", "line 3"]
    assert api.core.read_namespaced_pod_log(name, NAMESPACE, tail_lines=1) == "line 3\n"
    assert api.core.read_namespaced_pod_log(name, NAMESPACE, limit_bytes=4) == "line"
    removed(api, "talks")


def test_a_rotated_log_has_lost_its_beginning_except_for_who_followed() -> None:
    log = ContainerLog(rotated_at=20)
    never, followed = threading.Event(), []
    reader = threading.Thread(target=lambda: followed.extend(log.read(LogQuery(follow=True), never)))
    reader.start()

    def lines() -> Iterator[bytes]:
        """The second line comes once the reader has the first: a slow reader must not lose what is rotated away."""
        yield b"first line\n"
        while not followed:
            time.sleep(0.01)
        yield from (b"second line\n", b"3\n")

    log.pump(lines())  # type: ignore[arg-type]
    reader.join()
    assert b"".join(followed) == b"first line\nsecond line\n3\n"
    assert b"".join(log.read(LogQuery(), never)) == b"second line\n3\n"


def test_what_is_owned_goes_with_its_owner_unless_it_is_orphaned(api: Any) -> None:
    api.batch.create_namespaced_job(NAMESPACE, job("parent", "sleep 60"))
    api.batch.create_namespaced_job(NAMESPACE, job("careless", "sleep 60"))
    owner = api.batch.read_namespaced_job("parent", NAMESPACE)
    reference = {"apiVersion": "batch/v1", "kind": "Job", "name": "parent", "uid": owner.metadata.uid}
    about = {"name": "child", "ownerReferences": [reference]}
    api.core.create_namespaced_config_map(NAMESPACE, {"metadata": about})
    until(lambda: [p for p in pods_of(api, "parent") + pods_of(api, "careless") if p.status.phase == "Running"][1:])
    api.batch.delete_namespaced_job("parent", NAMESPACE, propagation_policy="Foreground")
    until(lambda: not pods_of(api, "parent"))
    until(lambda: not api.core.list_namespaced_config_map(NAMESPACE).items)
    until(lambda: not [j for j in api.batch.list_namespaced_job(NAMESPACE).items if j.metadata.name == "parent"])
    # Without a policy the API of Jobs leaves their pods: a trap that a launcher must not fall into.
    api.batch.delete_namespaced_job("careless", NAMESPACE)
    time.sleep(0.3)
    assert [p.status.phase for p in pods_of(api, "careless")] == ["Running"]
    for pod in pods_of(api, "careless"):
        api.core.delete_namespaced_pod(pod.metadata.name, NAMESPACE, grace_period_seconds=0)
    until(lambda: not pods_of(api, "careless"))


def test_a_deleted_namespace_takes_no_more_and_loses_its_pods_before_their_job(api: Any, cluster: Cluster) -> None:
    """As real ones do (`OrderedNamespaceDeletion`): the roles and the Job are there until the last pod is gone."""
    space = "passing"
    api.core.create_namespace({"metadata": {"name": space}})
    api.batch.create_namespaced_job(space, job("held", "sleep 60", pod={"terminationGracePeriodSeconds": 1}))
    until(lambda: [p for p in api.core.list_namespaced_pod(space).items if p.status.phase == "Running"])
    bare = {"metadata": {"name": "held"}}
    assert refusal(lambda: api.batch.create_namespaced_job(space, bare, dry_run="All"))[0] == 422
    cluster.delete_namespace(space)
    until(lambda: api.core.list_namespaced_pod(space).items[0].metadata.deletion_timestamp)
    assert api.batch.read_namespaced_job("held", space).metadata.deletion_timestamp is None
    code, body = refusal(lambda: api.batch.create_namespaced_job(space, bare, dry_run="All"))
    assert (code, body["message"].endswith("in namespace passing because it is being terminated")) == (403, True)
    until(lambda: space not in {each.metadata.name for each in api.core.list_namespace().items})


def test_a_failed_pod_a_deadline_and_a_lifetime_end_a_job(api: Any) -> None:
    api.batch.create_namespaced_job(NAMESPACE, job("fails", 'test "$JOB_COMPLETION_INDEX" = 0 || exit 3; sleep 60', 2))
    api.batch.create_namespaced_job(NAMESPACE, job("late", "sleep 60", activeDeadlineSeconds=1))
    api.batch.create_namespaced_job(NAMESPACE, job("brief", "true", ttlSecondsAfterFinished=0))
    assert ended(api, "fails") == {"FailureTarget": "BackoffLimitExceeded", "Failed": "BackoffLimitExceeded"}
    left = until(lambda: [p for p in pods_of(api, "fails") if p.status.phase == "Failed"])
    assert [p.status.container_statuses[0].state.terminated.exit_code for p in left] == [3]
    assert len(pods_of(api, "fails")) == 1, "the pod that still ran is deleted, and its log with it"
    assert ended(api, "late")["Failed"] == "DeadlineExceeded"
    until(lambda: "brief" not in {j.metadata.name for j in api.batch.list_namespaced_job(NAMESPACE).items})
    for name in ("fails", "late"):
        removed(api, name)


def test_with_a_limit_for_each_index_one_that_fails_takes_no_other_along(api: Any) -> None:
    first, limit = 'test "$JOB_COMPLETION_INDEX" = 0 || exit 3; ', {"backoffLimitPerIndex": 0}
    api.batch.create_namespaced_job(NAMESPACE, job("apart", first + "sleep 1", 4, backoffLimit=3, **limit))
    most = job("most", first + "sleep 60", 2, maxFailedIndexes=0, **limit)
    del most["spec"]["backoffLimit"]
    assert api.batch.create_namespaced_job(NAMESPACE, most).spec.backoff_limit == 2**31 - 1
    api.batch.create_namespaced_job(NAMESPACE, job("robbed", "sleep 60", 2, backoffLimit=1, **limit))
    both = until(
        lambda: [p for p in pods_of(api, "robbed") if p.status.phase == "Running"][1:] and pods_of(api, "robbed")
    )
    taken = next(p for p in both if p.metadata.name.startswith("robbed-1-"))
    api.core.delete_namespaced_pod(taken.metadata.name, NAMESPACE)
    until(lambda: api.batch.read_namespaced_job("robbed", NAMESPACE).status.failed_indexes == "1")
    until(lambda: [p.metadata.name[:9] for p in pods_of(api, "robbed")] == ["robbed-0-"])
    assert ended(api, "apart") == {"FailureTarget": "FailedIndexes", "Failed": "FailedIndexes"}
    told = api.batch.read_namespaced_job("apart", NAMESPACE).status
    assert (told.completed_indexes, told.failed_indexes, told.failed) == ("0", "1-3", 3), "each was tried once"
    assert ended(api, "most")["Failed"] == "MaxFailedIndexesExceeded"
    code, body = refusal(lambda: api.batch.create_namespaced_job(NAMESPACE, job("odd", "true", maxFailedIndexes=1)))
    assert (code, "spec.backoffLimitPerIndex: Required value" in body["message"]) == (422, True)
    for name in ("apart", "most", "robbed"):
        removed(api, name)


@pytest.mark.parametrize("accident", ["lose_node", "silence_node"])
def test_a_lost_node_does_not_report_how_its_containers_ended(
    api: Any, cluster: Cluster, accident: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that goes while kubelets are at work. Told as an exit code, it would read as a failure of the pod."""
    name = accident.replace("_", "-")
    cluster.add_node(Node(name=name, labels={"gone": name}))
    rules = [{"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
    asked = job(name, "sleep 60", podFailurePolicy={"rules": rules}, pod={"nodeSelector": {"gone": name}})
    api.batch.create_namespaced_job(NAMESPACE, asked)
    (pod,) = until(lambda: [p for p in pods_of(api, name) if p.status.phase == "Running"])
    (container,) = cluster.kubelet.containers[pod.metadata.uid].values()
    write_names, rounds = cluster.kubelet._write_names, list[int]()

    def at_work(pods: list[Any]) -> None:
        write_names(pods)
        rounds.append(len(pods))
        if len(rounds) == 1:
            getattr(cluster, accident)(name)
            container.process.wait(60)

    monkeypatch.setattr(cluster.kubelet, "_write_names", at_work)
    for number in range(2):  # changes, for which kubelets write names anew
        cluster.add_namespace(f"{name}-{number}")
        until(lambda wanted=number + 1: len(rounds) >= wanted)
    if accident == "lose_node":
        assert set(ended(api, name).values()) == {"PodFailurePolicy"}
    told = [c.object for c in cluster.state.history if c.object["metadata"].get("uid") == pod.metadata.uid]
    assert not [each for each in told if "terminated" in str(each["status"].get("containerStatuses"))]
    if accident == "silence_node":
        cluster.lose_node(name)  # only whoever removes the node removes its pods
    removed(api, name)


def test_a_pod_that_fits_nowhere_waits_and_says_why(api: Any) -> None:
    limits = {"resources": {"limits": {"nvidia.com/gpu": "2"}}}
    api.batch.create_namespaced_job(NAMESPACE, job("greedy", "true", container=limits))
    pod = until(lambda: pods_of(api, "greedy"))[0]

    def reasons() -> list[str]:
        events = api.core.list_namespaced_event(NAMESPACE, field_selector=f"involvedObject.name={pod.metadata.name}")
        return [e.message for e in events.items if e.reason == "FailedScheduling"]

    assert until(reasons)[0].startswith("0/2 nodes are available: 2 Insufficient nvidia.com/gpu.")
    removed(api, "greedy")


def test_rights_are_those_of_the_roles_and_can_be_asked_for(api: Any, cluster: Cluster, tmp_path: Path) -> None:
    from testbed.kube_api.resources import BY_PLURAL

    rules = [{"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["get"]}]
    cluster.state.create(BY_PLURAL["roles"], NAMESPACE, {"metadata": {"name": "reader"}, "rules": rules})
    subject = {"kind": "ServiceAccount", "name": "reader", "namespace": NAMESPACE}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"}
    binding = {"metadata": {"name": "reader"}, "subjects": [subject], "roleRef": role}
    cluster.state.create(BY_PLURAL["rolebindings"], NAMESPACE, binding)
    token = cluster.access.token_for(NAMESPACE, "reader")
    reader = client_of(cluster, tmp_path / "reader", token=token)
    assert refusal(lambda: reader.batch.read_namespaced_job("nobody", NAMESPACE))[0] == 404
    code, body = refusal(lambda: reader.batch.list_namespaced_job(NAMESPACE))
    assert code == 403
    assert body["message"] == (
        'jobs.batch is forbidden: User "system:serviceaccount:default:reader" cannot list resource "jobs" '
        'in API group "batch" in the namespace "default"'
    )

    def allowed(verb: str) -> bool:
        about = {"namespace": NAMESPACE, "group": "batch", "resource": "jobs", "verb": verb}
        answer = reader.reviews.create_self_subject_access_review({"spec": {"resourceAttributes": about}})
        return bool(answer.status.allowed)

    assert [allowed(verb) for verb in ("get", "delete")] == [True, False]
    stranger = client_of(cluster, tmp_path / "stranger", token="made up")
    assert refusal(lambda: stranger.batch.list_namespaced_job(NAMESPACE))[0] == 401
    # A server that has just started knows no roles yet; administrators need none.
    cluster.access.forget_roles(3600.0)
    assert refusal(lambda: reader.batch.read_namespaced_job("nobody", NAMESPACE))[0] == 403
    assert refusal(lambda: allowed("get"))[0] == 403
    api.batch.list_namespaced_job(NAMESPACE)
    cluster.access.forget_roles(0.0)
    assert allowed("get")


def test_a_restricted_namespace_refuses_pods_that_may_become_root(api: Any, cluster: Cluster) -> None:
    cluster.add_namespace("strict", **{"pod-security.kubernetes.io/enforce": "restricted"})
    container = {"name": "main", "image": "paceline", "command": ["true"]}
    code, body = refusal(
        lambda: api.core.create_namespaced_pod(
            "strict", {"metadata": {"name": "p"}, "spec": {"containers": [container]}}
        )
    )
    assert code == 403
    assert 'violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false' in body["message"]


def test_an_api_server_that_restarts_has_forgotten_nothing(api: Any, cluster: Cluster) -> None:
    api.core.create_namespaced_config_map(NAMESPACE, {"metadata": {"name": "kept"}})
    cluster.stop_api_server()
    with pytest.raises(Exception, match="refused"):
        api.core.read_namespaced_config_map("kept", NAMESPACE, _request_timeout=1)
    cluster.start_api_server()
    assert api.core.read_namespaced_config_map("kept", NAMESPACE).metadata.name == "kept"
    api.core.delete_namespaced_config_map("kept", NAMESPACE)


@pytest.mark.parametrize(
    ("text", "expanded"),
    [("$(A)", "1"), ("$$(A)", "$(A)"), ("$$$(A)", "$1"), ("$(B)", "$(B)"), ("$A ${A}", "$A ${A}"), ("$$", "$")],
)
def test_references_are_expanded_as_documented(text: str, expanded: str) -> None:
    assert expand(text, {"A": "1"}) == expanded
