"""Faults of a cluster and how each run must end, shared by the tests on the double and on real programs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from paceline.experiment.spec import RunSpec
from paceline.results import store
from paceline.results.records import RunRecord
from testbed.kube_bed import Bed
from testbed.waiting import until

LONG = {"LIGHT_S": "120"}
# Pods may wait for this long.
PENDING_S = 4.0


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


def played(
    bed: Bed, scenarios: Mapping[str, Scenario], at_once: int, items: Sequence[pytest.Item]
) -> Iterator[dict[str, Future[Any]]]:
    """The records of the chosen tests' scenarios, which are played a few at a time."""
    chosen = {item.callspec.params.get("name") for item in items if hasattr(item, "callspec")}
    with ThreadPoolExecutor(at_once) as pool:
        yield {name: pool.submit(play, bed, name, each) for name, each in scenarios.items() if name in chosen}


def judge(record: RunRecord, scenario: Scenario) -> None:
    """The run ended as it must, and with all samples or the right sentence."""
    assert (record.status, record.error) == (scenario.status, record.error)
    if scenario.sentence is None:
        assert record.error is None
        assert {sample.rank for sample in record.steps} == {0, 1}
        assert len(record.steps) == 2 * record.spec.steps
    else:
        assert record.error is not None
        assert re.search(scenario.sentence, record.error), record.error
        assert "\n" not in record.error


def empty(bed: Bed, name: str) -> None:
    """Wait until nothing of a run is left."""
    until(lambda: not bed.cluster.leftovers(name), f"the end of {bed.cluster.leftovers(name)}")


def outlive_restart(bed: Bed, name: str, **options: Any) -> None:
    """A run during which the API server restarts ends as if nothing had happened."""
    bed.prepare(name)
    spec = bed.spec_of(name, **options)
    with ThreadPoolExecutor(1) as aside:
        running = aside.submit(bed.run, spec)
        moving(bed, name, spec)
        bed.cluster.stop_api_server()
        time.sleep(1.5)
        bed.cluster.start_api_server()
        record = running.result()
    assert (record.status, record.error) == ("ok", None)
    assert len(record.steps) == 2 * spec.steps
    empty(bed, name)
