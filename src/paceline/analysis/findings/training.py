"""Findings about training runs: measurements, certificates, comparisons, recommendations, bottlenecks and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.errors import Scalar
from paceline.experiment.plugins import Traits

COMPUTE, MEMORY, NETWORK, INPUT, LAUNCH = "compute", "memory bandwidth", "network", "input", "launch overhead"
# Only for runs with quantised weights.
DEQUANTISATION = "dequantisation"
# In table order.
BOTTLENECKS = (COMPUTE, MEMORY, DEQUANTISATION, NETWORK, INPUT, LAUNCH)
UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareOfStep:
    """Share of the step time of one kind of bottleneck: lower and upper bound.

    share_ratio is the part that is certain. low to high also covers the interval over launches and all time that no
    evidence assigns to another kind. share_ratio is None if nothing measured could determine it.
    """

    kind: str
    share_ratio: float | None
    low: float
    high: float
    text: str
    runs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """What one cell's step mostly waits for.

    kind is one of BOTTLENECKS, `between A and B` if their shares cannot be separated, or `undecided` if deciding
    evidence was not measured (`missing` names it). share_ratio is that of the winner, else None. told_apart says
    whether the profile classified kernels.
    """

    cell: str
    kind: str
    share_ratio: float | None
    evidence: tuple[ShareOfStep, ...]
    text: str
    missing: tuple[str, ...]
    axes: Mapping[str, Scalar]
    runs: tuple[str, ...]
    told_apart: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A cell that belongs to a group by its axes but has no valid run, and how its runs ended."""

    name: str
    status: str
    reason: str | None
    runs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOfThumb:
    """Whether one strategy fits by arithmetic alone, in bytes per GPU. Nothing here is measured or a speed.

    gpu names every kind of GPU with this memory. gpus is the requested number, or the smallest tried number that fits;
    None if none fits, and the bytes are then those of the largest number tried.
    """

    model: str
    parameters: int
    strategy: str
    gpu: str
    memory_bytes: float
    gpus: int | None
    state_bytes: float
    live_bytes: float
    activation_bytes: float
    usable_bytes: float
    fits: bool
    text: str

    @property
    def needed_bytes(self) -> float:
        return self.state_bytes + self.live_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRun:
    """The step time of one run as it was predicted, with the 90 % interval, beside what was measured.

    made_at is when the prediction was stored; model_version that of the fit.
    """

    run: str
    cell: str
    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float
    made_at: float
    model_version: str

    @property
    def error(self) -> float:
        """Predicted relative to measured: +0.1 is a step predicted 10 % too slow."""
        return self.predicted_s / self.measured_s - 1

    @property
    def covered(self) -> bool:
        return self.low_s <= self.measured_s <= self.high_s


BETTER, WORSE, EQUAL, INCONCLUSIVE = "better", "worse", "equal", "inconclusive"
HIGHER, LOWER = "higher", "lower"
SHARED_GPU = "shared GPU: not a speed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One metric of one cell. low and high are the 95 % interval, None if the data supports none.

    n counts steps inside the measured window, launches the repeats they came from.
    """

    metric: str
    unit: str
    better: str
    cell: str
    value: float | None
    low: float | None
    high: float | None
    n: int
    launches: int
    axes: Mapping[str, Scalar]
    runs: tuple[str, ...]
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of a certificate: what the group expects, and what this run did.

    basis: `observed` in the process by Paceline, `counted` there, or `declared` by the strategy. grades: a difference
    lowers the level of a foreign script instead of making its run invalid. excess: of a deviation that was compared
    with the spread of re-seeded references, the largest as a multiple of its limit; None for other checks and failures.
    """

    name: str
    ok: bool
    expected: str
    observed: str
    basis: str = "observed"
    grades: bool = False
    excess: float | None = field(default=None, metadata={"exported": False})


# How equal the work of a foreign script is to that of its baseline. Other levels say on what a run was proved.
CERTIFIED, CONSISTENT, DIFFERENT = "certified", "consistent", "different"


# A limit above this share of the loss does not tell a mistake from rounding: such a step was not really compared.
LOOSE_LIMIT = 0.05
# Further beyond its limit, a deviation hardly ever comes from having few re-seeded references.
NARROW = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurve:
    """Loss of a run at the steps that the reference has too, the reference's, and the accepted relative deviation."""

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    reference: tuple[float, ...]
    limits: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Proof that a run did the same work as its group, or the reasons why not.

    steps: the recorded steps. compared_steps: those whose loss and gradient norm were compared with the reference or
    with other cells, within at most LOOSE_LIMIT. For a foreign script, work is what was observed of it; level and grade
    say how equal the run is to the first of the same work, and differs what distinguishes it from the first run of the
    group.
    """

    run: str
    cell: str
    work: str
    reference: str | None
    checks: tuple[Check, ...]
    steps: int = 0
    compared_steps: int = 0
    loss: LossCurve | None = field(default=None, metadata={"exported": False})
    level: str | None = None
    grade: str | None = None
    differs: tuple[str, ...] = ()
    proves_only: bool = False

    @property
    def valid(self) -> bool:
        return bool(self.checks) and all(check.ok or check.grades for check in self.checks)

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.ok and not check.grades)

    @property
    def is_narrow(self) -> bool:
        """Whether a run is refused for nothing but deviations slightly beyond the spread of re-seeded references: more
        of these would tell rounding from a mistake."""
        return bool(self.failed) and all(c.excess is not None and c.excess <= NARROW for c in self.failed)

    @property
    def unstable_from(self) -> int | None:
        """The first step at which references that differ only in rounding have drifted too far apart to judge a run."""
        limits = zip(self.loss.steps, self.loss.limits, strict=True) if self.loss else ()
        return next((step for step, limit in limits if limit > LOOSE_LIMIT), None)

    @property
    def level_text(self) -> str | None:
        """The level of a foreign script against the first run of its group, or on what a run was proved; else None."""
        return f"{DIFFERENT} ({'; '.join(self.differs)})" if self.differs else self.grade

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(f"{c.name}: expected {c.expected}, observed {c.observed}" for c in self.failed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """value(cell) / value(other): a ratio, its 95 % interval, the smallest detectable effect, and the verdict.

    verdict is about `cell`: better, worse, equal or inconclusive; it is corrected for the other comparisons of its
    family, low and high are not. For a speed, throttled holds the shares of steps while throttled of `cell` and `other`
    if they differ enough to matter. launches is the smaller number of launches of the two; one launch has no verdict:
    it is inconclusive, and detectable_ratio is None. launches_needed: about how many launches of each would decide an
    inconclusive one; None if unknown, or more than anybody would make. level: how equal the work of two foreign scripts
    is, or on what it was proved; None for others.
    """

    metric: str
    better: str
    cell: str
    other: str
    label: str
    other_label: str
    ratio: float
    low: float
    high: float
    detectable_ratio: float | None
    verdict: str
    reason: str
    certified: bool
    axes: Mapping[str, Scalar]
    runs: tuple[str, ...]
    throttled: tuple[float, float] | None = None
    launches: int | None = None
    launches_needed: int | None = None
    level: str | None = None

    @property
    def is_decided(self) -> bool:
        return self.verdict in (BETTER, WORSE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """A choice within one category of one group, based only on the comparisons it cites.

    group is its title; group_key is equal only for recommendations about the same group. not_measured names what never
    varied in the campaign: the choice says nothing about other values of it.
    """

    category: str
    metric: str
    group: str
    choose: tuple[str, ...]
    over: tuple[str, ...]
    because: tuple[Comparison, ...]
    text: str
    caveats: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    not_measured: tuple[str, ...] = ()
    group_key: str = ""

    @property
    def runs(self) -> tuple[str, ...]:
        """Every run behind the choice, once."""
        return tuple(dict.fromkeys(run for c in self.because for run in c.runs))

    @property
    def decisive(self) -> Comparison | None:
        """The comparison in which a chosen cell beats the best of the others; None if no verdict separates them."""
        pairs = [{name, other} for other in self.over[:1] for name in self.choose]
        return next(
            (c for pair in pairs for c in self.because if {c.label, c.other_label} == pair and c.is_decided), None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpOutcome:
    """What the warm-up rule decided for one run."""

    run: str
    excluded_steps: int
    measured_steps: int
    by_rule: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpent:
    """Where the time of launches went, in seconds. setup_s: processes, imports, model, process group. checks_s: the
    profile and the audit after the window, and the end of the processes. first_measured_s: from the start of a launch
    to its first measured step, the median; None if no step was measured."""

    launches: int
    total_s: float
    reference_s: float = 0.0
    setup_s: float = 0.0
    compilation_s: float = 0.0
    warmup_s: float = 0.0
    measured_s: float = 0.0
    checks_s: float = 0.0
    first_measured_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Where the time of a run with restarts or checkpoints went, in seconds from the first sight of its first rank to
    the end of its last step: span = start + counted + redone + checkpoint + down.

    counted are the steps of the trajectory, redone those that a later attempt repeated, start the time of the first
    attempt to its first step, down everything between attempts: detection, queueing, starting, loading. interruptions:
    how often the command ended and was repeated, which is no restart.
    """

    span_s: float
    start_s: float
    counted_s: float
    redone_s: float
    checkpoint_s: float
    down_s: float
    restarts: int
    checkpoints: int
    interruptions: int = 0

    @property
    def ratio(self) -> float:
        return self.counted_s / self.span_s if self.span_s > 0 else 0.0

    @property
    def text(self) -> str:
        """One sentence for the list of runs."""
        counts = (("restarted", self.restarts), ("interrupted", self.interruptions))
        times = ", ".join(f"{word} {_times(count)}" for word, count in counts if count) or "not restarted"
        # The rest of a difference of clock readings is no time.
        redone, saved, down = (f"{round(s, 6):.3g} s" for s in (self.redone_s, self.checkpoint_s, self.down_s))
        lost = f"{redone} redone, {saved} checkpoints ({_times(self.checkpoints)}), {down} down"
        return f"{times}; {self.ratio:.0%} goodput; {lost}; speeds are from undisturbed steps"


def _times(count: int) -> str:
    return f"{count} time{'' if count == 1 else 's'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTrust:
    """The trust light of a launch over its measured window: green, amber or red, and what disturbed it.

    repeated: how many launches before this one were red and repeated; their files are in attempts/ of the run.
    """

    level: str
    reasons: tuple[str, ...] = ()
    repeated: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One optimizer step of one rank by its profile, in seconds: compute, communication that nothing hides, and idle
    time. hidden_s is communication while something computes, and part of compute_s. by_dimension divides exposed_s
    among the dimensions of a layout, if these were profiled. timeline has what happened when, as name and seconds one
    after the other, over `steps` steps: compute, communication (or a dimension) and idle."""

    rank: int
    compute_s: float
    exposed_s: float
    hidden_s: float
    idle_s: float
    by_dimension: tuple[tuple[str, float], ...] = ()
    timeline: tuple[tuple[str, float], ...] = ()
    steps: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinding:
    """One run as the report lists it: how it ended, and what a reader should know before trusting it.

    device_name is the kind of GPU or processor; None if no machine was recorded. throttled_steps are measured steps
    while a GPU was throttled; None if no GPU reported it. goodput is None for a run without restart and checkpoint.
    trust is None if the load of its hosts was not recorded, and for runs whose speed is not measured. trace is the file
    with the profiler's trace of a rank, in the run directory. proof: of a run of a proof group, its sizes, such as
    `4 of 80 layers`. replaced: a reference that did not fit, in whose place others were proved.
    """

    run: str
    cell: str
    status: str
    reason: str | None
    axes: Mapping[str, Scalar]
    repeat: int
    is_reference: bool
    started_at: float
    duration_s: float
    loss_first: float | None
    loss_last: float | None
    outlier_steps: int
    health: tuple[str, ...]
    warmup: WarmUpOutcome | None = None
    device_name: str | None = None
    throttled_steps: int | None = None
    goodput: Goodput | None = None
    trust: LaunchTrust | None = None
    traits: Traits = field(default_factory=Traits, metadata={"exported": False})
    rank_steps: tuple[RankStep, ...] = field(default=(), metadata={"exported": False})
    trace: str | None = field(default=None, metadata={"exported": False})
    proof: str | None = None
    replaced: bool = field(default=False, metadata={"exported": False})

    @property
    def proves_only(self) -> bool:
        """Whether the run only proves others: a reference, or a run of a proof group."""
        return self.is_reference or self.proof is not None

    @property
    def workload(self) -> str:
        return str(self.axes.get("workload")).partition(":")[0]

    @property
    def is_certified(self) -> bool:
        """Whether a run of this workload must prove equal work."""
        return self.traits.certified

    @property
    def is_failure(self) -> bool:
        """Whether the run failed. unsupported and claimed are no failures, nor is running out of memory of a probe and
        of a reference that a proof replaced."""
        return self.status not in ("ok", "unsupported", "claimed") and not (
            self.status == "oom" and (self.traits.probes_limit or self.replaced)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPoint:
    """Efficiency of one cell against the measured baseline of its series. kind is weak or strong."""

    kind: str
    series: str
    cell: str
    baseline: str
    world_size: int
    baseline_world_size: int
    speedup_ratio: float
    efficiency: Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One kind of collective in one optimizer step on the busiest rank. sent_bytes is payload times the wire factor;
    predicted_s is the time by the alpha-beta fit of that operation, None without a fit for this fabric.
    """

    operation: str
    dtype: str
    group_size: int
    calls: int
    payload_bytes: int
    sent_bytes: float | None
    predicted_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingExplanation:
    """Where the step time of one scaling point went, in seconds per optimizer step.

    step_s = ideal_s + exposed_loss_s + rest_s. ideal is the step at the baseline's rate; exposed_loss is communication
    that nothing hides, beyond that of the baseline; rest is everything else. predicted_s is the time of all collectives
    by the fits, hidden or not. None means not measured. exposed_share_ratio is exposed_loss over the loss.
    network_share_ratio is the part of the loss that transfers explain, min(exposed_loss, predicted) over the loss; the
    remaining exposed time is waiting for other ranks. Both are between 0 and 1, and None without a significant loss.
    karp_flatt_ratio is for strong scaling only. grade is excellent, good, poor, or `between poor and good` if the
    interval spans a limit.
    """

    kind: str
    series: str
    cell: str
    baseline: str
    world_size: int
    baseline_world_size: int
    step_s: float
    ideal_s: float
    loss_s: float
    exposed_s: float | None
    exposed_loss_s: float | None
    rest_s: float | None
    predicted_s: float | None
    exposed_share_ratio: float | None
    network_share_ratio: float | None
    karp_flatt_ratio: float | None
    grade: str
    traffic: tuple[Traffic, ...]
    text: str
    notes: tuple[str, ...]
    runs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """Memory of one cell by component in bytes: predicted from its shape, and measured on the busiest rank.

    Keys of both: parameters, gradients, optimizer, activations, communication, other, peak. measured also has reserved,
    device and fragmentation. None means unknown. error_ratio is predicted peak / measured peak - 1.
    """

    cell: str
    axes: Mapping[str, Scalar]
    predicted: Mapping[str, int | None]
    measured: Mapping[str, int | None]
    error_ratio: float | None
    capacity_bytes: int | None
    runs: tuple[str, ...]
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRow:
    """One dimension of the layout of a cell: bytes that its busiest rank sends per step, counted and by formula.

    exposed_ratio: share of a step in which something is sent over it while nothing computes, the mean over ranks of
    extra steps. idle_ratio, idle_formula_ratio: of a pipeline, the share of a step in which a rank computes nothing,
    the mean over ranks, measured on extra steps and by formula. split, balance_ratio: of a pipeline with one stage per
    rank, the layers of each stage, and the slowest stage over the mean by the measured forward times of embedding,
    block and head; best_split, best_balance_ratio: those of the split with the fastest slowest stage. None means
    unknown or no pipeline.
    """

    cell: str
    axes: Mapping[str, Scalar]
    dimension: str
    size: int
    counted_bytes: float | None
    formula_bytes: float | None
    formula: str
    idle_ratio: float | None
    idle_formula_ratio: float | None
    runs: tuple[str, ...]
    exposed_ratio: float | None = None
    split: str | None = None
    balance_ratio: float | None = None
    best_split: str | None = None
    best_balance_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTerm:
    """A part of the profiled steps of two cells: seconds per step of both, and its share of the measured difference."""

    name: str
    seconds: float
    other_s: float
    difference_s: float
    share_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDifference:
    """Why a measured step of `cell` takes longer than one of `other`, the cell of its group with the shortest step.

    difference_s = step_s - other_step_s = the sum of the terms + unexplained_s. The terms are from the profiled steps,
    largest first; their sum is profiled_s. noise_s is how far the means of so few steps scatter (half of a 95 %
    interval). is_explained: the difference and the terms that text names are beyond noise_s, those are at least half of
    the difference, and at most half of it is unexplained. verdict is that on the step time of `cell`; launches are
    those of both.
    """

    cell: str
    other: str
    label: str
    other_label: str
    group: str
    group_key: str
    step_s: float
    other_step_s: float
    difference_s: float
    profiled_s: float
    noise_s: float
    terms: tuple[StepTerm, ...]
    unexplained_s: float
    is_explained: bool
    verdict: str
    launches: tuple[int, int]
    peak_bytes: float | None
    other_peak_bytes: float | None
    text: str
    runs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRow:
    """How a cell with a mixture of experts spread its tokens. The ratios are of the busiest to the mean: of the experts
    of a layer, the mean over layers and steps and the largest over layers; of the ranks that share experts (None
    without expert parallelism). balance: the mean of the balance term. products: how those of experts are computed."""

    cell: str
    axes: Mapping[str, Scalar]
    experts: int
    experts_per_token: int
    imbalance_ratio: float
    worst_layer_ratio: float
    rank_imbalance_ratio: float | None
    balance: float
    products: str
    runs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileCost:
    """What compiling a cell costs once and saves per step, beside the same cell without compilation.

    compile_s: how much longer the steps before the measured window took than those inside it, less the same of the
    other cell: the longest launch, which found an empty cache, and cached_s the shortest. pays_after_steps: compile_s
    over the time saved per step; None if a step is not shorter. verdict: about the speed (see `Comparison`).
    """

    cell: str
    other: str
    axes: Mapping[str, Scalar]
    mode: str
    scope: str | None
    compile_s: float
    cached_s: float
    launches: int
    step_s: float
    other_step_s: float
    speed: float
    verdict: str
    pays_after_steps: int | None
    text: str
    runs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One trial of a frontier search, in its own process."""

    run: str
    micro_batch: int
    status: str
    peak_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """The largest micro batch that ran and the smallest that did not, at one sequence length of one series.

    settled is True if the two are neighbours or the search reached its limit, so nothing between them is untried.
    """

    series: str
    sequence_length: int
    largest_fitting: int | None
    smallest_failing: int | None
    predicted: int | None
    settled: bool
    probes: tuple[Probe, ...]
    axes: Mapping[str, Scalar]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Other settings for a run that ran out of memory, and their predicted peak.

    change is in words, settings as `--set` takes them. fits says whether the peak fits with some margin; None if
    nothing was predicted (note says why). keeps_work: same optimizer steps on the same data. origin is `rehearsed` on
    fake tensors, or `estimated` by arithmetic.
    """

    change: str
    settings: str
    keeps_work: bool
    peak_bytes: int | None
    fits: bool | None
    origin: str
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAdvice:
    """One run that ran out of memory: the memory it had, its predicted peak, and what would fit.

    room_bytes is that of the process with the least. alternatives are in search order: those that keep the work first.
    goal_bytes is the largest peak that counts as fitting. own_note says how its own peak was predicted if not as it
    ran, or why it was not predicted.
    """

    run: str
    cell: str
    axes: Mapping[str, Scalar]
    room_bytes: int
    own_peak_bytes: int | None
    goal_bytes: int
    alternatives: tuple[Alternative, ...]
    own_note: str | None = None

    @property
    def fitting(self) -> tuple[Alternative, ...]:
        return tuple(each for each in self.alternatives if each.fits)
