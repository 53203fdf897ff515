"""How right predictions were: error, coverage, pairs and regret, over stored predictions or the rows of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.prediction import hardware, published, runs, stored
from paceline.prediction.hardware import Accelerator
from paceline.prediction.offsets import Anchor, Observation
from paceline.prediction.predict import predict
from paceline.results.records import RunRecord

# Measurements closer than this are equal: which is first does not matter.
CLOSE = 0.02


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A prediction and its measurement. group: alternatives among which one would choose."""

    name: str
    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float
    tokens: float
    group: str
    stored: bool = True

    @property
    def error(self) -> float:
        """Predicted relative to measured: +0.1 is a step predicted 10 % too slow."""
        return self.predicted_s / self.measured_s - 1

    @property
    def covered(self) -> bool:
        return self.low_s <= self.measured_s <= self.high_s


@dataclass(frozen=True, kw_only=True)
class Scored:
    pairs: tuple[Pair, ...]

    @property
    def median(self) -> float:
        return float(np.median([abs(one.error) for one in self.pairs]))

    @property
    def p90(self) -> float:
        return float(np.quantile([abs(one.error) for one in self.pairs], 0.9))

    @property
    def coverage(self) -> float:
        return float(np.mean([one.covered for one in self.pairs]))

    def ordering(self) -> tuple[int, int, float | None]:
        """(pairs ordered right, pairs, mean regret) over groups of alternatives; regret None if there is no choice."""
        right = total = 0
        regrets = []
        for group in dict.fromkeys(one.group for one in self.pairs):
            ours = [one for one in self.pairs if one.group == group]
            if len(ours) < 2:
                continue
            measured = np.log([one.measured_s / one.tokens for one in ours])
            predicted = np.log([one.predicted_s / one.tokens for one in ours])
            i, j = np.triu_indices(len(ours), 1)
            apart = np.abs(measured[i] - measured[j]) >= CLOSE
            right += int(np.sum(apart & ((measured[i] < measured[j]) == (predicted[i] < predicted[j]))))
            total += int(np.sum(apart))
            regrets.append(1 - float(np.exp(measured.min() - measured[int(np.argmin(predicted))])))
        return right, total, float(np.mean(regrets)) if regrets else None


def score_table(path: Path, anchors: Sequence[Anchor] = (), observations: Sequence[Observation] = ()) -> Scored:
    """Every row of a published or imported table, predicted."""
    rows = published.read_given(path, "--score")
    found = predict([row.setup for row in rows], anchors, observations)
    return Scored(
        pairs=tuple(
            Pair(
                name=row.row_id,
                predicted_s=one.step_s,
                low_s=one.low_s,
                high_s=one.high_s,
                measured_s=row.step_s,
                tokens=row.setup.tokens_per_step,
                group=f"{row.source} {row.setup.shape.name} {row.setup.gpus} {row.setup.gpu.name}",
            )
            for row, one in zip(rows, found, strict=True)
        )
    )


def score_runs(
    rows: Sequence[Mapping[str, Any]], records: Sequence[RunRecord], cpu: Accelerator | None = None
) -> Scored:
    """Predictions beside the runs that measured them; of several stored predictions the oldest counts.

    A run without a stored prediction that is older than itself is predicted now, from its specification alone.
    cpu: what a process of a machine without GPUs is; without it, only stored predictions of such runs count.
    """
    known = stored.first_by_key(rows)
    pairs = []
    for record in records:
        one = runs.measured(record, cpu or hardware.ANY_CPU)
        row = known.get(stored.key(one.setup)) if one is not None else None
        row = row if row is not None and row["made_at"] <= record.started_at else None
        if one is not None and (row is not None or one.setup.gpu is not hardware.ANY_CPU):
            step = (row or stored.to_dict(predict([one.setup])[0]))["step_time_s"]
            pairs.append(
                Pair(
                    name=one.run,
                    predicted_s=float(step["value"]),
                    low_s=float(step["low"]),
                    high_s=float(step["high"]),
                    measured_s=one.step_s,
                    tokens=one.setup.tokens_per_step,
                    group=f"{one.setup.shape.name} {one.setup.gpus} {one.setup.gpu.name} {one.setup.sequence_length}",
                    stored=row is not None,
                )
            )
    return Scored(pairs=tuple(pairs))


def to_dict(found: Scored) -> dict[str, Any]:
    right, total, regret = found.ordering()
    empty = not found.pairs
    return {
        "predictions": len(found.pairs),
        "error_median": None if empty else found.median,
        "error_p90": None if empty else found.p90,
        "coverage": None if empty else found.coverage,
        "pairs_right": right,
        "pairs": total,
        "regret": regret,
        "rows": [
            {
                "name": one.name,
                "predicted_s": one.predicted_s,
                "low_s": one.low_s,
                "high_s": one.high_s,
                "measured_s": one.measured_s,
                "error": one.error,
                "stored": one.stored,
            }
            for one in found.pairs
        ],
    }


def lines(found: Scored) -> list[str]:
    """The score in sentences."""
    right, total, regret = found.ordering()
    count = f"{len(found.pairs)} prediction{'' if len(found.pairs) == 1 else 's'}"
    text = [
        f"{count}: error {100 * found.median:.1f} % median, {100 * found.p90:.1f} % at the 90th "
        f"percentile; {100 * found.coverage:.0f} % are inside their 90 % interval."
    ]
    now = sum(not one.stored for one in found.pairs)
    if now:
        text.append(
            f"{now} of them had no prediction that is older than the run: predicted now, from the specification."
        )
    if total:
        text.append(f"{right} of {total} pairs of alternatives are ordered right.")
    if regret is not None:
        text.append(f"Choosing the predicted best loses {100 * regret:.1f} % of the throughput on average.")
    return text
