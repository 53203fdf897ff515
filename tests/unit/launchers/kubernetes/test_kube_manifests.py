"""What is sent to a cluster, as text and as data: golden files, the official schemas, hostile names, Pod Security."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from testbed.kube_api.admission import check_jobset_names
from testbed.kube_api.refusals import Refusal

from paceline import cli
from paceline.errors import RequestError
from paceline.experiment.choices import Choice
from paceline.experiment.plugins import Offer
from paceline.experiment.serving import Serving
from paceline.experiment.spec import RunSpec
from paceline.launchers import _job, kubernetes
from paceline.launchers.kubernetes.manifests import merged, reader_manifest
from paceline.launchers.kubernetes.options import Options
from paceline.results import store

GOLDEN = Path(__file__).parents[3] / "golden" / "launchers"
VERSIONS = [f"1.{minor}" for minor in range(29, 38)]
Make = Callable[..., RunSpec]

# What a user with everything would write.
EVERYTHING: dict[str, Any] = {
    "namespace": "bench",
    "image_pull_policy": "Always",
    "image_pull_secrets": ["registry"],
    "gpus": 8,
    "cpu_request": 0.5,
    "node_selector": {"pool": "h100"},
    "tolerations": [{"key": "reserved", "operator": "Equal", "value": "bench", "effect": "NoSchedule"}],
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]}}},
    "host_network": True,
    "priority_class": "high",
    "service_account": "runner",
    "queue": "team-a",
    "labels": {"team": "research"},
    "env": {"TOKENIZERS_PARALLELISM": False, "LEVEL": 3},
    "secret_env": {"HF_TOKEN": {"secret": "hub", "key": "token"}},
    "nccl": {"SOCKET_IFNAME": "eth0", "IB_DISABLE": 1},
    "results_claim": "results",
    "pod_patch": {"spec": {"runtimeClassName": "nvidia", "containers": [{"name": "node", "workingDir": "/tmp"}]}},
}  # fmt: skip
GOLDENS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "kubernetes-job": ({"processes": 1, "nodes": 2}, {}),
    "kubernetes-job-everything": ({"processes": 8, "nodes": 2, "device": "cuda"}, EVERYTHING),
    "kubernetes-jobset": ({"processes": 1, "nodes": 2}, {"kind": "jobset"}),
    "kubernetes-trainjob": ({"processes": 1, "nodes": 2}, {"kind": "trainjob", "queue": "team-a"}),
}


@pytest.fixture(autouse=True)
def known_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of jobs and their annotations hold the controller's host and folder."""
    monkeypatch.setattr(socket, "gethostname", lambda: "controller")


@pytest.fixture
def spec_with(make_spec: Make) -> Callable[..., RunSpec]:
    def make(options: dict[str, Any], **more: Any) -> RunSpec:
        spec = make_spec("ddp", more.pop("processes", 1), **more)
        return dataclasses.replace(spec, launcher=Choice("kubernetes", {"image": "paceline:1", **options}))

    return make


def documents(spec: RunSpec) -> list[Any]:
    text = kubernetes.prepare(spec, Path("/runs/one")).files["manifests.yaml"]
    return list(yaml.safe_load_all(text))


def pod_of(manifests: list[Any]) -> Any:
    """The pod template, wherever the kind of object keeps it."""
    for manifest in manifests:
        inner = manifest["spec"]
        inner = inner.get("template", {}).get("spec", inner) if manifest["kind"] == "TrainingRuntime" else inner
        inner = inner["replicatedJobs"][0]["template"]["spec"] if "replicatedJobs" in inner else inner
        if "containers" in inner.get("template", {}).get("spec", {}):
            return inner["template"]
    raise AssertionError("no pod")


def variables_of(manifests: list[Any]) -> dict[str, Any]:
    return {v["name"]: v.get("value", v.get("valueFrom")) for v in pod_of(manifests)["spec"]["containers"][0]["env"]}


def expanded(text: str) -> str:
    """What Kubernetes makes of a command's or a variable's text when no variable of that name is known."""
    return text.replace("$$", "$")


@pytest.mark.parametrize("name", GOLDENS)
def test_the_text_of_a_job_is_the_golden_one(name: str, spec_with: Callable[..., RunSpec]) -> None:
    asked, options = GOLDENS[name]
    spec = spec_with(options, **asked)
    job = kubernetes.prepare(spec, Path("/runs/one"))
    text = job.files["manifests.yaml"].replace(_job.spec_text(spec).replace("'", "''"), "SPEC")
    text = text.replace(str(job.name), "JOB")
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("PACELINE_UPDATE_GOLDEN") == "1":
        path.write_text(text)
    assert text == path.read_text(), "set PACELINE_UPDATE_GOLDEN=1 if the change is meant"


def plain_jobs(manifests: list[Any]) -> Iterator[Any]:
    """Objects that the official schemas know; of a JobSet, the Job that its controller makes."""
    for manifest in manifests:
        if manifest["kind"] in ("Job", "Service"):
            yield manifest
        elif "replicatedJobs" in (spec := manifest["spec"].get("template", {}).get("spec", manifest["spec"])):
            job = spec["replicatedJobs"][0]["template"]["spec"]
            yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": manifest["metadata"], "spec": job}


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_a_lost_replica_takes_no_other_along_and_a_lost_trainer_takes_all(
    kind: str, spec_with: Callable[..., RunSpec]
) -> None:
    served = {"nodes": 3, "workload": "inference", "serving": Serving(), "engine": Choice("vllm")}

    def limits(**asked: Any) -> dict[str, Any]:
        job = next(each for each in plain_jobs(documents(spec_with({"kind": kind}, **asked))) if each["kind"] == "Job")
        if kind == "job":
            kubernetes_validate.validate(job, VERSIONS[0], strict=True)
        names = ("backoffLimit", "backoffLimitPerIndex", "podFailurePolicy")
        return {name: job["spec"][name] for name in names if name in job["spec"]}

    assert limits(**served) == {"backoffLimit": 2, "backoffLimitPerIndex": 0}
    trained = limits(nodes=3)
    assert trained.keys() == {"backoffLimit", "podFailurePolicy"}
    assert trained["backoffLimit"] == 0
    assert limits(**{**served, "nodes": 1}) == trained, "nobody is left to go on"


@pytest.mark.parametrize("version", VERSIONS)
def test_every_supported_version_accepts_it(version: str, spec_with: Callable[..., RunSpec]) -> None:
    for asked, options in GOLDENS.values():
        for manifest in plain_jobs(documents(spec_with(options, **asked))):
            kubernetes_validate.validate(manifest, version, strict=True)
    chosen = Options(image="paceline:1", results_claim="results")
    kubernetes_validate.validate(reader_manifest(chosen, "paceline-x"), version, strict=True)


def test_the_schemas_bite(spec_with: Callable[..., RunSpec]) -> None:
    job = documents(spec_with({"pod_patch": {"spec": {"hostNetwrok": True}}}))[0]
    with pytest.raises(kubernetes_validate.ValidationError, match="hostNetwrok"):
        kubernetes_validate.validate(job, VERSIONS[0], strict=True)


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_pods_satisfy_pod_security_restricted(kind: str, spec_with: Callable[..., RunSpec]) -> None:
    pods = [pod_of(documents(spec_with({"kind": kind, "results_claim": "results"}, nodes=2)))["spec"]]
    pods.append(reader_manifest(Options(image="x", results_claim="results"), "j")["spec"]["template"]["spec"])
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert not pod.get("hostNetwork")
        assert {next(key for key in volume if key != "name") for volume in pod["volumes"]} <= {
            "emptyDir",
            "persistentVolumeClaim",
        }
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_every_pod_knows_its_place(kind: str, spec_with: Callable[..., RunSpec]) -> None:
    spec = spec_with({"kind": kind}, nodes=3)
    name = kubernetes.prepare(spec, Path("/runs/one")).name
    found = variables_of(documents(spec))
    first = {"job": f"{name}-0"}.get(kind, f"{name}-node-0-0")
    assert found["PACELINE_MASTER"] == f"{first}.{name}"
    assert found["PACELINE_NODES"] == "3"
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert found["PACELINE_NODE_RANK"] == {"fieldRef": {"fieldPath": index}}
    assert found["PACELINE_NODE"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert expanded(found["PACELINE_SPEC"]) == _job.spec_text(spec)
    assert len(first) <= 63, "a host name is a DNS label"


@pytest.mark.parametrize("nodes", [2, 10, 1000])
def test_names_leave_room_for_what_a_jobset_appends(
    nodes: int, spec_with: Callable[..., RunSpec], golden: object
) -> None:
    made = documents(spec_with({"kind": "jobset"}, nodes=nodes, model="gpt2-124m"))[0]
    assert len(made["metadata"]["name"]) >= _job.LONGEST_NAME - 1, "a name that was cut"
    check_jobset_names(made["metadata"]["name"], made["spec"])
    with pytest.raises(Refusal) as caught:
        check_jobset_names(made["metadata"]["name"] + "-long", made["spec"])
    assert str(caught.value) == golden
    assert "63" in str(caught.value)


HOSTILE = ["it's", 'say "hi"', "two\nlines", "$(HOME)", "$$(HOME)", "$(rm -rf /)", "- a: b", "{}", "#", "é\u202e"]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_data(text: str, spec_with: Callable[..., RunSpec]) -> None:
    spec = spec_with({"env": {"WORD": text}, "python": f"/opt/{text}/python"})
    manifests = documents(spec)
    value = variables_of(manifests)["WORD"]
    assert expanded(value) == text
    assert expanded(pod_of(manifests)["spec"]["containers"][0]["command"][0]) == f"/opt/{text}/python"
    # An unescaped $( would be looked up among the variables of the pod.
    assert "$(" not in value.replace("$$", "")
    kubernetes_validate.validate(manifests[0], VERSIONS[-1], strict=True)


def test_a_patch_adds_changes_and_removes() -> None:
    pod = {"spec": {"dnsPolicy": "Default", "containers": [{"name": "node", "env": [{"name": "A", "value": "1"}]}]}}
    patch = {
        "metadata": {"annotations": {"a": "b"}},
        "spec": {
            "dnsPolicy": None,
            "containers": [{"name": "node", "env": [{"name": "B", "value": "2"}]}, {"name": "side", "image": "x"}],
            "tolerations": [{"key": "k"}],
        },
    }
    assert merged(pod, patch) == {
        "metadata": {"annotations": {"a": "b"}},
        "spec": {
            "containers": [
                {"name": "node", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
                {"name": "side", "image": "x"},
            ],
            "tolerations": [{"key": "k"}],
        },
    }
    assert pod["spec"]["dnsPolicy"] == "Default", "what was given is not changed"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown option": ({"gpu": 1}, "got 'gpu', expected kind, namespace"),
    "a kind that does not exist": ({"kind": "pod"}, "kubernetes.kind: got 'pod', expected job, jobset"),
    "a namespace that is none": ({"namespace": "My_Space"}, "kubernetes.namespace: got 'My_Space'"),
    "an amount without a unit that exists": ({"memory_limit": "64Q"}, "kubernetes.memory_limit: got '64Q'"),
    "more requested than allowed": ({"cpu_request": 20}, "kubernetes.cpu_request: got 20"),
    "root": ({"user": 0}, "0 is root"),
    "tolerations that are no list": ({"tolerations": {"key": "x"}}, "a list of mappings"),
    "a selector of numbers": ({"node_selector": {"gpus": 8}}, "a mapping of names to text"),
    "a variable that is none": ({"env": {"A B": "x"}}, "variable names"),
    "half a secret": ({"secret_env": {"HF_TOKEN": {"secret": "hub"}}}, "{secret: NAME, key: KEY}"),
    "an image of two words": ({"image": "a b"}, "kubernetes.image: got 'a b'"),
    "no image": ({"image": None}, "kubernetes.image: got nothing, expected the name of an image"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_option_is_one_sentence(case: str, spec_with: Callable[..., RunSpec]) -> None:
    options, sentence = WRONG[case]
    with pytest.raises(RequestError) as caught:
        kubernetes.check(spec_with(options))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


SECRET = "hf_abcdefghijklmnop"


@pytest.mark.parametrize(
    "options",
    [
        {"env": {"HF_TOKEN": "a-long-password"}},
        {"env": {"HARMLESS": SECRET}},
        {"nccl": {"KEY": "a-long-password"}},
        {"pod_patch": {"spec": {"containers": [{"name": "node", "env": [{"name": "X", "value": SECRET}]}]}}},
    ],
)
def test_a_secret_is_refused_and_not_repeated(
    options: dict[str, Any], spec_with: Callable[..., RunSpec], golden: object
) -> None:
    with pytest.raises(RequestError) as caught:
        kubernetes.check(spec_with(options))
    assert str(caught.value) == golden
    assert "secret_env" in str(caught.value)
    assert SECRET not in str(caught.value)
    assert "a-long-password" not in str(caught.value)


def test_what_pods_cannot_do_is_said(spec_with: Callable[..., RunSpec], golden: object) -> None:
    assert kubernetes.check(spec_with({"gpus": 8}, device="cuda", processes=8, nodes=4)) is None
    assert str(kubernetes.check(spec_with({"gpus": 2}, device="cuda", processes=8))) == golden
    assert str(kubernetes.check(spec_with({}, device="cuda", processes=1))) == golden
    assert str(kubernetes.check(spec_with({"gpus": 1}))) == golden
    restarted = dataclasses.replace(spec_with({}), max_restarts=2)
    assert "results_claim" in str(kubernetes.check(restarted))
    assert kubernetes.check(dataclasses.replace(spec_with({"results_claim": "r"}), max_restarts=2)) is None


def test_what_pods_offer() -> None:
    assert kubernetes.offer(Choice("kubernetes")) == Offer(device="cpu", processes=1)
    assert kubernetes.offer(Choice("kubernetes", {"gpus": 4})) == Offer(device="cuda", processes=4)


def test_preparing_is_pure(spec_with: Callable[..., RunSpec], tmp_path: Path) -> None:
    spec = spec_with(EVERYTHING, device="cuda", processes=8)
    assert kubernetes.prepare(spec, tmp_path) == kubernetes.prepare(spec, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert kubernetes.prepare(spec, tmp_path).name != kubernetes.prepare(spec, tmp_path / "other").name


def test_a_plan_is_what_kubectl_would_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], golden: object
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.yaml"
    launcher = {"name": "kubernetes", "image": "paceline:1", "env": {"WORD": "$(HOME)\n---\n"}}
    fields = {"model": "tiny", "device": "cpu", "nodes": 2, "processes": 1, "steps": 4, "launcher": launcher}
    fields |= {"sequence_length": 32, "global_batch": 8}
    file.write_text(yaml.safe_dump({"name": "mine", "base": fields, "matrix": {"strategy": ["ddp"]}}))
    assert cli.main(["plan", str(file), "--manifests"]) == 0
    found = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [manifest["kind"] for manifest in found] == ["Job", "Service"] * 2, "the reference, then the run"
    assert cli.main(["plan", str(file), "--manifests", "--launcher", "local", "--set", "nodes=1"]) == 2
    assert "--manifests: got 'local', expected" in capsys.readouterr().err
    for other in ("slurm", "ray", 'ssh:hosts=["a","b"]'):
        assert cli.main(["plan", str(file), "--manifests", "--launcher", other]) == 2
        said = capsys.readouterr()
        assert said.out == "", "no script of another engine"
        assert said.err == golden
        assert "YAML" in said.err
    assert cli.main(["plan", str(file), "--commands"]) == 0
    assert "kubectl apply -f -" in capsys.readouterr().out
    monkeypatch.setattr(store, "is_sealed", lambda run_dir: "ddp" not in run_dir.name)
    monkeypatch.setattr(store, "read_end", lambda _: "its end")
    assert cli.main(["plan", str(file), "--manifests"]) == 0
    said = capsys.readouterr()
    assert len(list(yaml.safe_load_all(said.out))) == 2, "the run alone"
    assert said.err == golden
