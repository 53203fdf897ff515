"""Replica against replica: the same samples on both, one replica after the other and back again (A B B A).

Each sample is its own control: differences between samples cancel in the pair, and steady drift over time cancels
because both replicas are used around the same moment on average. Samples are resampled in blocks of neighbours, with
both replicas' values together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from paceline.analysis.findings import BETTER, HIGHER, LOWER, WORSE, Differing
from paceline.analysis.findings.served import FASTER, SLOWER, Accuracy, PairedRatio, PairedReplicas
from paceline.analysis.grouping import grouped
from paceline.analysis.served import measurements
from paceline.analysis.served.equal_work import TOKENS_WITHIN
from paceline.analysis.statistics import intervals
from paceline.analysis.statistics.intervals import Array
from paceline.analysis.statistics.verdict import verdict_of
from paceline.analysis.training import gauges
from paceline.errors import Scalar
from paceline.host import machine
from paceline.results.records import RunRecord
from paceline.results.served_samples import ReplicaSample, RequestSample, StageSample

NS = 1e9
FEWEST_PAIRS = 8
# If the mean moments of two replicas are further apart than this part of the whole, drift does not cancel.
BALANCED_WITHIN = 0.1
# Insignificant differences between two devices: degrees, and a part of the clock.
TEMPERATURE_APART_C, CLOCK_APART = 5.0, 0.02
# Columns of a pair: tokens and seconds of the first replica, then of the second.
TOKENS, SECONDS, OTHER_TOKENS, OTHER_SECONDS = range(4)
_IGNORED = ("host", "environment.")


def analyse(records: Sequence[RunRecord], accuracy: Sequence[Accuracy] = ()) -> tuple[PairedReplicas, ...]:
    """Every two replicas of every cell that used them in turn; launches of a cell are resampled as a whole."""
    flags = {each.cell: each.flags for each in accuracy}
    used = [(record, {s.replica for s in record.stages if s.replica is not None}) for record in records]
    by_cell = grouped((each for each in used if len(each[1]) > 1), lambda each: each[0].spec.cell)
    found = []
    for cell, ours in by_cell.items():
        pairs = list(itertools.combinations(sorted(set().union(*(replicas for _, replicas in ours))), 2))
        members = [record for record, _ in ours]
        found += [_compared(members, pair, flags.get(cell, {}), len(pairs)) for pair in pairs]
    return tuple(found)


def _compared(
    records: Sequence[RunRecord], pair: tuple[int, int], flags: Mapping[int, str], family: int
) -> PairedReplicas:
    tables, dropped = zip(*(_pairs(record, pair) for record in records), strict=True)
    known = [{s.replica: s for s in record.replicas} for record in records]
    hosts = [next((each[one].host for each in known if one in each), None) for one in pair]
    return PairedReplicas(
        cell=records[0].spec.cell,
        replica=pair[0],
        other=pair[1],
        host=hosts[0],
        other_host=hosts[1],
        pairs=sum(map(len, tables)),
        dropped=sum(dropped),
        balanced=all(_is_balanced(record.stages, pair) for record in records),
        ratios=tuple(_ratios([t for t in tables if len(t)], records[0].spec.cell, pair, family)),
        differences=tuple(_differences(records[0], pair)),
        flags=tuple(f"replica {one} {flags[one]}" for one in pair if one in flags),
        runs=tuple(record.spec.run_id for record in records),
    )


# --- pairs ---


def _pairs(record: RunRecord, pair: tuple[int, int]) -> tuple[Array, int]:
    """A row for each sample that both answered every time, in the order it was first due; and how many were not."""
    ours = [request for request in record.requests if request.replica in pair]
    by_sample = grouped(sorted(ours, key=lambda r: (r.stage, r.due_ns, r.number)), lambda r: r.sample)
    rows = [row for answers in by_sample.values() if (row := _row(answers, pair)) is not None]
    return np.array(rows).reshape(-1, 4), len(by_sample) - len(rows)


def _row(answers: Sequence[RequestSample], pair: tuple[int, int]) -> list[float] | None:
    """Means over the passes of each replica: tokens, and seconds from when it was due to its end."""
    row: list[float] = []
    for replica in pair:
        passes = [request for request in answers if request.replica == replica]
        seconds = [measurements.latency_s(request) for request in passes if request.error is None]
        if not seconds or len(seconds) < len(passes) or None in seconds:
            return None
        row += [float(np.mean([measurements.tokens_of(request) for request in passes]))]
        row += [float(np.mean([value for value in seconds if value is not None]))]
    return row


def _is_balanced(stages: Sequence[StageSample], pair: tuple[int, int]) -> bool:
    """Whether the mean moments of both are close together, relative to the whole duration."""
    ours = [stage for stage in stages if stage.replica in pair]
    middles = [np.mean([(s.started_ns + s.ended_ns) / 2 for s in ours if s.replica == one]) for one in pair]
    length = max(s.ended_ns for s in ours) - min(s.started_ns for s in ours)
    return bool(abs(middles[0] - middles[1]) <= BALANCED_WITHIN * length)


# --- ratios ---


def _ratios(tables: Sequence[Array], cell: str, pair: tuple[int, int], family: int) -> Iterator[PairedRatio]:
    """Ratios of one of `family` pairs of replicas."""
    if not tables:
        return
    draws = intervals.resample_sums(tables, intervals.seed_of(cell, "paired", *map(str, pair)))
    every = np.concatenate(tables)
    total = np.sum([table.sum(axis=0) for table in tables], axis=0)
    # Answers of different lengths are different work: a replica that stops early is not fast.
    ours, theirs = (sum(float(table[:, column].sum()) for table in tables) for column in (TOKENS, OTHER_TOKENS))
    is_equal = abs(ours - theirs) <= TOKENS_WITHIN * max(ours, theirs)
    for metric, unit, better, of in (
        ("latency_s", "s", LOWER, _latency),
        ("output_tokens_per_s", "tokens/s", HIGHER, _speed),
    ):
        value, ratio, verdict = float(of(total)), None, None
        if len(every) >= FEWEST_PAIRS:
            drawn = intervals.from_replicates(value, of(draws), intervals.unit_count(tables), len(tables))
            ratio = intervals.contrast([(drawn, 1)])
            if ratio is not None and len(tables) == 1:
                # Both replicas were used in turn: the question is which one is faster in this launch.
                ratio = ratio._replace(launches=None)
        if not is_equal:
            unequal = f"{int((every[:, TOKENS] != every[:, OTHER_TOKENS]).sum())} of {len(every)} samples"
            counts = f"{ours:,.0f} against {theirs:,.0f} tokens"
            reason = f"not equal work: {unequal} have answers of different lengths ({counts})"
        elif ratio is None:
            reason = f"both answered {len(every)} samples; at least {FEWEST_PAIRS} are needed"
        else:
            verdict, reason = verdict_of(ratio, better, family)
            verdict = {BETTER: FASTER, WORSE: SLOWER}.get(verdict, verdict)
        yield PairedRatio(
            metric=metric,
            unit=unit,
            ratio=value,
            low=ratio.low if ratio else None,
            high=ratio.high if ratio else None,
            detectable_ratio=ratio.detectable(family) if ratio else None,
            verdict=verdict,
            reason=reason,
        )


def _latency(sums: Array) -> Array:
    return np.asarray(sums[..., SECONDS] / sums[..., OTHER_SECONDS])


def _speed(sums: Array) -> Array:
    """Tokens per second of request: by Little's law the ratio of tokens per second at equal requests in flight."""
    ours, theirs = sums[..., TOKENS] / sums[..., SECONDS], sums[..., OTHER_TOKENS] / sums[..., OTHER_SECONDS]
    return np.asarray(ours / theirs)


# --- what else differs ---


def _differences(record: RunRecord, pair: tuple[int, int]) -> Iterator[Differing]:
    """Settings of the replicas, facts of their hosts, and temperature and clock of their devices."""
    known = {s.replica: s for s in record.replicas}
    ours, theirs = (known.get(one) for one in pair)
    if ours is None or theirs is None:
        return
    a, b = _facts(ours), _facts(theirs)
    for path in dict.fromkeys((*a, *b)):
        if a.get(path) != b.get(path):
            yield Differing(path=path, first=_text(a.get(path)), second=_text(b.get(path)))
    machines = {str(facts.get("host")): facts for facts in record.machines}
    if ours.host != theirs.host and {ours.host, theirs.host} <= set(machines):
        for path, (first, second) in machine.fingerprint_diff(machines[ours.host], machines[theirs.host]).items():
            if not path.startswith(_IGNORED):
                yield Differing(path=path, first=_text(first), second=_text(second))
        # Medians of the gauges on each host, only if they differ.
        for name, label, unit, factor in (
            ("temperature_c", "temperature", "C", 1.0),
            ("sm_clock_hz", "SM clock", "MHz", 1e-6),
        ):
            values = [
                gauges.known(getattr(s, name) for s in record.gauges if s.host == host and s.device is not None)
                for host in (ours.host, theirs.host)
            ]
            if all(values):
                low, high = sorted(float(np.median(each)) for each in values)
                if high - low > (TEMPERATURE_APART_C if unit == "C" else CLOCK_APART * high):
                    texts = [f"{factor * float(np.median(each)):.0f} {unit}" for each in values]
                    yield Differing(path=label, first=texts[0], second=texts[1])


def _facts(sample: ReplicaSample) -> dict[str, Scalar]:
    own: dict[str, Scalar] = {"engine": sample.engine, "model": sample.model, "version": sample.version}
    own |= {"devices": sample.devices, "tensor_parallel": sample.tensor_parallel}
    return own | {f"settings.{name}": value for name, value in sample.settings.items()}


def _text(value: object) -> str | None:
    return None if value is None else str(value)
