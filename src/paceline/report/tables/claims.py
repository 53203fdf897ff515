"""Numbers that others published, always marked as not measured."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.analysis.findings import Claim, ClaimedTransfer, ClaimedTransfers, Report
from paceline.analysis.findings.cell_axes import describe
from paceline.report.tables.table import Cell, Column, Filled, Table, filled, numeric
from paceline.wording import MISSING, Scale, format_number, format_parts, places, scale_of

_MS, _PERCENT, _MEGABYTES = Scale("ms", 1e3), Scale("%", 100.0), Scale("MB", 1e-6)
NOT_MEASURED = (
    "Claimed, not measured: no samples, so no interval; no certificate, so no proof of equal work. Nothing here is "
    "ranked, compared or recommended."
)
# Beyond this the bytes do not explain a table.
EXPLAINS_WITHIN = 0.10
# Heading, and how soon the column is left out where the table does not fit.
_COLUMNS = {
    "tokens_per_s": ("throughput, tokens/s", 0),
    "step_time_s": ("step", 0),
    "peak_memory_bytes": ("peak memory", 2),
    "scaling_efficiency_ratio": ("scaling", 1),
    "tokens_per_usd": ("tokens/USD", 3),
    "relative_cost_ratio": ("relative cost", 4),
    "tokens_per_step": ("tokens/step", 2),
}
# Values that follow from stated ones.
_SAID = {"tokens_per_step": "by its stated batch"}


def tables(report: Report) -> tuple[Table, ...]:
    """What each source says, and what its bytes alone would say; empty if nothing was imported."""
    sources = dict.fromkeys(claim.source for claim in report.claims)
    said = (_claims(source, [c for c in report.claims if c.source == source]) for source in sources)
    found = (*said, *map(_transfers, report.claimed_transfers))
    return tuple(table for table in found if table)


def sentence(report: Report) -> str:
    """How many rows are claims, and how many of their numbers contradict each other."""
    if not report.claims:
        return ""
    runs = {claim.run for claim in report.claims}
    checked = [c for c in report.claims if c.claimed is not None and c.recomputed is not None]
    wrong = sum(c.contradicted for c in checked)
    one = len(runs) == 1
    parts = [f"{'1 run is' if one else f'{len(runs)} runs are'} claimed by others: not measured, not ranked."]
    if checked:
        numbers = f"{len(checked)} claimed number{'' if len(checked) == 1 else 's'}"
        verb = "contradicts" if wrong == 1 else "contradict"
        parts.append(f"{wrong} of {numbers} {verb} the other numbers of the same source.")
    return " ".join((*parts, *(_explained(t) for t in report.claimed_transfers)))


def _claims(source: str, claims: Sequence[Claim]) -> Table | None:
    by_run: dict[str, dict[str, Claim]] = {}
    for claim in claims:
        by_run.setdefault(claim.run, {})[claim.metric] = claim

    def column(metric: str) -> Filled[dict[str, Claim]]:
        unit = next(c.unit for c in claims if c.metric == metric)
        scale = Scale("GB", 1e-9) if metric == "peak_memory_bytes" else scale_of(unit, metric)
        heading, priority = _COLUMNS[metric]
        heading += "" if scale.unit in ("tokens/s", "tokens/USD", "tokens", "times") else f", {scale.unit}"
        return numeric(heading, priority), lambda found: _cell(found.get(metric), scale)

    columns: tuple[Filled[dict[str, Claim]], ...] = (
        (Column("what", prose=True), lambda found: describe(next(iter(found.values())).axes)),
        *(column(name) for name in _COLUMNS if any(claim.metric == name for claim in claims)),
    )
    example = {c.metric: c for c in claims if c.contradicted and c.how}
    notes = [
        NOT_MEASURED,
        "If the other numbers of the source give a different value, that value is shown first, then the claimed one.",
        *(f"{_COLUMNS[m][0]}, {describe(c.axes)}: {c.how}." for m, c in example.items()),
    ]
    return filled(f"Claimed by {source}", by_run.values(), columns, notes)


def _cell(claim: Claim | None, scale: Scale) -> Cell:
    """The value that follows from the rest; a claimed one that differs is the small print."""
    if claim is None:
        return Cell(MISSING)
    if claim.contradicted:
        return Cell(
            _number(claim.recomputed, scale),
            f"{_SAID.get(claim.metric, 'claimed')} {_stated(claim.claimed, scale)}",
            "bad",
        )
    if claim.claimed is None:
        return Cell(_number(claim.recomputed, scale), "not claimed")
    return Cell(_stated(claim.claimed, scale))


def _number(value: float | None, scale: Scale) -> str:
    return format_parts(value, None, None, scale)[0]


def _stated(value: float | None, scale: Scale) -> str:
    """The value as published, not rounded."""
    shown = scale.apply(value)
    return MISSING if shown is None else f"{float(f'{shown:.12g}'):,}".removesuffix(".0")


# --- what the bytes alone say ---


def _transfers(t: ClaimedTransfers) -> Table | None:
    columns: tuple[Filled[ClaimedTransfer], ...] = (
        (Column("what", prose=True), lambda row: describe(row.axes)),
        (numeric("sent, MB"), lambda row: _number(row.sent_bytes, _MEGABYTES)),
        (numeric("claimed step, ms"), lambda row: _stated(row.claimed_s, _MS)),
        (numeric("by bytes alone, ms"), lambda row: _number(row.explained_s, _MS)),
        (numeric("error, %"), lambda row: f"{_PERCENT.apply(row.error_ratio):+.1f}"),
    )
    return filled(f"What bytes alone say about {t.source}", t.rows, columns, (_explained(t), NOT_MEASURED))


def _explained(t: ClaimedTransfers) -> str:
    rate = t.link_bytes_per_s * 8 / 1e9
    alpha = format_number(t.alpha_s, places(t.alpha_s, None, None))
    line = f"{alpha} s + bytes / {rate:g} Gb/s gives all {len(t.rows)} claimed step times within"
    error = f"{100 * t.largest_error_ratio:.2g} %"
    if t.largest_error_ratio > EXPLAINS_WITHIN:
        return f"{line} {error}: the bytes sent do not explain them."
    return f"{line} {error}: the bytes sent explain them without any other difference between the rows."
