"""Several replicas under one load, against hand-computed numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from served_records import S, in_turns, record, replica, stage, streamed

from paceline.analysis.findings import INCONCLUSIVE, Fleet, Measurement
from paceline.analysis.findings.served import UNDECIDED_GAIN
from paceline.analysis.served import fleets, measurements
from paceline.results.records import RunRecord

TWO = (replica(0), replica(1))


def static(repeat: int = 0, slowness: float = 1.0, **more: Any) -> RunRecord:
    """Six requests each: replica 0 takes 1 s for one and ends after 6, replica 1 takes 2 s and ends after 12."""
    asked = [*in_turns(0, 6, 1 * slowness), *in_turns(1, 6, 2 * slowness, first=6)]
    return record(asked, repeat, replicas=TWO, **more)


def dynamic(repeat: int = 0, slowness: float = 1.0, **more: Any) -> RunRecord:
    """Who is free takes the next: eight by replica 0, four by replica 1, both end after 8 s."""
    asked = [*in_turns(0, 8, 1 * slowness), *in_turns(1, 4, 2 * slowness, first=8)]
    return record(asked, repeat, replicas=TWO, partition="dynamic", **more)


def fleet_of(*records: RunRecord, alone: fleets.Alone | None = None) -> Fleet:
    (load,) = measurements.gather(records)
    found = fleets.fleet_of(load, alone or {})
    assert found is not None
    return found


def test_each_replica_has_the_rate_of_its_own_time() -> None:
    fast, slow = fleet_of(static()).replicas
    assert (fast.output_tokens_per_s, slow.output_tokens_per_s) == (pytest.approx(10), pytest.approx(5))
    assert (fast.prompt_tokens_per_s, slow.prompt_tokens_per_s) == (pytest.approx(10), pytest.approx(5))
    assert (fast.finished_s, slow.finished_s) == (6, 12)
    assert (fast.busy_ratio, slow.busy_ratio) == (0.5, 1)
    assert (fast.host, slow.host) == ("node-0", "node-1")


def test_speedup_is_over_the_best_one_and_efficiency_over_as_many_of_it(golden: object) -> None:
    """Static: 120 tokens in 12 s are 10/s, no more than the fast one alone. Dynamic: 15/s."""
    slow, quick = fleet_of(static()), fleet_of(dynamic())
    assert slow.speedup
    assert slow.efficiency
    assert quick.speedup
    assert quick.efficiency
    assert (slow.best, slow.speedup.value, slow.efficiency.value) == (0, pytest.approx(1), pytest.approx(0.5))
    assert (quick.best, quick.speedup.value, quick.efficiency.value) == (0, pytest.approx(1.5), pytest.approx(0.75))
    assert quick.speedup.note == golden


def test_numbers_of_nodes_have_the_bounds_of_their_launches() -> None:
    def found(*records: RunRecord) -> list[Measurement]:
        (load,) = measurements.gather(records)
        fleet = fleets.fleet_of(load, {})
        assert fleet is not None
        names = ("replica_output_tokens_per_s", "straggler_ratio")
        return [m for m in fleets.measurements_of(fleet, load) if m.metric in names]

    several = found(*(static(n, 1 + n / 100) for n in range(3)))
    assert len(several) == 3
    assert all(m.low is not None and m.value is not None and m.low <= m.value for m in several)
    assert all(m.low is None and m.high is None for m in found(static()))


def test_samples_are_given_away_in_the_load_in_which_a_replica_was_lost() -> None:
    stages = [stage(n, concurrency=n + 1, started_ns=20 * n * S) for n in (0, 1)]
    second = [r for n in (0, 1) for r in (streamed(n, 20, 22, replica=n, stage=1),)]
    asked = [*in_turns(0, 3, 1.0), *in_turns(1, 3, 1.0, first=3), *second]
    lost = (replica(0), replica(1, died_ns=2 * S, reassigned=5))
    loads = measurements.gather([record(asked, stages=stages, replicas=lost, scenario="sweep")])
    assert [fleets.share_of(load, 1, {}).reassigned for load in loads] == [5, 0]


def test_the_last_replica_alone_is_the_straggler(golden: object) -> None:
    found = fleet_of(static())
    assert (found.straggler_s, found.straggler_ratio, found.uneven_ratio) == (6, 0.5, 0.5)
    assert found.text == golden
    assert "50" in found.text
    even = fleet_of(dynamic())
    assert (even.straggler_s, even.uneven_ratio) == (0, 0)
    assert even.text == golden


def test_alone_is_taken_from_a_paired_run_where_all_were_asked() -> None:
    """A B B A, each asked for one second at a time: 20 and 8 tokens/s."""

    def asked(number: int, of: int, tokens: int) -> list[Any]:
        return [streamed(0, number, number + 1, tokens, replica=of, stage=number)]

    order = ((0, 20), (1, 8), (1, 8), (0, 20))
    requests = [r for number, (of, tokens) in enumerate(order) for r in asked(number, of, tokens)]
    stages = [stage(n, scenario="offline", replica=of, started_ns=n * S) for n, (of, _) in enumerate(order)]
    paired = record(requests, stages=stages, replicas=TWO, partition="paired")
    loads = measurements.gather([paired])
    assert [fleets.fleet_of(load, {}) for load in loads] == [None, None]
    (alone,) = fleets.alone_rates(loads).values()
    assert {number: rate.value for number, rate in alone.items()} == {0: 20, 1: 8}
    assert fleets.unpartitioned(paired) == fleets.unpartitioned(dynamic())
    found = fleet_of(dynamic(), alone=alone)
    assert found.speedup
    assert found.speedup.value == pytest.approx(15 / 20)
    assert found.speedup.note == fleets.PAIRED
    half_known = fleet_of(dynamic(), alone={1: alone[1]})
    assert half_known.speedup
    assert half_known.speedup.value == pytest.approx(1.5)


def test_a_replica_that_died_is_said_and_not_waited_for(golden: object) -> None:
    """Replica 1 answers one request of 2 s and is gone after 3; replica 0 does the rest in 11 s."""
    asked = [*in_turns(0, 11, 1.0), *in_turns(1, 1, 2.0, first=11)]
    lost = (replica(0), replica(1, died_ns=3 * S, reassigned=5))
    found = fleet_of(record(asked, replicas=lost))
    assert found.replicas[1].died_s == 3
    assert found.replicas[1].output_tokens_per_s == pytest.approx(10 / 3)
    assert found.straggler_s == 0
    assert found.text == golden
    assert "3.0" in found.text


@pytest.mark.parametrize(
    ("silent_s", "sentence"),
    [
        ((3,), "Failed: replica 1 on node-1 stopped answering after 3.0 s and did not answer again; others took 5"),
        ((3, 7), "Failed: replica 1 on node-1 stopped answering after 3.0 s and answered again later; others took 5"),
    ],
)
def test_a_replica_that_was_silent_is_named_with_its_node(silent_s: tuple[int, ...], sentence: str) -> None:
    asked = [*in_turns(0, 11, 1.0), *in_turns(1, 1, 2.0, first=11)]
    silent = replica(1, silent_ns=tuple(moment * S for moment in silent_s), reassigned=5)
    found = fleet_of(record(asked, replicas=(replica(0), silent)))
    assert f"{sentence} of its samples." in found.text


def test_a_node_lost_late_is_reported_although_no_replica_died(golden: object) -> None:
    whole = static()
    assert fleet_of(whole).text == golden
    found = fleet_of(replace(whole, lost_nodes=(1,)))
    assert found.text == golden


def test_a_load_by_schedule_has_no_speedup() -> None:
    asked = [*in_turns(0, 6, 1), *in_turns(1, 6, 2, first=6)]
    found = fleet_of(record(asked, replicas=TWO, scenario="server", rate_per_s=1.0))
    assert (found.speedup, found.efficiency, found.straggler_s) == (None, None, None)


def test_one_replica_is_no_fleet() -> None:
    (load,) = measurements.gather([record(in_turns(0, 3, 1), replicas=TWO[:1])])
    assert fleets.fleet_of(load, {}) is None


def test_the_gain_of_the_dynamic_partition_has_an_interval_over_launches(golden: object) -> None:
    slownesses = (0.99, 1.0, 1.01)
    records = [make(n, by) for make in (static, dynamic) for n, by in enumerate(slownesses)]
    (gain,) = fleets.partition_gains(measurements.gather(records))
    assert gain.ratio == pytest.approx(1.5)
    assert gain.low is not None
    assert gain.high is not None
    assert 1.4 < gain.low < 1.5 < gain.high < 1.6
    assert gain.verdict == "better"
    assert len(gain.runs) == 6
    assert gain.text == golden
    assert "1.50" in gain.text


def test_a_gain_within_the_spread_of_launches_is_inconclusive() -> None:
    wild = [make(n, by) for make in (static, dynamic) for n, by in enumerate((0.5, 1.0, 2.0))]
    (gain,) = fleets.partition_gains(measurements.gather(wild))
    assert gain.verdict == INCONCLUSIVE


def test_one_launch_of_each_gives_a_ratio_and_no_verdict() -> None:
    (gain,) = fleets.partition_gains(measurements.gather([static(), dynamic()]))
    assert (gain.ratio, gain.low, gain.high) == (pytest.approx(1.5), None, None)
    assert gain.verdict == UNDECIDED_GAIN


def test_cells_that_differ_in_more_than_the_partition_are_not_compared() -> None:
    assert list(fleets.partition_gains(measurements.gather([static(), dynamic(max_tokens=7)]))) == []
