"""What `paceline stream` sends to a tracker while a run lasts. An exporter that can do it defines `stream`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.errors import Scalar
from paceline.report.exporters.prometheus import Family


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedRun:
    """A run in progress. began_at is the same at every call, so a stream that is started again replaces its own."""

    experiment: str
    run: str
    title: str
    axes: Mapping[str, Scalar]
    began_at: float


@dataclass(frozen=True, slots=True)
class StreamedPoint:
    """Numbers of one step, under the names of metrics."""

    step: int
    at_s: float
    values: Mapping[str, float]


class Stream(Protocol):
    """Receives running runs. RequestError if the other side does not take something; the next call tries again."""

    def write(self, run: StreamedRun, points: Sequence[StreamedPoint]) -> None:
        """New steps of a run; the first call of a run brings all steps so far."""

    def gauges(self, families: Sequence[Family], at_s: float) -> None:
        """Every gauge of all running campaigns now."""

    def end(self, run: StreamedRun, is_ok: bool) -> None:
        """No more steps come."""

    def close(self) -> None:
        """No more runs come."""


class StreamingExporter(Protocol):
    """An exporter with a stream."""

    def stream(self, directory: Path) -> Stream: ...
