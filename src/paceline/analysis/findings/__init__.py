"""What the data shows, as plain dataclasses: everything an exporter may print, each with the runs it rests on.

The only part of `analysis` that exporters may import, and the lowest: it imports none of the others. One module per
subject, all of their names here. Start with `report.Report`, which contains the rest.
"""

from paceline.analysis.findings.checkpoints import CheckpointCost as CheckpointCost
from paceline.analysis.findings.checkpoints import ExpectedGoodput as ExpectedGoodput
from paceline.analysis.findings.checkpoints import SpotOffer as SpotOffer
from paceline.analysis.findings.compare import (
    Between,
    Change,
    ChangePoint,
    DesignOutcome,
    Differing,
    Effect,
    HistoryPoint,
    HistorySeries,
    Lost,
    Regression,
    Response,
)
from paceline.analysis.findings.cost import Claim, ClaimedTransfer, ClaimedTransfers, Cost, Offer, Saving, offers_of
from paceline.analysis.findings.machine import (
    CollectiveFit,
    CollectiveRow,
    DeviceGauges,
    GaugeTrace,
    NodeEvidence,
    NodeMeasure,
    NodeVerdict,
    Overlap,
    Pair,
    Suspect,
)
from paceline.analysis.findings.report import SCHEMA, Recipe, Report, once
from paceline.analysis.findings.served import (
    CeilingUse,
    ClientAudit,
    Fleet,
    FullSet,
    LatencySpread,
    LoadgenVerdict,
    Opinion,
    PartitionGain,
    ReplicaShare,
    ReplicaTrace,
    Rule,
    ServedLoad,
    ServedShapes,
    ServedTrace,
    ServedVerdict,
)
from paceline.analysis.findings.tradeoffs import LossTrace as LossTrace
from paceline.analysis.findings.tradeoffs import Relative as Relative
from paceline.analysis.findings.tradeoffs import Tradeoff as Tradeoff
from paceline.analysis.findings.training import (
    BETTER,
    CERTIFIED,
    CONSISTENT,
    DIFFERENT,
    EQUAL,
    HIGHER,
    INCONCLUSIVE,
    LOWER,
    SHARED_GPU,
    WORSE,
    Alternative,
    Bottleneck,
    Certificate,
    Check,
    Comparison,
    CompileCost,
    FrontierPoint,
    Goodput,
    LaunchTrust,
    LayoutRow,
    LeftOut,
    Measurement,
    MemoryAdvice,
    MemoryRow,
    PredictedRun,
    Probe,
    Recommendation,
    RoutingRow,
    RuleOfThumb,
    RunFinding,
    ScalingExplanation,
    ScalingPoint,
    ShareOfStep,
    StepDifference,
    StepTerm,
    TimeSpent,
    Traffic,
    WarmUpOutcome,
)
