"""The manifests against the CRDs of JobSet, Kubeflow Trainer and Kueue: always by the double's own table of their
fields, and by the CRDs themselves where PACELINE_CRDS names a directory with them.

    git -C jobset show v0.12.0:config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml > crds/jobsets.yaml
    git -C trainer show v2.3.0:manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml > crds/trainjobs.yaml
    git -C trainer show v2.3.0:manifests/base/crds/trainer.kubeflow.org_trainingruntimes.yaml > crds/runtimes.yaml
    PACELINE_CRDS=crds pytest tests/unit/launchers/kubernetes/test_kube_crds.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from testbed.kube_api import admission, custom
from testbed.kube_api.refusals import Refusal
from testbed.kube_api.resources import BY_KIND

from paceline.experiment.choices import Choice
from paceline.experiment.serving import Serving
from paceline.experiment.spec import RunSpec
from paceline.launchers.kubernetes import cluster
from paceline.launchers.kubernetes.client import NotFound
from paceline.launchers.kubernetes.manifests import job_manifests
from paceline.launchers.kubernetes.options import Options

RICH: dict[str, Any] = {
    "queue": "team",
    "priority_class": "high",
    "service_account": "bench",
    "image_pull_secrets": ["pull"],
    "node_selector": {"a": "b"},
    "tolerations": [{"key": "k", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "host_network": True,
    "labels": {"team": "a"},
    "env": {"A": "1"},
    "secret_env": {"HF_TOKEN": {"secret": "hub", "key": "token"}},
    "results_claim": "claim",
}


@pytest.fixture(params=["jobset", "trainjob"])
def made(request: pytest.FixtureRequest, make_spec: Callable[..., RunSpec]) -> list[Any]:
    """Every object of a kind, of training and of inference on two nodes, with few options and with many."""
    trained = make_spec("ddp", 1, nodes=2)
    served = make_spec(None, processes=1, nodes=2, workload="inference", serving=Serving(), engine=Choice("vllm"))
    objects = []
    for spec in (trained, served):
        for more in ({}, RICH):
            chosen = Options(kind=request.param, namespace="bench", image="paceline:1", gpus=8, **more)
            objects += job_manifests(spec, chosen, "paceline-a", Path("/run"), "1")
    assert "backoffLimitPerIndex" in json.dumps(objects), "the inference run does not survive a lost replica"
    return objects


def test_the_table_of_the_double_knows_every_field(made: list[Any]) -> None:
    for manifest in made:
        admission._check_schema(BY_KIND[manifest["kind"]], manifest)


@pytest.mark.parametrize(
    ("path", "value"),
    [(["network", "subdomains"], "a"), (["failurePolicy", "maxRestarts"], "0"), (["replicatedJobs"], {}), (["ttl"], 1)],
)
def test_the_table_bites(path: list[str], value: Any) -> None:
    spec: Any = {"network": {}, "failurePolicy": {}, "replicatedJobs": []}
    inner = spec[path[0]] if path[1:] else spec
    inner[path[-1]] = value
    with pytest.raises(Refusal, match=path[-1]):
        admission._check_schema(BY_KIND["JobSet"], {"metadata": {"name": "a"}, "spec": spec})


def test_an_embedded_job_has_the_official_schema() -> None:
    group = {"name": "node", "template": {"spec": {"template": {"spec": {"containers": [], "wrong": 1}}}}}
    with pytest.raises(Refusal, match="wrong"):
        admission._check_schema(BY_KIND["JobSet"], {"metadata": {"name": "a"}, "spec": {"replicatedJobs": [group]}})


def test_every_manifest_is_valid_by_the_published_crds(made: list[Any], published: dict[str, Any]) -> None:
    """Fields that a CRD does not have, and other types."""
    import jsonschema

    for manifest in made:
        jsonschema.validate(json.loads(json.dumps(manifest)), published[manifest["kind"]])


def test_the_table_lists_only_fields_of_the_newest_crds(published: dict[str, Any]) -> None:
    for kind, schema in published.items():
        assert {*custom.FIELDS[kind]} <= {*schema["properties"]["spec"]["properties"]}, "or are these CRDs old?"


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    """The schemas in PACELINE_CRDS by kind."""
    folder = os.environ.get("PACELINE_CRDS")
    if not folder:
        pytest.skip("PACELINE_CRDS names no directory of CRDs")
    schemas = {}
    for path in sorted(Path(folder).glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            own = strict(document["spec"]["versions"][-1]["schema"]["openAPIV3Schema"])
            own["properties"]["metadata"] = {"type": "object"}
            schemas[document["spec"]["names"]["kind"]] = own
    return schemas


def strict(schema: Any) -> Any:
    """The schema of a CRD as JSON Schema that refuses unknown fields, as `fieldValidation=Strict` does."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: value for key, value in schema.items() if key not in ("default", "format") and key[:2] != "x-"}
    made = {
        key: {name: strict(inner) for name, inner in value.items()} if key == "properties" else strict(value)
        for key, value in plain.items()
    }
    if schema.get("x-kubernetes-int-or-string"):
        made = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made["additionalProperties"] = False
    return made


@pytest.mark.parametrize("served", ["v1beta2", "v1beta1", None])
def test_a_queue_is_looked_up_in_the_version_that_the_cluster_serves(served: str | None) -> None:
    asked = []

    def call(_verb: str, kind: str, _api: str, _method: str, _group: str, version: str, *_more: str) -> None:
        asked.append((kind, version))
        if version != served:
            raise NotFound("not found")

    found = cluster._queue(SimpleNamespace(call=call, namespace="bench"), "team")  # type: ignore[arg-type]
    assert found.ok is (served is not None)
    assert [version for kind, version in asked if kind == "queue"] == ([served] if served else [])
