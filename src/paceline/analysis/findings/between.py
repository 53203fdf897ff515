"""Concluded about two result folders: what changed from the first (A) to the second (B), and what else differs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Differing:
    """One recorded fact or field that is not the same on both sides; None where a side does not have it."""

    path: str
    first: str | None
    second: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One metric of one cell, B over A. subject is cell, or row for one row of a sweep; row names it.

    low, high and detectable_ratio are None where the data supports no interval; then verdict, which speaks about B, is
    None too and reason says why. differences are those of this cell that not all cells share.
    """

    subject: str
    metric: str
    unit: str
    better: str
    cell: str
    label: str
    row: str | None
    first: float
    second: float
    ratio: float
    low: float | None
    high: float | None
    detectable_ratio: float | None
    verdict: str | None
    reason: str
    differences: tuple[Differing, ...]
    runs_first: tuple[str, ...]
    runs_second: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A cell with an ok run in A and none in B, or all of whose runs were ok in A and not all are in B."""

    cell: str
    label: str
    status: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """Two folders, cell by cell. changes begin with the largest decided effect; shared holds for every pair."""

    first: str
    second: str
    changes: tuple[Change, ...]
    shared: tuple[Differing, ...]
    lost: tuple[Lost, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Regression:
    """Why a gate at limit_percent fails: a cell, and the sentence about it."""

    cell: str
    text: str
