"""What a sweep says about the links: latency and bandwidth by fit, overlap, the tournament and its suspects."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from paceline.analysis.findings import CollectiveFit, Overlap, Pair, Report, Suspect
from paceline.analysis.findings.cell_axes import axis_text
from paceline.errors import Scalar
from paceline.report.tables.table import CROSS, TICK, Cell, Column, Filled, Table, filled, numeric
from paceline.report.text.cells import varying_axes
from paceline.wording import Scale, format_number, format_parts, format_size, scale_of

US, PERCENT = Scale("\u00b5s", 1e6), Scale("%", 100.0)


def tables(report: Report) -> tuple[Table, ...]:
    found = (_overlaps(report), _tournament(report), _suspects(report))
    return tuple(table for table in found if table)


def number(value: float | None, scale: Scale) -> str:
    return format_parts(value, None, None, scale)[0]


def fabric_name(report: Report, axes: Mapping[str, Scalar]) -> str:
    """`4 GPUs`, and whatever else distinguishes this sweep from the others of the report."""
    shown = ["world_size", *(n for n in varying_axes(report) if n not in ("world_size", "model", "workload"))]
    names = [axis_text(n, axes) for n in shown if axes.get(n) is not None]
    workloads = {str(r.axes.get("workload")) for r in report.collectives}
    ours = str(axes.get("workload"))
    return ", ".join([*names, *([_distinguishing_options(ours, workloads - {ours})] if len(workloads) > 1 else [])])


def _distinguishing_options(workload: str, others: Collection[str]) -> str:
    """The options, in order, that no other workload shares; the whole workload if its options do not suffice."""

    def options(text: str) -> list[str]:
        return list(filter(None, text.partition(":")[2].split(",")))

    left = [set(options(other)) for other in others]
    kept = []
    for option in options(workload):
        rest = [other for other in left if option in other]
        if len(rest) < len(left):
            kept.append(option)
        left = rest
    return workload if left else ", ".join(kept)


def verdict_sentence(report: Report) -> str:
    """Who is suspect, or that nobody is; empty if nothing was compared."""
    if report.suspects:
        return " ".join(f"Suspect: {s.text}." for s in report.suspects)
    ranks = {r for pair in report.pairs for r in pair.ranks}
    return "No node, rank or link is an outlier among its peers." if len(ranks) > 2 else ""


def fits(report: Report) -> Table | None:
    """Every fit with its residual."""
    scale = scale_of("bytes/s", "beta", [f.beta_bytes_per_s for f in report.fits])
    columns: tuple[Filled[CollectiveFit], ...] = (
        (Column("operation"), lambda f: f.operation),
        (Column("dtype"), lambda f: f.dtype),
        (Column("fabric", priority=2), lambda f: fabric_name(report, f.axes)),
        (Column("place", priority=3), lambda f: "in" if f.in_place else "out"),
        (numeric(f"\u03b1, {US.unit}"), lambda f: number(f.alpha_s, US)),
        (numeric(f"\u03b2, {scale.unit}"), lambda f: number(f.beta_bytes_per_s, scale)),
        (numeric("residual, %", 1), lambda f: format_number(PERCENT.apply(f.residual_ratio), 2)),
        (numeric("sizes", 4), lambda f: str(f.sizes)),
    )
    notes = dict.fromkeys(f"{f.operation}, {f.dtype}: {f.note}" for f in report.fits if f.note)
    first = "t = \u03b1 + S\u00b7f/\u03b2, least squares of relative errors; the residual is their root mean square."
    return filled("Every fit: latency and bandwidth", report.fits, columns, (first, *notes))


def _overlaps(report: Report) -> Table | None:
    ms = Scale("ms", 1e3)
    columns: tuple[Filled[Overlap], ...] = (
        (Column("operation"), lambda o: o.operation),
        (Column("dtype"), lambda o: o.dtype),
        (numeric("size"), lambda o: format_size(o.size_bytes)),
        (numeric("collective, ms"), lambda o: number(o.collective_s, ms)),
        (numeric("products, ms"), lambda o: number(o.compute_s, ms)),
        (numeric("together, ms"), lambda o: number(o.together_s, ms)),
        (numeric("hidden, %"), lambda o: number(o.hidden_ratio, PERCENT)),
    )
    notes = ["Hidden: the part of the collective that added no time beside matrix products."]
    if any(o.compute_s < o.collective_s for o in report.overlaps):
        notes.append("Where the products are shorter than the collective, only that much of it could be hidden.")
    return filled("Collectives beside matrix products", report.overlaps, columns, notes)


def _tournament(report: Report) -> Table | None:
    by_run: dict[str, list[Pair]] = {}
    for pair in report.pairs:
        by_run.setdefault(pair.run, []).append(pair)
    scale = scale_of("bytes/s", "", [p.bandwidth_bytes_per_s for p in report.pairs])

    def slowest(pairs: list[Pair]) -> Pair:
        return min(pairs, key=lambda p: p.ratio)

    def fastest(pairs: list[Pair]) -> str:
        return number(max(p.bandwidth_bytes_per_s for p in pairs), scale)

    columns: tuple[Filled[list[Pair]], ...] = (
        (Column("run"), lambda pairs: Cell(pairs[0].run, "", "code")),
        (numeric("ranks"), lambda pairs: str(len({r for p in pairs for r in p.ranks}))),
        (numeric("pairs", 2), lambda pairs: str(len(pairs))),
        (numeric(f"slowest, {scale.unit}"), lambda pairs: number(slowest(pairs).bandwidth_bytes_per_s, scale)),
        (numeric("of its kind, %"), lambda pairs: number(slowest(pairs).ratio, PERCENT)),
        (Column("between ranks"), lambda pairs: " and ".join(map(str, slowest(pairs).ranks))),
        (numeric(f"fastest, {scale.unit}", 1), fastest),
    )
    said = "" if report.suspects else verdict_sentence(report)
    return filled("Pair tournament", by_run.values(), columns, (said,) if said else ())


def _suspects(report: Report) -> Table | None:
    columns: tuple[Filled[Suspect], ...] = (
        (Column("suspect"), lambda s: Cell(s.kind, "", "bad")),
        (Column("rank"), lambda s: ", ".join(map(str, s.ranks))),
        (Column("host"), lambda s: ", ".join(s.hosts)),
        (Column("device", priority=1), lambda s: ", ".join(dict.fromkeys(s.devices))),
        (numeric("ratio, %"), lambda s: number(s.ratio, PERCENT)),
        (numeric("z", 3), lambda s: f"{s.z:.1f}"),
        (Column("confirmed"), lambda s: Cell(TICK, "", "good") if s.confirmed else Cell(CROSS, "", "quiet")),
    )
    return filled("Suspects", report.suspects, columns, (f"{s.text}." for s in report.suspects))
