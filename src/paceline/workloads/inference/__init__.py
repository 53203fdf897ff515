"""A served model asked by the schedule: offline, by arrival rate or by concurrency, over one replica or several."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.contract import Endpoint, Recorder, Seat
from paceline.errors import RequestError, UnsupportedError, require
from paceline.experiment.choices import Choice
from paceline.experiment.plugins import Traits, load, parse_options
from paceline.experiment.serving import PERCENTILE, UNKNOWN_SHAPE, Serving
from paceline.experiment.spec import RunSpec
from paceline.launchers.node import placement
from paceline.models import arithmetic
from paceline.results.records import Evidence
from paceline.serving import client_ceiling, early_stopping, prompts
from paceline.serving.prompts import Prompt
from paceline.wording import format_duration
from paceline.workloads.inference import loadgen, loads, ranks
from paceline.workloads.inference.requests import CHAT, Replica
from paceline.workloads.inference.session import Session

TRAITS = Traits(serves=True)
# Of a run's time, what the last load of a search must leave for the rest.
SPARE_RATIO = 0.1
ALONE = "a paired run compares replicas, and there is one alone"


@dataclass(frozen=True)
class Options:
    """shards: processes of the client (0: one for each core that the replicas leave)."""

    shards: int = 1

    def __post_init__(self) -> None:
        require(self.shards >= 0, "inference.shards", self.shards, "a whole number from 0")


def check(spec: RunSpec) -> str | None:
    assert spec.engine is not None
    assert spec.serving is not None
    parse_options(Options, spec.workload)
    arithmetic.vocabulary(spec.model)
    _require_fitting(spec.serving)
    prompts.check(spec.training.data, spec.serving.scenario)
    loadgen.check(spec)
    _require_readable(spec)
    if spec.serving.partition == "paired" and replicas_of(spec) < 2:
        return ALONE
    lasting = lasting_s(spec.serving)
    if lasting is not None and lasting >= spec.timeout_s:
        return f"its load lasts {lasting:g} s at least, longer than timeout_s ({spec.timeout_s:g} s)"
    reason = load("engines", spec.engine.name).check(spec)
    return str(reason) if reason else None


def _require_fitting(asked: Serving) -> None:
    """What its own fields cannot say of each other."""
    bounded = asked.scenario in loads.BOUNDED
    require(asked.partition != "paired" or bounded, "scenario", asked.scenario, f"{', '.join(loads.BOUNDED)} if paired")
    require(asked.scenario != "trace" or not asked.least_s, "least_s", asked.least_s, "0 with trace: it has its times")
    require(asked.loads is None or asked.scenario == "sweep", "loads", asked.loads, "nothing without scenario sweep")
    if asked.scenario == "sweep":
        loads.swept(asked)


def _require_readable(spec: RunSpec) -> None:
    """RequestError for a file that no run could use. One that is not on this host is left to the hosts of a launcher
    that has its own."""
    named = spec.training.data.options.get("path")
    if named is None:
        return
    path = Path(str(named)).expanduser()
    here = bool(getattr(load("launchers", spec.launcher.name), "HERE", False))
    if not path.exists():
        if here:
            raise RequestError(f"data: {str(path)!r} does not exist; accepted is {spec.training.data.name}:path=FILE")
        return
    known, asked = path.stat(), spec.serving
    assert asked is not None
    words = (asked.requests, spec.seed, arithmetic.vocabulary(spec.model), asked.max_tokens, asked.api)
    _read_once(str(spec.training.data), *words, (known.st_size, known.st_mtime_ns))


@functools.lru_cache(maxsize=256)
def _read_once(
    data: str, count: int | None, seed: int, vocab: int, max_tokens: int, api: str, _stamp: tuple[int, int]
) -> None:
    """A campaign asks of every cell and repeat, several times each; a file that changed meanwhile is read again."""
    _fitting(Choice.parse(data), count, seed, vocab, max_tokens, api)


def replicas_of(spec: RunSpec) -> int:
    """As many as urls were given, of engines that are given some; else each rank has one."""
    assert spec.engine is not None
    urls = spec.engine.options.get("urls")
    return len(urls) if isinstance(urls, list | tuple) else spec.topology.world_size


def run(spec: RunSpec, seat: Seat, recorder: Recorder) -> None:
    """Every rank opens its engine; rank 0 asks all replicas, the others keep theirs up until it has ended."""
    assert spec.engine is not None
    recorder.progress(0, "setup")
    around = surroundings(spec, seat)
    with load("engines", spec.engine.name).open(spec, seat) as endpoints:
        host = placement.node_name(os.environ)
        own = [Replica(rank=seat.rank, host=host, endpoint=endpoint) for endpoint in endpoints]
        if seat.world_size == 1:
            ask(spec, seat, recorder, own, gone=tuple, around=around)
            return
        circle = ranks.Circle.met(seat, spec.timeout_s)
        circle.tell(own)
        if seat.rank == 0:
            with circle.asking():
                ask(spec, seat, recorder, circle.gathered(), gone=circle.gone, around=around)
        else:
            died = circle.attend(own, ranks.accepts)
            recorder.conclude(evidence(endpoints, around, died=len(died)))


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What would spoil the speed of an engine on its host: other processes on its GPUs before it was there (the GPU
    with most of them counts), and debug switches, which it inherits."""

    neighbours: int | None = None
    switches: Mapping[str, str] = field(default_factory=dict)


def surroundings(spec: RunSpec, seat: Seat) -> Surroundings:
    """To be called before the engine is opened; of endpoints that already run nothing is known."""
    from paceline.host.machine import debug_switches, neighbours

    assert spec.engine is not None
    if not getattr(load("engines", spec.engine.name), "STARTS", False):
        return Surroundings()
    switches = debug_switches(os.environ)
    # Ranks that share a GPU are each other's neighbours; that they do is told by itself.
    if seat.device != "cuda" or placement.shares_gpu(os.environ):
        return Surroundings(None, switches)
    devices = int(str(spec.engine.options.get("tensor_parallel") or 1))
    first = seat.local_rank * devices
    counts = [count for gpu in range(first, first + devices) if (count := neighbours(gpu)) is not None]
    return Surroundings(max(counts, default=None), switches)


def ask(
    spec: RunSpec,
    seat: Seat,
    recorder: Recorder,
    replicas: Sequence[Replica],
    gone: Callable[[], Sequence[int]],
    around: Surroundings,
) -> None:
    """All loads of the run on all replicas, by this process and those it forks."""
    assert spec.serving is not None
    assert spec.engine is not None
    if spec.serving.partition == "paired" and len(replicas) < 2:
        raise UnsupportedError(ALONE)
    loadgen.require_installed(spec)
    asked = prompts_of(spec)
    shards = parse_options(Options, spec.workload).shards
    session = Session(spec.serving, asked, replicas, recorder, engine=spec.engine.name, shards=shards, gone=gone)
    for ceiling in client_ceiling.known(rank=seat.rank):
        recorder.add(ceiling)
    session.answers()
    until_s = seat.taken_at_s + (1 - SPARE_RATIO) * spec.timeout_s
    try:
        longest = max(prompt.max_tokens for prompt in asked)
        sequence = loads.loads_of(
            spec.serving,
            len(asked),
            len(replicas),
            spec.seed,
            lambda: until_s - time.monotonic(),
            answer_tokens=longest,
        )
        ended_by = put_on_all(session, sequence)
        if loadgen.is_asked(spec):
            alive = [replicas[number].endpoint for number in session.alive]
            loadgen.ask(spec, recorder, asked, alive, session.pace_per_s)
    finally:
        session.farewell()
    endpoints = [replica.endpoint for replica in replicas]
    told = {"prompts": prompts.form_of(asked), **({"search_ended_by": ended_by} if ended_by else {})}
    told |= {} if arithmetic.known_shape(spec.model) else {"shape": UNKNOWN_SHAPE}
    recorder.conclude(evidence(endpoints, around, samples=len(asked), served=endpoints[0].model, **told))


def put_on_all(session: Session, sequence: loads.Loads) -> str | None:
    """One load after the other, each chosen by what became of those before; why a search came to its end."""
    try:
        load = next(sequence)
        while True:
            load = sequence.send(session.put_on(load))
    except StopIteration as end:
        return end.value if isinstance(end.value, str) else None


def prompts_of(spec: RunSpec) -> list[Prompt]:
    assert spec.serving is not None
    asked, vocab = spec.serving, arithmetic.vocabulary(spec.model)
    return _fitting(spec.training.data, asked.requests, spec.seed, vocab, asked.max_tokens, asked.api)


def _fitting(data: Choice, count: int | None, seed: int, vocab: int, max_tokens: int, api: str) -> list[Prompt]:
    """The prompts, each of a form that the API takes."""
    found = prompts.open_prompts(data, count=count, seed=seed, vocab=vocab, max_tokens=max_tokens, api=api)
    if api == CHAT:
        require(not any(p.token_ids for p in found), "api", CHAT, "completions for prompts of token ids")
    else:
        require(not any(p.messages for p in found), "api", api, "chat for prompts of messages")
    return found


def evidence(endpoints: Sequence[Endpoint], around: Surroundings, **told: str | int) -> Evidence:
    shared = {"shared_gpu": True} if placement.shares_gpu(os.environ) else {}
    return Evidence(
        init_digest="",
        parameters=0,
        dtypes={},
        optimizer={},
        settings={"replicas": len(endpoints), **told, **shared},
        switches=around.switches,
        neighbours=around.neighbours,
        window_wall_s=None,
    )


# --- before it runs ---


def lasting_s(asked: Serving) -> float | None:
    """How long the loads last by their own schedule; None where the replicas alone decide."""
    rate, requests = asked.rate_per_s, asked.requests or 0
    # LoadGen asks after this client, for as long.
    twice = 2 if asked.loadgen != "own" else 1
    if asked.scenario in loads.BOUNDED or rate is None or asked.scenario == "trace":
        return twice * asked.least_s or None
    if asked.scenario == "search":
        # How long answers are is not known before the prompts are made: at least one token.
        return max(max(requests, loads.LEAST_SEARCHED) / rate, loads.trial_s(asked, answer_tokens=1))
    rates = loads.swept(asked) if asked.scenario == "sweep" and asked.loads is not None else [rate]
    return twice * sum(max(requests / each, asked.least_s) for each in rates) or None


def outline(spec: RunSpec) -> str:
    """What `paceline plan` tells: how many requests, of how many replicas, for about how long, and where they are too
    few for its limits."""
    assert spec.engine is not None
    assert spec.serving is not None
    asked = spec.serving
    replicas = replicas_of(spec)
    count = f"{asked.requests:,} requests" if asked.requests else "all samples of its data"
    rate = f" at {asked.rate_per_s:g} a second" if asked.rate_per_s is not None else ""
    cap = f", at most {asked.concurrency} in flight" if asked.concurrency is not None else ""
    lasting = lasting_s(asked)
    each = " for the first load" if asked.scenario == "search" else ""
    time_s = "as long as the replicas take" if lasting is None else f"about {format_duration(lasting)}{each} at least"
    shape = "" if arithmetic.known_shape(spec.model) else f"; the shape of {spec.model_text} is {UNKNOWN_SHAPE}"
    where = f"{replicas} replica{'s' if replicas > 1 else ''}{', then by LoadGen' if loadgen.is_asked(spec) else ''}"
    what = f"{spec.engine.name}, {asked.scenario}{rate}{cap}"
    return f"{what}: {count}, {where}, {asked.partition} partition, {time_s}{_too_few(asked)}{shape}"


def _too_few(asked: Serving) -> str:
    """Nothing where a search asks for enough itself, or a time decides how many there are."""
    least = early_stopping.requests_needed(0, PERCENTILE)
    limited = any(limit is not None for limit in asked.limits.values()) and asked.scenario != "search"
    few = limited and not asked.least_s and asked.requests is not None and asked.requests < least
    return f"; too few requests to tell whether limits are kept: at least {least} are needed" if few else ""
