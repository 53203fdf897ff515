"""Concluded about memory: components, predictions and what fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.spec import Scalar


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
