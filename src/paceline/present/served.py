"""Served models: latency and throughput by scenario, and whether each result counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from paceline.findings import Fleet, Measurement, Report, ServedVerdict
from paceline.findings.served_verdicts import NOT_KEPT, UNTOLD
from paceline.present.quantity import MISSING, Scale, format_brief, format_duration, format_parts
from paceline.present.standing import axis_text
from paceline.present.tables import Cell, Column, Table
from paceline.serving import MOST_CEILING_RATIO
from paceline.spec import SERVED, Scalar

MS, PERCENT, PLAIN = Scale("ms", 1e3), Scale("%", 100.0), Scale("tokens/s")
# metric, heading, scale, priority
_COLUMNS: tuple[tuple[str, str, Scale, int], ...] = (
    ("output_tokens_per_s", "output, tokens/s", PLAIN, 0),
    ("steady_output_tokens_per_s", "steady, tokens/s", PLAIN, 4),
    ("requests_per_s", "requests/s", Scale("requests/s"), 2),
    ("ttft_p50_s", "TTFT p50, ms", MS, 0),
    ("ttft_p99_s", "TTFT p99, ms", MS, 1),
    ("tpot_p50_s", "TPOT p50, ms", MS, 0),
    ("tpot_p99_s", "TPOT p99, ms", MS, 1),
    ("latency_p99_s", "latency p99, ms", MS, 3),
    ("goodput_ratio", "in time, %", PERCENT, 2),
    ("failed_ratio", "failed, %", PERCENT, 2),
    ("token_count_mismatch_ratio", "miscounted, %", PERCENT, 5),
)
_LOAD = ("concurrency", "rate_per_s", "replica", "engine", "api", "data", "partition")
MOST_REASONS = 6
Key = tuple[str, Scalar]
Loads = Mapping[Key, Mapping[str, Measurement]]


def tables(report: Report) -> tuple[Table, ...]:
    """Empty where the report holds no such runs."""
    loads = loads_of(report)
    if not loads:
        return ()
    verdicts = {_key(v.cell, v.axes): v for v in report.served}
    columns = (
        Column("scenario"),
        *(Column(text, numeric=True, priority=n) for _, text, _, n in _COLUMNS),
        Column("of client's ceiling, %", numeric=True, priority=5),
        Column("result"),
    )
    rows = tuple(
        (*_row(load_text(m, loads), m), _share(verdicts.get(key)), _verdict(verdicts.get(key)))
        for key, m in loads.items()
    )
    first = "Latency counts from when a request was due. TTFT: first token; TPOT: each further one."
    notes = (first, *_near_ceiling(report), *_ceilings(report), *_reasons(report, loads))
    return (Table("Served model", columns, rows, notes, tuple((c,) for c, _ in loads)),)


def sentence(report: Report) -> str:
    """What was searched for, or the most tokens a second; then what was lost, gained and told ahead."""
    found = {key: m for key, m in loads_of(report).items() if m["output_tokens_per_s"].value is not None}
    if not found:
        return next((f"{v.verdict}: {v.reasons[0]}." for v in report.served if v.reasons), "")
    counted = {_key(v.cell, v.axes) for v in report.served if v.is_valid}
    # Of a paired run each load is one replica's: what all do together is the answer where it is known.
    together = [key for key in found if found[key]["output_tokens_per_s"].axes.get("replica") is None] or list(found)
    known = [key for key in together if key in counted] or together
    best = max(known, key=lambda key: found[key]["output_tokens_per_s"].value or 0.0)
    searched = (_searched(m) for m in report.measurements if m.metric == "max_rate_per_s")
    return " ".join(filter(None, (*searched, _first(report, found, best), *_further(report, best))))


def _first(report: Report, found: Loads, best: Key) -> str:
    """`2 replicas served 1,234 tokens/s (1.70 times the best one's own rate; offline), the first token after 12 ms`."""
    rate, first = found[best]["output_tokens_per_s"], found[best]["ttft_p50_s"]
    fleet = next((f for f in report.fleets if _key(f.cell, f.axes) == best), None)
    verdict = next((v for v in report.served if _key(v.cell, v.axes) == best), None)
    where = "; ".join(filter(None, (_beside_best(fleet), load_text(found[best], found))))
    who = f"{len(fleet.replicas)} replicas served" if fleet else "Served"
    most = " at most" if len(found) > 1 else ""
    doubt = f"; INVALID: {verdict.reasons[0]}" if verdict and verdict.reasons else ""
    return (
        f"{who} {format_brief(rate, PLAIN)} tokens/s{most} ({where}), "
        f"the first token after {format_brief(first, MS)} ms in the median{doubt}."
    )


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
        samples, asked = f"{soonest.samples:,} samples", f"told from {soonest.asked:,}"
        yield f"The whole set of {samples} would take {span(soonest.time)}, {asked}{how}."


def _searched(m: Measurement) -> str:
    if m.value is None:
        return f"No rate is known to keep the limits: {m.note}."
    if m.launches > 1:
        ends = " to ".join("unknown" if end is None else f"{end:.4g}" for end in (m.low, m.high))
        return f"Up to {m.value:.4g} requests/s kept the limits, the mean of {m.launches} launches ({ends})."
    end = f", {m.high:g} did not" if m.high is not None else ", and no higher one was seen to fail"
    return f"Up to {m.value:g} requests/s kept the limits{end}."


def rules_text(verdict: ServedVerdict) -> str:
    """Of a run by LoadGen's rules: what it is, whether it counts, and how many rules it did not keep."""
    broken, untold = (sum(rule.outcome == outcome for rule in verdict.rules) for outcome in (NOT_KEPT, UNTOLD))
    count = f"{broken} of {len(verdict.rules)} rules not kept, {untold} cannot be told"
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
    """Measurements of each load of each cell by metric, in the order of their scenarios and of how much they ask."""
    found: dict[Key, dict[str, Measurement]] = {}
    for m in report.measurements:
        if str(m.axes.get("workload")).partition(":")[0] in SERVED:
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
    """The scenario, and of its load what tells it from others."""
    axes = measured["output_tokens_per_s"].axes
    everywhere = [each["output_tokens_per_s"].axes for each in loads.values()]
    differing = [name for name in _LOAD if len({str(each.get(name)) for each in everywhere}) > 1]
    words = [axis_text(name, axes) for name in differing if axes.get(name) is not None]
    return ", ".join([str(axes.get("scenario")), *words])


def _row(what: str, measured: Mapping[str, Measurement]) -> tuple[Cell, ...]:
    return (Cell(what), *(_cell(measured.get(metric), scale) for metric, _, scale, _ in _COLUMNS))


def _cell(m: Measurement | None, scale: Scale) -> Cell:
    if m is None or m.value is None:
        return Cell(MISSING, tone="quiet")
    value, interval = format_parts(m.value, m.low, m.high, scale)
    return Cell(value, interval)


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


def _reasons(report: Report, loads: Loads) -> Iterator[str]:
    """Why results do not count, and which launches were left out of those that do."""
    told = [v for v in report.served if v.reasons and _key(v.cell, v.axes) in loads]
    for verdict in told[:MOST_REASONS]:
        load = load_text(loads[_key(verdict.cell, verdict.axes)], loads)
        yield f"{load}: {verdict.verdict}: {'; '.join(verdict.reasons)}."
    if len(told) > MOST_REASONS:
        yield f"{len(told) - MOST_REASONS} more are INVALID: report.json has their reasons."
    yield from dict.fromkeys(f"Left out: {why}." for verdict in report.served for why in verdict.left_out)
