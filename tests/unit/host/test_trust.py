"""Grades of known readings, and the light of this machine beside busy processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from paceline.host import trust, usage
from paceline.host.trust import AMBER, GREEN, OTHERS, RED, UNKNOWN, Check, Trust, usage_checks
from paceline.host.usage import TICK_S, HostUsage

if TYPE_CHECKING:
    from conftest import FakeNvml

# 10 s of a host with 2 cores, on which our own processes use one and a half.
FIRST = HostUsage(
    at_s=100.0,
    cores=2,
    total_s=1000.0,
    busy_s=500.0,
    own_s=300.0,
    steal_s=10.0,
    swap_bytes=0,
    memory_wait_s=1.0,
    quota_periods=0,
    quota_limited=0,
    heat_events=3,
    governor="performance",
)
QUIET = replace(FIRST, at_s=110.0, total_s=1020.0, busy_s=515.0, own_s=315.0)


def graded(last: HostUsage, first: HostUsage = FIRST, **more: Any) -> dict[str, Check]:
    return {check.name: check for check in usage_checks(first, last, **more)}


def test_a_quiet_host_is_green_in_every_check() -> None:
    found = graded(replace(QUIET, quota_periods=100))
    names = ["other processes", "steal", "swap", "memory pressure", "CPU limit", "CPU temperature", "governor"]
    assert [(name, check.level, check.fix) for name, check in found.items()] == [(name, GREEN, None) for name in names]
    assert Trust(tuple(found.values())).line() == "trust: green"


@pytest.mark.parametrize(
    ("change", "name", "level", "text"),
    [
        ({"busy_s": 524.02}, OTHERS, RED, "other processes used 0.9 of 2 cores"),
        ({"busy_s": 519.10}, OTHERS, RED, "other processes used 0.4 of 2 cores"),
        ({"busy_s": 518.90}, OTHERS, AMBER, "other processes used 0.4 of 2 cores"),
        ({"busy_s": 516.03}, OTHERS, AMBER, "other processes used 0.1 of 2 cores"),
        ({"busy_s": 515.90}, OTHERS, GREEN, "other processes used 0.1 of 2 cores"),
        ({"steal_s": 12.8}, "steal", RED, "the hypervisor took 14 % of the CPU time away (steal)"),
        ({"steal_s": 10.5}, "steal", AMBER, "the hypervisor took 2 % of the CPU time away (steal)"),
        ({"swap_bytes": 2**30}, "swap", RED, "swapping moved 102.4 MiB/s"),
        ({"swap_bytes": 2**24}, "swap", AMBER, "swapping moved 1.6 MiB/s"),
        ({"swap_bytes": 2**20}, "swap", GREEN, "swapping moved 0.1 MiB/s"),
        ({"memory_wait_s": 1.5}, "memory pressure", AMBER, "processes waited for memory in 5 % of the time"),
        ({"memory_wait_s": 3.0}, "memory pressure", RED, "processes waited for memory in 20 % of the time"),
        (
            {"quota_periods": 100, "quota_limited": 40},
            "CPU limit",
            RED,
            "the container's CPU limit stopped processes in 40 % of its periods",
        ),
        ({"heat_events": 5}, "CPU temperature", AMBER, "the processor slowed down 2 times because of heat"),
        ({"governor": "powersave"}, "governor", AMBER, "the CPU frequency governor is powersave"),
    ],
)
def test_each_disturbance_is_graded_with_its_number(change: dict[str, Any], name: str, level: str, text: str) -> None:
    found = graded(replace(QUIET, **change))
    assert (found[name].level, found[name].text) == (level, text)
    assert bool(found[name].fix) is (level != GREEN)
    assert {each.level for each in found.values() if each.name != name} == {GREEN}


def test_the_governor_is_only_graded_for_runs_on_the_cpu() -> None:
    assert "governor" not in graded(replace(QUIET, governor="powersave"), is_cpu_run=False)


def test_what_is_unknown_is_neither_green_nor_red() -> None:
    nothing = tuple(usage_checks(HostUsage(at_s=1.0), HostUsage(at_s=2.0)))
    assert [(check.name, check.level) for check in nothing] == [(OTHERS, UNKNOWN)]
    assert Trust(nothing).level == UNKNOWN
    assert Trust(nothing).line() == "trust: unknown: the load of other processes cannot be read."
    assert Trust(()).level == UNKNOWN
    # A counter that started over says nothing.
    assert graded(replace(QUIET, own_s=5.0))[OTHERS].level == UNKNOWN
    served = graded(replace(QUIET, busy_s=530.0), serves_elsewhere=True)
    assert served[OTHERS].level == UNKNOWN


def test_more_own_processes_than_a_reader_sees_are_not_others() -> None:
    busy = replace(QUIET, busy_s=519.5)
    assert graded(busy)[OTHERS].level == RED
    assert graded(busy, own_s=19.5)[OTHERS].level == GREEN


def test_the_line_has_the_worst_reason_first_and_what_to_do() -> None:
    checks = tuple(graded(replace(QUIET, busy_s=524.02, governor="powersave")).values())
    light = Trust(tuple(reversed(checks)))
    assert light.level == RED
    assert light.line() == (
        "trust: red: other processes used 0.9 of 2 cores; the CPU frequency governor is powersave. "
        "Stop them, or expect wide intervals."
    )
    assert light.line(" during ddp").startswith("trust: red during ddp: other")
    assert light.brief == "trust red: other processes used 0.9 of 2 cores; the CPU frequency governor is powersave"


# --- GPUs ---


@pytest.mark.parametrize(
    ("neighbours", "busy", "level", "text"),
    [
        (0, 0.0, GREEN, "no other process on GPU 0"),
        # The driver averages: our own last run may still show.
        (0, 0.9, GREEN, "no other process on GPU 0"),
        (1, 0.0, AMBER, "1 other process on GPU 0"),
        (2, 0.87, RED, "2 other processes kept GPU 0 87 % busy"),
        (None, 0.87, AMBER, "GPU 0 was 87 % busy before the run used it"),
        (None, None, UNKNOWN, "the driver does not report the processes on GPU 0"),
    ],
)
def test_neighbours_on_a_gpu(neighbours: int | None, busy: float | None, level: str, text: str) -> None:
    check = trust.gpu_neighbours_check("GPU 0", neighbours, busy)
    assert (check.level, check.text) == (level, text)


def reading(*reasons: str, clock_hz: float = 1.98e9) -> Any:
    return SimpleNamespace(throttle_reasons=reasons, sm_clock_hz=clock_hz)


def clocks(*samples: Any) -> dict[str, Check]:
    return {check.name: check for check in trust.clock_checks("GPU 0", samples, 1.98e9)}


def test_heat_is_graded_and_the_power_cap_is_normal() -> None:
    assert {c.level for c in clocks(*[reading("software power cap")] * 9).values()} == {GREEN}
    hot = clocks(*[reading()] * 17, *[reading("software thermal slowdown")] * 3)["GPU throttling"]
    assert (hot.level, hot.text) == (RED, "GPU 0 was slowed down in 15 % of the readings (software thermal slowdown)")
    assert clocks(*[reading()] * 97, *[reading("hardware slowdown")] * 3)["GPU throttling"].level == AMBER
    unknown = SimpleNamespace(throttle_reasons=None, sm_clock_hz=None)
    assert [c.level for c in clocks(unknown).values()] == [UNKNOWN]


def test_clocks_that_were_set_below_the_maximum_are_named() -> None:
    low = clocks(*[reading("applications clocks setting", clock_hz=1.2e9)] * 9)["GPU clocks"]
    text = "the clocks of GPU 0 are limited to 1,200 of 1,980 MHz (applications clocks setting)"
    assert (low.level, low.text) == (AMBER, text)
    assert clocks(*[reading("applications clocks setting")] * 9)["GPU clocks"].level == GREEN
    assert clocks(*[reading()] * 9, reading("applications clocks setting", clock_hz=1e9))["GPU clocks"].level == GREEN


def test_the_gpus_of_this_host_are_graded_before_a_run(fake_nvml: FakeNvml) -> None:
    fake_nvml.pids = [4242]
    found = {check.name: check for check in trust.before(uses_gpu=True, watch_s=0.0).checks}
    assert found["GPU neighbours"].text == "1 other process kept GPU 0 87 % busy (and 1 more)"
    assert (found["GPU throttling"].level, found["GPU temperature"].text) == (RED, "GPU 0 has 61 °C")
    assert fake_nvml.opened == 0


# --- this machine ---


@contextmanager
def busy_strangers(count: int) -> Iterator[list[int]]:
    """Busy loops that are nobody's children: their parent ends at once."""
    loop = f"{sys.executable} -c 'while True: pass' >/dev/null 2>&1 & echo $!"
    starts = [
        subprocess.run(["/bin/sh", "-c", loop], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
        for _ in range(count)
    ]
    pids = [int(start.stdout) for start in starts]
    try:
        yield pids
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


def used_s(pid: int) -> float:
    stat = usage._stat(usage.PROC, pid)
    assert stat is not None
    return sum(stat.ticks) * TICK_S


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.usefixtures("no_gpu")
def test_busy_strangers_make_the_light_red_and_busy_children_do_not() -> None:
    cores = len(os.sched_getaffinity(0))
    with busy_strangers(cores):
        light = trust.before()
    others = next(check for check in light.checks if check.name == OTHERS)
    # On a machine that takes our cores away there may be nothing left for anybody to use.
    stolen = next((check for check in light.checks if check.name == "steal"), None)
    assert RED in (others.level, stolen and stolen.level)
    assert light.level == RED
    assert others.text.startswith("other processes used ")
    assert others.text.endswith(f" of {cores} core{'' if cores == 1 else 's'}")
    # Other tests may be as busy as the loops were, so our children are judged by their own time.
    children = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        reader = usage.UsageReader()
        first, began = reader.read(), sum(used_s(child.pid) for child in children)
        deadline = time.monotonic() + 120
        while sum(used_s(child.pid) for child in children) - began < 0.5:
            assert time.monotonic() < deadline, "the children never ran"
            time.sleep(0.05)
        last = reader.read()
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert last.own_s is not None
    assert first.own_s is not None
    assert last.own_s - first.own_s >= 0.5 - 4 * TICK_S
