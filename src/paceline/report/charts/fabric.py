"""Charts of the fabric: time and bandwidth over size with their fits, and the pairs of a tournament."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.analysis.findings import CollectiveFit, CollectiveRow, Pair, Report
from paceline.report.charts.chart import CURVE, HEAT, LINES, LOG, LOG2, LONE, Axis, Chart, Point, numbered
from paceline.report.tables.fabric_links import US, fabric_name, number
from paceline.wording import Scale, format_size, scale_of

# The fabrics with most rows; the tables hold the others too.
MOST_FABRICS = 3
BYTES = Axis(label="size", scale=LOG2, ticks="bytes")


def collectives(report: Report) -> Iterator[Chart]:
    """Two charts per fabric, a panel per operation: time over size, and bus bandwidth over size."""
    rows = [r for r in report.collectives if r.status == "ok" and r.time_s and r.size_bytes and r.mode == "single"]
    cells = [r.cell for r in rows]
    for cell in sorted(dict.fromkeys(cells), key=lambda c: -cells.count(c))[:MOST_FABRICS]:
        ours = _out_of_place([r for r in rows if r.cell == cell])
        if len({r.size_bytes for r in ours}) > 1:
            yield _time(report, cell, ours)
            yield _bandwidth(report, cell, ours)


def _out_of_place(rows: Sequence[CollectiveRow]) -> list[CollectiveRow]:
    """In-place rows only of what was not measured out of place."""
    out = {(r.operation, r.dtype) for r in rows if not r.in_place}
    kept = [r for r in rows if not r.in_place or (r.operation, r.dtype) not in out]
    return sorted(kept, key=lambda r: (r.operation, r.dtype, r.size_bytes))


def _where(report: Report, row: CollectiveRow) -> str:
    """The fabric, and what must be known before its numbers are read."""
    shared = "; shared GPU: not a speed" if "shared GPU" in (row.note or "") else ""
    return fabric_name(report, row.axes) + shared


def _time(report: Report, cell: str, rows: Sequence[CollectiveRow]) -> Chart:
    points = []
    for r in rows:
        points.append(_measured(r, (r.time_s or 0.0) * 1e6))
        if (fit := _fit(report, r)) is not None:
            points.append(_fitted(r, fit, _fit_seconds(r, fit) * 1e6, US))
    return Chart(
        name=f"collective_time_{cell[:8]}",
        title=f"Collectives: time over size, {_where(report, rows[0])}",
        subtitle="Slowest rank's mean. Dots: measured (out of place, if any); "
        "lines: the fit t = \u03b1 + S\u00b7f/\u03b2. Both axes logarithmic.",
        kind=LINES,
        x=BYTES,
        y=Axis(label=US.unit, unit=US.unit, scale=LOG, zero=False),
        points=tuple(points),
        series=numbered(r.dtype for r in rows),
    )


def _bandwidth(report: Report, cell: str, rows: Sequence[CollectiveRow]) -> Chart:
    scale = scale_of("bytes/s", "busbw", [r.busbw_bytes_per_s for r in rows])
    points = []
    for r in rows:
        if r.busbw_bytes_per_s is None:
            continue
        points.append(_measured(r, r.busbw_bytes_per_s * scale.factor))
        if (fit := _fit(report, r)) is not None:
            rate = r.size_bytes * _factor(r) / _fit_seconds(r, fit)
            points.append(_fitted(r, fit, rate * scale.factor, scale))
    return Chart(
        name=f"collective_bandwidth_{cell[:8]}",
        title=f"Collectives: bus bandwidth over size, {_where(report, rows[0])}",
        subtitle="Comparable between operations and with the link. Dots: measured; lines: the same fit.",
        kind=LINES,
        x=BYTES,
        y=Axis(label=scale.unit, unit=scale.unit, scale=LOG, zero=False),
        points=tuple(points),
        series=numbered(r.dtype for r in rows),
    )


def _fit(report: Report, r: CollectiveRow) -> CollectiveFit | None:
    key = (r.operation, r.dtype, r.world_size, r.in_place, r.axes)
    return next((f for f in report.fits if (f.operation, f.dtype, f.world_size, f.in_place, f.axes) == key), None)


def _factor(r: CollectiveRow) -> float:
    """f of the operation: what bus bandwidth is over algorithm bandwidth."""
    return r.busbw_bytes_per_s / r.algbw_bytes_per_s if r.busbw_bytes_per_s and r.algbw_bytes_per_s else 1.0


def _fit_seconds(r: CollectiveRow, fit: CollectiveFit) -> float:
    return fit.alpha_s + r.size_bytes * _factor(r) / fit.beta_bytes_per_s


def _measured(r: CollectiveRow, y: float) -> Point:
    rate = scale_of("bytes/s", "busbw", [r.busbw_bytes_per_s])
    launches = f"{r.launches} launch{'' if r.launches == 1 else 'es'}"
    return Point(
        x=r.size_bytes,
        y=y,
        group=r.operation,
        series=r.dtype,
        label=f"{r.operation}, {r.dtype}, {format_size(r.size_bytes)}",
        detail=f"{number(r.time_s, US)} {US.unit}, busbw {number(r.busbw_bytes_per_s, rate)} {rate.unit}\n"
        f"{r.iterations} iterations of {launches}",
        drawn=LONE,
        cells=(r.cell,),
        runs=(r.run,),
    )


def _fitted(r: CollectiveRow, fit: CollectiveFit, y: float, scale: Scale) -> Point:
    rate = scale_of("bytes/s", "", [fit.beta_bytes_per_s])
    return Point(
        x=r.size_bytes,
        y=y,
        group=r.operation,
        series=r.dtype,
        label=f"{r.operation}, {r.dtype}, fit",
        detail=f"\u03b1 {number(fit.alpha_s, US)} {US.unit}, "
        f"\u03b2 {number(fit.beta_bytes_per_s, rate)} {rate.unit}, residual {fit.residual_ratio:.0%}",
        drawn=CURVE,
        cells=(r.cell,),
    )


def pairs(report: Report) -> Iterator[Chart]:
    """Bandwidth of every pair of the first tournament, coloured by its share of what pairs of its kind reach."""
    first = report.pairs[0].run if report.pairs else None
    found = [p for p in report.pairs if p.run == first]
    cells = {run.run: run.cell for run in report.runs}
    scale = scale_of("bytes/s", "", [p.bandwidth_bytes_per_s for p in found])
    several = len({host for p in found for host in p.hosts}) > 1
    points = [point for p in found for point in _pair(p, scale, (cells.get(p.run, p.run),), several)]
    runs = len({p.run for p in report.pairs})
    beside = f" The first of {runs} runs." if runs > 1 else ""
    size = format_size(found[0].size_bytes) if found else ""
    yield Chart(
        name="pairs",
        title="Pair tournament",
        subtitle=f"{scale.unit} at {size}; colour: share of what pairs of the same kind reach.{beside}",
        kind=HEAT,
        x=Axis(label="rank"),
        y=Axis(label="share of its kind, %", unit="%"),
        points=tuple(sorted(points, key=lambda p: (int(p.label), int(p.x or 0)))),
        series=(),
    )


def _pair(p: Pair, scale: Scale, cells: tuple[str, ...], several_hosts: bool) -> list[Point]:
    rate = number(p.bandwidth_bytes_per_s, scale)
    hosts = " and ".join(dict.fromkeys(p.hosts))
    return [
        Point(
            x=b,
            y=100 * p.ratio,
            label=str(a),
            group=p.hosts[p.ranks.index(a)] if several_hosts else "",
            text=rate,
            detail=f"ranks {p.ranks[0]} and {p.ranks[1]} on {hosts}\n{rate} {scale.unit}, "
            f"{p.ratio:.0%} of its kind, {p.turns} turns",
            cells=cells,
            runs=(p.run,),
        )
        for a, b in (p.ranks, p.ranks[::-1])
    ]
