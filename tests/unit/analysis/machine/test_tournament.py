from __future__ import annotations

import dataclasses
from collections.abc import Callable

import fabric_records as made
import numpy as np
import pytest

from paceline.analysis.findings import Suspect
from paceline.analysis.machine import fabric
from paceline.analysis.machine.tournament import judge, modified_z


def suspects(samples: list[object], ranks: int, nodes: int = 1, **more: object) -> tuple[Suspect, ...]:
    spec = made.build_spec(ranks, nodes, **more)  # type: ignore[arg-type]
    return fabric.analyse([made.build_record(spec, samples)]).suspects


def with_slow(rank: int, factor: float = 0.5) -> Callable[[int, int], float]:
    return lambda a, b: 1e9 * (factor if rank in (a, b) else 1.0)


def test_one_slow_host_of_four_is_named_and_nothing_else(golden: object) -> None:
    (found,) = suspects(made.tournament(4, with_slow(2), noise=0.03), 4, nodes=4)
    assert (found.kind, found.ranks, found.hosts, found.devices) == ("node", (2,), ("node-c",), ("cpu",))
    assert found.confirmed
    assert found.ratio == pytest.approx(0.5, abs=0.06)
    assert found.z < -3.5
    assert found.text == golden


def test_nodes_with_one_name_are_distinguished_by_number() -> None:
    """Network namespaces of one machine, or containers, may all answer to the same name."""
    record = made.build_record(made.build_spec(4, 4), made.tournament(4, with_slow(2)))
    outcomes = tuple(dataclasses.replace(o, host="box") for o in record.outcomes)
    (found,) = fabric.analyse([dataclasses.replace(record, outcomes=outcomes)]).suspects
    assert (found.kind, found.ranks, found.hosts) == ("node", (2,), ("box (node 2)",))


def test_exact_data_without_any_spread_are_judged_too() -> None:
    (found,) = suspects(made.tournament(4, with_slow(1)), 4, nodes=4)
    assert found.ranks == (1,)
    assert suspects(made.tournament(4), 4, nodes=4) == ()


def test_one_slow_link_is_a_link_and_its_ends_are_fine(golden: object) -> None:
    (found,) = suspects(made.tournament(4, {(1, 3): 0.4e9}, noise=0.03), 4, nodes=4)
    assert (found.kind, found.ranks, found.hosts) == ("link", (1, 3), ("node-b", "node-d"))
    assert found.confirmed
    assert found.text == golden


@pytest.mark.parametrize("speedup", [1.3, 2.0, 4.0])
def test_a_turn_that_is_faster_for_all_hides_nobody(speedup: float) -> None:
    """Pairs of the second turn may run with fewer beside them: a shared switch is then faster for every one."""
    samples = [
        dataclasses.replace(s, durations_s=tuple(d / speedup for d in s.durations_s)) if s.turn == 1 else s
        for s in made.tournament(4, {(0, 1): 0.1e9}, noise=0.03)
    ]
    (found,) = suspects(samples, 4, nodes=4)
    assert (found.kind, found.ranks, found.confirmed) == ("link", (0, 1), True)


def test_a_slow_gpu_inside_one_host_is_a_rank_with_its_device() -> None:
    (found,) = suspects(made.tournament(8, with_slow(5), noise=0.03), 8, device="cuda")
    assert (found.kind, found.ranks, found.hosts, found.devices) == ("rank", (5,), ("node-a",), ("cuda:5 NVIDIA H200",))


def cluster(a: int, b: int) -> float:
    """Two GPUs per node: 200 GB/s inside, 20 GB/s across."""
    return 200e9 if a // 2 == b // 2 else 20e9


def test_pairs_inside_a_node_are_not_the_measure_of_pairs_across() -> None:
    assert suspects(made.tournament(8, cluster, noise=0.03), 8, nodes=4) == ()


def test_a_slow_node_of_two_gpus_is_one_suspect() -> None:
    slow = made.tournament(
        8, lambda a, b: cluster(a, b) * (0.5 if a // 2 != b // 2 and 2 in (a // 2, b // 2) else 1), noise=0.03
    )
    (found,) = suspects(slow, 8, nodes=4)
    assert (found.kind, found.ranks, found.hosts) == ("node", (4, 5), ("node-c",))


def test_one_slow_gpu_does_not_blame_its_node() -> None:
    slow = made.tournament(8, lambda a, b: cluster(a, b) * (0.5 if 4 in (a, b) else 1), noise=0.03)
    (found,) = suspects(slow, 8, nodes=4)
    assert (found.kind, found.ranks) == ("rank", (4,))


@pytest.mark.parametrize("rank", range(3))
def test_three_are_enough_to_tell(rank: int) -> None:
    (found,) = suspects(made.tournament(3, with_slow(rank, 0.75)), 3, nodes=3)
    assert (found.kind, found.ranks) == ("node", (rank,))
    (found,) = suspects(made.tournament(3, {(0, 2): 0.5e9}), 3, nodes=3)
    assert (found.kind, found.ranks) == ("link", (0, 2))


def test_of_two_ranks_nothing_can_be_said_and_that_is_said(golden: object) -> None:
    found = fabric.analyse([made.build_record(made.build_spec(2, 2), made.tournament(2, with_slow(0)))])
    assert found.suspects == ()
    assert found.notes == golden
    assert [p.ranks for p in found.pairs] == [(0, 1)]


def test_a_little_slower_is_nobodys_business() -> None:
    assert suspects(made.tournament(4, with_slow(2, 0.85)), 4, nodes=4) == ()


def test_what_one_turn_says_alone_is_not_confirmed(golden: object) -> None:
    once = [s for s in made.tournament(8, with_slow(2, 0.4)) if s.turn == 0]
    again = [s for s in made.tournament(8) if s.turn == 1]
    (found,) = suspects([*once, *again], 8, nodes=8)
    assert not found.confirmed
    assert found.text == golden
    (single,) = suspects(list(once), 8, nodes=8)
    assert not single.confirmed


def test_pairs_that_do_not_repeat_themselves_accuse_nobody() -> None:
    """A busy machine: 30 % between turns. What the peers agree in by chance must not look like evidence."""
    accused = [suspects(made.tournament(4, noise=0.3, seed=seed), 4) for seed in range(100)]
    assert sum(any(s.confirmed for s in found) for found in accused) <= 2
    assert sum(map(bool, accused)) <= 10


@pytest.mark.parametrize(("ranks", "nodes"), [(3, 3), (4, 4), (8, 4), (8, 1), (16, 4)])
def test_noise_accuses_nobody(ranks: int, nodes: int) -> None:
    """5 % of noise, 100 seeds each: fewer than 2 in 100 may name anybody."""
    size = ranks // nodes

    def usual(a: int, b: int) -> float:
        return 200e9 if a // size == b // size else 20e9

    accused = sum(
        bool(suspects(made.tournament(ranks, usual, noise=0.05, seed=seed), ranks, nodes)) for seed in range(100)
    )
    assert accused < 2


@pytest.mark.parametrize("seed", range(20))
def test_a_slow_node_is_found_through_noise_and_alone(seed: int) -> None:
    (found,) = suspects(made.tournament(4, with_slow(seed % 4, 0.6), noise=0.05, seed=seed), 4, nodes=4)
    assert (found.kind, found.ranks) == ("node", (seed % 4,))


def test_pairs_are_the_longer_of_both_ranks_and_both_turns_together() -> None:
    found = fabric.analyse([made.build_record(made.build_spec(4, 4), made.tournament(4, with_slow(2)))]).pairs
    assert [p.ranks for p in found] == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert found[0].bandwidth_bytes_per_s == pytest.approx(1e9)
    assert found[1].ratio == pytest.approx(0.5)
    assert {p.turns for p in found} == {2}


def test_launches_that_say_the_same_are_one_suspicion() -> None:
    records = [
        made.build_record(made.build_spec(4, 4, repeat=k), made.tournament(4, with_slow(2), noise=0.02, seed=k))
        for k in range(2)
    ]
    (found,) = fabric.analyse(records).suspects
    assert len(found.runs) == 2


def test_a_shared_gpu_accuses_nobody(golden: object) -> None:
    record = made.build_record(made.build_spec(4, device="cuda"), made.tournament(4, with_slow(2)), shared=True)
    found = fabric.analyse([record])
    assert found.suspects == ()
    assert found.notes[0] == golden


def test_z_has_a_floor_where_peers_agree_too_well() -> None:
    assert modified_z([1.0, 1.0, 1.0, 1.001])[3] < 0.1
    assert modified_z([1.0, 1.0, 1.0, 0.5])[3] == pytest.approx(-0.6745 * 50)
    assert list(modified_z([0.0, 0.0])) == [0, 0]
    assert np.isfinite(modified_z([5.0, 5.0])).all()


def test_two_nodes_cannot_accuse_each_other() -> None:
    pairs = {(a, b): 1e9 if (a < 2) == (b < 2) else 1e8 for a in range(4) for b in range(a + 1, 4)}
    assert judge(pairs, {0: 0, 1: 0, 2: 1, 3: 1}) == []
