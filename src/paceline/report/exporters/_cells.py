"""A report cell by cell for experiment trackers: parameters, scalars, a curve of steps, tags."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from paceline.analysis.findings import Measurement, Report, RunFinding
from paceline.analysis.findings.cell_axes import describe
from paceline.errors import RequestError, Scalar
from paceline.report.text.cells import trusted_runs, varying_axes

STEP_CURVE = "step_time_s.steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedCell:
    """One cell. scalars has each measured value by metric, and the bounds of the 95 % interval as .low and .high;
    values that are missing or not finite have no entry. steps_s are step times in the order of launches and steps.
    certified: whether the numbers may be ranked. status: that of its runs, the worst first if they differ."""

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
        """The same for the same findings, so that an exporter recognises what it has written before."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def require_package(module: str, extra: str) -> None:
    """Raise a RequestError with the install command if a package is missing; imports nothing."""
    if importlib.util.find_spec(module) is None:
        raise RequestError(
            f"--format {extra}: needs the package {module}, which is not installed. "
            f"Run `pip install 'paceline[{extra}]'`."
        )


def tracked_cells(report: Report) -> tuple[TrackedCell, ...]:
    """Every cell but references, in the order of the runs, also those where nothing was measured."""
    by_cell: dict[str, list[RunFinding]] = {}
    for run in report.runs:
        if not run.proves_only:
            by_cell.setdefault(run.cell, []).append(run)
    measured: dict[str, list[Measurement]] = {}
    for m in report.measurements:
        measured.setdefault(m.cell, []).append(m)
    named, trusted = varying_axes(report), trusted_runs(report)
    found = []
    for cell, runs in by_cell.items():
        axes, measurements = runs[0].axes, measured.get(cell, ())
        scalars = {}
        for m in measurements:
            for suffix, value in (("", m.value), (".low", m.low), (".high", m.high)):
                if value is not None and math.isfinite(value):
                    scalars[f"{scalar_name(m, axes)}{suffix}"] = value
        found.append(
            TrackedCell(
                cell=cell,
                # Cells may differ in what no axis names (a plugin's default): eight digits keep their folders apart.
                name=f"{describe(axes, named)} ({cell[:8]})",
                axes={name: value for name, value in axes.items() if value is not None},
                scalars=scalars,
                steps_s=tuple(s for s in report.distributions.get(cell, ()) if math.isfinite(s)),
                certified=bool(measurements) and trusted.issuperset(run for m in measurements for run in m.runs),
                status=", ".join(sorted({r.status for r in runs}, key=lambda status: (status == "ok", status))),
                reasons=tuple(dict.fromkeys(r.reason for r in runs if r.reason)),
                runs=tuple(r.run for r in runs),
            )
        )
    return tuple(found)


def scalar_name(m: Measurement, axes: Mapping[str, Scalar]) -> str:
    """The metric, then the axes within the cell (`matmul_flops_per_s/dtype bf16/size 4096`), which a sweep has."""
    inner = (f"{name} {value}" for name, value in m.axes.items() if name not in axes and value not in (None, ""))
    return "/".join((m.metric, *inner))
