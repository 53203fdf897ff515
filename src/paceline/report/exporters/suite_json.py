"""suite.json: communication, training and memory in one file per world size, for scripts that parse suite results."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.analysis.findings import CollectiveRow, Report
from paceline.analysis.findings.cell_axes import describe
from paceline.errors import Scalar
from paceline.experiment.choices import Choice
from paceline.host.files import write_atomically
from paceline.report.exporters.json import plain
from paceline.report.text.cells import ranked_cells, varying_axes

# Names that parsers of such files expect; other operations keep theirs.
WORDS = {"all_reduce": "allreduce", "all_gather": "allgather", "all_to_all": "alltoall", "send_recv": "p2p"}
UNITS = {"gbps": "GB/s, 1 GB = 1e9 bytes", "gib": "2**30 bytes", "ms": "1e-3 s", "missing": "null, never 0"}
TRAINING = {
    "samples_per_second": ("samples_per_s", 1.0),
    "tokens_per_second": ("tokens_per_s", 1.0),
    "step_time_ms": ("step_time_s", 1e3),
    "peak_memory_gib": ("peak_memory_bytes", 2.0**-30),
    "mfu_percent": ("mfu_ratio", 100.0),
}


def export(report: Report, directory: Path) -> list[Path]:
    """suite.json; with several world sizes suite_<n>.json for each, because the form has room for one."""
    sizes = world_sizes(report)
    files = {"suite.json": None} if not sizes else {f"suite_{n}.json": n for n in sizes}
    if len(sizes) == 1:
        files = {"suite.json": sizes[0]}
    return [write_atomically(directory / name, text(report, size)) for name, size in files.items()]


def text(report: Report, world_size: int | None) -> str:
    return json.dumps(plain(document(report, world_size)), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def world_sizes(report: Report) -> list[int]:
    """The world sizes of everything that was measured, ascending."""
    trained = (m.axes for metrics in ranked_cells(report).values() for m in metrics.values())
    everything = (*(r.axes for r in report.collectives), *(r.axes for r in report.memory), *trained)
    return sorted({size for axes in everything if isinstance(size := axes.get("world_size"), int)})


def document(report: Report, world_size: int | None) -> dict[str, Any]:
    rows = [r for r in report.collectives if r.axes.get("world_size") == world_size]
    device = next((r.axes.get("device") for r in report.runs if r.axes.get("world_size") == world_size), None)
    size = "" if world_size is None else f"_{world_size}{'gpu' if device == 'cuda' else 'cpu'}"
    names = [machine.get("cpu") for machine in report.machines]
    if device == "cuda":
        names = [gpu.get("name") for machine in report.machines for gpu in machine.get("gpus") or ()]
    # The requested number of iterations, or the counted one if none was requested.
    options: Mapping[str, Scalar] = Choice.parse(str(rows[0].axes["workload"])).options if rows else {}
    counted = Counter(r.iterations // r.launches for r in rows if r.iterations).most_common(1)
    named, training = varying_axes(report), {}
    # Certified cells only; efficiency where its baseline was measured, by kind of scaling.
    for cell, metrics in ranked_cells(report).items():
        axes = next(iter(metrics.values())).axes
        if axes.get("world_size") != world_size:
            continue
        numbers = {
            word: _scaled(m.value, factor) if (m := metrics.get(metric)) else None
            for word, (metric, factor) in TRAINING.items()
        }
        points = [p for p in report.scaling if p.cell == cell]
        scaled = {f"{p.kind}_scaling_efficiency_percent": _scaled(p.efficiency.value, 100.0) for p in points}
        training[describe(axes, named)] = numbers | scaled
    return {
        "name": f"benchmark{size}",
        "world_size": world_size,
        "timestamp": datetime.datetime.fromtimestamp(report.created_at, datetime.UTC).isoformat(),
        "config": {
            "warmup_iters": options.get("warmup"),
            "benchmark_iters": options.get("iters", counted[0][0] if counted else None),
            "device": ", ".join(dict.fromkeys(str(name) for name in names if name)) or None,
        },
        "units": UNITS,
        "results": {
            "communication": _communication(rows),
            "training": training,
            # Bytes by component as measured, the prediction beside them.
            "memory": {
                describe(row.axes, named): {
                    **{name: row.axes.get(name) for name in ("micro_batch", "sequence_length")},
                    **{f"{name}_bytes": count for name, count in row.measured.items()},
                    "predicted": {f"{name}_bytes": count for name, count in row.predicted.items()},
                }
                for row in report.memory
                if row.axes.get("world_size") == world_size
            },
        },
    }


def _communication(rows: Sequence[CollectiveRow]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for row in rows:
        name = WORDS.get(row.operation, row.operation)
        found.setdefault(name, {"peak_busbw_gbps": None, "rows": []})["rows"].append(
            {
                "size_bytes": row.size_bytes,
                "dtype": row.dtype,
                "in_place": row.in_place,
                "mode": row.mode,
                "time_ms": _scaled(row.time_s, 1e3),
                "algbw_gbps": _scaled(row.algbw_bytes_per_s, 1e-9),
                "busbw_gbps": _scaled(row.busbw_bytes_per_s, 1e-9),
                "wrong": row.wrong,
                "status": row.status,
            }
        )
    for operation in found.values():
        known = [r["busbw_gbps"] for r in operation["rows"] if r["busbw_gbps"] is not None and r["status"] == "ok"]
        operation["peak_busbw_gbps"] = max(known, default=None)
    return found


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
