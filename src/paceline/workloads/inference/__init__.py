"""Load-tests a model server, or several: offline, at an arrival rate, or at a fixed concurrency."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.contract import Endpoint, Recorder, Seat, devices_per_rank, nodes_per_replica
from paceline.errors import RequestError, UnsupportedError, require
from paceline.experiment.choices import Choice
from paceline.experiment.plugins import Traits, load, parse_options
from paceline.experiment.serving import PERCENTILE, UNKNOWN_SHAPE, Serving
from paceline.experiment.spec import RunSpec
from paceline.launchers.node import placement
from paceline.models import arithmetic
from paceline.results.records import Evidence
from paceline.serving import client_ceiling, early_stopping, prompts
from paceline.serving.prompts import Lengths, Prompt
from paceline.wording import format_duration
from paceline.workloads.inference import loadgen, loads, ranks
from paceline.workloads.inference.session import CHAT, Replica, Replicas, Session

TRAITS = Traits(serves=True)
# The share of a run's time that the last load of a search must leave.
SPARE_RATIO = 0.1
ALONE = "a paired run compares replicas, but there is only one"


@dataclass(frozen=True)
class Options:
    """shards: client processes (0: one for each core that the replicas leave)."""

    shards: int = 1

    def __post_init__(self) -> None:
        require(self.shards >= 0, "inference.shards", self.shards, "a whole number from 0")


def check(spec: RunSpec) -> str | None:
    assert spec.engine is not None
    assert spec.serving is not None
    parse_options(Options, spec.workload)
    arithmetic.vocabulary(spec.model)
    whole = "/" not in spec.model.name or not spec.model.options
    require(whole, "model", spec.model_text, "all layers of a directory, because servers load it whole")
    precision = spec.training.precision
    require(precision.compute == precision.base, "precision", precision.compute, "fp32, bf16 or fp16 for inference")
    serving = spec.serving
    bounded = serving.scenario in loads.BOUNDED
    fits = serving.partition != "paired" or bounded
    require(fits, "scenario", serving.scenario, f"{', '.join(loads.BOUNDED)} with partition paired")
    require(serving.scenario != "trace" or not serving.least_s, "least_s", serving.least_s, "0 with scenario trace")
    if serving.scenario == "sweep":
        loads.swept(serving)
    else:
        require(serving.loads is None, "loads", serving.loads, "nothing unless the scenario is sweep")
    prompts.check(spec.training.data, serving.scenario)
    loadgen.check(spec)
    longest = _longest_request(spec)
    if serving.partition == "paired" and replicas_of(spec) < 2:
        return ALONE
    lasting = lasting_s(serving)
    if lasting is not None and lasting >= spec.timeout_s:
        return f"the load lasts at least {lasting:g} s, longer than timeout_s ({spec.timeout_s:g} s)"
    reason = load("engines", spec.engine.name).check(spec)
    if reason:
        return str(reason)
    _require_room(spec, longest)
    return None


def _require_room(spec: RunSpec, longest: Lengths | None) -> None:
    """RequestError if the engine would refuse the longest request."""
    assert spec.engine is not None
    limited = getattr(load("engines", spec.engine.name), "longest_request", None)
    limit = limited(spec) if limited is not None else None
    if limit is None or longest is None:
        return
    (prompt, answer), (most, option) = longest, limit
    if (total := prompt + answer) > most:
        shape = arithmetic.known_shape(spec.model)
        longer = f", or set {option} to {total}" if shape is None or total <= shape.context else ""
        raise RequestError(
            f"data: got a prompt of {prompt} tokens with an answer of {answer}, expected at most {most} together "
            f"({option}). Use shorter prompts{longer}"
        )


def _longest_request(spec: RunSpec) -> Lengths | None:
    """The longest prompt of token ids with its answer, if it is known before the run. RequestError for a data file that
    no run could use. If it is not on this host and the launcher uses other hosts, they check it."""
    data, serving = spec.training.data, spec.serving
    assert serving is not None
    if data.name == "synthetic":
        counted = serving.api != CHAT and data.options.get("form", "ids") == "ids"
        return prompts.longest_synthetic(data, count=serving.requests, seed=spec.seed) if counted else None
    option = data.options.get("path")
    if option is None:
        return None
    path = Path(str(option)).expanduser()
    if not path.exists():
        if getattr(load("launchers", spec.launcher.name), "HERE", False):
            raise RequestError(f"data: {str(path)!r} does not exist. Expected {data.name}:path=FILE")
        return None
    status = path.stat()
    arguments = (serving.requests, spec.seed, arithmetic.vocabulary(spec.model), serving.max_tokens, serving.api)
    return _read_once(str(data), *arguments, (status.st_size, status.st_mtime_ns))


@functools.lru_cache(maxsize=256)
def _read_once(
    data: str, count: int | None, seed: int, vocab: int, max_tokens: int, api: str, _stamp: tuple[int, int]
) -> Lengths | None:
    """A campaign checks every cell and repeat several times; the file is only read again if it changed."""
    return prompts.longest_of(_open_prompts(Choice.parse(data), count, seed, vocab, max_tokens, api))


def replicas_of(spec: RunSpec) -> int:
    """As many as the engine's urls if it takes any; otherwise one for each rank, or for the nodes that share one."""
    assert spec.engine is not None
    urls = spec.engine.options.get("urls")
    return len(urls) if isinstance(urls, list | tuple) else spec.topology.world_size // nodes_per_replica(spec)


def run(spec: RunSpec, seat: Seat, recorder: Recorder) -> None:
    """Every rank opens its engine; rank 0 sends the load to all replicas, the others keep theirs up until it ends."""
    assert spec.engine is not None
    recorder.progress(0, "setup")
    environment = surroundings(spec, seat)
    with load("engines", spec.engine.name).open(spec, seat) as endpoints:
        host = placement.node_name(os.environ)
        own = [Replica(rank=seat.rank, host=host, endpoint=endpoint) for endpoint in endpoints]
        if seat.world_size == 1:
            send_loads(spec, seat, recorder, own, environment=environment)
            return
        group = ranks.Ranks.joined(seat, spec.timeout_s)
        group.publish(own)
        if seat.rank == 0:
            with group.load_in_progress():
                replicas = group.all_replicas()
                send_loads(spec, seat, recorder, replicas, environment, dead=group.dead, quiet=group.quiet)
        else:
            died = group.keep_up(own, ranks.accepts)
            recorder.conclude(evidence(endpoints, environment, died=len(died)))


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What could slow an engine down: other processes on its GPUs before it started (on the busiest GPU), and debug
    environment variables, which it inherits."""

    neighbours: int | None = None
    switches: Mapping[str, str] = field(default_factory=dict)


def surroundings(spec: RunSpec, seat: Seat) -> Surroundings:
    """Call this before the engine is opened. Nothing is known about endpoints that already run."""
    from paceline.host.machine import debug_switches, neighbours

    assert spec.engine is not None
    if not getattr(load("engines", spec.engine.name), "STARTS", False):
        return Surroundings()
    switches = debug_switches(os.environ)
    # Ranks that share a GPU are each other's neighbours; sharing is reported by itself.
    if seat.device != "cuda" or placement.shares_gpu(os.environ):
        return Surroundings(None, switches)
    devices = devices_per_rank(spec)
    first = seat.local_rank * devices
    counts = [count for gpu in range(first, first + devices) if (count := neighbours(gpu)) is not None]
    return Surroundings(max(counts, default=None), switches)


def send_loads(
    spec: RunSpec,
    seat: Seat,
    recorder: Recorder,
    replicas: Sequence[Replica],
    environment: Surroundings,
    dead: Replicas = tuple,
    quiet: Replicas = tuple,
) -> None:
    """Run all loads on all replicas, in this process and those it forks."""
    assert spec.serving is not None
    assert spec.engine is not None
    if spec.serving.partition == "paired" and len(replicas) < 2:
        raise UnsupportedError(ALONE)
    loadgen.require_installed(spec)
    samples = prompts_of(spec)
    # Not known before if the file is on this node alone.
    _require_room(spec, prompts.longest_of(samples))
    shards = parse_options(Options, spec.workload).shards
    engine = spec.engine.name
    session = Session(spec.serving, samples, replicas, recorder, engine=engine, shards=shards, dead=dead, quiet=quiet)
    for ceiling in client_ceiling.known(rank=seat.rank):
        recorder.add(ceiling)
    session.warm_up()
    until_s = seat.taken_at_s + (1 - SPARE_RATIO) * spec.timeout_s
    try:
        longest, counts = max(prompt.max_tokens for prompt in samples), (len(samples), len(replicas))
        sequence = loads.loads_of(
            spec.serving, *counts, spec.seed, lambda: until_s - time.monotonic(), answer_tokens=longest
        )
        ended_by = run_all(session, sequence)
        if loadgen.is_requested(spec):
            alive = [replicas[number].endpoint for number in session.answering]
            loadgen.run_test(spec, recorder, samples, alive, session.pace_per_s)
    finally:
        session.finish()
    endpoints = [replica.endpoint for replica in replicas]
    settings = {"prompts": prompts.form_of(samples), **({"search_ended_by": ended_by} if ended_by else {})}
    settings |= {} if arithmetic.known_shape(spec.model) else {"shape": UNKNOWN_SHAPE}
    recorder.conclude(evidence(endpoints, environment, samples=len(samples), served=endpoints[0].model, **settings))


def run_all(session: Session, sequence: loads.Loads) -> str | None:
    """Run one load after the other; returns why a search ended."""
    try:
        load = next(sequence)
        while True:
            load = sequence.send(session.run_load(load))
    except StopIteration as end:
        return end.value if isinstance(end.value, str) else None


def prompts_of(spec: RunSpec) -> list[Prompt]:
    assert spec.serving is not None
    serving, vocab = spec.serving, arithmetic.vocabulary(spec.model)
    return _open_prompts(spec.training.data, serving.requests, spec.seed, vocab, serving.max_tokens, serving.api)


def _open_prompts(data: Choice, count: int | None, seed: int, vocab: int, max_tokens: int, api: str) -> list[Prompt]:
    """The prompts; RequestError if the API does not take their form."""
    samples = prompts.open_prompts(data, count=count, seed=seed, vocab=vocab, max_tokens=max_tokens, api=api)
    if api == CHAT:
        require(not any(p.token_ids for p in samples), "api", CHAT, "completions for prompts of token ids")
    else:
        require(not any(p.messages for p in samples), "api", api, "chat for prompts of messages")
    return samples


def evidence(endpoints: Sequence[Endpoint], environment: Surroundings, **settings: str | int) -> Evidence:
    shared = {"shared_gpu": True} if placement.shares_gpu(os.environ) else {}
    return Evidence(
        init_digest="",
        parameters=0,
        dtypes={},
        optimizer={},
        settings={"replicas": len(endpoints), **settings, **shared},
        switches=environment.switches,
        neighbours=environment.neighbours,
        window_wall_s=None,
    )


# --- before the run ---


def lasting_s(serving: Serving) -> float | None:
    """How long the loads last by their own schedule; None if the replicas alone decide."""
    rate, requests = serving.rate_per_s, serving.requests or 0
    # LoadGen runs after this client, for as long.
    twice = 2 if serving.loadgen != "own" else 1
    if serving.scenario in loads.BOUNDED or rate is None or serving.scenario == "trace":
        return twice * serving.least_s or None
    if serving.scenario == "search":
        # The length of answers is unknown before the prompts exist: at least one token.
        return max(max(requests, loads.LEAST_SEARCHED) / rate, loads.trial_s(serving, answer_tokens=1))
    rates = loads.swept(serving) if serving.scenario == "sweep" and serving.loads is not None else [rate]
    return twice * sum(max(requests / each, serving.least_s) for each in rates) or None


def outline(spec: RunSpec) -> str:
    """The line that `paceline plan` prints: requests, replicas, duration, and whether the requests are too few."""
    assert spec.engine is not None
    assert spec.serving is not None
    serving = spec.serving
    replicas = replicas_of(spec)
    count = f"{serving.requests:,} requests" if serving.requests else "all samples of the data"
    rate = f" at {serving.rate_per_s:g} requests/s" if serving.rate_per_s is not None else ""
    cap = f", at most {serving.concurrency} in flight" if serving.concurrency is not None else ""
    lasting = lasting_s(serving)
    each = " for the first load" if serving.scenario == "search" else ""
    time_s = "as long as the replicas need" if lasting is None else f"at least about {format_duration(lasting)}{each}"
    shape = "" if arithmetic.known_shape(spec.model) else f"; the architecture of {spec.model_text} is {UNKNOWN_SHAPE}"
    where = f"{replicas} replica{'s' if replicas > 1 else ''}{', then LoadGen' if loadgen.is_requested(spec) else ''}"
    what = f"{spec.engine.name}, {serving.scenario}{rate}{cap}"
    # A search sends enough requests itself, and a duration decides how many there are.
    least = early_stopping.requests_needed(0, PERCENTILE)
    limited = any(limit is not None for limit in serving.limits.values()) and serving.scenario != "search"
    is_few = limited and not serving.least_s and serving.requests is not None and serving.requests < least
    few = f"; too few requests to check the limits: at least {least} are needed" if is_few else ""
    return f"{what}: {count}, {where}, {serving.partition} partition, {time_s}{few}{shape}"
