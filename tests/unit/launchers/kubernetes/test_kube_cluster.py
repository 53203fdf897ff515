"""`paceline cluster`: manifests with the least rights, valid for every supported version, and what a check finds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from testbed.kube_api import Cluster, Node
from testbed.kube_api.sandbox import why_not

from paceline import cli
from paceline.cli import cluster as cluster_verbs
from paceline.launchers.kubernetes import cluster as cluster_checks
from paceline.launchers.kubernetes.cluster import CONTROLLER_ACCOUNT, cluster_manifests, rights, smoke_job
from paceline.launchers.kubernetes.options import KINDS, Options, quantity

VERSIONS = ("1.29", "1.31", "1.33", "1.35", "1.37")


def everything(**more: Any) -> list[dict[str, Any]]:
    made = cluster_manifests("bench", KINDS, {"pods": "8", "requests.nvidia.com/gpu": "16"})
    return [*(each for file in made.values() for each in file), smoke_job(Options(image="paceline:1"), "bench")]


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_written_is_valid(version: str) -> None:
    import kubernetes_validate

    for manifest in everything():
        kubernetes_validate.validate(manifest, version, strict=True)


def test_no_right_is_a_wildcard_and_pods_have_none() -> None:
    roles = [m for m in everything() if m["kind"] == "Role"]
    assert len(roles) == 1
    assert "*" not in json.dumps(roles[0]["rules"])
    assert all("/" not in r or r == "pods/log" for rule in roles[0]["rules"] for r in rule["resources"])
    assert not {"secrets", "pods/exec", "nodes"} & {r for rule in roles[0]["rules"] for r in rule["resources"]}
    bound = [s["name"] for m in everything() if m["kind"] == "RoleBinding" for s in m["subjects"]]
    assert bound == [CONTROLLER_ACCOUNT]
    plain = cluster_manifests("bench")["10-access.yaml"][1]["rules"]
    assert {r for rule in plain for r in rule["resources"]} == {"jobs", "pods", "pods/log", "services", "events"}


def test_pods_of_a_run_reach_each_other_at_every_port() -> None:
    """Ranks and the servers of replicas listen at ports that nobody knows beforehand."""
    (policy,) = (m for m in everything() if m["kind"] == "NetworkPolicy")
    ours = policy["spec"]["podSelector"]
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": ours}]}]
    assert {"to": [{"podSelector": ours}]} in policy["spec"]["egress"]


def test_init_prints_or_writes_what_kubectl_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cluster", "init", "--namespace", "bench", "--quota", "pods=8"]) == 0
    printed = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [m["kind"] for m in printed][:2] == ["Namespace", "ServiceAccount"]
    assert printed[-1]["spec"] == {"hard": {"pods": "8"}}
    assert cli.main(["cluster", "init", "--out", str(tmp_path), "--image", "paceline:1", "--kind", "jobset"]) == 0
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.yaml"))
    assert names == ["00-namespace.yaml", "10-access.yaml", "20-network.yaml", "smoke/job.yaml"]
    assert "jobsets" in (tmp_path / "10-access.yaml").read_text()


@pytest.mark.parametrize(
    "words",
    [
        ["init", "--namespace", "Bad_NS"],
        ["init", "--image", "a b"],
        ["init", "--out", __file__],
        ["init", "--out", "/dev/null/x"],
        ["init", "--kind", "pod"],
        ["init", "--quota", "pods"],
        ["init", "--apply", "--out", "x"],
        ["check", "--launcher", "slurm"],
        ["check", "--timeout", "0"],
    ],
)
def test_a_wrong_request_is_one_sentence(words: list[str], capsys: pytest.CaptureFixture[str], golden: object) -> None:
    assert cli.main(["cluster", *words]) == 2
    said = capsys.readouterr().err
    assert said == golden
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "number"), [("8", 8), ("500m", 0.5), ("2Ki", 2048), ("1k", 1000), ("32Gi", 2**35), ("odd", 0)]
)
def test_quantities(text: str, number: float) -> None:
    assert quantity(text) == number


@pytest.mark.parametrize(("request_", "small"), [("32Gi", "1Gi"), ("512Mi", "512Mi")])
def test_a_probe_has_the_memory_limit_of_a_run_and_asks_for_little(request_: str, small: str) -> None:
    """A memory disk is no larger than the limit of its pod: a small one would show less than runs have."""
    chosen = Options(image="paceline:1", memory_request=request_, memory_limit="48Gi", gpus=1)
    pod = cluster_checks._probe_job(chosen, "probe", 60.0)["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"] == {
        "requests": {"cpu": "1", "memory": small},
        "limits": {"cpu": "1", "memory": "48Gi", "nvidia.com/gpu": "1"},
    }


LABELS = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/cuda.driver-version.full": "580.65.06"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if why_not():
        pytest.skip(str(why_not()))
    nodes = (Node(name="a"), Node(name="b", gpus=8, labels=LABELS))
    with Cluster(tmp_path_factory.mktemp("cluster"), nodes) as found:
        found.kubelet.missing_images.add("absent:1")
        yield found


Check = Callable[..., tuple[int, dict[str, dict[str, Any]]]]


@pytest.fixture
def check(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Check:
    """`cluster check` by an account of a namespace, or by an administrator: exit code, and answers by name."""
    from kubernetes.config import kube_config

    monkeypatch.setattr(cluster_checks, "LINGER_S", 0.5)
    monkeypatch.setattr(cluster_verbs, "PATIENCE_S", 1.0)
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))

    def call(launcher: str, *words: str, account: str | None = None) -> tuple[int, dict[str, dict[str, Any]]]:
        who = {"token": cluster.access.token_for("ready", account)} if account else {}
        cluster.kubeconfig(tmp_path / "config", namespace="ready", **who)
        code = cli.main(["cluster", "check", "--launcher", launcher, "--json", *words])
        return code, {item["name"]: item for item in json.loads(capsys.readouterr().out)["checks"]}

    return call


@pytest.mark.slow
def test_a_namespace_made_by_init_passes_with_the_rights_that_init_gave(
    cluster: Cluster, check: Check, capsys: Any, golden: object
) -> None:
    code, found = check("kubernetes:image=paceline:1")
    assert code == 1
    assert found["namespace"]["text"] == golden
    assert found["namespace"]["fix"] == golden
    assert "--namespace" in found["namespace"]["fix"]
    for word in ("created", "updated"):
        assert cli.main(["cluster", "init", "--namespace", "ready", "--apply"]) == 0
        assert f"{word} Role {CONTROLLER_ACCOUNT}" in capsys.readouterr().out
    code, found = check("kubernetes:image=paceline:1", account=CONTROLLER_ACCOUNT)
    assert code == 0, found
    asked = sum(len(verbs) for verbs in rights("job").values())
    assert found["permissions"]["text"] == golden
    assert f"{asked}" in found["permissions"]["text"]
    assert found["nodes"]["ok"] is None, "runs need not see nodes"
    assert [found[name]["ok"] for name in ("image", "names", "shared memory")] == [True, True, True]
    assert found["shared memory"]["text"] == golden
    assert "8.00" in found["shared memory"]["text"]
    assert not [each for each in cluster.leftovers("ready") if each.startswith(("Job", "Service"))]

    code, found = check(
        "kubernetes:image=absent:1,gpus=4,priority_class=none,results_claim=none,queue=none", "--no-pods"
    )
    assert code == 1
    assert [found[name]["ok"] for name in ("priority class", "claim", "queue")] == [False, False, False]
    assert found["gpus"]["text"] == golden
    assert "nvidia.com" in found["gpus"]["text"]
    assert "NVIDIA-H100-80GB-HBM3" in found["gpus"]["text"]
    assert "580.65.06" in found["gpus"]["text"]
    code, found = check("kubernetes:image=absent:1", "--timeout", "60")
    assert code == 1
    assert "ErrImagePull" in found["image"]["text"] or "ImagePullBackOff" in found["image"]["text"]
    code, found = check("kubernetes:image=paceline:1,memory_request=900Gi", "--no-pods")
    assert (code, "memory" in found["nodes"]["fix"]) == (1, True)

    cluster.forbid("ready", CONTROLLER_ACCOUNT, "pods/log", "get")
    code, found = check("kubernetes:image=paceline:1", account=CONTROLLER_ACCOUNT)
    assert code == 1
    assert found["permissions"]["text"] == golden
    cluster.stop_api_server()
    try:
        code, found = check("kubernetes:image=paceline:1")
    finally:
        cluster.start_api_server(cold_s=0)
    assert (code, list(found)) == (1, ["api server"])
    assert found["api server"]["text"] == golden
