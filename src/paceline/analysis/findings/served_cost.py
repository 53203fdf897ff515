"""Concluded about what served tokens cost, in money and in energy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.analysis.findings.training import Measurement
from paceline.errors import Scalar
from paceline.host.prices import Price

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
