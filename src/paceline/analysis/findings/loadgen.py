"""Concluded by LoadGen about a set-up, beside what this client says of the same one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class Opinion:
    """One side's word on a run. Figures are its own, in SI units; None where it tells none. failed counts requests
    that were not answered whole."""

    source: str
    verdict: str
    reasons: tuple[str, ...]
    requests: int
    failed: int
    output_tokens_per_s: float | None
    ttft_p99_s: float | None
    tpot_p99_s: float | None
    latency_p99_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadgenVerdict:
    """Two loads of one run over the same replicas: this client's, then LoadGen's by its own schedule. They are two
    samples of one set-up, so that their figures differ by chance too. agrees: both verdicts are the same. label is
    that of a run by LoadGen's rules, None of any other."""

    run: str
    cell: str
    scenario: str
    version: str
    theirs: Opinion
    ours: Opinion
    agrees: bool
    text: str
    axes: Mapping[str, Scalar]
    label: str | None = None
