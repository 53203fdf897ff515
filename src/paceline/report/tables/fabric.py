"""Collectives as nccl-tests prints them, fits, overlap, suspects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from paceline.analysis.findings import CollectiveFit, CollectiveRow, Report
from paceline.analysis.findings.cell_axes import axis_text
from paceline.report.tables import fabric_links
from paceline.report.tables.fabric_links import PERCENT, US, fabric_name, number, verdict_sentence
from paceline.report.tables.table import Cell, Column, Table, numeric
from paceline.wording import MISSING, Scale, format_si, format_size, scale_of, short_percent

MOST_ERRORS = 5


def tables(report: Report) -> tuple[Table, ...]:
    """One line per operation and dtype, then the conclusions; `details` has all fits and rows."""
    return (*_summaries(report), *fabric_links.tables(report))


def details(report: Report) -> tuple[Table, ...]:
    """All fits, then all rows, one table per operation and dtype."""
    fits = fabric_links.fits(report)
    rows = (
        _rows(f"Every row: {sweep.operation}, {sweep.dtype}, {name}", sweep.rows)
        for name, sweeps in _grouped(report)
        for sweep in sweeps
    )
    return (*((fits,) if fits else ()), *rows)


# --- the sentence ---


def sentence(report: Report) -> str:
    """What the fabric can do, whether data arrived intact, and what is suspect; empty without a sweep."""
    rows, best = report.collectives, best_row(report.collectives)
    parts = ["No collective was measured."] if rows and best is None else []
    if best is not None:
        scale = scale_of("bytes/s", "", [best.busbw_bytes_per_s])
        peak = f"{number(best.busbw_bytes_per_s, scale)} {scale.unit}"
        where = f"{best.dtype}, {axis_text('world_size', best.axes)}, at {format_size(best.size_bytes)}"
        shared = f" ({best.note})" if best.note else ""
        reached = f"{best.operation} reaches {peak} of bus bandwidth{_of_link(best)}"
        parts.append(f"{reached} ({where}){_latency(report, best)}{shared}.")
    wrong = sum(bool(r.wrong) for r in rows)
    unchecked = sum(r.status == "ok" and r.wrong is None and bool(r.size_bytes) for r in rows)
    missing = sum(r.status in ("oom", "unsupported") for r in rows)
    if wrong:
        parts.append(f"Data arrived corrupted in {wrong} of {len(rows)} rows: those runs are invalid.")
    elif rows:
        checked = f"{unchecked} rows were not checked" if unchecked else "Every payload arrived intact"
        parts.append(f"{checked}{f'; {missing} of {len(rows)} rows could not be measured' if missing else ''}.")
    return " ".join(filter(None, (*parts, verdict_sentence(report)))) if rows or report.pairs else ""


def _of_link(row: CollectiveRow) -> str:
    """How much of the nominal rate of its link a row reaches; empty if the link is unknown."""
    ratio = _link_ratio(row)
    if ratio is None or row.link_bytes_per_s is None:
        return ""
    return f", {short_percent(ratio)} of the {format_si(row.link_bytes_per_s, 'B/s')} of {row.link}"


def _latency(report: Report, row: CollectiveRow) -> str:
    """The alpha of its fit, or without a fit the time of the smallest size."""
    key = (row.operation, row.dtype, row.world_size, row.in_place)
    fits = [f for f in report.fits if (f.operation, f.dtype, f.world_size, f.in_place) == key and f.axes == row.axes]
    if fits and fits[0].alpha_s > 0:
        return f" and takes {number(fits[0].alpha_s, US)} {US.unit} to start"
    same = [r for r in report.collectives if r.cell == row.cell and (r.operation, r.dtype) == key[:2] and r.time_s]
    least = min(same, key=lambda r: r.size_bytes)
    return f" and takes {number(least.time_s, US)} {US.unit} for {format_size(least.size_bytes)}"


def best_row(rows: Sequence[CollectiveRow]) -> CollectiveRow | None:
    """The peak of all_reduce at the largest world size; without all_reduce, of the first operation with a bandwidth."""
    ok = [r for r in rows if r.status == "ok" and r.busbw_bytes_per_s]
    named = [r for r in ok if r.operation == "all_reduce"] or [r for r in ok if r.operation == ok[0].operation]
    return max(named, key=lambda r: (r.world_size, r.busbw_bytes_per_s or 0.0), default=None)


# --- one line per operation and dtype ---


class Sweep(NamedTuple):
    """All sizes of one operation in one dtype and mode, in place and out of place."""

    operation: str
    dtype: str
    mode: str
    rows: tuple[CollectiveRow, ...]


def _grouped(report: Report) -> Iterable[tuple[str, list[Sweep]]]:
    """The name of each fabric and its sweeps in the order measured; invalid runs are separate."""
    cells: dict[tuple[str, bool], dict[tuple[str, str, str], list[CollectiveRow]]] = {}
    for r in report.collectives:
        key = (r.cell, r.status == "invalid")
        cells.setdefault(key, {}).setdefault((r.operation, r.dtype, r.mode), []).append(r)
    for (_, invalid), sweeps in cells.items():
        first = next(iter(sweeps.values()))[0]
        name = fabric_name(report, first.axes) + (", invalid" if invalid else "")
        order = list(dict.fromkeys(operation for operation, _, _ in sweeps))
        keys = sorted(sweeps, key=lambda key: order.index(key[0]))
        yield name, [Sweep(*key, tuple(sweeps[key])) for key in keys]


def _summaries(report: Report) -> Iterable[Table]:
    for name, sweeps in _grouped(report):
        peaks = [r.busbw_bytes_per_s for sweep in sweeps for r in sweep.rows]
        scale = scale_of("bytes/s", "busbw", peaks)
        every = [r for sweep in sweeps for r in sweep.rows]
        has_link = any(r.link for r in every)
        columns = (
            Column("operation"),
            Column("dtype"),
            numeric(f"latency, {US.unit}"),
            numeric(f"peak busbw, {scale.unit}"),
            numeric("at", 3),
            *([numeric("of link, %", 1)] if has_link else []),
            numeric("half from", 5),
            numeric(f"in-place peak, {scale.unit}", 6),
            numeric(f"fit \u03b1, {US.unit}", 2),
            numeric(f"fit \u03b2, {scale.unit}", 2),
            numeric("worst skew", 7),
            numeric("wrong"),
            Column("rows", priority=1),
        )
        fits = {(f.operation, f.dtype, f.in_place): f for f in report.fits if f.axes == sweeps[0].rows[0].axes}
        rows = tuple(_summary(sweep, scale, fits, has_link) for sweep in sweeps)
        notes = dict.fromkeys((*_link_notes(every), *(r.note for r in every if r.note)))
        # Each reason once, with the first row it applies to.
        first: dict[str, CollectiveRow] = {}
        for r in every:
            if r.error:
                first.setdefault(r.error, r)
        errors = (
            f"{r.operation} in {r.dtype}, {format_size(r.size_bytes)}: {r.status}: {error}"
            for error, r in list(first.items())[:MOST_ERRORS]
        )
        about = tuple((sweep.rows[0].cell,) for sweep in sweeps)
        yield Table(f"Collectives, {name}", columns, rows, (*notes, *errors), about)


def _link_notes(rows: Sequence[CollectiveRow]) -> Iterable[str]:
    """The nominal rate of each link with the operations that it limits."""
    limited: dict[tuple[str, float], dict[str, None]] = {}
    for r in rows:
        if r.link and r.link_bytes_per_s:
            limited.setdefault((r.link, r.link_bytes_per_s), {})[r.operation] = None
    for (link, rate), operations in limited.items():
        whose = f" for {', '.join(operations)}" if len(limited) > 1 else ""
        yield f"Link: {link}, nominally {format_si(rate, 'B/s')} in each direction{whose}."


def _summary(
    sweep: Sweep, scale: Scale, fits: Mapping[tuple[str, str, bool], CollectiveFit], has_link: bool
) -> tuple[Cell, ...]:
    measured = [r for r in sweep.rows if r.time_s]
    out, inside = ([r for r in measured if r.in_place == place] for place in (False, True))
    shown = out or inside
    least = min(shown, key=lambda r: r.size_bytes, default=None)
    peak, peak_inside = _peak(shown), _peak(inside) if out else None
    half = half_peak_size(shown)
    fit = fits.get((sweep.operation, sweep.dtype, not out)) if sweep.mode == "single" else None
    skews = [r.skew_ratio for r in measured if r.skew_ratio is not None]
    wrong = [r.wrong for r in sweep.rows if r.wrong is not None]
    statuses = Counter(r.status for r in sweep.rows)
    ended = ", ".join(f"{n} {word}" for word, n in statuses.items())
    mode = "" if sweep.mode == "single" else f" ({sweep.mode})"
    return (
        Cell(sweep.operation + mode),
        Cell(sweep.dtype),
        Cell(number(least.time_s if least else None, US)),
        Cell(number(peak.busbw_bytes_per_s if peak else None, scale)),
        Cell(format_size(peak.size_bytes) if peak else MISSING),
        *([Cell(number(_link_ratio(peak), PERCENT))] if has_link else []),
        Cell(format_size(half) if half is not None else MISSING),
        Cell(number(peak_inside.busbw_bytes_per_s if peak_inside else None, scale)),
        Cell(number(fit.alpha_s if fit else None, US)),
        Cell(number(fit.beta_bytes_per_s if fit else None, scale)),
        Cell(f"{number(max(skews, default=None), Scale(''))}"),
        _wrong(sum(wrong) if wrong else None),
        Cell(ended, "", "" if set(statuses) == {"ok"} else "bad"),
    )


def _link_ratio(row: CollectiveRow | None) -> float | None:
    """Measured bus bandwidth over the nominal rate of the link."""
    if row is None or row.busbw_bytes_per_s is None or not row.link_bytes_per_s:
        return None
    return row.busbw_bytes_per_s / row.link_bytes_per_s


def _peak(rows: Sequence[CollectiveRow]) -> CollectiveRow | None:
    return max((r for r in rows if r.busbw_bytes_per_s), key=lambda r: r.busbw_bytes_per_s or 0.0, default=None)


def half_peak_size(rows: Sequence[CollectiveRow]) -> int | None:
    """n1/2: the smallest size that reaches half of the peak bus bandwidth."""
    peak = _peak(rows)
    if peak is None or peak.busbw_bytes_per_s is None:
        return None
    return min(r.size_bytes for r in rows if (r.busbw_bytes_per_s or 0.0) >= peak.busbw_bytes_per_s / 2)


def _wrong(count: int | None) -> Cell:
    return Cell(MISSING) if count is None else Cell(str(count), "", "bad" if count else "good")


# --- every row ---


def _rows(title: str, rows: Sequence[CollectiveRow]) -> Table:
    """Out-of-place and in-place of one size side by side, as nccl-tests prints them."""
    both: dict[tuple[int, int], dict[bool, CollectiveRow]] = {}
    for r in rows:
        both.setdefault((r.size_bytes, r.count), {})[r.in_place] = r
    scale = scale_of("bytes/s", "busbw", [r.busbw_bytes_per_s for r in rows])
    timed = ("time, " + US.unit, f"algbw, {scale.unit}", f"busbw, {scale.unit}", "wrong")
    places = [place for place in (False, True) if any(r.in_place == place for r in rows)]
    columns = [
        numeric("size, B"),
        numeric("count"),
        Column("type"),
        *(numeric(f"in-place {h}" if place else h) for place in places for h in timed),
        *(numeric(f"p{q}, {US.unit}") for q in (50, 95, 99)),
        numeric("skew"),
        numeric("late rank"),
        Column("status"),
    ]
    ordered = [both[key] for key in sorted(both)]
    mode = {r.mode for r in rows} - {"single"}
    title += f" ({', '.join(sorted(mode))})" if mode else ""
    launches, counts = max(r.launches for r in rows), {r.iterations for r in rows if r.iterations}
    spread = f"{min(counts):,} to {max(counts):,}" if len(counts) > 1 else f"{max(counts, default=0):,}"
    made = f"{spread} iterations in {launches} launch{'es' if launches > 1 else ''}; percentiles: out-of-place, if any."
    notes = (made, *dict.fromkeys(r.note for r in rows if r.note))
    return Table(title, tuple(columns), tuple(_row(pair, places, scale) for pair in ordered), notes)


def _row(pair: Mapping[bool, CollectiveRow], places: Sequence[bool], scale: Scale) -> tuple[Cell, ...]:
    first = pair.get(False) or pair[True]
    bad = next((r for r in pair.values() if r.status != "ok"), None)
    return (
        Cell(f"{first.size_bytes:,}"),
        Cell(f"{first.count:,}"),
        Cell(first.dtype),
        *(cell for place in places for cell in _timed(pair.get(place), scale)),
        *(Cell(number(seconds, US)) for seconds in (first.p50_s, first.p95_s, first.p99_s)),
        Cell(number(first.skew_ratio, Scale(""))),
        Cell(MISSING if first.late_rank is None else str(first.late_rank)),
        Cell(bad.status, bad.error or "", "bad") if bad else Cell("ok"),
    )


def _timed(row: CollectiveRow | None, scale: Scale) -> tuple[Cell, ...]:
    if row is None:
        return (Cell(MISSING),) * 4
    numbers = ((row.time_s, US), (row.algbw_bytes_per_s, scale), (row.busbw_bytes_per_s, scale))
    return (*(Cell(number(value, unit)) for value, unit in numbers), _wrong(row.wrong))
