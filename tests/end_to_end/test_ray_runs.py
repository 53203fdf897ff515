"""The launcher ray on a real cluster of three nodes: one certified campaign, and every way a job can end badly."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from testbed import EXHAUSTIVE, ONE_SUM, ray_cluster
from testbed.observers import live_looks, seen_live

from paceline.campaign.run import controller
from paceline.experiment.choices import Choice
from paceline.experiment.serving import Serving
from paceline.experiment.spec import RunSpec
from paceline.report.tables.one_run import record_lines
from paceline.results import store
from paceline.results.records import RunRecord, Status

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(ray_cluster.obstacle() is not None, reason=ray_cluster.obstacle() or ""),
]

LIGHT = "testbed.light_ray"
# Ranks that would go on for minutes, in steps of a third of a second.
LONG = {"LIGHT_S": "300"}
STEPS = {"steps": 1000}
# Real ranks of served replicas; the folder is made for each run.
MEETING = {"LIGHT_MEETING": ""}
SERVED: dict[str, Any] = {
    "workload": "inference",
    "serving": Serving(requests=24, max_tokens=4, concurrency=4, warmup_requests=1, request_timeout_s=60.0),
    "data": Choice.parse("synthetic:prompt=fixed,prompt_mean=4,answer_mean=4"),
}
BASE: dict[str, Any] = {
    "model": "tiny",
    "device": "cpu",
    "precision": "fp32",
    "sequence_length": 32,
    "global_batch": 4,
    "nodes": 2,
    "processes": 1,
    "steps": 4,
    "warmup": {"minimum": 1, "maximum": 1, "window": 2},
    "timeout_s": 300.0,
    "stall_s": 200.0,
}


@pytest.fixture(scope="module")
def cluster(environment: Callable[..., dict[str, str]]) -> Iterator[ray_cluster.RayCluster]:
    with ray_cluster.start(environment()) as found:
        yield found


@pytest.fixture(scope="module")
def light(
    cluster: ray_cluster.RayCluster, make_spec: Callable[..., RunSpec], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., RunSpec]]:
    """Specs of two light ranks on two nodes of the cluster. Scratch folders of ranks have a place that is looked at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHT_RAY_NET", cluster.net)
        # A reference of two ranks: the only work whose verdict needs no torch.
        patch.setattr(controller, "unsupported", lambda spec: None)
        scratch = tmp_path_factory.mktemp("scratch")

        def make(env: dict[str, str], launcher: dict[str, Any] | None = None, **more: Any) -> RunSpec:
            usual = {"workload": "reference", "timeout_s": 300.0, "stall_s": 200.0}
            spec = make_spec(None, 1, nodes=2, **usual | more)
            options = {"address": cluster.address, "scratch": str(scratch), "env": env, **(launcher or {})}
            return dataclasses.replace(spec, launcher=Choice(LIGHT, options))

        make.scratch = scratch  # type: ignore[attr-defined]
        yield make


class Watcher:
    """An observer that calls once when the run has moved."""

    def __init__(self, at_work: Callable[[Path], None] = lambda run_dir: None) -> None:
        self._at_work, self._run_dir, self._done = at_work, Path(), False
        self.waited: set[str] = set()

    def begin(self, specs: Any) -> None: ...
    def advising(self, spec: Any, seconds: float) -> None: ...
    def ended(self, *facts: Any) -> None: ...

    def started(self, spec: RunSpec, run_dir: Path) -> None:
        self._run_dir = run_dir

    def waiting(self, spec: RunSpec, reason: str, seconds: float) -> None:
        self.waited.add(reason)

    def moved(self, spec: RunSpec, positions: Any) -> None:
        if len([p for p in positions if p.step >= 1]) == 2 and not self._done:
            self._done = True
            self._at_work(self._run_dir)


def interrupt(run_dir: Path) -> None:
    raise KeyboardInterrupt


def kill_driver(run_dir: Path) -> None:
    os.kill(store.read_json(run_dir / "job.json")["handle"]["pid"], signal.SIGKILL)


def dying(rank: int) -> Choice:
    """Replicas of which one kills its rank and itself while it is asked."""
    return Choice("testbed.replicas", {"dies_after": 6, "whose": rank, "takes_rank": True})


# name -> variables of the ranks, options of the launcher, fields of the spec, what happens once both ranks have moved
TROUBLES: dict[str, tuple[dict[str, str], dict[str, Any], dict[str, Any], Callable[[Path], None] | None]] = {
    "killed rank": ({"LIGHT_FAULT": "die:1"}, {}, {}, None),
    "full disk": ({"LIGHT_FAULT": "full:1"}, {}, {}, None),
    "lost replica": (MEETING, {}, {**SERVED, "engine": dying(rank=1)}, None),
    "lost client": (MEETING, {}, {**SERVED, "engine": dying(rank=0)}, None),
    "hang": ({"LIGHT_FAULT": "hang:1"}, {}, {"stall_s": 40.0}, None),
    "time limit": (LONG, {}, {**STEPS, "timeout_s": 40.0}, None),
    "interrupt": (LONG, {}, STEPS, interrupt),
    "killed driver": (LONG, {}, STEPS, kill_driver),
    "no room": ({}, {"resources": {"tpu": 3}, "pending_s": 2.0}, {}, None),
    "no cluster": ({}, {"address": "127.0.0.1:9"}, {}, None),
    "other Ray": ({"LIGHT_RAY_VERSION": "9.9.9"}, {}, {}, None),
}
# name -> status, words of the sentence
ENDS = {
    "killed rank": (Status.FAILED, ("rank 1 on ", "was killed by signal 9")),
    "full disk": (Status.FAILED, ("rank 1 on ", "No space left on device")),
    "lost client": (Status.FAILED, ("rank 0 on ", "was killed by signal 9")),
    "hang": (Status.HANG, ("no progress for 40 s: rank 1 stopped at step 1",)),
    "time limit": (Status.TIMEOUT, ("did not end within 40 s", "rank 0 was at step")),
    "killed driver": (Status.FAILED, ("the driver of the Ray job ended with exit code -9",)),
    "no room": (Status.FAILED, ("within 2 s: the job requests 2 x 1 CPU + 3 tpu under STRICT_SPREAD", "left: 16 CPU")),
    "no cluster": (Status.FAILED, ("no Ray cluster answers at 127.0.0.1:9", "Connection refused")),
    "other Ray": (Status.FAILED, ("this controller has Ray 9.9.9 on Python", "they must be the same")),
}


# The others end in the same words under SSH and Slurm.
USUAL = ("killed rank", "interrupt", "no room", "no cluster", "other Ray")
if not EXHAUSTIVE:
    TROUBLES = {name: TROUBLES[name] for name in USUAL}
    ENDS = {name: ENDS[name] for name in USUAL if name in ENDS}


@pytest.fixture(scope="module")
def troubled(light: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All troubles at once, each with a controller's thread of its own; name -> (result or exception, folder)."""

    def suffer(name: str) -> Any:
        env, launcher, fields, at_work = TROUBLES[name]
        out, watcher = tmp_path_factory.mktemp("trouble"), Watcher(at_work or (lambda run_dir: None))
        env = {key: value or str(tmp_path_factory.mktemp("meeting")) for key, value in env.items()}
        try:
            return controller.execute(light(env, launcher, **fields), out, watcher, None), out
        except KeyboardInterrupt as caught:
            return caught, out

    with ThreadPoolExecutor(len(TROUBLES)) as pool:
        return dict(zip(TROUBLES, pool.map(suffer, TROUBLES), strict=True))


@pytest.mark.parametrize("name", ENDS)
def test_a_trouble_is_a_sealed_record_with_a_sentence(troubled: dict[str, Any], name: str) -> None:
    (status, error), out = troubled[name]
    wanted, words = ENDS[name]
    assert status is wanted, error
    assert all(word in error for word in words), error
    assert "\n" not in error
    assert all(store.is_sealed(run_dir) for run_dir in store.run_dirs(out))


@pytest.mark.exhaustive
def test_what_ranks_wrote_before_the_trouble_is_kept(troubled: dict[str, Any]) -> None:
    for name in ("killed rank", "full disk", "hang"):
        record = next(iter(store.read_runs(troubled[name][1])[0]))
        assert {sample.rank for sample in record.steps} == {0, 1}, name


@pytest.mark.exhaustive
def test_replicas_go_on_without_a_rank_that_was_killed(troubled: dict[str, Any]) -> None:
    (status, error), out = troubled["lost replica"]
    # A client that was late on a busy machine says so itself, and only that.
    assert status is Status.OK or str(error).startswith("client: "), error
    (record,) = store.read_runs(out / "test")[0]
    assert sorted(request.sample for request in record.requests) == list(range(24))
    assert {request.error for request in record.requests} == {None}
    assert [replica.died_ns is not None for replica in record.replicas] == [False, True]
    assert record.replicas[1].reassigned >= 1
    assert record.lost_nodes == (1,)
    assert [(outcome.rank, outcome.status) for outcome in record.outcomes] == [(0, Status.OK)]
    assert any("node 1 of 2 was lost before the end" in line for line in record_lines(record, None))


def test_an_interrupt_leaves_no_seal(troubled: dict[str, Any]) -> None:
    result, out = troubled["interrupt"]
    assert isinstance(result, KeyboardInterrupt)
    assert not any(store.is_sealed(run_dir) for run_dir in store.run_dirs(out))


def remains(cluster: ray_cluster.RayCluster, light: Any) -> list[str]:
    """What a job has left: groups, reserved CPUs, rank processes, scratch folders."""
    held = cluster.leftovers()
    mine = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if LIGHT in " ".join(p.info["cmdline"] or ())]
    alive = [" ".join(words) for words in mine if str(light.scratch) in " ".join(words)]
    return [*held["groups"], *(["CPUs"] if held["cpus"] else []), *alive, *map(str, light.scratch.iterdir())]


def remains_at_last(cluster: ray_cluster.RayCluster, light: Any) -> list[str]:
    """Ray notices the death of a driver in its own time; what is there after a minute stays."""
    deadline = time.monotonic() + 60
    while (found := remains(cluster, light)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def test_no_trouble_leaves_anything(troubled: dict[str, Any], cluster: ray_cluster.RayCluster, light: Any) -> None:
    assert remains_at_last(cluster, light) == []


def written(path: Path, name: str, **base: Any) -> Path:
    file = path / f"{name}.yaml"
    file.write_text(yaml.safe_dump({"name": name, "base": BASE | base}))
    return file


def test_a_killed_controller_leaves_nothing_and_the_same_command_goes_on(
    cluster: ray_cluster.RayCluster,
    light: Any,
    tmp_path: Path,
    environment: Callable[..., dict[str, str]],
    eventually: Callable[..., Any],
) -> None:
    """One rank that lives for some seconds: killed at its first step, then let live."""
    options = {"name": LIGHT, "address": cluster.address, "scratch": str(light.scratch), "env": {"LIGHT_S": "6"}}
    file = written(tmp_path, "killed", workload="reference", processes=1, nodes=1, steps=20, launcher=options)
    command = [sys.executable, "-m", "paceline.cli", "run", str(file), "--out", str(tmp_path), "--format", "json"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL) as child:
        eventually(lambda: [p for d in store.run_dirs(tmp_path) for p in store.read_progress(d)], "a rank at work")
        child.kill()
    assert remains_at_last(cluster, light) == []
    again = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240, check=False)
    # A reference alone ranks nothing, so the campaign's exit code is no matter here.
    assert " ok (" in again.stdout, again.stdout + again.stderr
    run_dir = next(iter(store.run_dirs(tmp_path)))
    assert store.read_run(run_dir).status is Status.OK
    assert (run_dir / "attempts" / "1" / "spec.json").is_file(), "the first attempt is kept"


@pytest.fixture
def campaign_in(
    cluster: ray_cluster.RayCluster, tmp_path: Path, environment: Callable[..., dict[str, str]]
) -> Callable[..., list[RunRecord]]:
    """The records of a campaign of real ranks, whose report is in `tmp_path / "ray"`."""

    def run(launcher: str = "ray", **base: Any) -> list[RunRecord]:
        file = written(tmp_path, "ray", launcher={"name": launcher, "address": cluster.address}, **base)
        command = ["nsenter", f"--net={cluster.net}", sys.executable, "-m", "paceline.cli", "run", str(file)]
        command += ["--out", str(tmp_path), "--format", "json", "--format", "markdown"]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        records, skipped = store.read_runs(tmp_path / "ray")
        assert not skipped
        return records

    return run


def test_real_ranks_on_two_nodes_meet_and_are_reported(campaign_in: Callable[..., Any], tmp_path: Path) -> None:
    with live_looks(tmp_path) as looks:
        (record,) = campaign_in("testbed.forked_ray", workload=ONE_SUM)
    assert record.status is Status.OK
    hosts = {outcome.host for outcome in record.outcomes}
    assert len(hosts) == 2, "one rank on each of two nodes"
    assert seen_live(looks) == hosts
    assert {(row.rank, row.operation, row.wrong) for row in record.collectives} == {
        (r, "all_reduce", 0) for r in (0, 1)
    }
    assert "collectives" in (tmp_path / "ray" / "report.md").read_text()


@pytest.mark.exhaustive
def test_a_certified_campaign_on_two_nodes(campaign_in: Callable[..., Any], tmp_path: Path) -> None:
    record = next(record for record in campaign_in(strategy="ddp") if not record.is_reference)
    assert record.status is Status.OK
    assert len({outcome.host for outcome in record.outcomes}) == 2, "one rank on each of two nodes"
    assert {sample.rank for sample in record.steps} == {0, 1}
    assert "ddp" in (tmp_path / "ray" / "report.md").read_text()


@pytest.mark.exhaustive
def test_a_node_that_disappears(cluster: ray_cluster.RayCluster, light: Any, tmp_path: Path) -> None:
    """The last test of the light ones: the cluster is smaller afterwards."""

    def take_away(run_dir: Path) -> None:
        used = {path.stem.removeprefix("machine-") for path in run_dir.glob("machine-*.json")}
        cluster.ask(what="remove", node=max(used & {"left", "right"}))

    status, error = controller.execute(light(LONG, **STEPS), tmp_path, Watcher(take_away), None)
    assert status is Status.FAILED
    assert "its node has left the Ray cluster" in error
    assert remains_at_last(cluster, light) == []
