"""A served model asked by the schedule: offline, by arrival rate or by concurrency, over one replica or several."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from paceline import prompts
from paceline.loadgen import arrivals, plan, team
from paceline.loadgen.orders import Handled, Orders, Shift, Target
from paceline.models import load as load_shape
from paceline.plugins import Endpoint, Recorder, Seat, load, options
from paceline.prompts import Prompt
from paceline.records import Evidence
from paceline.serving import ClientSample, RequestSample
from paceline.spec import RunSpec, require
from paceline.workloads import _inference_loadgen

# In flight at most when everything is asked at once: more connections make no server faster.
OFFLINE_CAP = 512
CLOSED = ("single_stream", "concurrency")


@dataclass(frozen=True)
class Options:
    """shards: processes of the client (0: one for each core that the replicas leave)."""

    shards: int = 1

    def __post_init__(self) -> None:
        require(self.shards >= 0, "inference.shards", self.shards, "a whole number from 0")


def check(spec: RunSpec) -> str | None:
    assert spec.engine is not None
    assert spec.serving is not None
    options(Options, spec.workload)
    load_shape(spec.model)
    prompts.check(spec.training.data, spec.serving.scenario)
    _inference_loadgen.check(spec)
    reason = load("engines", spec.engine.name).check(spec)
    return str(reason) if reason else None


def run(spec: RunSpec, seat: Seat, recorder: Recorder) -> None:
    assert spec.engine is not None
    assert spec.serving is not None
    recorder.progress(0, "setup")
    with load("engines", spec.engine.name).open(spec, seat) as endpoints:
        asked = prompts_of(spec)
        whole = plan_of(spec, asked, len(endpoints) * seat.world_size)
        warm_up(spec, asked, endpoints)
        recorder.progress(0, "timing")
        shifts = team.run(shares_of(spec, seat, asked, whole, endpoints))
        if _inference_loadgen.is_asked(spec) and seat.rank == 0:
            ask_by_loadgen(spec, recorder, asked, endpoints, shifts)
    for shard, shift in enumerate(shifts):
        for handled in shift.handled:
            recorder.add(request_sample(handled, seat.rank, int(whole.samples[handled.number]), asked, shift))
        recorder.add(client_sample(shift, seat.rank, shard, whole.digest))
    recorder.conclude(evidence(spec, asked, endpoints))


def ask_by_loadgen(
    spec: RunSpec, recorder: Recorder, asked: Sequence[Prompt], endpoints: Sequence[Endpoint], shifts: Sequence[Shift]
) -> None:
    """The same prompts to the same replicas, by the schedule of LoadGen."""
    payloads = [[payload(spec, prompt, endpoint) for endpoint in endpoints] for prompt in asked]
    pace = sum(len(shift.handled) for shift in shifts) / max(shift.wall_s for shift in shifts)
    _inference_loadgen.ask(spec, recorder, payloads, [target_of(endpoint) for endpoint in endpoints], pace)


# --- the load ---


def prompts_of(spec: RunSpec) -> list[Prompt]:
    assert spec.serving is not None
    vocab = load_shape(spec.model).vocab
    asked = spec.serving
    return prompts.open_prompts(
        spec.training.data,
        count=asked.requests,
        seed=spec.seed,
        vocab=vocab,
        max_tokens=asked.max_tokens,
        api=asked.api,
    )


def plan_of(spec: RunSpec, asked: Sequence[Prompt], replicas: int) -> plan.Plan:
    """Every sample once, in one recorded order, at the times of the scenario."""
    assert spec.serving is not None
    scenario, rate, count = spec.serving.scenario, spec.serving.rate_per_s, len(asked)
    if scenario == "trace":
        order = np.argsort([prompt.due_s or 0.0 for prompt in asked], kind="stable")
        times = arrivals.trace(np.array([asked[i].due_s or 0.0 for i in order]))
        return plan.Plan(due_ns=times, samples=order.astype(np.int64), replicas=plan.spread(count, replicas))
    if scenario in CLOSED:
        due = arrivals.closed_loop(count)
    elif scenario == "offline":
        due = arrivals.at_once(count)
    elif scenario == "constant":
        due = arrivals.constant(rate or 1.0, count)
    else:
        due = arrivals.poisson(rate or 1.0, count, spec.seed)
    return plan.Plan(due_ns=due, samples=plan.permuted(count, count, spec.seed), replicas=plan.spread(count, replicas))


def shares_of(
    spec: RunSpec, seat: Seat, asked: Sequence[Prompt], whole: plan.Plan, endpoints: Sequence[Endpoint]
) -> list[Orders]:
    """What each process of this rank's client shall do: the requests of the replicas that are here."""
    assert spec.serving is not None
    first = seat.rank * len(endpoints)
    here = np.flatnonzero((whole.replicas >= first) & (whole.replicas < first + len(endpoints)))
    shards = max(1, min(options(Options, spec.workload).shards or _cores(), len(here)))
    targets = [target_of(endpoint) for endpoint in endpoints]
    in_flight = concurrency_of(spec, seat.world_size)
    found = []
    for part in (here[shard::shards] for shard in range(shards)):
        share = -(-in_flight // shards) if in_flight else 0
        replicas = whole.replicas[part] - first
        payloads = [
            payload(spec, asked[int(sample)], endpoints[int(replica)])
            for sample, replica in zip(whole.samples[part], replicas, strict=True)
        ]
        found.append(
            Orders(
                numbers=part.tolist(),
                due_ns=whole.due_ns[part],
                replicas=replicas.tolist(),
                payloads=payloads,
                targets=targets,
                concurrency=share,
                cap=share or None,
                timeout_s=spec.serving.request_timeout_s,
                keeps_text=spec.serving.keeps_text,
                connections=min(share or 64, len(part)),
            )
        )
    return found


def concurrency_of(spec: RunSpec, ranks: int) -> int:
    """Requests in flight of one rank; 0 for an open loop, which nothing holds back."""
    assert spec.serving is not None
    whole = {"single_stream": 1, "offline": spec.serving.concurrency or OFFLINE_CAP}
    told = whole.get(spec.serving.scenario, spec.serving.concurrency or 0)
    return -(-told // ranks)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def target_of(endpoint: Endpoint) -> Target:
    parts = urlsplit(endpoint.url)
    secure = parts.scheme == "https"
    assert parts.hostname is not None
    port = parts.port or (443 if secure else 80)
    return Target(host=parts.hostname, port=port, tls=secure, certificates=endpoint.certificates)


def payload(spec: RunSpec, prompt: Prompt, endpoint: Endpoint) -> bytes:
    """A whole HTTP request. Greedy, and exactly as many tokens as asked for where the server can be told so."""
    assert spec.serving is not None
    chat = spec.serving.api == "chat"
    body: dict[str, Any] = {"model": endpoint.model, "max_tokens": prompt.max_tokens, "temperature": 0.0}
    body |= {"stream": True, "stream_options": {"include_usage": True}, **endpoint.facts.get("body", {})}
    if chat:
        said = prompt.messages or ({"role": "user", "content": prompt.text or ""},)
        body["messages"] = list(said)
    else:
        body["prompt"] = list(prompt.token_ids) if prompt.token_ids is not None else prompt.text
    text = json.dumps(body).encode()
    path = urlsplit(endpoint.url).path.rstrip("/") + ("/v1/chat/completions" if chat else "/v1/completions")
    lines = [f"POST {path} HTTP/1.1", f"Host: {urlsplit(endpoint.url).netloc}", "Content-Type: application/json"]
    lines += [f"Authorization: Bearer {endpoint.secret}"] if endpoint.secret else []
    lines += ["Accept: text/event-stream", f"Content-Length: {len(text)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + text


def warm_up(spec: RunSpec, asked: Sequence[Prompt], endpoints: Sequence[Endpoint]) -> None:
    """A few requests to every replica before the clock runs: kernels are chosen, caches made."""
    assert spec.serving is not None
    count = min(spec.serving.warmup_requests, len(asked))
    if count == 0:
        return
    targets = [target_of(endpoint) for endpoint in endpoints]
    pairs = [(replica, asked[n]) for replica in range(len(endpoints)) for n in range(count)]
    team.run(
        [
            Orders(
                numbers=list(range(len(pairs))),
                due_ns=arrivals.closed_loop(len(pairs)),
                replicas=[replica for replica, _ in pairs],
                payloads=[payload(spec, prompt, endpoints[replica]) for replica, prompt in pairs],
                targets=targets,
                concurrency=len(endpoints),
                timeout_s=spec.serving.request_timeout_s,
            )
        ]
    )


# --- what was seen ---


def request_sample(handled: Handled, rank: int, sample: int, asked: Sequence[Prompt], shift: Shift) -> RequestSample:
    start = shift.start_ns

    def since(moment: int | None) -> int | None:
        return None if moment is None else moment - start

    gaps = np.diff(np.asarray(handled.token_ns, dtype=np.int64)).tolist() if handled.token_ns else []
    return RequestSample(
        rank=rank,
        number=handled.number,
        sample=sample,
        replica=handled.replica,
        due_ns=handled.due_ns - start,
        sent_ns=since(handled.sent_ns),
        first_byte_ns=since(handled.first_byte_ns),
        first_ns=since(handled.first_ns),
        last_ns=since(handled.last_ns),
        ended_ns=since(handled.ended_ns),
        pieces=handled.pieces,
        tokens=handled.tokens_told,
        prompt_tokens=handled.prompt_tokens,
        asked_tokens=asked[sample].max_tokens,
        coalesced=handled.coalesced,
        stamped=handled.stamped,
        error=handled.error,
        detail=handled.detail,
        first_reasoning_ns=since(handled.first_reasoning_ns),
        finish=handled.finish,
        token_ns=tuple(gaps),
        text=handled.text,
    )


def client_sample(shift: Shift, rank: int, shard: int, digest: str) -> ClientSample:
    schedule, reads = (_percentiles(values) for values in (shift.schedule_lag_ns, shift.read_lag_ns))
    return ClientSample(
        rank=rank,
        shard=shard,
        requests=len(shift.handled),
        reads=shift.reads,
        schedule_lag_p50_ns=schedule[0],
        schedule_lag_p99_ns=schedule[1],
        read_lag_p50_ns=reads[0],
        read_lag_p99_ns=reads[1],
        cpu_s=shift.cpu_s,
        wall_s=shift.wall_s,
        most_in_flight=shift.most_in_flight,
        waited_for_cap=shift.waited_for_cap,
        clock_doubt_ns=shift.clock_doubt_ns,
        clock_drift_ns=shift.clock_drift_ns,
        plan=digest,
    )


def _percentiles(values: Sequence[int]) -> tuple[float | None, float | None]:
    if not values:
        return None, None
    low, high = np.percentile(np.asarray(values, dtype=np.int64), (50, 99)).tolist()
    return low, high


def evidence(spec: RunSpec, asked: Sequence[Prompt], endpoints: Sequence[Endpoint]) -> Evidence:
    return Evidence(
        init_digest="",
        parameters=0,
        dtypes={},
        optimizer={},
        settings={"samples": len(asked), "replicas": len(endpoints), "served": endpoints[0].model},
        switches={},
        neighbours=None,
        window_wall_s=None,
    )
