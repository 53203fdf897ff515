"""Strategies that change the arithmetic on purpose, beside an exact one, and precisions beside bf16: bytes, speed and
loss, each with its spread.

Such runs are not equal work, so speed alone says nothing. Runs of one seed see the same data from the same weights;
their losses are compared pair by pair, and the spread of these pairs over seeds decides whether a difference counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.analysis.compare.cells import key_without
from paceline.analysis.findings import BETTER, EQUAL, HIGHER, INCONCLUSIVE, WORSE, LossTrace, Relative, Tradeoff
from paceline.analysis.findings.tradeoffs import UNSTABLE
from paceline.analysis.grouping import grouped
from paceline.analysis.statistics.intervals import Array, Ratio
from paceline.analysis.statistics.verdict import ONE_LAUNCH, verdict_of
from paceline.analysis.training import metrics
from paceline.analysis.training.metrics import Cell
from paceline.analysis.training.window import STEP_COLUMNS, Window, step_table
from paceline.experiment import plugins
from paceline.experiment.choices import Choice
from paceline.wording import short_count, speed_clause

# Fields in which a strategy may differ from its baseline, and those over which pairs are formed.
VARIES = ("strategy", "training.accumulation", "seed")
# The loss at the end of a run is the mean over this share of its steps, and over this many at least.
TAIL_SHARE, TAIL_STEPS = 0.1, 5
# Losses are far less noisy than speeds: pairs of one seed see the same data.
EQUAL_LOSS = 0.005
ONE_SEED = "one seed cannot show how much the loss varies; use at least 3 (--set 'seed=[42,43,44]')"
LONGEST_TRACE = 120
PRECISION, GATHERED = "precision", "float8_all_gather"
# What the others are compared with: the first that ran.
BASELINES = ("bf16", "fp16", "fp32", "tf32")
_SCALED = "linear layers in 8 bit, one scale per {}"
MEANING: Mapping[str, str] = {
    "fp32": "products in fp32",
    "tf32": "fp32 values, products in TF32",
    "bf16": "products in bf16",
    "fp16": "products in fp16, scaled loss",
    "float8": _SCALED.format("tensor"),
    "float8_rowwise": _SCALED.format("row"),
    "float8_rowwise_gw_hp": f"{_SCALED.format('row')}, gradients of weights in bf16",
    "mxfp8": _SCALED.format("32 values"),
}


@dataclass(frozen=True, slots=True)
class Curve:
    """Loss of each step of one run, and the tokens and seconds up to its end.

    A step of the warm-up counts as long as the median measured one: else the compiler's time, which a long training
    hardly notices, would decide a comparison of short ones.
    """

    tokens: Array
    seconds: Array
    losses: Array

    @classmethod
    def of(cls, window: Window) -> Curve:
        table = step_table(window.record)
        usual, measured = float(np.median(window.seconds)), {*window.measured}
        durations = zip(table.steps, table.by_step("duration_s"), strict=True)
        slowest = [max(each) if step in measured else usual for step, each in durations]
        tokens = [sum(each) for each in table.by_step("tokens")]
        return cls(np.cumsum(tokens), np.cumsum(slowest), table.losses)

    def final(self, until_s: float = math.inf) -> float | None:
        """Mean loss of the last steps that ended by then; None before the first few."""
        tail = max(TAIL_STEPS, round(TAIL_SHARE * len(self.losses)))
        done = int(np.searchsorted(self.seconds, until_s, side="right"))
        return float(self.losses[done - tail : done].mean()) if done >= tail else None


def analyse(cells: Sequence[Cell], unstable: Collection[str] = ()) -> tuple[Tradeoff, ...]:
    """One row per strategy that declares other arithmetic, for each setting in which an exact one ran too, and one per
    precision, for each setting in which several ran. unstable: runs whose loss depends on rounding."""
    trained = [cell for cell in cells if not cell.spec.script]
    return (*_strategies(trained, unstable), *_precisions(trained, unstable))


def _strategies(trained: Sequence[Cell], unstable: Collection[str]) -> list[Tradeoff]:
    found: list[Tradeoff] = []
    for members in grouped(trained, _setting).values():
        by_strategy = grouped(members, lambda cell: str(cell.spec.strategy_text))
        exact = {name: own for name, own in by_strategy.items() if own[0].spec.approximation is None}
        others = {name: own for name, own in by_strategy.items() if name not in exact}
        if exact and others:
            baseline = "ddp" if "ddp" in exact else max(exact, key=lambda name: _speed(exact[name]))
            sure = exact[baseline]
            rows = (_tradeoff(name, own, baseline, sure, len(others), unstable) for name, own in others.items())
            found += [row for row in rows if row is not None]
    return sorted(found, key=lambda row: (float(str(row.axes.get("network_mbit") or 0)), row.strategy))


def _precisions(trained: Sequence[Cell], unstable: Collection[str]) -> list[Tradeoff]:
    found: list[Tradeoff] = []
    for members in grouped(trained, _setting_but_precision).values():
        by_name = grouped(members, _precision_name)
        baseline = next((name for name in BASELINES if name in by_name), None)
        if baseline is not None:
            others = {name: own for name, own in by_name.items() if name != baseline}
            exact = by_name[baseline]
            rows = (
                _tradeoff(name, own, baseline, exact, len(others), unstable, PRECISION) for name, own in others.items()
            )
            found += [row for row in rows if row is not None]
    return found


def _setting_but_precision(cell: Cell) -> str:
    """Equal for cells that differ in precision and seed only; gathering in float8 is a part of the precision."""
    strategy, fields = cell.spec.strategy, ("strategy", "seed", "training.precision.compute")
    options = {key: value for key, value in strategy.options.items() if key != GATHERED} if strategy else {}
    text = str(plugins.canonical("strategies", Choice(strategy.name, options))) if strategy else None
    return key_without(cell, fields, strategy=str(text))


def _precision_name(cell: Cell) -> str:
    """`float8`, `float8 with float8_all_gather`."""
    strategy, name = cell.spec.strategy, cell.spec.training.precision.compute
    return f"{name} with {GATHERED}" if strategy and strategy.options.get(GATHERED) else name


def _setting(cell: Cell) -> str:
    """Equal for cells that differ in strategy and seed only."""
    return key_without(cell, VARIES, approximation=None, global_batch=cell.spec.global_batch)


def _speed(cells: Iterable[Cell]) -> float:
    return statistics.fmean(found.value for cell in cells if (found := metrics.estimate(cell, "tokens_per_s")))


def _tradeoff(
    name: str,
    cells: Sequence[Cell],
    baseline: str,
    exact: Sequence[Cell],
    family: int,
    unstable: Collection[str],
    axis: str = "strategy",
) -> Tradeoff | None:
    runs = {_pair_of(window): window for cell in cells for window in cell.windows}
    known = {_pair_of(window): window for cell in exact for window in cell.windows}
    pairs = {key: (runs[key], known[key]) for key in runs if key in known}
    if not pairs:
        return None
    curves = {key: (Curve.of(own), Curve.of(other)) for key, (own, other) in pairs.items()}
    loss = _over_seeds(curves, lambda own, other: _quotient(own.final(), other.final()))
    if loss is None:
        return None
    spec, shared = cells[0].spec, cells[0].spec.topology.device == "cuda" and cells[0].shared_gpu
    speed = None if shared else _ratio([_rate(own) / _rate(other) for own, other in pairs.values()])
    judged_speed = None if speed is None else _relative(speed, *verdict_of(speed, HIGHER, family))
    judged_loss = _relative(loss, *loss_verdict(loss, family))
    timely = None if shared else _over_seeds(curves, _loss_in_time)
    judged_time = None if timely is None else _relative(timely, *loss_verdict(timely, family))
    if any(window.run in unstable for pair in pairs.values() for window in pair):
        judged_loss = replace(judged_loss, verdict=INCONCLUSIVE, reason=UNSTABLE)
        judged_time = judged_time and replace(judged_time, verdict=INCONCLUSIVE, reason=UNSTABLE)
    sent = [_sent(each) if axis != PRECISION or GATHERED in name else None for each in (cells, exact)]
    first_own, first_other = curves[min(curves)]
    tokens = int(first_own.tokens[-1])
    text = sentence(name, baseline, sent, judged_speed, judged_loss, judged_time, tokens, spec.axes())
    return Tradeoff(
        strategy=name,
        baseline=baseline,
        approximation=MEANING[spec.training.precision.compute] if axis == PRECISION else spec.approximation or "",
        cells=tuple(cell.id for cell in cells),
        axes={key: value for key, value in cells[0].axes.items() if key not in ("seed", axis)},
        seeds=len({seed for seed, _ in pairs}),
        pairs=len(pairs),
        steps=len(first_own.losses),
        tokens=tokens,
        wire_bytes=sent[0],
        baseline_wire_bytes=sent[1],
        speed=judged_speed,
        loss=judged_loss,
        loss_in_time=judged_time,
        text=text,
        runs=tuple(window.run for pair in pairs.values() for window in pair),
        axis=axis,
        traces=(_trace(name, first_own), _trace(baseline, first_other)),
    )


def _pair_of(window: Window) -> tuple[int, int]:
    return window.record.spec.seed, window.record.spec.repeat


def _rate(window: Window) -> float:
    """Tokens per second of the measured steps."""
    steps = window.steps
    tokens, wall = (float(steps[:, STEP_COLUMNS.index(name)].sum()) for name in ("tokens", "wall"))
    return tokens / wall


def _sent(cells: Sequence[Cell]) -> float | None:
    known = [found.value for cell in cells if (found := metrics.estimate(cell, "wire_bytes_per_step"))]
    return statistics.fmean(known) if known else None


def _quotient(over: float | None, under: float | None) -> float | None:
    return over / under if over and under else None


def _loss_in_time(own: Curve, other: Curve) -> float | None:
    """The ratio of losses at the moment at which the faster run has ended."""
    until = min(own.seconds[-1], other.seconds[-1])
    return _quotient(own.final(until), other.final(until))


def _over_seeds(
    curves: Mapping[tuple[int, int], tuple[Curve, Curve]], ratio: Callable[[Curve, Curve], float | None]
) -> Ratio | None:
    """The mean ratio; repeats of one seed see the same data, so each seed counts once."""
    by_seed = grouped(curves, lambda key: key[0])
    found = []
    for keys in by_seed.values():
        known = [value for key in keys if (value := ratio(*curves[key])) is not None]
        if known:
            found.append(math.exp(statistics.fmean(map(math.log, known))))
    return _ratio(found) if found else None


def _ratio(pairs: Sequence[float]) -> Ratio:
    """The geometric mean of paired ratios, with the spread of the pairs.

    >>> round(_ratio([1.0, 1.21]).value, 2), _ratio([1.0, 1.21]).launches
    (1.1, 2)
    """
    logs = [*map(math.log, pairs)]
    value, count = math.exp(statistics.fmean(logs)), len(logs)
    error = statistics.stdev(logs) / math.sqrt(count) if count > 1 else 0.0
    return Ratio(value, error, max(count - 1, 1), count)


def loss_verdict(ratio: Ratio, family: int = 1) -> tuple[str, str]:
    """Verdict about the loss of the numerator, one of `family` comparisons: any difference beyond the spread counts.

    >>> loss_verdict(Ratio(1.004, error=0.003, freedom=2, launches=3))
    ('inconclusive', '95 % interval -0.9 % to +1.7 %')
    """
    if ratio.launches is not None and ratio.launches < 2:
        return INCONCLUSIVE, ONE_SEED
    low, high = ratio.interval(family)
    interval = f"95 % interval {percent(low)} to {percent(high)}"
    if low >= 1 - EQUAL_LOSS and high <= 1 + EQUAL_LOSS:
        return EQUAL, f"within {EQUAL_LOSS:.1%}; {interval}"
    if low <= 1 <= high:
        return INCONCLUSIVE, interval
    return (BETTER if ratio.value < 1 else WORSE), interval


def _relative(ratio: Ratio, verdict: str, reason: str) -> Relative:
    is_one = ratio.launches == 1
    reason = ONE_LAUNCH if is_one and not reason else reason
    low, high = (None, None) if is_one else (ratio.low, ratio.high)
    return Relative(value=ratio.value, low=low, high=high, verdict=verdict, reason=reason)


def _trace(series: str, curve: Curve) -> LossTrace:
    count = len(curve.losses)
    chosen = np.linspace(0, count - 1, min(count, LONGEST_TRACE)).round().astype(int)
    return LossTrace(
        series=series,
        tokens=tuple(int(x) for x in curve.tokens[chosen]),
        seconds=tuple(float(x) for x in curve.seconds[chosen]),
        losses=tuple(float(x) for x in curve.losses[chosen]),
    )


# --- in words ---


def sentence(
    name: str,
    baseline: str,
    sent: Sequence[float | None],
    speed: Relative | None,
    loss: Relative,
    timely: Relative | None,
    tokens: int,
    axes: Mapping[str, object],
) -> str:
    """`powersgd: 31 times fewer bytes than ddp, 80 % faster at 1,000 Mbit/s, loss +0.4 % after 41K
    tokens (inconclusive), -3.1 % after the same time (lower).`"""
    own, other = sent
    parts = []
    if own and other:
        parts.append(f"{bytes_words(own, other)} than {baseline}")
    where = f" at {mbit:,g} Mbit/s" if isinstance(mbit := axes.get("network_mbit"), int | float) else ""
    if speed is not None:
        than = "" if parts else baseline
        parts.append(f"{speed_clause(speed.verdict, speed.value, than)}{where}")
    after = f"after {short_count(tokens)} tokens"
    parts.append(f"loss {percent(loss.value)} {after} ({loss.loss_word})")
    if timely is not None:
        parts.append(f"{percent(timely.value)} after the same time ({timely.loss_word})")
    return f"{name}: {', '.join(parts)}."


def bytes_words(own: float, other: float) -> str:
    """
    >>> bytes_words(1.0, 4.0), bytes_words(3.0, 2.0), bytes_words(1.0, 1.0)
    ('4 times fewer bytes', '1.5 times as many bytes', '1 times as many bytes')
    """
    return f"{other / own:.3g} times fewer bytes" if own < other else f"{own / other:.3g} times as many bytes"


def percent(ratio: float) -> str:
    """
    >>> percent(1.004), percent(0.97)
    ('+0.4 %', '-3.0 %')
    """
    return f"{round((ratio - 1) * 100, 1) + 0.0:+.1f} %"
