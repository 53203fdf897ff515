"""Runs on the real API server, scheduler and controllers of Kubernetes, JobSet, Trainer and Kueue.

Only the kubelets are ours: they start pods as processes of this host. The controller has the rights of `paceline
cluster init` and no others. `PACELINE_KUBERNETES` names the directory with the programs (see `testbed.kube_real`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from testbed.kube_api.kueue import LOCAL_QUEUES
from testbed.kube_api.resources import CLAIMS, JOB_SETS
from testbed.kube_api.sandbox import why_not
from testbed.kube_bed import Bed, open_bed
from testbed.kube_real import RealCluster, directory, missing
from testbed.kube_real.cluster import FLAVORS, QUEUES, VOLUMES
from testbed.kube_scenarios import (
    LONG,
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
from testbed.waiting import until

from paceline.experiment.spec import RunSpec
from paceline.results import store

WHY_NOT = missing("jobset", "trainer") or why_not()
NO_KUEUE = missing("kueue")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
]
needs_kueue = pytest.mark.skipif(NO_KUEUE is not None, reason=str(NO_KUEUE))
# A real cluster takes longer to start pods than the double.
PENDING_S = 15.0
# So long may pods wait that do start, also on a busy machine.
QUEUED_S = 30.0
AT_ONCE = 3
GONE = r"the job \S+ is (gone|being)"


def add_claim(bed: Bed, name: str) -> None:
    """A volume and its claim. What is on it is a directory of this host: the kubelets decide that."""
    claim = {"accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeName": f"{name}-kept"}
    capacity = {"storage": "1Gi"}
    volume = {"accessModes": ["ReadWriteMany"], "capacity": capacity, "storageClassName": ""}
    volume |= {"hostPath": {"path": "/nonexistent"}, "claimRef": {"namespace": name, "name": "kept"}}
    bed.cluster.state.create(VOLUMES, "", {"metadata": {"name": f"{name}-kept"}, "spec": volume})
    spec = claim | {"resources": {"requests": capacity}}
    bed.cluster.state.create(CLAIMS, name, {"metadata": {"name": "kept"}, "spec": spec})


def delete_set(bed: Bed, name: str, spec: RunSpec) -> None:
    moving(bed, name, spec)
    (found,) = bed.cluster.state.list(JOB_SETS, name)
    bed.cluster.state.delete(JOB_SETS, name, found["metadata"]["name"], "Background")


def add_queue(bed: Bed, name: str) -> None:
    """A queue of its own, which admits nothing yet."""
    resources = ("cpu", "memory", "ephemeral-storage")
    quota = [{"name": resource, "nominalQuota": "900" if resource == "cpu" else "900Gi"} for resource in resources]
    groups = [{"coveredResources": list(resources), "flavors": [{"name": name, "resources": quota}]}]
    bed.cluster.state.create(FLAVORS, "", {"metadata": {"name": name}, "spec": {}})
    spec = {"namespaceSelector": {}, "resourceGroups": groups}
    bed.cluster.state.create(QUEUES, "", {"metadata": {"name": name}, "spec": spec})
    spec = {"clusterQueue": name, "stopPolicy": "Hold"}
    bed.cluster.state.create(LOCAL_QUEUES, name, {"metadata": {"name": "team"}, "spec": spec})


def set_queue(bed: Bed, name: str, policy: str) -> None:
    found = bed.cluster.state.get(LOCAL_QUEUES, name, "team")
    bed.cluster.state.modify(LOCAL_QUEUES, found, lambda queue: queue["spec"].update(stopPolicy=policy))


def admit_late(bed: Bed, name: str, spec: RunSpec) -> None:
    """Later than pods may wait for a node; what the queue says is shown meanwhile."""
    shown = bed.run_dir(spec) / store.JOB
    until(lambda: shown.exists() and "CreatedWorkload" in str(store.read_json(shown).get("waiting")), "a queue's word")
    time.sleep(QUEUED_S + 3.0)
    assert not bed.pods(name), "nothing starts before it is admitted"
    set_queue(bed, name, "None")


def admit_and_take_back(bed: Bed, name: str, spec: RunSpec) -> None:
    set_queue(bed, name, "None")
    moving(bed, name, spec)
    set_queue(bed, name, "HoldAndDrain")


SCENARIOS = {
    "plain": Scenario("ok"),
    "jobset": Scenario("ok", options={"kind": "jobset"}),
    "trainjob": Scenario("ok", options={"kind": "trainjob"}),
    "claimed": Scenario("ok", options={"kind": "jobset", "results_claim": "kept"}, before=add_claim),
    "again": Scenario(
        "ok",
        env={"LIGHT_S": "8"},
        options={"kind": "trainjob", "results_claim": "kept"},
        fields={"max_restarts": 1},
        before=add_claim,
        meanwhile=delete_pod,
    ),
    "rotated": Scenario("ok", env={"LIGHT_S": "3"}, options={"kind": "jobset"}, meanwhile=rotate),
    "killed": Scenario("failed", r"^rank 1 on killed-. was killed by signal 9", {"LIGHT_FAULT": "die:1"}),
    "killed-set": Scenario(
        "failed", r"^rank 1 on killed-set-. was killed by signal 9", {"LIGHT_FAULT": "die:1"}, {"kind": "jobset"}
    ),
    "killed-train": Scenario(
        "failed", r"^rank 1 on killed-train-. was killed by signal 9", {"LIGHT_FAULT": "die:1"}, {"kind": "trainjob"}
    ),
    **{
        f"plucked-{kind}": Scenario(
            "preempted",
            rf"^pod paceline-\S+ on plucked-{kind}-. was deleted while the job was running",
            LONG,
            {"kind": kind},
            meanwhile=delete_pod,
        )
        for kind in ("job", "jobset", "trainjob")
    },
    **{
        name: Scenario("failed", without_namespace(name), LONG, {"kind": kind}, meanwhile=delete_namespace)
        for name, kind in (("dissolved", "job"), ("dissolved-train", "trainjob"))
    },
    "overdrawn": Scenario(
        "failed",
        r"after 15 s \d of 2 pods have started: FailedCreate: .*exceeded quota: team, requested: requests.cpu=1, "
        r"used: requests.cpu=1, limited: requests.cpu=1",
        options={"pending_s": PENDING_S, "kind": "jobset"},
        before=limit_pods,
    ),
    "uncounted": Scenario(
        "failed",
        r"cannot create jobs in namespace uncounted .*exceeded quota: team.*kubectl describe quota",
        before=limit_jobs,
    ),
    "greedy": Scenario(
        "failed",
        r"after 15 s 0 of 2 pods have started: Unschedulable: 0/\d+ nodes are available: .*Insufficient cpu",
        options={"pending_s": PENDING_S, "cpu_request": 900.0, "cpu_limit": 900.0, "kind": "trainjob"},
    ),
    "deleted": Scenario("failed", rf"{GONE}", LONG, meanwhile=delete_job),
    "deleted-set": Scenario("failed", rf"{GONE}", LONG, {"kind": "jobset"}, meanwhile=delete_set),
}
QUEUED = {
    f"queued-{kind}": Scenario(
        "ok", options={"kind": kind, "queue": "team", "pending_s": QUEUED_S}, before=add_queue, meanwhile=admit_late
    )
    for kind in ("job", "jobset", "trainjob")
}
QUEUED |= {
    f"reclaimed-{kind}": Scenario(
        "preempted",
        r"the queue has suspended the job paceline-\S+ again",
        LONG,
        {"kind": kind, "queue": "team"},
        before=add_queue,
        meanwhile=admit_and_take_back,
    )
    for kind in ("job", "jobset", "trainjob")
}
ALL = {**SCENARIOS, **({} if NO_KUEUE else QUEUED)}


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory, make_spec: Callable[..., RunSpec]) -> Iterator[Bed]:
    folder = tmp_path_factory.mktemp("kubernetes")
    managers = ("jobset", "trainer", *(() if NO_KUEUE else ("kueue",)))
    with open_bed(RealCluster(folder / "cluster", directory(), managers), folder, make_spec) as opened:
        yield opened


@pytest.fixture(scope="module")
def records(bed: Bed, request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Any]]]:
    yield from played(bed, ALL, AT_ONCE, request.session.items)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_run_ends_with_the_right_word_and_leaves_nothing(
    name: str, bed: Bed, records: dict[str, Future[Any]]
) -> None:
    judge(records[name].result(), SCENARIOS[name])
    empty(bed, name)


@needs_kueue
@pytest.mark.parametrize("name", QUEUED)
def test_a_real_kueue_starts_jobs_and_takes_them_back(name: str, bed: Bed, records: dict[str, Future[Any]]) -> None:
    judge(records[name].result(), QUEUED[name])
    empty(bed, name)


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_a_certified_campaign_on_two_pods_ends_with_a_report(
    kind: str, bed: Bed, experiment_file: Callable[..., Path], paceline: Any, smaller: dict[str, Any]
) -> None:
    name = f"certified-{kind}"
    bed.prepare(name)
    tools = experiment_file, paceline
    folder = bed.campaign(tools, name, {"strategy": ["ddp"]}, {"kind": kind}, **smaller)
    found, skipped = store.read_runs(folder)
    assert not skipped
    trained = next(record for record in found if record.spec.strategy is not None)
    assert {outcome.host for outcome in trained.outcomes} == {f"{name}-a", f"{name}-b"}
    report = json.loads((folder / "report.json").read_text())
    assert [certificate["valid"] for certificate in report["certificates"]] == [True]
    empty(bed, name)


def test_an_api_server_that_restarts_costs_nothing(bed: Bed) -> None:
    """A real one answers 403 until it has read its roles. Last: the other runs must not see it."""
    outlive_restart(bed, "restarted", env={"LIGHT_S": "10"}, kind="jobset", patience_s=240.0)
