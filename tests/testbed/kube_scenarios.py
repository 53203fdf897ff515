"""What befalls runs on a cluster, and how each must end: shared by the tests on the double and on real programs."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from paceline.experiment.spec import RunSpec
from paceline.results import store
from testbed.kube_bed import Bed

WAIT_S = 180.0
LONG = {"LIGHT_S": "120"}
# Pods may wait for this long.
PENDING_S = 4.0


def until(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    raise TimeoutError(f"{what} did not happen within {WAIT_S:g} s")


def moving(bed: Bed, name: str, spec: RunSpec) -> Any:
    """Both pods, once the controller has heard of both ranks."""
    run_dir = bed.run_dir(spec)
    seen = until(
        lambda: store.is_sealed(run_dir) or len(store.read_progress(run_dir)) == 2, f"progress of both ranks of {name}"
    )
    assert not store.is_sealed(run_dir), f"{seen}: the run ended before anything could befall it"
    return bed.pods(name)


def delete_pod(bed: Bed, name: str, spec: RunSpec) -> None:
    bed.cluster.delete_pod(moving(bed, name, spec)[1])


def delete_namespace(bed: Bed, name: str, spec: RunSpec) -> None:
    moving(bed, name, spec)
    bed.cluster.delete_namespace(name)


def without_namespace(name: str) -> str:
    """How a run ends whose namespace was deleted: the pods go first, then the job and the rights, in no order."""
    gone = rf"^the job \S+ is being deleted: somebody deleted its namespace {name}; try: paceline cluster init"
    return rf"{gone}|in namespace {name} .* the permission was removed, or the namespace deleted"


def rotate(bed: Bed, name: str, spec: RunSpec) -> None:
    """The beginning of the logs is gone, and whoever follows them has to begin again."""
    moving(bed, name, spec)
    bed.cluster.rotate_logs(name)


def delete_job(bed: Bed, name: str, spec: RunSpec) -> None:
    moving(bed, name, spec)
    bed.cluster.delete_job(name, bed.jobs(name)[0]["metadata"]["name"])


def limit(bed: Bed, name: str, **hard: str) -> None:
    spec = {"hard": {key.replace("__", "/").replace("_", "."): value for key, value in hard.items()}}
    bed.cluster.apply([{"kind": "ResourceQuota", "metadata": {"name": "team", "namespace": name}, "spec": spec}])


def limit_pods(bed: Bed, name: str) -> None:
    limit(bed, name, requests_cpu="1")


def limit_jobs(bed: Bed, name: str) -> None:
    limit(bed, name, count__jobs_batch="0")


@dataclass(frozen=True)
class Scenario:
    """What is asked for, what goes wrong, and how it must end. sentence: a pattern of the record's error."""

    status: str
    sentence: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    before: Callable[[Bed, str], None] | None = None
    meanwhile: Callable[[Bed, str, RunSpec], None] | None = None


def play(bed: Bed, name: str, scenario: Scenario) -> Any:
    """One scenario to its seal; the record."""
    bed.prepare(name)
    if scenario.before is not None:
        scenario.before(bed, name)
    spec = bed.spec_of(name, fields=scenario.fields, env={"LIGHT_S": "0.5", **scenario.env}, **scenario.options)

    def befall() -> None:
        assert scenario.meanwhile is not None
        try:
            scenario.meanwhile(bed, name, spec)
        except BaseException:
            # Otherwise a run that waits for what did not happen would wait for ever.
            bed.cluster.delete_namespace(name)
            raise

    with ThreadPoolExecutor(1) as aside:
        other = aside.submit(befall) if scenario.meanwhile else None
        record = bed.run(spec)
        if other is not None:
            other.result()
    return record
