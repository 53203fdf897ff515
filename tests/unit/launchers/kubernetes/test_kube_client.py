"""The official client against a server of known answers: which refusal becomes which sentence, what is asked again."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

from paceline import cli
from paceline.cli import cluster as cluster_verbs
from paceline.errors import LaunchError
from paceline.launchers.kubernetes import client
from paceline.launchers.kubernetes.client import AlreadyExists, Cluster, NotFound
from paceline.launchers.kubernetes.manifests import RESOURCES

JOBS = RESOURCES["job"]
MANIFEST = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}, "spec": {"newField": [1, {"a": "b"}]}}


class Answers:
    """What the server says next, and what it was asked."""

    def __init__(self) -> None:
        self.next: list[tuple[int, Any]] = []
        self.asked: list[tuple[str, str, Any]] = []


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def server(answers: Answers) -> Iterator[str]:
    class Endpoint(BaseHTTPRequestHandler):
        def answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            answers.asked.append((self.command, self.path, body))
            status, said = answers.next.pop(0) if len(answers.next) > 1 else answers.next[0]
            data = said if isinstance(said, bytes) else json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = answer

        def log_message(self, *_: Any) -> None:
            return

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    thread = threading.Thread(target=listening.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{listening.server_port}"
    listening.shutdown()
    listening.server_close()
    thread.join()


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def write(url: str) -> None:
        contexts = [("one", {"cluster": "c", "user": "u"}), ("two", {"cluster": "c", "user": "u", "namespace": "own"})]
        path = tmp_path / "kubeconfig"
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": name, "context": context} for name, context in contexts],
            "current-context": "one",
        }
        path.write_text(yaml.safe_dump(content))
        from kubernetes.config import kube_config

        # Read by the client when it is imported, which another test may have done.
        monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(path))

    return write


@pytest.fixture
def cluster(server: str, kubeconfig: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(client, "RETRY_S", 0.01)
    kubeconfig(server)
    return Cluster.reach(None, "bench", 30.0)


def status(code: int, message: str) -> tuple[int, Any]:
    return code, {"kind": "Status", "message": message, "code": code}


def test_what_is_sent_is_what_was_made(cluster: Cluster, answers: Answers) -> None:
    answers.next = [(201, {**MANIFEST, "status": {}})]
    assert cluster.create(JOBS, MANIFEST)["spec"] == MANIFEST["spec"], "a field the client does not know included"
    cluster.create_service({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}})
    cluster.delete(JOBS, "j")
    cluster.read(RESOURCES["trainjob"], "t")
    assert [(verb, path) for verb, path, _ in answers.asked] == [
        ("POST", "/apis/batch/v1/namespaces/bench/jobs"),
        ("POST", "/api/v1/namespaces/bench/services"),
        ("DELETE", "/apis/batch/v1/namespaces/bench/jobs/j?propagationPolicy=Background"),
        ("GET", "/apis/trainer.kubeflow.org/v1alpha1/namespaces/bench/trainjobs/t"),
    ]
    assert answers.asked[0][2] == MANIFEST


def test_lists_are_asked_for_by_selector(cluster: Cluster, answers: Answers) -> None:
    answers.next = [(200, {"items": [{"metadata": {"name": "p"}}]})]
    assert cluster.pods("paceline.dev/run=j") == [{"metadata": {"name": "p"}}]
    assert cluster.events("u-1") == [{"metadata": {"name": "p"}}]
    paths = [unquote(path) for _, path, _ in answers.asked]
    assert "labelSelector=paceline.dev/run=j" in paths[0]
    assert "fieldSelector=involvedObject.uid=u-1" in paths[1]


UNKNOWN = "the cluster rejected these credentials (Unauthorized): log in again, or renew"
REFUSALS: dict[str, tuple[tuple[int, Any], type[LaunchError], str]] = {
    "no permission": (
        status(403, 'jobs.batch is forbidden: User "u" cannot create resource "jobs"'),
        LaunchError,
        "not permitted to create jobs in namespace bench (jobs.batch is forbidden: User \"u\" cannot create resource "
        '"jobs"); try: kubectl auth can-i create jobs --namespace bench',
    ),
    "no credentials": (status(401, "Unauthorized"), LaunchError, UNKNOWN),
    "no such namespace": (
        status(404, 'namespaces "bench" not found'),
        NotFound,
        'cannot create jobs in namespace bench (namespaces "bench" not found); try: '
        "paceline cluster init --namespace bench --apply",
    ),
    "no such kind": (
        (404, b"404 page not found\n"),
        NotFound,
        "the cluster has no jobs of batch/v1",
    ),
    "taken": (status(409, 'jobs.batch "j" already exists'), AlreadyExists, "already exists"),
    "invalid": (
        status(422, "Job.batch is invalid: spec.x:\nInvalid value"),
        LaunchError,
        "refuses to create jobs in namespace bench (422: Job.batch is invalid: spec.x: Invalid value)",
    ),
    "no room in the quota": (
        status(403, 'jobs.batch "j" is forbidden: exceeded quota: runs, requested: count/jobs.batch=1'),
        LaunchError,
        'cannot create jobs in namespace bench (jobs.batch "j" is forbidden: exceeded quota: runs, requested: '
        "count/jobs.batch=1); try: kubectl describe quota --namespace bench",
    ),
    "a namespace under deletion": (
        status(403, 'jobs.batch "j" is forbidden: unable to create new content in namespace bench because it is '
        "being terminated"),
        LaunchError,
        "the cluster refuses to create jobs in namespace bench (",
    ),
    "a page of a proxy": ((200, b"<html>"), LaunchError, "could not create jobs"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_is_one_sentence(case: str, cluster: Cluster, answers: Answers) -> None:
    answer, kind, sentence = REFUSALS[case]
    answers.next = [answer]
    with pytest.raises(kind) as caught:
        cluster.create(JOBS, MANIFEST)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(answers.asked) == 1, "asking again would not help"


def test_what_is_not_there_is_none_and_may_be_deleted(cluster: Cluster, answers: Answers) -> None:
    answers.next = [status(404, 'jobs.batch "j" not found')]
    assert cluster.read(JOBS, "j") is None
    assert cluster.pod("p") is None
    cluster.delete(JOBS, "j")


@pytest.mark.parametrize("code", [429, 500, 503])
def test_a_server_that_is_away_for_a_moment_is_retry_once(code: int, cluster: Cluster, answers: Answers) -> None:
    answers.next = [status(code, "starting"), status(code, "starting"), (200, {"items": []})]
    assert cluster.pods("a=b") == []
    assert len(answers.asked) == 3


TERMINATED = "unable to create new content in namespace bench because it is being terminated"


@pytest.mark.parametrize(
    ("answer", "there"),
    [
        ((201, {}), True),
        (status(409, 'jobs.batch "j" already exists'), True),
        (status(422, "Job.batch is invalid: spec.template: Required value"), True),
        (status(403, 'jobs.batch "j" is forbidden: User "u" cannot create resource "jobs"'), True),
        (status(403, f'jobs.batch "j" is forbidden: {TERMINATED}'), False),
        (status(404, 'namespaces "bench" not found'), False),
    ],
)
def test_a_dry_run_shows_whether_a_namespace_is_deleted(
    cluster: Cluster, answers: Answers, answer: tuple[int, Any], there: bool
) -> None:
    """Runs may not read namespaces. A missing right, which never worked, shows nothing."""
    answers.next = [answer]
    assert cluster.has_namespace(JOBS, "j") is there
    ((verb, path, body),) = answers.asked
    assert (verb, path) == ("POST", "/apis/batch/v1/namespaces/bench/jobs?dryRun=All")
    assert (body["kind"], body["metadata"]) == ("Job", {"name": "j"})


DENIED = status(403, 'jobs.batch "j" is forbidden: User "u" cannot do resource "jobs" in API group "batch"')


def test_a_right_that_worked_before_is_requested_again_while_the_server_reads_its_roles(
    cluster: Cluster, answers: Answers
) -> None:
    answers.next = [(200, MANIFEST), DENIED, DENIED, (200, MANIFEST)]
    assert cluster.read(JOBS, "j") == cluster.read(JOBS, "j") == MANIFEST
    assert len(answers.asked) == 4
    answers.next = [DENIED, DENIED, (200, {})]
    # Nothing was deleted before, but whoever could read the job surely may remove it.
    cluster.delete(JOBS, "j")
    assert len(answers.asked) == 7


def test_a_refused_log_of_a_starting_server_is_requested_again(cluster: Cluster, answers: Answers) -> None:
    answers.next = [(200, b"one")]
    assert b"".join(cluster.log("p", "node", follow=True)) == b"one"
    answers.next = [DENIED]
    with pytest.raises(client.Unavailable):
        next(cluster.log("p", "node", follow=True))


def test_a_right_that_stays_refused_is_withdrawn_and_is_not_waited_for_twice(
    cluster: Cluster, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "FORBIDDEN_S", 0.05)
    answers.next = [(200, MANIFEST), DENIED]
    cluster.read(JOBS, "j")
    with pytest.raises(client.Forbidden, match="permission was removed, or the namespace deleted") as caught:
        cluster.read(JOBS, "j")
    assert str(caught.value).startswith("not permitted to get jobs in namespace bench")
    assert caught.value.recurs
    asked = len(answers.asked)
    assert asked > 2
    again = Cluster.reach(None, "bench", 30.0)
    with pytest.raises(client.Forbidden):
        again.read(JOBS, "j")
    assert len(answers.asked) == asked + 1, "the next run of the campaign fails at once"


def test_patience_has_an_end(cluster: Cluster, answers: Answers) -> None:
    answers.next = [status(503, "starting")]
    cluster.patience_s = 0.05
    with pytest.raises(LaunchError, match=r"could not list pods \(503: starting\) \(tried for 0\.05 s\)"):
        cluster.pods("a=b")
    assert len(answers.asked) > 1


def test_nobody_listening_is_said(
    kubeconfig: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, golden: object
) -> None:
    monkeypatch.setattr(client, "RETRY_S", 0.01)
    # Port 9 is the discard service, which nobody runs.
    kubeconfig("http://127.0.0.1:9")
    with pytest.raises(LaunchError) as caught:
        Cluster.reach(None, None, 0.05).pods("a=b")
    assert str(caught.value) == golden
    assert "API" in str(caught.value)
    assert "127.0.0.1" in str(caught.value)


def test_a_log_comes_as_it_is(cluster: Cluster, answers: Answers) -> None:
    answers.next = [(200, b"one\ntwo")]
    assert b"".join(cluster.log("p", "node", follow=True)) == b"one\ntwo"
    assert "follow=true" in answers.asked[0][1].lower()
    answers.next = [status(400, 'container "node" in pod "p" is waiting to start: ContainerCreating')]
    with pytest.raises(client.LogNotReady):
        next(cluster.log("p", "node", follow=True))


def test_the_namespace_is_the_users_else_the_contexts_else_ours(
    kubeconfig: Callable[[str], None], golden: object
) -> None:
    kubeconfig("http://127.0.0.1:9")
    assert Cluster.reach(None, None, 1.0).namespace == "paceline"
    assert Cluster.reach("two", None, 1.0).namespace == "own"
    assert Cluster.reach("two", "mine", 1.0).namespace == "mine"
    with pytest.raises(LaunchError) as caught:
        Cluster.reach("three", None, 1.0)
    assert str(caught.value) == golden
    assert "three" in str(caught.value)


def test_no_cluster_at_all_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: object) -> None:
    from kubernetes.config import kube_config

    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(LaunchError) as caught:
        Cluster.reach(None, None, 1.0)
    assert str(caught.value) == golden


def test_an_unknown_user_is_told_to_check_the_login_and_not_to_ask_for_rights(
    cluster: Cluster, answers: Answers, kubeconfig: Callable[[str], None]
) -> None:
    answers.next = [status(401, "Unauthorized")]
    with pytest.raises(LaunchError) as refusal:
        Cluster.reach("two", "bench", 1.0).create(JOBS, MANIFEST)
    assert str(refusal.value).endswith("; try: kubectl config view --minify --context two")


SECRET = "s3cret-t0ken"
UNREADABLE = {
    "not YAML": f"users: [token: {SECRET}, {{]".encode(),
    "a list": b"- one",
    "bytes": b"\xff\xfe\x00\x80",
    "another shape": b"contexts: 3\nclusters: {a: 1}",
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_kubeconfig_that_is_none_is_one_sentence(
    case: str, tmp_path: Path, kubeconfig: Callable[[str], None], capsys: pytest.CaptureFixture[str], golden: object
) -> None:
    kubeconfig("http://127.0.0.1:1")
    (tmp_path / "kubeconfig").write_bytes(UNREADABLE[case])
    with pytest.raises(LaunchError) as refusal:
        Cluster.reach(None, "bench", 1.0)
    assert str(refusal.value) == golden
    assert str(tmp_path / "kubeconfig") in str(refusal.value)
    assert cli.main(["cluster", "check"]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert SECRET not in said


def test_a_check_of_a_server_that_is_away_names_one_command(
    kubeconfig: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    golden: object,
) -> None:
    monkeypatch.setattr(cluster_verbs, "PATIENCE_S", 0.0)
    monkeypatch.setattr(client, "RETRY_S", 0.01)
    kubeconfig("http://127.0.0.1:1")
    assert cli.main(["cluster", "check"]) == 1
    said = capsys.readouterr().out
    assert said == golden
    assert said.count("try: kubectl") == 1
    assert said.endswith("fix: try: kubectl version\n")
