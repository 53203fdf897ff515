from __future__ import annotations

import dataclasses
import json
import math
from types import MappingProxyType

from paceline.analysis.findings import Report
from paceline.report.exporters import json as exporter

KEYS = [
    *("schema", "title", "created_at", "paceline_version", "machines", "runs", "measurements", "certificates"),
    *(
        "comparisons",
        "recommendations",
        "scaling",
        "collectives",
        "fits",
        "overlaps",
        "suspects",
        "pairs",
        "explanations",
        "layouts",
        "step_differences",
        "compilations",
        "tradeoffs",
        "routings",
        "checkpoints",
        "memory",
        "frontier",
        "memory_advice",
        "costs",
        "savings",
        "claims",
        "claimed_transfers",
        "histories",
        "bottlenecks",
        "effects",
        "rules_of_thumb",
        "predictions",
        "gauges",
        "gauge_traces",
        "distributions",
        "recipes",
        "nodes",
        "served",
        "doubted",
        "fleets",
        "partition_gains",
        "full_sets",
        "loadgen",
        "accuracy",
        "paired",
        "served_pairs",
        "served_costs",
        "served_shapes",
        "time_spent",
        "notes",
        "skipped",
    ),
]


def test_top_level_keys_are_the_outside_surface(report: Report) -> None:
    assert list(exporter.document(report)) == KEYS


def test_measurement_is_flat_with_its_axes(report: Report) -> None:
    first = exporter.document(report)["measurements"][0]
    assert first["metric"] == "tokens_per_s"
    assert (first["workload"], first["strategy"], first["model"], first["world_size"]) == (
        "pretrain",
        "ddp",
        "gpt-tiny",
        2,
    )
    assert {"unit", "better", "value", "low", "high", "n", "launches", "cell", "runs", "note"} <= set(first)
    assert "axes" not in first
    assert not any(isinstance(value, dict) for value in first.values())


def test_missing_is_null_and_so_is_what_is_not_finite(report: Report) -> None:
    broken = dataclasses.replace(report.runs[1], loss_last=math.nan, duration_s=math.inf)
    text = json.dumps(exporter.document(dataclasses.replace(report, runs=(broken,))), allow_nan=False)
    run = json.loads(text)["runs"][0]
    assert run["loss_last"] is None
    assert run["duration_s"] is None
    mfu = next(m for m in json.loads(text)["measurements"] if m["metric"] == "mfu_ratio")
    assert mfu["value"] is None


def test_certificates_say_whether_and_why_not(report: Report) -> None:
    wrong = [c for c in exporter.document(report)["certificates"] if not c["valid"]]
    assert len(wrong) == 3
    assert wrong[0]["reasons"] == ["micro batches per step: expected 4, observed 1"]


def test_read_only_mappings_are_written_as_objects() -> None:
    assert exporter.plain(MappingProxyType({"a": (1, 2.5, None)})) == {"a": [1, 2.5, None]}
