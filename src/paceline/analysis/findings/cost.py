"""Findings about money: costs, savings, and numbers that published tables claim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.analysis.findings.training import Measurement
from paceline.analysis.grouping import grouped
from paceline.errors import Scalar
from paceline.host.prices import SPOT, Price


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One cell at one price. Intervals come from its throughput; the price is taken as exact.

    usd_per_hour is for the whole job, all its devices. usd_per_1k_samples applies only to samples of this cell's
    sequence length and data. train_* are for train_tokens tokens, and None if no number of tokens was requested;
    samples_* are for train_samples samples as long as those of the cell. A script may count samples or micro-batches
    instead of tokens: then usd_per_mtok and tokens_per_usd are of those.
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
    def counted(self) -> str:
        """What it is the cost of: token, sample or micro-batch."""
        return self.usd_per_mtok.unit.removeprefix("USD/M")

    @property
    def amount(self) -> tuple[str, float]:
        """As many as are shown at one cost, and how often the million of `usd_per_mtok` goes into that."""
        if self.counted == "token":
            return "billion tokens", 1e3
        return f"1000 {self.counted}{'es' if self.counted.endswith('h') else 's'}", 1e-3

    @property
    def tokens_per_sample(self) -> float | None:
        """Non-pad tokens of the mean measured sample."""
        if self.counted != "token":
            return None
        per_1k, per_mtok = self.usd_per_1k_samples.value, self.usd_per_mtok.value
        return None if per_1k is None or not per_mtok else 1000 * per_1k / per_mtok


@dataclass(frozen=True, slots=True)
class Offer:
    """One cell at the two prices shown: the lowest non-spot price, and the lowest spot price if there is one."""

    lead: Cost
    spot: Cost | None


def offers_of(costs: Sequence[Cost]) -> list[Offer]:
    """One offer per cell in report order. A cell with spot prices only is led by its lowest."""
    offers = []
    for of_cell in grouped(costs, lambda cost: cost.cell).values():
        ordered = sorted(of_cell, key=lambda c: (c.price.usd_per_gpu_hour, c.price.name))
        spot = next((c for c in ordered if c.price.kind == SPOT), None)
        lead = next((c for c in ordered if c.price.kind != SPOT), ordered[0])
        offers.append(Offer(lead, None if spot is lead else spot))
    return offers


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Share of the next best's cost per token that the better choice saves: 1 - 1 / (ratio of throughput).

    Both ran on the same number of devices of one kind, so it is the same at every price. It exists only if a certified
    comparison says better; low and high are the 95 % interval. tied are choices that the data cannot distinguish from
    the better one.
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
    """One cell at one price, at the highest load that met its latency limits.

    load names it (None if there is only one). kept says how that is known. is_kept is None without limits and False if
    a plain run broke them. is_proved says whether there were enough requests for the 99th percentile.

    usd_per_mtok is per million prompt and output tokens; usd_per_output_mtok assigns the whole cost to output tokens.
    Both count the hours the load runs. reserved_* count all hours of the day, of which busy_hours are assumed to be
    used. They are None if the server did not report prompt token counts.
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


# Published numbers are rounded to about three digits; a smaller difference is no contradiction.
AGREES_WITHIN = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One number as its source states it, next to the same number computed from the source's other numbers.

    claimed is None if the source does not state it, recomputed if its other numbers do not give it; how is the
    arithmetic. Neither is measured, so neither has an interval, a certificate or a rank.
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
        """Whether the source's own numbers give a different value."""
        if self.claimed is None or self.recomputed is None:
            return False
        return abs(self.claimed - self.recomputed) > AGREES_WITHIN * abs(self.recomputed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedTransfer:
    """One claimed step next to the time that its bytes alone would take."""

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
    """t = alpha + sent bytes / link for all rows of one source. Only alpha is fitted, once for all rows."""

    source: str
    alpha_s: float
    link_bytes_per_s: float
    rows: tuple[ClaimedTransfer, ...]

    @property
    def largest_error_ratio(self) -> float:
        return max(abs(row.error_ratio) for row in self.rows)
