"""Time and cost of training on a number of samples, at every measured number of nodes.

Samples are comparable only if they have the same length and data: each such set has its own table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.analysis.findings import Offer, Report, offers_of
from paceline.analysis.findings.cell_axes import axis_text, describe
from paceline.host.prices import GIVEN
from paceline.report.tables.table import Cell, Column, Filled, Table, filled, measured_cell, numeric
from paceline.report.text.cells import cell_name, varying_axes
from paceline.wording import MISSING, Scale, format_number, short_count

_USD, _PERCENT, _HOURS = Scale("USD"), Scale("%", 100.0), Scale("h", 1 / 3600)
EFFICIENCY = "scaling_efficiency_ratio"
# Axes that say on how much a series ran; all others are the same along it.
SIZES = ("nodes", "world_size", "global_batch", "accumulation")
MEASURED_ONLY = (
    "Only measured numbers of nodes; nothing is extrapolated. The estimate assumes the measured rate to the end, "
    "without failures, evaluations, checkpoints or interruptions of spot capacity."
)
PER_NODE_COST = "Cost rises as efficiency falls: at 100 % efficiency it would not depend on the number of nodes."


def offers(report: Report) -> list[Offer]:
    """Cells with a requested number of samples, fewest devices first."""
    requested = [offer for offer in offers_of(report.costs) if offer.lead.samples_cost_usd]
    return sorted(requested, key=lambda offer: (describe(offer.lead.axes, ()), offer.lead.devices))


def tables(report: Report) -> tuple[Table, ...]:
    """One per length, data and pair of prices; empty if no number of samples was requested."""
    sets: dict[tuple[object, ...], list[Offer]] = {}
    for offer in offers(report):
        lead, spot = offer.lead, offer.spot
        names = (lead.price.name, spot.price.name if spot else None)
        sets.setdefault((lead.axes.get("sequence_length"), lead.axes.get("data"), *names), []).append(offer)
    return tuple(_table(report, ours) for ours in sets.values())


def _table(report: Report, ours: Sequence[Offer]) -> Table:
    lead, spot = ours[0].lead, ours[0].spot
    kind = "cost" if lead.price.kind == GIVEN else lead.price.kind
    named = [name for name in varying_axes(report) if name != "nodes"]
    efficiencies = {m.cell: m for m in report.measurements if m.metric == EFFICIENCY}

    def spot_cost(o: Offer) -> Cell:
        return measured_cell(o.spot.samples_cost_usd if o.spot else None, _USD)

    def sample_tokens(o: Offer) -> str:
        return MISSING if o.lead.tokens_per_sample is None else format_number(o.lead.tokens_per_sample, 0)

    columns: tuple[Filled[Offer], ...] = (
        (Column("what", prose=True), lambda o: cell_name(report, o.lead.cell, o.lead.axes, named)),
        (numeric("nodes"), lambda o: str(o.lead.axes.get("nodes"))),
        (numeric("time, h"), lambda o: measured_cell(o.lead.samples_time_s, _HOURS)),
        (numeric(f"{kind}, USD"), lambda o: measured_cell(o.lead.samples_cost_usd, _USD)),
        *([(numeric("spot, USD"), spot_cost)] if spot else []),
        (numeric("1000 samples, USD", 3), lambda o: measured_cell(o.lead.usd_per_1k_samples, _USD)),
        (numeric("efficiency, %", 2), lambda o: measured_cell(efficiencies.get(o.lead.cell), _PERCENT)),
        (numeric("tokens per sample", 4), sample_tokens),
    )
    notes = [*(f"{cost.price.origin}." for cost in (lead, spot) if cost), MEASURED_ONLY]
    notes += [PER_NODE_COST] if any(offer.lead.cell in efficiencies for offer in ours) else []
    axes, count = lead.axes, short_count(lead.train_samples or 0)
    title = f"{count} {samples_name(axes)}: time and cost"
    table = filled(title, ours, columns, notes, lambda o: (o.lead.cell,))
    assert table is not None
    return table


def samples_name(axes: Mapping[str, object]) -> str:
    """`samples of 512 tokens, alpaca`; how long those of a script are is not known."""
    length = axes.get("sequence_length")
    return "samples" if length is None else f"samples of {length} tokens, {axes.get('data')}"


def series_name(report: Report, offer: Offer) -> str:
    """What all points of one line have in common."""
    named = [name for name in varying_axes(report) if name not in SIZES]
    return describe(offer.lead.axes, named)


def place(offer: Offer, *, several_nodes: bool) -> str:
    """`2 nodes`, or `2 GPUs` where everything ran on one node."""
    nodes = offer.lead.axes.get("nodes")
    if not several_nodes:
        return axis_text("world_size", offer.lead.axes)
    return f"{nodes} node{'' if nodes == 1 else 's'}"
