"""Counters of CPU and memory use: the whole host, and the processes of one run on it.

The difference between the two is the load of others. All counters only grow, so a later reader may choose any two
readings and needs no ratio in between.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.host.files import text_of

PROC, SYS = Path("/proc"), Path("/sys")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUsage:
    """One reading. Seconds are CPU seconds of the cores that the run may use; None if unknown.

    cores: how many these are. total_s: all their time, idle time included. busy_s: time in processes; interrupts do not
    count, because they may be ours. own_s: the part of the run's own processes. steal_s: time that the hypervisor gave
    to other machines. swap_bytes: written to and read from swap. memory_wait_s: wall time in which some process waited
    for memory. quota_periods and quota_limited: periods of the container's CPU limit, and those in which it stopped
    processes. heat_events: how often a processor slowed down because of heat. governor: of the CPU frequency.

    kernel identifies the running kernel, and namespace the part of its processes that this reader sees: containers on
    one host have the same kernel and count the same busy_s, but each sees only its own processes.
    """

    at_s: float
    kernel: str | None = None
    namespace: str | None = None
    cores: int | None = None
    total_s: float | None = None
    busy_s: float | None = None
    own_s: float | None = None
    steal_s: float | None = None
    swap_bytes: int | None = None
    memory_wait_s: float | None = None
    quota_periods: int | None = None
    quota_limited: int | None = None
    heat_events: int | None = None
    governor: str | None = None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> HostUsage:
        """Ignores names that only another version of Paceline knows."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in raw.items() if name in known})


class UsageReader:
    """Reads this host's counters. marks: texts that only the command line or environment of processes of the run
    contains, such as its directory; processes that descend from Paceline's own are found without them."""

    def __init__(self, marks: Sequence[str] = (), proc: Path = PROC, sys: Path = SYS, pid: int | None = None) -> None:
        self._proc, self._sys = proc, sys
        root = root_of(os.getpid() if pid is None else pid, proc)
        self._own = OwnProcesses(root, marks, proc)
        self._cores = _affinity(root)
        self._kernel = text_of(proc / "sys/kernel/random/boot_id")[:8] or None
        self._namespace = _namespace(proc)
        self._heat = list(_heat_counters(sys))
        # Read once: a large host has a file for each of its cores. If they differ, the exception is of interest.
        governors = {text_of(path) for path in sys.glob("devices/system/cpu/cpufreq/policy*/scaling_governor")}
        self._governor = min(governors - {"performance", ""}, default="performance" if governors else None)

    def read(self) -> HostUsage:
        # Own seconds are read first: what runs between the two readings then counts as that of others, never as less
        # than nothing.
        own_s = self._own.seconds()
        cores = _core_times(text_of(self._proc / "stat"), self._cores)
        pages = re.findall(r"^pswp(?:in|out) (\d+)$", text_of(self._proc / "vmstat"), re.MULTILINE)
        waited = re.search(r"^some .*total=(\d+)", text_of(self._proc / "pressure/memory"), re.MULTILINE)
        # cgroup v2, then v1.
        quota = text_of(self._sys / "fs/cgroup/cpu.stat") or text_of(self._sys / "fs/cgroup/cpu/cpu.stat")
        limits = {name: int(value) for name, value in re.findall(r"^(nr_\w+) (\d+)$", quota, re.MULTILINE)}
        heat = [int(text) for path in self._heat if (text := text_of(path)).isdecimal()]
        return HostUsage(
            at_s=time.time(),
            kernel=self._kernel,
            namespace=self._namespace,
            cores=len(cores) or None,
            total_s=sum(sum(times[:8]) for times in cores) * TICK_S if cores else None,
            busy_s=sum(sum(times[:3]) for times in cores) * TICK_S if cores else None,
            own_s=own_s,
            steal_s=sum(times[7] for times in cores) * TICK_S if cores and min(map(len, cores)) > 7 else None,
            swap_bytes=sum(map(int, pages)) * PAGE_BYTES if pages else None,
            memory_wait_s=int(waited[1]) / 1e6 if waited else None,
            quota_periods=limits.get("nr_periods"),
            quota_limited=limits.get("nr_throttled"),
            heat_events=sum(heat) if heat else None,
            governor=self._governor,
        )


class OwnProcesses:
    """The descendants of a process, and marked processes with theirs.

    Each process is looked at once, when it appears; later readings read only our own. A process stays ours when its
    parent ends. Ended children count in the times of their parent.
    """

    def __init__(self, root: int, marks: Sequence[str] = (), proc: Path = PROC) -> None:
        self._proc = proc
        self._marks = tuple(mark.encode() for mark in marks if mark)
        self.pids = {root}
        self._others: set[int] = set()
        self._last_s = self._lost_s = 0.0

    def seconds(self) -> float | None:
        """CPU seconds of all own processes so far; None if this system has no such files."""
        try:
            with os.scandir(self._proc) as entries:
                present = {int(entry.name) for entry in entries if entry.name.isdecimal()}
        except OSError:
            return None
        self._others &= present
        self.pids &= present
        self._sort(present - self.pids - self._others)
        own = [stat for pid in self.pids if (stat := _stat(self._proc, pid))]
        if not own:
            return None
        # Times of a process that ended without a parent to inherit them are lost for the kernel, but not here.
        total = sum(sum(stat.ticks) for stat in own) * TICK_S
        self._lost_s += max(0.0, self._last_s - total)
        self._last_s = total
        return total + self._lost_s

    def _sort(self, new: Collection[int]) -> None:
        parents = {pid: stat.parent for pid in new if (stat := _stat(self._proc, pid))}
        for pid in parents:
            line = [pid]
            while line[-1] in parents and line[-1] not in self.pids and not self._is_marked(line[-1]):
                line.append(parents[line[-1]])
            is_own = line[-1] in self.pids or line[-1] in parents
            (self.pids if is_own else self._others).update(each for each in line if each in parents)

    def _is_marked(self, pid: int) -> bool:
        if not self._marks or pid in self._others:
            return False
        texts = (_bytes(self._proc / str(pid) / name) for name in ("cmdline", "environ"))
        return any(mark in text for text in texts for mark in self._marks)


def root_of(pid: int, proc: Path = PROC) -> int:
    """The topmost ancestor that is a Paceline process (`paceline run`, an agent, torchrun with our worker), or the
    process itself."""
    root = pid
    for ancestor in _ancestors(pid, proc):
        if is_paceline(_bytes(proc / str(ancestor) / "cmdline").split(b"\0")):
            root = ancestor
    return root


def is_paceline(arguments: Sequence[bytes]) -> bool:
    """Whether a command line runs Paceline: its script, or a module of it. A shell that mentions it does not.

    >>> is_paceline([b"python", b"/usr/bin/paceline", b"run"]), is_paceline([b"bash", b"-c", b"paceline run"])
    (True, False)
    """
    modules = (after for option, after in itertools.pairwise(arguments) if option == b"-m")
    scripts = (argument.rpartition(b"/")[2] == b"paceline" for argument in arguments[:2])
    return any(scripts) or any(module.split(b".")[0] == b"paceline" for module in modules)


@dataclass(frozen=True, slots=True)
class _Stat:
    parent: int
    ticks: tuple[int, ...]


def _stat(proc: Path, pid: int) -> _Stat | None:
    """The parent of a process, and its user and system time with those of its ended children (proc(5))."""
    # The name is in parentheses and may contain anything.
    fields = _bytes(proc / str(pid) / "stat").rpartition(b")")[2].split()
    return _Stat(int(fields[1]), tuple(map(int, fields[11:15]))) if len(fields) > 14 else None


def _ancestors(pid: int, proc: Path) -> Iterator[int]:
    while (stat := _stat(proc, pid)) and stat.parent > 0:
        pid = stat.parent
        yield pid


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _affinity(pid: int) -> frozenset[int] | None:
    """The cores that a process may use: a container or a batch system may have reserved some."""
    with contextlib.suppress(OSError, AttributeError):
        return frozenset(os.sched_getaffinity(pid))
    return None


def _core_times(text: str, cores: Collection[int] | None) -> list[tuple[int, ...]]:
    """The lines of /proc/stat of these cores: user, nice, system, idle, iowait, irq, softirq, steal, ... in ticks."""
    lines = re.findall(r"^cpu(\d+) ([\d ]+)$", text, re.MULTILINE)
    return [tuple(map(int, times.split())) for core, times in lines if cores is None or int(core) in cores]


def _namespace(proc: Path) -> str | None:
    with contextlib.suppress(OSError):
        return re.sub(r"\D", "", str((proc / "self/ns/pid").readlink())) or None
    return None


def _heat_counters(sys: Path) -> Iterator[Path]:
    """The thermal counter of each processor package, which its cores share."""
    packages: dict[str, Path] = {}
    for core in sorted(sys.glob("devices/system/cpu/cpu[0-9]*")):
        counter = core / "thermal_throttle/package_throttle_count"
        if counter.is_file():
            packages.setdefault(text_of(core / "topology/physical_package_id"), counter)
    yield from packages.values()
