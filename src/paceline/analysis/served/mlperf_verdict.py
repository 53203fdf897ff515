"""LoadGen's verdict beside this client's, of the same run: what each says, and whether they agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from paceline.analysis.findings import LoadgenVerdict, Opinion
from paceline.analysis.findings.served import INVALID, INVALID_CLIENT, VALID
from paceline.analysis.served import measurements
from paceline.analysis.served.mlperf_rules import label_of
from paceline.analysis.served.verdicts import verdict_of
from paceline.experiment.serving import MOST_CPU_RATIO
from paceline.results.records import RunRecord
from paceline.results.served_samples import LoadgenSample, RequestSample

NS = 1e9
# Where its log has each figure. Of tokens it tells `completed_tokens_per_second`, or in `Offline` tokens_per_second:
# what it calls token_throughput is off by orders of magnitude.
_TTFT = "first_token_99.00_percentile_latency_ns"
_TPOT = "time_per_output_token_99.00_percentile_ns"
_LATENCY = "99.00_percentile_latency_ns"
_TOKENS = ("completed_tokens_per_second", "tokens_per_second")


def verdicts(records: Iterable[RunRecord]) -> tuple[LoadgenVerdict, ...]:
    """One for each run in which LoadGen asked too."""
    return tuple(_verdict(record, told) for record in records if record.requests for told in record.loadgens)


def _verdict(record: RunRecord, told: LoadgenSample) -> LoadgenVerdict:
    theirs, ours = _theirs(told), _ours(record)
    agrees = (theirs.verdict == VALID) == (ours.verdict == VALID)
    return LoadgenVerdict(
        run=record.spec.run_id,
        cell=record.spec.cell,
        scenario=told.scenario,
        version=told.version,
        theirs=theirs,
        ours=ours,
        agrees=agrees,
        text=_text(theirs, ours, agrees),
        axes=record.spec.axes(),
        label=label_of(measurements.gather([record])[0]),
    )


def _theirs(told: LoadgenSample) -> Opinion:
    """Its own words, unless what it cannot know speaks against them: it takes a failed request for a fast one, and a
    client at its limit for a slow system."""
    failed = sum(told.errors.values())
    unseen = tuple(_unseen(told))
    word = told.verdict if not unseen else INVALID if failed else INVALID_CLIENT
    tokens = next((told.numbers[key] for key in _TOKENS if told.numbers.get(key)), None)
    return Opinion(
        source=f"LoadGen {told.version}",
        verdict=word,
        reasons=(*unseen, *told.reasons),
        requests=told.asked,
        failed=failed,
        output_tokens_per_s=tokens,
        # An answer without a token makes nonsense of the times of all.
        ttft_p99_s=None if failed else _seconds(told, _TTFT),
        tpot_p99_s=None if failed else _seconds(told, _TPOT),
        latency_p99_s=None if failed else _seconds(told, _LATENCY),
    )


def _unseen(told: LoadgenSample) -> Iterator[str]:
    if told.errors:
        failed = sum(told.errors.values())
        classes = ", ".join(f"{name} {count} times" for name, count in sorted(told.errors.items()))
        yield f"{failed} of {told.asked} requests failed ({classes}), which LoadGen cannot know; it says {told.verdict}"
    if told.cpu_ratio is not None and told.cpu_ratio > MOST_CPU_RATIO:
        used = f"used {told.cpu_ratio:.0%} of a core (at most {MOST_CPU_RATIO:.0%})"
        yield f"client: asking for LoadGen {used}, which it does not look at; it says {told.verdict}"


def _seconds(told: LoadgenSample, key: str) -> float | None:
    """None where it tells none, or a time that cannot be: of answers of one token it divides by nothing."""
    value = told.numbers.get(key)
    return value / NS if value is not None and value > 0 else None


def _ours(record: RunRecord) -> Opinion:
    whole = measurements.gather([record])[0]
    found, answered, wall = verdict_of(whole), whole.answered, whole.wall_s()
    return Opinion(
        source="Paceline",
        verdict=found.verdict,
        reasons=found.reasons,
        requests=len(whole.requests),
        failed=len(whole.requests) - len(answered),
        output_tokens_per_s=sum(map(measurements.tokens_of, answered)) / wall if wall > 0 else None,
        ttft_p99_s=_p99(answered, measurements.ttft_s),
        tpot_p99_s=_p99(answered, measurements.tpot_s),
        latency_p99_s=_p99(answered, measurements.latency_s),
    )


def _p99(requests: Sequence[RequestSample], quantity: Callable[[RequestSample], float | None]) -> float | None:
    values = [value for request in requests if (value := quantity(request)) is not None]
    return float(np.percentile(values, 99)) if values else None


def _text(theirs: Opinion, ours: Opinion, agrees: bool) -> str:
    if agrees:
        return f"both say {ours.verdict}"
    blamed = ours if theirs.verdict == VALID else theirs
    return f"{theirs.source} says {theirs.verdict}, Paceline {ours.verdict}: {'; '.join(blamed.reasons)}"
