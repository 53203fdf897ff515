"""The trust light: whether a host was quiet enough for a measurement. Green, amber or red, each reason in one sentence.

The same grades apply before a run (`before`), during it (`analysis.training.trust`) and in `paceline doctor`. What
cannot be read is unknown: never green by itself, and never red.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from paceline.host import machine
from paceline.host.gauges import HEAT_REASONS, SET_CLOCKS, DeviceSample, Gauges
from paceline.host.usage import TICK_S, HostUsage, UsageReader

GREEN, AMBER, RED, UNKNOWN = "green", "amber", "red", "unknown"
# How long `before` watches the host: the kernel counts in steps of 10 ms, so half a second resolves 2 % of a core.
WATCH_S = 0.5

# The limits of amber and red. Amber may shift a result by about as much as the differences that people compare, red by
# more than most of them.
# Share of the cores that other processes use. Ranks on all cores lose about the same share of their time. A desktop or
# the daemons of a server stay below 5 %.
OTHERS_RATIO = (0.05, 0.20)
# Share of CPU time that the hypervisor gave to other machines. Unlike the load of others, it is lost for certain.
STEAL_RATIO = (0.02, 0.10)
# Swap traffic in bytes/s: a kernel that tidies up stays below 1 MiB/s, and a disk is busy at 32 MiB/s of pages.
SWAP_BYTES_PER_S = (2**20, 2**25)
# Share of the time in which some process waited for memory (the kernel's pressure information).
MEMORY_WAIT_RATIO = (0.01, 0.10)
# Share of the periods in which the CPU limit of the container stopped processes.
QUOTA_RATIO = (0.01, 0.10)
# Share of the readings in which a GPU was slowed down by heat or by its power supply. The power cap is not one of these
# reasons: under full load it is the normal state of a data centre GPU, and it is the same in every launch.
HEAT_RATIO = (0.01, 0.10)
# The clocks of a GPU are set below this share of their maximum, in at least this share of the readings.
FULL_CLOCK_RATIO, SET_CLOCKS_RATIO = 0.95, 0.5
# A GPU that is busier than this before our ranks use it computes for others.
BUSY_GPU_RATIO = 0.05
# Data centre GPUs slow down from about 85 degrees.
HOT_C = 80.0
OTHERS = "other processes"


class DeviceReading(Protocol):
    """What a grade needs of a GPU at one moment: a `DeviceSample`, or one that was recorded."""

    @property
    def throttle_reasons(self) -> tuple[str, ...] | None: ...
    @property
    def sm_clock_hz(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Check:
    """One grade. text says what was read, with its number; fix what to do, as a sentence. lasts: the request is the
    cause, so another launch would be the same."""

    name: str
    level: str
    text: str
    fix: str | None = None
    lasts: bool = False


@dataclass(frozen=True, slots=True)
class Trust:
    """All grades of one host at one time, or of one launch.

    >>> busy = Check(OTHERS, RED, "other processes used 0.9 of 2 cores", "Stop them, or expect wide intervals.")
    >>> Trust((busy,)).line()
    'trust: red: other processes used 0.9 of 2 cores. Stop them, or expect wide intervals.'
    """

    checks: tuple[Check, ...]

    @property
    def level(self) -> str:
        """The worst grade. Green needs a known load: a host that says nothing is unknown."""
        if worst := max((_rank(check) for check in self.checks), default=0):
            return (AMBER, RED)[worst - 1]
        return GREEN if any(check.name == OTHERS and check.level == GREEN for check in self.checks) else UNKNOWN

    @property
    def disturbances(self) -> tuple[Check, ...]:
        """The amber and red grades, the worst first."""
        return tuple(sorted(filter(_rank, self.checks), key=_rank, reverse=True))

    @property
    def is_worth_repeating(self) -> bool:
        """Whether something is red that may be gone in another launch."""
        return any(check.level == RED and not check.lasts for check in self.checks)

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(check.text for check in self.disturbances)

    @property
    def brief(self) -> str:
        """`trust green`, or `trust red: other processes used 0.9 of 2 cores`."""
        return ": ".join(filter(None, (f"trust {self.level}", "; ".join(self.reasons))))

    def line(self, when: str = "", with_fix: bool = True) -> str:
        """One line for a terminal: the level, the reasons, what to do about the worst. when: such as ` during RUN`."""
        if found := self.disturbances:
            text = f"trust: {self.level}{when}: {'; '.join(self.reasons)}."
            return f"{text} {found[0].fix}" if with_fix and found[0].fix else text
        if self.level == GREEN:
            return f"trust: green{when}"
        unknown = [check.text for check in self.checks if check.level == UNKNOWN]
        return f"trust: unknown{when}: {'; '.join(unknown) or 'nothing could be read'}."


def _rank(check: Check) -> int:
    return {AMBER: 1, RED: 2}.get(check.level, 0)


def worst_of(checks: Iterable[Check]) -> tuple[Check, ...]:
    """Each check once: of several hosts or GPUs the worst, with the number of others that are as bad.

    >>> [check.text for check in worst_of([Check("a", RED, "x"), Check("a", GREEN, "y"), Check("a", RED, "z")])]
    ['x (and 1 more)']
    """
    by_name: dict[str, list[Check]] = {}
    for check in checks:
        by_name.setdefault(check.name, []).append(check)
    worst = []
    for alike in by_name.values():
        chosen = max(alike, key=lambda check: (GREEN, UNKNOWN, AMBER, RED).index(check.level))
        more = sum(check.level == chosen.level for check in alike) - 1
        worst.append(replace(chosen, text=f"{chosen.text} (and {more} more)") if more and _rank(chosen) else chosen)
    return tuple(worst)


def grade(value: float, limits: tuple[float, float]) -> str:
    """Green below both limits, red from the second on.

    >>> grade(0.04, OTHERS_RATIO), grade(0.05, OTHERS_RATIO), grade(0.3, OTHERS_RATIO)
    ('green', 'amber', 'red')
    """
    return (GREEN, AMBER, RED)[sum(value >= limit for limit in limits)]


# --- before a run ---


def before(*, uses_cpu: bool = True, uses_gpu: bool = False, watch_s: float = WATCH_S) -> Trust:
    """The light of this host now, after watching it for a moment. uses_cpu: runs will compute on the CPU."""
    reader = UsageReader()
    first = reader.read()
    time.sleep(watch_s)
    checks = list(usage_checks(first, reader.read(), is_cpu_run=uses_cpu))
    if uses_gpu:
        with Gauges() as gauges:
            devices = gauges.read().devices
        limits = {gpu.index: gpu.sm_clock_max_hz for gpu in machine.probe().gpus}
        for sample in devices:
            checks += idle_gpu_checks(sample, machine.neighbours(sample.device), limits.get(sample.device))
    return Trust(worst_of(checks))


def idle_gpu_checks(sample: DeviceSample, neighbours: int | None, clock_max_hz: float | None) -> Iterator[Check]:
    """The grades of a GPU that our runs do not use yet."""
    gpu, busy = f"GPU {sample.device}", sample.utilisation_ratio
    yield gpu_neighbours_check(gpu, neighbours, busy)
    yield from clock_checks(gpu, [sample], clock_max_hz)
    if sample.temperature_c is None:
        yield Check("GPU temperature", UNKNOWN, f"the temperature of {gpu} cannot be read")
    else:
        level = AMBER if sample.temperature_c >= HOT_C else GREEN
        fix = "Let it cool down, or check its fans and air flow."
        yield Check(
            "GPU temperature", level, f"{gpu} has {sample.temperature_c:.0f} °C", None if level == GREEN else fix
        )


# --- pure grades ---


def usage_checks(
    first: HostUsage,
    last: HostUsage,
    *,
    is_cpu_run: bool = True,
    own_s: float | None = None,
    serves_elsewhere: bool = False,
) -> Iterator[Check]:
    """The grades of a host between two readings.

    own_s replaces the CPU seconds of own processes between them, if other readers know of more. serves_elsewhere: a
    server that we did not start may run on this host, so its load cannot be separated from that of others.
    """
    elapsed_s = last.at_s - first.at_s
    total_s = _difference(first.total_s, last.total_s)
    own_s = _difference(first.own_s, last.own_s) if own_s is None else own_s
    busy_s, stolen_s = _difference(first.busy_s, last.busy_s), _difference(first.steal_s, last.steal_s)
    if serves_elsewhere:
        yield Check(OTHERS, UNKNOWN, "the load of other processes is unknown, because the server may be one of them")
    elif busy_s is None or own_s is None or not total_s or not last.cores:
        yield Check(OTHERS, UNKNOWN, "the load of other processes cannot be read")
    else:
        # Counters of cores and processes are read one after the other: they may differ by a tick of each core.
        used = max(0.0, busy_s - own_s - last.cores * TICK_S) / total_s * last.cores
        level = grade(used / last.cores, OTHERS_RATIO)
        noun = "core" if last.cores == 1 else "cores"
        yield Check(
            OTHERS,
            level,
            f"other processes used {used:.1f} of {last.cores} {noun}",
            None if level == GREEN else "Stop them, or expect wide intervals.",
        )
    if stolen_s is not None and total_s:
        level = grade(stolen_s / total_s, STEAL_RATIO)
        fix = "Use a machine with dedicated cores, or another time."
        text = f"the hypervisor took {_percent(stolen_s / total_s)} of the CPU time away (steal)"
        yield Check("steal", level, text, None if level == GREEN else fix)
    if elapsed_s > 0:
        yield from _memory_checks(first, last, elapsed_s)
    yield from _limit_checks(first, last)
    if is_cpu_run and last.governor is not None:
        # Never red: the clock then follows the load, which a long run does not notice.
        level = GREEN if last.governor == "performance" else AMBER
        fix = "Run `cpupower frequency-set -g performance`."
        text = f"the CPU frequency governor is {last.governor}"
        yield Check("governor", level, text, None if level == GREEN else fix)


def _memory_checks(first: HostUsage, last: HostUsage, elapsed_s: float) -> Iterator[Check]:
    fix = "Free memory, or use a smaller model or batch."
    swapped, waited_s = (
        _difference(first.swap_bytes, last.swap_bytes),
        _difference(first.memory_wait_s, last.memory_wait_s),
    )
    if swapped is not None:
        level = grade(swapped / elapsed_s, SWAP_BYTES_PER_S)
        text = f"swapping moved {swapped / elapsed_s / 2**20:.1f} MiB/s"
        yield Check("swap", level, text, None if level == GREEN else fix)
    if waited_s is not None:
        level = grade(waited_s / elapsed_s, MEMORY_WAIT_RATIO)
        text = f"processes waited for memory in {_percent(waited_s / elapsed_s)} of the time"
        yield Check("memory pressure", level, text, None if level == GREEN else fix)


def _limit_checks(first: HostUsage, last: HostUsage) -> Iterator[Check]:
    periods = _difference(first.quota_periods, last.quota_periods)
    limited = _difference(first.quota_limited, last.quota_limited)
    if periods and limited is not None:
        level = grade(limited / periods, QUOTA_RATIO)
        text = f"the container's CPU limit stopped processes in {_percent(limited / periods)} of its periods"
        yield Check("CPU limit", level, text, None if level == GREEN else "Raise or remove the limit.")
    heat = _difference(first.heat_events, last.heat_events)
    if heat is not None:
        level = AMBER if heat else GREEN
        text = f"the processor slowed down {heat:.0f} times because of heat"
        yield Check("CPU temperature", level, text, "Check its cooling." if heat else None)


def gpu_neighbours_check(gpu: str, neighbours: int | None, busy_before_ratio: float | None) -> Check:
    """Other processes on a GPU. busy_before_ratio: how busy it was before our ranks used it, as the driver says."""
    busy = busy_before_ratio or 0.0
    is_busy = busy >= BUSY_GPU_RATIO
    fix = "End the processes that `nvidia-smi` lists, or choose another GPU with CUDA_VISIBLE_DEVICES."
    noun = "process" if neighbours == 1 else "processes"
    if neighbours and is_busy:
        text = f"{neighbours} other {noun} kept {gpu} {_percent(busy)} busy"
        return Check("GPU neighbours", RED, text, fix)
    if neighbours:
        return Check("GPU neighbours", AMBER, f"{neighbours} other {noun} on {gpu}", fix)
    if neighbours is None and is_busy:
        return Check("GPU neighbours", AMBER, f"{gpu} was {_percent(busy)} busy before the run used it", fix)
    if neighbours is None:
        return Check("GPU neighbours", UNKNOWN, f"the driver does not report the processes on {gpu}")
    return Check("GPU neighbours", GREEN, f"no other process on {gpu}")


def clock_checks(gpu: str, samples: Iterable[DeviceReading], clock_max_hz: float | None = None) -> Iterator[Check]:
    """Whether a GPU ran below its usual clock: slowed down by heat or its power supply, or set to it."""
    known = [sample for sample in samples if sample.throttle_reasons is not None]
    if not known:
        yield Check("GPU clocks", UNKNOWN, f"the driver does not report whether {gpu} is throttled")
        return
    slowed = [HEAT_REASONS.intersection(sample.throttle_reasons or ()) for sample in known]
    ratio = sum(map(bool, slowed)) / len(known)
    level = grade(ratio, HEAT_RATIO)
    names = ", ".join(sorted(set().union(*slowed)))
    text = (
        f"{gpu} was slowed down in {_percent(ratio)} of the readings ({names})"
        if ratio
        else f"{gpu} is not slowed down"
    )
    yield Check("GPU throttling", level, text, None if level == GREEN else "Check its cooling and power supply.")
    limited = [sample.sm_clock_hz for sample in known if SET_CLOCKS in (sample.throttle_reasons or ())]
    clock_hz = max((clock for clock in limited if clock is not None), default=None)
    at_most = clock_hz is not None and clock_max_hz is not None and clock_hz >= FULL_CLOCK_RATIO * clock_max_hz
    if len(limited) < SET_CLOCKS_RATIO * len(known) or at_most:
        yield Check("GPU clocks", GREEN, f"the clocks of {gpu} are not limited")
        return
    most = f" of {clock_max_hz / 1e6:,.0f}" if clock_max_hz else ""
    clock = "" if clock_hz is None else f" to {clock_hz / 1e6:,.0f}{most} MHz"
    text = f"the clocks of {gpu} are limited{clock} ({SET_CLOCKS})"
    yield Check("GPU clocks", AMBER, text, "Run `nvidia-smi --reset-applications-clocks` if that was not intended.")


def _percent(ratio: float) -> str:
    return f"{ratio * 100:.0f} %"


def _difference(first: float | None, last: float | None) -> float | None:
    return None if first is None or last is None or last < first else last - first
