"""How good the predictions are on rows that the fit did not see: error, coverage, half-width, pairs and regret.

A fold leaves out all rows of one source, of one kind of GPU, or of the largest scale of each source, fits the rest, and
predicts what was left out from no anchor, one, or four rows of the source that was left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.prediction import fitting, parameters
from paceline.prediction.offsets import MEASURED, NORMAL_90, predict_columns, subset
from paceline.prediction.parameters import Fitted
from paceline.prediction.published import Row
from paceline.prediction.step_time import Array, columns

Indices = NDArray[np.signedinteger[Any]]

ANCHORS = (0, 1, 4)
# vtrain-single is affine in its micro batches and layers to 1e-5, so probably composed from profiles.
MOST_ROWS = {"vtrain-single": 30.0}
EVERY = {"vtrain-single": 20}
# Two revisions of one benchmark page, and the programs of one collection, are one source when one is left out.
SAME_SOURCE = {"llm-foundry-superseded": "llm-foundry", "dgxc/maxtext": "dgxc", "dgxc/paxml": "dgxc"}
_DRAWS = 6
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


def small_to_large(name: str, fitted: Fitted, rows: Sequence[Row], count: int) -> Score | None:
    """Predict 128 GPUs or more from anchors at 64 or fewer of the same source and GPU."""
    parts, total = [], 0
    for cluster in clusters(rows):
        c, log_step = columns([one.setup for one in cluster]), np.log([one.step_s for one in cluster])
        small, large = np.flatnonzero(c["gpus"] <= 64), np.flatnonzero(c["gpus"] >= 128)
        if len(small) < max(count, 1) or not len(large):
            continue
        random, total = np.random.default_rng(len(cluster)), total + len(large)
        draws = [random.choice(small, count, replace=False) for _ in range(_DRAWS if count else 1)]
        parts += [_predicted(fitted, c, log_step, one, large) for one in draws]
    return _score(name, count, total, parts) if parts else None


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
