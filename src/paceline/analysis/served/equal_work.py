"""Equal work of two load tests: the same model, samples, limits and precision were requested, and as much was answered.

A server that answers less, or something else, is not faster. Greedy answers of two engines in a short format diverge
after some tokens by rounding alone; broken ones differ at once. So lengths must agree over all answers, and texts, if
both sides stored them, must begin alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from paceline.analysis.findings import Check, Comparison
from paceline.analysis.findings.served import Accuracy, ServedPair, Undecided
from paceline.analysis.grouping import grouped
from paceline.analysis.served import estimates, measurements
from paceline.analysis.served.estimates import COMPARED
from paceline.analysis.served.loads import Served
from paceline.analysis.statistics.intervals import ratio_between
from paceline.analysis.statistics.verdict import judged_ratio
from paceline.analysis.training import metrics
from paceline.experiment.spec import RunSpec
from paceline.results.records import RunRecord
from paceline.results.served_samples import RequestSample

# Answered tokens may differ by this part: servers count the end of an answer differently.
TOKENS_WITHIN = 0.01
# Texts that share so many first characters began alike; this share of them must.
BEGINNING, ALIKE = 16, 0.95
# Fields of a spec that say how the load was sent and recorded, not what was requested.
FREE = ("engine", "launcher", "serving.keeps_text", "serving.request_timeout_s", "serving.full_set")

# The spec's names for the data types that engines report.
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

Answered = Mapping[int, RequestSample]


# --- what must be the same ---


def checks(first: Sequence[RunRecord], second: Sequence[RunRecord]) -> tuple[Check, ...]:
    """Checks with the first side as expected and the second as observed."""
    sides = (first, second)
    same = [_requested(records) for records in sides]
    # A greedy model gives the same answer to a sample every time.
    ours, theirs = ({q.sample: q for record in side for q in record.requests if q.error is None} for side in sides)
    return (
        *(
            Check(name=name, ok=a == same[1][name], expected=a, observed=same[1][name])
            for name, a in same[0].items()
            if name in same[1]
        ),
        *_answered(ours, theirs),
    )


def _requested(records: Sequence[RunRecord]) -> dict[str, str]:
    """What a side requested, and the data type in which its engine computes if it reports one."""
    spec = records[0].spec
    assert spec.serving is not None
    reported = {str(s.settings["dtype"]) for r in records for s in r.replicas if s.settings.get("dtype")}
    dtypes = sorted({DTYPES.get(name.removeprefix("torch."), name.removeprefix("torch.")) for name in reported})
    return {
        "model": records[0].other_model or spec.model_text,
        "precision": spec.training.precision.compute,
        "data": spec.data_text,
        "seed": str(spec.seed),
        "API": spec.serving.api,
        "most tokens": str(spec.serving.max_tokens),
        **({"computes in": ", ".join(dtypes)} if dtypes else {}),
    }


def _answered(ours: Answered, theirs: Answered) -> Iterator[Check]:
    """A sample that one side failed is no problem; too few in common are. Texts are compared if both stored them."""
    shared, every = sorted({*ours} & {*theirs}), len({*ours} | {*theirs})
    ok = every > 0 and len(shared) >= (1 - TOKENS_WITHIN) * every
    yield Check(name="samples", ok=ok, expected=f"{every} answered by either", observed=f"{len(shared)} by both")
    prompts = [[side[sample].prompt_tokens for sample in shared] for side in (ours, theirs)]
    if shared and None not in prompts[0] and None not in prompts[1]:
        a, b = (sum(count for count in side if count is not None) for side in prompts)
        yield Check(name="prompt tokens", ok=prompts[0] == prompts[1], expected=f"{a:,}", observed=f"{b:,}")
    a, b = (sum(measurements.tokens_of(side[sample]) for sample in shared) for side in (ours, theirs))
    ok = abs(a - b) <= TOKENS_WITHIN * max(a, b)
    yield Check(name="answered tokens", ok=ok, expected=f"{a:,}", observed=f"{b:,}")
    texts = [(ours[sample].text, theirs[sample].text) for sample in shared]
    pairs = [(a, b) for a, b in texts if a is not None and b is not None]
    if pairs:
        alike = sum(a[:BEGINNING] == b[:BEGINNING] for a, b in pairs)
        seen = f"{alike} of {len(pairs)} begin alike, {sum(a == b for a, b in pairs)} are equal"
        yield Check(name="texts", ok=alike >= ALIKE * len(pairs), expected=f"{ALIKE:.0%} begin alike", observed=seen)


def reasons(results: Sequence[Check]) -> list[str]:
    return [f"{check.name}: {check.expected} against {check.observed}" for check in results if not check.ok]


# --- engines within one report ---


def analyse(records: Sequence[RunRecord], accuracy: Sequence[Accuracy] = ()) -> tuple[ServedPair, ...]:
    """Every two cells that differ only in their engine, load by load."""
    flags = {each.cell: each.flags for each in accuracy}
    groups = grouped(
        (load for load in measurements.reliable_loads(records) if load.replica is None),
        lambda load: (str(sorted((k, str(v)) for k, v in metrics.flat(load.spec).items() if k not in FREE)), load.load),
    )
    found = []
    for group in groups.values():
        pairs = list(itertools.combinations(group, 2))
        found += [_pair(a, b, flags, len(pairs)) for a, b in pairs]
    return tuple(found)


def _pair(a: Served, b: Served, flags: Mapping[str, Mapping[int, str]], pairs: int) -> ServedPair:
    results = checks(a.records, b.records)
    names = _name(a.spec, b.spec), _name(b.spec, a.spec)
    compared = tuple(_comparisons(a, b, names, pairs)) if all(check.ok for check in results) else ()
    decided = tuple(c for c in compared if isinstance(c, Comparison))
    raised = [
        f"{name}: replica {replica} {why}"
        for load, name in zip((a, b), names, strict=True)
        for replica, why in flags.get(load.spec.cell, {}).items()
    ]
    return ServedPair(
        cell=a.spec.cell,
        other=b.spec.cell,
        label=names[0],
        other_label=names[1],
        load=a.name,
        checks=results,
        comparisons=decided,
        flags=tuple(raised),
        runs=a.runs + b.runs,
        undecided=tuple(c for c in compared if isinstance(c, Undecided)),
    )


def _name(spec: RunSpec, beside: RunSpec) -> str:
    """The engine's name, with its options if both sides have the same engine."""
    assert spec.engine is not None
    assert beside.engine is not None
    return spec.engine.name if spec.engine.name != beside.engine.name else str(spec.engine)


def _comparisons(a: Served, b: Served, names: tuple[str, str], pairs: int) -> Iterator[Comparison | Undecided]:
    family = pairs * len(metrics_of(a))
    for metric in metrics_of(a):
        over, under = estimates.estimate(a, metric), estimates.estimate(b, metric)
        if over is None or under is None or min(over.value, under.value) <= 0:
            continue
        ratio = ratio_between([over], [under])
        if ratio is not None:
            cells, runs = (a.cell, b.cell), a.runs + b.runs
            better = COMPARED[metric][1]
            yield judged_ratio(metric, better, cells, names, ratio, family=family, axes=a.axes(), runs=runs)
            continue
        sides = ((names[0], over), (names[1], under))
        silent = ((name, estimates.why_unbounded(side, metric)) for name, side in sides if side.error is None)
        yield Undecided(metric=metric, ratio=over.value / under.value, reason="; ".join(map(": ".join, silent)))


def metrics_of(load: Served) -> tuple[str, ...]:
    """If everything is sent at once, TTFT is a position in the queue, which the rate shows too."""
    offline = load.serving.scenario == "offline"
    return (estimates.TOKENS_PER_S,) if offline else tuple(COMPARED)
