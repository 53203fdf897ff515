"""What measurements say about a cluster: offsets and similar setups, and the interval that follows.

Before anything is measured, the logarithm of a step time has a mean (the physics) and a covariance between setups:

    G S G'    offsets of the cluster, which all its setups share (G: sensitivities, S: their prior)
    H C H'    parameters of the fit, which are not known exactly
    K         what the model gets wrong in the same way for similar setups (`shared_error`)
    N         noise of each measurement

Anchors are measurements of some setups. Offsets and parameters are their most probable values given the anchors
(Gauss-Newton; an anchor far from what the others say of it counts less, as with Student-t noise). What remains of the
anchors' residuals is shared with similar setups. Anchors that lie closer to the zero-shot prediction than this
covariance expects make all intervals narrower, and wider otherwise (`surprise`). With no anchors this is the zero-shot
prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.prediction.fitting import sensitivities
from paceline.prediction.parameters import Fitted, Shared
from paceline.prediction.setup import Setup
from paceline.prediction.step_time import OFFSETS, Array, Columns, columns, step_time

# Spread of one measurement, as a logarithm.
MEASURED = 0.03
# Distance at which two setups have little in common, in doublings; that of the GPUs is fitted (`Shared`).
_LENGTHS = {
    "parameters": 2.0,
    "tokens": 2.0,
    "sequence": 2.0,
    "tp": 1.5,
    "pp": 1.5,
    "cp": 1.0,
    "dense": 2.0,
}
# What kind of work it is, and how it is sharded. Each difference counts as a distance of the root of this.
_KIND = ("fp8", "fp8_rowwise", "full", "selective", "adapted", "compiled", "async_tp")
_SHARDED = ("zero3", "hybrid")
_WORD = 0.7
NORMAL_90 = 1.645
# How many anchors the covariance itself is worth when anchors say that it is too large or too small (degrees of freedom
# of a Student-t process). From 4 to 20 the intervals with four anchors differ by 0.2 points.
PRIOR_ANCHORS = 8.0
# Degrees of freedom of what a single anchor may differ from all others: heavy tails, so that an odd run counts less.
ANCHOR_TAILS = 4.0
_DOUBTS = 10
# Added for a CPU, for offload to one and for mixtures of experts, which no published row is about: an assumption.
UNCALIBRATED = 0.3


@dataclass(frozen=True)
class Anchor:
    """A measured step time of a setup. sd: of its logarithm, from repeats where there are some."""

    setup: Setup
    step_s: float
    name: str
    sd: float = MEASURED


@dataclass(frozen=True)
class Observation:
    """A measurement of one offset itself: the bandwidth of the links, or the speed of products."""

    offset: str
    value: float
    sd: float
    source: str


def subset(c: Columns, index: NDArray[np.signedinteger[Any]]) -> dict[str, Array]:
    return {name: value[index] for name, value in c.items()}


@dataclass(frozen=True)
class Apart:
    """How unlike setups are, as squared distances for each pair: by their GPUs, by their kind of work, by the rest.

    uncalibrated: the covariance that setups have which no published row is about.
    """

    gpus: Array
    kind: Array
    rest: Array
    uncalibrated: Array

    def covariance(self, shared: Shared) -> Array:
        """Of what the model gets wrong in the same way for two setups.

        One part is shared by setups that are alike in everything, another by all work of one kind: the same precision,
        recomputation, adapters and compiler, whatever the model and the layout are.
        """
        alike = np.exp(-(self.gpus / shared.gpus**2 + self.rest) / 2)
        return np.asarray((shared.setup**2 + self.uncalibrated) * alike + shared.kind**2 * np.exp(-self.kind / 2))


def apart(a: Columns, b: Columns) -> Apart:
    kind = _words_apart(a, b, _KIND)
    rest = kind + _words_apart(a, b, _SHARDED)
    for name, length in _LENGTHS.items():
        rest += (_doublings(a, b, name) / length) ** 2
    uncalibrated = UNCALIBRATED**2 * _uncalibrated(a)[:, None] * _uncalibrated(b)[None, :]
    return Apart(_doublings(a, b, "gpus") ** 2, kind, rest, uncalibrated)


def _doublings(a: Columns, b: Columns, name: str) -> Array:
    left, right = (np.log2(np.maximum(_feature(c, name), 1e-9)) for c in (a, b))
    return np.asarray(left[:, None] - right[None, :])


def _words_apart(a: Columns, b: Columns, names: Sequence[str]) -> Array:
    return np.asarray(sum((a[name][:, None] != b[name][None, :]) * _WORD for name in names))


def shared_error(shared: Shared, a: Columns, b: Columns) -> Array:
    """Covariance of what the model gets wrong in the same way for two setups."""
    return apart(a, b).covariance(shared)


def _uncalibrated(c: Columns) -> Array:
    return np.asarray(np.maximum.reduce([c["cpu"], c["offload"], c["mixture"]]))


def _feature(c: Columns, name: str) -> Array:
    if name == "tokens":
        return np.asarray(c["micro_batch"] * c["sequence"] / c["cp"])
    if name == "dense":
        return np.asarray(c["micro_batches"])
    return c[name]


@dataclass(frozen=True)
class Posterior:
    """What is known of a cluster: its offsets, the parameters as they are there, and the covariance of both together.

    residuals: what they do not explain of the anchors. sd: the spread of each anchor, larger for odd ones.
    """

    shift: dict[str, float]
    values: dict[str, float]
    covariance: Array
    residuals: Array
    sd: Array

    def log_step(self, c: Columns) -> Array:
        return np.asarray(np.log(step_time(c, self.values, self.shift)))

    def slopes(self, c: Columns) -> Array:
        return np.hstack(sensitivities(c, self.values, self.shift)[::-1])


def posterior(
    fitted: Fitted, c: Columns | None, log_step: Array, sd: Array, observations: Sequence[Observation] = ()
) -> Posterior:
    """The most probable offsets and parameters given the anchors, by Gauss-Newton."""
    precision = np.array([fitted.offset_sd[name] ** -2 for name in OFFSETS])
    pulled = np.zeros(len(OFFSETS))
    for seen in observations:
        precision[OFFSETS.index(seen.offset)] += seen.sd**-2
        pulled[OFFSETS.index(seen.offset)] += seen.value * seen.sd**-2
    count, names = len(OFFSETS), list(fitted.values)
    prior = np.zeros((count + len(names),) * 2)
    prior[:count, :count], prior[count:, count:] = np.diag(1 / precision), fitted.covariance
    centre = np.concatenate([pulled / precision, list(fitted.values.values())])

    def at(state: Array, covariance: Array, residuals: Array) -> Posterior:
        shift = dict(zip(OFFSETS, map(float, state[:count]), strict=True))
        values = dict(zip(names, map(float, state[count:]), strict=True))
        return Posterior(shift, values, covariance, residuals, sd)

    state = centre
    if c is None or not len(log_step):
        return at(state, prior, log_step)
    sd = _doubted(fitted, c, log_step, sd, observations)
    noise = shared_error(fitted.shared, c, c) + np.diag(sd**2)
    for _ in range(6):
        now = at(state, prior, log_step)
        slopes = now.slopes(c)
        gain = np.linalg.solve(slopes @ prior @ slopes.T + noise, slopes @ prior).T
        step = centre + gain @ (log_step - now.log_step(c) + slopes @ (state - centre)) - state
        state = state + np.clip(step, -0.7, 0.7)
        if np.max(np.abs(step)) < 1e-3:
            break
    now = at(state, prior, log_step)
    return at(state, prior - gain @ slopes @ prior, log_step - now.log_step(c))


def predict_columns(
    fitted: Fitted,
    c: Columns,
    anchors: Columns | None,
    log_step: Array,
    sd: Array,
    observations: Sequence[Observation] = (),
) -> tuple[Array, Array]:
    """(mean, sd) of the logarithm of the step time of each setup, given anchors."""
    factor: float | Array = scale_for(fitted, len(log_step) + len(observations))
    if anchors is not None:
        factor = factor * surprise(fitted, anchors, log_step, sd, observations)
    known = posterior(fitted, anchors, log_step, sd, observations)
    mean, slopes = known.log_step(c), known.slopes(c)
    shared = fitted.shared.setup**2 + fitted.shared.kind**2 + (UNCALIBRATED * _uncalibrated(c)) ** 2
    if anchors is not None:
        across = shared_error(fitted.shared, c, anchors)
        inside = shared_error(fitted.shared, anchors, anchors) + np.diag(known.sd**2)
        solved = np.linalg.solve(inside, across.T)
        mean = mean + solved.T @ known.residuals
        slopes = slopes - solved.T @ known.slopes(anchors)
        shared = np.maximum(shared - np.einsum("ij,ji->i", across, solved), 0)
    variance = np.einsum("ij,jk,ik->i", slopes, known.covariance, slopes)
    factor = factor * np.where(c["peft"] > 0, fitted.tuned_scale, 1.0)
    return mean, factor * np.sqrt(variance + shared + fitted.noise**2)


def _doubted(
    fitted: Fitted, anchors: Columns, log_step: Array, sd: Array, observations: Sequence[Observation]
) -> Array:
    """The spread of each anchor, larger where it is far from what the others say of it.

    Weights of a Student-t distribution: an anchor of weight w has a variance of its own of (1 / w - 1) times what
    similar setups share.
    """
    if len(log_step) < 2:
        return sd
    off = log_step - posterior(fitted, None, log_step, sd, observations).log_step(anchors)
    expected = expected_covariance(fitted, anchors, observations) + shared_error(fitted.shared, anchors, anchors)
    own = np.zeros(len(sd))
    for _ in range(_DOUBTS):
        inverse = np.linalg.inv(expected + np.diag(sd**2 + own))
        from_others = (inverse @ off) / np.diag(inverse)
        expected_square = 1 / np.diag(inverse) - own
        weight = (ANCHOR_TAILS + 1) / (ANCHOR_TAILS + from_others**2 / expected_square)
        own = (own + fitted.shared.setup**2 * (1 / np.minimum(weight, 1) - 1)) / 2
    return np.asarray(np.sqrt(sd**2 + own))


def surprise(
    fitted: Fitted, anchors: Columns, log_step: Array, sd: Array, observations: Sequence[Observation]
) -> float:
    """The factor on all standard deviations that follows from how far the anchors are from what was expected of them.

    Their squared distance, in units of their covariance, is their number on average. Errors of the model are larger for
    some programs than for others; this is the scale of a Student-t process after so many observations.
    """
    before = posterior(fitted, None, np.zeros(0), np.zeros(0), observations)
    off = log_step - before.log_step(anchors)
    covariance = expected_covariance(fitted, anchors, observations)
    covariance += shared_error(fitted.shared, anchors, anchors) + np.diag(sd**2)
    distance = float(off @ np.linalg.solve(covariance, off))
    return float(np.sqrt((PRIOR_ANCHORS + distance) / (PRIOR_ANCHORS + len(off))))


def expected_covariance(fitted: Fitted, c: Columns, observations: Sequence[Observation] = ()) -> Array:
    """Covariance of step times (logarithms) from offsets and parameters, before any training run is measured."""
    before = posterior(fitted, None, np.zeros(0), np.zeros(0), observations)
    slopes = before.slopes(c)
    return np.asarray(slopes @ before.covariance @ slopes.T)


def scale_for(fitted: Fitted, count: int) -> float:
    """The conformal factor for this number of anchors: that of the nearest smaller number that was calibrated."""
    known = [number for number in sorted(fitted.scale) if number <= count]
    return fitted.scale[known[-1]] if known else 1.0


def anchor_columns(anchors: Sequence[Anchor]) -> tuple[dict[str, Array] | None, Array, Array]:
    if not anchors:
        return None, np.zeros(0), np.zeros(0)
    return (
        columns([one.setup for one in anchors]),
        np.log(np.array([one.step_s for one in anchors])),
        np.array([one.sd for one in anchors]),
    )
