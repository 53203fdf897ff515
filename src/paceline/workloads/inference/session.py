"""The one client of a run: it asks all replicas, load after load, and writes down what it saw.

One process group of one host sends and stamps everything, so all times are of one clock, every request of a plan is
given out once by construction, and what a dead replica leaves unanswered is given to another by the client itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from paceline.contract import Recorder
from paceline.errors import InvalidRunError
from paceline.experiment.serving import PERCENTILE, Serving
from paceline.host.machine import usable_cores
from paceline.results.served_samples import AnswerSample, ReplicaSample, StageSample
from paceline.serving import early_stopping
from paceline.serving.client import arrivals, audit, plan, team
from paceline.serving.client.arrivals import NS
from paceline.serving.client.orders import Handled, Limits, Orders, Shift, longest_body
from paceline.serving.client.reading import is_late
from paceline.serving.client.tally import Tally
from paceline.serving.prompts import Prompt
from paceline.workloads.inference.loads import BOUNDED, Load, Outcome, is_lost, plan_of
from paceline.workloads.inference.requests import Bodies, Replica, client_sample, request_sample, target_of

# Connections made beforehand for an open loop, whose requests in flight nobody knows.
OPEN_CONNECTIONS = 64
# Beyond so many late ones n(t) takes the client's host longer to compute than it is worth.
MOST_COUNTED = 1000
Gone = Callable[[], Sequence[int]]


class Session:
    """`answers`, then `put_on` for each load, then `farewell`. shards: processes of the client (0: one a core). gone:
    replicas whose own rank says that they answer no more."""

    def __init__(
        self,
        asked: Serving,
        prompts: Sequence[Prompt],
        replicas: Sequence[Replica],
        recorder: Recorder,
        *,
        engine: str,
        shards: int = 1,
        gone: Gone = tuple,
    ) -> None:
        self.asked, self.prompts, self.replicas, self.recorder = asked, prompts, replicas, recorder
        self.engine, self._shards, self._gone = engine, shards, gone
        endpoints = [replica.endpoint for replica in replicas]
        self._targets = [target_of(endpoint, asked.api) for endpoint in endpoints]
        self._bodies = Bodies(prompts, endpoints, asked.api)
        self._limits = limits_of(asked)
        # Of the last load: requests a second.
        self.pace_per_s = 0.0
        self._origin_ns: int | None = None
        self._fastest_s: float | None = None
        self._stage = self._number = 0
        self._died_ns: dict[int, int] = {}
        self._reassigned: dict[int, int] = {}

    @property
    def alive(self) -> list[int]:
        return [replica for replica in range(len(self.replicas)) if replica not in self._died_ns]

    # --- before the clock runs ---

    def answers(self) -> None:
        """The same few questions to every replica: kernels are chosen, caches made, and what they say is kept."""
        count = min(self.asked.warmup_requests, len(self.prompts))
        if count == 0:
            return
        self.recorder.progress(0, "warmup")
        moved = Pulse(lambda tally: self.recorder.progress(tally.ended, "warmup"), self.asked.request_timeout_s)
        shifts = team.run([self._questions(replica, count) for replica in range(len(self.replicas))], watch=moved)
        answers = [handled for shift in shifts for handled in shift.handled]
        for handled in sorted(answers, key=lambda handled: handled.number):
            replica, sample = divmod(handled.number, count)
            self.recorder.add(
                AnswerSample(
                    rank=0,
                    replica=replica,
                    sample=sample,
                    tokens=handled.tokens_told,
                    text=handled.text or "",
                    error=handled.error,
                )
            )
        times = [h.ended_ns - h.due_ns for h in answers if h.error is None and h.ended_ns is not None]
        self._fastest_s = min(times) / NS if times else None

    def _questions(self, replica: int, count: int) -> Orders:
        return Orders(
            numbers=[replica * count + sample for sample in range(count)],
            due_ns=arrivals.closed_loop(count),
            replicas=[replica] * count,
            payloads=[self._bodies.of(sample) for sample in range(count)],
            targets=self._targets,
            concurrency=1,
            timeout_s=self.asked.request_timeout_s,
            keeps_text=True,
        )

    # --- a load ---

    def put_on(self, load: Load) -> Outcome:
        """One load to its end, written down; InvalidRunError where no replica is left to put it on."""
        replicas = self.alive if load.replica is None else [r for r in self.alive if r == load.replica]
        if not replicas:
            raise InvalidRunError(f"no replica is left for load {self._stage + 1}: {self._obituary()}")
        whole = plan_of(load, self.prompts, range(len(replicas)), self.asked.partition, self._fastest_s)
        last: list[Tally] = []
        shifts = team.run(self._shares(load, whole, replicas), watch=self._watch(load, whole, last))
        # Of a load that may end before its plan does, those never given out are no requests: processes count what they
        # give out on their own, so that one whose end is missing shows.
        ends_early = load.is_trial or (load.least_s > 0 and load.scenario in BOUNDED)
        outcome = self._write_down(load, whole, replicas, shifts, planned=last[0].sent if ends_early else len(whole))
        self.pace_per_s = outcome.requests_per_s
        return outcome

    def _watch(self, load: Load, whole: plan.Plan, last: list[Tally]) -> Callable[[Tally], bool]:
        """Tells whoever looks where the load is; True where a trial need not go on. What it saw last is left."""

        def note(tally: Tally) -> None:
            self.recorder.progress(
                self._number + tally.ended, f"timing: {standing(load, self._stage, self.asked, tally)}"
            )

        pulse = Pulse(note, self.asked.request_timeout_s, lambda sent: rest_s(whole.due_ns, sent))

        def look(tally: Tally) -> bool:
            pulse(tally)
            last[:] = [tally]
            return load.is_trial and is_lost(len(whole), tally.ended, tally.late + tally.failed)

        return look

    def _shares(self, load: Load, whole: plan.Plan, replicas: Sequence[int]) -> list[Orders]:
        """What each process of the client shall do: request k of the schedule is that of process k mod processes."""
        most = min(self._shards or usable_cores() or 1, len(whole), load.concurrency or len(whole))
        return [
            self._orders(load, whole, part, replicas, in_flight)
            for part, in_flight in zip(whole.shares(most), _split(load.concurrency or 0, most), strict=True)
        ]

    def _orders(
        self, load: Load, whole: plan.Plan, part: arrivals.Times, replicas: Sequence[int], in_flight: int
    ) -> Orders:
        bounded = load.scenario in BOUNDED
        return plan.orders_of(
            whole,
            part,
            lambda sample: self._sent(sample, replicas),
            [self._targets[replica] for replica in replicas],
            concurrency=in_flight,
            cap=in_flight or None,
            timeout_s=self.asked.request_timeout_s,
            keeps_text=self.asked.keeps_text,
            connections=min(in_flight or OPEN_CONNECTIONS, len(part)),
            # Each replica has its share in flight: a slow one holds up its own samples only.
            per_replica=-(-in_flight // _asked(whole.replicas[part], len(replicas))) if bounded else None,
            reassigns=load.replica is None,
            least_ns=round(load.least_s * NS) if bounded else 0,
            least_requests=int(np.count_nonzero(part < load.requests)) if bounded and load.least_s else 0,
            limits=self._limits,
            longest_body=longest_body(max(prompt.max_tokens for prompt in self.prompts)),
        )

    def _sent(self, sample: int, replicas: Sequence[int]) -> bytes | tuple[bytes, ...]:
        found = self._bodies.of(sample)
        return found if isinstance(found, bytes) else tuple(found[replica] for replica in replicas)

    def _write_down(
        self, load: Load, whole: plan.Plan, replicas: Sequence[int], shifts: Sequence[Shift], *, planned: int
    ) -> Outcome:
        start_ns = shifts[0].start_ns
        origin_ns = self._origin_ns = start_ns if self._origin_ns is None else self._origin_ns
        handled = sorted((h for shift in shifts for h in shift.handled), key=lambda h: h.number)
        for each in handled:
            sample = int(whole.samples[each.number])
            place = {"rank": 0, "stage": self._stage, "number": self._number + each.number, "sample": sample}
            prompt = self.prompts[sample]
            reference = prompt.reference if self.asked.keeps_text else None
            # One that no replica was left for keeps the number that stands for any.
            replica = each.replica if each.replica == plan.ANY_REPLICA else replicas[each.replica]
            self.recorder.add(request_sample(each, origin_ns, prompt, replica=replica, reference=reference, **place))
        for shard, shift in enumerate(shifts):
            self.recorder.add(client_sample(shift, rank=0, shard=shard, plan=whole.digest, stage=self._stage))
            self._bury(shift, replicas, origin_ns)
        ended_ns = max((h.ended_ns for h in handled if h.ended_ns is not None), default=start_ns)
        capped = any(shift.waited_for_cap for shift in shifts)
        self.recorder.add(self._stage_sample(load, planned, start_ns, ended_ns, capped))
        self._stage += 1
        self._number += len(whole)
        late = sum(each.error is not None or is_late(each, self._limits) for each in handled)
        wall_s = (ended_ns - start_ns) / NS
        doubt = next(iter(audit.judge(shifts).reasons), None)
        paced = paced_of(handled) if load.is_trial else 1.0
        return Outcome(requests=len(handled), late=late, wall_s=wall_s, doubt=doubt, paced=paced)

    def _stage_sample(self, load: Load, planned: int, start_ns: int, ended_ns: int, capped: bool) -> StageSample:
        assert self._origin_ns is not None
        return StageSample(
            rank=0,
            stage=self._stage,
            scenario=load.scenario,
            rate_per_s=load.rate_per_s,
            concurrency=load.concurrency,
            replica=load.replica,
            planned=planned,
            started_ns=start_ns - self._origin_ns,
            ended_ns=ended_ns - self._origin_ns,
            began_at_s=time.time() - (time.monotonic_ns() - start_ns) / NS,
            capped=capped,
        )

    # --- replicas ---

    def _bury(self, shift: Shift, replicas: Sequence[int], origin_ns: int) -> None:
        """What a process of the client found gone, in the numbers of the run; the first that found it counts."""
        for place, died_ns in shift.died_ns.items():
            known = self._died_ns.get(replicas[place])
            moment = died_ns - origin_ns
            self._died_ns[replicas[place]] = moment if known is None else min(known, moment)
        for place, count in shift.reassigned.items():
            self._reassigned[replicas[place]] = self._reassigned.get(replicas[place], 0) + count

    def _obituary(self) -> str:
        told = {
            r: f"replica {r} ({self.replicas[r].endpoint.url}) was gone after {t / NS:.1f} s"
            for r, t in self._died_ns.items()
        }
        return "; ".join(told[replica] for replica in sorted(told))

    def farewell(self) -> None:
        """Every replica, with when it was found gone: by the client, or by its own rank where nobody asked it then."""
        now_ns = time.monotonic_ns() - (self._origin_ns or time.monotonic_ns())
        for gone in self._gone():
            self._died_ns.setdefault(gone, now_ns)
        for number, replica in enumerate(self.replicas):
            self.recorder.add(self._replica_sample(number, replica))

    def _replica_sample(self, number: int, replica: Replica) -> ReplicaSample:
        facts: Mapping[str, object] = replica.endpoint.facts
        known = {
            name: facts[name]
            for name in ("version", "devices", "tensor_parallel", "ready_s", "settings")
            if name in facts
        }
        return ReplicaSample(
            rank=replica.rank,
            replica=number,
            host=str(facts.get("host", replica.host)),
            engine=self.engine,
            model=replica.endpoint.model,
            died_ns=self._died_ns.get(number),
            reassigned=self._reassigned.get(number, 0),
            **known,  # type: ignore[arg-type]
        )


class Pulse:
    """Hands on a tally while something moves, while a request in flight may still have its answer, and while the
    schedule itself rests: a load waits rightly for an answer until its time-out, and for the next request until it is
    due. What goes on longer than that without a change is not told, so a hang shows. rest_s: how long a schedule rests
    after so many were sent."""

    def __init__(
        self, tell: Callable[[Tally], None], patience_s: float, rest_s: Callable[[int], float] = lambda sent: 0.0
    ) -> None:
        self._tell, self._patience_s, self._rest_s = tell, patience_s, rest_s
        self._last: Tally | None = None
        self._moved_s = 0.0

    def __call__(self, tally: Tally) -> None:
        now_s, may_wait_s = time.monotonic(), self._rightly_s(tally)
        if tally != self._last:
            self._last, self._moved_s = tally, now_s
        elif not may_wait_s or now_s - self._moved_s > may_wait_s:
            return
        self._tell(tally)

    def _rightly_s(self, tally: Tally) -> float:
        """How long nothing need change. Of a rest only its length is used: it began no later than the last change."""
        return self._patience_s if tally.sent > tally.ended else self._rest_s(tally.sent)


def rest_s(due_ns: arrivals.Times, sent: int) -> float:
    """From when the last of so many requests was due to the next; a closed loop has no such times, and an end no
    next."""
    if sent >= len(due_ns) or due_ns[sent] == arrivals.WHEN_FREE:
        return 0.0
    return float(due_ns[sent] - (due_ns[sent - 1] if sent else 0)) / NS


def standing(load: Load, stage: int, asked: Serving, tally: Tally) -> str:
    """`load 3 (8.5 a second): 412 of 662 needed, 1 late`: counted down by n(t) where there are limits."""
    if any(limit is not None for limit in asked.limits.values()):
        done = f"{_counted_down(load, tally)}, {tally.late:,} late"
    else:
        done = _of_plan(load, tally)
    failed = f", {tally.failed:,} failed" if tally.failed else ""
    return f"{_which(load, stage, asked)}{done}{failed}"


def _counted_down(load: Load, tally: Tally) -> str:
    """By n(t) while the plan holds so many and they are not asked yet; else by the plan."""
    bad = tally.late + tally.failed
    needed = early_stopping.requests_needed(bad, PERCENTILE) if bad <= MOST_COUNTED else math.inf
    if tally.ended <= needed <= tally.planned:
        return f"{tally.ended:,} of {needed:,} needed"
    return _of_plan(load, tally)


def _of_plan(load: Load, tally: Tally) -> str:
    """The plan of a load that ends by time alone holds more than will ever be asked."""
    if load.least_s and load.scenario in BOUNDED:
        return f"{tally.ended:,} requests"
    return f"{tally.ended:,} of {tally.planned:,} requests"


def _which(load: Load, stage: int, asked: Serving) -> str:
    """Nothing where there is one load alone."""
    if load.replica is not None:
        return f"load {stage + 1} (replica {load.replica}): "
    if asked.scenario == load.scenario:
        return ""
    size = f"{load.rate_per_s:.3g} a second" if load.rate_per_s is not None else f"{load.concurrency} in flight"
    return f"load {stage + 1} ({size}): "


def paced_of(handled: Sequence[Handled]) -> float:
    """The share of requests that was sent by when the last one was due, which itself cannot be sent before."""
    last_ns = max((each.due_ns for each in handled), default=0)
    others = [each for each in handled if each.due_ns < last_ns]
    sent = sum(each.sent_ns is not None and each.sent_ns <= last_ns for each in others)
    return sent / len(others) if others else 0.0


def limits_of(asked: Serving) -> Limits:
    def ns(name: str) -> int | None:
        limit = asked.limits[name]
        return None if limit is None else round(limit * NS)

    return Limits(ttft_ns=ns("ttft_s"), tpot_ns=ns("tpot_s"), latency_ns=ns("latency_s"))


def _asked(placed: arrivals.Times, replicas: int) -> int:
    """How many replicas a part of a plan goes to: where processes and replicas have a common factor, not all."""
    return replicas if plan.ANY_REPLICA in placed else len(np.unique(placed))


def _split(whole: int, parts: int) -> list[int]:
    """As even as can be: 7 over 3 is 3, 2, 2."""
    return [whole // parts + (part < whole % parts) for part in range(parts)]
