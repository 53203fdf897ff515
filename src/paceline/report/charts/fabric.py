"""Charts of the fabric: time and bandwidth over size with their fits, and the pairs of a tournament."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from paceline.analysis.findings import CollectiveRow, Report
from paceline.report.charts.chart import (
    CURVE,
    HEAT,
    JOINED,
    LINES,
    LOG,
    LOG2,
    LONE,
    Axis,
    Chart,
    Point,
    Rule,
    Series,
    numbered,
    others,
    used,
)
from paceline.report.tables.fabric import best_row
from paceline.report.tables.fabric_links import US, fabric_name, number
from paceline.wording import format_size, scale_of

# The fabrics with most rows; the tables have all.
MOST_FABRICS = 3
BUSBW = "collective_busbw"
# One direction: PCI-SIG, after 128b/130b encoding; NVIDIA, NVLink 2 to 4 (25 GB/s per link) and 5 (50 GB/s).
PCIE_LANE_BYTES_PER_S = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
FASTER_NVLINK = 10.0  # compute capability
BYTES = Axis(label="size", scale=LOG2, ticks="bytes")


def collectives(report: Report) -> Iterator[Chart]:
    """Two charts per fabric, a panel per operation: time over size, and bus bandwidth over size."""
    rows = [r for r in report.collectives if r.status == "ok" and r.time_s and r.size_bytes and r.mode == "single"]
    cells = [r.cell for r in rows]
    for cell in sorted(dict.fromkeys(cells), key=lambda c: -cells.count(c))[:MOST_FABRICS]:
        ours = [r for r in rows if r.cell == cell]
        # In-place rows only of what was not measured out of place.
        out = {(r.operation, r.dtype) for r in ours if not r.in_place}
        ours = [r for r in ours if not r.in_place or (r.operation, r.dtype) not in out]
        ours.sort(key=lambda r: (r.operation, r.dtype, r.size_bytes))
        if len({r.size_bytes for r in ours}) < 2:
            continue
        shared = "; shared GPU: not a speed" if "shared GPU" in (ours[0].note or "") else ""
        where = fabric_name(report, ours[0].axes) + shared
        scale = scale_of("bytes/s", "busbw", [r.busbw_bytes_per_s for r in ours])
        times: list[Point] = []
        rates: list[Point] = []
        for r in ours:
            measured, fitted = _points(report, r)
            times.append(replace(measured, y=(r.time_s or 0.0) * 1e6))
            if fitted is not None:
                times.append(replace(fitted, y=fitted.y * 1e6))
            if r.busbw_bytes_per_s is not None:
                rates.append(replace(measured, y=r.busbw_bytes_per_s * scale.factor))
                if fitted is not None:
                    rates.append(replace(fitted, y=r.size_bytes * _factor(r) / fitted.y * scale.factor))
        base = Chart(
            name=f"collective_time_{cell[:8]}",
            title=f"Collectives: time over size, {where}",
            subtitle="Slowest rank's mean. Dots: measured (out of place, if any); "
            "lines: the fit t = \u03b1 + S\u00b7f/\u03b2. Both axes logarithmic.",
            kind=LINES,
            x=BYTES,
            y=Axis(label=US.unit, unit=US.unit, scale=LOG, zero=False),
            points=tuple(times),
            series=others(r.dtype for r in ours),
        )
        yield base
        yield replace(
            base,
            name=f"collective_bandwidth_{cell[:8]}",
            title=f"Collectives: bus bandwidth over size, {where}",
            subtitle="Comparable between operations and with the link. Dots: measured; lines: the same fit.",
            y=Axis(label=scale.unit, unit=scale.unit, scale=LOG, zero=False),
            points=tuple(rates),
        )


def operations(report: Report) -> tuple[Series, ...]:
    """Operations that have a bandwidth, with their colours."""
    return numbered(sorted({row.operation for row in report.collectives if row.busbw_bytes_per_s}))


def busbw(report: Report) -> Iterator[Chart]:
    """One line per operation of the fabric with the best bandwidth, and what the link could carry."""
    best = best_row(report.collectives)
    if best is None:
        return
    rows = [r for r in report.collectives if r.cell == best.cell and r.status == "ok" and r.busbw_bytes_per_s]
    rows = [r for r in rows if (r.mode, r.dtype) == (best.mode, best.dtype) and r.size_bytes]
    # The faster of in place and out of place.
    fastest: dict[tuple[str, int], CollectiveRow] = {}
    for r in sorted(rows, key=lambda r: r.busbw_bytes_per_s or 0.0):
        fastest[r.operation, r.size_bytes] = r
    if len({r.size_bytes for r in fastest.values()}) < 2:
        return
    scale = scale_of("bytes/s", "busbw", [r.busbw_bytes_per_s for r in rows])
    points = [
        replace(
            _points(report, r)[0],
            y=(r.busbw_bytes_per_s or 0.0) * scale.factor,
            group="",
            series=r.operation,
            drawn=JOINED,
        )
        for r in sorted(fastest.values(), key=lambda r: (r.operation, r.size_bytes))
    ]
    limit = link_limit(report)
    shared = f" {best.note}." if best.note else ""
    yield Chart(
        name=BUSBW,
        title=f"Bus bandwidth over size: {best.dtype}, {fabric_name(report, best.axes)}",
        subtitle=f"Comparable between operations and with the link. Both axes are logarithmic.{shared}",
        kind=LINES,
        x=BYTES,
        y=Axis(label=scale.unit, unit=scale.unit, scale=LOG, zero=False),
        points=tuple(points),
        series=used(operations(report), points),
        rules=(Rule(y=limit[0] * scale.factor, label=limit[1]),) if limit else (),
    )


def link_limit(report: Report) -> tuple[float, str] | None:
    """What the slowest link between the GPUs of one host carries in one direction, by its datasheet, and its name.

    None for several hosts, whose network cards say nothing about their rate, and for ranks that share a GPU.
    """
    gpus = [gpu for machine in report.machines for gpu in machine.get("gpus") or ()]
    if len({machine.get("host") for machine in report.machines}) != 1 or len(gpus) < 2:
        return None
    kind, first = report.machines[0].get("links"), gpus[0]
    if kind == "nvlink" and first.get("nvlink_links"):
        each = 50e9 if float(first.get("capability") or 0) >= FASTER_NVLINK else 25e9
        rate = each * first["nvlink_links"]
        return rate, f"NVLink: {first['nvlink_links']} x {each / 1e9:.0f} = {rate / 1e9:,.0f} GB/s"
    lane = PCIE_LANE_BYTES_PER_S.get(first.get("pcie_generation") or 0)
    if kind == "pcie" and lane and first.get("pcie_width"):
        rate = lane * first["pcie_width"]
        return rate, f"PCIe {first['pcie_generation']}.0 x{first['pcie_width']}: {rate / 1e9:.1f} GB/s"
    return None


def _factor(r: CollectiveRow) -> float:
    """f of the operation: the ratio of bus bandwidth to algorithm bandwidth."""
    return r.busbw_bytes_per_s / r.algbw_bytes_per_s if r.busbw_bytes_per_s and r.algbw_bytes_per_s else 1.0


def _points(report: Report, r: CollectiveRow) -> tuple[Point, Point | None]:
    """The measured point and, if there is a fit, the fitted one; y is in seconds."""
    rate = scale_of("bytes/s", "busbw", [r.busbw_bytes_per_s])
    launches = f"{r.launches} launch{'' if r.launches == 1 else 'es'}"
    measured = Point(
        x=r.size_bytes,
        y=r.time_s or 0.0,
        group=r.operation,
        series=r.dtype,
        label=f"{r.operation}, {r.dtype}, {format_size(r.size_bytes)}",
        detail=f"{number(r.time_s, US)} {US.unit}, busbw {number(r.busbw_bytes_per_s, rate)} {rate.unit}\n"
        f"{r.iterations} iterations of {launches}",
        drawn=LONE,
        cells=(r.cell,),
        runs=(r.run,),
    )
    key = (r.operation, r.dtype, r.world_size, r.in_place, r.axes)
    fits = (f for f in report.fits if (f.operation, f.dtype, f.world_size, f.in_place, f.axes) == key)
    if (fit := next(fits, None)) is None:
        return measured, None
    rate = scale_of("bytes/s", "", [fit.beta_bytes_per_s])
    alpha, beta = f"{number(fit.alpha_s, US)} {US.unit}", f"{number(fit.beta_bytes_per_s, rate)} {rate.unit}"
    return measured, replace(
        measured,
        y=fit.alpha_s + r.size_bytes * _factor(r) / fit.beta_bytes_per_s,
        label=f"{r.operation}, {r.dtype}, fit",
        detail=f"\u03b1 {alpha}, \u03b2 {beta}, residual {fit.residual_ratio:.0%}",
        drawn=CURVE,
        runs=(),
    )


def pairs(report: Report) -> Iterator[Chart]:
    """Bandwidth of every pair of the first tournament, coloured by its share of what pairs of its kind reach."""
    first = report.pairs[0].run if report.pairs else None
    found = [p for p in report.pairs if p.run == first]
    cells = {run.run: run.cell for run in report.runs}
    scale = scale_of("bytes/s", "", [p.bandwidth_bytes_per_s for p in found])
    several_hosts = len({host for p in found for host in p.hosts}) > 1
    points = [
        Point(
            x=b,
            y=100 * p.ratio,
            label=str(a),
            group=p.hosts[p.ranks.index(a)] if several_hosts else "",
            text=rate,
            detail=f"ranks {p.ranks[0]} and {p.ranks[1]} on {' and '.join(dict.fromkeys(p.hosts))}\n"
            f"{rate} {scale.unit}, {p.ratio:.0%} of its kind, {p.turns} turns",
            cells=(cells.get(p.run, p.run),),
            runs=(p.run,),
        )
        for p in found
        for rate in (number(p.bandwidth_bytes_per_s, scale),)
        for a, b in (p.ranks, p.ranks[::-1])
    ]
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
