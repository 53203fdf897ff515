"""Choose how to train: options with their time and cost, what meets the limits, and what is worth measuring.

`decide` ranks options by prediction. `halve` measures the few that prediction cannot tell apart: it runs all of them
briefly, keeps those that may still be best, measures these longer, and stops when one is left or the rest is equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.prediction import stored
from paceline.prediction.layouts import is_close
from paceline.prediction.offsets import NORMAL_90, Anchor
from paceline.prediction.predict import MEASURING_S, Prediction, predict
from paceline.prediction.setup import Setup

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

        Layouts that are predicted equal and differ only in how they shard are measured once.
        """
        chosen: dict[tuple[object, ...], Option] = {}
        for one in (*self.options[:1], *self.close):
            s = one.prediction.setup
            cost = round(math.log(objective(one, self.by)) / EQUAL)
            chosen.setdefault((s.gpu.name, s.gpus, s.tp, s.pp, s.cp, s.quantised, cost), one)
        return tuple(chosen.values())[:MOST_RUNS] if len(chosen) > 1 else ()


def objective(option: Option, by: str) -> float:
    """What is minimised: GPU-seconds or USD per token, or seconds per token."""
    one = option.prediction
    seconds = one.step_s / one.setup.tokens_per_step
    if by == "time":
        return seconds
    return seconds * one.setup.gpus * (option.usd_per_gpu_hour if option.usd_per_gpu_hour is not None else 1.0)


def decide(options: Sequence[Option], limits: Limits, by: str, enumerated: int, fitting: int) -> Decision:
    """Rank the options that meet the limits by time or cost."""
    meeting = sorted((one for one in options if one.misses(limits) is None), key=lambda one: objective(one, by))
    refused = tuple((one, why) for one in options if (why := one.misses(limits)) is not None)
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
class Round:
    """One round: the steps of each run, and the measured step time of each setup that took part."""

    steps: int
    measured: tuple[tuple[Setup, float], ...]
    kept: tuple[Setup, ...]


@dataclass(frozen=True, kw_only=True)
class Halved:
    """What measuring decided. equal: setups that the last round could not tell apart by more than EQUAL."""

    rounds: tuple[Round, ...]
    best: Setup | None
    equal: tuple[Setup, ...]
    anchors: tuple[Anchor, ...] = field(default=())
    failed: tuple[Setup, ...] = field(default=())


Measure = Callable[[Sequence[Setup], int], Sequence[tuple[Setup, float, float]]]


def halve(candidates: Sequence[Setup], measure: Measure, anchors: Sequence[Anchor] = ()) -> Halved:
    """Measure until the choice is clear. measure(setups, steps) gives setup, step time and sd of its
    logarithm of those that ran.

    A setup that did not run is out. Seconds per token decide, so setups may have different batches.
    """
    left, known = list(candidates), list(anchors)
    rounds: list[Round] = []
    failed: list[Setup] = []
    equal: list[Setup] = []
    for steps in ROUNDS:
        results = {stored.key(one): (one, step_s, sd) for one, step_s, sd in measure(left, steps)}
        failed += [one for one in left if stored.key(one) not in results]
        if not results:
            return Halved(rounds=tuple(rounds), best=None, equal=(), anchors=tuple(known), failed=tuple(failed))
        known += [Anchor(one, step_s, one.layout, sd) for one, step_s, sd in results.values()]
        ordered = sorted(results.values(), key=lambda r: r[1] / r[0].tokens_per_step)
        first, fastest, first_sd = ordered[0]
        kept = [first]
        equal = []
        for one, step_s, sd in ordered[1:]:
            slower = math.log(step_s / one.tokens_per_step) - math.log(fastest / first.tokens_per_step)
            if slower - NORMAL_90 * math.hypot(sd, first_sd) <= 0 or slower < EQUAL:
                kept.append(one)
                equal += [one] if slower < EQUAL else []
        # At most half of those that took part stay, unless they are equal.
        kept = kept[: max(math.ceil(len(ordered) / 2), 1 + len(equal))]
        measured = tuple((one, step_s) for one, step_s, _ in ordered)
        rounds.append(Round(steps=steps, measured=measured, kept=tuple(kept)))
        left = kept
        if len(left) == 1 or len(left) == 1 + len(equal):
            break
    return Halved(rounds=tuple(rounds), best=left[0], equal=tuple(equal), anchors=tuple(known), failed=tuple(failed))


def after(option: Option, anchors: Sequence[Anchor]) -> Prediction:
    """The prediction of an option once runs have been measured."""
    return predict([option.prediction.setup], anchors)[0]
