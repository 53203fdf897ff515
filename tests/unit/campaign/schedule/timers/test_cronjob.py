"""The CronJob: held against the official schemas, and handed to a server by the official client."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.campaign import scheduled_run
from paceline.campaign.schedule import agenda
from paceline.campaign.schedule.cron import Cron
from paceline.campaign.schedule.timers import kubernetes
from paceline.errors import RequestError

VERSIONS = ("1.29.0", "1.32.0", "1.36.0")
HOSTILE = 'name: "a: $(id)"\nbase: {model: "it\'s"}\n# ---\n'


def schedule_of(**place: Any) -> agenda.Schedule:
    return agenda.Schedule(
        name="nightly",
        cron=Cron("0 19 * * 7", "Asia/Seoul"),
        backend="kubernetes",
        experiment=agenda.EXPERIMENT,
        source="nightly.yaml",
        added_at=0.0,
        directory="/home/me",
        settings=("model=it's $(x)\n- evil",),
        webhook="HOOK",
        env_file="/home/me/.hook",
        place={"image": "registry/paceline:1", "claim": "results", **place},
    )


@pytest.fixture
def out(tmp_path: Path) -> Path:
    agenda.write(tmp_path, schedule_of())
    (agenda.folder_of(tmp_path, "nightly") / agenda.EXPERIMENT).write_text(HOSTILE)
    return tmp_path


@pytest.mark.parametrize("version", VERSIONS)
def test_official_schemas_accept_it(version: str, out: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    for document in kubernetes.documents(out, schedule_of(secret="hook", account="bench")):
        validate(document, version, strict=True)


def test_the_schemas_would_refuse_a_wrong_one(out: Path) -> None:
    package = pytest.importorskip("kubernetes_validate")
    _, job = kubernetes.documents(out, schedule_of())
    job["spec"]["concurrency"] = "Forbid"
    with pytest.raises(package.ValidationError):
        package.validate(job, VERSIONS[0], strict=True)


def test_it_runs_in_its_zone_never_twice_at_once_and_not_as_root(out: Path) -> None:
    _, job = kubernetes.documents(out, schedule_of(secret="hook"))
    spec = job["spec"]
    assert (spec["schedule"], spec["timeZone"], spec["concurrencyPolicy"]) == ("0 19 * * 0", "Asia/Seoul", "Forbid")
    pod = spec["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "hook"}}]
    assert spec["jobTemplate"]["spec"]["backoffLimit"] == 0


def test_what_is_printed_is_what_was_asked_and_hostile_texts_stay_texts(out: Path) -> None:
    config, job = yaml.safe_load_all(kubernetes.manifest(out, schedule_of()))
    assert [config, job] == kubernetes.documents(out, schedule_of())
    assert config["data"][agenda.EXPERIMENT] == HOSTILE
    asked = json.loads(config["data"][agenda.DEFINITION])
    assert asked["settings"] == ["model=it's $(x)\n- evil"]
    assert asked["env_file"] is None


def test_the_pod_finds_the_schedule_it_was_given(out: Path, tmp_path: Path, golden: object) -> None:
    config, _ = kubernetes.documents(out, schedule_of())
    mounted, results = tmp_path / "mounted", tmp_path / "claim"
    mounted.mkdir()
    for name, text in config["data"].items():
        (mounted / name).write_text(text)
    scheduled_run.adopt(results, "nightly", mounted)
    assert agenda.read(results, "nightly").cron == schedule_of().cron
    assert Path(agenda.experiment_of(results, agenda.read(results, "nightly"))).read_text() == HOSTILE
    with pytest.raises(RequestError) as caught:
        scheduled_run.adopt(results, "other", mounted)
    assert str(caught.value) == golden
    assert "nightly" in str(caught.value)


@pytest.mark.parametrize("place", [{"image": "a b"}, {"image": "x\ny"}, {"claim": "A_b"}, {"namespace": "../x"}])
def test_names_that_a_cluster_would_refuse_are_refused_here(place: dict[str, str], golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        kubernetes.PodSettings(**{"image": "i", "claim": "c", **place})
    assert str(caught.value) == golden


class Cluster(BaseHTTPRequestHandler):
    """Keeps what is posted by path; answers as the API server does for what is there, is not, or is forbidden."""

    objects: dict[str, dict[str, Any]]
    forbidden = False

    def answer(self, code: int, body: dict[str, Any]) -> None:
        payload = json.dumps(body).encode()
        self.send_response(403 if self.forbidden else code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path = f"{self.path}/{body['metadata']['name']}"
        code = 409 if path in self.objects else 201
        self.objects.setdefault(path, body) if not self.forbidden else None
        self.answer(code, body)

    def do_PUT(self) -> None:
        self.objects[self.path] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(200, self.objects[self.path])

    def do_DELETE(self) -> None:
        known = self.objects.pop(self.path, None)
        self.answer(200 if known else 404, {"kind": "Status", "apiVersion": "v1"})

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Cluster]]:
    pytest.importorskip("kubernetes")
    kind = type("FreshCluster", (Cluster,), {"objects": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    name = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_address[1]}"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    config = {"apiVersion": "v1", "kind": "Config", "current-context": "c", "clusters": [name], "contexts": [context]}
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump({**config, "users": [{"name": "u", "user": {}}]}))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    yield kind
    server.shutdown()
    server.server_close()
    thread.join()


def test_applied_replaced_and_removed(cluster: type[Cluster], out: Path) -> None:
    made = schedule_of(apply=True, namespace="bench")
    kubernetes.install(out, made)
    kubernetes.install(out, made)
    job = "/apis/batch/v1/namespaces/bench/cronjobs/paceline-nightly"
    assert sorted(cluster.objects) == ["/api/v1/namespaces/bench/configmaps/paceline-nightly", job]
    assert cluster.objects[job]["spec"]["timeZone"] == "Asia/Seoul"
    kubernetes.remove(out, made)
    kubernetes.remove(out, made)
    assert cluster.objects == {}


def test_a_refusal_names_verb_resource_and_the_next_command(cluster: type[Cluster], out: Path, golden: object) -> None:
    cluster.forbidden = True
    with pytest.raises(RequestError) as refused:
        kubernetes.install(out, schedule_of(apply=True, namespace="bench"))
    assert str(refused.value) == golden
    assert "(403 Forbidden); try: kubectl auth can-i create configmaps -n bench" in str(refused.value)


def test_no_cluster_is_one_sentence(cluster: type[Cluster], out: Path, tmp_path: Path, golden: object) -> None:
    config = tmp_path / "kubeconfig"
    config.write_text(config.read_text().replace("127.0.0.1:", "127.0.0.1:1 #"))
    with pytest.raises(RequestError) as caught:
        kubernetes.install(out, schedule_of(apply=True))
    assert str(caught.value) == golden


@pytest.mark.parametrize("content", ["users: [token: s3cret, {]", "contexts: 3"])
def test_a_kubeconfig_that_is_none_is_one_sentence(
    content: str, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: object
) -> None:
    path = tmp_path / "broken"
    path.write_text(content)
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(RequestError) as refusal:
        kubernetes.install(out, schedule_of(apply=True, namespace="bench"))
    assert str(refusal.value) == golden
    assert f"{path}" in str(refusal.value)
    assert "s3cret" not in str(refusal.value)
