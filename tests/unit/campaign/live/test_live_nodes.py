"""Nodes and GPUs of a running run from files that grow, as ranks write them and as log lines bring them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.campaign.live import nodes
from paceline.campaign.live.nodes import CampaignWatch, GpuReading, NodeReading, RunWatch, last_rank, straggler
from paceline.launchers.node.log_transport import Receiver, Sender
from paceline.results import campaign_file, store
from paceline.results.records import GaugeSample
from paceline.results.store import Progress

HOT = "software thermal slowdown"


def reading(rank: int, at_s: float, **more: Any) -> str:
    """One host with two GPUs, the second one hot."""
    host = GaugeSample(rank=rank, host=f"node-{rank}", at_s=at_s, cpu_ratio=0.25, **more)
    gpus = [
        GaugeSample(
            rank=rank,
            host=f"node-{rank}",
            at_s=at_s,
            device=i,
            utilisation_ratio=0.9,
            memory_used_bytes=2**30,
            power_w=500.0 + i,
            sm_clock_hz=1.9e9 if i == 0 else 1.2e9,
            throttle_reasons=() if i == 0 else (HOT,),
        )
        for i in range(2)
    ]
    return "".join(map(store.sample_line, (host, *gpus)))


@pytest.fixture
def run_dir(make_spec: Callable[..., Any], tmp_path: Path) -> Path:
    """A run of two nodes with two ranks each, whose controller is this process."""
    spec = make_spec(nodes=2, steps=100)
    folder = store.create(tmp_path, spec)
    campaign_file.write_plan(folder.parent, [spec])
    return folder


def test_files_that_nodes_send_become_one_view(run_dir: Path, make_step: Callable[..., Any], tmp_path: Path) -> None:
    """No shared disk: each node has its own, and its lines pass through the receiver of the controller."""
    receiver, watch = Receiver(run_dir), CampaignWatch(run_dir.parent)
    assert watch.look() is None
    disks = [tmp_path / f"disk-{node}" for node in range(2)]
    senders = [Sender(disk, node) for node, disk in enumerate(disks)]
    for node, disk in enumerate(disks):
        disk.mkdir()
        for rank in (2 * node, 2 * node + 1):
            store.ProgressFile(disk, rank).mark(7, "forward")
        (disk / f"samples-gauges-{2 * node}.jsonl").write_text(
            reading(2 * node, 100.0, received_bytes=10**6, sent_bytes=0)
        )
    (disks[0] / "samples-0.jsonl").write_text(store.sample_line(make_step(step=6, duration_s=0.5, loss=3.5)))

    def relay() -> None:
        for sender in senders:
            assert [line for line in sender.changes() if receiver.feed(line)] == []

    relay()
    watch._due = 0.0
    look = watch.look()
    assert look is not None
    assert [(node.host, node.rank, len(node.gpus)) for node in look.nodes] == [("node-0", 0, 2), ("node-2", 2, 2)]
    assert look.nodes[1].gpus[1].throttle_reasons == (HOT,)
    assert look.nodes[0].cpu_ratio == 0.25
    assert look.nodes[0].received_per_s is None
    assert [(step.step, step.duration_s, step.loss) for step in look.steps] == [(6, 0.5, 3.5)]
    assert (look.pulse.step, look.ranks) == (7, 4)
    assert look.suspects == (f"node-0 GPU 1: {HOT}", f"node-2 GPU 1: {HOT}")
    with (disks[0] / "samples-gauges-0.jsonl").open("a") as file:
        file.write(reading(0, 102.0, received_bytes=9 * 10**6, sent_bytes=10**6))
    relay()
    look = watch.look()
    assert look is not None
    assert (look.nodes[0].received_per_s, look.nodes[0].sent_per_s) == (4e6, 5e5)
    assert look.steps == ()


def test_files_of_any_content_are_survived(run_dir: Path, make_spec: Callable[..., Any]) -> None:
    store.ProgressFile(run_dir, 0).mark(1, "forward")
    lines = ["{", "[]", "null", '{"device": -1}', '{"device": 1e400}', '{"device": 0, "power_w": "much"}']
    lines += ['{"device": 1, "power_w": NaN, "throttle_reasons": {"a": 1}}', '{"device": null, "host": ["<b>"]}']
    (run_dir / "samples-gauges-0.jsonl").write_text("\n".join(reversed(lines)) + "\n")
    (run_dir / "samples-0.jsonl").write_text('{"kind": "step", "step": "x", "duration_s": 1}\n5\n{"kind": "step"}\n')
    look = RunWatch(run_dir, make_spec(nodes=2, steps=100)).look()
    assert look is not None
    assert look.steps == ()
    assert [gpu.power_w for gpu in look.nodes[0].gpus] == [None, None]


def at(rank: int, step: int, phase: str) -> Progress:
    return Progress(rank, 1, step, phase, 0.0, 1.0)


def test_the_rank_that_others_wait_for() -> None:
    ahead = [at(0, 5, "backward"), at(1, 5, "forward"), at(2, 5, "backward"), at(3, 5, "backward")]
    assert last_rank(ahead, 4, 0.1, {}) == 1
    # Two nodes at different phases show nothing, because their files arrive at different times.
    assert last_rank([at(0, 5, "forward"), at(1, 5, "backward")], 1, 0.1, {}) is None
    assert last_rank([at(0, 5, "forward"), at(1, 6, "forward")], 1, 0.1, {}) is None
    # Three seconds behind is more than a delay of a file.
    assert last_rank([at(0, 5, "forward"), at(1, 6, "forward")], 1, 3.0, {}) == 0
    # Unless its files are the older ones: those of a disk that only the node reaches are fetched every 10 s.
    assert last_rank([at(0, 5, "forward"), at(1, 6, "forward")], 1, 3.0, {0: 8.0, 1: 0.0}) is None
    assert last_rank([at(0, 5, "forward")], 1, 1.0, {}) is None


def test_a_straggler_is_last_in_most_looks() -> None:
    gpus = (GpuReading(), GpuReading(throttle_reasons=(HOT,)))
    found = [NodeReading(host="node-a", rank=0, age_s=0.0, gpus=gpus)]
    assert straggler([1] * 10, found, 2) is None
    assert straggler([1, None] * 15, found, 2) is None
    expected = f"rank 1 (node-a) is last in 20 of 30 looks; its GPU is throttled: {HOT}"
    named = straggler([1] * 20 + [None] * 10, found, 2)
    assert named is not None
    assert named.text == expected


def test_a_slow_clock_is_named_among_busy_peers() -> None:
    def node(*clocks: float) -> NodeReading:
        gpus = tuple(GpuReading(utilisation_ratio=0.9, sm_clock_hz=clock) for clock in clocks)
        return NodeReading(host="n", rank=0, age_s=0.0, gpus=gpus)

    assert list(nodes.suspects([node(1.9e9, 1.9e9, 1.5e9)])) == ["n GPU 2: 1500 MHz, its peers 1900"]
    assert list(nodes.suspects([node(1.9e9, 1.9e9, 1.8e9)])) == []


@pytest.mark.parametrize("number", [10**400, True, "1", [1], float("nan"), float("inf"), -(10**309)])
def test_numbers_that_no_gauge_can_have_are_not_known(run_dir: Path, number: Any) -> None:
    store.ProgressFile(run_dir, 0).mark(1, "forward")
    row = {"kind": "gauge", "host": "a", "cpu_ratio": number, "at_s": number, "received_bytes": number, "sent_bytes": 1}
    gpu = {"kind": "gauge", "host": "a", "device": 0, "power_w": number, "throttle_reasons": number}
    (run_dir / "samples-gauges-0.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(gpu)}\n")
    steps = [
        {"kind": "step", "step": number, "duration_s": 1.0},
        {"kind": "step", "step": 2**63, "duration_s": 1.0},
        {"kind": "step", "step": -1, "duration_s": 1.0},
        {"kind": "step", "step": 3, "duration_s": number},
        {"kind": "step", "step": 4, "duration_s": 0.5, "loss": number},
    ]
    (run_dir / "samples-0.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    look = RunWatch(run_dir, store.read_spec(run_dir)).look()
    assert look is not None
    assert [(step.step, step.loss) for step in look.steps] == [(4, None)]
    assert look.pulse.step_s == pytest.approx(0.875)
    assert (look.nodes[0].cpu_ratio, look.nodes[0].gpus[0].power_w) == (None, None)


def test_ranks_whose_files_do_not_arrive_are_counted(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second node does not share the directory. Files may be late, so it is said after a while only."""
    for rank in (0, 1):
        store.ProgressFile(run_dir, rank).mark(1, "forward")
    watch = RunWatch(run_dir, store.read_spec(run_dir))
    early = watch.look()
    monkeypatch.setattr(nodes, "UNSEEN_S", -1.0)
    late = watch.look()
    for rank in (2, 3):
        store.ProgressFile(run_dir, rank).mark(1, "forward")
    whole = watch.look()
    assert early is not None
    assert late is not None
    assert whole is not None
    assert [look.unseen for look in (early, late, whole)] == [0, 2, 0]
    assert late.unseen_text == (
        "No files of 2 of 4 ranks: their nodes do not share the results directory with this host"
    )
