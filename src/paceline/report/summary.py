"""The first screen of a report: a headline, four tiles, the trust light and the main chart.

Everything here is chosen from findings and charts that the rest of the report shows in full; nothing is computed anew.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.analysis.findings import CERTIFIED, DIFFERENT, SHARED_GPU, Recommendation, Report, once
from paceline.analysis.findings.cell_axes import axis_text, describe
from paceline.analysis.findings.compare import FASTER, SLOWER
from paceline.report import answer as sentences
from paceline.report.charts import Chart
from paceline.report.charts.fabric import BUSBW
from paceline.report.charts.front import PARETO, PER_USER, PREDICTED, SCALED, lead_group
from paceline.report.charts.tradeoffs import COMPRESSION
from paceline.report.tables import finetuning, served, tradeoffs
from paceline.report.tables.fabric import best_row
from paceline.report.tables.fabric_links import number
from paceline.report.tables.table import certified_sentence, equal_work_text, first_sentence
from paceline.report.text import trust
from paceline.report.text.cells import THROUGHPUT, axes_of, ranked_cells
from paceline.report.tiles import MEMORY, Tile, best_load, tiles
from paceline.wording import format_own, format_parts, listed, places, scale_of, short_percent

MOST_WORDS = 15
# The main chart is the first of these that the report has; a name ends where several charts share a beginning.
MAIN = (
    *("effects", COMPRESSION, f"{SCALED}_", PARETO, PER_USER, "served_curve", "nodes", BUSBW, PREDICTED),
    *("frontier", "ceilings_products", "pairs", "throughput", "served_distributions", "served_in_flight", "memory"),
    *("ceilings_copies", "collective_time_", "loss"),
)
GREEN, AMBER, RED, UNKNOWN = "green", "amber", "red", "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Light:
    """A traffic light, by default that of trust: its level, one line, and the reasons behind it."""

    level: str
    text: str
    reasons: tuple[str, ...] = ()
    name: str = "Trust"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """support are the full sentences behind the headline; chart is the name of the main chart."""

    headline: str
    support: tuple[str, ...]
    tiles: tuple[Tile, ...]
    light: Light
    chart: str | None


def summarise(report: Report, charts: Iterable[Chart]) -> Summary:
    line = headline(report)
    support = tuple(text for text in (*sentences.answer(report), sentences.grounds(report)) if text and text != line)
    return Summary(headline=line, support=support, tiles=tiles(report), light=light(report), chart=main_chart(charts))


def main_chart(charts: Iterable[Chart]) -> str | None:
    """The name of the chart that answers most, or None without charts."""
    by_name = {chart.name: chart for chart in charts}
    # A curve over sizes that has only some of the strategies answers less than all of them beside each other.
    grown = max((len(chart.series) for name, chart in by_name.items() if name.startswith(f"{SCALED}_")), default=0)
    beside = len(by_name[PARETO].series) if PARETO in by_name else 0
    names = [name for name in by_name if grown >= beside or not name.startswith(f"{SCALED}_")]
    for wanted in MAIN:
        for name in names:
            if name == wanted or (wanted.endswith("_") and name.startswith(wanted)):
                return name
    return names[0] if names else None


# --- the headline ---


@once
def headline(report: Report) -> str:
    """The answer in at most 15 words, and the level of the proof of equal work where it is not certified as a whole."""
    design = max(report.effects, key=lambda outcome: len(outcome.effects), default=None)
    found = sentences.headline(report)
    choice = _choice(report, found) if found and found.metric in (THROUGHPUT, MEMORY) else ""
    candidates = [
        _effects(report) if design and design.effects else "",
        tradeoffs.headline(report),
        choice,
        _served(report),
        finetuning.sentence(report),
        *_machine(report),
        _only_cell(report),
        sentences.answer(report)[0],
    ]
    said = next(text for text in candidates if text)
    return brief(said) + (_level(found) if found and said == choice else "")


def brief(sentence: str) -> str:
    """A sentence without its brackets, its later clauses and, if need be, its end, in at most MOST_WORDS words.

    >>> brief("Products reach 786 TFLOP/s (bf16); copies are slower, and so are all of the smaller sizes on this host.")
    'Products reach 786 TFLOP/s (bf16)'
    """
    text = first_sentence(sentence)[0].rstrip(".")
    for cut in ("; ", " (", ": ", ", "):
        if len(text.split()) > MOST_WORDS:
            head, mark, rest = text.partition(cut)
            text = f"{head}{rest.partition(')')[2]}" if cut == " (" and mark else head
    words = text.split()
    return text if len(words) <= MOST_WORDS else " ".join(words[: MOST_WORDS - 1]) + " \u2026"


def _effects(report: Report) -> str:
    """`micro batch 4 → 8 speeds up most (+46 %); 2 of 6 changes matter`."""
    outcome = max(report.effects, key=lambda each: len(each.effects))
    speeds = [(e, r) for e in outcome.effects if (r := e.response(THROUGHPUT)) is not None]
    decided = [(e, r) for e, r in speeds if r.verdict in (FASTER, SLOWER)]
    if not decided:
        return f"None of {len(outcome.effects)} changes is known to change the speed"
    first, response = max(decided, key=lambda pair: abs(math.log(pair[1].ratio)))
    name = first.name.partition(",")[0]
    change = 100 * (response.ratio - 1)
    return f"{name}: {change:+.0f} % tokens/s, the largest effect among {len(speeds)} changes"


def _choice(report: Report, found: Recommendation) -> str:
    """The winner and its margin in percent, equal leaders, or the highest rate if there was one launch each."""
    group = lead_group(report)
    where = f" on {axis_text('world_size', group.axes)}" if group and group.axes.get("world_size") else ""
    ties = [c for c in found.because if {c.label, c.other_label} <= {*found.choose} and c.metric == found.metric]
    if found.decisive is None and any(c.launches == 1 for c in ties) and group:
        own = [row for row in group.rows if group.levels.get(row.cell) != DIFFERENT]
        row = max(own or group.rows, key=lambda row: row.measurements[THROUGHPUT].value or 0.0)
        best = row.measurements[THROUGHPUT]
        rate = format_parts(best.value, None, None)[0]
        return f"Up to {rate} {best.unit} ({row.label}); one launch each, so no verdict"
    return sentences.outcome(report, found, where, brief=True)


def _level(found: Recommendation) -> str:
    """How equal the work of the compared runs is known to be, where it is less than certified at full size."""
    levels = dict.fromkeys(c.level for c in found.because if c.level and c.level != CERTIFIED)
    return f"; {sentences.level_clause(listed(levels))}" if levels else ""


def _served(report: Report) -> str:
    loads = served.loads_of(report)
    if not loads:
        return next((f"{v.text(1)}" for v in report.served if v.reasons), "")
    searched = next((m for m in report.measurements if m.metric == "max_rate_per_s" and m.value is not None), None)
    if searched is not None:
        return f"Serves up to {searched.value:.4g} requests/s within its latency limits"
    key = best_load(report)
    load = loads[key]
    m, first = load["output_tokens_per_s"], load.get("ttft_p50_s")
    rate = format_parts(m.value, None, None)[0]
    wait = ""
    if first is not None and first.value is not None:
        value = first.value * (1e3 if first.value < 1 else 1)
        wait = f", first token after {format_own(value, places(value, None, None))} {'ms' if first.value < 1 else 's'}"
    return f"{m.axes.get('model')} serves {rate} tokens/s{' at most' if len(loads) > 1 else ''}{wait}"


def _only_cell(report: Report) -> str:
    """The speed of the one cell of a report that has nothing to compare it with; empty if there are more."""
    ranked = ranked_cells(report)
    is_only = len({run.cell for run in report.runs if not run.proves_only}) == 1 == len(ranked)
    if not is_only or any(SHARED_GPU in run.health for run in report.runs):
        return ""
    ((cell, metrics),) = ranked.items()
    m = metrics[THROUGHPUT]
    rate = format_parts(m.value, None, None)[0]
    return f"{describe(axes_of(report, cell) or {})}: {rate} {m.unit}; one cell, nothing to compare it with"


def _machine(report: Report) -> list[str]:
    """The first sentence of each subject about the machine, shortened."""
    found = [text for say in sentences.MACHINE_SENTENCES if (text := say(report))]
    if report.memory and any(row.error_ratio is not None for row in report.memory):
        errors = [abs(row.error_ratio) for row in report.memory if row.error_ratio is not None]
        words = f"Peak memory predicted within {short_percent(max(errors))} in all {len(errors)} cells"
        found = [words if text.startswith("Predicted peaks") else text for text in found]
    best = [m for m in report.measurements if m.metric == "datasheet_share_ratio" and m.axes.get("dtype") == "bf16"]
    peak = next((t for t in tiles(report) if t.name == "bf16 products"), None)
    if peak is not None and best and best[0].value:
        words = f"bf16 products reach {peak.value} {peak.unit}, {best[0].value:.0%} of the datasheet"
        found = [words if text.startswith("Matrix products") else text for text in found]
    if (row := best_row(report.collectives)) is not None and len(found) == 1:
        scale = scale_of("bytes/s", "", [row.busbw_bytes_per_s])
        note = f" ({row.note})" if row.note else ""
        where = axis_text("world_size", row.axes)
        found = [f"{row.operation}: {number(row.busbw_bytes_per_s, scale)} {scale.unit} bus bandwidth on {where}{note}"]
    return found


# --- the trust light ---


def light(report: Report) -> Light:
    """Red: a result must not be used. Amber: small differences are in doubt. Unknown: the hosts were not watched."""
    ours = [run for run in report.runs if not run.proves_only]
    levels = Counter(run.trust.level for run in report.runs if run.trust is not None)
    invalid = sum(run.status == "invalid" for run in ours)
    failed = sum(run.is_failure and run.status != "invalid" for run in ours)
    doubted = sum(not verdict.is_believed for verdict in report.served)
    shared = any(SHARED_GPU in run.health for run in ours)
    once = any(c.launches == 1 for c in report.comparisons)

    launched = sum(run.status != "unsupported" for run in report.runs)

    def reason(level: str) -> str:
        """What disturbed the launches of a level, or one of several, in brackets."""
        judged = (run.trust.reasons for run in report.runs if run.trust is not None and run.trust.level == level)
        found = list(dict.fromkeys(reasons[0] for reasons in judged if reasons))
        return f" ({'for example, ' if len(found) > 1 else ''}{found[0]})" if found else ""

    problems = (
        (RED, invalid, f"{invalid} of {len(ours)} runs invalid"),
        (RED, levels[RED], f"{levels[RED]} of {launched} launches badly disturbed{reason(RED)}"),
        (RED, doubted, f"{doubted} of {len(report.served)} loads unreliable"),
        (AMBER, failed, f"{failed} of {len(ours)} runs failed"),
        (AMBER, levels[AMBER], f"{levels[AMBER]} of {launched} launches disturbed{reason(AMBER)}"),
        (AMBER, shared, SHARED_GPU),
        (AMBER, once, "launches not repeated"),
    )
    found = [(level, text) for level, count, text in problems if count]
    level = found[0][0] if found else GREEN if levels else UNKNOWN
    valid = sum(v.is_valid for v in report.served)
    good = [equal_work_text(report)] if report.certificates else []
    good += [f"{valid} of {len(report.served)} loads valid"] if report.served else []
    good += ["no launch disturbed"] if levels and set(levels) == {GREEN} else []
    good += ["load of the hosts not recorded"] if not levels and ours else []
    words = "; ".join((*(text for _, text in found), *good)) or "no runs"
    certified = (certified_sentence(report),) if report.certificates else ()
    return Light(level=level, text=words, reasons=(*trust.lines(report), *certified, *report.notes))
