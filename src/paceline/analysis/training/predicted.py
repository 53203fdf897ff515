"""Runs beside the predictions that were stored before them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.analysis.findings import PredictedRun
from paceline.prediction import hardware, runs, stored
from paceline.results.records import RunRecord


def beside(predictions: Sequence[Mapping[str, Any]], records: Sequence[RunRecord]) -> tuple[PredictedRun, ...]:
    """Each training run whose setup was predicted before it started; of several predictions the oldest counts."""
    known = stored.first_by_key(predictions)
    found = []
    for record in records if known else ():
        one = runs.measured(record, hardware.ANY_CPU)
        row = known.get(stored.key(one.setup)) if one is not None else None
        if one is not None and row is not None and row["made_at"] <= record.started_at:
            step = row["step_time_s"]
            found.append(
                PredictedRun(
                    run=one.run,
                    cell=one.cell,
                    predicted_s=float(step["value"]),
                    low_s=float(step["low"]),
                    high_s=float(step["high"]),
                    measured_s=one.step_s,
                    made_at=float(row["made_at"]),
                    model_version=str(row["model_version"]),
                )
            )
    return tuple(found)
