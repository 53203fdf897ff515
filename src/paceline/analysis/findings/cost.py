"""Findings about money: costs, savings, and numbers that published tables claim."""

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


HOURS_A_DAY = 24.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedCost:
    """One cell at one price, at the highest load that kept its limits. load names it, None where there is one alone;
    kept says by what it is known, and is_kept is None where no limits were set, False where a plain run broke them;
    is_proved says that requests were enough to tell it of the 99th percentile.

    usd_per_mtok is per million tokens, asked and answered alike; usd_per_output_mtok lays the whole cost on answered
    tokens. Both are of the hours the load runs. reserved_* are of all hours of the day, of which busy_hours are asked
    to run it: an assumption. None where the server did not tell how many tokens a prompt has.
    """

    cell: str
    axes: Mapping[str, Scalar]
    price: Price
    devices: int
    usd_per_hour: float
    load: str | None
    kept: str
    is_kept: bool | None
    is_proved: bool
    busy_hours: float
    usd_per_output_mtok: Measurement
    reserved_usd_per_output_mtok: Measurement
    usd_per_mtok: Measurement | None
    reserved_usd_per_mtok: Measurement | None


# Published numbers are rounded to three digits or so: less than this is no contradiction.
AGREES_WITHIN = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One number as its source states it, beside the same number computed from the source's other numbers.

    claimed is None where the source does not state it, recomputed is None where its other numbers do not give it.
    how says the arithmetic. Neither is measured, so neither has an interval, a certificate or a rank.
    """

    run: str
    axes: Mapping[str, Scalar]
    source: str
    metric: str
    unit: str
    claimed: float | None
    recomputed: float | None
    how: str | None = None

    @property
    def contradicted(self) -> bool:
        """Whether the source's own numbers give another one."""
        if self.claimed is None or self.recomputed is None:
            return False
        return abs(self.claimed - self.recomputed) > AGREES_WITHIN * abs(self.recomputed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedTransfer:
    """One claimed step beside the time that its bytes alone would take."""

    run: str
    axes: Mapping[str, Scalar]
    sent_bytes: float
    claimed_s: float
    explained_s: float

    @property
    def error_ratio(self) -> float:
        return self.explained_s / self.claimed_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedTransfers:
    """t = alpha + sent bytes / link for all rows of one source: alpha is the only number fitted, one for all rows."""

    source: str
    alpha_s: float
    link_bytes_per_s: float
    rows: tuple[ClaimedTransfer, ...]

    @property
    def largest_error_ratio(self) -> float:
        return max(abs(row.error_ratio) for row in self.rows)
