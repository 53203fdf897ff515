"""Four hosts of network namespaces, joined by veth to a bridge, links limited by `tc`: what was told must be found.

The limit stands on both ends of a link, because a ring loads it in both directions. Every worker has a host name of its
own, so that verdicts can name the node. Needs root and iproute2.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from testbed import forked
from testbed.networks import Network, why_not
from testbed.networks import network as built_network

from paceline.analysis.machine import fabric
from paceline.models import arithmetic
from paceline.results import store
from paceline.results.machine_samples import CollectiveSample
from paceline.results.records import RunRecord, Status

HOSTS = 4
MBIT = 1_000_000 / 8
# Bytes a limited link lets through at full speed: little beside the sizes measured, enough for one large segment.
BURST_KB = {10: 64, 100: 64, 300: 128}
# Rates are so low that a message takes far longer than a rank of a busy machine waits for its turn on a core.
SLOW_HOST, SLOW_MBIT, QUICK_MBIT = 2, 10, 100


WHY_NOT = why_not("tc")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]


def limit(network: Network, number: int, mbit: int) -> None:
    shape(network, number, "tbf", "rate", f"{mbit}mbit", "burst", f"{BURST_KB[mbit]}kb", "latency", "100ms")


def shape(network: Network, number: int, *discipline: str) -> None:
    for namespace, device in ((network.hosts[number], "eth0"), (network.bridge, f"port{number}")):
        network.inside(namespace, "tc", "qdisc", "replace", "dev", device, "root", *discipline)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with built_network("10.77.0", HOSTS) as built:
        yield built


@pytest.fixture(scope="module")
def measured(
    network: Network,
    tmp_path_factory: pytest.TempPathFactory,
    make_spec: Callable[..., Any],
    environment: Callable[..., dict[str, str]],
) -> Callable[..., RunRecord]:
    """One run with a rank on each host, as a scheduler would start it: torchrun's variables and the worker."""

    def run(options: str) -> RunRecord:
        workload = f"collectives:dtypes=fp32,warmup=1,iters=10,{options}"
        spec = make_spec(None, processes=1, nodes=HOSTS, workload=workload, timeout_s=100.0)
        run_dir = store.create(tmp_path_factory.mktemp("network"), spec)
        started_at = time.time()
        start(network, run_dir, environment())
        store.seal(run_dir, Status.OK, None, started_at, time.time())
        return store.read_run(run_dir)

    return run


def start(network: Network, run_dir: Path, environment: dict[str, str]) -> None:
    """Ranks forked from a process that has imported torch, each of which goes to its host before all else."""
    job = forked.prepare(store.read_spec(run_dir), run_dir)
    places = {"FORKED_HOSTS": " ".join(network.hosts), "FORKED_MASTER": f"{network.subnet}.1:29555"}
    variables = {**environment, **job.env, **places}
    done = subprocess.run(job.argv, env=variables, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def slowest_s(record: RunRecord, operation: str) -> dict[int, float]:
    """Size -> median over iterations of the slowest rank's duration."""
    found: dict[int, list[CollectiveSample]] = {}
    for sample in record.collectives:
        if sample.operation == operation:
            found.setdefault(sample.size_bytes, []).append(sample)
    return {
        size: statistics.median(max(each) for each in zip(*(s.durations_s for s in samples), strict=True))
        for size, samples in found.items()
    }


class Repeatable:
    """A measurement that is made again if a check of it fails: a busy machine may slow any of its ranks."""

    def __init__(self, measure: Callable[[], RunRecord]) -> None:
        self._measure, self.record = measure, measure()

    def settle(self, check: Callable[[RunRecord], None], attempts: int = 4) -> None:
        for _ in range(attempts - 1):
            try:
                return check(self.record)
            except AssertionError:
                self.record = self._measure()
        return check(self.record)


# --- one slow link -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tournament(network: Network, measured: Callable[..., RunRecord]) -> Repeatable:
    def measure() -> RunRecord:
        for number in range(HOSTS):
            limit(network, number, SLOW_MBIT if number == SLOW_HOST else QUICK_MBIT)
        return measured("operations=pairs,overlap=false,pair_bytes=512KiB,pair_iters=4")

    return Repeatable(measure)


def test_every_pair_met_in_both_turns_and_brought_the_right_data(tournament: Repeatable) -> None:
    record = tournament.record
    met = sorted((s.turn, s.rank, s.peer) for s in record.collectives)
    assert met == sorted((t, a, b) for t in (0, 1) for a in range(HOSTS) for b in range(HOSTS) if a != b)
    assert {s.wrong for s in record.collectives} == {0}
    assert {o.host for o in record.outcomes} == {f"node{n}" for n in range(HOSTS)}


@pytest.mark.parametrize("turn", [0, 1])
def test_the_slow_pairs_are_those_of_the_slow_host(tournament: Repeatable, turn: int) -> None:
    def check(record: RunRecord) -> None:
        times = {(s.rank, s.peer): statistics.median(s.durations_s) for s in record.collectives if s.turn == turn}
        slow = {pair: seconds for pair, seconds in times.items() if SLOW_HOST in pair}
        quick = {pair: seconds for pair, seconds in times.items() if SLOW_HOST not in pair}
        assert min(slow.values()) > 3 * max(quick.values()), times

    tournament.settle(check)


def test_the_slow_node_is_the_only_suspect(tournament: Repeatable) -> None:
    """The verdict of the analysis on the same samples."""

    def check(record: RunRecord) -> None:
        suspects = fabric.analyse([record]).suspects
        assert {s.hosts for s in suspects if s.kind == "node"} == {(f"node{SLOW_HOST}",)}
        assert {rank for s in suspects for rank in s.ranks} == {SLOW_HOST}
        assert all(s.confirmed for s in suspects)

    tournament.settle(check)


# --- links of known rate -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[100, pytest.param(300, marks=pytest.mark.exhaustive)])
def sweep(
    request: pytest.FixtureRequest, network: Network, measured: Callable[..., RunRecord]
) -> tuple[int, Repeatable]:
    mbit = request.param
    sizes = {100: "min_bytes=256KiB,max_bytes=2MiB", 300: "min_bytes=512KiB,max_bytes=4MiB"}[mbit]

    def measure() -> RunRecord:
        for number in range(HOSTS):
            limit(network, number, mbit)
        return measured(f"operations=all_reduce,tournament=false,overlap=false,budget_s=2,{sizes}")

    return mbit, Repeatable(measure)


def test_bus_bandwidth_follows_the_link(sweep: tuple[int, Repeatable]) -> None:
    mbit, repeatable = sweep

    def check(record: RunRecord) -> None:
        times = slowest_s(record, "all_reduce")
        largest = max(times)
        busbw = largest / times[largest] * arithmetic.wire_factor("all_reduce", HOSTS)
        assert {s.wrong for s in record.collectives} == {0}
        assert 0.7 * mbit * MBIT < busbw < 1.1 * mbit * MBIT, f"{busbw / MBIT:.0f} Mbit/s, {times}"
        concluded = {row.size_bytes: row.busbw_bytes_per_s or 0.0 for row in fabric.analyse([record]).rows}
        assert 0.7 * mbit * MBIT < concluded[largest] < 1.1 * mbit * MBIT

    repeatable.settle(check)


def test_the_fit_recovers_the_bandwidth(sweep: tuple[int, Repeatable]) -> None:
    """The verdict of the analysis on the same samples: beta within 15 % of the rate that tc was given."""
    mbit, repeatable = sweep

    def check(record: RunRecord) -> None:
        fits = [fit for fit in fabric.analyse([record]).fits if fit.operation == "all_reduce"]
        assert len(fits) == 1
        assert fits[0].beta_bytes_per_s == pytest.approx(mbit * MBIT, rel=0.15)

    repeatable.settle(check)


# --- added delay ---------------------------------------------------------------------------------------------------


def test_added_delay_is_seen(network: Network, measured: Callable[..., RunRecord]) -> None:
    """A small message crosses a fixed number of times, whatever the protocol: twice the delay, twice the time."""
    seconds = {}
    for delay_ms in (10, 20):
        try:
            for number in range(HOSTS):
                shape(network, number, "netem", "delay", f"{delay_ms / 2:g}ms")
        except OSError as error:
            pytest.skip(f"no netem in this kernel, so no delay can be added ({error})")
        options = "operations=ring,tournament=false,overlap=false,min_bytes=1KiB,max_bytes=1KiB"
        seconds[delay_ms] = slowest_s(measured(options), "ring")[1024]
    assert seconds[20] / seconds[10] == pytest.approx(2.0, rel=0.3)
