"""Node acceptance with real processes as nodes: healthy ones pass; a slow one and a corrupt one are found and named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty import nodes as faulty

pytestmark = pytest.mark.slow

# The band is wide because this machine may be busy: the fault that must be found is an order of magnitude.
SMALL = "node=process,repeats=3,side=64,copy_bytes=1048576,iters=5,budget_s=0.05,pair_bytes=64KiB,speed_ratio=0.5"
TINY: dict[str, Any] = {
    "model": "tiny:layers=1,hidden=64",
    "sequence_length": 16,
    "global_batch": None,
    "micro_batch": 1,
    "steps": 2,
}


def installed(folder: Path, module: str) -> dict[str, str]:
    """A plugin in the place of ours, as an installed package could put one there."""
    info = folder / "faulty-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[paceline.workloads]\nnodes = {module}\n")
    return {"PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def sound(campaign: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    env = installed(tmp_path_factory.mktemp("steady"), "faulty.steady")
    return campaign("sound", {"workload": [f"nodes:{SMALL},tournament=false"]}, env, processes=3, **TINY)


@pytest.fixture(scope="module")
def ill(campaign: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    env = installed(tmp_path_factory.mktemp("faulty"), "faulty.nodes")
    return campaign("ill", {"workload": [f"nodes:{SMALL}"]}, env, processes=3, **TINY)


def test_healthy_nodes_pass(sound: Any) -> None:
    assert sound.code == 0, sound.stdout + sound.stderr
    assert [node["verdict"] for node in sound.report["nodes"]] == ["pass"] * 3
    assert "3 of 3 ranks pass." in sound.stdout
    measured = {m["measure"] for node in sound.report["nodes"] for m in node["measures"]}
    assert measured >= {"matmul fp32", "memory copy", "training"}


def test_every_node_trains_the_same_by_itself(sound: Any) -> None:
    (record,) = sound.records
    assert len({(t.losses, t.weights) for t in record.trajectories}) == 1
    assert {(t.rank, t.turn) for t in record.trajectories} == {(r, turn) for r in range(3) for turn in (0, 1)}
    assert {(s.rank, s.variant) for s in record.steps} == {(r, i) for r in range(3) for i in range(3)}
    assert len({s.data_digest for s in record.steps if s.step == 5}) == 1
    assert {p.wrong for p in record.products} == {0}
    assert not record.wire


def test_the_corrupt_node_is_named_with_the_element_and_the_bit(ill: Any) -> None:
    node = ill.report["nodes"][faulty.CORRUPT]
    assert node["verdict"] == "fail"
    (wrong,) = [e for e in node["evidence"] if e["kind"] == "wrong result"]
    assert f"row {faulty.ROW}, column {faulty.COLUMN}" in wrong["text"]
    assert f"(bit {faulty.BIT} flipped)" in wrong["text"]
    assert wrong["next_command"]
    others = [n for n in ill.report["nodes"] if n["ranks"] != [faulty.CORRUPT]]
    assert not [e for n in others for e in n["evidence"] if e["kind"] == "wrong result"]


def test_the_slow_node_is_named_and_slows_nobody_elses_numbers(ill: Any) -> None:
    slow = {
        node["ranks"][0]: {e["kind"] for e in node["evidence"] if e["kind"].startswith("slow ")}
        - {"slow rank", "slow link"}
        for node in ill.report["nodes"]
    }
    assert slow[faulty.SLOW] >= {"slow matmul fp32", "slow memory copy", "slow training"}
    assert not any(kinds for rank, kinds in slow.items() if rank != faulty.SLOW)
    assert ill.report["nodes"][faulty.SLOW]["verdict"] == "fail"


def test_the_exit_code_and_every_text_say_so(ill: Any) -> None:
    assert ill.code == 1
    assert [r.status for r in ill.records] == ["ok"]
    for text in (ill.stdout, *((ill.directory / name).read_text() for name in ("report.md", "report.html"))):
        assert "Evidence against ranks" in text
        assert "flipped" in text


def test_a_baseline_takes_the_place_of_peers(ill: Any, sound: Any, paceline: Callable[..., Any]) -> None:
    done = paceline("report", str(ill.directory), "--baseline", str(sound.directory), "--format", "json")
    assert done.returncode == 1, done.stderr
    assert {node["against"] for node in ill.report["nodes"]} == {str(sound.directory)}
    assert ill.report["nodes"][faulty.SLOW]["verdict"] == "fail"
