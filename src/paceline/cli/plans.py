"""The table of `paceline plan`: a row per cell with what it needs, how long it takes and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.analysis.findings.cell_axes import describe, distinguishing_axes
from paceline.analysis.grouping import grouped
from paceline.errors import Scalar
from paceline.report.tables.table import Cell, Column, Filled, Table, filled, numeric, without_empty
from paceline.wording import MISSING

if TYPE_CHECKING:
    from paceline.campaign.run.forecast import Expected
    from paceline.experiment.spec import RunSpec

FINISHED = "finished"
LONGEST_WORDS = 20
AT_MOST = "\u2264 "


def table(
    specs: Sequence[RunSpec],
    state_of: Callable[[RunSpec], str],
    memory_of: Callable[[RunSpec], float | None],
    expected: Mapping[str, Expected],
    usd_per_gpu_hour: float | None,
) -> Table | None:
    """A row per cell, sorted by what differs, references and proofs last; columns that say nothing are left out.

    memory_of gives the bytes of state of one process. expected has what unfinished runs will take; an upper bound is
    marked.
    """
    cells = list(grouped(specs, lambda spec: spec.cell).values())
    axes = [runs[0].axes() for runs in cells if not runs[0].proves_only]
    named = [name for name in distinguishing_axes(axes) if len({repr(each.get(name)) for each in axes}) > 1]
    # Runs are started in random order, in which nobody finds a cell.
    order = ("strategy", *(name for name in named if name != "strategy"))
    cells.sort(key=lambda runs: (runs[0].proves_only, not _is_reference(runs[0]), _sortable(runs[0].axes(), order)))

    references = [runs[0] for runs in cells if _is_reference(runs[0])]
    lengths, models, precisions, seeds = (
        {get(s) for s in references} for get in (_length, lambda s: s.model_text, _precision, lambda s: s.seed)
    )

    def name(runs: Sequence[RunSpec]) -> str:
        spec = runs[0]
        if not _is_reference(spec):
            if spec.reduction is not None:
                return f"proof on {spec.reduction.text}: {describe(spec.axes(), named)}"
            return describe(spec.axes(), named or ("model", "world_size"))
        of_proof = f" on {spec.reduction.text}" if spec.reduction else ""
        model = f", {spec.model_text}" if len(models) > 1 else ""
        length = f", sequence length {_length(spec)}" if len(lengths) > 1 else ""
        precision = f", {_precision(spec)}" if len(precisions) > 1 else ""
        seed = f", seed {spec.seed}" if len(seeds) > 1 else ""
        return f"reference{of_proof}{model}{precision}{length}, global batch {spec.global_batch}{seed}"

    def state(runs: Sequence[RunSpec]) -> Cell:
        states = [state_of(spec) for spec in runs]
        done = sum(each.startswith(FINISHED) for each in states)
        rest = list(dict.fromkeys(each for each in states if not each.startswith(FINISHED)))
        text = "; ".join((*((f"{done} finished",) if done and rest else ()), *rest)) or FINISHED
        return Cell(text, "", "quiet" if not rest else "bad" if "unsupported" in text else "")

    def ahead(runs: Sequence[RunSpec]) -> list[Expected]:
        return [expected[spec.run_id] for spec in runs if spec.run_id in expected]

    def bounded(found: Sequence[Expected], text: str) -> str:
        return f"{AT_MOST}{text}" if any(each.is_bound for each in found) else text

    def minutes(runs: Sequence[RunSpec]) -> str:
        found = ahead(runs)
        return bounded(found, f"{sum(each.seconds for each in found) / 60:.1f}") if found else MISSING

    def usd(runs: Sequence[RunSpec]) -> str:
        found = ahead(runs) if usd_per_gpu_hour is not None else []
        hours = sum(each.device_s for each in found) / 3600
        return bounded(found, f"{hours * (usd_per_gpu_hour or 0.0):.2f}") if found else MISSING

    def memory(runs: Sequence[RunSpec]) -> str:
        size = memory_of(runs[0])
        return MISSING if size is None else f"{size / 2**30:.2f}"

    columns: tuple[Filled[list[RunSpec]], ...] = (
        (Column("cell", prose=True), name),
        (numeric("runs"), lambda runs: str(len(runs))),
        (numeric("state, GiB", 2), memory),
        (numeric("time, min"), minutes),
        (numeric("cost, USD"), usd),
        # Reasons are sentences.
        (Column("status", prose=any(len(state(runs).text) > LONGEST_WORDS for runs in cells)), state),
    )
    made = filled("Plan", cells, columns)
    if made is None:
        return None
    shown, absent = without_empty(made)
    note = ("State: weights, gradients and optimizer of one process.",)
    return replace(shown, notes=() if any(column.name == "state" for column in absent) else note)


def _sortable(axes: Mapping[str, Scalar], named: Sequence[str]) -> tuple[tuple[bool, float, str], ...]:
    """The values of these axes as a key: numbers by size, before texts."""
    values = [axes.get(name) for name in named]
    return tuple((False, float(v), "") if isinstance(v, int | float) else (True, 0.0, str(v)) for v in values)


def _length(spec: RunSpec) -> int:
    return spec.training.sequence_length


def _precision(spec: RunSpec) -> str:
    return spec.training.precision.compute


def _is_reference(spec: RunSpec) -> bool:
    return spec.workload.name == "reference"
