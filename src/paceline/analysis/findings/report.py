"""All that was concluded from a set of runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.analysis.findings.accuracy import Accuracy
from paceline.analysis.findings.claims import Claim, ClaimedTransfers
from paceline.analysis.findings.cost import Cost, Saving
from paceline.analysis.findings.effects import DesignOutcome
from paceline.analysis.findings.fabric import CollectiveFit, CollectiveRow, Overlap, Pair, Suspect
from paceline.analysis.findings.gauges import DeviceGauges, GaugeTrace
from paceline.analysis.findings.history import HistorySeries
from paceline.analysis.findings.loadgen import LoadgenVerdict
from paceline.analysis.findings.memory import FrontierPoint, MemoryAdvice, MemoryRow
from paceline.analysis.findings.nodes import NodeVerdict
from paceline.analysis.findings.paired import PairedReplicas
from paceline.analysis.findings.recipe import Recipe
from paceline.analysis.findings.served_cost import ServedCost
from paceline.analysis.findings.served_shapes import ServedShapes
from paceline.analysis.findings.served_verdicts import Fleet, FullSet, PartitionGain, ServedVerdict
from paceline.analysis.findings.served_work import ServedPair
from paceline.analysis.findings.training import (
    Certificate,
    Comparison,
    Measurement,
    Recommendation,
    RunFinding,
    ScalingExplanation,
    ScalingPoint,
)
from paceline.analysis.findings.verdicts import Bottleneck, RuleOfThumb

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that was concluded from a set of runs; exporters print it and decide nothing. doubted is what was measured of
    served loads that are not believed: to be shown as such, and never among measurements."""

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
    notes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    schema: int = SCHEMA
