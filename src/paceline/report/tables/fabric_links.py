"""What a sweep says about the links: latency and bandwidth by fit, overlap, the tournament and its suspects."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from paceline.analysis.findings import CollectiveFit, Overlap, Pair, Report, Suspect
from paceline.analysis.findings.cell_axes import axis_text
from paceline.errors import Scalar
from paceline.report.tables.table import CROSS, TICK, Cell, Column, Table
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
    return ", ".join([*names, *([_told_apart(ours, workloads - {ours})] if len(workloads) > 1 else [])])


def _told_apart(workload: str, others: Collection[str]) -> str:
    """Its options in order, those alone that rule out another workload; all of it where its options do not tell."""
    left = [set(_options(other)) for other in others]
    kept = []
    for option in _options(workload):
        rest = [other for other in left if option in other]
        if len(rest) < len(left):
            kept.append(option)
        left = rest
    return workload if left else ", ".join(kept)


def _options(workload: str) -> list[str]:
    return list(filter(None, workload.partition(":")[2].split(",")))


def verdict_sentence(report: Report) -> str:
    """Who is suspect, or that nobody is; empty if nothing was compared."""
    if report.suspects:
        return " ".join(f"Suspect: {s.text}." for s in report.suspects)
    ranks = {r for pair in report.pairs for r in pair.ranks}
    return "No node, rank or link is an outlier among its peers." if len(ranks) > 2 else ""


def fits(report: Report) -> Table | None:
    """Every fit with its residual."""
    scale = scale_of("bytes/s", "beta", [f.beta_bytes_per_s for f in report.fits])
    columns = (
        Column("operation"),
        Column("dtype"),
        Column("fabric", priority=2),
        Column("place", priority=3),
        Column(f"\u03b1, {US.unit}", numeric=True),
        Column(f"\u03b2, {scale.unit}", numeric=True),
        Column("residual, %", numeric=True, priority=1),
        Column("sizes", numeric=True, priority=4),
    )
    rows = tuple(_fit(report, f, scale) for f in report.fits)
    notes = dict.fromkeys(f"{f.operation}, {f.dtype}: {f.note}" for f in report.fits if f.note)
    first = "t = \u03b1 + S\u00b7f/\u03b2, least squares of relative errors; the residual is their root mean square."
    return Table("Every fit: latency and bandwidth", columns, rows, (first, *notes)) if rows else None


def _fit(report: Report, f: CollectiveFit, scale: Scale) -> tuple[Cell, ...]:
    return (
        Cell(f.operation),
        Cell(f.dtype),
        Cell(fabric_name(report, f.axes)),
        Cell("in" if f.in_place else "out"),
        Cell(number(f.alpha_s, US)),
        Cell(number(f.beta_bytes_per_s, scale)),
        Cell(format_number(PERCENT.apply(f.residual_ratio), 2)),
        Cell(str(f.sizes)),
    )


def _overlaps(report: Report) -> Table | None:
    columns = (
        Column("operation"),
        Column("dtype"),
        Column("size", numeric=True),
        Column("collective, ms", numeric=True),
        Column("products, ms", numeric=True),
        Column("together, ms", numeric=True),
        Column("hidden, %", numeric=True),
    )
    notes = ("Hidden is the part of the collective that took no time of its own beside matrix products.",)
    short = [o for o in report.overlaps if o.compute_s < o.collective_s]
    more = ("Where the products are shorter than the collective, only that much of it could be hidden.",)
    rows = tuple(map(_overlap, report.overlaps))
    return Table("Collectives beside matrix products", columns, rows, notes + (more if short else ())) if rows else None


def _overlap(o: Overlap) -> tuple[Cell, ...]:
    times = (Cell(number(t, Scale("ms", 1e3))) for t in (o.collective_s, o.compute_s, o.together_s))
    hidden = Cell(number(o.hidden_ratio, PERCENT))
    return Cell(o.operation), Cell(o.dtype), Cell(format_size(o.size_bytes)), *times, hidden


def _tournament(report: Report) -> Table | None:
    by_run: dict[str, list[Pair]] = {}
    for pair in report.pairs:
        by_run.setdefault(pair.run, []).append(pair)
    scale = scale_of("bytes/s", "", [p.bandwidth_bytes_per_s for p in report.pairs])
    columns = (
        Column("run"),
        Column("ranks", numeric=True),
        Column("pairs", numeric=True, priority=2),
        Column(f"slowest, {scale.unit}", numeric=True),
        Column("of its kind, %", numeric=True),
        Column("between ranks"),
        Column(f"fastest, {scale.unit}", numeric=True, priority=1),
    )
    rows = tuple(_tournament_row(run, pairs, scale) for run, pairs in by_run.items())
    return Table("Pair tournament", columns, rows, _verdict_notes(report)) if rows else None


def _tournament_row(run: str, pairs: Sequence[Pair], scale: Scale) -> tuple[Cell, ...]:
    slowest = min(pairs, key=lambda p: p.ratio)
    fastest = max(p.bandwidth_bytes_per_s for p in pairs)
    return (
        Cell(run, "", "code"),
        Cell(str(len({r for p in pairs for r in p.ranks}))),
        Cell(str(len(pairs))),
        Cell(number(slowest.bandwidth_bytes_per_s, scale)),
        Cell(number(slowest.ratio, PERCENT)),
        Cell(" and ".join(map(str, slowest.ranks))),
        Cell(number(fastest, scale)),
    )


def _verdict_notes(report: Report) -> tuple[str, ...]:
    said = verdict_sentence(report)
    return (said,) if said and not report.suspects else ()


def _suspects(report: Report) -> Table | None:
    columns = (
        Column("suspect"),
        Column("rank"),
        Column("host"),
        Column("device", priority=1),
        Column("ratio, %", numeric=True),
        Column("z", numeric=True, priority=3),
        Column("confirmed"),
    )
    rows = tuple(map(_suspect, report.suspects))
    return Table("Suspects", columns, rows, tuple(f"{s.text}." for s in report.suspects)) if rows else None


def _suspect(s: Suspect) -> tuple[Cell, ...]:
    return (
        Cell(s.kind, "", "bad"),
        Cell(", ".join(map(str, s.ranks))),
        Cell(", ".join(s.hosts)),
        Cell(", ".join(dict.fromkeys(s.devices))),
        Cell(number(s.ratio, PERCENT)),
        Cell(f"{s.z:.1f}"),
        Cell(TICK if s.confirmed else CROSS, "", "good" if s.confirmed else "quiet"),
    )
