"""LoadGen's verdict beside this client's, for the same run: what each says, and whether they agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from paceline.analysis.findings import LoadgenVerdict, Opinion
from paceline.analysis.findings.served import INVALID, INVALID_CLIENT, VALID
from paceline.analysis.served import latency_bounds, measurements
from paceline.analysis.served.loads import Served
from paceline.analysis.served.mlperf_rules import label_of
from paceline.analysis.served.verdicts import verdict_of
from paceline.experiment.serving import MOST_CPU_RATIO
from paceline.results.records import RunRecord
from paceline.results.served_samples import LoadgenSample, RequestSample

NS = 1e9
# Keys of its log. Its token rate is `completed_tokens_per_second`, or in `Offline` `tokens_per_second`; its
# token_throughput is wrong by orders of magnitude.
_TTFT = "first_token_99.00_percentile_latency_ns"
_TPOT = "time_per_output_token_99.00_percentile_ns"
_LATENCY = "99.00_percentile_latency_ns"
_TOKENS = ("completed_tokens_per_second", "tokens_per_second")


def verdicts(records: Iterable[RunRecord]) -> tuple[LoadgenVerdict, ...]:
    """One for each run in which LoadGen ran too."""
    return tuple(_verdict(record, sample) for record in records if record.requests for sample in record.loadgens)


def _verdict(record: RunRecord, sample: LoadgenSample) -> LoadgenVerdict:
    load = measurements.gather([record])[0]
    theirs, ours = _theirs(sample), _ours(load)
    agrees = (theirs.verdict == VALID) == (ours.verdict == VALID)
    negative = ours if theirs.verdict == VALID else theirs
    differ = f"{theirs.source} says {theirs.verdict}, Paceline {ours.verdict}: {'; '.join(negative.reasons)}"
    return LoadgenVerdict(
        run=record.spec.run_id,
        cell=record.spec.cell,
        scenario=sample.scenario,
        version=sample.version,
        theirs=theirs,
        ours=ours,
        agrees=agrees,
        text=f"both say {ours.verdict}" if agrees else differ,
        axes=record.axes(),
        label=label_of(load),
    )


def _theirs(sample: LoadgenSample) -> Opinion:
    """LoadGen's own words, unless facts it cannot know contradict them: it takes a failed request for a fast one, and a
    client at its limit for a slow system."""
    failed, unknown = sum(sample.errors.values()), []
    if sample.errors:
        classes = ", ".join(f"{name} {count} times" for name, count in sorted(sample.errors.items()))
        counts = f"{failed} of {sample.asked} requests failed ({classes})"
        unknown.append(f"{counts}, which LoadGen cannot know; it says {sample.verdict}")
    if sample.cpu_ratio is not None and sample.cpu_ratio > MOST_CPU_RATIO:
        used = f"used {sample.cpu_ratio:.0%} of a core (at most {MOST_CPU_RATIO:.0%})"
        unknown.append(f"client: sending for LoadGen {used}, which LoadGen does not check; it says {sample.verdict}")
    verdict = sample.verdict if not unknown else INVALID if failed else INVALID_CLIENT
    tokens = next((sample.numbers[key] for key in _TOKENS if sample.numbers.get(key)), None)
    return Opinion(
        source=f"LoadGen {sample.version}",
        verdict=verdict,
        reasons=(*unknown, *sample.reasons),
        requests=sample.asked,
        failed=failed,
        output_tokens_per_s=tokens,
        # One answer without tokens makes all its times meaningless.
        ttft_p99_s=None if failed else _seconds(sample, _TTFT),
        tpot_p99_s=None if failed else _seconds(sample, _TPOT),
        latency_p99_s=None if failed else _seconds(sample, _LATENCY),
    )


def _seconds(sample: LoadgenSample, key: str) -> float | None:
    """None if LoadGen gives none or an impossible time: for answers of one token it divides by zero."""
    value = sample.numbers.get(key)
    return value / NS if value is not None and value > 0 else None


def _ours(whole: Served) -> Opinion:
    verdict, answered, wall = verdict_of(whole), whole.answered, whole.wall_s()
    return Opinion(
        source="Paceline",
        verdict=verdict.verdict,
        reasons=verdict.reasons,
        requests=len(whole.requests),
        failed=len(whole.requests) - len(answered),
        output_tokens_per_s=sum(map(measurements.tokens_of, answered)) / wall if wall > 0 else None,
        ttft_p99_s=_p99(answered, measurements.ttft_s),
        tpot_p99_s=_p99(answered, measurements.tpot_s),
        latency_p99_s=_p99(answered, measurements.latency_s),
    )


def _p99(requests: Sequence[RequestSample], quantity: Callable[[RequestSample], float | None]) -> float | None:
    return latency_bounds.percentile([value for r in requests if (value := quantity(r)) is not None], 99)
