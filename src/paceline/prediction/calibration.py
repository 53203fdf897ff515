"""How good the predictions are on rows that the fit did not see: error, coverage, half-width, pairs and regret.

A fold leaves out all rows of one source, of one kind of GPU, or of the largest scale of each source, fits the rest, and
predicts what was left out from no anchor, one, or four rows of the source that was left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.prediction import fitting, parameters
from paceline.prediction.offsets import (
    MEASURED,
    NORMAL_90,
    PRIOR_ANCHORS,
    Apart,
    apart,
    expected_covariance,
    predict_columns,
    shared_error,
    subset,
)
from paceline.prediction.parameters import Fitted, Shared
from paceline.prediction.published import Row
from paceline.prediction.step_time import Array, columns, step_time

Indices = NDArray[np.signedinteger[Any]]

ANCHORS = (0, 1, 4)
# vtrain-single is affine in its micro batches and layers to 1e-5, so probably composed from profiles.
MOST_ROWS = {"vtrain-single": 30.0}
EVERY = {"vtrain-single": 20}
# Two revisions of one benchmark page, and the programs of one collection, are one source when one is left out.
SAME_SOURCE = {"llm-foundry-superseded": "llm-foundry", "dgxc/maxtext": "dgxc", "dgxc/paxml": "dgxc"}
_DRAWS = 30
# Parameters that only fine-tuning programs have.
TUNED = ("peft", "peft_launch", "expand")
# Two setups are alternatives if they train the same model on the same GPUs with the same sequence and precision.
_CLOSE = 0.02


@dataclass(frozen=True)
class Score:
    """Predictions against measurements. errors: |predicted / measured - 1|. covered: inside the 90 % interval."""

    name: str
    anchors: int
    rows: int
    errors: Array
    covered: Array
    half_widths: Array
    log_ratios: Array
    sds: Array

    @property
    def median(self) -> float:
        return float(np.median(self.errors))

    @property
    def p90(self) -> float:
        return float(np.quantile(self.errors, 0.9))

    @property
    def coverage(self) -> float:
        return float(np.mean(self.covered))

    @property
    def half_width(self) -> float:
        return float(np.median(self.half_widths))


@dataclass(frozen=True)
class Choice:
    """Choosing among alternatives by prediction. regret: throughput lost; random: lost on average by any pick."""

    name: str
    groups: int
    pairs: int
    right: float
    regret: float
    random: float


def usable(rows: Iterable[Row]) -> list[Row]:
    """Rows for fitting: every twentieth of a table that is composed, and none of GPUs with an unstated power limit."""
    kept: list[Row] = []
    seen: dict[str, int] = {}
    for one in rows:
        count = seen[one.source] = seen.get(one.source, -1) + 1
        limited = one.source == "torchao" and one.setup.gpu.name == "b200"
        if count % EVERY.get(one.source, 1) == 0 and not limited:
            kept.append(one)
    return kept


def is_tuned(one: Row) -> bool:
    """Whether a plain fine-tuning program made the row: these programs have parameters of their own."""
    return one.setup.software.family == "peft"


def fit(rows: Sequence[Row], offset_sd: Mapping[str, float] | None = None) -> tuple[Fitted, fitting.Estimate]:
    """Parameters from these rows, with intervals that are not yet scaled.

    Rows of fine-tuning programs fit their own three parameters with the physics kept as it is, because their overhead
    would bend it.
    """
    trained = [one for one in rows if not is_tuned(one)]
    found = _fit(trained, offset_sd, rounds=2 if offset_sd is None else 1)
    values, covariance = dict(found.values), found.covariance
    tuned = [one for one in rows if is_tuned(one)]
    if tuned:
        kept = {name: 1e-4 for name in parameters.PRIORS if name not in TUNED}
        own = _fit(tuned, found.offset_sd, rounds=1, centre=found.values, widths=kept)
        names = list(parameters.PRIORS)
        for name in TUNED:
            values[name], at = own.values[name], names.index(name)
            covariance[at, :] = covariance[:, at] = 0.0
            covariance[at, at] = own.covariance[at, at]
    return Fitted(values, covariance, found.offset_sd, MEASURED, dict.fromkeys(ANCHORS, 1.0), 1.0, {}), found


def _fit(rows: Sequence[Row], offset_sd: Mapping[str, float] | None, rounds: int, **more: Any) -> fitting.Estimate:
    sources = [one.source for one in rows]
    return fitting.fit(
        columns([one.setup for one in rows]),
        np.log([one.step_s for one in rows]),
        sources,
        fitting.weights_of(sources, MOST_ROWS),
        offset_sd=offset_sd,
        rounds=rounds,
        **more,
    )


def source_of(one: Row) -> str:
    return SAME_SOURCE.get(one.source, one.source)


def folds(rows: Sequence[Row], key: Callable[[Row], str], offset_sd: Mapping[str, float]) -> dict[str, Fitted]:
    """The fit without each group of rows."""
    names = dict.fromkeys(key(one) for one in rows)
    return {name: fit([one for one in rows if key(one) != name], offset_sd)[0] for name in names}


# --- what similar setups share ---


@dataclass(frozen=True)
class LeftOut:
    """Rows of one cluster that the fit did not see.

    expected: covariance of their residuals from offsets and parameters. weight: of each row, so that no source counts
    as more than its share.
    """

    name: str
    apart: Apart
    residuals: Array
    expected: Array
    weight: float


def left_out(fitted: Fitted, rows: Sequence[Row]) -> list[LeftOut]:
    """The rows of a source that this fit left out, by cluster."""
    found = []
    for cluster in clusters(rows):
        one = cluster[0]
        c = columns([row.setup for row in cluster])
        weight = min(MOST_ROWS.get(one.source, fitting.MOST_ROWS) / len(rows), 1.0)
        residuals = np.log([row.step_s for row in cluster]) - np.log(step_time(c, fitted.values))
        name = f"{source_of(one)} {one.setup.gpu.name} {one.setup.software.name}"
        found.append(LeftOut(name, apart(c, c), residuals, expected_covariance(fitted, c), weight))
    return found


def log_likelihood(one: LeftOut, shared: Shared) -> float:
    """Logarithm of the density of the residuals: a multivariate Student-t, as `offsets.surprise` assumes, weighted."""
    count = len(one.residuals)
    covariance = one.expected + one.apart.covariance(shared) + MEASURED**2 * np.eye(count)
    root = np.linalg.cholesky(covariance)
    distance = float(one.residuals @ np.linalg.solve(covariance, one.residuals))
    half = (PRIOR_ANCHORS + count) / 2
    constant = math.lgamma(half) - math.lgamma(PRIOR_ANCHORS / 2) - count / 2 * math.log(PRIOR_ANCHORS * math.pi)
    logarithm = constant - float(np.sum(np.log(np.diag(root)))) - half * math.log1p(distance / PRIOR_ANCHORS)
    return one.weight * logarithm


# Steps of the search, as a factor, and how far a value may be from its start (sd of the logarithm).
_STEP, _SHARED_SD = 2**0.25, 1.0


def fit_shared(rows: Sequence[LeftOut], known: dict[tuple[str, tuple[int, ...]], float] | None = None) -> Shared:
    """What explains best the residuals of sources that were left out, by a search on a grid.

    known: likelihoods that were computed before, which folds share.
    """
    found = {} if known is None else known
    start = Shared()

    def at(powers: tuple[int, ...]) -> Shared:
        setup, kind, gpus = (_STEP**power for power in powers)
        return Shared(start.setup * setup, start.kind * kind, start.gpus * gpus)

    def value(powers: tuple[int, ...]) -> float:
        total = -0.5 * sum((power * math.log(_STEP) / _SHARED_SD) ** 2 for power in powers)
        for one in rows:
            if (one.name, powers) not in found:
                found[one.name, powers] = log_likelihood(one, at(powers))
            total += found[one.name, powers]
        return total

    powers: tuple[int, ...] = max(itertools.product((-4, 0, 4, 8), repeat=3), key=value)
    for step in (2, 1):
        before = None
        while powers != before:
            before = powers
            # All 26 neighbours: what one part loses another may gain.
            changes = itertools.product((0, step, -step), repeat=3)
            powers = max((tuple(map(sum, zip(before, change, strict=True))) for change in changes), key=value)
    return at(powers)


# --- scores ---


def score(name: str, fitted: Fitted, rows: Sequence[Row], count: int, draws: int = _DRAWS) -> Score | None:
    """Predict rows of one source given `count` of them as anchors, for several random choices of anchors.

    A cluster has one kind of GPU, so anchors are rows on the same GPU.
    """
    parts = []
    for cluster in clusters(rows) if count else [list(rows)]:
        if len(cluster) < count + 2:
            continue
        c, log_step = columns([one.setup for one in cluster]), np.log([one.step_s for one in cluster])
        random = np.random.default_rng(len(cluster))
        for _ in range(draws if count else 1):
            chosen = random.choice(len(cluster), count, replace=False)
            rest = np.setdiff1d(np.arange(len(cluster)), chosen)
            parts.append(_predicted(fitted, c, log_step, chosen, rest))
    return _score(name, count, len(rows), parts) if parts else None


def clusters(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows by kind of GPU and program."""
    found: dict[tuple[str, str], list[Row]] = {}
    for one in rows:
        found.setdefault((one.setup.gpu.name, one.setup.software.name), []).append(one)
    return list(found.values())


def _predicted(
    fitted: Fitted, c: Mapping[str, Array], log_step: Array, chosen: Indices, rest: Indices
) -> tuple[Array, Array]:
    anchors = subset(c, chosen) if len(chosen) else None
    mean, sd = predict_columns(fitted, subset(c, rest), anchors, log_step[chosen], np.full(len(chosen), MEASURED))
    return mean - log_step[rest], sd


def _score(name: str, count: int, rows: int, parts: Sequence[tuple[Array, Array]]) -> Score:
    ratios, sds = (np.concatenate(values) for values in zip(*parts, strict=True))
    return Score(
        name=name,
        anchors=count,
        rows=rows,
        errors=np.abs(np.exp(ratios) - 1),
        covered=np.abs(ratios) <= NORMAL_90 * sds,
        half_widths=np.exp(NORMAL_90 * sds) - 1,
        log_ratios=ratios,
        sds=sds,
    )


def small_to_large(
    name: str, fitted: Fitted, rows: Sequence[Row], count: int, *, advised: bool = False
) -> Score | None:
    """Predict 128 GPUs or more from anchors at 64 or fewer of the same source and GPU.

    advised: not random anchors, but for each target those that `most_telling` names.
    """
    parts, total = [], 0
    for cluster in clusters(rows):
        c, log_step = columns([one.setup for one in cluster]), np.log([one.step_s for one in cluster])
        small, large = np.flatnonzero(c["gpus"] <= 64), np.flatnonzero(c["gpus"] >= 128)
        if len(small) < max(count, 1) or not len(large):
            continue
        total += len(large)
        if advised:
            covariance = expected_covariance(fitted, c) + shared_error(fitted.shared, c, c)
            for target in large:
                chosen = most_telling(covariance, small, int(target), count)
                parts.append(_predicted(fitted, c, log_step, chosen, np.array([target])))
            continue
        random = np.random.default_rng(len(cluster))
        draws = [random.choice(small, count, replace=False) for _ in range(_DRAWS if count else 1)]
        parts += [_predicted(fitted, c, log_step, one, large) for one in draws]
    return _score(name, count, total, parts) if parts else None


def most_telling(covariance: Array, candidates: Indices, target: int, count: int) -> Indices:
    """The candidates whose measurement leaves the target the least variance, one after the other.

    covariance: of all rows before anything is measured. What was measured plays no part, as in `next_measurement`.
    """
    chosen: list[int] = []
    for _ in range(count):

        def left(one: int) -> float:
            at = [*chosen, one]
            inside = covariance[np.ix_(at, at)] + MEASURED**2 * np.eye(len(at))
            across = covariance[target, at]
            return float(covariance[target, target] - across @ np.linalg.solve(inside, across))

        chosen.append(min((int(one) for one in candidates if one not in chosen), key=left))
    return np.array(chosen)


def to_larger(fitted: Fitted, smaller: Sequence[Row], larger: Sequence[Row], count: int) -> Score | None:
    """Predict these rows from anchors drawn from smaller ones."""
    if len(smaller) < count:
        return None
    everyone = [*smaller, *larger]
    c, log_step = columns([one.setup for one in everyone]), np.log([one.step_s for one in everyone])
    rest, random = np.arange(len(smaller), len(everyone)), np.random.default_rng(len(everyone))
    draws = [random.choice(len(smaller), count, replace=False) for _ in range(_DRAWS)]
    return _score("", count, len(larger), [_predicted(fitted, c, log_step, one, rest) for one in draws])


def series_score(fits: Mapping[str, Fitted], rows: Sequence[Row]) -> Score | None:
    """Predict every larger scale of a series from its smallest, one anchor each."""
    parts, count = [], 0
    for name in dict.fromkeys(one.series for one in rows):
        mine = [one for one in rows if one.series == name]
        c, log_step = columns([one.setup for one in mine]), np.log([one.step_s for one in mine])
        rest = np.flatnonzero(c["gpus"] > c["gpus"].min())
        if len(rest):
            first = np.array([int(np.argmin(c["gpus"]))])
            parts.append(_predicted(fits[source_of(mine[0])], c, log_step, first, rest))
            count += len(rest)
    return _score("scaling series", 1, count, parts) if parts else None


def conformal(scores: Iterable[Score]) -> float:
    """The factor on the standard deviation that gives 90 % coverage on average over sources."""
    found = list(scores)

    def coverage(factor: float) -> float:
        return float(np.mean([np.mean(np.abs(one.log_ratios) <= NORMAL_90 * factor * one.sds) for one in found]))

    low, high = 0.2, 5.0
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if coverage(middle) < 0.9 else (low, middle)
    return high


def choice(name: str, fitted: Fitted, rows: Sequence[Row]) -> Choice | None:
    """Pairs ordered right and throughput lost, over groups of alternatives, with no anchor."""
    c, log_step = columns([one.setup for one in rows]), np.log([one.step_s for one in rows])
    mean, _ = _predicted(fitted, c, log_step, np.zeros(0, dtype=int), np.arange(len(rows)))
    # Seconds per token, so that alternatives may have different batches.
    tokens = np.log([one.setup.tokens_per_step for one in rows])
    measured, predicted = log_step - tokens, mean + log_step - tokens
    groups: dict[tuple[object, ...], list[int]] = {}
    for position, one in enumerate(rows):
        s = one.setup
        key = (s.shape.name, s.shape.layers, s.gpu.name, s.gpus, s.sequence_length, s.fp8, s.has_adapters)
        groups.setdefault((one.source.partition("/")[0], *key), []).append(position)
    right = pairs = 0
    regrets, randoms = [], []
    for members in groups.values():
        ours = np.array(distinct(predicted, measured, members))
        if len(ours) < 2 or np.ptp(measured[ours]) < _CLOSE:
            continue
        i, j = np.triu_indices(len(ours), 1)
        apart = np.abs(measured[ours[i]] - measured[ours[j]]) >= _CLOSE
        same = (measured[ours[i]] < measured[ours[j]]) == (predicted[ours[i]] < predicted[ours[j]])
        right, pairs = right + int(np.sum(same & apart)), pairs + int(np.sum(apart))
        lost = 1 - np.exp(measured[ours].min() - measured[ours])
        regrets.append(float(lost[int(np.argmin(predicted[ours]))]))
        randoms.append(float(np.mean(lost)))
    if not pairs:
        return None
    return Choice(name, len(regrets), pairs, right / pairs, float(np.mean(regrets)), float(np.mean(randoms)))


def distinct(predicted: Array, measured: Array, members: Sequence[int]) -> list[int]:
    """One row of each layout: versions of one program with the same layout are no alternatives. The median row."""
    same: dict[float, list[int]] = {}
    for one in members:
        same.setdefault(round(float(predicted[one]), 6), []).append(one)
    return [sorted(group, key=lambda i: measured[i])[len(group) // 2] for group in same.values()]


def largest_scale(rows: Sequence[Row]) -> Callable[[Row], str]:
    """A key that sets apart the rows with the most GPUs of each source that has several scales."""
    most: dict[str, int] = {}
    least: dict[str, int] = {}
    for one in rows:
        name = source_of(one)
        most[name] = max(most.get(name, 0), one.setup.gpus)
        least[name] = min(least.get(name, 10**9), one.setup.gpus)

    def key(one: Row) -> str:
        name = source_of(one)
        return "largest" if one.setup.gpus == most[name] and most[name] > least[name] else "rest"

    return key
