"""Concluded about the network: rows, fits and who is slow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """One row as nccl-tests prints it. time_s is the slowest rank's mean; percentiles are of per-iteration maxima over
    ranks, None where too few iterations support them. skew_ratio is the longest rank's mean over the shortest's, and
    early_rank / late_rank are the ranks that spent most and least time inside: the others wait for the late one.
    Repeats of one configuration are one row: run is the first of them, iterations counts those of all launches.
    status is ok; oom or unsupported where nothing was measured; invalid where data arrived wrong (error says so)."""

    run: str
    cell: str
    operation: str
    dtype: str
    world_size: int
    size_bytes: int
    count: int
    in_place: bool
    mode: str
    iterations: int
    time_s: float | None
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None
    algbw_bytes_per_s: float | None
    busbw_bytes_per_s: float | None
    wrong: int | None
    skew_ratio: float | None
    early_rank: int | None
    late_rank: int | None
    status: str
    error: str | None
    axes: Mapping[str, Scalar]
    note: str | None = None
    launches: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFit:
    """t = alpha + S*f/beta of one operation by weighted least squares over its sizes; residual is the RMS of
    (fitted - measured) / measured. note says where alpha was held at 0, or why this is not a speed."""

    operation: str
    dtype: str
    world_size: int
    in_place: bool
    alpha_s: float
    beta_bytes_per_s: float
    residual_ratio: float
    sizes: int
    axes: Mapping[str, Scalar]
    runs: tuple[str, ...]
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """hidden_ratio: the part of the collective that took no time of its own beside matrix products (1 all, 0 none)."""

    operation: str
    dtype: str
    world_size: int
    size_bytes: int
    collective_s: float
    compute_s: float
    together_s: float
    hidden_ratio: float
    axes: Mapping[str, Scalar]
    runs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A rank, node or link that is slower than its peers by more than chance and by enough to matter.

    kind is rank, node or link; confirmed is True when a second turn with other partners said the same.
    ratio is its bandwidth over its peers' median, or, for a rank that comes late to a sweep, its time inside
    collectives over theirs; z the modified z of that.
    """

    kind: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    ratio: float
    z: float
    confirmed: bool
    text: str
    runs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One pair of ranks of a tournament, both turns together. ratio is its bandwidth over the median of its kind: pairs
    inside a node are one kind, pairs across nodes another."""

    run: str
    ranks: tuple[int, int]
    hosts: tuple[str, str]
    size_bytes: int
    bandwidth_bytes_per_s: float
    ratio: float
    turns: int
