"""A choice of layout as a table, sentences and JSON: what is best, what may be equal, and which runs would decide."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from paceline.prediction import memory, stored
from paceline.prediction.choosing import Decision, Halved, Option, Timed, measuring_minutes, objective
from paceline.prediction.experiment_file import runnable
from paceline.report.tables.predicted import amount, between, number
from paceline.report.tables.predictions import INTERVAL_NOTE, variant
from paceline.report.tables.table import Cell, Column, Table, numeric
from paceline.wording import MISSING, format_duration

_GIB = 2.0**30
MOST_ROWS = 10
TWO_DAYS_S = 2 * 86400
MISSES = "1 option that fits does not meet the limits."


def tables(decision: Decision) -> tuple[Table, ...]:
    options = decision.options[:MOST_ROWS]
    if not options:
        return ()
    rows = tuple(_row(decision, one) for one in options)
    columns = [
        *([] if _machine(decision) else [Column("GPUs")]),
        Column("layout"),
        Column("micro batch", priority=6),
        numeric("tokens/s per GPU"),
        numeric("memory, GiB", 5),
        *_amount_columns(decision),
        numeric("more than the best, %", 7),
        Column("verdict"),
    ]
    machine = _machine(decision)
    where = f" on {machine}" if machine else ""
    heading = (
        f"{decision.fitting} of {decision.enumerated} variants fit{where}; the best of each layout, by {decision.by}"
    )
    if len(decision.options) > MOST_ROWS:
        heading += f" (first {MOST_ROWS} of {len(decision.options)})"
    return (Table(heading, tuple(columns), rows, (INTERVAL_NOTE,)),)


def _amount_columns(decision: Decision) -> list[Column]:
    if decision.limits.tokens is None:
        return [numeric("USD per M tokens")] if _priced(decision) else []
    return [numeric("days"), *([numeric("USD")] if _priced(decision) else [])]


def _machine(decision: Decision) -> str | None:
    """The GPUs and method of all options, if they have the same."""
    names = {_gpus(one) for one in decision.options}
    return names.pop() if len(names) == 1 else None


def _gpus(option: Option) -> str:
    s = option.prediction.setup
    return f"{s.gpus} x {s.gpu.name}{' QLoRA' if s.quantised else ' LoRA' if s.has_adapters else ''}"


def _priced(decision: Decision) -> bool:
    return all(one.usd_per_gpu_hour is not None for one in decision.options)


def _row(decision: Decision, option: Option) -> tuple[Cell, ...]:
    one, limits = option.prediction, decision.limits
    s = one.setup
    rate = s.tokens_per_step / s.gpus
    cells = [
        *([] if _machine(decision) else [Cell(_gpus(option))]),
        Cell(s.layout),
        Cell(f"{s.micro_batch} x {s.micro_batches:g}", "" if s.checkpointing == "none" else s.checkpointing),
        between(rate / one.step_s, rate / one.high_s, rate / one.low_s),
        Cell(number(memory.total(s) / _GIB)),
    ]
    seconds, usd = option.seconds(limits), option.usd(limits)
    if seconds is not None:
        cells.append(_ranged(seconds / 86400, option))
        cells += [_ranged(usd, option)] if usd is not None and _priced(decision) else []
    elif _priced(decision):
        cells.append(_ranged(one.usd_for(1e6, option.usd_per_gpu_hour or 0.0), option))
    assert decision.best is not None
    more = objective(option, decision.by) / objective(decision.best, decision.by) - 1
    cells += [Cell(f"{100 * max(more, 0.0):.0f}"), _verdict(decision, option)]
    return tuple(cells)


def _ranged(value: float, option: Option) -> Cell:
    one = option.prediction
    return between(value, value * one.low_s / one.step_s, value * one.high_s / one.step_s)


def _verdict(decision: Decision, option: Option) -> Cell:
    risky = " (may miss the limit)" if option.may_miss(decision.limits) else ""
    measured = "measured: " if option.prediction.measured_by else ""
    if option is decision.best:
        return Cell(f"{measured}best{risky}", "", "good")
    same = "equal" if measured else "may be equal"
    return Cell(f"{measured}{same if option in decision.close else 'worse'}{risky}")


def lines(decision: Decision, predicted: Decision, halved: Halved | None, files: Sequence[Path]) -> Iterable[str]:
    """The recommendation, with the predictions and runs that it rests on. predicted: the decision before any run."""
    if decision.best is None:
        why = sorted({reason for _, reason in decision.refused})
        yield f"No option meets the limits: all {len(decision.refused)} are {' or '.join(why)}."
        nearest = min(decision.refused, key=lambda pair: objective(pair[0], decision.by))[0]
        yield f"The nearest is {name(nearest)}: {result(decision, nearest)}."
        return
    if halved is not None:
        yield from _measured_lines(decision, predicted, halved)
    if halved is None or halved.best is None:
        yield f"Recommendation (predicted, nothing measured): {name(decision.best)}: {result(decision, decision.best)}."
    if missing := len(decision.refused):
        yield f"{missing} options that fit do not meet the limits." if missing > 1 else MISSES
    if halved is None:
        yield from _proposal_lines(decision)
    if files:
        yield f"Experiment files: {', '.join(map(str, files))}."
    reason = runnable(decision.best.prediction.setup)
    if reason is not None:
        yield f"{reason}: no experiment file for {decision.best.prediction.setup.layout}."


def _proposal_lines(decision: Decision) -> Iterable[str]:
    if not decision.to_measure:
        same = "what may be equal is predicted equal and differs only in how it shards"
        none = "no other option is within what prediction can tell apart"
        yield f"Nothing to measure: {same if decision.close else none}."
        return
    minutes = sum(measuring_minutes(one) for one in decision.to_measure)
    machine = _machine(decision)
    names = "; ".join(variant(one.prediction.setup) if machine else name(one) for one in decision.to_measure)
    where = f" on {machine}" if machine else ""
    cost = f"{number(minutes)} GPU minutes at most"
    yield (
        f"{len(decision.close)} more may be equal. Worth measuring{where} ({cost}): {names}. "
        "`--measure` runs those that Paceline can run."
    )


def _measured_lines(decision: Decision, predicted: Decision, halved: Halved) -> Iterable[str]:
    for index, one in enumerate(halved.rounds, 1):
        texts = ", ".join(f"{_short(timed)} {number(timed.step_s)} s" for timed in one.measured)
        yield f"Round {index}, {one.steps} steps each: {texts}; kept {len(one.kept)} of {len(one.measured)}."
    if halved.failed:
        failed = ", ".join(f"{one.layout} (micro batch {one.micro_batch})" for one in halved.failed)
        yield f"Did not run or was not certified, so it is out: {failed}."
    if halved.best is None or decision.best is None:
        return
    keys = {stored.key(one) for one in halved.equal}
    equal = [one for one in decision.close if stored.key(one.prediction.setup) in keys]
    same = f"; equal within 1 %: {', '.join(name(one) for one in equal)}" if equal else ""
    yield f"Recommendation (measured): {name(decision.best)}: {result(decision, decision.best)}{same}."
    yield f"It rests on run {halved.longest[stored.key(halved.best)].run}{_others(halved)}."
    yield from _predicted_lines(predicted, halved)


def _short(timed: Timed) -> str:
    return f"{timed.setup.layout} (micro batch {timed.setup.micro_batch})"


def _others(halved: Halved) -> str:
    assert halved.best is not None
    best = stored.key(halved.best)
    runs = [timed.run for key, timed in halved.longest.items() if key != best]
    return f", compared with {', '.join(runs)}" if runs else ""


def _predicted_lines(predicted: Decision, halved: Halved) -> Iterable[str]:
    """What was predicted before the runs, beside what they measured."""
    texts = []
    for option in predicted.options:
        one = option.prediction
        timed = halved.longest.get(stored.key(one.setup))
        if timed is not None:
            inside = "inside" if one.low_s <= timed.step_s <= one.high_s else "outside"
            span = f"{number(one.low_s)} to {number(one.high_s)} s"
            texts.append(f"{_short(timed)} {number(one.step_s)} s ({span}; measured {inside})")
    if texts:
        yield f"Predicted before the runs: {', '.join(texts)}."


def memory_line(option: Option, peak_bytes: int | None, reason: str) -> str:
    """Where the memory of an option comes from, in a sentence."""
    s = option.prediction.setup
    usable = memory.usable_bytes(s)
    of = "" if usable is None else f" of {number(usable / _GIB)} GiB usable"
    if peak_bytes is None:
        return f"Memory of {s.layout}: {number(memory.total(s) / _GIB)} GiB{of}, by arithmetic ({reason})."
    verdict = "" if memory.fits(s, peak_bytes=peak_bytes) else ": it does not fit and is no option"
    how = f"rehearsed with the real program (arithmetic says {number(memory.total(s) / _GIB)})"
    return f"Memory of {s.layout}: {number(peak_bytes / _GIB)} GiB{of}, {how}{verdict}."


def name(option: Option) -> str:
    s = option.prediction.setup
    method = "QLoRA, " if s.quantised else "LoRA, " if s.has_adapters else ""
    return f"{s.gpus} x {s.gpu.name}, {method}{variant(s)}"


def result(decision: Decision, option: Option) -> str:
    """What to expect of an option, in words."""
    one, limits = option.prediction, decision.limits
    s = one.setup
    texts = [f"{number(one.tokens_per_s)} tokens/s ({number(s.tokens_per_step / one.high_s)} to "
             f"{number(s.tokens_per_step / one.low_s)})"]  # fmt: skip
    seconds, usd = option.seconds(limits), option.usd(limits)
    if seconds is not None and limits.tokens is not None:
        long = f"{number(seconds / 86400)} days" if seconds >= TWO_DAYS_S else format_duration(seconds)
        texts.append(f"{amount(limits.tokens)} tokens in {long}")
    if usd is not None:
        texts.append(f"{number(usd)} USD at {option.usd_per_gpu_hour:g} USD per GPU-hour")
    return ", ".join(texts)


def to_dict(
    decision: Decision,
    predicted: Decision,
    halved: Halved | None,
    files: Sequence[Path],
    memory_lines: Sequence[str] = (),
) -> dict[str, Any]:
    def row(option: Option) -> dict[str, Any]:
        return {
            **stored.to_dict(option.prediction, decision.limits.tokens, option.usd_per_gpu_hour),
            "verdict": _verdict(decision, option).text if decision.best else MISSING,
            "run": option.prediction.measured_by,
        }

    return {
        "by": decision.by,
        "enumerated": decision.enumerated,
        "fitting": decision.fitting,
        "options": [row(one) for one in decision.options],
        "refused": [{**row(one), "verdict": why} for one, why in decision.refused[:MOST_ROWS]],
        "to_measure": [stored.key(one.prediction.setup) for one in decision.to_measure],
        "rounds": [] if halved is None else [
            {"steps": one.steps, "measured": [_measured_row(timed) for timed in one.measured]} for one in halved.rounds
        ],
        "measured_best": None if halved is None or halved.best is None else halved.best.layout,
        "files": [str(path) for path in files],
        "recommendation": list(lines(decision, predicted, halved, files)),
        "memory": list(memory_lines),
    }  # fmt: skip


def _measured_row(timed: Timed) -> dict[str, Any]:
    s = timed.setup
    return {
        "key": stored.key(s),
        "layout": s.layout,
        "micro_batch": s.micro_batch,
        "step_time_s": timed.step_s,
        "run": timed.run,
    }
