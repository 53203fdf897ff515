"""How each device compares with its peers, or with a healthy baseline, over repeats of one measure.

Two things make an outlier: a modified z-score beyond 3.5 (Iglewicz and Hoaglin, 1993), so that it is more than the
spread of its peers, and a distance beyond the accepted band, so that it matters. It fails if its whole interval lies
outside the band, and is suspect if the repeats leave doubt or its peers are spread as far. A device that is not accused
passes only if a device outside the band could have been detected; otherwise it is undecided. Effects are differences;
of logarithms for rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from paceline.analysis.findings.machine import FAIL, PASS, SUSPECT, UNDECIDED
from paceline.analysis.statistics.intervals import OUTLIER_Z, Array, student_t

FEWEST_PEERS = 3
# The spread of peers counts as at least a sixth of the band. z is then 4 at the band's end, so the band decides if
# peers agree, and z if they do not.
BAND_PER_MAD = 6.0
# Standard deviation over MAD of a normal sample, and the correction for n = 2, 3, ... values (Croux and Rousseeuw,
# 1992, table of b_n); beyond n = 9 it is n / (n - 0.8).
_DEVIATION_PER_MAD = 1.4826
_SMALL_SAMPLE = {2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}
# Standard error of a median over that of a mean, for normal noise: sqrt(pi / 2).
_MEDIAN_ERROR = math.sqrt(math.pi / 2)
# Why a device does not pass: outlier among peers; two devices that differ; behind a group of faster ones; outside the
# band among peers that are spread as far; repeats scatter; outside the band, but its interval is not.
ODD, PAIR, SPLIT, SPREAD, SCATTER, EDGE = "odd", "pair", "split", "spread", "scatter", "edge"
# How many bands the half interval of a device may span if those of its peers stay within one. By chance, five repeats
# with 2 % noise span more than a band of 5 % on one node of eight, and more than two on one of 600.
MOST_BANDS = 2.0
# More repeats than this are not suggested: something disturbs the device or the host.
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
class PeerResult:
    """How one device compares. half is the half width of its 95 % interval, None for a single reading; doubt is that of
    what is compared with the band: for a pair their difference, otherwise the effect.
    """

    effect: float
    half: float | None
    z: float | None
    verdict: str = PASS
    reason: str = ""
    doubt: float = 0.0


def among_peers(values: Array, band: Band) -> list[PeerResult]:
    """Results of devices (rows) over repeats (columns). What all share in a repeat, such as a warming room, is
    removed first: the median over all devices.

    >>> values = np.log(np.array([[100.0, 101, 99]] * 5 + [[80.0, 81, 79]]))
    >>> [s.verdict for s in among_peers(values, Band(math.log(0.95), None))]
    ['pass', 'pass', 'pass', 'pass', 'pass', 'fail']
    """
    centred = values - np.median(values, axis=0)
    effects, halves = _estimates(centred)
    if len(values) == 1:
        return [PeerResult(0.0, half, None) for half in halves]
    if len(values) < FEWEST_PEERS:
        # Two can differ, but neither is the outlier: both are suspect if the difference certainly matters, and
        # undecided if it may.
        apart, doubt = abs(effects[0] - effects[1]), sum(half or 0.0 for half in halves)
        verdict, reason = PASS, ""
        if apart - doubt > band.width:
            verdict, reason = SUSPECT, PAIR
        elif doubt > band.width or apart > band.width:
            verdict, reason = UNDECIDED, SCATTER if doubt > band.width else EDGE
        return [PeerResult(e, half, None, verdict, reason, doubt) for e, half in zip(effects, halves, strict=True)]
    middle = float(np.median(effects))
    spread = float(np.median([abs(e - middle) for e in effects]))
    found = [_peer_result(e - middle, half, spread, band) for e, half in zip(effects, halves, strict=True)]
    return _open(_split(found, band), band)


def beside_baseline(values: Array, healthy: Array, band: Band) -> list[PeerResult]:
    """Results against one value per device of a baseline. Nothing common is removed: all devices may have become
    slow.
    """
    middle = float(np.median(healthy))
    spread = float(np.median(np.abs(healthy - middle)))
    effects, halves = _estimates(values - middle)
    return _open([_peer_result(e, half, spread, band) for e, half in zip(effects, halves, strict=True)], band)


def repeats_for(result: PeerResult, repeats: int, band: Band) -> int | None:
    """About how many repeats of the same scatter bring the doubt within the band; None if no reasonable number does.

    At least twice as many as before: if the doubt is already small, the effect is close to the band's end.
    """
    noise = result.doubt * math.sqrt(repeats) / student_t(repeats - 1)
    counts = range(2 * repeats, max(2 * repeats, MOST_REPEATS) + 1)
    return next((n for n in counts if noise * student_t(n - 1) / math.sqrt(n) <= band.width), None)


def _estimates(centred: Array) -> tuple[list[float], list[float | None]]:
    """Each device's median over its repeats, which one disturbed repeat does not move, and its half interval.

    Its noise is that of its own repeats or of all, whichever is larger: five repeats may agree by chance.
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


def _peer_result(effect: float, half: float | None, spread: float, band: Band) -> PeerResult:
    """Widely spread peers make no outlier, but they do not widen the band: a device certainly outside it is suspect."""
    z, doubt = 0.6745 * effect / max(spread, band.width / BAND_PER_MAD), half or 0.0
    if abs(z) <= OUTLIER_Z:
        outside = band.excludes(effect, doubt)
        verdict, reason = (SUSPECT, SPREAD) if outside else (PASS, "")
    elif band.excludes(effect):
        certain = half is not None and band.excludes(effect, half)
        verdict, reason = FAIL if certain else SUSPECT, ODD
    else:
        verdict, reason = PASS, ""
    return PeerResult(effect, half, z, verdict, reason, doubt)


def _open(results: list[PeerResult], band: Band) -> list[PeerResult]:
    """Turn a pass into undecided if the repeats could not have shown otherwise.

    That is the case if the usual half interval is wider than the band (or its own wider than two) and reaches beyond
    the band's end, or if the effect lies outside the band but not its whole interval. A device that is certainly inside
    passes, however wide its interval.
    """
    usual = float(np.median([s.doubt for s in results]))
    opened = []
    for s in results:
        blind = usual > band.width or s.doubt > MOST_BANDS * band.width
        if s.verdict == PASS and blind and band.is_left_by(s.effect, s.doubt):
            opened.append(replace(s, verdict=UNDECIDED, reason=SCATTER))
        elif s.verdict == PASS and band.excludes(s.effect):
            opened.append(replace(s, verdict=UNDECIDED, reason=EDGE))
        else:
            opened.append(s)
    return opened


def _split(results: list[PeerResult], band: Band) -> list[PeerResult]:
    """Mark devices that are certainly behind a group of faster ones by more than the band as suspect: peers in groups
    have no single outlier, yet the slower ones may be faulty. Only for repeated rates, whose band is open above;
    outliers belong to no group.

    One fast node is not a group, nor is less than a quarter of all: the others are not slow because a few are fast.
    """
    if band.high is not None or band.low is None or any(s.half is None for s in results):
        return results
    rest = [s for s in results if s.reason != ODD]
    fewest = max(2, math.ceil(len(rest) / 4))
    groups: list[list[PeerResult]] = []  # fastest first, more than the band between them
    for s in sorted(rest, key=lambda s: s.effect, reverse=True):
        if groups and groups[-1][-1].effect - s.effect <= band.width:
            groups[-1].append(s)
        else:
            groups.append([s])
    fast = next((group for group in groups if len(group) >= fewest), rest)
    edge, pace = min(s.effect for s in fast), float(np.median([s.effect for s in fast]))
    doubt = float(np.median([s.half or 0.0 for s in fast]))
    slow = [s for s in rest if s.effect < edge and s.effect + math.hypot(s.half or 0.0, doubt) < pace + band.low]
    if len(slow) < 2:
        return results
    return [replace(s, verdict=SUSPECT, reason=SPLIT) if s in slow else s for s in results]
