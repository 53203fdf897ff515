"""Records of runs: what ranks observed, as raw samples. No rate, mean or percentage is ever stored.

Each sample is one flat JSON line with its `kind`, rank and step. Missing is None, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from operator import attrgetter
from typing import Any, ClassVar, get_args

from paceline.errors import Scalar
from paceline.experiment.spec import RunSpec
from paceline.models.arithmetic import load as load_shape
from paceline.models.shape import Shape
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
    """How a run ended. Only `ok` is ranked. `claimed` was not run here but imported from a published table."""

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
    duration_s lasts from the start of this step to the start of the next, so no time is lost between steps. loss is the
    mean over this rank's learned tokens. positions counts all positions of the batch, tokens those without padding,
    label_tokens those that are learned (None: all tokens), attended_keys the sum over tokens of the keys each attends
    to. The data digest is a sum over sequences that does not depend on the partition (`training.data.digests`).
    leader: where several ranks work on the same samples, the rank that counts them; amounts are then 0 here.
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
    leader: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """Memory of one rank. moment: `setup` after wrapping the model, `steps` the peak of the steps after warmup.minimum;
    the workload memory adds those of `memory_components.MOMENTS`, all of its last step.

    allocated and reserved come from the CUDA allocator (on a CPU the workload memory counts live tensors as allocated).
    device is the whole GPU as the driver reports it. resident is the process on the host (its high-water mark for
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
    """Collectives of one optimizer step on one rank, summed by operation, dtype, group size and mesh dimension.

    payload_bytes follows nccl-tests' S: the buffer for all_reduce, the whole output for all_gather, the whole input for
    reduce_scatter. dimension: the one of a device mesh whose group was used; None for groups that are of no mesh.
    """

    kind: ClassVar[str] = "wire"
    rank: int
    step: int
    operation: str
    dtype: str
    group_size: int
    calls: int
    payload_bytes: int
    dimension: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationSample:
    """Operators of one kind on one rank during one audited step, after the timed window.

    operation: `product` (work: FLOPs), `attention` and `activation` (work: output elements), `embedding` (work: token
    ids looked up), `cast` (work: elements), `narrow`, a factor of an 8-bit product whose values use less than half of
    the range (work: elements), or `update`, an optimizer step (work: weights; squares: the sum of squares of the
    gradients it was given). dtype: of the operands, or of the result for a cast.
    """

    kind: ClassVar[str] = "operation"
    rank: int
    step: int
    operation: str
    dtype: str
    calls: int
    work: int
    squares: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSample:
    """One step of a pipeline on one rank, after the timed window: the time of its schedule, and the part of it in which
    this rank's stages computed. embedding_s, block_s and head_s are median forward times of a micro batch; None for
    what the rank does not have, and in older records."""

    kind: ClassVar[str] = "pipeline"
    rank: int
    step: int
    wall_s: float
    busy_s: float
    embedding_s: float | None = None
    block_s: float | None = None
    head_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExposureSample:
    """Communication over one mesh dimension in `steps` steps after the timed window, on one rank. exposed_s is the part
    while which nothing computes; a moment with several dimensions counts for the first of them. Every operator of these
    steps is observed, which slows the host."""

    kind: ClassVar[str] = "exposure"
    rank: int
    steps: int
    dimension: str
    wall_s: float
    communication_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSample:
    """What one rank did over `steps` steps after the timed window, which began together on all ranks.

    slots divide wall_s evenly. Each has the number of the kind that filled most of it: one of kinds, or len(kinds) for
    idle time. The first kind is compute, the others are communication while nothing computes.
    """

    kind: ClassVar[str] = "timeline"
    rank: int
    steps: int
    wall_s: float
    kinds: tuple[str, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSample:
    """What the routers of one rank decided during one step of a mixture of experts.

    Lists have the layers of this rank one after another. assigned: tokens of this rank by choice (first, second, ...)
    and expert. By expert, positions: the sum of the positions of those tokens; computed: the rows that this rank's
    experts computed; weights: the sum of the weights of an expert's outputs. balances: the balance term by layer, the
    mean over micro batches (docs/moe.md).
    """

    kind: ClassVar[str] = "routing"
    rank: int
    step: int
    layers: tuple[int, ...]
    assigned: tuple[int, ...]
    positions: tuple[int, ...]
    computed: tuple[int, ...]
    weights: tuple[float, ...]
    balances: tuple[float, ...]
    variant: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSample:
    """Profile of `steps` steps after the timed window. exposed_s is communication while nothing computes.

    h2d_s and h2d_bytes are the copies of token batches on the device's own time line (None on a CPU). compute_s is the
    sum of attention, dequantisation, products, copies and elementwise (everything else). If kinds overlap, the time
    counts for one of them (see `training.step_profile`). None in records without this division.
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
        """Time in which neither a kernel nor a collective ran. The profiler slows launches: an upper bound."""
        return max(0.0, self.wall_s - self.compute_s - self.exposed_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentSample:
    """Bytes of one part of a rank's memory. source: `held` was read from the trainer's own tensors (parameters,
    optimizer, gradients, standing_gradients) or is a limit (capacity; room: what was available to the process when it
    ran out of memory); `predicted` was computed from the shape alone.

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
    """The predicted peak memory of a run that was out of memory, after one change.

    change describes the change, settings is its `--set` form; both are empty for the run as it was. keeps_work: the
    change gives the same optimizer steps on the same data. origin is `rehearsed` (the strategy itself, on fake tensors)
    or `estimated` (arithmetic). bytes is None if there is no prediction; note says why.
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
    """One number that a source states about a run that was not observed here."""

    kind: ClassVar[str] = "claim"
    rank: int
    metric: str
    value: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GaugeSample:
    """One reading of a GPU, or of a host (device None), by a thread of `rank` during the run.

    at_s is `time.time()` of that host; device is the CUDA index there. energy_j is a counter of which only differences
    are meaningful: for a GPU since its driver was loaded, for a host's processors since the first reading.
    throttle_reasons are the driver's names, () if nothing throttles the GPU. received_bytes and sent_bytes are counters
    of the host's network. usage are the fields of `host.usage.HostUsage`, of a host only.
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
    received_bytes: int | None = None
    sent_bytes: int | None = None
    usage: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSample:
    """The start of training on one rank. step is 0, or the step of the checkpoint from which it continued. setup_s is
    the time before: rendezvous, building, loading. at_s is `time.time()` of its host. attempt comes from the file name.
    """

    kind: ClassVar[str] = "start"
    rank: int
    step: int
    setup_s: float
    at_s: float
    attempt: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSample:
    """A checkpoint on one rank after `step` steps: from the end of that step to the start of the next, which is part of
    no step's duration. bytes counts the files of this rank only; None for one that was still being written in the
    background when the next step began."""

    kind: ClassVar[str] = "checkpoint"
    rank: int
    step: int
    duration_s: float
    bytes: int | None
    attempt: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSample:
    """One attempt of a run with several, by the controller's clock: when it was submitted, when its first rank was seen
    (None: never), when it ended and how. `interrupted`: the controller itself ended."""

    kind: ClassVar[str] = "attempt"
    rank: int
    attempt: int
    submitted_at: float
    began_at: float | None
    ended_at: float
    status: str
    reason: str | None


Sample = (
    StepSample
    | MemorySample
    | WireSample
    | OperationSample
    | TraceSample
    | PipelineSample
    | ExposureSample
    | TimelineSample
    | RoutingSample
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
    """What a rank observed about the work itself, from which the certificate is made.

    init_digest, init_digests and parameters describe the weights that learn. frozen_digest is of the frozen weights as
    they are stored (4-bit codes with their scales), before and after the window; None if all weights learn.
    final_digests is init_digests after the window. movements: by tensor, the root mean square of its change over the
    window. groups: the parameter groups that optimizers stepped, with their hyper-parameters, the number of elements on
    this rank, the first step and the number of steps. flags: torch's switches of numerical precision, with each value
    they had during the window. later_digests: what the data digests of the steps after the last trained one would be,
    of a reference only. whole_digests: those of the first global batches of the whole, of the reference of a proof
    group. unmoved: adapter tensors that the window did not change, in runs recorded before final_digests. Each of these
    is None if it was not read. window_began_at_s is `time.time()` of the rank's host at
    the start of its first step; step k starts after the durations of the steps before it.
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
    final_digests: Mapping[str, str] | None = None
    movements: Mapping[str, float] | None = None
    groups: Sequence[Mapping[str, Scalar]] | None = None
    flags: Mapping[str, str] | None = None
    later_digests: Sequence[int] | None = None
    whole_digests: Sequence[int] | None = None
    window_began_at_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one rank ended; the last file that the rank writes."""

    rank: int
    status: Status
    error: str | None
    host: str
    pid: int
    started_at: float
    ended_at: float
    evidence: Evidence | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a run ended, as status.json has it beside its digests; the fields are those of RunRecord."""

    status: Status
    error: str | None
    started_at: float
    ended_at: float
    lost_nodes: tuple[int, ...] = ()
    repeated: int = 0
    reused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A finished run, read back. For a restarted run, steps has the last measurement of each step and redone
    those that a later attempt repeated; attempts is empty if there was only one. lost_nodes were lost before the end,
    and the run continued without them. repeated: how often it was launched again because its host was disturbed.
    reused: a reference that an earlier campaign computed."""

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
    operations: tuple[OperationSample, ...] = ()
    traces: tuple[TraceSample, ...] = ()
    pipelines: tuple[PipelineSample, ...] = ()
    exposures: tuple[ExposureSample, ...] = ()
    timelines: tuple[TimelineSample, ...] = ()
    routings: tuple[RoutingSample, ...] = ()
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
    repeated: int = 0
    reused: bool = False

    @property
    def evidence(self) -> Evidence | None:
        """The evidence of rank 0; the certificate rejects ranks that disagree."""
        first = min(self.outcomes, key=attrgetter("rank"), default=None)
        return None if first is None else first.evidence

    @property
    def shape(self) -> Shape:
        """The dimensions of the model as the run recorded them, so that a changed table does not change its numbers."""
        recorded: Mapping[str, Any] = self.evidence.shape if self.evidence else {}
        if not recorded:
            return load_shape(self.spec.model)
        return _recorded_shape(tuple((name, type(value), value) for name, value in recorded.items()))

    @property
    def served_models(self) -> tuple[str, ...]:
        """The models as servers named them: in their answers, otherwise in their list. Empty if nothing was served."""
        return tuple(dict.fromkeys(name for each in self.replicas for name in each.answered_as or (each.model,)))

    @property
    def other_model(self) -> str | None:
        """What servers say they serve, if it is not the requested model; None if it is, or if nothing was served."""
        others = [name for name in self.served_models if not self.spec.is_model(name)]
        return ", ".join(self.served_models) if others else None

    def axes(self) -> dict[str, Scalar]:
        """The axes of the spec. A served model has the name that its server reports; requested_model is then the name
        in the experiment, if the two differ."""
        axes = self.spec.axes()
        return (
            axes if self.other_model is None else axes | {"model": self.other_model, "requested_model": axes["model"]}
        )

    @property
    def is_reference(self) -> bool:
        return self.spec.workload.name == "reference"

    @property
    def proves_only(self) -> bool:
        """Whether it only proves others: a reference, or a run of a proof group."""
        return self.spec.proves_only

    @property
    def is_supplement(self) -> bool:
        """Whether it has only more re-seeded copies for a reference, which is another run."""
        return self.is_reference and bool(self.spec.workload.options.get("first"))

    @property
    def shares_gpu(self) -> bool:
        """Whether ranks shared a GPU; such runs say nothing about speed."""
        return any(o.evidence.settings.get("shared_gpu") for o in self.outcomes if o.evidence)

    @property
    def is_answer(self) -> bool:
        """Whether the run need not be repeated: it ended ok, or it probed a memory limit and ran out of memory."""
        probed = self.status is Status.OOM and self.spec.traits.probes_limit
        return self.status is Status.OK or probed


@lru_cache(maxsize=64)
def _recorded_shape(fields: tuple[tuple[str, type, Any], ...]) -> Shape:
    """The shape with these fields, which most runs of a campaign have in common. With their types: true equals 1."""
    return Shape(**{name: value for name, _, value in fields})
