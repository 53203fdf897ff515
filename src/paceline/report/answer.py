"""The answer in two sentences: a recommendation if runs were ranked, otherwise what the machine can do.

The first names the winner and its margin, or says that there is none. The second says what was left out and why, or
the next most useful fact. Both come from findings alone: nothing is called better without a comparison.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from paceline.analysis.findings import BETTER, EQUAL, WORSE, Comparison, Recommendation, Report
from paceline.analysis.findings.cell_axes import axis_text, describe
from paceline.analysis.findings.training import UNDECIDED
from paceline.report.tables import (
    accuracy,
    ceilings,
    claims,
    effects,
    fabric,
    finetuning,
    memory,
    nodes,
    paired,
    served,
    tradeoffs,
)
from paceline.report.tables.table import NO_ANSWER, first_sentence, proof_runs_text, trains
from paceline.report.text.cells import THROUGHPUT, axes_of, ranked_cells, short_models, turned, unranked, varying_axes
from paceline.wording import equal_sentence, listed, margin_sentence, undecided_parts, within_words

# Sentences of a report about the machine; each is empty if the report has no such runs.
MACHINE_SENTENCES: tuple[Callable[[Report], str], ...] = (
    served.sentence,
    lambda report: " ".join(filter(None, (accuracy.sentence(report), paired.sentence(report)))),
    nodes.sentence,
    fabric.sentence,
    memory.sentence,
    ceilings.sentence,
    claims.sentence,
)
# A reader must not miss these, whatever else there is to say.
_URGENT = ("Data arrived corrupted", "Failed", "Suspect", "Inconclusive, test")
_MEMORY = "peak_memory_bytes"
# How to name the end of a cell without a valid run: singular and plural.
_ENDS = {
    "oom": ("does not fit", "do not fit"),
    "invalid": ("is invalid, its work not proved equal", "are invalid, their work not proved equal"),
    "unsupported": ("is not supported here", "are not supported here"),
    "timeout": ("ran out of time", "ran out of time"),
    "hang": ("hung", "hung"),
    "preempted": ("was preempted", "were preempted"),
    "not certified": ("is not certified", "are not certified"),
    "not measured": ("left no measured step", "left no measured step"),
}
_FAILED, _UNSUPPORTED = ("failed", "failed"), "unsupported"
_MOST_NAMED = 4


def headline(report: Report) -> Recommendation | None:
    """The recommendation with the most runs, preferably about throughput."""
    speed = [r for r in report.recommendations if r.metric == THROUGHPUT]
    return max(speed or report.recommendations, key=lambda r: len(r.runs), default=None)


def answer(report: Report) -> tuple[str, str]:
    """The two sentences; the second may be empty. A designed experiment answers with its effects."""
    if designed := effects.sentences(report):
        return designed[:2]
    if report.tradeoffs:
        traded = [row.text for row in tradeoffs.best_first(report)]
        return traded[0], traded[1] if len(traded) > 1 else ""
    found = headline(report)
    if found is not None:
        first = first_sentence(found.text)[0]
        if found.metric in (THROUGHPUT, _MEMORY):
            text = f"{outcome(report, found, _where(report, found))}."
            first = " ".join(filter(None, (text, _rates(report, found))))
        return first, _beside(report, found)
    first, *others = _without_choice(report)
    return first, others[0] if others else ""


def grounds(report: Report) -> str:
    """The evidence and the group behind the answer; for a machine, the sentences the answer left out."""
    if designed := effects.sentences(report):
        return designed[2]
    found = headline(report)
    if found is None:
        return " ".join(_without_choice(report)[2:])
    why = found.text.partition(" Also measured: ")[2]
    parts = (why and f"Also measured: {why}", f"Measured on {found.group}." if found.group else "")
    return " ".join(filter(None, parts))


def recommendation_lines(report: Report) -> list[str]:
    """Every recommendation by group: its sentences, then its caveats and what was not measured, each once."""
    lines: list[str] = []
    by_group: dict[tuple[str, str], list[Recommendation]] = {}
    for r in report.recommendations:
        by_group.setdefault((r.group_key, r.group), []).append(r)
    for (_, title), ours in by_group.items():
        lines += [title, *(f"  {r.category}: {r.text}" for r in ours)]
        lines += dict.fromkeys(f"  caveat: {caveat}" for r in ours for caveat in r.caveats)
        lines += dict.fromkeys(f"  not measured: {'; '.join(r.not_measured)}" for r in ours if r.not_measured)
    return lines or [part for part in (*answer(report), grounds(report)) if part]


def brief_lines(report: Report) -> list[str]:
    """Sentences that must not be missed beside the headline and the table."""
    return [sentence for sentence in answer(report) if sentence.startswith(_URGENT)]


# --- the first sentence ---


def _rates(report: Report, found: Recommendation) -> str:
    """`DDP: 880 tokens/s.` for the chosen strategies of a fine-tuning experiment; empty for others."""
    by_cell = finetuning.rates(report)
    cells = {name: cell for c in found.because for name, cell in ((c.label, c.cell), (c.other_label, c.other))}
    rates = [f"{name}: {by_cell[cells[name]]}" for name in found.choose if cells.get(name) in by_cell]
    return f"{'; '.join(rates)}." if rates else ""


def outcome(report: Report, found: Recommendation, where: str = "", *, brief: bool = False) -> str:
    """The winner and its margin; if several lead, whether they are equal or the data is inconclusive. Without its full
    stop. brief: without intervals, and without naming more than a few leaders."""
    versus = found.decisive
    many = brief and len(found.choose) >= _MOST_NAMED
    names = f"{len(found.choose)} strategies" if many else listed(found.choose)
    if versus is not None and len(found.choose) == 1:
        return _margin(versus, where, brief=brief)
    axes = found.because[0].axes if found.because else None
    ties = [
        c
        for c in report.comparisons
        if c.metric == found.metric and {c.label, c.other_label} <= {*found.choose} and axes in (None, c.axes)
    ]
    are_equal = bool(ties) and all(c.verdict == EQUAL for c in ties)
    if versus is not None:
        winner = versus.label if versus.verdict == BETTER else versus.other_label
        others = [name for name in found.choose if name != winner]
        also = f"{len(others)} others" if many else listed(others)
        parts = [f"inconclusive against {also}", *(() if brief else _unseen(ties))]
        if are_equal:
            parts = [
                f"equal to {also}" if brief else f"equal to {also} ({within_words((c.low, c.high) for c in ties)})"
            ]
        return "; ".join((_margin(versus, where, brief=brief), *parts))
    if are_equal:
        return equal_sentence(f"{names}{where}", ((c.low, c.high) for c in ties))
    if any(c.launches == 1 for c in ties):
        from paceline.analysis.statistics.verdict import ONE_LAUNCH

        return f"No verdict on {names}{where}: {ONE_LAUNCH}"
    return "; ".join((f"Inconclusive: {names}{where}", *_unseen(ties)))


def _unseen(ties: Sequence[Comparison]) -> list[str]:
    """What these could have shown, and how many launches would decide the least certain of them."""
    widest = max(ties, key=lambda c: c.detectable_ratio or 0.0, default=None)
    return [] if widest is None else undecided_parts(widest.detectable_ratio, widest.launches_needed)


def _margin(versus: Comparison, where: str = "", *, brief: bool = False) -> str:
    """`FSDP2 is 34 % faster than ZeRO-3 on 4 GPUs (95 % interval 31 to 37 %)`, from the winner's side. The level of the
    proof of equal work is the last clause, except of a brief one, whose headline ends in it."""
    c = turned(versus) if versus.verdict == WORSE else versus
    text = margin_sentence(c.metric, c.label, f"{c.other_label}{where}", c.ratio, c.low, c.high, interval=not brief)
    return f"{text}; {level_clause(c.level)}" if c.level and not brief else text


def level_clause(level: str) -> str:
    return f"equal work: {level}"


def _where(report: Report, found: Recommendation) -> str:
    """The world size; the model and the kind of device too if the report has several."""
    axes = found.because[0].axes if found.because else {}
    runs = [run for run in report.runs if run.is_certified and not run.proves_only]
    model = axes.get("model") if len({run.axes.get("model") for run in runs}) > 1 else None
    kinds = {run.device_name for run in runs if run.device_name and run.run in found.runs}
    size = axis_text("world_size", axes) if axes.get("world_size") else None
    several = len({run.device_name for run in runs if run.device_name}) > 1
    device = f" ({', '.join(sorted(kinds))})" if several and kinds else ""
    return (f" with {model}" if model else "") + (f" on {size}{device}" if size else "")


# --- the second ---


def _beside(report: Report, found: Recommendation) -> str:
    """The first that applies: uneven throttling, what was left out, the least memory, what limits the winner, the
    largest difference."""
    cited = (found.decisive,) if found.decisive else found.because
    for c in cited:
        if c.throttled:
            # A speed limited by heat or a power cap says little about the strategy.
            a, b = c.throttled
            share = f"{a:.0%} of the steps of {c.label} and {b:.0%} of those of {c.other_label}"
            return (
                f"GPUs were throttled in {share}: that may {'be part of the' if c.is_decided else 'hide a'} difference."
            )
    if found.left_out:
        return _endings((cell.status, cell.name) for cell in found.left_out)
    ours = [r for r in report.recommendations if (r.group_key, r.group) == (found.group_key, found.group)]
    lean = next((r for r in ours if r.metric == _MEMORY), None)
    if lean is not None and lean is not found and lean.decisive:
        return ("Peak memory: " if len(lean.choose) > 1 else "") + f"{outcome(report, lean)}."
    if bottleneck := _bottleneck(report, found):
        return bottleneck
    decided = [c for c in found.because if c.is_decided and c.metric in (THROUGHPUT, _MEMORY)]
    widest = max(decided, key=lambda c: abs(math.log(c.ratio)), default=None)
    return f"{_margin(widest)}." if widest is not None and widest is not found.decisive else ""


def _bottleneck(report: Report, found: Recommendation) -> str:
    """What limits the winner, or the first of several leaders; empty if the evidence is inconclusive."""
    versus = found.decisive or next(iter(found.because), None)
    winner = turned(versus) if versus and versus.verdict == WORSE else versus
    verdict = next((b for b in report.bottlenecks if winner and b.cell == winner.cell), None)
    if winner is None or verdict is None or verdict.kind == UNDECIDED:
        return ""
    name = winner.label
    if verdict.share_ratio is not None:
        return f"{name} waits most for {verdict.kind}, {100 * verdict.share_ratio:.0f} % of its step or more."
    kinds = verdict.kind.removeprefix("between ").replace(" and ", " or ")
    return f"{name} waits most for {kinds}; this data cannot say which."


def _endings_of(report: Report, listed_already: bool) -> str:
    """For a report without a recommendation: what was measured, unless listed already, and how the rest ended."""
    named = varying_axes(report)
    left = [
        (u.status, _bracketed(u.label)) for u in unranked(report) if not u.label.startswith(("reference", "proof on "))
    ]
    ended = _endings(left)
    if listed_already or not (cells := ranked_cells(report)):
        return ended
    models = short_models(run.axes.get("model") for run in report.runs)
    found = [axes_of(report, cell) or {} for cell in cells]
    brief = [{**axes, "model": models.get(axes.get("model"))} for axes in found]
    measured = [_bracketed(describe(axes, named)) for axes in brief]
    start = f"Measured: {listed(_named(measured))}"
    return f"{start}; {ended}" if ended else f"{start}."


def _endings(left: Iterable[tuple[str, str]]) -> str:
    """`DDP does not fit; ZeRO-1 and ZeRO-2 failed.`"""
    by_status: dict[str, dict[str, None]] = {}
    for status, name in left:
        by_status.setdefault(status, {})[name] = None
    parts = [
        f"{listed(_named(list(names)))} {_ENDS.get(status, _FAILED)[len(names) > 1]}"
        for status, names in by_status.items()
    ]
    return f"{'; '.join(parts)}." if parts else ""


def _bracketed(label: str) -> str:
    """`ddp (gpt-tiny, 2 processes)`: a list of such names can be read."""
    name, comma, where = label.partition(", ")
    return f"{name} ({where})" if comma else name


def _named(names: Sequence[str]) -> list[str]:
    rest = len(names) - _MOST_NAMED
    return [*names[:_MOST_NAMED], f"{rest} more"] if rest > 0 else list(names)


# --- a report that chooses nothing ---


def _without_choice(report: Report) -> list[str]:
    """All sentences: first about training, then about the machine and about claims of others; urgent ones are early."""
    subjects = [re.split(r"(?<=\.) (?=[A-Z0-9])", text) for say in MACHINE_SENTENCES if (text := say(report))]
    # One sentence of each subject first, then the others; urgent ones come second at the latest.
    machine = [*(s[0] for s in subjects), *(sentence for s in subjects for sentence in s[1:])]
    lead = machine[:1]
    machine.sort(key=lambda sentence: 0 if sentence is lead[0] else 1 if sentence.startswith(_URGENT) else 2)
    if machine and not trains(report):
        return machine
    tuned = finetuning.sentence(report)
    ended = [_endings_of(report, bool(tuned))] if ranked_cells(report) or not machine else []
    said = sorted((*ended, *machine), key=lambda sentence: not sentence.startswith(_URGENT))
    return [tuned or _why_no_answer(report), *filter(None, said)]


def _why_no_answer(report: Report) -> str:
    """That nothing was measured, if every run failed or only proved something; that scripts did different work; else
    that nothing differs."""
    found = [run for run in report.runs if not run.proves_only]
    if not found:
        alone = proof_runs_text(report)
        return f"{alone}." if alone else NO_ANSWER
    works = {c.cell: c.work for c in report.certificates if c.level}
    if len(works) > 1 and len(set(works.values())) == len(works):
        return f"No recommendation: these {len(works)} configurations did different work; the notes say what differs."
    ended_badly = [run for run in found if run.is_failure or run.status == _UNSUPPORTED]
    if len(ended_badly) < len(found) or not any(run.is_failure for run in found):
        return NO_ANSWER
    counts = Counter(_ENDS.get(run.status, _FAILED) for run in found)
    ends = [f"{count} runs {many}" if count > 1 else f"1 run {one}" for (one, many), count in counts.items()]
    return f"Nothing was measured: {listed(ends)}."
