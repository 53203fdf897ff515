"""Numbers that others state, held against each other: nothing here is measured, ranked or compared.

A claim has no samples, so no interval and no certificate. What can be said is whether a source's numbers agree with
each other by the formulas that measured runs are held to (method.md, section 4).
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.analysis.cost import training
from paceline.analysis.findings import Claim, ClaimedTransfer, ClaimedTransfers, Report
from paceline.errors import Scalar
from paceline.experiment.spec import RunSpec
from paceline.results.records import RunRecord, Status

UNITS: Mapping[str, str] = {
    "tokens_per_s": "tokens/s",
    "step_time_s": "s",
    "peak_memory_bytes": "bytes",
    "scaling_efficiency_ratio": "ratio",
    "tokens_per_usd": "tokens/USD",
    "relative_cost_ratio": "times",
    "tokens_per_step": "tokens",
}
# What a claimed run was said to be; the rest of a spec are defaults that nobody claimed.
_STATED = (
    *("workload", "strategy", "model", "device", "nodes", "world_size", "precision"),
    *("sequence_length", "micro_batch", "accumulation", "global_batch"),
)
FEWEST_TRANSFERS = 4


class Stated(NamedTuple):
    """One claimed run: its spec and its numbers by metric."""

    spec: RunSpec
    source: str
    values: Mapping[str, float]

    @property
    def devices(self) -> int:
        return self.spec.topology.world_size

    @property
    def states_batch(self) -> bool:
        """Whether the source says how many micro batches a step has: one is the default of a spec, nobody's claim."""
        return "accumulation" in self.values or self.spec.training.accumulation > 1


class Recomputed(NamedTuple):
    value: float
    how: str


@dataclass(frozen=True, slots=True)
class Claims:
    claims: tuple[Claim, ...]
    transfers: tuple[ClaimedTransfers, ...]


def axes_of(record: RunRecord) -> dict[str, Scalar]:
    """The axes of a run; of a claimed one only those that its source states."""
    axes = record.spec.axes()
    return axes if record.status is not Status.CLAIMED else {name: axes[name] for name in _STATED}


def analyse(records: Sequence[RunRecord]) -> Claims:
    """Each claimed number beside what the others of its source give for it; empty where nothing was imported."""
    stated = [
        Stated(r.spec, r.claims[0].source, {c.metric: c.value for c in r.claims})
        for r in records
        if r.status is Status.CLAIMED and r.claims
    ]
    ordered = sorted(stated, key=lambda s: (s.source, str(s.spec.strategy), s.devices))
    by_source: defaultdict[str, list[Stated]] = defaultdict(list)
    for s in ordered:
        by_source[s.source].append(s)
    axes = {r.spec.run_id: axes_of(r) for r in records if r.claims}
    claims = tuple(c for s in ordered for c in _claims(s, by_source[s.source], axes[s.spec.run_id]))
    found = (_transfers(source, members, axes) for source, members in by_source.items())
    return Claims(claims, tuple(t for t in found if t))


def added_to(report: Report, records: Sequence[RunRecord]) -> Report:
    """The report with what others claim; its measurements and comparisons stay what they are."""
    found = analyse(records)
    return dataclasses.replace(report, claims=found.claims, claimed_transfers=found.transfers)


def _claims(s: Stated, peers: Sequence[Stated], axes: Mapping[str, Scalar]) -> Iterable[Claim]:
    recomputed = {
        "scaling_efficiency_ratio": _efficiency(s, peers),
        "tokens_per_usd": _per_usd(s),
        "relative_cost_ratio": _relative_cost(s, peers),
        "tokens_per_step": _tokens_per_step(s),
    }
    claimed = {**s.values, **({"tokens_per_step": float(s.spec.tokens_per_step)} if s.states_batch else {})}
    for metric, unit in UNITS.items():
        again = recomputed.get(metric)
        if metric in s.values or again:
            yield Claim(
                run=s.spec.run_id,
                axes=axes,
                source=s.source,
                metric=metric,
                unit=unit,
                claimed=claimed.get(metric),
                recomputed=again.value if again else None,
                how=again.how if again else None,
            )


# --- what the other numbers give ---


def _alike(s: Stated, peers: Iterable[Stated], *but: str) -> list[Stated]:
    """Peers that are said to differ from `s` in the named axes only."""
    ignored = {*but, "global_batch"}

    def key(one: Stated) -> str:
        return json.dumps({k: v for k, v in one.spec.axes().items() if k not in ignored}, sort_keys=True)

    return [p for p in peers if key(p) == key(s)]


def _efficiency(s: Stated, peers: Sequence[Stated]) -> Recomputed | None:
    """(T_N / N) / (T_N0 / N0), N0 the smallest size that the source states for the series."""
    series = _alike(s, peers, "world_size", "nodes")
    first = min(series, key=lambda p: p.devices)
    rates = s.values.get("tokens_per_s"), first.values.get("tokens_per_s")
    if len(series) < 2 or not rates[0] or not rates[1]:
        return None
    how = f"({rates[0]:,.0f} / {s.devices}) / ({rates[1]:,.0f} / {first.devices})"
    return Recomputed((rates[0] / s.devices) / (rates[1] / first.devices), how)


def _per_usd(s: Stated) -> Recomputed | None:
    price, rate = s.values.get("usd_per_gpu_hour"), s.values.get("tokens_per_s")
    if not price or not rate:
        return None
    how = f"3600 s * {rate:,.0f} tokens/s / ({s.devices} * {price:g} USD)"
    return Recomputed(training.tokens_per_usd(price, s.devices, rate), how)


def _relative_cost(s: Stated, peers: Sequence[Stated]) -> Recomputed | None:
    """Cost per token over that of the cheapest strategy, all on as many devices."""
    known = {id(p): found.value for p in _alike(s, peers, "strategy") if (found := _per_usd(p))}
    if id(s) not in known or len(known) < 2:
        return None
    best = max(known.values())
    return Recomputed(best / known[id(s)], f"{best:,.0f} / {known[id(s)]:,.0f} tokens per USD")


def _tokens_per_step(s: Stated) -> Recomputed | None:
    rate, step = s.values.get("tokens_per_s"), s.values.get("step_time_s")
    if not rate or not step:
        return None
    return Recomputed(rate * step, f"{rate:,.0f} tokens/s * {step:g} s")


# --- what the bytes alone give ---


def _transfers(
    source: str, members: Sequence[Stated], axes: Mapping[str, Mapping[str, Scalar]]
) -> ClaimedTransfers | None:
    """One constant for all rows, by least squares of relative errors; the link's rate is given, not fitted."""
    known = [(s, sent, s.values["step_time_s"]) for s in members if (sent := _sent(s)) and s.values.get("step_time_s")]
    links = {link for s, _, _ in known if (link := s.values.get("link_bytes_per_s"))}
    if len(known) < FEWEST_TRANSFERS or len(links) != 1:
        return None
    link = links.pop()
    alpha = sum((t - sent / link) / t**2 for _, sent, t in known) / sum(1 / t**2 for _, _, t in known)
    rows = tuple(
        ClaimedTransfer(
            run=s.spec.run_id,
            axes=axes[s.spec.run_id],
            sent_bytes=sent,
            claimed_s=t,
            explained_s=alpha + sent / link,
        )
        for s, sent, t in known
    )
    return ClaimedTransfers(source=source, alpha_s=alpha, link_bytes_per_s=link, rows=rows)


def _sent(s: Stated) -> float | None:
    """Bytes that each device sends in the claimed step: parameters * bytes for each * (n-1)/n."""
    count, each = s.values.get("wire_parameters"), s.values.get("wire_bytes_per_parameter")
    return count * each * (s.devices - 1) / s.devices if count and each else None
