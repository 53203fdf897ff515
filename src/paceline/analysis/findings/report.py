"""All findings about a set of runs, and how to repeat each of its cells."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from paceline.analysis.findings.checkpoints import CheckpointCost
from paceline.analysis.findings.compare import DesignOutcome, HistorySeries
from paceline.analysis.findings.cost import Claim, ClaimedTransfers, Cost, Saving, ServedCost
from paceline.analysis.findings.machine import (
    CollectiveFit,
    CollectiveRow,
    DeviceGauges,
    GaugeTrace,
    NodeVerdict,
    Overlap,
    Pair,
    Suspect,
)
from paceline.analysis.findings.served import (
    Accuracy,
    Fleet,
    FullSet,
    LoadgenVerdict,
    PairedReplicas,
    PartitionGain,
    ServedPair,
    ServedShapes,
    ServedVerdict,
)
from paceline.analysis.findings.tradeoffs import Tradeoff
from paceline.analysis.findings.training import (
    Bottleneck,
    Certificate,
    Comparison,
    CompileCost,
    FrontierPoint,
    LayoutRow,
    Measurement,
    MemoryAdvice,
    MemoryRow,
    PredictedRun,
    Recommendation,
    RoutingRow,
    RuleOfThumb,
    RunFinding,
    ScalingExplanation,
    ScalingPoint,
    StepDifference,
    TimeSpent,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to repeat one cell: an experiment of that cell alone, the file to save it as, and the command to run it.

    Loading the experiment gives the same cell with the same number of repeats.
    """

    cell: str
    file: str
    experiment: str
    command: str


SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All findings about a set of runs; exporters print it and decide nothing.

    doubted has measurements of inference loads whose numbers were rejected: shown as such, never part of measurements.
    """

    title: str
    created_at: float
    paceline_version: str
    machines: tuple[Mapping[str, Any], ...]
    runs: tuple[RunFinding, ...]
    measurements: tuple[Measurement, ...]
    certificates: tuple[Certificate, ...]
    comparisons: tuple[Comparison, ...]
    recommendations: tuple[Recommendation, ...]
    scaling: tuple[ScalingPoint, ...]
    collectives: tuple[CollectiveRow, ...] = ()
    fits: tuple[CollectiveFit, ...] = ()
    overlaps: tuple[Overlap, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    pairs: tuple[Pair, ...] = ()
    explanations: tuple[ScalingExplanation, ...] = ()
    layouts: tuple[LayoutRow, ...] = ()
    step_differences: tuple[StepDifference, ...] = ()
    compilations: tuple[CompileCost, ...] = ()
    tradeoffs: tuple[Tradeoff, ...] = ()
    routings: tuple[RoutingRow, ...] = ()
    checkpoints: tuple[CheckpointCost, ...] = ()
    memory: tuple[MemoryRow, ...] = ()
    frontier: tuple[FrontierPoint, ...] = ()
    memory_advice: tuple[MemoryAdvice, ...] = ()
    costs: tuple[Cost, ...] = ()
    savings: tuple[Saving, ...] = ()
    claims: tuple[Claim, ...] = ()
    claimed_transfers: tuple[ClaimedTransfers, ...] = ()
    histories: tuple[HistorySeries, ...] = ()
    bottlenecks: tuple[Bottleneck, ...] = ()
    effects: tuple[DesignOutcome, ...] = ()
    rules_of_thumb: tuple[RuleOfThumb, ...] = ()
    predictions: tuple[PredictedRun, ...] = ()
    gauges: tuple[DeviceGauges, ...] = ()
    gauge_traces: tuple[GaugeTrace, ...] = ()
    distributions: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    recipes: tuple[Recipe, ...] = ()
    nodes: tuple[NodeVerdict, ...] = ()
    served: tuple[ServedVerdict, ...] = ()
    doubted: tuple[Measurement, ...] = ()
    fleets: tuple[Fleet, ...] = ()
    partition_gains: tuple[PartitionGain, ...] = ()
    full_sets: tuple[FullSet, ...] = ()
    loadgen: tuple[LoadgenVerdict, ...] = ()
    accuracy: tuple[Accuracy, ...] = ()
    paired: tuple[PairedReplicas, ...] = ()
    served_pairs: tuple[ServedPair, ...] = ()
    served_costs: tuple[ServedCost, ...] = ()
    served_shapes: ServedShapes | None = None
    time_spent: TimeSpent | None = None
    notes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    schema: int = SCHEMA
    # What functions returned that are called once for each report, by name.
    kept: dict[str, Any] = field(
        default_factory=dict, init=False, compare=False, repr=False, metadata={"exported": False}
    )


T = TypeVar("T")


def once(function: Callable[[Report], T]) -> Callable[[Report], T]:
    """The function, called once for each report: several tables and sentences need what it returns.

    Nothing may change what it returns.
    """
    name = f"{function.__module__}.{function.__qualname__}"

    @functools.wraps(function)
    def kept(report: Report) -> T:
        if name not in report.kept:
            report.kept[name] = function(report)
        found: T = report.kept[name]
        return found

    return kept
