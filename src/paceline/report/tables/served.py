"""Inference: latency and throughput by scenario, and whether each result counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from paceline.analysis.findings import Measurement, Report, ServedVerdict
from paceline.analysis.findings.cell_axes import axis_text
from paceline.analysis.findings.served import NOT_KEPT, UNDECIDED
from paceline.errors import Scalar
from paceline.experiment.serving import MOST_CEILING_RATIO, STAGED_SCENARIOS
from paceline.report.tables.table import Cell, Column, Filled, Table, filled, numeric, without_empty, without_same
from paceline.report.text.load_names import axes_load
from paceline.report.text.measurements import format_brief
from paceline.wording import MISSING, Scale, format_duration, format_parts

MS, PERCENT, PLAIN = Scale("ms", 1e3), Scale("%", 100.0), Scale("tokens/s")
# metric, heading, scale, priority
_FAILED = "failed_ratio"
_COLUMNS: tuple[tuple[str, str, Scale, int], ...] = (
    (_FAILED, "failed, %", PERCENT, 0),
    ("output_tokens_per_s", "output, tokens/s", PLAIN, 0),
    ("steady_output_tokens_per_s", "steady, tokens/s", PLAIN, 4),
    ("requests_per_s", "requests/s", Scale("requests/s"), 3),
    ("ttft_p50_s", "TTFT p50, ms", MS, 0),
    ("ttft_p99_s", "TTFT p99, ms", MS, 2),
    ("tpot_p50_s", "TPOT p50, ms", MS, 0),
    ("tpot_p99_s", "TPOT p99, ms", MS, 2),
    ("latency_p99_s", "latency p99, ms", MS, 3),
    ("goodput_ratio", "in time, %", PERCENT, 1),
    ("token_count_mismatch_ratio", "miscounted, %", PERCENT, 5),
)
_LOAD = ("rate_per_s", "concurrency")
_BESIDE = ("model", "replica", "engine", "api", "data", "partition")
MOST_REASONS = 6
# The axis of a run whose server reports another model.
REQUESTED = "requested_model"
# Between what a percentile needs and what it got, in the note of a measurement.
FEW = ", got "
NOT_BELIEVED = "Unreliable: {}. The numbers of {} are shown, but excluded from headlines, comparisons and history."
Key = tuple[str, Scalar]
Loads = Mapping[Key, Mapping[str, Measurement]]


def tables(report: Report) -> tuple[Table, ...]:
    """Empty if the report has no such runs. Every load has a row; unreliable ones are marked."""
    loads = loads_of(report, (*report.measurements, *report.doubted))
    if not loads:
        return ()
    verdicts = {_key(v.cell, v.axes): v for v in report.served}

    def result(key: Key) -> Cell:
        verdict = verdicts.get(key)
        if verdict is None:
            return Cell(MISSING, tone="quiet")
        return Cell(verdict.verdict, "", "good" if verdict.is_valid else "bad")

    def measured(metric: str, heading: str, scale: Scale, priority: int) -> Filled[Key]:
        def cell(key: Key) -> Cell:
            m, verdict = loads[key].get(metric), verdicts.get(key)
            if m is None or m.value is None:
                return Cell(MISSING, tone="quiet")
            tone = "" if verdict is None or verdict.is_believed else "quiet"
            value, interval = format_parts(m.value, m.low, m.high, scale)
            return Cell(value, interval, "bad" if metric == _FAILED and m.value > 0 else tone)

        return numeric(heading, priority), cell

    def of_ceiling(key: Key) -> Cell:
        use = verdicts[key].ceiling if key in verdicts else None
        if use is None or use.ratio is None:
            return Cell(MISSING, tone="quiet")
        return Cell(f"{100 * use.ratio:.0f}", "", "bad" if use.is_near else "")

    columns: tuple[Filled[Key], ...] = (
        (Column("scenario"), lambda key: load_text(loads[key], loads)),
        (Column("result"), result),
        *(measured(*each) for each in _COLUMNS),
        (numeric("of client's ceiling, %", 5), of_ceiling),
    )
    first = "Latency counts from when a request was due. TTFT: first token; TPOT: each further one."
    client = (*_near_ceiling(report), *_headroom(report), *_ceilings(report))
    doubts = (*_doubted(report, loads), *client, *_reasons(report, loads))
    notes = (*_requested(loads), first, *_few(loads), *doubts)
    models = dict.fromkeys(_model(load["output_tokens_per_s"].axes) for load in loads.values())
    table = filled(f"Served model: {', '.join(models)}", loads, columns, notes, lambda key: (key[0],))
    if table is None:
        return ()
    table, same = without_same(without_empty(table)[0])
    return (replace(table, notes=(*table.notes, *same)),)


def warnings(report: Report) -> set[str]:
    """Those notes of the table that say why a result does not count, or is that of another model."""
    loads = loads_of(report, (*report.measurements, *report.doubted))
    return {*_requested(loads), *_near_ceiling(report), *_reasons(report, loads)}


def _model(axes: Mapping[str, Scalar]) -> str:
    """`mock (requested: llama-8b)`: what the server says it serves, and what was requested if that differs."""
    return f"{axes.get('model')}{f' (requested: {axes[REQUESTED]})' if axes.get(REQUESTED) else ''}"


def _requested(loads: Loads) -> Iterator[str]:
    """A warning for each model that is not the one that the experiment requested."""
    every = [load["output_tokens_per_s"].axes for load in loads.values()]
    for axes in {str(axes): axes for axes in ({n: a.get(n) for n in ("model", REQUESTED)} for a in every)}.values():
        if axes[REQUESTED] is not None:
            yield f"Warning: the server says that it serves {axes['model']}, not the requested {axes[REQUESTED]}."


def _few(loads: Loads) -> Iterator[str]:
    """Which shown percentiles are missing because there were too few requests, and how many they need."""
    shown = [m for load in loads.values() for name, *_ in _COLUMNS if (m := load.get(name)) and m.value is None and m.n]
    few = [m for m in shown if m.note and FEW in m.note]
    counts: dict[str, set[int]] = {}
    for m in few:
        counts.setdefault(str(m.note).partition(FEW)[0], set()).add(m.n)
    for needed, seen in counts.items():
        fewest, most = min(seen), max(seen)
        yield f"{needed}; {MISSING} marks loads with {f'{fewest:,}' if fewest == most else f'{fewest:,} to {most:,}'}."


def sentence(report: Report) -> str:
    """The result of a search, or the highest tokens/s; then failures, gains and estimates.

    `2 replicas served 1,234 tokens/s (1.70 times the best one's own rate; offline), the first token after 12 ms ...`
    """
    found = {key: m for key, m in loads_of(report).items() if m["output_tokens_per_s"].value is not None}
    if not found:
        return next((f"{v.text(1)}." for v in report.served if v.reasons), "")
    verdicts = {_key(v.cell, v.axes): v for v in report.served}
    # In a paired run each load goes to one replica: loads on all replicas are the answer if there are any.
    together = [key for key in found if found[key]["output_tokens_per_s"].axes.get("replica") is None] or list(found)
    known = [key for key in together if key in verdicts and verdicts[key].is_valid] or together
    best = max(known, key=lambda key: found[key]["output_tokens_per_s"].value or 0.0)
    fleet = next((f for f in report.fleets if _key(f.cell, f.axes) == best), None)
    speedup = f"{format_brief(fleet.speedup, Scale(''))} times {fleet.over}" if fleet and fleet.speedup else ""
    where = "; ".join(filter(None, (speedup, load_text(found[best], found))))
    axes = found[best]["output_tokens_per_s"].axes
    who = f"{len(fleet.replicas)} replicas served" if fleet else "Served"
    # An old record, or one whose server says the same, has no other name.
    other = f", not the requested {axes[REQUESTED]}" if axes.get(REQUESTED) else ""
    most = " at most" if len(found) > 1 else ""
    doubt = f"; {verdicts[best].text(1)}" if best in verdicts and verdicts[best].reasons else ""
    parts = [_search_result(m) for m in report.measurements if m.metric == "max_rate_per_s"]
    rate = format_brief(found[best]["output_tokens_per_s"], PLAIN)
    parts.append(f"{who} {rate} tokens/s{most} with {axes.get('model')}{other} ({where}){_median(found[best])}{doubt}.")
    # Requested loads that the previous sentence excludes.
    if lost := [v for v in report.served if v.fails]:
        many = f"{len(lost)} of {len(report.served)} loads {'is' if len(lost) == 1 else 'are'}"
        parts.append(f"{many} unreliable ({lost[0].text(1)}).")
    return " ".join((*parts, *_further(report, best)))


def _median(measured: Mapping[str, Measurement]) -> str:
    """`, the first token after 12 ms in the median`; empty if there are too few requests."""
    m = measured["ttft_p50_s"]
    return "" if m.value is None else f", the first token after {format_brief(m, MS)} ms in the median"


def _search_result(m: Measurement) -> str:
    if m.value is None:
        return f"No rate is known to keep the limits: {m.note}."
    if m.launches > 1:
        ends = " to ".join("unknown" if end is None else f"{end:.4g}" for end in (m.low, m.high))
        return f"Up to {m.value:.4g} requests/s kept the limits, the mean of {m.launches} launches ({ends})."
    if m.high is None:
        return f"At least {m.value:g} requests/s kept the limits: {m.note}."
    return f"Up to {m.value:g} requests/s kept the limits, {m.high:g} did not."


def _further(report: Report, best: Key) -> Iterator[str]:
    """All but the first sentence of the best fleet, failures of the other fleets, then gains and estimates."""
    for fleet in report.fleets:
        rest = fleet.text.split(". ")[1:]
        own = _key(fleet.cell, fleet.axes) == best
        yield from (f"{text.rstrip('.')}." for text in rest if own or text.startswith("Failed"))
    yield from _near_ceiling(report)
    yield from (gain.text for gain in report.partition_gains)
    yield from (f"{rules_text(v)}." for v in report.served if v.label)
    estimated = [each for each in report.full_sets if each.time is not None and each.time.value is not None]
    soonest = min(estimated, key=lambda each: each.time.value if each.time and each.time.value else 0.0, default=None)
    if soonest is not None and soonest.time is not None:
        how = "" if len(estimated) == 1 else f" ({soonest.axes.get('partition')} partition)"
        samples, asked = f"{soonest.samples:,} samples", f"estimated from {soonest.asked:,}"
        yield f"The whole set of {samples} would take {span(soonest.time)}, {asked}{how}."


def rules_text(verdict: ServedVerdict) -> str:
    """For a run by LoadGen's rules: its label, its verdict, and how many rules were not met."""
    broken, undecided = (sum(rule.outcome == outcome for rule in verdict.rules) for outcome in (NOT_KEPT, UNDECIDED))
    count = f"{broken} of {len(verdict.rules)} rules not met, {undecided} inconclusive"
    return f"{verdict.label}: {verdict.axes.get('scenario')}, {verdict.verdict}; {count}"


def span(m: Measurement) -> str:
    """`1 h 10 min (58 min 20 s to 1 h 21 min)`."""
    if m.value is None:
        return MISSING
    bounds = "" if m.low is None or m.high is None else f" ({format_duration(m.low)} to {format_duration(m.high)})"
    return f"{format_duration(m.value)}{bounds}"


# --- loads ---


def _key(cell: str, axes: Mapping[str, Scalar]) -> Key:
    return cell, axes.get("stage")


def loads_of(report: Report, measurements: Iterable[Measurement] | None = None) -> dict[Key, dict[str, Measurement]]:
    """Measurements of each load by metric, by default of reliable loads only: first offline, then by rate."""
    found: dict[Key, dict[str, Measurement]] = {}
    for m in report.measurements if measurements is None else measurements:
        if "scenario" in m.axes:
            found.setdefault(_key(m.cell, m.axes), {})[m.metric] = m
    # Measurements of a whole sweep or search are not of a load: they have no such rate.
    loads = {key: by_metric for key, by_metric in found.items() if "output_tokens_per_s" in by_metric}

    def order(key: Key) -> tuple[int, str, float, float]:
        axes = loads[key]["output_tokens_per_s"].axes
        scenario = str(axes.get("scenario"))
        known = {"offline": 0, "single_stream": 1}.get(scenario, 2)
        return known, scenario, float(axes.get("rate_per_s") or 0), float(axes.get("concurrency") or 0)

    return {key: loads[key] for key in sorted(loads, key=order)}


def load_text(measured: Mapping[str, Measurement], loads: Loads) -> str:
    """`sweep, 4 in flight`: the scenario, the load of a sweep or search, and what else distinguishes it."""
    axes = measured["output_tokens_per_s"].axes
    everywhere = [each["output_tokens_per_s"].axes for each in loads.values()]
    differing = [name for name in (*_LOAD, *_BESIDE) if len({str(each.get(name)) for each in everywhere}) > 1]
    staged = axes.get("scenario") in STAGED_SCENARIOS
    load = [axes_load(axes)] if staged else [axes_load({name: axes.get(name)}) for name in _LOAD if name in differing]
    words = [axis_text(name, axes) for name in differing if name in _BESIDE and axes.get(name) is not None]
    return ", ".join(filter(None, (str(axes.get("scenario")), *load, *words)))


# --- the client's ceiling ---


def _near_ceiling(report: Report) -> Iterator[str]:
    """One warning, about the load that came nearest."""
    near = [v.ceiling for v in report.served if v.ceiling and v.ceiling.is_near]
    if near:
        worst = max(near, key=lambda use: use.ratio or 0.0)
        others = f", {len(near) - 1} more over {100 * MOST_CEILING_RATIO:.0f} %" if len(near) > 1 else ""
        yield f"A load used {worst.text}{others}: beyond it the client itself would be what is measured."


def _headroom(report: Report) -> Iterator[str]:
    """One line for each grade, of its first load: how far the client was from its limit before the load."""
    by_grade: dict[str, list[str]] = {}
    for verdict in report.served:
        if verdict.headroom and verdict.headroom_grade:
            by_grade.setdefault(verdict.headroom_grade, []).append(verdict.headroom)
    for texts in by_grade.values():
        others = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
        yield f"Before the load, {texts[0]}{others}."


def _ceilings(report: Report) -> Iterator[str]:
    """The ceiling with the highest share that a load used, and why the share is unknown for other loads."""
    uses = [v.ceiling for v in report.served if v.ceiling]
    known = [use for use in uses if use.ratio is not None]
    if known:
        most = max(known, key=lambda use: use.ratio or 0.0)
        yield f"The client used {'at most ' if len(known) > 1 else ''}{most.text}, in its busiest second."
    for text in dict.fromkeys(use.text for use in uses if use.ratio is None):
        yield f"The share of the client's ceiling is {text}."


# --- does it count ---


def _doubted(report: Report, loads: Loads) -> Iterator[str]:
    """Which rows are shown but unreliable."""
    keys = [_key(v.cell, v.axes) for v in report.served if not v.is_believed]
    names = list(dict.fromkeys(load_text(loads[key], loads) for key in keys if key in loads))
    more = [f"{len(names) - MOST_REASONS} more"] if len(names) > MOST_REASONS else []
    if names:
        yield NOT_BELIEVED.format("; ".join((*names[:MOST_REASONS], *more)), "it" if len(names) == 1 else "them")


def _reasons(report: Report, loads: Loads) -> Iterator[str]:
    """Why results do not count, and which launches were left out of those that do."""
    reasons = [v for v in report.served if v.reasons and _key(v.cell, v.axes) in loads]
    for verdict in reasons[:MOST_REASONS]:
        load = load_text(loads[_key(verdict.cell, verdict.axes)], loads)
        then = f" Next: {'; '.join(verdict.advice)}." if verdict.advice else ""
        yield f"{load}: {verdict.text()}.{then}"
    if len(reasons) > MOST_REASONS:
        yield f"{len(reasons) - MOST_REASONS} more are INVALID: report.json has their reasons."
    yield from dict.fromkeys(f"Left out: {why}." for verdict in report.served for why in verdict.left_out)
