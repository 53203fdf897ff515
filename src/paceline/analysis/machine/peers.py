"""Where each of several devices stands among its peers, or beside a healthy baseline, by repeats of one measure.

Two things make an outlier: a modified z beyond 3.5 (Iglewicz and Hoaglin, 1993), so that it is more than the spread of
its peers, and a distance beyond the accepted band, so that it matters. It fails where its whole interval lies outside
the band, and is suspect where the repeats leave room for doubt or its peers are spread as far. Who is not accused
passes only where a device outside the band could have been seen; else it is undecided. Effects are differences: of
logarithms for rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from paceline.analysis.findings.machine import FAIL, PASS, SUSPECT, UNDECIDED
from paceline.analysis.statistics.intervals import OUTLIER_Z, Array, student_t

FEWEST_PEERS = 3
# Peers that agree closer than a sixth of the band count as if they differed by that: z is 4 at the band's end then, so
# that the band decides where peers agree, and z where they do not.
BAND_PER_MAD = 6.0
# A normal sample's deviation over its MAD, and how much too small the MAD of n = 2, 3, ... is (Croux and Rousseeuw,
# 1992, table of b_n); beyond n = 9 the factor is n / (n - 0.8).
_DEVIATION_PER_MAD = 1.4826
_SMALL_SAMPLE = {2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}
# Standard error of a median over that of a mean, for normal noise: sqrt(pi / 2).
_MEDIAN_ERROR = math.sqrt(math.pi / 2)
# Why a standing is not `pass`: odd among peers; two nodes that differ; behind a group of faster ones;
# outside the band among peers that are spread as far; repeats that scatter; outside the band, its interval not.
ODD, PAIR, SPLIT, SPREAD, SCATTER, EDGE = "odd", "pair", "split", "spread", "scatter", "edge"
# How many bands a device's own half interval may span where its peers' stay within one. By chance five repeats of 2 %
# noise span more than a band of 5 % on one node of eight, more than two on one of 600: nobody repeats a test for that.
MOST_BANDS = 2.0
# More repeats than this are no advice: the device or the host must come to rest first.
MOST_REPEATS = 100


@dataclass(frozen=True, slots=True)
class Band:
    """Accepted effects; an end that is None has no limit."""

    low: float | None
    high: float | None

    @property
    def width(self) -> float:
        """Distance from 0 to the nearer end."""
        return min(abs(end) for end in (self.low, self.high) if end is not None)

    def excludes(self, effect: float, half: float = 0.0) -> bool:
        """Whether the whole interval effect +- half lies beyond one end."""
        below = self.low is not None and effect + half < self.low
        return below or (self.high is not None and effect - half > self.high)

    def is_left_by(self, effect: float, half: float) -> bool:
        """Whether the interval effect +- half reaches beyond an end."""
        return self.excludes(effect - half) or self.excludes(effect + half)


@dataclass(frozen=True, slots=True)
class Standing:
    """half is the half width of the 95 % interval, None for a single reading. doubt is that of what is compared with
    the band: of a pair their difference, else the effect."""

    effect: float
    half: float | None
    z: float | None
    verdict: str = PASS
    reason: str = ""
    doubt: float = 0.0


def among_peers(values: Array, band: Band) -> list[Standing]:
    """values: one row per device, one column per repeat. What a repeat has in common (a room that warms up) is taken
    out first: its median over all devices."""
    centred = values - np.median(values, axis=0)
    effects, halves = _estimates(centred)
    if len(values) < FEWEST_PEERS:
        return _pair(effects, halves, band) if len(values) > 1 else [Standing(0.0, h, None) for h in halves]
    middle = float(np.median(effects))
    spread = float(np.median([abs(e - middle) for e in effects]))
    found = [_standing(e - middle, half, spread, band) for e, half in zip(effects, halves, strict=True)]
    return _open(_split(found, band), band)


def beside_baseline(values: Array, healthy: Array, band: Band) -> list[Standing]:
    """healthy: one value per device of the baseline. Nothing common is taken out: all devices may have become slow."""
    middle = float(np.median(healthy))
    spread = float(np.median(np.abs(healthy - middle)))
    effects, halves = _estimates(values - middle)
    return _open([_standing(e, half, spread, band) for e, half in zip(effects, halves, strict=True)], band)


def repeats_for(standing: Standing, repeats: int, band: Band) -> int | None:
    """About how many repeats of the same scatter bring the doubt within the band; None where no reasonable number does.
    At least twice as many as there were: where the doubt is small already, the effect lies close to the band's end."""
    noise = standing.doubt * math.sqrt(repeats) / student_t(repeats - 1)
    counts = range(2 * repeats, max(2 * repeats, MOST_REPEATS) + 1)
    return next((n for n in counts if noise * student_t(n - 1) / math.sqrt(n) <= band.width), None)


def _estimates(centred: Array) -> tuple[list[float], list[float | None]]:
    """Each device's median over its repeats, which one disturbed repeat does not move, and its half interval.

    Its noise is that of its own repeats or of everyone's, whichever is larger: five repeats may agree by chance.
    """
    repeats = centred.shape[1]
    effects = np.median(centred, axis=1)
    if repeats < 2:
        return effects.tolist(), [None] * len(effects)
    apart = np.abs(centred - effects[:, None])
    mads = np.maximum(np.median(apart, axis=1), np.median(apart))
    deviations = _DEVIATION_PER_MAD * _SMALL_SAMPLE.get(repeats, repeats / (repeats - 0.8)) * mads
    halves = student_t(repeats - 1) * _MEDIAN_ERROR * deviations / math.sqrt(repeats)
    return effects.tolist(), halves.tolist()


def _standing(effect: float, half: float | None, spread: float, band: Band) -> Standing:
    """Peers that are spread widely make nobody odd, but they do not widen the band: who is certainly outside of it is
    suspect."""
    z, doubt = 0.6745 * effect / max(spread, band.width / BAND_PER_MAD), half or 0.0
    if abs(z) <= OUTLIER_Z:
        outside = band.excludes(effect, doubt)
        verdict, reason = (SUSPECT, SPREAD) if outside else (PASS, "")
    elif band.excludes(effect):
        certain = half is not None and band.excludes(effect, half)
        verdict, reason = FAIL if certain else SUSPECT, ODD
    else:
        verdict, reason = PASS, ""
    return Standing(effect, half, z, verdict, reason, doubt)


def _pair(effects: list[float], halves: list[float | None], band: Band) -> list[Standing]:
    """Two can differ, but neither is odd: both are suspect where the difference is certain to matter, and undecided
    where it may."""
    apart, doubt = abs(effects[0] - effects[1]), sum(half or 0.0 for half in halves)
    verdict, reason = PASS, ""
    if apart - doubt > band.width:
        verdict, reason = SUSPECT, PAIR
    elif doubt > band.width or apart > band.width:
        verdict, reason = UNDECIDED, SCATTER if doubt > band.width else EDGE
    return [Standing(e, half, None, verdict, reason, doubt) for e, half in zip(effects, halves, strict=True)]


def _open(found: list[Standing], band: Band) -> list[Standing]:
    """Who passed because its repeats could not have told otherwise is undecided: the usual half interval is wider than
    the band, or its own than two, and it reaches beyond the band's end; or the effect lies outside, and only its
    interval does not. Who is certainly inside passes, however wide its interval."""
    usual = float(np.median([s.doubt for s in found]))
    return [_opened(s, usual, band) if s.verdict == PASS else s for s in found]


def _opened(s: Standing, usual: float, band: Band) -> Standing:
    blind = usual > band.width or s.doubt > MOST_BANDS * band.width
    if blind and band.is_left_by(s.effect, s.doubt):
        return replace(s, verdict=UNDECIDED, reason=SCATTER)
    return replace(s, verdict=UNDECIDED, reason=EDGE) if band.excludes(s.effect) else s


def _split(found: list[Standing], band: Band) -> list[Standing]:
    """Peers in groups have no odd one, yet the slower ones may be ill: suspect where certainly behind a group of
    faster ones by more than the band. Only for repeated rates, whose band is open above. Who is odd stays odd, and
    belongs to no group.

    One fast node is no group, nor are less than a quarter of all: the others are not slow because a few are fast.
    """
    if band.high is not None or band.low is None or any(s.half is None for s in found):
        return found
    rest = [s for s in found if s.reason != ODD]
    fewest = max(2, math.ceil(len(rest) / 4))
    fast = next((group for group in _groups(rest, band.width) if len(group) >= fewest), rest)
    edge, pace = min(s.effect for s in fast), float(np.median([s.effect for s in fast]))
    doubt = float(np.median([s.half or 0.0 for s in fast]))
    slow = [s for s in rest if s.effect < edge and s.effect + math.hypot(s.half or 0.0, doubt) < pace + band.low]
    if len(slow) < 2:
        return found
    return [replace(s, verdict=SUSPECT, reason=SPLIT) if s in slow else s for s in found]


def _groups(found: list[Standing], gap: float) -> list[list[Standing]]:
    """Fastest first; between two groups lies more than the gap, between neighbours within one less."""
    groups: list[list[Standing]] = []
    for s in sorted(found, key=lambda s: s.effect, reverse=True):
        if groups and groups[-1][-1].effect - s.effect <= gap:
            groups[-1].append(s)
        else:
            groups.append([s])
    return groups
