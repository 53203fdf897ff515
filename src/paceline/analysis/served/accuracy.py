"""Answer quality beside speed: ROUGE if references exist, and agreement between replicas in any case.

Scores are means over samples, times 100, with a bootstrap interval over samples. Targets apply to one task and only to
its full set: a subset can neither pass nor fail. Nothing here is timed.
"""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from paceline.analysis.findings import HIGHER, Measurement
from paceline.analysis.findings.served import (
    AGREES,
    DIFFERS,
    FAILED,
    PASSED,
    SILENT,
    SMOKE,
    UNDECIDED,
    Accuracy,
    AccuracyTarget,
    ReplicaAnswers,
)
from paceline.analysis.grouping import grouped
from paceline.analysis.served import measurements, rouge
from paceline.analysis.served.equal_work import BEGINNING
from paceline.analysis.served.mlperf_rules import MOST_TOKENS, WHOLE_SET
from paceline.analysis.statistics import intervals
from paceline.errors import MissingPackageError, Scalar
from paceline.results.records import RunRecord
from paceline.results.served_samples import RequestSample

METRICS = dict.fromkeys(("rouge1_score", "rouge2_score", "rouge_l_score", "rouge_lsum_score"), ("score", HIGHER))
CHARACTERS = "answer_characters"
# Llama-3.1-8B on CNN/DailyMail, greedy, at most 128 tokens: scores of the full set, and the share that must be reached.
MODEL = "llama318b"
FULL_SCORES = dict(zip(METRICS, (38.7792, 15.9075, 24.4957, 35.793), strict=True))
LEAST_OF_SCORE = 0.99
FULL_CHARACTERS, CHARACTERS_WITHIN = 8_167_644, 0.1
FEWEST_SCORED = 2


def analyse(records: Sequence[RunRecord]) -> tuple[Accuracy, ...]:
    """The accuracy of every cell with answers to judge: stored beside a reference, or from several replicas."""
    by_cell = grouped((record for record in records if record.requests), lambda record: record.spec.cell)
    return tuple(accuracy for ours in by_cell.values() if (accuracy := _accuracy(ours)))


def _accuracy(records: Sequence[RunRecord]) -> Accuracy | None:
    requests = [request for record in records for request in record.requests]
    agreements = _agreements(records)
    if not any(map(_is_scored, requests)) and len(agreements) < 2:
        return None
    try:
        scored, note = [_scored(request) for request in requests if _is_scored(request)], None
    except MissingPackageError as error:
        scored, note = [], f"not scored: {error}"
    why_smoke = _why_smoke(records, requests, scored)
    targets = () if why_smoke else tuple(_targets(scored))
    verdict = (PASSED if all(t.ok for t in targets) else FAILED) if targets else SMOKE
    return Accuracy(
        cell=records[0].spec.cell,
        axes=records[0].axes(),
        scored=len({one.sample for one in scored}),
        scores=tuple(_measured(records, scored)),
        targets=targets,
        verdict=verdict if scored else None,
        replicas=tuple(_replicas(records, scored, agreements)),
        runs=tuple(record.spec.run_id for record in records),
        note=why_smoke if scored else note,
    )


def _is_scored(request: RequestSample) -> bool:
    return request.error is None and request.text is not None and request.reference is not None


# --- scores ---


class Scored(NamedTuple):
    """One answer compared with its reference: four scores times 100, and its length in characters."""

    sample: int
    replica: int
    scores: tuple[float, ...]
    characters: int


# Cached: a greedy model gives the same answer in every launch, and a report is built more than once.
_rouge = functools.lru_cache(maxsize=1 << 16)(rouge.score)


def _scored(request: RequestSample) -> Scored:
    answer = (request.text or "").strip()
    scores = tuple(100 * score for score in _rouge(answer, (request.reference or "").strip()))
    return Scored(request.sample, request.replica, scores, len(answer))


def _measured(records: Sequence[RunRecord], scored: Sequence[Scored], replica: int | None = None) -> list[Measurement]:
    """Means over samples; a sample with several answers counts once, by the mean of its answers."""
    if not scored:
        return []
    by_sample = grouped(sorted(scored, key=lambda one: one.sample), lambda one: one.sample)
    table = np.array([np.mean([one.scores for one in answers], axis=0) for answers in by_sample.values()])
    own: dict[str, Scalar] = {} if replica is None else {"replica": replica}
    spec, count, measured = records[0].spec, len(table), []
    for column, (metric, (unit, better)) in enumerate(METRICS.items()):
        values, bounds = table[:, column], (None, None)
        if count >= FEWEST_SCORED:
            # Samples are in random order and answered independently, so single samples are resampled.
            rng = np.random.default_rng(intervals.seed_of(spec.cell, metric, str(own)))
            means = [float(values[rng.integers(0, count, count)].mean()) for _ in range(intervals.RESAMPLES)]
            bounds = np.percentile(means, (2.5, 97.5)).tolist()
        measured.append(
            Measurement(
                metric=metric,
                unit=unit,
                better=better,
                cell=spec.cell,
                value=float(values.mean()),
                low=bounds[0],
                high=bounds[1],
                n=count,
                launches=len(records),
                axes={**records[0].axes(), **own},
                runs=tuple(record.spec.run_id for record in records),
            )
        )
    return measured


# --- targets ---


def _why_smoke(records: Sequence[RunRecord], requests: Sequence[RequestSample], scored: Sequence[Scored]) -> str | None:
    """Why the targets do not apply; None if the full set was answered as they require."""
    spec = records[0].spec
    assert spec.serving is not None
    if {one.sample for one in scored} != set(range(WHOLE_SET)) or len(scored) != len(requests):
        count = len({one.sample for one in scored})
        return f"{count:,} samples can neither pass nor fail: targets apply to the full set of {WHOLE_SET:,}"
    if spec.serving.max_tokens != MOST_TOKENS:
        return f"targets apply to answers of at most {MOST_TOKENS} tokens, but {spec.serving.max_tokens} were allowed"
    served_as = {str(sample.model) for record in records for sample in record.replicas} | {spec.model_text}
    if not any(MODEL in re.sub(r"[^a-z0-9]", "", name.lower()) for name in served_as):
        return f"targets apply to Llama-3.1-8B, but the model is {', '.join(sorted(served_as))}"
    return None


def _targets(scored: Sequence[Scored]) -> Iterator[AccuracyTarget]:
    means = np.mean([one.scores for one in scored], axis=0).tolist()
    for (metric, full), value in zip(FULL_SCORES.items(), means, strict=True):
        low = LEAST_OF_SCORE * full
        yield AccuracyTarget(metric=metric, value=value, low=low, high=None, ok=value >= low)
    characters = sum(one.characters for one in scored) * WHOLE_SET / len(scored)
    low, high = ((1 + part) * FULL_CHARACTERS for part in (-CHARACTERS_WITHIN, CHARACTERS_WITHIN))
    yield AccuracyTarget(metric=CHARACTERS, value=characters, low=low, high=high, ok=low <= characters <= high)


# --- replicas ---


class Agreement(NamedTuple):
    """How a replica compares with the others: questions asked, how many it answered differently from most (or without a
    majority), and whether those answers begin alike, as they do if only rounding differs."""

    verdict: str | None = None
    asked: int = 0
    odd: int = 0
    begins_alike: bool = False


def _agreements(records: Sequence[RunRecord]) -> dict[int, Agreement]:
    """By replica. The same question in another launch is another question."""
    questions: defaultdict[tuple[int, int], dict[int, str | None]] = defaultdict(dict)
    for launch, record in enumerate(records):
        for answer in record.answers:
            questions[launch, answer.sample][answer.replica] = None if answer.error else answer.text
    agreements = {}
    for replica in sorted({answer.replica for record in records for answer in record.answers}):
        ours = [texts for texts in questions.values() if replica in texts]
        if not any(texts[replica] for texts in ours):
            agreements[replica] = Agreement(SILENT, len(ours), len(ours))
            continue
        odd, split = [], []
        for texts in ours:
            most, count = Counter(texts.values()).most_common(1)[0]
            if 2 * count <= len(texts) or most is None:
                split.append(texts)
            elif texts[replica] != most:
                odd.append(texts)
        verdict = DIFFERS if odd else UNDECIDED if split else AGREES
        alike = (len({None if text is None else text[:BEGINNING] for text in q.values()}) == 1 for q in odd or split)
        agreements[replica] = Agreement(verdict, len(ours), len(odd or split), all(alike))
    return agreements


def _replicas(
    records: Sequence[RunRecord], scored: Sequence[Scored], agreements: Mapping[int, Agreement]
) -> Iterator[ReplicaAnswers]:
    """Empty if there is only one replica."""
    hosts = {sample.replica: sample.host for record in records for sample in record.replicas}
    everyone = sorted({*hosts, *agreements, *(one.replica for one in scored)})
    rates = _rates(records)
    for replica in everyone if len(everyone) > 1 else ():
        own = _measured(records, [one for one in scored if one.replica == replica], replica)
        others = _measured(records, [one for one in scored if one.replica != replica])
        agreement = agreements.get(replica, Agreement())
        yield ReplicaAnswers(
            replica=replica,
            host=hosts.get(replica),
            agreement=agreement.verdict,
            asked=agreement.asked,
            odd=agreement.odd,
            tokens_per_s=rates.get(replica),
            scores=tuple(own),
            flag=_flag(agreement, own, others),
        )


def _rates(records: Sequence[RunRecord]) -> dict[int, float]:
    """Output tokens of each replica over the time of its loads; shown beside a flag."""
    tokens: Counter[int] = Counter()
    seconds: defaultdict[int, float] = defaultdict(float)
    for load in measurements.gather(records):
        for launch in load.launches:
            for replica in {request.replica for request in launch.answered}:
                seconds[replica] += launch.wall_s()
            for request in launch.answered:
                tokens[request.replica] += measurements.tokens_of(request)
    return {replica: tokens[replica] / time for replica, time in seconds.items() if time > 0}


def _flag(agreement: Agreement, own: Sequence[Measurement], others: Sequence[Measurement]) -> str | None:
    """It answers differently, or the whole interval of a score is below that of the other replicas together."""
    counts = f"{agreement.odd} of {agreement.asked} questions"
    alike = "; all these answers begin alike, so rounding may be the cause" if agreement.begins_alike else ""
    texts = {
        SILENT: f"answered none of {agreement.asked} questions that every replica got",
        UNDECIDED: f"has no majority with the other replicas on {counts}{alike}",
        DIFFERS: f"answered {counts} differently from most replicas{alike}",
    }
    if agreement.verdict in texts:
        return texts[agreement.verdict]
    for ours, theirs in zip(own, others, strict=False):
        if ours.high is not None and theirs.low is not None and ours.high < theirs.low:
            return f"scores {ours.value:.1f} in {ours.metric}, the other replicas {theirs.value:.1f}"
    return None
