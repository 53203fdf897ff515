"""Findings about training runs: measurements, certificates, comparisons, recommendations, bottlenecks and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.errors import Scalar
from paceline.experiment.plugins import Traits

COMPUTE, MEMORY, NETWORK, INPUT, LAUNCH = "compute", "memory bandwidth", "network", "input", "launch overhead"
# Of runs that hold weights in few bits; no share of any other.
DEQUANTISATION = "dequantisation"
# In the order in which tables show them.
BOTTLENECKS = (COMPUTE, MEMORY, DEQUANTISATION, NETWORK, INPUT, LAUNCH)
UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareOfStep:
    """What one kind of bottleneck takes of a step. share_ratio is the part that is certain, low and high what it may be
    at most: they span the launches' interval and all time that the evidence lets nobody else claim.

    share_ratio is None where nothing was measured that could tell.
    """

    kind: str
    share_ratio: float | None
    low: float
    high: float
    text: str
    runs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """What one cell's step waits for most.

    kind is one of BOTTLENECKS; `between A and B` where their shares cannot be told apart; `undecided` where evidence
    that could decide was not measured, which `missing` then names. share_ratio is the winner's, else None.
    told_apart says whether the profile knew kernels by class.
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
    """Whether one strategy fits by arithmetic alone, in bytes per GPU: nothing here was measured, nothing is a speed.

    gpu names every kind of GPU that has this memory. gpus is the number asked about, or the smallest of those tried
    that fits; None where none does, and the bytes are then of the largest number tried.
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


BETTER, WORSE, TIE = "better", "worse", "tie"
HIGHER, LOWER = "higher", "lower"
SHARED_GPU = "shared GPU: not a speed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One metric of one cell. low and high bound a 95 % interval; None where the data cannot support one.

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
    """One line of a certificate: what the group expects, what this run showed."""

    name: str
    ok: bool
    expected: str
    observed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Proof that a run did the work of its group, or the reasons why not."""

    run: str
    cell: str
    work: str
    reference: str | None
    checks: tuple[Check, ...]

    @property
    def valid(self) -> bool:
        return bool(self.checks) and all(check.ok for check in self.checks)

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(f"{c.name}: expected {c.expected}, observed {c.observed}" for c in self.checks if not c.ok)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """value(cell) / value(other): a ratio, its 95 % interval, the smallest effect it could show, and the verdict.

    verdict speaks about `cell`: better, worse or tie; reason says why a tie is one. throttled holds, of a speed, the
    shares of the steps of `cell` and of `other` in which a GPU was held back, where they differ enough to matter.
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
    detectable_ratio: float
    verdict: str
    reason: str
    certified: bool
    axes: Mapping[str, Scalar]
    runs: tuple[str, ...]
    throttled: tuple[float, float] | None = None

    @property
    def is_tie(self) -> bool:
        return self.verdict == TIE


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """A choice within one category of one group, made only by the comparisons it cites.

    group is its title; group_key is equal only for recommendations about the same group, whatever their titles.
    not_measured names what never varied in the campaign: the choice says nothing about other values of it.
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
        """The comparison that puts the best of the others behind a chosen one; None where all tie."""
        pairs = [{name, other} for other in self.over[:1] for name in self.choose]
        return next(
            (c for pair in pairs for c in self.because if {c.label, c.other_label} == pair and not c.is_tie), None
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
class Goodput:
    """Where the time of a run went that was restarted or wrote checkpoints, in seconds from when its first rank was
    seen to the end of its last step: span = start + counted + redone + checkpoint + down.

    counted are the steps of the trajectory, redone those that a later attempt did again, start the first attempt's way
    to its first step, down everything between attempts: noticing, waiting for the engine, starting, loading.
    """

    span_s: float
    start_s: float
    counted_s: float
    redone_s: float
    checkpoint_s: float
    down_s: float
    restarts: int
    checkpoints: int

    @property
    def ratio(self) -> float:
        return self.counted_s / self.span_s if self.span_s > 0 else 0.0

    @property
    def text(self) -> str:
        times = f"restarted {_times(self.restarts)}" if self.restarts else "not restarted"
        written = f"{self.checkpoint_s:.3g} s checkpoints ({_times(self.checkpoints)})"
        lost = f"{self.redone_s:.3g} s redone, {written}, {self.down_s:.3g} s down"
        return f"{times}; {self.ratio:.0%} goodput; {lost}: speeds are of its undisturbed steps"


def _times(count: int) -> str:
    return f"{count} time{'' if count == 1 else 's'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinding:
    """One run as the report lists it: its end, and everything a reader should know before trusting it.

    device_name is the kind of GPU, or of processor, it ran on; None where no machine was recorded. throttled_steps are
    measured steps during which a GPU was held back; None where no GPU told. goodput is None for a run that went through
    in one piece and wrote no checkpoint.
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
    traits: Traits = field(default_factory=Traits, metadata={"exported": False})

    @property
    def workload(self) -> str:
        return str(self.axes.get("workload")).partition(":")[0]

    @property
    def is_certified(self) -> bool:
        """Whether a run of this workload must prove equal work."""
        return self.traits.certified

    @property
    def is_failure(self) -> bool:
        """Neither ok, refused beforehand nor claimed; nor a probe that found no room, which it was sent to find."""
        return self.status not in ("ok", "unsupported", "claimed") and not (
            self.status == "oom" and self.traits.probes_limit
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
    """One kind of collective in one optimizer step of the busiest rank. sent_bytes is payload times the factor;
    predicted_s is what the alpha-beta fit of that operation says, None where no fit is of this fabric."""

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

    step_s = ideal_s + exposed_loss_s + rest_s: ideal is what the baseline's rate gives at this size, exposed_loss the
    communication that nothing hid beyond the baseline's own, rest everything else. predicted_s is the time of all
    collectives by the fits, hidden or not. None is not measured. exposed_share_ratio is exposed_loss over the loss,
    network_share_ratio the part of it that transfer explains, min(exposed_loss, predicted) over the loss: the rest
    of it is waiting for other ranks. Both lie within 0 to 1 and are None where there is no loss beyond chance.
    karp_flatt_ratio is of strong scaling only.
    grade: excellent, good, poor, or `between poor and good` where the interval spans a limit.
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
    """Memory of one cell by component, predicted from its shape beside what the busiest rank showed, in bytes.

    Keys of both: parameters, gradients, optimizer, activations, communication, other, peak; measured has also reserved,
    device and fragmentation. None is unknown. error_ratio is predicted peak / measured peak - 1.
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
class Probe:
    """One try of a frontier search, in a process of its own."""

    run: str
    micro_batch: int
    status: str
    peak_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """The largest micro batch that ran and the smallest that did not, at one sequence length of one series.

    settled is True when the two are neighbours or the search reached its limit: nothing between them is untried.
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
    """Other settings for a run that was out of memory, and the peak that was predicted of them.

    change in words, settings as `--set` takes them. fits: the peak is at most the room, with some to spare; None where
    nothing was predicted, and note says why. keeps_work: same optimizer steps on the same data. origin: `rehearsed` on
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
    """One run out of memory: the room that it had, what it was predicted to hold, and what was found that fits.

    room_bytes is of the process with the least. Alternatives stand in the order in which they were looked for: what
    keeps the work first, then what changes it. goal_bytes is what a peak may be at most to be called fitting. own_note
    says how its own peak was predicted, where that is not as it ran, or why it was not.
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
