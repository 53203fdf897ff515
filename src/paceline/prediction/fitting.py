"""Fit the parameters to measured step times, with offsets for each source, by penalised least squares on the logarithm.

Gauss-Newton with numerical derivatives; each residual has a Student-t weight, so that one wrong row does not bend the
fit. Rows of one source share its offsets, so a source teaches the physics by the differences between its rows, not by
its level alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.prediction.parameters import OFFSET_PRIORS, PRIORS, starting_values
from paceline.prediction.step_time import OFFSETS, Array, Columns, step_time

NOISE = 0.06
# Degrees of freedom of the residuals' distribution: heavy tails.
TAILS = 4.0
# A source counts as at most this many rows.
MOST_ROWS = 60.0
ITERATIONS = 10
_STEP = 1e-4


@dataclass(frozen=True)
class Estimate:
    """What a fit found: parameter values, their covariance, and the offsets of each source."""

    values: dict[str, float]
    covariance: Array
    offsets: dict[str, dict[str, float]]
    residuals: Array
    offset_sd: dict[str, float]


def weights_of(sources: Sequence[str], most: Mapping[str, float] | None = None) -> Array:
    """The weight of each row, so that no source counts as more than its share."""
    names, counts = np.unique(np.array(sources), return_counts=True)
    caps = {name: min((most or {}).get(name, MOST_ROWS), count) for name, count in zip(names, counts, strict=True)}
    number = dict(zip(names, counts, strict=True))
    return np.array([caps[name] / number[name] for name in sources])


def fit(
    c: Columns,
    log_step: Array,
    sources: Sequence[str],
    weights: Array,
    *,
    offset_sd: Mapping[str, float] | None = None,
    rounds: int = 2,
    centre: Mapping[str, float] | None = None,
    widths: Mapping[str, float] | None = None,
    iterations: int = ITERATIONS,
) -> Estimate:
    """Parameters and offsets that explain the measured step times; offset_sd is re-estimated between rounds.

    centre and widths replace the prior of the parameters: a width near 0 keeps one as it is.
    """
    names = sorted(set(sources))
    index = np.array([names.index(source) for source in sources])
    sd = dict(offset_sd or OFFSET_PRIORS)
    start = np.array(list((centre or starting_values()).values()))
    priors = np.array([(widths or {}).get(name, prior[1]) for name, prior in PRIORS.items()])
    state = np.concatenate([start, np.zeros(len(names) * len(OFFSETS))])
    curvature, residuals = np.eye(len(state)), log_step
    for turn in range(rounds):
        state, curvature, residuals = _gauss_newton(
            c, log_step, index, len(names), weights, sd, state, iterations, start, priors
        )
        if offset_sd is None and turn < rounds - 1:
            sd = _spread(state, _inverse(curvature), len(names), index, weights)
    covariance = _inverse(curvature)[: len(PRIORS), : len(PRIORS)]
    offsets = state[len(PRIORS) :].reshape(len(names), len(OFFSETS))
    return Estimate(
        dict(zip(PRIORS, map(float, state[: len(PRIORS)]), strict=True)),
        covariance,
        {name: dict(zip(OFFSETS, map(float, row), strict=True)) for name, row in zip(names, offsets, strict=True)},
        residuals,
        sd,
    )


def _gauss_newton(
    c: Columns,
    log_step: Array,
    index: Array,
    count: int,
    weights: Array,
    sd: Mapping[str, float],
    state: Array,
    most: int,
    start: Array,
    priors: Array,
) -> tuple[Array, Array, Array]:
    precision = 1 / priors**2
    offset_precision = np.tile([1 / sd[name] ** 2 for name in OFFSETS], count)
    penalty = np.concatenate([precision, offset_precision])
    centre = np.concatenate([start, np.zeros(count * len(OFFSETS))])

    def cost(state: Array) -> tuple[float, Array]:
        residual = _predicted(c, state, index) - log_step
        loss = weights * (TAILS + 1) / 2 * np.log1p((residual / NOISE) ** 2 / TAILS)
        return float(np.sum(loss) + 0.5 * np.sum(penalty * (state - centre) ** 2)), residual

    damping, (best, residual) = 1e-3, cost(state)
    curvature = np.diag(penalty)
    for _ in range(most):
        jacobian = _jacobian(c, state, index, count)
        robust = weights * (TAILS + 1) / (TAILS + (residual / NOISE) ** 2) / NOISE**2
        curvature = jacobian.T @ (robust[:, None] * jacobian) + np.diag(penalty)
        gradient = jacobian.T @ (robust * residual) + penalty * (state - centre)
        for _ in range(8):
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient)
            trial, trial_residual = cost(state - step)
            if trial < best:
                damping = max(damping / 5, 1e-6)
                break
            damping *= 5
        else:
            return state, curvature, residual
        improvement, state, best, residual = best - trial, state - step, trial, trial_residual
        if improvement < 1e-3:
            break
    return state, curvature, residual


def _inverse(matrix: Array) -> Array:
    return np.asarray(np.linalg.inv(matrix), dtype=np.float64)


def _predicted(c: Columns, state: Array, index: Array) -> Array:
    values = dict(zip(PRIORS, state[: len(PRIORS)], strict=True))
    offsets = state[len(PRIORS) :].reshape(-1, len(OFFSETS))[index]
    shift = {name: offsets[:, k] for k, name in enumerate(OFFSETS)}
    return np.asarray(np.log(step_time(c, values, shift)))


def _jacobian(c: Columns, state: Array, index: Array, count: int) -> Array:
    base = _predicted(c, state, index)
    found = np.zeros((len(base), len(state)))
    for k in range(len(PRIORS)):
        moved = state.copy()
        moved[k] += _STEP
        found[:, k] = (_predicted(c, moved, index) - base) / _STEP
    for k in range(len(OFFSETS)):
        # Rows depend on the offsets of their own source only, so all sources move at once.
        moved = state.copy()
        moved[len(PRIORS) + k :: len(OFFSETS)] += _STEP
        change = (_predicted(c, moved, index) - base) / _STEP
        found[np.arange(len(base)), len(PRIORS) + index * len(OFFSETS) + k] = change
    return found


def _spread(state: Array, covariance: Array, count: int, index: Array, weights: Array) -> dict[str, float]:
    """The spread of the offsets over sources (one step of EM), pulled towards the starting value."""
    offsets = state[len(PRIORS) :].reshape(count, len(OFFSETS))
    variance = np.diag(covariance)[len(PRIORS) :].reshape(count, len(OFFSETS))
    second = offsets**2 + variance
    found = {}
    for k, name in enumerate(OFFSETS):
        prior = OFFSET_PRIORS[name] ** 2
        found[name] = float(np.sqrt((np.sum(second[:, k]) + 4 * prior) / (count + 4)))
    return found


def sensitivities(c: Columns, values: Mapping[str, float], shift: Mapping[str, float]) -> tuple[Array, Array]:
    """Derivatives of the logarithm of the step time by the parameters and by the offsets, one row per setup."""
    names = (*values, *OFFSETS)
    # One row for each number that moves, and one for none: all are computed at once.
    moved = np.vstack([np.zeros(len(names)), _STEP * np.eye(len(names))])[:, :, None]
    at = {name: values[name] + moved[:, k] for k, name in enumerate(values)}
    offsets = {name: shift[name] + moved[:, len(values) + k] for k, name in enumerate(OFFSETS)}
    found = np.log(step_time(c, at, offsets))
    slopes = ((found[1:] - found[0]) / _STEP).T
    return slopes[:, : len(values)], slopes[:, len(values) :]
