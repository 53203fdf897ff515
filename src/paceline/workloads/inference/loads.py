"""Which loads a run applies, one after the other; later loads may depend on the outcomes of earlier ones.

Each kind of run is a generator: it yields a load and receives its outcome. Nothing here sends anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.errors import require
from paceline.experiment.serving import PERCENTILE, Serving
from paceline.serving import early_stopping
from paceline.serving.client import schedule
from paceline.serving.client.schedule import NS
from paceline.serving.early_stopping import Verdict
from paceline.serving.prompts import Prompt

# Most requests in flight if everything is sent at once: more connections make no server faster.
OFFLINE_CAP = 512
CLOSED = ("single_stream", "concurrency")
# Scenarios in which the replicas set the pace, so that replicas can be compared.
BOUNDED = ("offline", *CLOSED)
MOST_SWEPT = 64
MOST_RATES = 8
# A sweep that chooses its own rates ends at the first rate that the replicas do not keep up with.
KEPT_UP = 0.9
# The fewest requests that can show a 99th percentile. A search sends so many at each rate and repeats samples if
# needed.
LEAST_SEARCHED = early_stopping.requests_needed(0, PERCENTILE)
# How close the highest rate that passes and the lowest that fails must be.
SEARCH_RATIO = 1.05
# A trial lasts so many times the longest wait within the limits. At 5 % above capacity the queue grows by 1 s in 20 s:
# after 20 times the limit it is as long as the limit, so the last fifth of 25 times is late.
TRIAL_WAITS = 1.25 / (SEARCH_RATIO - 1)
# The share of a trial's requests that must be sent before the last one is due. With fewer, the rate was not the
# trial's.
PACED = 0.95
MOST_HALVINGS = 10
# With too few requests to decide, a search sends twice as many at the same rate, at most so often.
MOST_DOUBLINGS = 3
# Requests in flight at each replica while a search estimates its first rate, and how many rounds.
GUESS_IN_FLIGHT = 8
GUESS_ROUNDS = 4
# The most requests of one load: each entry of a plan costs some tens of bytes.
MOST_PLANNED = 1_000_000
# How much faster than the fastest warm-up answer a closed loop may be.
HASTE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One load of a plain scenario. It sends at least `requests`, for at least least_s, with at most `concurrency` in
    flight over all its replicas (None: no limit). replica: the only one used, None for all. A trial ends as soon as it
    is certain that its limits are exceeded."""

    scenario: str
    requests: int
    seed: int
    rate_per_s: float | None = None
    concurrency: int | None = None
    replica: int | None = None
    least_s: float = 0.0
    is_trial: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a load: requests sent, those late or failed, and its duration. doubt: why the client was
    unreliable; requests that the client delayed say nothing about replicas. paced: the share sent before the last one
    was due; 1 if there was no schedule."""

    requests: int
    late: int
    wall_s: float
    doubt: str | None = None
    paced: float = 1.0

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def verdict(self) -> Verdict:
        """Whether the limits hold at the 99th percentile, by early stopping: the same verdict as in the report."""
        return early_stopping.verdict_of(self.requests, self.late, PERCENTILE)

    @property
    def objection(self) -> str | None:
        """Why the load says nothing about its rate. A trial that ended early has not sent its last requests, so its
        pace is judged by the client's lag alone."""
        if self.doubt is None and self.verdict is Verdict.PASSED and self.paced < PACED:
            return f"only {self.paced:.0%} of the requests were sent before the last one was due"
        return self.doubt


def is_lost(planned: int, ended: int, late: int) -> bool:
    """Whether a trial need not continue: more requests are late than its plan allows, and more than by chance."""
    allowed = early_stopping.late_allowed(planned, PERCENTILE)
    return allowed is not None and late > allowed and early_stopping.too_many_late(ended, late, PERCENTILE)


# The return value says why a search ended; None if the loads were known beforehand.
Loads = Generator[Load, Outcome, str | None]


def loads_of(
    serving: Serving, samples: int, replicas: int, seed: int, left_s: Callable[[], float], *, answer_tokens: int
) -> Loads:
    """The loads of a run. left_s returns how long the run may still take; answer_tokens is the longest answer."""
    if serving.scenario == "sweep":
        return sweep(serving, samples, seed)
    if serving.scenario == "search":
        return search(serving, samples, replicas, seed, left_s, trial_s(serving, answer_tokens))
    whole = plain(serving, samples, seed)
    return paired(whole, replicas) if serving.partition == "paired" else once(whole)


def plain(serving: Serving, samples: int, seed: int) -> Load:
    fixed = {"single_stream": 1, "offline": serving.concurrency or OFFLINE_CAP}
    rate = None if serving.scenario in (*BOUNDED, "trace") else serving.rate_per_s
    return Load(
        scenario=serving.scenario,
        requests=samples,
        seed=seed,
        rate_per_s=rate,
        concurrency=fixed.get(serving.scenario, serving.concurrency),
        least_s=serving.least_s,
    )


def once(load: Load) -> Loads:
    yield load
    return None


def paired(load: Load, replicas: int) -> Loads:
    """A B .. B A, with the same requests in the same order: drift over the run affects all replicas alike. Each has as
    many requests in flight as it would have beside the others, so that their influence can be measured."""
    share = None if load.concurrency is None else -(-load.concurrency // replicas)
    for replica in (*range(replicas), *reversed(range(replicas))):
        yield replace(load, replica=replica, concurrency=share)
    return None


def sweep(serving: Serving, samples: int, seed: int) -> Loads:
    by_rate = serving.rate_per_s is not None
    for stage, size in enumerate(swept(serving)):
        load = Load(scenario="", requests=samples, seed=seed_of(seed, stage), least_s=serving.least_s)
        if not by_rate:
            yield replace(load, scenario="concurrency", concurrency=int(size))
            continue
        outcome = yield replace(load, scenario="server", rate_per_s=size)
        if serving.loads is None and outcome.requests_per_s < KEPT_UP * size:
            break
    return None


def swept(serving: Serving) -> list[float]:
    """The given loads; otherwise 1, 2, 4 ... in flight up to `concurrency`, or rates doubled from `rate_per_s` on."""
    if serving.loads is not None:
        whole = serving.rate_per_s is None
        accepted = "whole numbers of requests in flight, such as 1+2+4" if whole else "rates, such as 0.5+1+2"
        try:
            given = [float(size) for size in serving.loads.split("+")]
        except ValueError:
            given = [math.nan]
        fits = all(0 < size < math.inf and (not whole or size == int(size)) for size in given)
        require(fits, "loads", serving.loads, accepted)
        return given
    if serving.rate_per_s is not None:
        return [serving.rate_per_s * 2**power for power in range(MOST_RATES)]
    most = serving.concurrency or MOST_SWEPT
    sizes = [float(1 << power) for power in range(most.bit_length())]
    return sizes if sizes[-1] == most else [*sizes, float(most)]


def trial_s(serving: Serving, answer_tokens: int) -> float:
    """How long a trial lasts at least, so that replicas 5 % too slow cannot pass it in a burst.

    Either requests queue and wait longer for their first token, or each answer takes longer. A limit breaks once this
    growth reaches the limit on the first token, on the whole answer, or on all further tokens together.
    """
    ttft_s, tpot_s, latency_s = (serving.limits[name] or 0.0 for name in ("ttft_s", "tpot_s", "latency_s"))
    return max(serving.least_s, TRIAL_WAITS * max(ttft_s, latency_s, tpot_s * (answer_tokens - 1)))


def search(
    serving: Serving, samples: int, replicas: int, seed: int, left_s: Callable[[], float], least_s: float
) -> Loads:
    """Find the highest rate within the limits: doubled until it fails, or halved until it passes, then bisected.

    A rate with too few requests to decide gets more. The search ends early if the client is unreliable at a rate, and
    if the next load would not end within the time of the run.
    """
    requests = max(samples, LEAST_SEARCHED)
    rate, stage = serving.rate_per_s, 0
    if rate is None:
        in_flight = serving.concurrency or GUESS_IN_FLIGHT * replicas
        guess = Load(scenario="concurrency", requests=GUESS_ROUNDS * in_flight, seed=seed, concurrency=in_flight)
        # In a closed loop replicas are never idle; within limits they sustain less.
        rate, stage = float(f"{max((yield guess).requests_per_s / 2, 1e-3):.4g}"), 1
    bracket, count = Bracket(begin=rate), requests
    while (rate := bracket.next_rate()) is not None:
        lasting_s = max(count / rate, least_s)
        if lasting_s * rate > MOST_PLANNED:
            return bracket.end_before(rate, f"the load would have more than {MOST_PLANNED:,} requests")
        if lasting_s >= left_s():
            return f"a load at {rate:.4g} requests/s lasts {lasting_s:.0f} s, longer than what is left of timeout_s"
        load = Load(scenario="server", requests=count, seed=seed_of(seed, stage), rate_per_s=rate, is_trial=True)
        outcome = yield replace(load, least_s=least_s)
        if outcome.objection is not None:
            return bracket.end_before(rate, outcome.objection)
        stage += 1
        if outcome.verdict is Verdict.TOO_FEW and count < requests << MOST_DOUBLINGS:
            count *= 2
        else:
            bracket.learn(rate, outcome.verdict)
            count = requests
    return bracket.end()


@dataclass(slots=True, kw_only=True)
class Bracket:
    """The highest rate that passed, and the lowest rate that did not: it failed, or stayed undecided even with many
    requests (is_unclear). The search continues between them; the report calls only the first kind failed."""

    begin: float
    passed: float | None = None
    above: float | None = None
    is_unclear: bool = False

    def next_rate(self) -> float | None:
        """The next rate to try; None when both are close enough, or nothing passes."""
        if self.passed is None and self.above is None:
            return self.begin
        if self.above is None:
            assert self.passed is not None
            return 2 * self.passed
        if self.passed is None:
            return self.above / 2 if self.above > self.begin / 2**MOST_HALVINGS else None
        if self.above <= SEARCH_RATIO * self.passed:
            return None
        # Four digits are finer than the search resolves, and easy to read and repeat.
        return float(f"{math.sqrt(self.passed * self.above):.4g}")

    def learn(self, rate: float, verdict: Verdict) -> None:
        if verdict is Verdict.PASSED:
            self.passed = max(rate, self.passed or 0.0)
        elif rate < (self.above or math.inf):
            self.above, self.is_unclear = rate, verdict is Verdict.TOO_FEW

    def end_before(self, rate: float, why: str) -> str:
        """Why the search ends if the client cannot send at this rate: the result is a lower bound or a wider
        bracket."""
        known = "no rate passed" if self.passed is None else f"at least {self.passed:.4g} requests/s"
        if self.passed is not None and self.above is not None:
            known = f"between {self.passed:.4g} and {self.above:.4g} requests/s"
        return f"{known}: this client cannot measure {rate:.4g} requests/s: {why}"

    def end(self) -> str:
        if self.passed is None:
            return "no rate passed"
        if self.is_unclear:
            return f"at {self.above:.4g} requests/s even {2**MOST_DOUBLINGS} times the requests were too few to decide"
        return "the rate is known to within 5 %"


# --- which sample is due when ---


def seed_of(seed: int, stage: int) -> int:
    """Each load has its own order and gaps, all derived from one seed; the first load uses the seed itself."""
    return int(np.random.SeedSequence([seed, stage]).generate_state(1)[0]) if stage else seed


def plan_of(
    load: Load, prompts: Sequence[Prompt], replicas: Sequence[int], partition: str, fastest_s: float | None
) -> schedule.Plan:
    """Every sample once in a seeded order, then again in another order while the load needs more.

    fastest_s is the shortest warm-up answer; it bounds how many requests a closed loop of least_s may need.
    """
    due = _due(load, prompts, fastest_s)
    if load.scenario == "trace":
        samples = np.argsort([prompt.due_s or 0.0 for prompt in prompts], kind="stable").astype(np.int64)
    else:
        samples = schedule.permuted(len(prompts), len(due), load.seed)
    if partition == "dynamic" and len(replicas) > 1:
        targeted = np.full(len(due), schedule.ANY_REPLICA, dtype=np.int64)
    else:
        targeted = np.asarray(replicas, dtype=np.int64)[schedule.spread(len(due), len(replicas))]
    return schedule.Plan(due_ns=due, samples=samples, replicas=targeted)


def _due(load: Load, prompts: Sequence[Prompt], fastest_s: float | None) -> schedule.Times:
    if load.scenario == "trace":
        return schedule.trace(np.array([prompt.due_s or 0.0 for prompt in prompts]))
    if load.scenario in BOUNDED:
        count = most_in(load, fastest_s)
        return schedule.at_once(count) if load.scenario == "offline" else schedule.closed_loop(count)
    assert load.rate_per_s is not None
    mean = load.rate_per_s * load.least_s
    # Six standard deviations of a Poisson count: in practice no schedule ends before least_s.
    drawn = max(load.requests, math.ceil(mean + 6 * math.sqrt(mean)) + 1)
    if load.scenario == "constant":
        due = schedule.constant(load.rate_per_s, drawn)
    else:
        due = schedule.poisson(load.rate_per_s, drawn, load.seed)
    lasting = int(np.searchsorted(due, round(load.least_s * NS))) + 1
    return due[: max(load.requests, lasting)]


def most_in(load: Load, fastest_s: float | None) -> int:
    """More requests than a bounded load can finish within least_s. Requests that are never sent do not count."""
    if load.least_s == 0:
        return load.requests
    possible = HASTE * load.least_s * (load.concurrency or 1) / max(fastest_s or 0.0, 1e-3)
    return max(load.requests, min(math.ceil(possible), MOST_PLANNED))
