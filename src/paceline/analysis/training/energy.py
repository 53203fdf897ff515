"""Energy of a run's measured window, from the counters of its GPUs or processors, else from their power.

Readings come a few times a second, so both ends of the window lie between two of them and are interpolated. Energy
never falls, so what interpolation can be off by is known: it is told as the margin, and a window too short for its
readings has no energy at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.analysis.statistics.intervals import Array
from paceline.analysis.training import gauges
from paceline.results.records import GaugeSample, RunRecord

COUNTER, POWER = "the energy counter", "power over time"
# Beyond this the number would say more about when gauges were read than about the run.
LARGEST_MARGIN = 0.25
# Power is not known for a stretch in which nobody read it.
LONGEST_GAP_S = 5.0


Windows = Callable[[gauges.Source], Sequence[tuple[float, float]] | None]


@dataclass(frozen=True, slots=True)
class WindowEnergy:
    """Joules of all devices of the job over its measured steps. seconds is the window's length, the devices' mean.

    margin_j bounds what the ends may be off by. joules is None where `reason` says why.
    """

    joules: float | None
    seconds: float | None = None
    margin_j: float = 0.0
    devices: int = 0
    how: str = ""
    reason: str | None = None

    @property
    def note(self) -> str | None:
        if self.joules is None:
            return self.reason
        return f"by {self.how}; its ends lie between readings and may be off by {self.margin_j / self.joules:.1%}"


def unknown(reason: str) -> WindowEnergy:
    return WindowEnergy(None, reason=f"energy: {reason}")


def window_energy(record: RunRecord, measured: Sequence[int]) -> WindowEnergy:
    """Of all GPUs of the job, or of the processors of all its hosts where it ran on those."""

    def windows(source: gauges.Source) -> list[tuple[float, float]] | None:
        return gauges.stretches(record, source.rank, measured)

    return _of_devices(record, windows, record.spec.topology.world_size)


def energy_within(record: RunRecord, windows: Sequence[tuple[float, float]], gpus: int | None) -> WindowEnergy:
    """Of so many GPUs (None: of the processors of all hosts) over stretches of time, by the clocks on the wall."""
    return _of_devices(record, lambda source: windows, gpus)


def _of_devices(record: RunRecord, windows_of: Windows, gpus: int | None) -> WindowEnergy:
    cuda = record.spec.topology.device == "cuda"
    shared = _not_alone(record)
    if shared or not record.gauges:
        return unknown(shared or "no gauge was recorded")
    ours = {s: samples for s, samples in gauges.sources(record).items() if (s.device is not None) == cuda}
    expected = gpus if cuda and gpus else len(gauges.hosts(record))
    if len(ours) < expected:
        return unknown(f"{len(ours)} of {expected} {'GPUs' if cuda else 'hosts'} were read")
    found = []
    for source, samples in ours.items():
        windows = windows_of(source)
        if not windows:
            return unknown("when the measured steps ran was not recorded")
        found.append(_joined([between(samples, *window) for window in windows]))
    return _sum(found)


def _joined(parts: Sequence[WindowEnergy]) -> WindowEnergy:
    """One device over stretches between which it did something else; unknown as soon as one of them is."""
    missing = next((part for part in parts if part.joules is None), None)
    if missing or len(parts) == 1:
        return missing or parts[0]
    joules, seconds = sum(p.joules or 0.0 for p in parts), sum(p.seconds or 0.0 for p in parts)
    return WindowEnergy(joules, seconds, sum(p.margin_j for p in parts), 1, parts[0].how)


def _not_alone(record: RunRecord) -> str | None:
    """Why the energy of the GPUs is not this run's."""
    if record.shares_gpu:
        return "ranks share a GPU, so its energy is not that of a job with GPUs of its own"
    if any(o.evidence and o.evidence.neighbours for o in record.outcomes):
        return "other processes computed on a GPU, so its energy is not this run's"
    return None


def _sum(found: Sequence[WindowEnergy]) -> WindowEnergy:
    """All devices, or the first that cannot tell."""
    for one in found:
        if one.joules is None:
            return one
    joules, seconds = sum(e.joules or 0.0 for e in found), [e.seconds or 0.0 for e in found]
    margin = sum(e.margin_j for e in found)
    if joules <= 0:
        return unknown("no counter moved during the measured window")
    if margin > LARGEST_MARGIN * joules:
        length = sum(seconds) / len(seconds)
        return unknown(f"the measured window of {length:.2g} s is too short for how often gauges were read")
    how = " and ".join(dict.fromkeys(e.how for e in found))
    return WindowEnergy(joules, sum(seconds) / len(seconds), margin, len(found), how)


def between(samples: Sequence[GaugeSample], begin: float, end: float) -> WindowEnergy:
    """Of one device. A counter that fell was set back: then power tells, where it is known."""
    for how, curve in ((COUNTER, _counted(samples)), (POWER, _integrated(samples))):
        if curve is None:
            continue
        at, joules = curve
        if _clock_stepped_back(at, begin, end):
            return unknown("the clock of its readings was set back during the measured window")
        around = slice(max(np.searchsorted(at, begin, side="right") - 1, 0), np.searchsorted(at, end) + 1)
        if not at[0] <= begin < end <= at[-1]:
            return unknown("gauges were not read from before the measured window to after it")
        if bool((np.diff(joules[around]) < 0).any()):
            continue
        if how == POWER and np.diff(at[around]).max() > LONGEST_GAP_S:
            return unknown(f"power was not read for more than {LONGEST_GAP_S:g} s of the measured window")
        first, last = _interpolated(at, joules, begin), _interpolated(at, joules, end)
        return WindowEnergy(last[0] - first[0], end - begin, first[1] + last[1], 1, how)
    counted = any(sample.energy_j is not None for sample in samples)
    return unknown("its counter was set back during the run" if counted else "neither energy nor power is told here")


def _clock_stepped_back(at: Array, begin: float, end: float) -> bool:
    """Whether any two readings that enclose a part of the window are out of order: then no moment of it is known.

    Told without a search, which itself relies on the order.
    """
    earlier, later = np.minimum(at[:-1], at[1:]), np.maximum(at[:-1], at[1:])
    return bool(((np.diff(at) <= 0) & (earlier <= end) & (later >= begin)).any())


Curve = tuple[Array, Array]


def _counted(samples: Sequence[GaugeSample]) -> Curve | None:
    return _curve([(s.at_s, s.energy_j) for s in samples if s.energy_j is not None])


def _integrated(samples: Sequence[GaugeSample]) -> Curve | None:
    """Power by the trapezoidal rule, as a counter that begins with the first reading."""
    curve = _curve([(s.at_s, s.power_w) for s in samples if s.power_w is not None])
    if curve is None:
        return None
    at, watts = curve
    return at, np.concatenate([[0.0], np.cumsum(np.diff(at) * (watts[1:] + watts[:-1]) / 2)])


def _curve(points: Sequence[tuple[float, float]]) -> Curve | None:
    if len(points) < 2:
        return None
    at, values = (np.array(side) for side in zip(*points, strict=True))
    return at, values


def _interpolated(at: Array, joules: Array, moment: float) -> tuple[float, float]:
    """The counter at a moment between two readings, and how far it may be from that."""
    value = float(np.interp(moment, at, joules))
    after = int(np.searchsorted(at, moment))
    before = after if at[after] == moment else after - 1
    return value, max(value - float(joules[before]), float(joules[after]) - value)
