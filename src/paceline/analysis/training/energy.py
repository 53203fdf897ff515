"""Energy of a run's measured window, from the counters of its GPUs or processors, or else from their power.

Readings come a few times per second, so both ends of the window lie between two of them and are interpolated. Energy
never decreases, so the possible error of interpolation is known: it is reported as the margin, and a window too short
for its readings has no energy at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.analysis.statistics.intervals import Array
from paceline.analysis.training import gauges
from paceline.results.records import GaugeSample, RunRecord

COUNTER, POWER = "the energy counter", "power over time"
# Beyond this the number would depend more on when gauges were read than on the run.
LARGEST_MARGIN = 0.25
# A longer gap between readings makes power unknown.
LONGEST_GAP_S = 5.0


Windows = Callable[[gauges.Source], Sequence[tuple[float, float]] | None]


@dataclass(frozen=True, slots=True)
class WindowEnergy:
    """Joules of all devices of the job over its measured steps. seconds is the length of the window, mean over devices.

    margin_j bounds the error at both ends. joules is None if unknown; `reason` says why.
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
        error = self.margin_j / self.joules
        return f"by {self.how}; the ends of the window are interpolated, with an error of at most {error:.1%}"


def unknown(reason: str) -> WindowEnergy:
    return WindowEnergy(None, reason=f"energy: {reason}")


def window_energy(record: RunRecord, measured: Sequence[int]) -> WindowEnergy:
    """Energy of all GPUs of the job, or of the processors of all its hosts on a CPU."""
    gpus = record.spec.topology.world_size
    return _of_devices(record, lambda source: gauges.stretches(record, source.rank, measured), gpus)


def energy_within(record: RunRecord, windows: Sequence[tuple[float, float]], gpus: int | None) -> WindowEnergy:
    """Energy of so many GPUs (None: the processors of all hosts) over intervals of wall-clock time."""
    return _of_devices(record, lambda source: windows, gpus)


def _of_devices(record: RunRecord, windows_of: Windows, gpus: int | None) -> WindowEnergy:
    cuda = record.spec.topology.device == "cuda"
    if record.shares_gpu:
        return unknown("ranks share a GPU, so its energy is not that of a job with its own GPUs")
    if any(o.evidence and o.evidence.neighbours for o in record.outcomes):
        return unknown("other processes used a GPU, so its energy is not this run's")
    if not record.gauges:
        return unknown("no gauge was recorded")
    ours = {s: samples for s, samples in gauges.sources(record).items() if (s.device is not None) == cuda}
    expected = gpus if cuda and gpus else len(gauges.hosts(record))
    if len(ours) < expected:
        return unknown(f"{len(ours)} of {expected} {'GPUs' if cuda else 'hosts'} were read")
    found = []
    for source, samples in ours.items():
        windows = windows_of(source)
        if not windows:
            return unknown("when the measured steps ran was not recorded")
        found.append([between(samples, *window) for window in windows])
    # Unknown as soon as one interval of one device is.
    missing = next((part for device in found for part in device if part.joules is None), None)
    if missing:
        return missing
    joules = sum(sum(part.joules or 0.0 for part in device) for device in found)
    margin = sum(sum(part.margin_j for part in device) for device in found)
    seconds = [sum(part.seconds or 0.0 for part in device) for device in found]
    if joules <= 0:
        return unknown("no counter moved during the measured window")
    if margin > LARGEST_MARGIN * joules:
        length = sum(seconds) / len(seconds)
        return unknown(f"the measured window of {length:.2g} s is too short for the rate of gauge readings")
    how = " and ".join(dict.fromkeys(device[0].how for device in found))
    return WindowEnergy(joules, sum(seconds) / len(seconds), margin, len(found), how)


def between(samples: Sequence[GaugeSample], begin: float, end: float) -> WindowEnergy:
    """Energy of one device. If the counter decreased it was reset, and power is used instead."""
    counted = [(s.at_s, s.energy_j) for s in samples if s.energy_j is not None]
    powered = [(s.at_s, s.power_w) for s in samples if s.power_w is not None]
    for how, points in ((COUNTER, counted), (POWER, powered)):
        if len(points) < 2:
            continue
        at, joules = _curve(points, how)
        # Whether readings around the window are out of order, without a search, which relies on the order.
        earlier, later = np.minimum(at[:-1], at[1:]), np.maximum(at[:-1], at[1:])
        if ((np.diff(at) <= 0) & (earlier <= end) & (later >= begin)).any():
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
    reset = any(sample.energy_j is not None for sample in samples)
    return unknown("its counter was reset during the run" if reset else "neither energy nor power is reported here")


def _curve(points: Sequence[tuple[float, float]], how: str) -> tuple[Array, Array]:
    """Times and joules; power by the trapezoidal rule, as a counter that starts with the first reading."""
    at, values = (np.array(side, dtype=np.float64) for side in zip(*points, strict=True))
    if how == COUNTER:
        return at, values
    return at, np.concatenate([[0.0], np.cumsum(np.diff(at) * (values[1:] + values[:-1]) / 2)])


def _interpolated(at: Array, joules: Array, moment: float) -> tuple[float, float]:
    """The counter at a moment between two readings, and its largest possible error."""
    value = float(np.interp(moment, at, joules))
    after = int(np.searchsorted(at, moment))
    before = after if at[after] == moment else after - 1
    return value, max(value - float(joules[before]), float(joules[after]) - value)
