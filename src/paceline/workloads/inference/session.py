"""The one client of a run: it sends every load to all replicas and records what it observes.

One group of processes on one host sends and times everything. All times are therefore of one clock, every request of
a plan is sent exactly once, and requests of a dead replica go to another one.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from paceline.contract import Endpoint, Recorder
from paceline.errors import InvalidRunError
from paceline.experiment.serving import PERCENTILE, Serving
from paceline.host.machine import usable_cores
from paceline.results.served_samples import (
    AnswerSample,
    CeilingSample,
    ClientSample,
    ReplicaSample,
    RequestSample,
    StageSample,
)
from paceline.serving import early_stopping
from paceline.serving.client import audit, schedule, worker_pool
from paceline.serving.client.schedule import NS, Assignment, Limits, RequestResult, ShardResult, Target, longest_body
from paceline.serving.client.shard import Progress
from paceline.serving.client.silence import ReplicaBoard, ReplicaGuard, probe
from paceline.serving.headroom import Headroom, ceiling_for, headroom
from paceline.serving.prompts import Prompt
from paceline.wording import format_duration
from paceline.workloads.inference.loads import BOUNDED, Load, Outcome, is_lost, plan_of

CHAT = "chat"
# Connections opened beforehand for an open loop, whose number of requests in flight is unknown.
OPEN_CONNECTIONS = 64
# A server that names another model in every answer has no more than these recorded.
MOST_NAMES = 5
# With more late requests, computing n(t) takes longer than it is worth.
MOST_COUNTED = 1000
# The share of a load that must have ended before its rate tells how long the rest takes.
FEWEST_FOR_RATE = 0.1
Replicas = Callable[[], Collection[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One endpoint, the rank that opened it and the host of that rank."""

    rank: int
    host: str
    endpoint: Endpoint

    @property
    def node(self) -> str:
        """The host that serves it: of the rank, unless the endpoint already runs elsewhere."""
        return str(self.endpoint.facts.get("host", self.host))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Replica:
        """The inverse of `dataclasses.asdict`."""
        return cls(rank=raw["rank"], host=raw["host"], endpoint=Endpoint(**raw["endpoint"]))


# --- requests as bytes ---


def head(endpoint: Endpoint, api: str) -> bytes:
    """The part of a request that only this replica gets: its path, its host and its API key."""
    parts = urlsplit(endpoint.url)
    path = parts.path.rstrip("/") + ("/v1/chat/completions" if api == CHAT else "/v1/completions")
    lines = [f"POST {path} HTTP/1.1", f"Host: {parts.netloc}", "Content-Type: application/json"]
    lines += [f"Authorization: Bearer {endpoint.secret}"] if endpoint.secret else []
    return "\r\n".join([*lines, "Accept: text/event-stream", ""]).encode()


def body(prompt: Prompt, endpoint: Endpoint, api: str) -> bytes:
    """Content length and JSON of a request: greedy, with exactly the requested tokens if the server supports that."""
    fields: dict[str, Any] = {"model": endpoint.model, "max_tokens": prompt.max_tokens, "temperature": 0.0}
    fields |= {"stream": True, "stream_options": {"include_usage": True}, **endpoint.facts.get("body", {})}
    if api == CHAT:
        fields["messages"] = list(prompt.messages or ({"role": "user", "content": prompt.text or ""},))
    else:
        fields["prompt"] = list(prompt.token_ids) if prompt.token_ids is not None else prompt.text
    text = json.dumps(fields).encode()
    return f"Content-Length: {len(text)}\r\n\r\n".encode() + text


def target_of(endpoint: Endpoint, api: str) -> Target:
    parts = urlsplit(endpoint.url)
    secure = parts.scheme == "https"
    assert parts.hostname is not None
    port = parts.port or (443 if secure else 80)
    return Target(
        host=parts.hostname, port=port, tls=secure, certificates=endpoint.certificates, head=head(endpoint, api)
    )


class Session:
    """`warm_up`, then `run_load` for each load, then `finish`. shards: client processes (0: one per core). dead:
    returns the replicas whose own rank reports that they no longer answer; quiet: also those whose rank reports
    nothing."""

    def __init__(
        self,
        serving: Serving,
        prompts: Sequence[Prompt],
        replicas: Sequence[Replica],
        recorder: Recorder,
        *,
        engine: str,
        shards: int = 1,
        dead: Replicas = tuple,
        quiet: Replicas = tuple,
    ) -> None:
        self.serving, self.prompts, self.replicas, self.recorder = serving, prompts, replicas, recorder
        self.engine, self._shards, self._dead = engine, shards, dead
        self._endpoints = [replica.endpoint for replica in replicas]
        self._targets = [target_of(endpoint, serving.api) for endpoint in self._endpoints]
        self._bodies: dict[int, bytes | tuple[bytes, ...]] = {}
        ns = {name: None if limit is None else round(limit * NS) for name, limit in serving.limits.items()}
        self._limits = Limits(ttft_ns=ns["ttft_s"], tpot_ns=ns["tpot_s"], latency_ns=ns["latency_s"])
        # Requests per second of the last load.
        self.pace_per_s = 0.0
        self._origin_ns: int | None = None
        self._fastest_s: float | None = None
        # Events per second of the fastest warm-up answer.
        self._stream_events_per_s: float | None = None
        self._stage = self._number = 0
        self._died_ns: dict[int, int] = {}
        self._reassigned: dict[int, int] = {}
        self._answered_as: dict[int, list[str]] = {}
        self._ceilings: dict[int, CeilingSample | None] = {}
        self._guard = ReplicaGuard(self._probe, quiet, self._note_silence)

    @property
    def alive(self) -> list[int]:
        return [replica for replica in range(len(self.replicas)) if replica not in self._died_ns]

    @property
    def answering(self) -> list[int]:
        """The replicas that are alive and not silent."""
        return [replica for replica in self.alive if replica not in self._guard.silent]

    def _body(self, sample: int) -> bytes | tuple[bytes, ...]:
        """The body of a sample, built once: one for all replicas, or one for each if they differ."""
        known = self._bodies.get(sample)
        if known is None:
            each = tuple(body(self.prompts[sample], endpoint, self.serving.api) for endpoint in self._endpoints)
            known = self._bodies[sample] = each[0] if len(set(each)) == 1 else each
        return known

    # --- before the clock runs ---

    def warm_up(self) -> None:
        """Send the same few prompts to every replica and record the answers: this fills caches and selects kernels."""
        count = min(self.serving.warmup_requests, len(self.prompts))
        if count == 0:
            return
        self.recorder.progress(0, "warmup")
        heartbeat = Heartbeat(
            lambda progress: self.recorder.progress(progress.ended, "warmup"), self.serving.request_timeout_s
        )
        assignments = [
            Assignment(
                numbers=[replica * count + sample for sample in range(count)],
                due_ns=schedule.closed_loop(count),
                replicas=[replica] * count,
                payloads=[self._body(sample) for sample in range(count)],
                targets=self._targets,
                concurrency=1,
                timeout_s=self.serving.request_timeout_s,
                keeps_text=True,
            )
            for replica in range(len(self.replicas))
        ]
        results = [result for shard in worker_pool.run(assignments, watch=heartbeat) for result in shard.results]
        for result in sorted(results, key=lambda result: result.number):
            replica, sample = divmod(result.number, count)
            answered: dict[str, Any] = {
                "tokens": result.reported_tokens,
                "text": result.text or "",
                "error": result.error,
            }
            self.recorder.add(AnswerSample(rank=0, replica=replica, sample=sample, **answered))
            self._note_model(replica, result)
        times = [r.ended_ns - r.due_ns for r in results if r.error is None and r.ended_ns is not None]
        self._fastest_s = min(times) / NS if times else None
        spans = [(r.pieces, r.ended_ns - r.sent_ns) for r in results if r.error is None and r.ended_ns and r.sent_ns]
        self._stream_events_per_s = max((pieces / (ns / NS) for pieces, ns in spans if ns > 0), default=None)

    # --- a load ---

    def run_load(self, load: Load) -> Outcome:
        """Run one load to its end and record it; InvalidRunError if no replica is left."""
        replicas = self.alive if load.replica is None else [r for r in self.alive if r == load.replica]
        if not replicas:
            deaths = [
                f"replica {r} on {self.replicas[r].node} ({self.replicas[r].endpoint.url}) died after "
                f"{self._died_ns[r] / NS:.1f} s"
                for r in sorted(self._died_ns)
            ]
            raise InvalidRunError(f"no replica is left for load {self._stage + 1}: {'; '.join(deaths)}")
        whole = plan_of(load, self.prompts, range(len(replicas)), self.serving.partition, self._fastest_s)
        last: list[Progress] = []
        began_s = time.monotonic()

        def report(progress: Progress) -> None:
            elapsed_s = time.monotonic() - began_s
            text = f"timing: {progress_text(load, self._stage, self.serving, progress, elapsed_s)}"
            self.recorder.progress(self._number + progress.ended, text)

        heartbeat = Heartbeat(report, self.serving.request_timeout_s, lambda sent: idle_s(whole.due_ns, sent))

        def watch(progress: Progress) -> bool:
            """Report progress; True if a trial need not continue."""
            heartbeat(progress)
            last[:] = [progress]
            return load.is_trial and is_lost(len(whole), progress.ended, progress.late + progress.failed)

        assignments = self._assignments(load, whole, replicas)
        room = self._headroom(load, whole, len(assignments))
        self.recorder.progress(self._number, f"timing: {room.text}")
        shards = worker_pool.run(assignments, watch=watch, guard=_LoadGuard(self._guard, replicas))
        # If a load may end before its plan does, requests that were never sent do not count. Processes count what they
        # send themselves, so that a missing result is noticed.
        ends_early = load.is_trial or (load.least_s > 0 and load.scenario in BOUNDED)
        planned = last[0].sent if ends_early else len(whole)
        outcome = self._record(load, whole, replicas, shards, planned=planned, room=room)
        self.pace_per_s = outcome.requests_per_s
        return outcome

    def _headroom(self, load: Load, whole: schedule.Plan, processes: int) -> Headroom:
        """How far the load is from the limit of this client. A schedule needs its rate times the tokens of an answer; a
        closed loop as much as its streams could bring if each were as fast as the fastest warm-up answer."""
        tokens = float(np.mean([self.prompts[sample].max_tokens for sample in whole.samples.tolist()]))
        in_flight = None if load.concurrency is None else min(load.concurrency, len(whole))
        rate = None
        if load.scenario not in BOUNDED:
            span_s = float(whole.due_ns[-1] - whole.due_ns[0]) / NS
            rate = load.rate_per_s or (len(whole) / span_s if span_s > 0 else None)
        if rate is not None:
            needed: float | None = rate * tokens
        elif self._stream_events_per_s is None:
            needed = None
        else:
            needed = self._stream_events_per_s * (in_flight or len(whole))
        if processes not in self._ceilings:
            ceiling, is_new = ceiling_for(processes)
            self._ceilings[processes] = ceiling
            if ceiling is not None and is_new:
                self.recorder.add(ceiling)
        cores = usable_cores() or 1
        answer = tokens if rate is not None else None
        return headroom(
            needed, in_flight, self._ceilings[processes], processes=processes, cores=cores, answer_tokens=answer
        )

    def _assignments(self, load: Load, whole: schedule.Plan, replicas: Sequence[int]) -> list[Assignment]:
        """One assignment for each client process: request k of the schedule goes to process k mod processes."""
        processes = min(self._shards or usable_cores() or 1, len(whole), load.concurrency or len(whole))
        in_flight, bounded = load.concurrency or 0, load.scenario in BOUNDED

        def payload(sample: int) -> bytes | tuple[bytes, ...]:
            known = self._body(sample)
            return known if isinstance(known, bytes) else tuple(known[replica] for replica in replicas)

        def assignment(part: schedule.Times, in_flight: int) -> Assignment:
            # If processes and replicas have a common factor, a part does not reach all replicas.
            targeted = whole.replicas[part]
            reached = len(replicas) if schedule.ANY_REPLICA in targeted else len(np.unique(targeted))
            return schedule.assignment_of(
                whole,
                part,
                payload,
                [self._targets[replica] for replica in replicas],
                concurrency=in_flight,
                cap=in_flight or None,
                timeout_s=self.serving.request_timeout_s,
                keeps_text=self.serving.keeps_text,
                connections=min(in_flight or OPEN_CONNECTIONS, len(part)),
                # Each replica has its share in flight: a slow one delays only its own samples.
                per_replica=-(-in_flight // reached) if bounded else None,
                reassigns=load.replica is None,
                least_ns=round(load.least_s * NS) if bounded else 0,
                least_requests=int(np.count_nonzero(part < load.requests)) if bounded and load.least_s else 0,
                limits=self._limits,
                longest_body=longest_body(max(prompt.max_tokens for prompt in self.prompts)),
            )

        # As even as possible: 7 in flight over 3 processes are 3, 2, 2.
        return [
            assignment(part, in_flight // processes + (number < in_flight % processes))
            for number, part in enumerate(whole.shares(processes))
        ]

    def _record(
        self,
        load: Load,
        whole: schedule.Plan,
        replicas: Sequence[int],
        shards: Sequence[ShardResult],
        *,
        planned: int,
        room: Headroom,
    ) -> Outcome:
        start_ns = shards[0].start_ns
        origin_ns = self._origin_ns = start_ns if self._origin_ns is None else self._origin_ns
        results = sorted((result for shard in shards for result in shard.results), key=lambda result: result.number)
        for result in results:
            sample = int(whole.samples[result.number])
            prompt = self.prompts[sample]
            request = request_sample(
                result,
                origin_ns,
                prompt,
                rank=0,
                stage=self._stage,
                number=self._number + result.number,
                sample=sample,
                # If no replica was left for it, the number means any.
                replica=result.replica if result.replica == schedule.ANY_REPLICA else replicas[result.replica],
                reference=prompt.reference if self.serving.keeps_text else None,
            )
            self.recorder.add(request)
            self._note_model(request.replica, result)
        for number, shard in enumerate(shards):
            self.recorder.add(client_sample(shard, rank=0, shard=number, plan=whole.digest, stage=self._stage))
            # The first process that found a replica dead decides when it died.
            for index, died_ns in shard.died_ns.items():
                replica, moment = replicas[index], died_ns - origin_ns
                self._died_ns[replica] = min(self._died_ns.get(replica, moment), moment)
            for index, count in shard.reassigned.items():
                self._reassigned[replicas[index]] = self._reassigned.get(replicas[index], 0) + count
        ended_ns = max((result.ended_ns for result in results if result.ended_ns is not None), default=start_ns)
        stage = StageSample(
            rank=0,
            stage=self._stage,
            scenario=load.scenario,
            rate_per_s=load.rate_per_s,
            concurrency=load.concurrency,
            replica=load.replica,
            planned=planned,
            started_ns=start_ns - origin_ns,
            ended_ns=ended_ns - origin_ns,
            began_at_s=time.time() - (time.monotonic_ns() - start_ns) / NS,
            capped=any(shard.waited_for_cap for shard in shards),
            headroom=room.text,
            headroom_grade=room.grade,
        )
        self.recorder.add(stage)
        self._stage += 1
        self._number += len(whole)
        return Outcome(
            requests=len(results),
            late=sum(result.error is not None or result.is_late(self._limits) for result in results),
            wall_s=(ended_ns - start_ns) / NS,
            doubt=next(iter(audit.judge(shards).reasons), None),
            paced=paced_of(results) if load.is_trial else 1.0,
        )

    def _probe(self, number: int) -> bool:
        """Whether a replica streams one token, of the shortest prompt."""
        prompt = replace(min(self.prompts, key=lambda p: len(p.token_ids or p.text or "")), max_tokens=1)
        target = self._targets[number]
        return probe(target, target.head + body(prompt, self._endpoints[number], self.serving.api))

    def _note_silence(self, number: int, is_silent: bool, reason: str) -> None:
        where = f"replica {number} on {self.replicas[number].node}"
        if is_silent:
            text = f"{where} stopped answering ({reason}); other replicas take its requests"
        else:
            text = f"{where} answers again ({reason}) and gets requests"
        sys.stderr.write(f"paceline: {text}\n")

    def _note_model(self, replica: int, result: RequestResult) -> None:
        """Remember the names by which a replica calls its model in answers."""
        names = self._answered_as.setdefault(replica, [])
        if result.model is not None and result.model not in names and len(names) < MOST_NAMES:
            names.append(result.model)

    def finish(self) -> None:
        """Record every replica and when it died: as the client found it, or as its own rank did if it was idle."""
        now_ns = time.monotonic_ns() - (self._origin_ns or time.monotonic_ns())
        for dead in self._dead():
            self._died_ns.setdefault(dead, now_ns)
        for number, replica in enumerate(self.replicas):
            facts: Mapping[str, Any] = replica.endpoint.facts
            known = ("version", "devices", "tensor_parallel", "ready_s", "settings")
            sample = ReplicaSample(
                rank=replica.rank,
                replica=number,
                host=replica.node,
                engine=self.engine,
                model=replica.endpoint.model,
                died_ns=self._died_ns.get(number),
                reassigned=self._reassigned.get(number, 0),
                silent_ns=tuple(moment - (self._origin_ns or 0) for moment in self._guard.silences.get(number, ())),
                answered_as=tuple(self._answered_as.get(number, ())),
                **{name: facts[name] for name in known if name in facts},
            )
            self.recorder.add(sample)


@dataclass(frozen=True, slots=True)
class _LoadGuard:
    """The guard of a run during one load. replicas: those of the load, in the order of the board."""

    guard: ReplicaGuard
    replicas: Sequence[int]

    def begin(self, board: ReplicaBoard) -> None:
        self.guard.begin(board, self.replicas)

    def watch(self, board: ReplicaBoard) -> None:
        self.guard.watch(board, self.replicas)

    def close(self) -> None:
        self.guard.close()


# --- results as samples ---


def request_sample(result: RequestResult, origin_ns: int, prompt: Prompt, **position: Any) -> RequestSample:
    """The sample of one result, with times from the common start of the run. position: rank, stage, number, sample,
    replica and reference."""

    def since(moment: int | None) -> int | None:
        return None if moment is None else moment - origin_ns

    gaps = np.diff(np.asarray(result.token_ns, dtype=np.int64)).tolist() if len(result.token_ns) else []
    return RequestSample(
        due_ns=result.due_ns - origin_ns,
        sent_ns=since(result.sent_ns),
        first_byte_ns=since(result.first_byte_ns),
        first_ns=since(result.first_ns),
        last_ns=since(result.last_ns),
        ended_ns=since(result.ended_ns),
        pieces=result.pieces,
        tokens=result.reported_tokens,
        prompt_tokens=result.prompt_tokens,
        asked_tokens=prompt.max_tokens,
        sent_ids=None if prompt.token_ids is None else len(prompt.token_ids),
        coalesced=result.coalesced,
        stamped=result.stamped,
        error=result.error,
        detail=result.detail,
        first_reasoning_ns=since(result.first_reasoning_ns),
        finish=result.finish,
        attempt=result.attempt,
        token_ns=tuple(gaps),
        text=result.text,
        **position,
    )


def client_sample(result: ShardResult, **position: Any) -> ClientSample:
    """The delays of one client process. position: rank, shard, stage and the digest of the plan."""

    def p50_p99(values: Sequence[int]) -> tuple[float | None, float | None]:
        if not len(values):
            return None, None
        low, high = np.percentile(np.asarray(values, dtype=np.int64), (50, 99)).tolist()
        return low, high

    schedule_lag, read_lag = p50_p99(result.schedule_lag_ns), p50_p99(result.read_lag_ns)
    return ClientSample(
        requests=len(result.results),
        reads=result.reads,
        schedule_lag_p50_ns=schedule_lag[0],
        schedule_lag_p99_ns=schedule_lag[1],
        read_lag_p50_ns=read_lag[0],
        read_lag_p99_ns=read_lag[1],
        cpu_s=result.cpu_s,
        wall_s=result.wall_s,
        most_in_flight=result.most_in_flight,
        waited_for_cap=result.waited_for_cap,
        clock_doubt_ns=result.clock_doubt_ns,
        clock_drift_ns=result.clock_drift_ns,
        **position,
    )


def paced_of(results: Sequence[RequestResult]) -> float:
    """The share of requests sent before the last one was due (not counting the last one itself)."""
    last_ns = max((result.due_ns for result in results), default=0)
    others = [result for result in results if result.due_ns < last_ns]
    sent = sum(result.sent_ns is not None and result.sent_ns <= last_ns for result in others)
    return sent / len(others) if others else 0.0


# --- progress ---


class Heartbeat:
    """Reports progress while the load is alive, and stays silent if it hangs.

    Alive means: a count changed, an answer may still arrive before its timeout, or the next request is not due yet.
    idle_s: how long the schedule pauses after so many sent requests.
    """

    def __init__(
        self, report: Callable[[Progress], None], timeout_s: float, idle_s: Callable[[int], float] = lambda sent: 0.0
    ) -> None:
        self._report, self._timeout_s, self._idle_s = report, timeout_s, idle_s
        self._last: Progress | None = None
        self._changed_s = 0.0

    def __call__(self, progress: Progress) -> None:
        now_s = time.monotonic()
        # Only the length of a pause is used: it began no later than the last change.
        may_wait_s = self._timeout_s if progress.sent > progress.ended else self._idle_s(progress.sent)
        if progress != self._last:
            self._last, self._changed_s = progress, now_s
        elif not may_wait_s or now_s - self._changed_s > may_wait_s:
            return
        self._report(progress)


def idle_s(due_ns: schedule.Times, sent: int) -> float:
    """The time between the due times of the last sent request and the next; 0 in a closed loop and at the end."""
    if sent >= len(due_ns) or due_ns[sent] == schedule.WHEN_FREE:
        return 0.0
    return float(due_ns[sent] - (due_ns[sent - 1] if sent else 0)) / NS


def progress_text(load: Load, stage: int, serving: Serving, progress: Progress, elapsed_s: float | None = None) -> str:
    """`load 3 (8.5 requests/s): 412 of 662 needed, 1 late, about 29 s left`. With limits it counts to n(t), the
    requests needed. The time left is that of this load: what is missing, at the rate of the elapsed time."""
    if load.replica is not None:
        which = f"load {stage + 1} (replica {load.replica}): "
    elif serving.scenario == load.scenario:
        which = ""
    else:
        size = f"{load.rate_per_s:.3g} requests/s" if load.rate_per_s is not None else f"{load.concurrency} in flight"
        which = f"load {stage + 1} ({size}): "
    # The plan of a load that ends by time has more requests than will ever be sent.
    has_plan = not (load.least_s and load.scenario in BOUNDED)
    done = f"{progress.ended:,} of {progress.planned:,} requests" if has_plan else f"{progress.ended:,} requests"
    target: float = progress.planned if has_plan else 0
    if any(limit is not None for limit in serving.limits.values()):
        bad = progress.late + progress.failed
        needed = early_stopping.requests_needed(bad, PERCENTILE) if bad <= MOST_COUNTED else math.inf
        if progress.ended <= needed <= progress.planned:
            done = f"{progress.ended:,} of {needed:,} needed"
            target = needed
        done = f"{done}, {progress.late:,} late"
    failed = f", {progress.failed:,} failed" if progress.failed else ""
    left = ""
    if elapsed_s is not None and target * FEWEST_FOR_RATE <= progress.ended < target and progress.ended:
        left = f", about {format_duration((target - progress.ended) * elapsed_s / progress.ended)} left"
    return f"{which}{done}{failed}{left}"
