"""Choose how to train: options with their time and cost, what meets the limits, and what is worth measuring.

`decide` ranks options by prediction. `halve` measures the few that prediction cannot tell apart: it runs all of them
briefly, keeps those that may still be best, measures these longer, and stops when one is left or the rest is equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.prediction import stored
from paceline.prediction.experiment_file import runnable
from paceline.prediction.layouts import is_close
from paceline.prediction.offsets import NORMAL_90, Anchor
from paceline.prediction.predict import MEASURING_S, Prediction, predict
from paceline.prediction.setup import SHARDS, Setup

# Runs that are proposed at once; more cost more than they tell.
MOST_RUNS = 4
# Differences below this are equal: no one moves a cluster for it.
EQUAL = 0.01
# Steps of the rounds of successive halving.
ROUNDS = (10, 20, 40)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the user needs: tokens to train, and the most seconds and USD for them."""

    tokens: float | None = None
    deadline_s: float | None = None
    budget_usd: float | None = None


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to train, with what it costs. usd_per_gpu_hour: None where no price is known."""

    prediction: Prediction
    usd_per_gpu_hour: float | None

    def seconds(self, limits: Limits) -> float | None:
        return None if limits.tokens is None else self.prediction.seconds_for(limits.tokens)

    def usd(self, limits: Limits) -> float | None:
        if limits.tokens is None or self.usd_per_gpu_hour is None:
            return None
        return self.prediction.usd_for(limits.tokens, self.usd_per_gpu_hour)

    def misses(self, limits: Limits) -> str | None:
        """Why the option does not meet the limits by its predicted value; None if it does."""
        seconds, usd = self.seconds(limits), self.usd(limits)
        if limits.deadline_s is not None and seconds is not None and seconds > limits.deadline_s:
            return "too late"
        if limits.budget_usd is not None and usd is not None and usd > limits.budget_usd:
            return "too expensive"
        return None

    def may_miss(self, limits: Limits) -> bool:
        """Whether the slow end of the interval does not meet the limits."""
        slow = self.prediction.high_s / self.prediction.step_s
        seconds, usd = self.seconds(limits), self.usd(limits)
        late = limits.deadline_s is not None and seconds is not None and seconds * slow > limits.deadline_s
        return late or (limits.budget_usd is not None and usd is not None and usd * slow > limits.budget_usd)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Options that meet the limits, best first. close: may be as good as the best. refused: with the reason."""

    limits: Limits
    by: str
    options: tuple[Option, ...]
    close: tuple[Option, ...]
    refused: tuple[tuple[Option, str], ...]
    enumerated: int
    fitting: int

    @property
    def best(self) -> Option | None:
        return self.options[0] if self.options else None

    @property
    def to_measure(self) -> tuple[Option, ...]:
        """The best and what may be as good, of which a measurement decides; none if the best is clear.

        Layouts that are predicted equal and differ only in how they shard are measured once, by one that Paceline runs.
        """
        chosen: dict[tuple[object, ...], Option] = {}
        for one in (*self.options[:1], *self.close):
            s = one.prediction.setup
            if s.offload and objective(one, self.by) > objective(self.options[0], self.by) and not _offloads(self.best):
                # Its interval is wide by assumption, and there is a layout without it.
                continue
            cost = round(math.log(objective(one, self.by)) / EQUAL)
            key = (s.gpu.name, s.gpus, s.tp, s.pp, s.cp, s.ep, s.quantised, cost)
            if key not in chosen or (runnable(chosen[key].prediction.setup) and not runnable(s)):
                chosen[key] = one
        return tuple(chosen.values())[:MOST_RUNS] if len(chosen) > 1 else ()


def objective(option: Option, by: str) -> float:
    """What is minimised: GPU-seconds or USD per token, or seconds per token."""
    return cost_per_token(option.prediction.setup, option.prediction.step_s, option.usd_per_gpu_hour, by)


def cost_per_token(one: Setup, step_s: float, usd_per_gpu_hour: float | None, by: str) -> float:
    """Seconds per token by time; by cost times the GPUs, and times their price where it is known."""
    seconds = step_s / one.tokens_per_step
    return seconds if by == "time" else seconds * one.gpus * (1.0 if usd_per_gpu_hour is None else usd_per_gpu_hour)


def decide(options: Sequence[Option], limits: Limits, by: str, enumerated: int, fitting: int) -> Decision:
    """Rank the options that meet the limits by time or cost."""
    meeting = sorted((one for one in options if one.misses(limits) is None), key=lambda one: objective(one, by))
    refused = tuple((one, why) for one in options if (why := one.misses(limits)) is not None)
    # Of options that are predicted equal the simplest comes first.
    same = [one for one in meeting if objective(one, by) <= objective(meeting[0], by) * (1 + EQUAL / 2)]
    first = min(same, key=_complexity, default=None)
    if first is not None and first.prediction.setup.offload:
        # Offload was never calibrated: what may be equal without it comes first.
        plain = (one for one in meeting if not one.prediction.setup.offload and _may_equal(first, one, by))
        first = next(plain, first)
    if first is not None:
        meeting = [first, *(one for one in meeting if one is not first)]
    best, others = (meeting[0], meeting[1:]) if meeting else (None, [])
    close = tuple(one for one in others if best is not None and _may_equal(best, one, by))
    return Decision(
        limits=limits,
        by=by,
        options=tuple(meeting),
        close=close,
        refused=refused,
        enumerated=enumerated,
        fitting=fitting,
    )


def _offloads(option: Option | None) -> bool:
    return option is not None and option.prediction.setup.offload


def _complexity(option: Option) -> tuple[int, ...]:
    """How much there is to set up: offload, splits of the model, sharding."""
    s = option.prediction.setup
    return int(s.offload), s.tp * s.pp * s.cp * s.ep, SHARDS.index(s.shard)


def _may_equal(best: Option, other: Option, by: str) -> bool:
    if (
        best.prediction.setup.gpu == other.prediction.setup.gpu
        and best.prediction.setup.gpus == other.prediction.setup.gpus
    ):
        return is_close(best.prediction, other.prediction)
    # Different machines share no offsets: their intervals must be apart.
    ratio = objective(other, by) / objective(best, by)
    return math.log(ratio) <= math.log1p(best.prediction.half_width)


def measuring_minutes(option: Option, steps: int = sum(ROUNDS)) -> float:
    """GPU minutes of measuring one option: start-up and steps."""
    one = option.prediction
    return one.setup.gpus * (MEASURING_S + steps * one.step_s) / 60


# --- successive halving ---


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A setup that was run. sd: of the logarithm of its step time. run: its identifier."""

    setup: Setup
    step_s: float
    sd: float
    run: str

    @property
    def seconds_per_token(self) -> float:
        return self.step_s / self.setup.tokens_per_step

    def anchor(self) -> Anchor:
        return Anchor(self.setup, self.step_s, self.run, self.sd)


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round: the steps of each run, what was measured, fastest first, and which setups stay."""

    steps: int
    measured: tuple[Timed, ...]
    kept: tuple[Setup, ...]


@dataclass(frozen=True, kw_only=True)
class Halved:
    """What measuring decided. equal: setups that the last round could not tell apart by more than EQUAL."""

    rounds: tuple[Round, ...] = ()
    best: Setup | None = None
    equal: tuple[Setup, ...] = ()
    failed: tuple[Setup, ...] = ()

    @property
    def longest(self) -> dict[str, Timed]:
        """The longest run of each setup that was measured, by its key."""
        return {stored.key(one.setup): one for each in self.rounds for one in each.measured}

    @property
    def anchors(self) -> list[Anchor]:
        return [one.anchor() for one in self.longest.values()]


Measure = Callable[[Sequence[Setup], int], Sequence[Timed]]


def halve(
    candidates: Sequence[Setup],
    measure: Measure,
    cost: Callable[[Timed], float] | None = None,
    before: Halved | None = None,
) -> Halved:
    """Measure until the choice is clear. measure(setups, steps) gives those that ran and may be trusted.

    A setup that did not run is out. Cost decides: seconds per token unless given, so setups may have different batches.
    before: earlier rounds, which the result keeps.
    """
    left, cost_of = list(candidates), cost or (lambda one: one.seconds_per_token)
    rounds: list[Round] = [] if before is None else list(before.rounds)
    failed: list[Setup] = [] if before is None else list(before.failed)
    equal: list[Setup] = []
    for steps in ROUNDS:
        ordered = sorted(measure(left, steps), key=cost_of)
        ran = {stored.key(one.setup) for one in ordered}
        failed += [one for one in left if stored.key(one) not in ran]
        if not ordered:
            return Halved(rounds=tuple(rounds), best=None, equal=(), failed=tuple(failed))
        first, *others = ordered
        kept, equal = [first.setup], []
        for one in others:
            slower = math.log(cost_of(one) / cost_of(first))
            if slower - NORMAL_90 * math.hypot(one.sd, first.sd) <= 0 or slower < EQUAL:
                kept.append(one.setup)
                equal += [one.setup] if slower < EQUAL else []
        # At most half of those that took part stay, unless they are equal.
        kept = kept[: max(math.ceil(len(ordered) / 2), 1 + len(equal))]
        rounds.append(Round(steps=steps, measured=tuple(ordered), kept=tuple(kept)))
        left = kept
        if len(left) == 1 or len(left) == 1 + len(equal):
            break
    return Halved(rounds=tuple(rounds), best=left[0], equal=tuple(equal), failed=tuple(failed))


def with_measured(decision: Decision, halved: Halved) -> Decision:
    """The decision after measuring: what was run has its measured time, and the best of it comes first.

    decision: predictions that already know the runs. What did not run is no option any more. Other variants of a layout
    stay options if they are predicted to be better than its measured one.
    """
    timed, failed = halved.longest, {stored.key(one) for one in halved.failed}
    prices = {one.prediction.setup.gpus: one.usd_per_gpu_hour for one in decision.options}
    found = [_timed_option(one, prices.get(one.setup.gpus), halved.anchors) for one in timed.values()]
    by_layout = {(one.prediction.setup.gpus, one.prediction.setup.layout): objective(one, decision.by) for one in found}
    for option in decision.options:
        s = option.prediction.setup
        if stored.key(s) in timed or stored.key(s) in failed:
            continue
        if objective(option, decision.by) < by_layout.get((s.gpus, s.layout), math.inf):
            found.append(option)
    best = None if halved.best is None else stored.key(halved.best)
    found.sort(key=lambda one: (stored.key(one.prediction.setup) != best, objective(one, decision.by)))
    equal = {stored.key(one) for one in halved.equal}
    # Not run, but predicted as good as the best was measured: Paceline cannot run it, or it was no candidate.
    close = [
        one
        for one in found[1:]
        if stored.key(one.prediction.setup) in equal
        or (stored.key(one.prediction.setup) not in timed and _may_equal(found[0], one, decision.by))
    ]
    return replace(decision, options=tuple(found), close=tuple(close))


def _timed_option(timed: Timed, usd_per_gpu_hour: float | None, anchors: Sequence[Anchor]) -> Option:
    one, spread = predict([timed.setup], anchors)[0], math.exp(NORMAL_90 * timed.sd)
    measured = replace(
        one,
        step_s=timed.step_s,
        low_s=timed.step_s / spread,
        high_s=timed.step_s * spread,
        parts={name: seconds * timed.step_s / one.step_s for name, seconds in one.parts.items()},
        measured_by=timed.run,
    )
    return Option(prediction=measured, usd_per_gpu_hour=usd_per_gpu_hour)


def rivals(decision: Decision, halved: Halved) -> list[Setup]:
    """Setups that were not run, but which the predictions now expect to beat the best of those that were."""
    known = set(halved.longest) | {stored.key(one) for one in halved.failed}
    after = with_measured(decision, halved)
    fresh = [one for one in after.options[1:] if stored.key(one.prediction.setup) not in known]
    limit = objective(after.options[0], decision.by) * math.exp(-EQUAL) if after.options else 0.0
    return [one.prediction.setup for one in fresh if objective(one, decision.by) < limit][:MOST_RUNS]
