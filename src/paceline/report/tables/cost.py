"""What a token costs: each cell at the lowest price on demand beside the lowest spot price, and what a choice saves."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.analysis.findings import Cost, Offer, Report, Saving, offers_of
from paceline.host.prices import GIVEN, OWN, Price
from paceline.report.tables import budget
from paceline.report.tables.table import Cell, Column, Filled, Table, filled, measured_cell, numeric
from paceline.report.text.cells import cell_name, varying_axes
from paceline.wording import MISSING, TIMES, Scale, format_number, format_parts, places, short_count

_USD, _PERCENT, _HOURS, _MILLIONS = Scale("USD"), Scale("%", 100.0), Scale("h", 1 / 3600), Scale("M", 1e-6)
LIST_PRICES = (
    "List prices at the given date, before discounts, storage and traffic. Check them, or set your own with --price."
)
PER_PROCESS = "On a CPU every process counts as one device."
SAMPLES = "Cost per sample depends on the sample length; it is never compared between lengths or datasets."


def tables(report: Report) -> tuple[Table, ...]:
    """One table for each pair of prices and what is counted, then all prices; empty if no device has a price."""
    pairs: dict[tuple[str, str | None, str], list[Offer]] = {}
    for o in offers_of(report.costs):
        pairs.setdefault((o.lead.price.name, o.spot.price.name if o.spot else None, o.lead.counted), []).append(o)
    found = (*(_table(report, offers) for offers in pairs.values()), *budget.tables(report), _prices(report))
    return tuple(table for table in found if table)


def sentences(report: Report) -> tuple[str, ...]:
    """What each decided choice saves; none for a tie."""
    leads = {offer.lead.cell: offer.lead for offer in offers_of(report.costs)}
    return tuple(_saving(s, leads.get(s.other)) for s in report.savings)


def _saving(s: Saving, other: Cost | None) -> str:
    share, interval = format_parts(s.saved_ratio, s.low, s.high, _PERCENT)
    tied = f" (equal or inconclusive: {', '.join(s.tied)})" if s.tied else ""
    said = (
        f"{s.label}{tied} saves {share} % {interval} of the cost per {other.counted if other else 'token'} against "
        f"{s.other_label}, the {'best of the others' if s.tied else 'next best'}, at any price per GPU-hour ({s.group})"
    )
    total = other.train_cost_usd.value if other and other.train_cost_usd else None
    if other is None or total is None or other.train_tokens is None:
        return f"{said}."
    whole = format_number(total, places(total, None, None))
    usd = format_parts(total * s.saved_ratio, total * s.low, total * s.high)[0]
    return f"{said}: {usd} of {whole} USD for {short_count(other.train_tokens)} tokens at {other.price.name}."


def _table(report: Report, offers: Sequence[Offer]) -> Table | None:
    lead, spot, leads = offers[0].lead, offers[0].spot, {offer.lead.cell: offer.lead for offer in offers}
    named = varying_axes(report)
    kind = "cost" if lead.price.kind == GIVEN else lead.price.kind
    names = {o.lead.cell: cell_name(report, o.lead.cell, o.lead.axes, named) for o in offers}

    amount, factor = lead.amount
    is_of_tokens = lead.counted == "token"
    unit, per_amount = "USD/Btoken" if is_of_tokens else f"USD per {amount}", Scale("USD", factor)

    def samples(o: Offer) -> Cell:
        length, shown = o.lead.axes.get("sequence_length"), measured_cell(o.lead.usd_per_1k_samples, _USD)
        return shown if length is None else shown._replace(detail=f"of {length} tokens")

    columns: list[Filled[Offer]] = [
        (Column("what", prose=True), lambda o: names[o.lead.cell]),
        (numeric("whole job, USD/h", 2), lambda o: format_parts(o.lead.usd_per_hour, None, None)[0]),
        (numeric(f"{kind}, {unit}"), lambda o: measured_cell(o.lead.usd_per_mtok, per_amount)),
    ]
    if spot:
        heading = numeric(f"spot, {unit}")
        columns.append((heading, lambda o: measured_cell(o.spot.usd_per_mtok if o.spot else None, per_amount)))
    if is_of_tokens:
        columns += [
            (numeric("tokens per USD, M", 1), lambda o: measured_cell(o.lead.tokens_per_usd, _MILLIONS)),
            (numeric("1000 samples, USD", 4), samples),
        ]
    if lead.train_tokens:
        size = f"{short_count(lead.train_tokens)} tokens"
        columns += [
            (numeric(f"{size}, h"), lambda o: measured_cell(o.lead.train_time_s, _HOURS)),
            (numeric(f"{size} {kind}, USD"), lambda o: measured_cell(o.lead.train_cost_usd, _USD)),
        ]
        if spot:
            heading = numeric(f"{size} spot, USD")
            columns.append((heading, lambda o: measured_cell(o.spot.train_cost_usd if o.spot else None, _USD)))
    notes = [_saving(s, leads.get(s.other)) for s in report.savings if s.cell in leads]
    prices = [cost.price for cost in (lead, spot) if cost]
    notes += [f"{price.origin}." + (f" {price.note}" if price.note else "") for price in prices]
    notes += [LIST_PRICES] if any(price.kind != GIVEN for price in prices) else []
    notes += [PER_PROCESS] if any(offer.lead.axes.get("device") == "cpu" for offer in offers) else []
    # By name: an order by cost would be a ranking, which only comparisons make.
    ordered = sorted(offers, key=lambda o: names[o.lead.cell])
    title = lead.price.title if lead.price.name == OWN else lead.price.name
    return filled(f"Cost at {title}", ordered, columns, (*notes, SAMPLES), lambda o: (o.lead.cell,))


def _prices(report: Report) -> Table | None:
    """All prices of these devices. Cost is proportional to the price, so one factor per price is enough."""
    offers = offers_of(report.costs)
    leads = {offer.lead.cell: offer.lead.price for offer in offers}
    shown = {cost.price.name for offer in offers for cost in (offer.lead, offer.spot) if cost}
    pairs = {c.price.name: (c.price, leads[c.cell]) for c in report.costs}
    if set(pairs) <= shown:
        return None

    def factor(pair: tuple[Price, Price]) -> Cell:
        price, lead = pair
        ratio = format_parts(price.usd_per_gpu_hour / lead.usd_per_gpu_hour, None, None)[0]
        return Cell(f"{ratio}{TIMES}", f"of {lead.name}")

    columns: tuple[Filled[tuple[Price, Price]], ...] = (
        (Column("price"), lambda pair: pair[0].name),
        (Column("kind"), lambda pair: pair[0].kind),
        (numeric("per GPU-hour, USD"), lambda pair: f"{pair[0].usd_per_gpu_hour:.3f}"),
        (numeric("every cost above times"), factor),
        (
            Column("instance", priority=3),
            lambda pair: ", ".join(filter(None, (pair[0].instance, pair[0].region))) or MISSING,
        ),
        (Column("date", priority=1), lambda pair: pair[0].date or MISSING),
        (Column("source", prose=True, priority=2), lambda pair: pair[0].source or MISSING),
    )
    ordered = sorted(pairs.values(), key=lambda pair: (pair[0].gpu or "", pair[0].usd_per_gpu_hour))
    notes = dict.fromkeys(f"{p.name}: {p.note}" for p, _ in ordered if p.note and p.name not in shown)
    return filled("Prices", ordered, columns, notes)
