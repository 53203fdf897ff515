"""What the machine can do at most: matrix products, copies, attention."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.findings import Measurement
from paceline.records import RunRecord


def analyse(records: Sequence[RunRecord]) -> tuple[Measurement, ...]:
    """One measurement per kernel, dtype, shape and variant."""
    return ()
