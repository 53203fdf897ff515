"""Observed: what ranks saw, as raw as it was seen. No rate, mean or percentage is ever stored.

Each sample is one flat JSON line with its `kind`, rank and step. Missing is None, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, get_args

from paceline.errors import Scalar
from paceline.experiment.spec import RunSpec
from paceline.models.arithmetic import load as load_shape
from paceline.models.shape import Shape
from paceline.results.attempt_samples import AttemptSample, CheckpointSample, StartSample
from paceline.results.machine_samples import CollectiveSample as CollectiveSample
from paceline.results.machine_samples import HealthSample, ProductSample, TrajectorySample
from paceline.results.machine_samples import KernelSample as KernelSample
from paceline.results.machine_samples import OverlapSample as OverlapSample
from paceline.results.served_samples import (
    AnswerSample,
    CeilingSample,
    ClientSample,
    LoadgenSample,
    ReplicaSample,
    RequestSample,
    StageSample,
)

SCHEMA = 1


class Status(StrEnum):
    """How a run ended. Only `ok` is ever ranked; `claimed` was never run here but imported as somebody's statement."""

    OK = "ok"
    FAILED = "failed"
    OOM = "oom"
    TIMEOUT = "timeout"
    HANG = "hang"
    PREEMPTED = "preempted"
    UNSUPPORTED = "unsupported"
    INVALID = "invalid"
    CLAIMED = "claimed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One optimizer step on one rank. Phases are sums over its micro batches, in seconds of the rank's own clock.

    h2d_s is the gap in the stream around the copy; its rate is taken from the profile (TraceSample), not from here.
    duration_s runs from this step's start to the next one's, so nothing falls between steps. loss is the mean over this
    rank's learned tokens. tokens are those that are no padding, positions all places of the batch, label_tokens those
    that are learned (None: all tokens), attended_keys the sum over tokens of the keys each may see. The data digest is
    a partition-independent sum over sequences (see `measure.digest_tokens`).
    """

    kind: ClassVar[str] = "step"
    rank: int
    step: int
    duration_s: float
    data_wait_s: float | None
    h2d_s: float | None
    h2d_bytes: int | None
    forward_s: float | None
    backward_s: float | None
    optimizer_s: float | None
    tokens: int
    samples: int
    micro_batches: int
    updates: int
    loss: float
    grad_norm: float | None
    data_digest: int
    variant: int = 0
    positions: int | None = None
    label_tokens: int | None = None
    attended_keys: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """Memory of one rank. moment: `setup` after wrapping the model, `steps` the peak of the steps past warmup.minimum;
    of the workload memory also those of `footprint.MOMENTS`, all of its last step.

    allocated and reserved are the CUDA allocator's (on a CPU the workload memory counts live tensors as allocated);
    device is the whole GPU as the driver sees it; resident is the process on the host (its high-water mark for
    `steps`).
    """

    kind: ClassVar[str] = "memory"
    rank: int
    moment: str
    allocated_bytes: int | None
    reserved_bytes: int | None
    device_bytes: int | None
    resident_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WireSample:
    """Collectives of one optimizer step on one rank, summed by operation, dtype and group size.

    payload_bytes follows nccl-tests' S: the buffer for all_reduce, the whole output for all_gather, the whole input for
    reduce_scatter.
    """

    kind: ClassVar[str] = "wire"
    rank: int
    step: int
    operation: str
    dtype: str
    group_size: int
    calls: int
    payload_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSample:
    """Time line of `steps` profiled steps after the timed window: exposed is communication while nothing computes.

    h2d_s and h2d_bytes are the copies of token batches on the device's own time line (None on a CPU). compute_s is
    divided by what ran: attention, dequantisation, products, copies, and elementwise for all others; where kinds run at
    once or inside each other the time counts for one of them (see `timeline`). None in records that did not look.
    """

    kind: ClassVar[str] = "trace"
    rank: int
    steps: int
    wall_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    h2d_s: float | None = None
    h2d_bytes: int | None = None
    products_s: float | None = None
    attention_s: float | None = None
    dequantisation_s: float | None = None
    elementwise_s: float | None = None
    copies_s: float | None = None

    @property
    def gap_s(self) -> float:
        """Time in which neither a kernel nor a collective ran. The profiler makes launching slower: no less than
        without it."""
        return max(0.0, self.wall_s - self.compute_s - self.exposed_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentSample:
    """Bytes of one part of a rank's memory. source: `held` was read from the trainer's own tensors (parameters,
    optimizer, gradients, standing_gradients) or is a limit (capacity; room: what the process had to itself when it ran
    out of memory); `predicted` was told from the shape alone.

    micro_batch is that of the run, or another one for which a peak was predicted.
    """

    kind: ClassVar[str] = "component"
    rank: int
    component: str
    source: str
    bytes: int
    micro_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AlternativeSample:
    """What a run that was out of memory would hold if it were changed: the predicted peak of its busiest moment.

    change says it in words, settings as `--set` takes them; both are empty for the run as it was. keeps_work: the
    change gives the same optimizer steps on the same data. origin is `rehearsed` (the strategy itself, on fake tensors)
    or `estimated` (arithmetic). bytes is None where there is no prediction, and note says why.
    """

    kind: ClassVar[str] = "alternative"
    rank: int
    change: str
    settings: str
    keeps_work: bool
    bytes: int | None
    origin: str = "rehearsed"
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimSample:
    """One number that its source states about a run that was not observed here."""

    kind: ClassVar[str] = "claim"
    rank: int
    metric: str
    value: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GaugeSample:
    """One GPU, or one host (device None), at one moment, read beside the run by a thread of `rank`.

    at_s is `time.time()` of that host; device is CUDA's index there. energy_j is a counter of which only differences
    mean something: a GPU's since its driver was loaded, a host's of its processors since the first reading.
    throttle_reasons are the driver's words, () where it says that nothing slows the GPU.
    """

    kind: ClassVar[str] = "gauge"
    rank: int
    host: str
    at_s: float
    device: int | None = None
    utilisation_ratio: float | None = None
    memory_used_bytes: int | None = None
    power_w: float | None = None
    energy_j: float | None = None
    temperature_c: float | None = None
    sm_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    cpu_ratio: float | None = None
    frequency_hz: float | None = None


Sample = (
    StepSample
    | MemorySample
    | WireSample
    | TraceSample
    | CollectiveSample
    | OverlapSample
    | KernelSample
    | ComponentSample
    | AlternativeSample
    | ClaimSample
    | GaugeSample
    | ProductSample
    | TrajectorySample
    | HealthSample
    | RequestSample
    | ClientSample
    | StageSample
    | ReplicaSample
    | AnswerSample
    | LoadgenSample
    | CeilingSample
    | StartSample
    | CheckpointSample
    | AttemptSample
)
SAMPLE_TYPES: dict[str, type[Sample]] = {t.kind: t for t in get_args(Sample)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a rank observed about the work itself: the raw material of the certificate.

    init_digest, init_digests and parameters are of the weights that learn. frozen_digest is of those that do not, in
    the form they are held in (4-bit codes with their scales), before and after the window; None where all learn.
    unmoved are the adapters' tensors that the window left as they were; None where there are none, or were not read.
    window_began_at_s is `time.time()` of the rank's host when its first step began: step k lies after the durations of
    those before it.
    """

    init_digest: str
    parameters: int
    dtypes: Mapping[str, str]
    optimizer: Mapping[str, Scalar]
    settings: Mapping[str, Scalar]
    switches: Mapping[str, str]
    neighbours: int | None
    window_wall_s: float | None
    shape: Mapping[str, Scalar] = field(default_factory=dict)
    init_digests: Mapping[str, str] = field(default_factory=dict)
    frozen_digest: str | None = None
    final_frozen_digest: str | None = None
    unmoved: Sequence[str] | None = None
    window_began_at_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one rank ended; written by the rank itself as its last act."""

    rank: int
    status: Status
    error: str | None
    host: str
    pid: int
    started_at: float
    ended_at: float
    evidence: Evidence | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One sealed run folder, read back. Of a run that was restarted, steps hold each step's last measurement and
    redone those that a later attempt did again; attempts is empty where there was one alone. lost_nodes went away
    before the end, and the run went on without them."""

    spec: RunSpec
    status: Status
    error: str | None
    started_at: float
    ended_at: float
    path: str
    outcomes: tuple[Outcome, ...] = ()
    machines: tuple[Mapping[str, Any], ...] = ()
    steps: Sequence[StepSample] = ()
    memory: tuple[MemorySample, ...] = ()
    wire: tuple[WireSample, ...] = ()
    traces: tuple[TraceSample, ...] = ()
    collectives: tuple[CollectiveSample, ...] = ()
    overlaps: tuple[OverlapSample, ...] = ()
    kernels: tuple[KernelSample, ...] = ()
    components: tuple[ComponentSample, ...] = ()
    alternatives: tuple[AlternativeSample, ...] = ()
    claims: tuple[ClaimSample, ...] = ()
    gauges: tuple[GaugeSample, ...] = ()
    products: tuple[ProductSample, ...] = ()
    trajectories: tuple[TrajectorySample, ...] = ()
    health: tuple[HealthSample, ...] = ()
    requests: tuple[RequestSample, ...] = ()
    clients: tuple[ClientSample, ...] = ()
    stages: tuple[StageSample, ...] = ()
    replicas: tuple[ReplicaSample, ...] = ()
    answers: tuple[AnswerSample, ...] = ()
    loadgens: tuple[LoadgenSample, ...] = ()
    client_ceilings: tuple[CeilingSample, ...] = ()
    starts: tuple[StartSample, ...] = ()
    checkpoints: tuple[CheckpointSample, ...] = ()
    attempts: tuple[AttemptSample, ...] = ()
    redone: Sequence[StepSample] = ()
    lost_nodes: tuple[int, ...] = ()

    @property
    def evidence(self) -> Evidence | None:
        """Rank 0's, which speaks for all: ranks that disagree are refused by the certificate."""
        return next((o.evidence for o in sorted(self.outcomes, key=lambda o: o.rank)), None)

    @property
    def shape(self) -> Shape:
        """The model's dimensions as the run recorded them: a table changed since then must not change its numbers."""
        recorded: Mapping[str, Any] = self.evidence.shape if self.evidence else {}
        return Shape(**recorded) if recorded else load_shape(self.spec.model)

    @property
    def is_reference(self) -> bool:
        return self.spec.workload.name == "reference"

    @property
    def shares_gpu(self) -> bool:
        """Ranks that share a GPU say nothing about speed."""
        return any(o.evidence.settings.get("shared_gpu") for o in self.outcomes if o.evidence)

    @property
    def is_answer(self) -> bool:
        """Whether running it again would tell nothing new: ended ok, or a probe that found no room."""
        probed = self.status is Status.OOM and self.spec.traits.probes_limit
        return self.status is Status.OK or probed
