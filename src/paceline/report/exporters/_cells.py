"""A report cell by cell, as trackers of experiments want it: parameters, scalars, a curve of steps, tags."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from paceline.analysis.findings import Measurement, Report, RunFinding
from paceline.analysis.findings.cell_axes import describe
from paceline.errors import RequestError, Scalar
from paceline.report.text.cells import trusted_runs, varying_axes

STEP_CURVE = "step_time_s.steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedCell:
    """One cell. scalars hold each measured value under its metric's name, bounds of the 95 % interval as .low and
    .high; what is missing or not finite has no entry. steps_s are step times in the order of launches and steps.
    certified says whether the numbers may be ranked; status is that of its runs, the worst first where they differ."""

    cell: str
    name: str
    axes: Mapping[str, Scalar]
    scalars: Mapping[str, float]
    steps_s: tuple[float, ...]
    certified: bool
    status: str
    reasons: tuple[str, ...]
    runs: tuple[str, ...]

    @property
    def digest(self) -> str:
        """The same for the same findings: by it an exporter knows what it has written before."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def require_package(module: str, extra: str) -> None:
    """RequestError with the command that installs what is missing; imports nothing."""
    if importlib.util.find_spec(module) is None:
        raise RequestError(
            f"--format {extra}: needs the package {module}, which is not installed. "
            f"Run `pip install 'paceline[{extra}]'`."
        )


def tracked_cells(report: Report) -> tuple[TrackedCell, ...]:
    """Every cell but references, in the order of the runs, also those where nothing was measured."""
    runs: dict[str, list[RunFinding]] = {}
    for run in report.runs:
        if not run.is_reference:
            runs.setdefault(run.cell, []).append(run)
    measured: dict[str, list[Measurement]] = {}
    for m in report.measurements:
        measured.setdefault(m.cell, []).append(m)
    named, trusted = varying_axes(report), trusted_runs(report)
    return tuple(
        _tracked(cell, found, measured.get(cell, ()), report.distributions.get(cell, ()), named, trusted)
        for cell, found in runs.items()
    )


def _tracked(
    cell: str,
    runs: Sequence[RunFinding],
    measurements: Sequence[Measurement],
    steps_s: tuple[float, ...],
    named: Sequence[str],
    trusted: frozenset[str],
) -> TrackedCell:
    axes = runs[0].axes
    statuses = sorted({r.status for r in runs}, key=lambda status: (status == "ok", status))
    return TrackedCell(
        cell=cell,
        # Cells may differ in what no axis names (a plugin's default): eight digits keep their folders apart.
        name=f"{describe(axes, named)} ({cell[:8]})",
        axes={name: value for name, value in axes.items() if value is not None},
        scalars=dict(_scalars(measurements, axes)),
        steps_s=tuple(s for s in steps_s if math.isfinite(s)),
        certified=bool(measurements) and trusted.issuperset(run for m in measurements for run in m.runs),
        status=", ".join(statuses),
        reasons=tuple(dict.fromkeys(r.reason for r in runs if r.reason)),
        runs=tuple(r.run for r in runs),
    )


def _scalars(measurements: Sequence[Measurement], axes: Mapping[str, Scalar]) -> Iterator[tuple[str, float]]:
    for m in measurements:
        name = scalar_name(m, axes)
        for suffix, value in (("", m.value), (".low", m.low), (".high", m.high)):
            if value is not None and math.isfinite(value):
                yield f"{name}{suffix}", value


def scalar_name(m: Measurement, axes: Mapping[str, Scalar]) -> str:
    """The metric, then the axes within the cell (`matmul_flops_per_s/dtype bf16/size 4096`), which a sweep has."""
    inner = (f"{name} {value}" for name, value in m.axes.items() if name not in axes and value not in (None, ""))
    return "/".join((m.metric, *inner))
