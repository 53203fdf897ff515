"""Whether every request of a run that asked a served model was answered once, or failed: none twice, none nowhere."""

from __future__ import annotations

from collections import Counter, defaultdict

from paceline.experiment.serving import PLAIN_SCENARIOS
from paceline.results.records import RunRecord


def exactly_once(record: RunRecord) -> list[str]:
    """What a run's own numbers say against it: requests or samples that were answered twice, or that are nowhere."""
    answered = Counter((r.stage, r.number) for r in record.requests if r.error is None)
    twice = sorted(number for (_, number), count in answered.items() if count > 1)
    found = [f"requests {', '.join(map(str, twice[:5]))} were answered more than once"] if twice else []
    return [*found, *_samples_again(record), *_unaccounted(record)]


def _samples_again(record: RunRecord) -> list[str]:
    """Only a load that goes on until a time has passed, looks for a rate, or asks for more than there are, uses samples
    again."""
    serving = record.spec.serving
    if serving is None or serving.least_s or serving.scenario not in PLAIN_SCENARIOS:
        return []
    available = record.evidence.settings.get("samples") if record.evidence else None
    if isinstance(available, int) and any(stage.planned > available for stage in record.stages):
        return []
    numbers: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for request in record.requests:
        if request.error is None:
            numbers[request.stage, request.sample].add(request.number)
    again = sorted(sample for (_, sample), known in numbers.items() if len(known) > 1)
    return [f"samples {', '.join(map(str, again[:5]))} were answered by several requests"] if again else []


def _unaccounted(record: RunRecord) -> list[str]:
    """Every request that was given out is answered or failed."""
    known = Counter(stage for stage, _ in {(request.stage, request.number) for request in record.requests})
    lost = [
        f"{stage.planned - known[stage.stage]} of {stage.planned} requests are neither answered nor failed"
        for stage in record.stages
        if known[stage.stage] < stage.planned
    ]
    return lost[:3]
