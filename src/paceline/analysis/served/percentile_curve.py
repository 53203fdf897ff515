"""How a latency spreads over requests: what each share of them took at most, finest where limits are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.analysis.findings.served import LatencySpread
from paceline.analysis.statistics.intervals import Bounded

# Shares of a spread: evenly up to nine of ten, then ever closer to all.
BULK_SHARES, TAIL_SHARES = 46, 60


QUOTED = (50, 90, 99)


def spread(
    quantity: str, values: Sequence[float], limit_s: float | None = None, bounds: Sequence[Bounded] = ()
) -> LatencySpread | None:
    """None where nothing was measured. bounds: those of the QUOTED percentiles, where they are known."""
    if not values:
        return None
    ordered = np.sort(np.asarray(values, dtype=float))
    shares = _shares(len(ordered))
    # A thousandth of a millisecond is finer than any chart.
    seconds = np.quantile(ordered, shares).round(6)
    known = [(low, high) for _, low, high in bounds] or [(None, None)] * len(QUOTED)
    points = np.percentile(ordered, QUOTED).tolist()
    p50, p90, p99 = ((value, *each) for value, each in zip(points, known, strict=True))
    return LatencySpread(
        quantity=quantity,
        n=len(ordered),
        shares=tuple(shares.tolist()),
        seconds=tuple(seconds.tolist()),
        p50=p50,
        p90=p90,
        p99=p99,
        limit_s=limit_s,
    )


def _shares(count: int) -> NDArray[np.float64]:
    """Up to where one request is left; the percentiles that people quote are among them."""
    last = 1 - 1 / count
    bulk = np.linspace(0.0, 0.9, BULK_SHARES)
    tail = 1 - np.logspace(-1, -np.log10(max(count, 10)), TAIL_SHARES)
    whole = np.concatenate([bulk, tail, (0.5, 0.95, 0.99, 0.999), (last,)])
    return np.unique(whole[whole <= last].round(9))
