"""Time per token and memory over the length of the sequence, from training runs and memory runs of the same cells."""

from __future__ import annotations

import dataclasses

from paceline.analysis.findings import Measurement, MemoryRow, Report
from paceline.report.tables import lengths
from paceline.wording import MISSING

MIB = 2**20


def measured(length: int, rate: float, strategy: str = "cp") -> Measurement:
    return Measurement(
        metric="tokens_per_s_per_gpu",
        unit="tokens/s",
        better="higher",
        cell=f"trained {length}",
        value=rate,
        low=None,
        high=None,
        n=10,
        launches=1,
        axes={"workload": "pretrain", "strategy": strategy, "sequence_length": length, "steps": 12},
        runs=(),
    )


def held(length: int, peak: int, predicted: int) -> MemoryRow:
    return MemoryRow(
        cell=f"held {length}",
        axes={"workload": "memory", "strategy": "cp", "sequence_length": length, "steps": 3},
        predicted={"peak": predicted},
        measured={"peak": peak},
        error_ratio=predicted / peak - 1,
        capacity_bytes=None,
        runs=(),
    )


def test_runs_of_one_length_are_one_row(empty_report: Report) -> None:
    rates = [measured(4096, 1000.0), measured(8192, 800.0), measured(16384, 500.0)]
    rates += [measured(4096, 1.0, "single"), measured(8192, 1.0, "single")]
    report = dataclasses.replace(
        empty_report, measurements=tuple(rates), memory=(held(8192, 200 * MIB, 210 * MIB), held(4096, 100 * MIB, 0))
    )
    (table,) = lengths.tables(report)
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["cp", "4,096", "1,000", "100", "0", "-100.0"],
        ["cp", "8,192", "1,250", "200", "210", "+5.0"],
        ["cp", "16,384", "2,000", MISSING, MISSING, MISSING],
    ]


def test_two_lengths_are_no_curve(empty_report: Report) -> None:
    two = (measured(4096, 1000.0), measured(8192, 800.0))
    assert lengths.tables(dataclasses.replace(empty_report, measurements=two)) == ()
