"""Which loads a run puts on its replicas, one after the other, as the answers to those before decide.

Each kind of run is a generator: it yields a load and is sent what became of it. Nothing here asks anybody anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.errors import require
from paceline.experiment.serving import PERCENTILE, Serving
from paceline.serving import early_stopping
from paceline.serving.client import arrivals, plan
from paceline.serving.client.arrivals import NS
from paceline.serving.early_stopping import Told
from paceline.serving.prompts import Prompt

# In flight at most when everything is asked at once: more connections make no server faster.
OFFLINE_CAP = 512
CLOSED = ("single_stream", "concurrency")
# Scenarios whose load is as large as the replicas take it, so that a replica can be compared with another.
BOUNDED = ("offline", *CLOSED)
MOST_SWEPT = 64
MOST_RATES = 8
# A rate that the replicas do not keep up with is the last one of a sweep that chooses its own.
KEPT_UP = 0.9
# Fewer tell nothing about the 99th percentile; a search asks so many at each rate, samples used again where needed.
LEAST_SEARCHED = early_stopping.requests_needed(0, PERCENTILE)
# How close the highest rate that passes and the lowest that fails must come.
SEARCH_RATIO = 1.05
# A trial lasts so many times the longest wait that is in time. At 5 % above what the replicas can do the line grows by
# 1 s in 20 s: after 20 times the limit it is as long as the limit, and the last fifth of 25 times is late.
TRIAL_WAITS = 1.25 / (SEARCH_RATIO - 1)
# Of a trial's requests, those sent by when the last one is due: fewer were asked at another rate than the trial's.
PACED = 0.95
MOST_HALVINGS = 10
# Where requests are too few to tell, twice as many are asked at the same rate, so often at most.
MOST_DOUBLINGS = 3
# In flight at each replica while a search guesses where to begin, and how often.
GUESS_IN_FLIGHT = 8
GUESS_ROUNDS = 4
# More requests than these no load is planned with: an entry of a plan costs some tens of bytes.
MOST_PLANNED = 1_000_000
# How much faster than the fastest answer seen beforehand a closed loop may turn out.
HASTE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One load. scenario is a plain one; requests are asked at least, and for at least least_s; concurrency is the most
    in flight over all replicas that are asked (None: no bound); replica is the only one asked, None for all. A trial
    ends as soon as its limits are surely not kept."""

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
    """What became of a load: requests that were asked, those of them too late or failed, and the time it took. doubt
    is what the client says against itself: requests that it made late say nothing about replicas. paced is the share
    that was sent by when the last one was due; 1 where nothing was due by a schedule."""

    requests: int
    late: int
    wall_s: float
    doubt: str | None = None
    paced: float = 1.0

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def told(self) -> Told:
        """What it says about the limits at the 99th percentile, by early stopping: the same as the report says."""
        return early_stopping.told_by(self.requests, self.late, PERCENTILE)

    @property
    def objection(self) -> str | None:
        """Why it says nothing about the rate it was meant to be of. Of a trial that ended early the last few requests
        are not sent yet, so that its pace is judged by the client's lag alone."""
        if self.doubt is None and self.told is Told.PASSED and self.paced < PACED:
            return f"only {self.paced:.0%} of the requests were sent by when the last one was due"
        return self.doubt


def is_lost(planned: int, ended: int, late: int) -> bool:
    """Whether a trial need not go on: more are late than its plan allows, and than chance would make of kept limits."""
    allowed = early_stopping.late_allowed(planned, PERCENTILE)
    return allowed is not None and late > allowed and early_stopping.too_many_late(ended, late, PERCENTILE)


# What is returned is why a search came to its end; nothing where the loads were known beforehand.
Loads = Generator[Load, Outcome, str | None]


def loads_of(
    asked: Serving, samples: int, replicas: int, seed: int, left_s: Callable[[], float], *, answer_tokens: int
) -> Loads:
    """The loads of a run over so many samples and replicas. left_s tells how long the run may still take;
    answer_tokens are those of the longest answer."""
    if asked.scenario == "sweep":
        return sweep(asked, samples, seed)
    if asked.scenario == "search":
        return search(asked, samples, replicas, seed, left_s, trial_s(asked, answer_tokens))
    whole = plain(asked, samples, seed)
    return paired(whole, replicas) if asked.partition == "paired" else once(whole)


def plain(asked: Serving, samples: int, seed: int) -> Load:
    in_flight = {"single_stream": 1, "offline": asked.concurrency or OFFLINE_CAP}.get(asked.scenario, asked.concurrency)
    rate = None if asked.scenario in (*BOUNDED, "trace") else asked.rate_per_s
    return Load(
        scenario=asked.scenario,
        requests=samples,
        seed=seed,
        rate_per_s=rate,
        concurrency=in_flight,
        least_s=asked.least_s,
    )


def once(load: Load) -> Loads:
    yield load
    return None


def paired(load: Load, replicas: int) -> Loads:
    """A B .. B A, the same requests in the same order each time: what drifts over the run meets all replicas alike.
    Each has as many in flight as it would have beside the others, so that it can be told what those add."""
    share = None if load.concurrency is None else -(-load.concurrency // replicas)
    for replica in (*range(replicas), *reversed(range(replicas))):
        yield replace(load, replica=replica, concurrency=share)
    return None


def sweep(asked: Serving, samples: int, seed: int) -> Loads:
    by_rate = asked.rate_per_s is not None
    for stage, size in enumerate(swept(asked)):
        load = Load(scenario="", requests=samples, seed=seed_of(seed, stage), least_s=asked.least_s)
        if not by_rate:
            yield replace(load, scenario="concurrency", concurrency=int(size))
            continue
        outcome = yield replace(load, scenario="server", rate_per_s=size)
        if asked.loads is None and outcome.requests_per_s < KEPT_UP * size:
            break
    return None


def swept(asked: Serving) -> list[float]:
    """Those given; else 1, 2, 4 ... in flight up to `concurrency`, or rates doubled from `rate_per_s` on."""
    if asked.loads is not None:
        return _given(asked.loads, whole=asked.rate_per_s is None)
    if asked.rate_per_s is not None:
        return [asked.rate_per_s * 2**power for power in range(MOST_RATES)]
    most = asked.concurrency or MOST_SWEPT
    sizes = [float(1 << power) for power in range(most.bit_length())]
    return sizes if sizes[-1] == most else [*sizes, float(most)]


def _given(text: str, *, whole: bool) -> list[float]:
    accepted = "whole numbers of requests in flight, such as 1+2+4" if whole else "rates, such as 0.5+1+2"
    try:
        sizes = [float(word) for word in text.split("+")]
    except ValueError:
        sizes = [math.nan]
    fits = all(0 < size < math.inf and (not whole or size == int(size)) for size in sizes)
    require(fits, "loads", text, accepted)
    return sizes


def trial_s(asked: Serving, answer_tokens: int) -> float:
    """How long a trial lasts at least, so that replicas which are 5 % too slow cannot pass it as a burst: in a line
    each request waits longer for its first token, on replicas that begin all at once each answer takes longer. What
    may grow before a limit breaks is the limit on the first token, on the whole, or on all further tokens together."""
    ttft_s, tpot_s, latency_s = (asked.limits[name] or 0.0 for name in ("ttft_s", "tpot_s", "latency_s"))
    return max(asked.least_s, TRIAL_WAITS * max(ttft_s, latency_s, tpot_s * (answer_tokens - 1)))


def search(
    asked: Serving, samples: int, replicas: int, seed: int, left_s: Callable[[], float], least_s: float
) -> Loads:
    """The highest rate within the limits: doubled until it fails, or halved until it passes, then bisected. A
    rate whose requests are too few to tell is asked more. It ends early where the client cannot ask, as nothing is
    learned of a load whose client is doubted, and where the next load would not end within the time of the run."""
    requests = max(samples, LEAST_SEARCHED)
    rate, stage = asked.rate_per_s, 0
    if rate is None:
        in_flight = asked.concurrency or GUESS_IN_FLIGHT * replicas
        guess = Load(scenario="concurrency", requests=GUESS_ROUNDS * in_flight, seed=seed, concurrency=in_flight)
        # In a closed loop the replicas are never idle: within limits they can do less.
        rate, stage = float(f"{max((yield guess).requests_per_s / 2, 1e-3):.4g}"), 1
    bracket, count = Bracket(begin=rate), requests
    while (rate := bracket.next_rate()) is not None:
        lasting_s = max(count / rate, least_s)
        if lasting_s * rate > MOST_PLANNED:
            return bracket.end_before(rate, f"a load would be of more than {MOST_PLANNED:,} requests")
        if lasting_s >= left_s():
            return f"a load at {rate:.4g} a second lasts {lasting_s:.0f} s, longer than is left of timeout_s"
        load = Load(scenario="server", requests=count, seed=seed_of(seed, stage), rate_per_s=rate, is_trial=True)
        outcome = yield replace(load, least_s=least_s)
        if outcome.objection is not None:
            return bracket.end_before(rate, outcome.objection)
        stage += 1
        if outcome.told is Told.TOO_FEW and count < requests << MOST_DOUBLINGS:
            count *= 2
        else:
            bracket.learn(rate, outcome.told)
            count = requests
    return bracket.end()


@dataclass(slots=True, kw_only=True)
class Bracket:
    """The highest rate that passed, and the lowest above which there is nothing to look for: one that failed, or one
    of which even many requests did not tell. The search goes on below both; the report calls only the first failed."""

    begin: float
    passed: float | None = None
    above: float | None = None
    is_unclear: bool = False

    def next_rate(self) -> float | None:
        """None at the end: both are close enough, or nothing passes at all."""
        if self.passed is None and self.above is None:
            return self.begin
        if self.above is None:
            assert self.passed is not None
            return 2 * self.passed
        if self.passed is None:
            return self.above / 2 if self.above > self.begin / 2**MOST_HALVINGS else None
        if self.above <= SEARCH_RATIO * self.passed:
            return None
        # Four digits are finer than what the search tells apart, and can be read and asked again.
        return float(f"{math.sqrt(self.passed * self.above):.4g}")

    def learn(self, rate: float, told: Told) -> None:
        if told is Told.PASSED:
            self.passed = max(rate, self.passed or 0.0)
        elif rate < (self.above or math.inf):
            self.above, self.is_unclear = rate, told is Told.TOO_FEW

    def end_before(self, rate: float, why: str) -> str:
        """Where the client cannot ask at this rate: what is known is a lower bound, or a wider bracket."""
        if self.passed is None:
            return f"no rate passed: this client cannot ask at {rate:.4g}/s: {why}"
        if self.above is not None:
            within = f"between {self.passed:.4g} and {self.above:.4g}/s"
            return f"{within}: this client cannot ask at {rate:.4g}/s: {why}"
        return f"at least {self.passed:.4g}/s: above it this client cannot ask; at {rate:.4g}/s: {why}"

    def end(self) -> str:
        if self.passed is None:
            return "no rate passed"
        if self.is_unclear:
            return f"at {self.above:.4g} a second even {2**MOST_DOUBLINGS} times the requests were too few to tell"
        return "the rate is known closely enough"


# --- when which sample is asked ---


def seed_of(seed: int, stage: int) -> int:
    """Each load has its own order and gaps, all from one seed; the first one those of the seed itself."""
    return int(np.random.SeedSequence([seed, stage]).generate_state(1)[0]) if stage else seed


def plan_of(
    load: Load, prompts: Sequence[Prompt], replicas: Sequence[int], partition: str, fastest_s: float | None
) -> plan.Plan:
    """Every sample once, in one recorded order, then again in another one as long as the load needs more. fastest_s
    is the shortest answer seen before: how many a closed loop of least_s may take."""
    due = _due(load, prompts, fastest_s)
    if load.scenario == "trace":
        samples = np.argsort([prompt.due_s or 0.0 for prompt in prompts], kind="stable").astype(np.int64)
    else:
        samples = plan.permuted(len(prompts), len(due), load.seed)
    return plan.Plan(due_ns=due, samples=samples, replicas=_placed(len(due), replicas, partition))


def _placed(count: int, replicas: Sequence[int], partition: str) -> arrivals.Times:
    if partition == "dynamic" and len(replicas) > 1:
        return np.full(count, plan.ANY_REPLICA, dtype=np.int64)
    return np.asarray(replicas, dtype=np.int64)[plan.spread(count, len(replicas))]


def _due(load: Load, prompts: Sequence[Prompt], fastest_s: float | None) -> arrivals.Times:
    if load.scenario == "trace":
        return arrivals.trace(np.array([prompt.due_s or 0.0 for prompt in prompts]))
    if load.scenario in BOUNDED:
        count = most_in(load, fastest_s)
        return arrivals.at_once(count) if load.scenario == "offline" else arrivals.closed_loop(count)
    assert load.rate_per_s is not None
    mean = load.rate_per_s * load.least_s
    # Six standard deviations of a Poisson count: a schedule that ends before least_s is not drawn in practice.
    drawn = max(load.requests, math.ceil(mean + 6 * math.sqrt(mean)) + 1)
    if load.scenario == "constant":
        due = arrivals.constant(load.rate_per_s, drawn)
    else:
        due = arrivals.poisson(load.rate_per_s, drawn, load.seed)
    lasting = int(np.searchsorted(due, round(load.least_s * NS))) + 1
    return due[: max(load.requests, lasting)]


def most_in(load: Load, fastest_s: float | None) -> int:
    """More requests than a bounded load can end within least_s: those never given out are no requests."""
    if load.least_s == 0:
        return load.requests
    possible = HASTE * load.least_s * (load.concurrency or 1) / max(fastest_s or 0.0, 1e-3)
    return max(load.requests, min(math.ceil(possible), MOST_PLANNED))
