"""Counters of the host and of our own processes, from folders like /proc and from this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.host import usage
from paceline.host.usage import HostUsage, OwnProcesses, UsageReader, is_paceline, root_of

CONTROLLER = ("python", "/usr/bin/paceline", "run", "quick")


class FakeHost:
    """/proc and /sys as folders. Core times are user, nice, system, idle, iowait, irq, softirq, steal in ticks."""

    def __init__(self, root: Path) -> None:
        self.proc, self.sys = root / "proc", root / "sys"
        for folder in (self.proc / "sys/kernel/random", self.proc / "pressure", self.sys / "fs/cgroup"):
            folder.mkdir(parents=True)
        (self.proc / "sys/kernel/random/boot_id").write_text("7ee33d80-fd05-45f5-ad28-392693e8cc99\n")

    def process(self, pid: int, parent: int, *argv: str, ticks: int = 0, ended: int = 0, environ: str = "") -> None:
        folder = self.proc / str(pid)
        folder.mkdir(exist_ok=True)
        (folder / "stat").write_text(f"{pid} (a) b) S {parent} {'0 ' * 9}{ticks} 0 {ended} 0 20 0 1 0\n")
        (folder / "cmdline").write_text("\0".join(argv) + "\0")
        (folder / "environ").write_text(environ)

    def gone(self, pid: int) -> None:
        for path in (self.proc / str(pid)).iterdir():
            path.unlink()
        (self.proc / str(pid)).rmdir()

    def cores(self, *times: str) -> None:
        lines = [f"cpu{core} {each} 0 0\n" for core, each in enumerate(times)]
        (self.proc / "stat").write_text(f"cpu  9 9 9 9 9 9 9 9 0 0\n{''.join(lines)}intr 7\n")


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path)


def test_our_tree_is_ours_and_its_neighbours_are_not(host: FakeHost) -> None:
    host.process(1, 0, "init", ticks=1000)
    host.process(50, 1, "bash", "-c", "paceline run quick", ticks=100)
    host.process(60, 50, *CONTROLLER, ticks=10)
    host.process(70, 60, "python", "-m", "torch.distributed.run", "-m", "paceline.workloads.worker", "d", ticks=20)
    host.process(71, 70, "python", "-m", "paceline.workloads.worker", "d", ticks=300)
    host.process(72, 70, "python", "-m", "paceline.workloads.worker", "d", ticks=400)
    host.process(80, 50, "stress", ticks=5000)
    assert root_of(72, host.proc) == 60
    own = OwnProcesses(root_of(72, host.proc), proc=host.proc)
    assert own.seconds() == pytest.approx(730 * usage.TICK_S)
    assert own.pids == {60, 70, 71, 72}


def test_processes_that_come_and_go_are_counted_once(host: FakeHost) -> None:
    host.process(60, 1, *CONTROLLER, ticks=10)
    own = OwnProcesses(60, proc=host.proc)
    own.seconds()
    host.process(71, 60, "python", ticks=300)
    host.process(90, 71, "vllm", ticks=50)
    host.process(95, 1, "stress", ticks=50)
    assert own.seconds() == pytest.approx(360 * usage.TICK_S)
    # Its parent is gone: the guard of a server adopts it, and it stays ours.
    host.gone(71)
    host.process(60, 1, *CONTROLLER, ticks=10, ended=300)
    host.process(90, 1, "vllm", ticks=80)
    assert own.seconds() == pytest.approx(390 * usage.TICK_S)
    # Nobody inherits the times of this one, but they were used.
    host.gone(90)
    assert own.seconds() == pytest.approx(390 * usage.TICK_S)
    host.process(60, 1, *CONTROLLER, ticks=30, ended=300)
    assert own.seconds() == pytest.approx(410 * usage.TICK_S)


def test_ranks_of_other_trees_are_known_by_a_mark(host: FakeHost) -> None:
    """Under Ray each rank is below an actor of its own."""
    spec = 'PACELINE_SPEC={"lineage": "5ca1ab1e"}\0'
    host.process(10, 1, "raylet")
    host.process(20, 10, "python", "-m", "paceline.workloads.worker", "/tmp/a", ticks=100, environ=spec)
    host.process(30, 10, "python", "-m", "paceline.workloads.worker", "/tmp/b", ticks=200, environ=spec)
    host.process(31, 30, "python", "-c", "pool", ticks=40)
    host.process(40, 10, "python", "-m", "paceline.workloads.worker", "/tmp/c", ticks=9000, environ="A=1\0")
    own = OwnProcesses(20, ("/tmp/a", "5ca1ab1e"), host.proc)
    assert own.seconds() == pytest.approx(340 * usage.TICK_S)
    assert OwnProcesses(20, ("",), host.proc).seconds() == pytest.approx(100 * usage.TICK_S)


@pytest.mark.parametrize(
    ("argv", "ours"),
    [
        ("/usr/bin/python3|/usr/bin/paceline|run|quick", True),
        ("python|-u|-m|paceline.launchers.node.agent", True),
        ("python|-m|paceline|run", True),
        ("paceline|monitor", True),
        ("bash|-c|python -m paceline run", False),
        ("python|-m|paceline_lookalike", False),
        ("vim|docs/paceline.md", False),
        ("", False),
    ],
)
def test_a_process_is_ours_by_what_it_runs_not_by_a_word(argv: str, ours: bool) -> None:
    assert is_paceline(argv.encode().split(b"|")) is ours


def test_a_reading_has_every_counter(host: FakeHost) -> None:
    host.process(60, 1, *CONTROLLER, ticks=40)
    host.cores("100 20 30 800 7 5 3 40", "200 0 50 700 0 0 0 60")
    (host.proc / "vmstat").write_text("pgpgin 1\npswpin 3\npswpout 2\n")
    (host.proc / "pressure/memory").write_text("some avg10=1.0 total=2500000\nfull avg10=0.00 total=9\n")
    (host.sys / "fs/cgroup/cpu.stat").write_text("usage_usec 9\nnr_periods 50\nnr_throttled 5\nthrottled_usec 1\n")
    for core, package, count in ((0, 0, 7), (1, 0, 7), (2, 1, 2)):
        folder = host.sys / f"devices/system/cpu/cpu{core}"
        for name, text in (
            ("topology/physical_package_id", package),
            ("thermal_throttle/package_throttle_count", count),
        ):
            (folder / name).parent.mkdir(parents=True)
            (folder / name).write_text(f"{text}\n")
    for policy, governor in (("policy0", "performance"), ("policy1", "schedutil")):
        (host.sys / "devices/system/cpu/cpufreq" / policy).mkdir(parents=True)
        (host.sys / "devices/system/cpu/cpufreq" / policy / "scaling_governor").write_text(f"{governor}\n")
    # No process of this machine has that number: then all cores count.
    reader = UsageReader(proc=host.proc, sys=host.sys, pid=60_000_000)
    assert (reader.read().cores, reader.read().own_s) == (2, None)
    seen = UsageReader(proc=host.proc, sys=host.sys, pid=60)
    seen._cores = frozenset({0, 1})
    read = seen.read()
    assert (read.kernel, read.cores, read.governor) == ("7ee33d80", 2, "schedutil")
    seconds = (read.total_s, read.busy_s, read.own_s, read.steal_s)
    assert seconds == pytest.approx([t * usage.TICK_S for t in (2015, 400, 40, 100)])
    assert (read.swap_bytes, read.memory_wait_s) == (5 * usage.PAGE_BYTES, 2.5)
    assert (read.quota_periods, read.quota_limited, read.heat_events) == (50, 5, 9)


def test_cores_that_we_may_not_use_do_not_count(host: FakeHost) -> None:
    host.process(60, 1, *CONTROLLER)
    host.cores("100 0 0 900 0 0 0 0", "1000 0 0 0 0 0 0 0")
    reader = UsageReader(proc=host.proc, sys=host.sys, pid=60)
    reader._cores = frozenset({0})
    read = reader.read()
    assert (read.cores, read.busy_s) == (1, pytest.approx(100 * usage.TICK_S))


def test_what_is_not_there_is_unknown(tmp_path: Path) -> None:
    read = UsageReader(proc=tmp_path / "none", sys=tmp_path / "none", pid=1).read()
    assert read == HostUsage(at_s=read.at_s)


def test_a_reading_of_a_later_version_is_read() -> None:
    assert HostUsage.from_dict({"at_s": 1.0, "cores": 2, "moon_phase": "full"}) == HostUsage(at_s=1.0, cores=2)


# --- this machine ---

# The kernel counts in ticks, so a little less than what a process has really used.
BURN_S, COUNTED_S = 0.4, 0.3
BURN = f"""
import time
while time.process_time() < {BURN_S}: pass
print("done", flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_own_children_are_own_and_others_are_not() -> None:
    """By CPU time that was used for certain, whatever else this machine does."""
    own = OwnProcesses(os.getpid())
    before = own.seconds()
    child = subprocess.Popen([sys.executable, "-c", BURN], stdout=subprocess.PIPE, text=True)
    # A process that the kernel gives to another parent is nobody's child here.
    orphan = subprocess.run(
        ["sh", "-c", f"{sys.executable} -c '{BURN}' >/dev/null 2>&1 & echo $!"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    stranger = int(orphan.stdout)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        deadline = time.monotonic() + 120
        while sum(usage._stat(usage.PROC, stranger).ticks) * usage.TICK_S < COUNTED_S:  # type: ignore[union-attr]
            assert time.monotonic() < deadline, "the busy process never ran"
            time.sleep(0.05)
        after = own.seconds()
        assert before is not None
        assert after is not None
        assert after - before >= COUNTED_S
        assert child.pid in own.pids
        assert stranger not in own.pids
    finally:
        os.kill(stranger, signal.SIGKILL)
        child.kill()
        child.communicate()
