"""Published numbers, checked against each other: nothing here is measured, ranked or compared.

A claim has no samples, so no interval and no certificate. What can be checked is whether the numbers of a source agree
with each other by the formulas used for measured runs (method.md, section 4).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from paceline.analysis.cost import training
from paceline.analysis.findings import Claim, ClaimedTransfer, ClaimedTransfers, Report
from paceline.analysis.grouping import grouped
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
# Axes that a source states; the rest of a spec are defaults.
_STATED = (
    *("workload", "strategy", "model", "device", "nodes", "world_size", "precision"),
    *("sequence_length", "micro_batch", "accumulation", "global_batch"),
)
FEWEST_TRANSFERS = 4


class Stated(NamedTuple):
    """One claimed run: its spec, and its numbers by metric."""

    spec: RunSpec
    source: str
    values: Mapping[str, float]

    @property
    def devices(self) -> int:
        return self.spec.topology.world_size

    @property
    def states_batch(self) -> bool:
        """Whether the source says how many micro batches a step has; one is the default of a spec, not a claim."""
        return "accumulation" in self.values or self.spec.training.accumulation > 1


class Recomputed(NamedTuple):
    value: float
    how: str


def axes_of(record: RunRecord) -> dict[str, Scalar]:
    """The axes of a run; for a claimed one only those that its source states."""
    axes = record.axes()
    return axes if record.status is not Status.CLAIMED else {name: axes[name] for name in _STATED}


def added_to(report: Report, records: Sequence[RunRecord]) -> Report:
    """The report with each claimed number and what the others of its source give for it; nothing else changes."""
    stated = [
        Stated(r.spec, r.claims[0].source, {c.metric: c.value for c in r.claims})
        for r in records
        if r.status is Status.CLAIMED and r.claims
    ]
    ordered = sorted(stated, key=lambda s: (s.source, str(s.spec.strategy_text), s.devices))
    by_source = grouped(ordered, lambda s: s.source)
    axes = {r.spec.run_id: axes_of(r) for r in records if r.claims}
    claims = tuple(c for s in ordered for c in _claims(s, by_source[s.source], axes[s.spec.run_id]))
    transfers = (_transfers(source, members, axes) for source, members in by_source.items())
    return dataclasses.replace(report, claims=claims, claimed_transfers=tuple(t for t in transfers if t))


def _claims(s: Stated, peers: Sequence[Stated], axes: Mapping[str, Scalar]) -> Iterable[Claim]:
    recomputed = {
        "scaling_efficiency_ratio": _efficiency(s, peers),
        "tokens_per_usd": _per_usd(s),
        "relative_cost_ratio": None,
        "tokens_per_step": None,
    }
    # Cost per token over that of the cheapest strategy on as many devices.
    costs = {id(p): per_usd.value for p in _alike(s, peers, "strategy") if (per_usd := _per_usd(p))}
    if id(s) in costs and len(costs) > 1:
        best, own = max(costs.values()), costs[id(s)]
        recomputed["relative_cost_ratio"] = Recomputed(best / own, f"{best:,.0f} / {own:,.0f} tokens per USD")
    rate, step = s.values.get("tokens_per_s"), s.values.get("step_time_s")
    if rate and step:
        recomputed["tokens_per_step"] = Recomputed(rate * step, f"{rate:,.0f} tokens/s * {step:g} s")
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


# --- numbers recomputed from the others ---


def _alike(s: Stated, peers: Iterable[Stated], *but: str) -> list[Stated]:
    """Peers that differ from `s` only in the named axes."""
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


# --- step times from the bytes alone ---


def _transfers(
    source: str, members: Sequence[Stated], axes: Mapping[str, Mapping[str, Scalar]]
) -> ClaimedTransfers | None:
    """One constant for all rows, by least squares of relative errors; the link rate is given, not fitted."""
    known = []
    for s in members:
        # Bytes that each device sends in the claimed step: parameters * bytes for each * (n-1)/n.
        count, each, step = (s.values.get(n) for n in ("wire_parameters", "wire_bytes_per_parameter", "step_time_s"))
        sent = count * each * (s.devices - 1) / s.devices if count and each else None
        if sent and step:
            known.append((s, sent, step))
    links = {link for s, _, _ in known if (link := s.values.get("link_bytes_per_s"))}
    if len(known) < FEWEST_TRANSFERS or len(links) != 1:
        return None
    link = links.pop()
    alpha = sum((t - sent / link) / t**2 for _, sent, t in known) / sum(1 / t**2 for _, _, t in known)
    rows = tuple(
        ClaimedTransfer(
            run=s.spec.run_id, axes=axes[s.spec.run_id], sent_bytes=sent, claimed_s=t, explained_s=alpha + sent / link
        )
        for s, sent, t in known
    )
    return ClaimedTransfers(source=source, alpha_s=alpha, link_bytes_per_s=link, rows=rows)
