"""Concluded about money: what each cell costs at each price, and what the better choice saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.analysis.findings.training import Measurement
from paceline.errors import Scalar
from paceline.host.prices import SPOT, Price


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One cell at one price. Intervals are those of its throughput; the price itself is taken as exact.

    usd_per_hour is the whole job's: all its devices. usd_per_1k_samples holds for samples of this cell's sequence
    length and data only. train_* are of train_tokens tokens, None where nobody asked for a number of tokens; samples_*
    are of train_samples samples, as long as those of the cell.
    """

    cell: str
    axes: Mapping[str, Scalar]
    price: Price
    devices: int
    usd_per_hour: float
    usd_per_mtok: Measurement
    tokens_per_usd: Measurement
    usd_per_1k_samples: Measurement
    train_tokens: int | None = None
    train_time_s: Measurement | None = None
    train_cost_usd: Measurement | None = None
    train_samples: int | None = None
    samples_time_s: Measurement | None = None
    samples_cost_usd: Measurement | None = None

    @property
    def tokens_per_sample(self) -> float | None:
        """Non-pad tokens of the mean sample that was measured."""
        per_1k, per_mtok = self.usd_per_1k_samples.value, self.usd_per_mtok.value
        return None if per_1k is None or not per_mtok else 1000 * per_1k / per_mtok


@dataclass(frozen=True, slots=True)
class Offer:
    """One cell at the two prices one is shown: the lowest that is not spot, and the lowest spot; one may be absent."""

    lead: Cost
    spot: Cost | None


def offers_of(costs: Sequence[Cost]) -> list[Offer]:
    """Cells in the order of the report; a cell with spot prices alone is led by its lowest."""
    by_cell: dict[str, list[Cost]] = {}
    for cost in costs:
        by_cell.setdefault(cost.cell, []).append(cost)
    found = []
    for ours in by_cell.values():
        ordered = sorted(ours, key=lambda c: (c.price.usd_per_gpu_hour, c.price.name))
        spot = next((c for c in ordered if c.price.kind == SPOT), None)
        lead = next((c for c in ordered if c.price.kind != SPOT), ordered[0])
        found.append(Offer(lead, None if spot is lead else spot))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """The part of the next best's cost per token that the better choice does not spend: 1 - 1/(ratio of throughput).

    Both ran on as many devices of one kind, so it is the same at every price. It exists only where a certified
    comparison says better; low and high bound 95 %. tied are choices that the data cannot tell from the better one.
    """

    group: str
    cell: str
    other: str
    label: str
    other_label: str
    saved_ratio: float
    low: float
    high: float
    runs: tuple[str, ...]
    tied: tuple[str, ...] = ()
