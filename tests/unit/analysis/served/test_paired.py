"""Replica against replica, on times whose ratio is known."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
from answered_records import build_answer, build_record, build_replica, build_spec, in_stages, one_by_one

from paceline.analysis.findings import EQUAL, INCONCLUSIVE
from paceline.analysis.findings.served import FASTER, SLOWER, PairedRatio, PairedReplicas
from paceline.analysis.report import build
from paceline.analysis.served import paired
from paceline.report.answer import answer, grounds
from paceline.report.tables import paired as present
from paceline.results.records import GaugeSample, RunRecord

COUNT = 60
Latencies = Callable[[int, int, float], float]


def noise(number: int, replica: int) -> float:
    """Samples differ by a factor of two, which both replicas share; each adds a percent of its own."""
    shared = 1 + random.Random(number).random()
    return shared * (1 + 0.01 * random.Random(1000 * replica + number).uniform(-1, 1))


def turns(law: Latencies, order: tuple[int, ...] = (0, 1, 1, 0), **more: Any) -> RunRecord:
    """Each replica of the order asked all samples, one pass after the other, without a gap."""
    at, parts = 0.0, []
    for replica in order:

        def seconds(number: int, moment: float, replica: int = replica) -> float:
            return law(replica, number, moment)

        part = one_by_one(seconds, COUNT, at, replica=replica)
        at = (part[-1].ended_ns or 0) / 1e9
        parts.append(part)
    record = in_stages(build_spec(partition="paired"), parts, replica=order)
    hosts = tuple(build_replica(replica, f"node-{replica}") for replica in sorted(set(order)))
    return dataclasses.replace(record, **{"replicas": hosts, **more})


def only(record: RunRecord) -> PairedReplicas:
    (found,) = paired.analyse([record])
    return found


def by_metric(record: RunRecord) -> dict[str, PairedRatio]:
    return {ratio.metric: ratio for ratio in only(record).ratios}


def test_a_tenth_is_found_although_samples_differ_by_more() -> None:
    found = by_metric(turns(lambda replica, number, at: (1.0, 1.1)[replica] * noise(number, replica)))
    latency, speed = found["latency_s"], found["output_tokens_per_s"]
    assert latency.ratio == pytest.approx(1 / 1.1, rel=0.005)
    assert latency.low is not None
    assert latency.high is not None
    assert latency.low < 1 / 1.1 < latency.high
    assert latency.detectable_ratio is not None
    assert latency.detectable_ratio < 0.02
    assert (latency.verdict, speed.verdict) == (FASTER, FASTER)
    assert speed.ratio == pytest.approx(1.1, rel=0.005)


def test_equal_replicas_are_equal() -> None:
    found = by_metric(turns(lambda replica, number, at: noise(number, replica)))
    assert {ratio.verdict for ratio in found.values()} == {EQUAL}


def test_one_launch_says_which_replica_is_faster_in_it_and_two_which_is_in_others() -> None:
    """Both were used in turn, so one launch decides about itself. Two launches of which one shows the opposite decide
    nothing."""
    there = turns(lambda replica, number, at: (1.0, 1.1)[replica] * noise(number, replica))
    back = turns(lambda replica, number, at: (1.1, 1.0)[replica] * noise(number, replica))
    assert by_metric(there)["latency_s"].verdict == FASTER
    again = dataclasses.replace(back, spec=dataclasses.replace(back.spec, repeat=1))
    (both,) = paired.analyse([there, again])
    assert {ratio.verdict for ratio in both.ratios} == {INCONCLUSIVE}


def drifting(replica: int, number: int, at: float) -> float:
    """Both slow down alike, by as much in every second."""
    return 0.1 * noise(number, replica) * (1 + 0.01 * at)


def test_there_and_back_again_cancels_a_drift_that_one_way_shows_as_a_gap() -> None:
    one_way, both_ways = turns(drifting, (0, 1)), turns(drifting)
    assert by_metric(one_way)["latency_s"].verdict == FASTER
    assert by_metric(one_way)["latency_s"].ratio < 0.95
    assert by_metric(both_ways)["latency_s"].ratio == pytest.approx(1, abs=0.02)
    assert not only(one_way).balanced
    assert only(both_ways).balanced


def test_samples_that_one_did_not_answer_are_left_out() -> None:
    record = turns(lambda replica, number, at: 1.0)
    requests = tuple(
        dataclasses.replace(q, error="reset") if q.sample == 3 and q.stage == 2 else q for q in record.requests
    )
    found = only(dataclasses.replace(record, requests=requests))
    assert (found.pairs, found.dropped) == (COUNT - 1, 1)


def test_a_replica_that_answers_less_is_not_faster(golden: object) -> None:
    record = turns(lambda replica, number, at: (1.0, 0.5)[replica])
    requests = tuple(dataclasses.replace(q, tokens=3) if q.replica == 1 else q for q in record.requests)
    found = by_metric(dataclasses.replace(record, requests=requests))
    assert found["latency_s"].verdict is None
    assert found["latency_s"].reason == golden
    assert "60" in found["latency_s"].reason


def test_too_few_pairs_have_no_verdict() -> None:
    record = turns(lambda replica, number, at: 1.0 + replica)
    few = tuple(q for q in record.requests if q.sample < paired.FEWEST_PAIRS - 1)
    assert {r.verdict for r in only(dataclasses.replace(record, requests=few)).ratios} == {None}


def test_what_else_differs_is_shown_beside_the_gap(golden: object) -> None:
    replicas = (
        build_replica(0, "a", version="1.0", settings={"max_batch": 8}),
        build_replica(1, "b", version="1.1", settings={"max_batch": 8}),
    )
    machines = tuple({"host": host, "driver": driver, "environment": {"X": host}} for host, driver in ("a5", "b6"))
    gauges = [
        GaugeSample(rank=0, host=host, at_s=1e6, device=0, temperature_c=warm, sm_clock_hz=1.9e9)
        for host, warm in (("a", 60.0), ("b", 80.0))
    ]
    law: Latencies = lambda replica, number, at: (1.0, 1.2)[replica] * noise(number, replica)  # noqa: E731
    record = turns(law, replicas=replicas, machines=machines, gauges=tuple(gauges))
    told = {d.path: (d.first, d.second) for d in only(record).differences}
    assert told == {"version": ("1.0", "1.1"), "driver": ("5", "6"), "temperature": ("60 C", "80 C")}
    report = build([record], "test")
    said = " ".join((*answer(report), grounds(report)))
    assert said == golden
    assert "20 % faster" in said
    assert "driver 5 -> 6" in said


def test_faster_is_never_reported_without_the_flag(golden: object) -> None:
    answers = [build_answer(r, n, "right" if r != 0 else "wrong") for r in (0, 1, 2) for n in range(2)]
    law: Latencies = lambda replica, number, at: (0.5, 1.0, 1.0)[replica] * noise(number, replica)  # noqa: E731
    record = turns(law, (0, 1, 2, 2, 1, 0), answers=tuple(answers))
    report = build([record], "test")
    assert [(p.replica, p.other) for p in report.paired] == [(0, 1), (0, 2), (1, 2)]
    assert report.paired[0].ratios[1].verdict == FASTER
    assert report.paired[0].flags == golden
    (table,) = present.tables(report)
    assert table.rows[0][2].text == golden
    assert "faster" in table.rows[0][2].text
    assert table.rows[0][2].tone == "bad"
    assert SLOWER not in table.rows[-1][2].text
    assert present.sentence(report) == golden


def test_a_run_that_is_not_paired_has_no_pairs() -> None:
    assert paired.analyse([build_record(build_spec(), one_by_one(1.0))]) == ()
