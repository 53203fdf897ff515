"""Served models: latency and throughput by scenario, and whether each result counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from paceline.analysis.findings import Fleet, Measurement, Report, ServedVerdict
from paceline.analysis.findings.cell_axes import axis_text
from paceline.analysis.findings.served import NOT_KEPT, UNTOLD
from paceline.errors import Scalar
from paceline.experiment.serving import MOST_CEILING_RATIO, STAGED_SCENARIOS
from paceline.report.tables.table import Cell, Column, Table
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
_BESIDE = ("replica", "engine", "api", "data", "partition")
MOST_REASONS = 6
NOT_BELIEVED = "Unreliable: {}. The numbers of {} are shown, but excluded from headlines, comparisons and history."
Key = tuple[str, Scalar]
Loads = Mapping[Key, Mapping[str, Measurement]]


def tables(report: Report) -> tuple[Table, ...]:
    """Empty if the report has no such runs. Every load has a row; unreliable ones are marked."""
    loads = shown_loads(report)
    if not loads:
        return ()
    verdicts = {_key(v.cell, v.axes): v for v in report.served}
    columns = (
        Column("scenario"),
        Column("result"),
        *(Column(text, numeric=True, priority=n) for _, text, _, n in _COLUMNS),
        Column("of client's ceiling, %", numeric=True, priority=5),
    )
    rows = tuple(_row(load_text(m, loads), m, verdicts.get(key)) for key, m in loads.items())
    first = "Latency counts from when a request was due. TTFT: first token; TPOT: each further one."
    notes = (first, *_doubted(report, loads), *_near_ceiling(report), *_ceilings(report), *_reasons(report, loads))
    return (Table("Served model", columns, rows, notes, tuple((c,) for c, _ in loads)),)


def sentence(report: Report) -> str:
    """The result of a search, or the highest tokens/s; then failures, gains and estimates."""
    found = {key: m for key, m in loads_of(report).items() if m["output_tokens_per_s"].value is not None}
    if not found:
        return next((f"{v.text(1)}." for v in report.served if v.reasons), "")
    counted = {_key(v.cell, v.axes) for v in report.served if v.is_valid}
    # Of a paired run each load is one replica's: what all do together is the answer where it is known.
    together = [key for key in found if found[key]["output_tokens_per_s"].axes.get("replica") is None] or list(found)
    known = [key for key in together if key in counted] or together
    best = max(known, key=lambda key: found[key]["output_tokens_per_s"].value or 0.0)
    searched = (_searched(m) for m in report.measurements if m.metric == "max_rate_per_s")
    first = _first(report, found, best)
    return " ".join(filter(None, (*searched, first, *_lost(report), *_further(report, best))))


def _first(report: Report, found: Loads, best: Key) -> str:
    """`2 replicas served 1,234 tokens/s (1.70 times the best one's own rate; offline), the first token after 12 ms`."""
    rate, first = found[best]["output_tokens_per_s"], found[best]["ttft_p50_s"]
    fleet = next((f for f in report.fleets if _key(f.cell, f.axes) == best), None)
    verdict = next((v for v in report.served if _key(v.cell, v.axes) == best), None)
    where = "; ".join(filter(None, (_beside_best(fleet), load_text(found[best], found))))
    who = f"{len(fleet.replicas)} replicas served" if fleet else "Served"
    most = " at most" if len(found) > 1 else ""
    doubt = f"; {verdict.text(1)}" if verdict and verdict.reasons else ""
    return (
        f"{who} {format_brief(rate, PLAIN)} tokens/s{most} ({where}), "
        f"the first token after {format_brief(first, MS)} ms in the median{doubt}."
    )


def _lost(report: Report) -> Iterator[str]:
    """Requested loads that the previous sentence excludes."""
    lost = [v for v in report.served if v.fails]
    if lost:
        many = f"{len(lost)} of {len(report.served)} loads"
        yield f"{many} {'is' if len(lost) == 1 else 'are'} unreliable ({lost[0].text(1)})."


def _beside_best(fleet: Fleet | None) -> str:
    if fleet is None or fleet.speedup is None:
        return ""
    return f"{format_brief(fleet.speedup, Scale(''))} times {fleet.over}"


def _further(report: Report, best: Key) -> Iterator[str]:
    """What a reader asks next: of the best fleet all but its first sentence, which is said already; of others what
    failed."""
    for fleet in report.fleets:
        rest = fleet.text.split(". ")[1:]
        own = _key(fleet.cell, fleet.axes) == best
        yield from (f"{text.rstrip('.')}." for text in rest if own or text.startswith("Failed"))
    yield from _near_ceiling(report)
    yield from (gain.text for gain in report.partition_gains)
    yield from (f"{rules_text(v)}." for v in report.served if v.label)
    told = [each for each in report.full_sets if each.time is not None and each.time.value is not None]
    soonest = min(told, key=lambda each: each.time.value if each.time and each.time.value else 0.0, default=None)
    if soonest is not None and soonest.time is not None:
        how = "" if len(told) == 1 else f" ({soonest.axes.get('partition')} partition)"
        samples, asked = f"{soonest.samples:,} samples", f"estimated from {soonest.asked:,}"
        yield f"The whole set of {samples} would take {span(soonest.time)}, {asked}{how}."


def _searched(m: Measurement) -> str:
    if m.value is None:
        return f"No rate is known to keep the limits: {m.note}."
    if m.launches > 1:
        ends = " to ".join("unknown" if end is None else f"{end:.4g}" for end in (m.low, m.high))
        return f"Up to {m.value:.4g} requests/s kept the limits, the mean of {m.launches} launches ({ends})."
    if m.high is None:
        return f"At least {m.value:g} requests/s kept the limits: {m.note}."
    return f"Up to {m.value:g} requests/s kept the limits, {m.high:g} did not."


def rules_text(verdict: ServedVerdict) -> str:
    """Of a run by LoadGen's rules: what it is, whether it counts, and how many rules it did not keep."""
    broken, untold = (sum(rule.outcome == outcome for rule in verdict.rules) for outcome in (NOT_KEPT, UNTOLD))
    count = f"{broken} of {len(verdict.rules)} rules not met, {untold} inconclusive"
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


def loads_of(report: Report) -> dict[Key, dict[str, Measurement]]:
    """Measurements of each load that is believed by metric, in the order of their scenarios and of how much they
    ask."""
    return _by_load(report.measurements)


def shown_loads(report: Report) -> dict[Key, dict[str, Measurement]]:
    """All loads, unreliable ones included."""
    return _by_load((*report.measurements, *report.doubted))


def _by_load(measurements: Iterable[Measurement]) -> dict[Key, dict[str, Measurement]]:
    found: dict[Key, dict[str, Measurement]] = {}
    for m in measurements:
        if "scenario" in m.axes:
            found.setdefault(_key(m.cell, m.axes), {})[m.metric] = m
    # What is of a whole sweep or search, and no load of its own, has no such rate.
    whole = {key: by_metric for key, by_metric in found.items() if "output_tokens_per_s" in by_metric}
    order = ("offline", "single_stream")
    return dict(sorted(whole.items(), key=lambda each: _place(each[1]["output_tokens_per_s"].axes, order)))


def _place(axes: Mapping[str, Scalar], order: tuple[str, ...]) -> tuple[int, str, float, float]:
    scenario = str(axes.get("scenario"))
    known = order.index(scenario) if scenario in order else len(order)
    return known, scenario, float(axes.get("rate_per_s") or 0), float(axes.get("concurrency") or 0)


def load_text(measured: Mapping[str, Measurement], loads: Loads) -> str:
    """`sweep, 4 in flight`: the scenario, the load of a sweep or search, and what else distinguishes it."""
    axes = measured["output_tokens_per_s"].axes
    everywhere = [each["output_tokens_per_s"].axes for each in loads.values()]
    differing = [name for name in (*_LOAD, *_BESIDE) if len({str(each.get(name)) for each in everywhere}) > 1]
    staged = axes.get("scenario") in STAGED_SCENARIOS
    load = [axes_load(axes)] if staged else [axes_load({name: axes.get(name)}) for name in _LOAD if name in differing]
    words = [axis_text(name, axes) for name in differing if name in _BESIDE and axes.get(name) is not None]
    return ", ".join(filter(None, (str(axes.get("scenario")), *load, *words)))


def _row(what: str, measured: Mapping[str, Measurement], verdict: ServedVerdict | None) -> tuple[Cell, ...]:
    tone = "" if verdict is None or verdict.is_believed else "quiet"
    values = (_cell(measured.get(metric), scale, tone) for metric, _, scale, _ in _COLUMNS)
    return (Cell(what), _verdict(verdict), *values, _share(verdict))


def _cell(m: Measurement | None, scale: Scale, tone: str) -> Cell:
    if m is None or m.value is None:
        return Cell(MISSING, tone="quiet")
    value, interval = format_parts(m.value, m.low, m.high, scale)
    return Cell(value, interval, "bad" if m.metric == _FAILED and m.value > 0 else tone)


# --- the client's ceiling ---


def _share(verdict: ServedVerdict | None) -> Cell:
    use = verdict.ceiling if verdict else None
    if use is None or use.ratio is None:
        return Cell(MISSING, tone="quiet")
    return Cell(f"{100 * use.ratio:.0f}", "", "bad" if use.is_near else "")


def _near_ceiling(report: Report) -> Iterator[str]:
    """One warning, of the load that came nearest."""
    near = [v.ceiling for v in report.served if v.ceiling and v.ceiling.is_near]
    if near:
        worst = max(near, key=lambda use: use.ratio or 0.0)
        others = f", {len(near) - 1} more over {100 * MOST_CEILING_RATIO:.0f} %" if len(near) > 1 else ""
        yield f"A load used {worst.text}{others}: beyond it the client itself would be what is measured."


def _ceilings(report: Report) -> Iterator[str]:
    """The ceiling once with the most that any load used of it, and why it is not known of the others."""
    uses = [v.ceiling for v in report.served if v.ceiling]
    known = [use for use in uses if use.ratio is not None]
    if known:
        most = max(known, key=lambda use: use.ratio or 0.0)
        yield f"The client used {'at most ' if len(known) > 1 else ''}{most.text}, in its busiest second."
    for text in dict.fromkeys(use.text for use in uses if use.ratio is None):
        yield f"The share of the client's ceiling is {text}."


# --- does it count ---


def _verdict(verdict: ServedVerdict | None) -> Cell:
    if verdict is None:
        return Cell(MISSING, tone="quiet")
    return Cell(verdict.verdict, "", "good" if verdict.is_valid else "bad")


def _doubted(report: Report, loads: Loads) -> Iterator[str]:
    """Which rows are shown and no more."""
    keys = [_key(v.cell, v.axes) for v in report.served if not v.is_believed]
    names = list(dict.fromkeys(load_text(loads[key], loads) for key in keys if key in loads))
    more = [f"{len(names) - MOST_REASONS} more"] if len(names) > MOST_REASONS else []
    if names:
        yield NOT_BELIEVED.format("; ".join((*names[:MOST_REASONS], *more)), "it" if len(names) == 1 else "them")


def _reasons(report: Report, loads: Loads) -> Iterator[str]:
    """Why results do not count, and which launches were left out of those that do."""
    told = [v for v in report.served if v.reasons and _key(v.cell, v.axes) in loads]
    for verdict in told[:MOST_REASONS]:
        load = load_text(loads[_key(verdict.cell, verdict.axes)], loads)
        yield f"{load}: {verdict.text()}."
    if len(told) > MOST_REASONS:
        yield f"{len(told) - MOST_REASONS} more are INVALID: report.json has their reasons."
    yield from dict.fromkeys(f"Left out: {why}." for verdict in report.served for why in verdict.left_out)
