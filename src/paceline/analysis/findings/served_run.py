"""Concluded about one run of a served model alone: its loads, what failed in them, and its replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureClass:
    """detail is what was told of one of them, None where nothing was."""

    name: str
    count: int
    detail: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOfRun:
    """name tells it from the other loads of its run, None where it is the only one. late is None without limits.
    latencies are median and 99th percentile in seconds, of those that were answered."""

    scenario: str
    name: str | None
    requests: int
    failures: tuple[FailureClass, ...]
    late: int | None
    verdict: str
    reasons: tuple[str, ...]
    latencies: Mapping[str, tuple[float, float]]

    @property
    def failed(self) -> int:
        return sum(each.count for each in self.failures)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOfRun:
    """died_s counts from the start of the run, None where it stayed; reassigned are its samples that others took."""

    replica: int
    host: str
    model: str
    requests: int
    failed: int
    died_s: float | None
    reassigned: int
