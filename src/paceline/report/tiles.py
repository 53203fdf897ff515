"""The tiles of the first screen: four numbers of the cell or load that the headline is about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from paceline.analysis.findings import CollectiveRow, Cost, Measurement, Report, offers_of, once
from paceline.analysis.findings.cell_axes import axis_text, describe
from paceline.analysis.findings.machine import FAIL, PASS, SUSPECT
from paceline.host.prices import SPOT
from paceline.report import answer
from paceline.report.charts import ceilings as ceiling_charts
from paceline.report.charts.chart import COLOURS, strategies, thinned
from paceline.report.charts.fabric import operations
from paceline.report.charts.front import lead_group
from paceline.report.charts.money import scale_of as cost_scale
from paceline.report.tables import ceilings, served
from paceline.report.tables import nodes as node_tables
from paceline.report.tables.fabric import best_row
from paceline.report.tables.fabric_links import US, number
from paceline.report.tables.memory import scale as memory_scale
from paceline.report.text.cells import THROUGHPUT, Group, Row
from paceline.wording import format_parts, format_size, scale_of, short_percent

TILES = 4
# Points of a trend: more cannot be seen at its size.
MOST_POINTS = 48
FEWEST_LAUNCHES = 3
MEMORY, SHARE, STEP = "peak_memory_bytes", "mfu_ratio", "step_time_s"
LINE, BARS = "line", "bars"
ONE_LAUNCH, NO_INTERVAL = "1 launch, no interval", "no interval"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """A few values to draw beside a number: as a line (over steps, launches or sizes) or as bars (other cells).

    colours are indexes in the palette, one for each bar or one for the line; at is the bar that the tile is about.
    """

    values: tuple[float, ...]
    name: str
    kind: str = LINE
    colours: tuple[int, ...] = (0,)
    at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One number with its interval, or in its place why it has none.

    note says what it is about; cell is the one to open, None if it is not of one.
    """

    name: str
    value: str
    unit: str
    interval: str = ""
    note: str = ""
    trend: Trend | None = None
    cell: str | None = None


@once
def tiles(report: Report) -> tuple[Tile, ...]:
    """Four numbers of the cell or load that the headline is about; fewer if fewer were measured."""
    group = lead_group(report)
    if group is not None:
        return _training_tiles(report, group)[:TILES]
    if served.loads_of(report):
        return _served_tiles(report)[:TILES]
    subjects = (_node_tiles(report), _fabric_tiles(report), _memory_tiles(report), _ceiling_tiles(report))
    return next((found for found in subjects if found), ())[:TILES]


def _lead(report: Report, group: Group) -> Row:
    """The recommended cell, the baseline of a design, else the fastest."""
    found = answer.headline(report)
    named = [row for row in group.rows if found is not None and row.label in found.choose[:1]]
    baselines = {outcome.baseline for outcome in report.effects}
    base = [row for row in group.rows if row.cell in baselines]
    return next(iter((*base, *named, *group.rows)))


def _training_tiles(report: Report, group: Group) -> tuple[Tile, ...]:
    row = _lead(report, group)
    costs = {offer.lead.cell: offer.lead for offer in offers_of(report.costs)}
    colours = {s.name: s.colour for s in strategies(report)}
    where = ", ".join((row.label, *group.title.split(", ")[:2]))
    found = [_measured_tile(report, group, row, THROUGHPUT, "Throughput", where, colours)]
    share = row.measurements.get(SHARE)
    known = share is not None and share.value is not None
    note = (share.note or "").partition(", ")[2].partition(" (")[0].rpartition(", ")[2] if share else ""
    found.append(
        _measured_tile(report, group, row, SHARE, "MFU", note, colours)
        if known
        else _measured_tile(report, group, row, STEP, "Step time", "per optimizer step", colours)
    )
    cost = costs.get(row.cell)
    if cost is not None:
        found.append(_cost_tile(report, group, row, cost, costs, colours))
    elif row.measurements[THROUGHPUT].unit != "samples/s":
        found.append(_measured_tile(report, group, row, "samples_per_s", "Samples", "sequences", colours))
    found.append(_measured_tile(report, group, row, MEMORY, "Peak memory", _capacity(report), colours))
    if known:
        found.append(_measured_tile(report, group, row, STEP, "Step time", "per optimizer step", colours))
    return tuple(tile for tile in found if tile is not None)


def _ends(m: Measurement, interval: str) -> str:
    """The interval, or why there is none: one launch has no spread, and bytes are often the same in every launch."""
    if interval:
        return interval
    if m.launches == 1:
        return ONE_LAUNCH
    return f"same in {m.launches} launches" if m.low is not None and m.low == m.high else NO_INTERVAL


def _measured_tile(
    report: Report, group: Group, row: Row, metric: str, name: str, note: str, colours: Mapping[str, int]
) -> Tile | None:
    m = row.measurements.get(metric)
    if m is None or m.value is None:
        return None
    scale = scale_of(m.unit, metric, (m.value,))
    value, interval = format_parts(m.value, m.low, m.high, scale)
    others = [(r.label, r.measurements[metric].value) for r in group.rows if metric in r.measurements]
    per_step = {THROUGHPUT: -1, SHARE: -1, STEP: 1}.get(metric)
    trend = _over_launches(report, m, colours.get(row.label, 0))
    if trend is None and per_step is not None:
        trend = _over_steps(report, m, per_step, colours.get(row.label, 0))
    trend = trend or _over_cells(others, row.label, colours)
    ends = _ends(m, interval)
    return Tile(name=name, value=value, unit=scale.unit, interval=ends, note=note, trend=trend, cell=row.cell)


def _cost_tile(
    report: Report, group: Group, row: Row, cost: Cost, costs: Mapping[str, Cost], colours: Mapping[str, int]
) -> Tile:
    m, scale = cost.usd_per_mtok, cost_scale(cost)
    value, interval = format_parts(m.value, m.low, m.high, scale)
    others = [(r.label, costs[r.cell].usd_per_mtok.value) for r in group.rows if r.cell in costs]
    trend = _over_cells(others, row.label, colours) or _over_steps(report, m, 1, colours.get(row.label, 0))
    note = f"at {cost.price.title}"
    return Tile(
        name="Cost",
        value=value,
        unit=scale.unit,
        interval=_ends(m, interval),
        note=note,
        trend=trend,
        cell=row.cell,
    )


def _capacity(report: Report) -> str:
    sizes = [gpu.get("memory_bytes") for machine in report.machines for gpu in machine.get("gpus") or ()]
    least = min((float(size) for size in sizes if size), default=None)
    return f"of {least / 2**30:.0f} GiB on the device" if least else "process with the highest peak"


def _over_launches(report: Report, m: Measurement, colour: int) -> Trend | None:
    """Launch by launch, if the cell was launched often enough over time."""
    series = next((h for h in report.histories if (h.cell, h.metric) == (m.cell, m.metric)), None)
    if series is None or len(series.points) < FEWEST_LAUNCHES:
        return None
    values = tuple(thinned([p.value for p in series.points], MOST_POINTS))
    return Trend(values=values, name=f"over {len(series.points)} launches", colours=(colour,))


def _over_steps(report: Report, m: Measurement, power: int, colour: int) -> Trend | None:
    """Step by step: what follows the step time (power 1) or its inverse (power -1) around its mean."""
    seconds = report.distributions.get(m.cell, ())
    if len(seconds) < FEWEST_LAUNCHES or m.value is None:
        return None
    chosen, mean = thinned(seconds, MOST_POINTS), fmean(seconds)
    values = tuple(m.value * (s / mean) ** power for s in chosen)
    return Trend(values=values, name=f"over {len(seconds)} measured steps", colours=(colour,))


def _over_cells(cells: Sequence[tuple[str, float | None]], own: str, colours: Mapping[str, int]) -> Trend | None:
    known = [(label, value) for label, value in cells if value is not None]
    if len(known) < 2:
        return None
    labels = [label for label, _ in known]
    return Trend(
        values=tuple(value for _, value in known),
        name=f"beside {', '.join(label for label in labels if label != own)}",
        kind=BARS,
        colours=tuple(colours.get(label, 0) for label in labels),
        at=labels.index(own) if own in labels else None,
    )


def best_load(report: Report) -> served.Key:
    """The valid load with the highest throughput; of all loads if none is valid."""
    loads = served.loads_of(report)
    valid = {(v.cell, v.axes.get("stage")) for v in report.served if v.is_valid}
    known = [key for key in loads if key in valid] or list(loads)
    return max(known, key=lambda key: loads[key]["output_tokens_per_s"].value or 0.0)


def _served_tiles(report: Report) -> tuple[Tile, ...]:
    loads = served.loads_of(report)
    key = best_load(report)
    best = loads[key]
    chosen = [
        (("output_tokens_per_s",), "Output"),
        (("ttft_p99_s", "ttft_p50_s"), "TTFT"),
        (("tpot_p99_s", "tpot_p50_s"), "TPOT"),
    ]
    what = served.load_text(best, loads).partition(", engine")[0]

    def values_of(metric: str) -> tuple[float, ...]:
        return tuple(v for load in loads.values() if (m := load.get(metric)) and (v := m.value) is not None)

    found = []
    for metrics, name in chosen:
        metric = next((n for n in metrics if (m := best.get(n)) and m.value is not None), None)
        if metric is None:
            continue
        m = best[metric]
        scale = scale_of(m.unit, metric, (m.value,))
        value, interval = format_parts(m.value, m.low, m.high, scale)
        percentile = next((f" {p}" for p in ("p99", "p50") if p in metric), "")
        others = values_of(metric)
        trend = _each_load(others, m.value)
        few = "" if "p99" in metric or name == "Output" else "too few requests for p99; "
        found.append(
            Tile(
                name=f"{name}{percentile}",
                value=value,
                unit=scale.unit,
                interval=_ends(m, interval),
                note=f"{few}{what}",
                trend=trend,
                cell=m.cell,
            )
        )
    costs = [c for c in report.served_costs if c.cell == key[0]]
    cost = next((c for c in costs if c.price.kind != SPOT), costs[0] if costs else None)
    if cost is not None:
        m = cost.usd_per_output_mtok
        value, interval = format_parts(m.value, m.low, m.high)
        note = f"output tokens, at {cost.price.title}"
        unit = "USD per million tokens"
        alike = (c for c in report.served_costs if c.price.name == cost.price.name and c.price.kind == cost.price.kind)
        usd = tuple(c.usd_per_output_mtok.value for c in alike if c.usd_per_output_mtok.value is not None)
        trend = _each_load(usd, m.value)
        ends = _ends(m, interval)
        found.append(Tile(name="Cost", value=value, unit=unit, interval=ends, note=note, trend=trend, cell=m.cell))
    elif (rate := best.get("requests_per_s")) is not None and rate.value is not None:
        value, interval = format_parts(rate.value, rate.low, rate.high)
        found.append(
            Tile(
                name="Requests",
                value=value,
                unit="requests/s",
                interval=_ends(rate, interval),
                note=what,
                trend=_each_load(values_of("requests_per_s"), rate.value),
                cell=rate.cell,
            )
        )
    return tuple(found)


def _each_load(values: tuple[float, ...], own: float | None) -> Trend | None:
    """All loads beside each other, in a colour that none of them has."""
    if len(values) < 2:
        return None
    at = values.index(own) if own in values else None
    return Trend(values=values, name="each load", kind=BARS, colours=(COLOURS,) * len(values), at=at)


def _fabric_tiles(report: Report) -> tuple[Tile, ...]:
    """The best bus bandwidth of the operations that training uses most, then the latency of the first of them."""
    lead = best_row(report.collectives)
    ours = [r for r in report.collectives if lead is not None and r.cell == lead.cell and r.status == "ok"]
    rows = [r for r in ours if r.busbw_bytes_per_s and r.time_s and r.size_bytes]
    best: dict[str, CollectiveRow] = {}
    for row in rows:
        other = best.get(row.operation)
        if other is None or (row.busbw_bytes_per_s or 0.0) > (other.busbw_bytes_per_s or 0.0):
            best[row.operation] = row
    wanted = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    order = sorted(best, key=lambda op: wanted.index(op) if op in wanted else len(wanted))
    colours = {one.name: one.colour for one in operations(report)}
    found = []

    def over_size(row: CollectiveRow, value: Callable[[CollectiveRow], float | None]) -> Trend | None:
        own = (row.operation, row.dtype, row.mode, row.in_place)
        sizes = {r.size_bytes: value(r) or 0.0 for r in rows if (r.operation, r.dtype, r.mode, r.in_place) == own}
        values = tuple(sizes[size] for size in sorted(sizes))
        return Trend(values=values, name="over message size", colours=(colours[row.operation],)) if values[1:] else None

    for operation in order[: TILES - 1]:
        row = best[operation]
        scale = scale_of("bytes/s", "busbw", [row.busbw_bytes_per_s])
        found.append(
            Tile(
                name=f"{operation} bus bandwidth",
                value=format_parts(row.busbw_bytes_per_s, None, None, scale)[0],
                unit=scale.unit,
                interval=_launches(row),
                note=", ".join(filter(None, (f"{row.dtype}, {axis_text('world_size', row.axes)}", row.note))),
                trend=over_size(row, lambda r: r.busbw_bytes_per_s),
                cell=row.cell,
            )
        )
    if order:
        least = min((r for r in rows if r.operation == order[0]), key=lambda r: (r.size_bytes, r.time_s))
        found.append(
            Tile(
                name=f"{order[0]} latency",
                value=number(least.time_s, US),
                unit=US.unit,
                interval=_launches(least),
                note=f"at {format_size(least.size_bytes)}, {least.dtype}",
                trend=over_size(least, lambda r: r.time_s),
                cell=least.cell,
            )
        )
    return tuple(found)


def _launches(row: CollectiveRow) -> str:
    return ONE_LAUNCH if row.launches == 1 else f"mean of {row.launches} launches"


def _memory_tiles(report: Report) -> tuple[Tile, ...]:
    rows = [row for row in report.memory if row.measured.get("peak")]
    if not rows:
        return ()
    unit = memory_scale(rows)
    rows.sort(key=lambda row: row.measured["peak"] or 0)
    peaks = [float(row.measured["peak"] or 0) for row in rows]
    known = {one.name: one.colour for one in strategies(report)}
    colours = tuple(known[describe(row.axes, ())] for row in rows)
    most = max(rows, key=lambda row: row.measured["peak"] or 0)
    wrong = sorted(
        (abs(row.error_ratio), colour) for row, colour in zip(rows, colours, strict=True) if row.error_ratio is not None
    )
    errors = [error for error, _ in wrong]
    capacity = f"of {most.capacity_bytes * unit.factor:.0f} {unit.unit}" if most.capacity_bytes else ""
    found = [
        Tile(
            name="Largest peak",
            value=format_parts(max(peaks), None, None, unit)[0],
            unit=unit.unit,
            interval=f"from {format_parts(min(peaks), None, None, unit)[0]}" if peaks[1:] else "",
            note=capacity,
            trend=Trend(values=tuple(peaks), name="every cell", kind=BARS, colours=colours),
            cell=most.cell,
        )
    ]
    if errors:
        bars = Trend(values=tuple(errors), name="every cell", kind=BARS, colours=tuple(colour for _, colour in wrong))
        worst = max((row for row in rows if row.error_ratio is not None), key=lambda row: abs(row.error_ratio or 0.0))
        middle, most_wrong = (short_percent(error).removesuffix(" %") for error in (median(errors), max(errors)))
        found += [
            Tile(
                name="Median error",
                value=middle,
                unit="%",
                interval=f"at most {most_wrong}",
                note=f"of {len(errors)} cells, predicted before the run",
                trend=bars,
            ),
            Tile(
                name="Worst error",
                value=most_wrong,
                unit="%",
                interval=f"predicted {'too much' if (worst.error_ratio or 0.0) > 0 else 'too little'}",
                note=describe(worst.axes, ()),
                trend=replace(bars, at=len(errors) - 1),
                cell=worst.cell,
            ),
        ]
    ended = Counter(run.status for run in report.runs if not run.proves_only)
    found.append(Tile(name="Cells measured", value=str(len(rows)), unit="", note=_ended(ended)))
    return tuple(found)


def _ended(statuses: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {status}" for status, count in statuses.items())


def _ceiling_tiles(report: Report) -> tuple[Tile, ...]:
    ours = [m for m in report.measurements if "kernel" in m.axes and m.axes["rank"] is None and m.value is not None]
    best = [m for m in ours if m.metric == "achievable_flops_per_s"]
    shares = {m.axes["dtype"]: m for m in ours if m.metric == "datasheet_share_ratio"}
    lines = {one.name: one.colour for chart in ceiling_charts.products(report) for one in chart.series}
    order = ("bf16", "fp8", "fp16", "tf32", "fp32")
    best.sort(key=lambda m: order.index(str(m.axes["dtype"])) if m.axes["dtype"] in order else len(order))
    scale = ceilings.scale_for(best)
    found = []
    for m in best[:2]:
        value, interval = format_parts(m.value, m.low, m.high, scale)
        share = shares.get(m.axes["dtype"])
        note = (
            f"{100 * share.value:.0f} % of the datasheet" if share and share.value else str(m.axes.get("label") or "")
        )
        dtype = m.axes["dtype"]
        swept = [
            n for n in ours if n.metric == "matmul_flops_per_s" and n.axes["dtype"] == dtype and n.axes.get("size")
        ]
        values = tuple(n.value or 0.0 for n in sorted(swept, key=lambda n: float(n.axes["size"] or 0)))
        colour = lines.get(str(dtype), COLOURS)
        trend = Trend(values=values, name="over the size of the matrices", colours=(colour,)) if values[1:] else None
        found.append(
            Tile(
                name=f"{dtype} products",
                value=value,
                unit=scale.unit,
                interval=interval,
                note=note,
                trend=trend,
                cell=m.cell,
            )
        )
    for metric, name in (("copy_bytes_per_s", "Memory copy"), ("h2d_bytes_per_s", "Host to device")):
        copies = [m for m in ours if m.metric == metric and m.axes.get("variant") != "pageable"]
        if copies:
            copies.sort(key=lambda m: float(m.axes["size"] or 0))
            value, interval = format_parts(copies[-1].value, copies[-1].low, copies[-1].high, ceilings.GIGA)
            values = tuple(m.value or 0.0 for m in copies)
            trend = Trend(values=values, name="over size", colours=(COLOURS,)) if values[1:] else None
            variant = copies[-1].axes.get("variant")
            note = f"{variant}, largest size" if variant else "largest size, bytes read and written"
            found.append(
                Tile(name=name, value=value, unit=ceilings.GIGA.unit, interval=interval, note=note, trend=trend)
            )
    return tuple(found)


def _node_tiles(report: Report) -> tuple[Tile, ...]:
    if not report.nodes:
        return ()
    counts = Counter(node.verdict for node in report.nodes)
    noun = node_tables.noun(report)
    total = f"of {len(report.nodes)} {noun}{'' if len(report.nodes) == 1 else 's'}"
    named = {
        verdict: ", ".join(node.node for node in report.nodes if node.verdict == verdict) for verdict in (FAIL, SUSPECT)
    }
    rest = len(report.nodes) - counts[PASS] - counts[FAIL] - counts[SUSPECT]
    return (
        Tile(name="Pass", value=str(counts[PASS]), unit=f"{noun}s", note=total),
        Tile(name="Fail", value=str(counts[FAIL]), unit=f"{noun}s", note=named[FAIL] or total),
        Tile(name="Suspect", value=str(counts[SUSPECT]), unit=f"{noun}s", note=named[SUSPECT] or total),
        Tile(name="Inconclusive", value=str(rest), unit=f"{noun}s", note=total),
    )
