"""Concluded: what the data says, and on which runs each sentence rests. All that an exporter may print stands here."""

from paceline.findings.between import Between, Change, Differing, Lost, Regression
from paceline.findings.claims import Claim, ClaimedTransfer, ClaimedTransfers
from paceline.findings.cost import Cost, Offer, Saving, offers_of
from paceline.findings.effects import DesignOutcome, Effect, Response
from paceline.findings.fabric import CollectiveFit, CollectiveRow, Overlap, Pair, Suspect
from paceline.findings.gauges import DeviceGauges, GaugeTrace
from paceline.findings.history import ChangePoint, HistoryPoint, HistorySeries
from paceline.findings.loadgen import LoadgenVerdict, Opinion
from paceline.findings.memory import Alternative, FrontierPoint, MemoryAdvice, MemoryRow, Probe
from paceline.findings.nodes import NodeEvidence, NodeMeasure, NodeVerdict
from paceline.findings.recipe import Recipe
from paceline.findings.report import SCHEMA, Report
from paceline.findings.served_shapes import (
    ClientAudit,
    LatencySpread,
    ReplicaTrace,
    ServedLoad,
    ServedShapes,
    ServedTrace,
)
from paceline.findings.served_verdicts import Fleet, FullSet, PartitionGain, ReplicaShare, Rule, ServedVerdict
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
    Goodput,
    Measurement,
    Recommendation,
    RunFinding,
    ScalingExplanation,
    ScalingPoint,
    Traffic,
    WarmUpOutcome,
)
from paceline.findings.verdicts import Bottleneck, LeftOut, RuleOfThumb, ShareOfStep

__all__ = [
    "BETTER",
    "HIGHER",
    "LOWER",
    "SCHEMA",
    "SHARED_GPU",
    "TIE",
    "WORSE",
    "Alternative",
    "Between",
    "Bottleneck",
    "Certificate",
    "Change",
    "ChangePoint",
    "Check",
    "Claim",
    "ClaimedTransfer",
    "ClaimedTransfers",
    "ClientAudit",
    "CollectiveFit",
    "CollectiveRow",
    "Comparison",
    "Cost",
    "DesignOutcome",
    "DeviceGauges",
    "Differing",
    "Effect",
    "Fleet",
    "FrontierPoint",
    "FullSet",
    "GaugeTrace",
    "Goodput",
    "HistoryPoint",
    "HistorySeries",
    "LatencySpread",
    "LeftOut",
    "LoadgenVerdict",
    "Lost",
    "Measurement",
    "MemoryAdvice",
    "MemoryRow",
    "NodeEvidence",
    "NodeMeasure",
    "NodeVerdict",
    "Offer",
    "Opinion",
    "Overlap",
    "Pair",
    "PartitionGain",
    "Probe",
    "Recipe",
    "Recommendation",
    "Regression",
    "ReplicaShare",
    "ReplicaTrace",
    "Report",
    "Response",
    "Rule",
    "RuleOfThumb",
    "RunFinding",
    "Saving",
    "ScalingExplanation",
    "ScalingPoint",
    "ServedLoad",
    "ServedShapes",
    "ServedTrace",
    "ServedVerdict",
    "ShareOfStep",
    "Suspect",
    "Traffic",
    "WarmUpOutcome",
    "offers_of",
]
