"""What a token costs: each cell at the lowest price on demand beside the lowest spot price, and what a choice saves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.analysis.findings import Cost, Measurement, Offer, Report, Saving, offers_of
from paceline.host.prices import GIVEN, Price
from paceline.report.tables import budget
from paceline.report.tables.table import Cell, Column, Table
from paceline.report.text.cells import cell_name, varying_axes
from paceline.wording import MISSING, TIMES, Scale, format_number, format_parts, places, short_count

_USD, _PERCENT, _HOURS, _MILLIONS = Scale("USD"), Scale("%", 100.0), Scale("h", 1 / 3600), Scale("M", 1e-6)
LIST_PRICES = (
    "List prices at the given date, before discounts, storage and traffic. Check them, or set your own with --price."
)
PER_PROCESS = "On a CPU every process counts as one device."
SAMPLES = "Cost per sample depends on the sample length; it is never compared between lengths or datasets."


def tables(report: Report) -> tuple[Table, ...]:
    """One table for each pair of prices, then all prices; empty if no device has a price."""
    offers = offers_of(report.costs)
    pairs = dict.fromkeys((o.lead.price.name, o.spot.price.name if o.spot else None) for o in offers)
    shown = [
        _table(report, [o for o in offers if (o.lead.price.name, o.spot.price.name if o.spot else None) == pair])
        for pair in pairs
    ]
    every = _prices(report, offers)
    return (*shown, *budget.tables(report), *((every,) if every else ()))


def sentences(report: Report) -> tuple[str, ...]:
    """What each decided choice saves; none for a tie."""
    leads = {offer.lead.cell: offer.lead for offer in offers_of(report.costs)}
    return tuple(_saving(s, leads.get(s.other)) for s in report.savings)


def _saving(s: Saving, other: Cost | None) -> str:
    share, interval = format_parts(s.saved_ratio, s.low, s.high, _PERCENT)
    tied = f" (equal or inconclusive: {', '.join(s.tied)})" if s.tied else ""
    said = (
        f"{s.label}{tied} saves {share} % {interval} of the cost per token against {s.other_label}, the next best, "
        f"at any price per GPU-hour ({s.group})"
    )
    total = other.train_cost_usd.value if other and other.train_cost_usd else None
    if other is None or total is None or other.train_tokens is None:
        return f"{said}."
    usd = format_parts(total * s.saved_ratio, total * s.low, total * s.high)[0]
    return f"{said}: {usd} of {_rounded(total)} USD for {short_count(other.train_tokens)} tokens at {other.price.name}."


def _rounded(value: float) -> str:
    return format_number(value, places(value, None, None))


def _table(report: Report, offers: Sequence[Offer]) -> Table:
    lead, spot = offers[0].lead, offers[0].spot
    named = varying_axes(report)
    kind = "cost" if lead.price.kind == GIVEN else lead.price.kind
    columns = [
        Column("what", prose=True),
        Column("whole job, USD/h", numeric=True, priority=2),
        Column(f"{kind}, USD/Mtoken", numeric=True),
        *([Column("spot, USD/Mtoken", numeric=True)] if spot else []),
        Column("tokens per USD, M", numeric=True, priority=1),
        Column("1000 samples, USD", numeric=True, priority=4),
    ]
    if lead.train_tokens:
        size = f"{short_count(lead.train_tokens)} tokens"
        columns += [Column(f"{size}, h", numeric=True), Column(f"{size} {kind}, USD", numeric=True)]
        columns += [Column(f"{size} spot, USD", numeric=True)] if spot else []
    # By name: an order by cost would be a ranking, which only comparisons make.
    named_offers = ((cell_name(report, o.lead.cell, o.lead.axes, named), o) for o in offers)
    labelled = sorted(named_offers, key=lambda pair: pair[0])
    rows = tuple(_row(offer, label) for label, offer in labelled)
    cells = {offer.lead.cell for offer in offers}
    leads = {offer.lead.cell: offer.lead for offer in offers}
    saved = [_saving(s, leads.get(s.other)) for s in report.savings if s.cell in cells]
    shown = tuple((offer.lead.cell,) for _, offer in labelled)
    return Table(f"Cost at {lead.price.name}", tuple(columns), rows, (*saved, *_notes(offers)), shown)


def _notes(offers: Sequence[Offer]) -> Iterable[str]:
    prices = [cost.price for cost in (offers[0].lead, offers[0].spot) if cost]
    yield from (f"{price.origin}." + (f" {price.note}" if price.note else "") for price in prices)
    if any(price.kind != GIVEN for price in prices):
        yield LIST_PRICES
    if any(offer.lead.axes.get("device") == "cpu" for offer in offers):
        yield PER_PROCESS
    yield SAMPLES


def _row(offer: Offer, label: str) -> tuple[Cell, ...]:
    lead, spot = offer.lead, offer.spot
    cells = [
        Cell(label),
        Cell(format_parts(lead.usd_per_hour, None, None)[0]),
        _cell(lead.usd_per_mtok, _USD),
        *([_cell(spot.usd_per_mtok, _USD)] if spot else []),
        _cell(lead.tokens_per_usd, _MILLIONS),
        _cell(lead.usd_per_1k_samples, _USD, f"of {lead.axes.get('sequence_length')} tokens"),
    ]
    if lead.train_tokens:
        cells += [_cell(lead.train_time_s, _HOURS), _cell(lead.train_cost_usd, _USD)]
        cells += [_cell(spot.train_cost_usd, _USD)] if spot else []
    return tuple(cells)


def _cell(m: Measurement | None, scale: Scale, detail: str = "") -> Cell:
    if m is None:
        return Cell(MISSING)
    value, interval = format_parts(m.value, m.low, m.high, scale)
    return Cell(value, detail or interval)


def _prices(report: Report, offers: Sequence[Offer]) -> Table | None:
    """All prices of these devices. Cost is proportional to the price, so one factor per price is enough."""
    leads = {offer.lead.cell: offer.lead.price for offer in offers}
    shown = {cost.price.name for offer in offers for cost in (offer.lead, offer.spot) if cost}
    pairs = {c.price.name: (c.price, leads[c.cell]) for c in report.costs}
    if set(pairs) <= shown:
        return None
    columns = (
        Column("price"),
        Column("kind"),
        Column("per GPU-hour, USD", numeric=True),
        Column("every cost above times", numeric=True),
        Column("instance", priority=3),
        Column("date", priority=1),
        Column("source", prose=True, priority=2),
    )
    ordered = sorted(pairs.values(), key=lambda pair: (pair[0].gpu or "", pair[0].usd_per_gpu_hour))
    notes = dict.fromkeys(f"{p.name}: {p.note}" for p, _ in ordered if p.note and p.name not in shown)
    return Table("Prices", columns, tuple(_price_row(p, lead) for p, lead in ordered), tuple(notes))


def _price_row(price: Price, lead: Price) -> tuple[Cell, ...]:
    factor = format_parts(price.usd_per_gpu_hour / lead.usd_per_gpu_hour, None, None)[0]
    return (
        Cell(price.name),
        Cell(price.kind),
        Cell(f"{price.usd_per_gpu_hour:.3f}"),
        Cell(f"{factor}{TIMES}", f"of {lead.name}"),
        Cell(", ".join(filter(None, (price.instance, price.region))) or MISSING),
        Cell(price.date or MISSING),
        Cell(price.source or MISSING),
    )
