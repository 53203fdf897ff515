"""Concluded: what the data says, and on which runs each sentence rests. All that an exporter may print stands here."""

from paceline.findings.fabric import CollectiveFit, CollectiveRow, Overlap, Pair, Suspect
from paceline.findings.memory import FrontierPoint, MemoryRow, Probe
from paceline.findings.recipe import Recipe
from paceline.findings.report import SCHEMA, Report
from paceline.findings.training import (
    BETTER,
    HIGHER,
    LOWER,
    SHARED_GPU,
    TIE,
    WORSE,
    Certificate,
    Check,
    Comparison,
    Measurement,
    Recommendation,
    RunFinding,
    ScalingExplanation,
    ScalingPoint,
    Traffic,
    WarmUpOutcome,
)

__all__ = [
    "BETTER",
    "HIGHER",
    "LOWER",
    "SCHEMA",
    "SHARED_GPU",
    "TIE",
    "WORSE",
    "Certificate",
    "Check",
    "CollectiveFit",
    "CollectiveRow",
    "Comparison",
    "FrontierPoint",
    "Measurement",
    "MemoryRow",
    "Overlap",
    "Pair",
    "Probe",
    "Recipe",
    "Recommendation",
    "Report",
    "RunFinding",
    "ScalingExplanation",
    "ScalingPoint",
    "Suspect",
    "Traffic",
    "WarmUpOutcome",
]
