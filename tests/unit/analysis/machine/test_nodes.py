"""Node verdicts: every kind of fault is found and named, noise alone accuses nobody, two nodes accuse each other."""

from __future__ import annotations

import dataclasses
from typing import Any

import node_records as synthetic
import numpy as np
import pytest

from paceline.analysis.cost.training import Costing
from paceline.analysis.findings import NodeVerdict
from paceline.analysis.findings.machine import FAIL, PASS, SUSPECT
from paceline.analysis.machine import nodes
from paceline.analysis.machine.peers import Band, among_peers, beside_baseline
from paceline.analysis.report import build
from paceline.errors import RequestError
from paceline.experiment.choices import Choice
from paceline.host import prices
from paceline.report.tables import nodes as tables
from paceline.report.tables.one_run import record_lines
from paceline.results.machine_samples import HealthSample
from paceline.results.records import RunRecord, Status


def judged(record: RunRecord, baseline: nodes.Baseline | None = None) -> dict[str, NodeVerdict]:
    return {v.node: v for v in nodes.judge(record, baseline).verdicts}


def unsound(record: RunRecord, baseline: nodes.Baseline | None = None) -> dict[str, str]:
    return {name: v.verdict for name, v in judged(record, baseline).items() if v.verdict != PASS}


def slowed(rank: int, pace: float) -> synthetic.Pace:
    """One rank slower; a little spread, the same in every repeat, so that nothing is exactly equal."""
    return lambda r, i: (pace if r == rank else 1.0) * (1 + 0.002 * ((r + i) % 3 - 1))


def replaced(record: RunRecord, rank: int, field: str, **values: Any) -> RunRecord:
    """The record with one rank's samples of a field changed."""
    samples = tuple(dataclasses.replace(s, **values) if s.rank == rank else s for s in getattr(record, field))
    return dataclasses.replace(record, **{field: samples})


# --- speed and cost ---


def test_a_node_has_its_own_speed_and_cost() -> None:
    """tokens/s over 3600 s at 2 USD per hour; samples have 512 tokens. A rank of one host is not called a node."""
    report = build([synthetic.healthy(3)], title="", costing=Costing(prices.chosen("2")))
    for node in report.nodes:
        (speed,) = (m.value for m in node.measures if m.measure == "training")
        assert node.tokens_per_s == speed
        assert node.samples_per_s == pytest.approx(speed / 512)
        assert node.usd_per_mtok == pytest.approx(2 / (3600 * speed) * 1e6)
    assert tables.noun(report) == "node"
    same = dataclasses.replace(report, nodes=tuple(dataclasses.replace(n, host="one") for n in report.nodes))
    assert tables.sentence(same) == "3 of 3 ranks pass."
    table = tables.standings(same)
    assert table is not None
    assert [column.heading for column in table.columns][:5] == [
        "rank",
        "verdict",
        "training, tokens/s",
        "training, samples/s",
        "cost, USD/Btoken",
    ]


# --- healthy ---


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_healthy_nodes_pass(count: int) -> None:
    found = judged(synthetic.healthy(count))
    assert [(v.verdict, v.evidence) for v in found.values()] == [(PASS, ())] * count


def test_noise_alone_accuses_nobody() -> None:
    """100 trials of 8 nodes and 5 repeats, 1 to 2 % of noise and drift: at most 2 trials accuse anyone."""
    alarms = [
        seed
        for seed in range(100)
        if unsound(synthetic.healthy(pace=synthetic.noisy(seed, noise=0.01 + 0.01 * (seed % 2))))
    ]
    assert len(alarms) <= 2, alarms


def test_a_node_slower_by_8_percent_is_found_in_the_same_noise() -> None:
    found, blamed = 0, 0
    for seed in range(100):
        pace = synthetic.noisy(seed, noise=0.01 + 0.01 * (seed % 2))
        named = unsound(synthetic.healthy(pace=lambda r, i, pace=pace: pace(r, i) * (0.92 if r == 5 else 1.0)))
        found += "node-5" in named
        blamed += bool(set(named) - {"node-5"})
    assert found >= 95
    assert blamed <= 2


# --- one fault each ---


def test_a_slow_node_fails_with_the_distance_and_what_to_try(golden: object) -> None:
    found = judged(synthetic.healthy(pace=slowed(3, 0.9)))
    assert {name for name, v in found.items() if v.verdict != PASS} == {"node-3"}
    verdict = found["node-3"]
    assert verdict.verdict == FAIL
    kinds = {e.kind: e for e in verdict.evidence}
    assert set(kinds) == {"slow matmul bf16", "slow memory copy", "slow host to device", "slow training"}
    assert kinds["slow training"].text == golden
    assert "NVIDIA" in kinds["slow training"].text
    assert "H200" in kinds["slow training"].text
    assert "10.0 %" in kinds["slow training"].text
    assert "GPU Link Info" in kinds["slow host to device"].next_command
    measure = next(m for m in verdict.measures if m.measure == "training")
    assert measure.value == pytest.approx(4096 / 0.5 * 0.9, rel=0.01)
    assert measure.accepted == (pytest.approx(0.95), None)


def test_one_disturbed_repeat_accuses_nobody() -> None:
    assert not unsound(synthetic.healthy(pace=lambda r, i: 0.6 if (r, i) == (2, 3) else slowed(9, 1.0)(r, i)))


def test_a_difference_inside_the_band_passes_and_the_band_is_adjustable() -> None:
    pace = slowed(3, 0.96)
    assert not unsound(synthetic.healthy(pace=pace))
    strict = synthetic.spec_of(8, "nodes:speed_ratio=0.02")
    assert unsound(synthetic.healthy(pace=pace, spec=strict)) == {"node-3": FAIL}


def test_other_memory_fails() -> None:
    record = synthetic.healthy()
    assert not unsound(replaced(record, 6, "memory", allocated_bytes=int(7.1 * synthetic.GIB)))
    found = judged(replaced(record, 6, "memory", allocated_bytes=int(7.3 * synthetic.GIB)))["node-6"]
    assert (found.verdict, [e.kind for e in found.evidence]) == (FAIL, ["peak memory"])


def test_a_hot_node_is_suspect(golden: object) -> None:
    gauges = tuple(g for r in range(8) for g in synthetic.gauges(r, celsius=78.0 if r == 4 else 60.0))
    found = judged(synthetic.healthy(gauges=gauges))
    assert {name for name, v in found.items() if v.verdict != PASS} == {"node-4"}
    (evidence,) = found["node-4"].evidence
    assert evidence.text == golden


def test_a_throttled_clock_is_named_with_its_reason(golden: object) -> None:
    """The telemetry alone: every rate is as fast as the others'."""
    reason = ("hardware thermal slowdown",)
    gauges = tuple(g for r in range(8) for g in synthetic.gauges(r, *((1.2e9, reason) if r == 2 else ())))
    found = judged(synthetic.healthy(gauges=gauges))
    assert {name for name, v in found.items() if v.verdict != PASS} == {"node-2"}
    kinds = {e.kind: e for e in found["node-2"].evidence}
    assert kinds["throttled"].verdict == FAIL
    assert kinds["throttled"].text == golden
    assert "100" in kinds["throttled"].text
    assert "20" in kinds["throttled"].text
    assert "SM" in kinds["throttled"].text
    assert "1200" in kinds["throttled"].text
    assert "MHz" in kinds["throttled"].text
    assert kinds["SM clock"].verdict == SUSPECT


def test_a_power_cap_that_all_meet_is_nobodys_fault() -> None:
    cap = ("software power cap",)
    everyone = tuple(g for r in range(8) for g in synthetic.gauges(r, reasons=cap))
    assert not unsound(synthetic.healthy(gauges=everyone))
    one = tuple(g for r in range(8) for g in synthetic.gauges(r, reasons=cap if r == 1 else ()))
    assert unsound(synthetic.healthy(gauges=one)) == {"node-1": SUSPECT}


def test_a_wrong_driver_is_named_beside_the_majoritys(golden: object) -> None:
    machines = tuple(synthetic.machine(r, **({"driver": "535.104.05"} if r == 7 else {})) for r in range(8))
    found = judged(synthetic.healthy(machines=machines))
    assert {name for name, v in found.items() if v.verdict != PASS} == {"node-7"}
    (evidence,) = found["node-7"].evidence
    assert evidence.text == golden
    assert "535.104.05" in evidence.text
    assert "580.95.05" in evidence.text
    assert evidence.verdict == SUSPECT
    assert [(d.path, d.first, d.second) for d in found["node-7"].differences] == [("driver", "535.104.05", "580.95.05")]


def test_a_flipped_bit_is_named_with_its_element(golden: object) -> None:
    wrong = {"wrong": 1, "place": (17, 4095), "found": 28800.0, "expected": 14400.0}
    found = judged(replaced(synthetic.healthy(), 5, "products", **wrong))
    assert {name: v.verdict for name, v in found.items() if v.verdict != PASS} == {"node-5": FAIL}
    (evidence,) = found["node-5"].evidence
    assert evidence.text == golden
    assert "17" in evidence.text
    assert "4095" in evidence.text
    assert "28800" in evidence.text


@pytest.mark.parametrize(("dtype", "bit"), [("fp32", 22), ("bf16", 6), ("fp16", 9)])
def test_the_flipped_bit_is_counted_in_the_dtype(dtype: str, bit: int, golden: object) -> None:
    """1.5 is 1 with the highest bit of the fraction set."""
    record = replaced(synthetic.healthy(3), 1, "products", dtype=dtype, wrong=1, place=(0, 0), found=1.5, expected=1.0)
    (evidence,) = judged(record)["node-1"].evidence
    assert evidence.text == golden
    assert f"{bit}" in evidence.text


def test_other_bits_from_the_same_steps_are_silent_corruption(golden: object) -> None:
    record = synthetic.healthy(4)
    late = tuple(
        synthetic.trajectory(r, turn, (5.5, 5.250001) if (r, turn) == (2, 1) else (5.5, 5.25))
        for r in range(4)
        for turn in (0, 1)
    )
    found = judged(dataclasses.replace(record, trajectories=late))
    assert {name: v.verdict for name, v in found.items() if v.verdict != PASS} == {"node-2": FAIL}
    assert found["node-2"].evidence[0].text == golden
    assert "5.250001" in found["node-2"].evidence[0].text


def test_equal_losses_with_other_weights_are_found_too() -> None:
    assert unsound(replaced(synthetic.healthy(3), 0, "trajectories", weights="xyz")) == {"node-0": FAIL}


def test_kernels_that_are_not_deterministic_accuse_nobody_and_say_so(golden: object) -> None:
    many = tuple(synthetic.trajectory(r, turn, weights=f"{r}{turn}") for r in range(4) for turn in (0, 1))
    found = nodes.judge(synthetic.healthy(4, trajectories=many))
    assert {v.verdict for v in found.verdicts} == {PASS}
    assert found.notes == golden


def test_other_versions_need_not_compute_the_same_bits() -> None:
    machines = tuple(synthetic.machine(r, versions={"torch": "2.13.0" if r == 0 else "2.11.0"}) for r in range(4))
    record = replaced(synthetic.healthy(4, machines=machines), 0, "trajectories", weights="xyz")
    (evidence,) = judged(record)["node-0"].evidence
    assert evidence.kind == "differs"


@pytest.mark.parametrize(
    ("fact", "value", "verdict"),
    [
        ("gpu.ecc_volatile_uncorrected", 3, FAIL),
        ("gpu.remap_pending", True, FAIL),
        ("gpu.pcie_width", 8, SUSPECT),
        ("gpu.pcie_generation", 3, SUSPECT),
        ("gpu.nvlinks_down", "2", SUSPECT),
    ],
)
def test_what_the_driver_knows_needs_no_peers(fact: str, value: Any, verdict: str, golden: object) -> None:
    facts = synthetic.FACTS | {fact: value}
    found = judged(synthetic.healthy(1, health=(HealthSample(rank=0, moment="loaded", facts=facts),)))["node-0"]
    assert found.verdict == verdict
    assert [e.text for e in found.evidence] == golden
    assert dict(found.condition)[fact] == str(value)


# --- few nodes ---


def test_of_two_nodes_nobody_is_odd(golden: object) -> None:
    found = nodes.judge(synthetic.healthy(2, pace=slowed(1, 0.8)))
    assert {v.verdict for v in found.verdicts} == {SUSPECT}
    assert {v.evidence[0].text for v in found.verdicts} == golden
    assert found.notes == golden


@pytest.mark.parametrize("count", [3, 4])
def test_of_three_or_four_the_odd_one_is_named(count: int) -> None:
    assert unsound(synthetic.healthy(count, pace=slowed(1, 0.8))) == {"node-1": FAIL}


def test_two_groups_have_no_odd_one_but_the_slower_is_suspect() -> None:
    found = judged(synthetic.healthy(4, pace=lambda r, i: 0.7 if r < 2 else 1.0))
    assert [v.verdict for v in found.values()] == [SUSPECT, SUSPECT, PASS, PASS]
    assert "--baseline shows which" in found["node-0"].evidence[0].text


def test_repeats_that_scatter_are_said_to_hide_faults(golden: object) -> None:
    def wild(rank: int, repeat: int) -> float:
        return 1 + 0.3 * ((7 * rank + 3 * repeat) % 5 - 2) / 2

    found = nodes.judge(synthetic.healthy(4, pace=wild))
    assert FAIL not in {v.verdict for v in found.verdicts}
    assert found.notes == golden


def test_kinds_of_device_are_not_each_others_peers() -> None:
    """Four H200 and four A100 at half their speed: nobody is slow for what it is."""
    slow = [{**synthetic.GPU, "name": "NVIDIA A100"}]
    machines = tuple(synthetic.machine(r, **({"gpus": slow} if r < 4 else {})) for r in range(8))
    found = judged(synthetic.healthy(pace=lambda r, i: 0.5 if r < 4 else 1.0, machines=machines))
    assert not [e for v in found.values() for e in v.evidence if e.kind.startswith("slow")]


def test_each_gpu_of_a_host_is_judged_where_a_process_is_a_node() -> None:
    spec = dataclasses.replace(
        synthetic.spec_of(8, "nodes:node=process"), topology=dataclasses.replace(synthetic.spec_of(8).topology, nodes=1)
    )
    topology = dataclasses.replace(spec.topology, processes_per_node=8)
    record = synthetic.healthy(pace=slowed(3, 0.9), spec=dataclasses.replace(spec, topology=topology), gauges=())
    outcomes = tuple(dataclasses.replace(o, host="box") for o in record.outcomes)
    machines = ({**synthetic.machine(0), "host": "box", "gpus": [synthetic.GPU] * 8},)
    record = dataclasses.replace(record, outcomes=outcomes, machines=machines)
    assert unsound(record) == {"box, rank 3": FAIL}
    whole = dataclasses.replace(record.spec, workload=Choice("nodes"))
    assert unsound(dataclasses.replace(record, spec=whole)) == {"box": FAIL}


# --- a baseline ---


def test_all_nodes_slow_alike_fail_beside_a_baseline_only(golden: object) -> None:
    slow = synthetic.healthy(pace=slowed(99, 0.9))
    slow = dataclasses.replace(slow, kernels=tuple(_slower(k) for k in slow.kernels))
    baseline = nodes.baseline_of([synthetic.healthy(4)], "healthy")
    assert not unsound(slow)
    found = judged(slow, baseline)
    assert {v.verdict for v in found.values()} == {FAIL}
    assert all(v.against == "healthy" for v in found.values())
    assert found["node-0"].evidence[0].text == golden


def _slower(sample: Any) -> Any:
    return dataclasses.replace(sample, durations_s=tuple(s / 0.9 for s in sample.durations_s))


def test_a_baseline_decides_which_of_two_is_slow() -> None:
    baseline = nodes.baseline_of([synthetic.healthy(4)], "healthy")
    assert unsound(synthetic.healthy(2, pace=slowed(1, 0.8)), baseline) == {"node-1": FAIL}


def test_a_driver_that_the_baseline_had_not_is_named(golden: object) -> None:
    machines = tuple(synthetic.machine(r, driver="535.104.05") for r in range(2))
    baseline = nodes.baseline_of([synthetic.healthy(4)], "healthy")
    found = judged(synthetic.healthy(2, machines=machines), baseline)
    assert {e.text for v in found.values() for e in v.evidence} == golden


def test_a_failed_node_is_no_part_of_a_baseline() -> None:
    baseline = nodes.baseline_of([synthetic.healthy(4, pace=slowed(1, 0.5))], "mixed")
    assert {len(values) for values in baseline.healthy.values()} == {3}


def test_a_result_without_a_node_test_is_no_baseline(golden: object) -> None:
    failed = dataclasses.replace(synthetic.healthy(2), status=Status.FAILED)
    with pytest.raises(RequestError) as caught:
        nodes.baseline_of([failed], "there")
    assert str(caught.value) == golden
    assert "--baseline" in str(caught.value)
    assert "there" in str(caught.value)


# --- the rule itself ---


def test_what_all_share_is_taken_out() -> None:
    drift = np.log(np.array([1.0, 0.8, 0.6, 0.5, 0.4]))
    values = np.tile(drift, (4, 1))
    assert [s.effect for s in among_peers(values, Band(-0.05, None))] == [0.0] * 4
    assert all(s.verdict == FAIL for s in beside_baseline(values - 1, np.zeros(3), Band(-0.05, None)))


def test_z_holds_where_peers_spread() -> None:
    """10 % under the median is no oddity among peers that lie 10 % apart: suspect, never failed."""
    wide = np.array([[-0.1], [0.1], [0.0], [0.09], [-0.09], [-0.22]])
    verdicts = [s.verdict for s in among_peers(np.repeat(wide, 5, axis=1), Band(-0.05, 0.3))]
    assert verdicts == [SUSPECT, PASS, PASS, PASS, PASS, SUSPECT]


@pytest.mark.parametrize(
    "wrong",
    [
        {"place": None, "found": None, "expected": None},
        {"place": (1,), "found": 1.0, "expected": None, "sides": (8,)},
        {"place": (1, 2), "found": 1e300, "expected": 1.0, "dtype": "fp16", "sides": ()},
        {"place": (1, 2, 3), "found": 10**60, "expected": float("nan"), "dtype": "fp8"},
    ],
)
def test_a_wrong_product_with_any_other_values_fails_the_node(wrong: dict[str, Any]) -> None:
    assert unsound(replaced(synthetic.healthy(3), 1, "products", wrong=1, **wrong)) == {"node-1": FAIL}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("tokens", "verdict"), [(0, {"node-1": FAIL}), (2**199, {})])
def test_a_node_with_impossible_speeds_does_not_end_the_analysis(tokens: int, verdict: dict[str, str]) -> None:
    assert unsound(replaced(synthetic.healthy(), 1, "steps", tokens=tokens)) == verdict


def test_a_host_that_recorded_nothing_about_itself_is_shown() -> None:
    record = synthetic.healthy(2, machines=({}, synthetic.machine(1)))
    assert "  on None: None, no GPU; " in list(record_lines(record, None))
