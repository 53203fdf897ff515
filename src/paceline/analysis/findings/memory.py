"""Concluded about memory: components, predictions and what fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """Memory of one cell by component, predicted from its shape beside what the busiest rank showed, in bytes.

    Keys of both: parameters, gradients, optimizer, activations, communication, other, peak; measured has also reserved,
    device and fragmentation. None is unknown. error_ratio is predicted peak / measured peak - 1.
    """

    cell: str
    axes: Mapping[str, Scalar]
    predicted: Mapping[str, int | None]
    measured: Mapping[str, int | None]
    error_ratio: float | None
    capacity_bytes: int | None
    runs: tuple[str, ...]
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One try of a frontier search, in a process of its own."""

    run: str
    micro_batch: int
    status: str
    peak_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """The largest micro batch that ran and the smallest that did not, at one sequence length of one series.

    settled is True when the two are neighbours or the search reached its limit: nothing between them is untried.
    """

    series: str
    sequence_length: int
    largest_fitting: int | None
    smallest_failing: int | None
    predicted: int | None
    settled: bool
    probes: tuple[Probe, ...]
    axes: Mapping[str, Scalar]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Other settings for a run that was out of memory, and the peak that was predicted of them.

    change in words, settings as `--set` takes them. fits: the peak is at most the room, with some to spare; None where
    nothing was predicted, and note says why. keeps_work: same optimizer steps on the same data. origin: `rehearsed` on
    fake tensors, or `estimated` by arithmetic.
    """

    change: str
    settings: str
    keeps_work: bool
    peak_bytes: int | None
    fits: bool | None
    origin: str
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAdvice:
    """One run out of memory: the room that it had, what it was predicted to hold, and what was found that fits.

    room_bytes is of the process with the least. Alternatives stand in the order in which they were looked for: what
    keeps the work first, then what changes it. goal_bytes is what a peak may be at most to be called fitting. own_note
    says how its own peak was predicted, where that is not as it ran, or why it was not.
    """

    run: str
    cell: str
    axes: Mapping[str, Scalar]
    room_bytes: int
    own_peak_bytes: int | None
    goal_bytes: int
    alternatives: tuple[Alternative, ...]
    own_note: str | None = None

    @property
    def fitting(self) -> tuple[Alternative, ...]:
        return tuple(each for each in self.alternatives if each.fits)
