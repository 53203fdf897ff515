"""One client over replicas of known law in processes of their own: killed, slow, failing, compared, searched."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from testbed import replicas as bed

from paceline.contract import Seat
from paceline.errors import InvalidRunError, RequestError, UnsupportedError
from paceline.experiment.choices import Choice
from paceline.experiment.serving import Serving
from paceline.experiment.spec import RunSpec
from paceline.results import client_audit
from paceline.results.records import Evidence, Sample
from paceline.results.served_samples import (
    AnswerSample,
    CeilingSample,
    ClientSample,
    ReplicaSample,
    RequestSample,
    StageSample,
)
from paceline.serving import client_ceiling, early_stopping
from paceline.serving.client import schedule, silence, worker_pool
from paceline.serving.client.schedule import RequestResult, ShardResult
from paceline.serving.client.shard import Progress
from paceline.serving.early_stopping import Verdict
from paceline.workloads import inference
from paceline.workloads.inference import loads
from paceline.workloads.inference.session import Heartbeat, idle_s, paced_of, progress_text

pytestmark = pytest.mark.slow

Start = Callable[..., bed.Replica]
SAMPLES = 40


class Notebook:
    """A recorder that keeps everything, and tells somebody of every move."""

    def __init__(self, moved: Callable[[int, str], None] | None = None) -> None:
        self.samples: list[Sample] = []
        self.moves: list[tuple[int, str]] = []
        self.evidence: Evidence | None = None
        self._moved = moved

    def add(self, sample: Sample) -> None:
        self.samples.append(sample)

    def progress(self, step: int, phase: str) -> None:
        self.moves.append((step, phase))
        if self._moved:
            self._moved(step, phase)

    def conclude(self, evidence: Evidence) -> None:
        self.evidence = evidence

    def of(self, kind: type[Any]) -> list[Any]:
        return [sample for sample in self.samples if isinstance(sample, kind)]

    @property
    def requests(self) -> list[RequestSample]:
        return self.of(RequestSample)


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Else each forked process looks through all that other tests imported, and so copies it."""
    gc.freeze()


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[bed.Replica] = []

    def begin(**law: Any) -> bed.Replica:
        started.append(bed.start(**law))
        return started[-1]

    yield begin
    for replica in started:
        replica.end()


Ask = Callable[..., Notebook]


@pytest.fixture
def ask(make_spec: Callable[..., RunSpec]) -> Ask:
    """A run of this workload in this process, over the replicas given."""

    def run(
        *replicas: bed.Replica,
        notebook: Notebook | None = None,
        timeout_s: float = 120.0,
        workload: str = "inference",
        model: str = "tiny",
        **asked: Any,
    ) -> Notebook:
        usual: dict[str, Any] = {"requests": SAMPLES, "max_tokens": 8, "warmup_requests": 1, "request_timeout_s": 30.0}
        spec = make_spec(
            None,
            processes=1,
            workload=workload,
            model=model,
            engine=Choice("openai", {"urls": [replica.url for replica in replicas]}),
            serving=Serving(**{**usual, **asked}),
            data=Choice.parse("synthetic:prompt=fixed,prompt_mean=4,answer_mean=8"),
            timeout_s=timeout_s,
        )
        assert inference.check(spec) is None
        found = notebook or Notebook()
        inference.run(spec, Seat(rank=0, local_rank=0, world_size=1, device="cpu"), found)
        return found

    return run


def assert_exactly_once(notebook: Notebook, samples: int = SAMPLES) -> None:
    assert sorted(request.sample for request in notebook.requests) == list(range(samples))
    assert len({request.number for request in notebook.requests}) == samples


def test_what_a_killed_replica_leaves_others_answer(start: Start, ask: Ask) -> None:
    found = ask(start(), start(dies_after=6), start(), concurrency=6)
    assert_exactly_once(found)
    assert {request.error for request in found.requests} == {None}
    by_replica = Counter(request.replica for request in found.requests)
    assert sum(by_replica.values()) == SAMPLES
    # One of its requests was the question beforehand.
    assert by_replica[1] <= 5
    again = [request for request in found.requests if request.attempt]
    assert again
    assert all(request.replica != 1 for request in again)
    first, second, third = found.of(ReplicaSample)
    assert second.died_ns > 0
    assert second.reassigned >= len(again)
    assert (first.died_ns, third.died_ns, first.reassigned) == (None, None, 0)


def test_a_replica_that_fails_is_not_given_up_and_its_failures_are_listed(start: Start, ask: Ask) -> None:
    found = ask(start(), start(mode="fail"), concurrency=4, warmup_requests=0)
    assert_exactly_once(found)
    failed = [request for request in found.requests if request.error is not None]
    assert {(request.replica, request.error, request.attempt) for request in failed} == {(1, "http_500", 0)}
    assert len(failed) == SAMPLES // 4
    assert [replica.died_ns for replica in found.of(ReplicaSample)] == [None, None]


def test_a_replica_that_never_ends_an_answer_gets_no_more_requests(
    start: Start, ask: Ask, capfd: pytest.CaptureFixture[str]
) -> None:
    """Three timeouts in a row stay failed; what it had not answered then, and what was still to come, others take."""
    found = ask(start(), start(mode="stall"), concurrency=4, requests=20, warmup_requests=0, request_timeout_s=0.5)
    assert_exactly_once(found, 20)
    assert Counter((r.replica, r.error, r.attempt) for r in found.requests if r.replica == 1) == {(1, "timeout", 0): 3}
    assert Counter(r.error for r in found.requests) == {None: 17, "timeout": 3}
    first, second = found.of(ReplicaSample)
    assert (first.died_ns, second.died_ns, first.silent_ns) == (None, None, ())
    assert len(second.silent_ns) == 1
    assert second.reassigned == 7
    said = capfd.readouterr().err
    assert f"replica 1 on {second.host} stopped answering (its requests timed out in a row)" in said


def test_a_silent_replica_gets_requests_again_after_a_probe(
    start: Start, ask: Ask, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its process is stopped, so that its host accepts connections and nobody answers, and continued later."""
    monkeypatch.setattr(silence, "PROBE_S", 0.3)
    monkeypatch.setattr(silence, "PROBE_EVERY_S", 0.1)
    monkeypatch.setattr(worker_pool, "REPORT_S", 0.05)
    mute = start()
    pid, done = mute.process.pid, set[str]()

    def moved(step: int, phase: str) -> None:
        ended = step if phase.startswith("timing") else 0
        if ended >= 20 and not done:
            done.add("stopped")
            os.kill(pid, signal.SIGSTOP)
        silent = "stopped answering" in (said := capfd.readouterr().err)
        done.update(["silent"] if silent else [], ["again"] if "answers again" in said else [])
        if "silent" in done and "continued" not in done:
            done.add("continued")
            os.kill(pid, signal.SIGCONT)

    load = {"scenario": "constant", "rate_per_s": 80.0, "requests": 400}
    found = ask(start(), mute, **load, request_timeout_s=0.4, notebook=Notebook(moved))
    assert_exactly_once(found, 400)
    assert done == {"stopped", "silent", "continued", "again"}
    second = found.of(ReplicaSample)[1]
    stopped_ns, again_ns = second.silent_ns[:2]
    assert second.reassigned > 0
    between = [r for r in found.requests if r.replica == 1 and r.sent_ns and stopped_ns < r.sent_ns < again_ns]
    assert between == []
    later = [r for r in found.requests if r.replica == 1 and r.sent_ns and r.sent_ns > again_ns]
    assert {r.error for r in later} == {None}
    failed = [r for r in found.requests if r.error is not None]
    assert {(r.replica, r.error) for r in failed} == {(1, "timeout")}
    assert len(failed) < 10, "without this, all of its requests until it was continued"


def test_replicas_of_different_models_are_each_asked_for_their_own(start: Start, ask: Ask) -> None:
    one, two = start(model="one"), start(model="two")
    found = ask(one, two, concurrency=4, requests=8)
    assert_exactly_once(found, 8)
    assert {request.error for request in found.requests} == {None}
    # On one host they are told apart by their ports.
    told = [(replica.model, f"http://{replica.host}") for replica in found.of(ReplicaSample)]
    assert told == [("one", one.url), ("two", two.url)]


def test_the_headroom_of_the_client_is_known_before_each_load(
    start: Start, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ceiling is 20,000 events a second: 2,500 requests of 8 tokens."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    client_ceiling.keep(CeilingSample(rank=0, processes=1, events_per_s=2e4, streams=500, measured_at_s=1.0))
    found = ask(start(), scenario="constant", rate_per_s=100.0, requests=20)
    (stage,) = found.of(StageSample)
    assert stage.headroom_grade == "good"
    assert stage.headroom == "client headroom: good (needs 100 of 2,500 requests/s; self-test of 1970-01-01)"
    assert any(stage.headroom in text for _, text in found.moves)
    found = ask(start(), concurrency=2, requests=8, warmup_requests=0)
    assert [stage.headroom_grade for stage in found.of(StageSample)] == ["unknown"]


def test_the_name_of_the_model_is_what_the_answers_say(start: Start, ask: Ask) -> None:
    found = ask(start(), start(mode="renamed"), start(mode="terse"), concurrency=3, requests=6)
    told = [(replica.model, replica.answered_as) for replica in found.of(ReplicaSample)]
    assert told == [("mock", ("mock",)), ("mock", ("another-model",)), ("mock", ())]


def test_several_processes_of_a_client_share_one_plan(start: Start, ask: Ask) -> None:
    found = ask(start(), start(), concurrency=6, workload="inference:shards=2")
    assert_exactly_once(found)
    clients = found.of(ClientSample)
    assert [(client.shard, client.requests) for client in clients] == [(0, SAMPLES // 2), (1, SAMPLES // 2)]
    assert len({client.plan for client in clients}) == 1


@pytest.mark.parametrize(("shards", "replicas"), [(1, 2), (2, 2), (2, 4)])
def test_as_many_are_in_flight_however_many_processes_ask(start: Start, ask: Ask, shards: int, replicas: int) -> None:
    slow = [start(ttft_s=0.2) for _ in range(replicas)]
    found = ask(*slow, concurrency=12, requests=24, warmup_requests=0, workload=f"inference:shards={shards}")
    assert_exactly_once(found, 24)
    assert sum(client.most_in_flight for client in found.of(ClientSample)) == 12


def test_the_faster_replica_takes_more_where_whoever_is_free_may(start: Start, ask: Ask) -> None:
    fast, slow = start(ttft_s=0.002), start(ttft_s=0.1)
    fixed = ask(fast, slow, concurrency=4)
    free = ask(fast, slow, concurrency=4, partition="dynamic")
    for found in (fixed, free):
        assert_exactly_once(found)
    assert Counter(request.replica for request in fixed.requests) == {0: SAMPLES // 2, 1: SAMPLES // 2}
    assert Counter(request.replica for request in free.requests)[0] > SAMPLES // 2


def test_losing_all_replicas_is_reported_and_every_sample_is_listed(start: Start, ask: Ask) -> None:
    notebook = Notebook()
    with pytest.raises(InvalidRunError, match=r"no replica is left for load 2: replica 0 on .* \(http://127"):
        ask(start(dies_after=5), notebook=notebook, scenario="sweep", loads="2+4")
    assert_exactly_once(notebook)
    assert Counter(request.error is None for request in notebook.requests)[True] <= 4
    # Also of a run that ends so the replicas are told of.
    assert [replica.died_ns is not None for replica in notebook.of(ReplicaSample)] == [True]


def test_all_die_while_whoever_is_free_is_asked(start: Start, ask: Ask) -> None:
    found = ask(start(dies_after=5), start(dies_after=9), partition="dynamic", concurrency=4)
    assert_exactly_once(found)
    answered = [request.replica for request in found.requests if request.error is None]
    assert len(answered) <= 4 + 8
    assert set(answered) <= {0, 1}
    assert all(replica.died_ns is not None for replica in found.of(ReplicaSample))


def test_a_sweep_has_a_plan_a_client_and_a_row_for_each_load(start: Start, ask: Ask) -> None:
    found = ask(start(), start(), scenario="sweep", loads="1+3", requests=12)
    stages = found.of(StageSample)
    assert [(s.stage, s.scenario, s.concurrency, s.planned) for s in stages] == [
        (0, "concurrency", 1, 12),
        (1, "concurrency", 3, 12),
    ]
    assert stages[0].ended_ns <= stages[1].started_ns
    for stage in stages:
        ours = [request for request in found.requests if request.stage == stage.stage]
        assert sorted(request.sample for request in ours) == list(range(12))
        assert all(stage.started_ns <= request.due_ns <= stage.ended_ns for request in ours)
        assert _most_at_once(ours) <= (stage.concurrency or 0)
    assert len({request.number for request in found.requests}) == 24
    assert len({(client.stage, client.plan) for client in found.of(ClientSample)}) == 2


def _most_at_once(requests: list[RequestSample]) -> int:
    moves = [(r.due_ns, 1) for r in requests] + [(r.ended_ns or 0, -1) for r in requests]
    return int(np.cumsum([change for _, change in sorted(moves)]).max())


def test_replicas_that_are_compared_are_asked_the_same_there_and_back(start: Start, ask: Ask) -> None:
    found = ask(start(), start(), partition="paired", scenario="concurrency", concurrency=3, requests=10)
    assert [stage.replica for stage in found.of(StageSample)] == [0, 1, 1, 0]
    for stage in range(4):
        ours = sorted((r for r in found.requests if r.stage == stage), key=lambda r: r.number)
        assert {request.replica for request in ours} == {(0, 1, 1, 0)[stage]}
        assert [r.sample for r in ours] == [r.sample for r in found.requests if r.stage == 0]


def test_one_alone_cannot_be_compared(start: Start, ask: Ask, monkeypatch: pytest.MonkeyPatch, golden: object) -> None:
    """Known beforehand, unless an engine opens fewer than its options promise."""
    monkeypatch.setattr(inference, "replicas_of", lambda spec: 2)
    with pytest.raises(UnsupportedError) as caught:
        ask(start(), partition="paired")
    assert str(caught.value) == golden


def test_the_same_questions_are_asked_of_all_and_their_answers_kept(start: Start, ask: Ask) -> None:
    found = ask(start(), start(), warmup_requests=3, requests=6)
    answers: list[AnswerSample] = found.of(AnswerSample)
    assert [(a.replica, a.sample, a.tokens) for a in answers] == [(r, s, 8) for r in (0, 1) for s in (0, 1, 2)]
    assert len({answer.text for answer in answers}) == 1
    assert answers[0].text
    # Texts of the load itself are kept for who asks for them.
    assert {request.text for request in found.requests} == {None}
    assert found.evidence is not None
    assert found.evidence.settings == {"replicas": 2, "samples": 6, "served": "mock", "prompts": "token_ids"}


def test_a_load_goes_on_for_as_long_as_it_shall(start: Start, ask: Ask) -> None:
    # On a busy machine the first request may leave a second late.
    found = ask(start(), scenario="concurrency", concurrency=2, requests=5, least_s=2.5)
    (stage,) = found.of(StageSample)
    assert stage.planned == len(found.requests) > 5
    assert max(request.due_ns for request in found.requests) > 0.3e9
    ordered = sorted(found.requests, key=lambda request: request.number)
    # Samples are used again in whole rounds.
    for begin in range(0, len(ordered) - 5, 5):
        assert sorted(request.sample for request in ordered[begin : begin + 5]) == list(range(5))


@pytest.mark.parametrize(
    "asked",
    [
        {"scenario": "concurrency", "concurrency": 2, "least_s": 0.2},
        {"scenario": "search", "rate_per_s": 20.0, "ttft_limit_s": 0.001, "timeout_s": 60.0},
    ],
)
def test_a_request_whose_end_is_missing_shows_in_a_load_that_may_end_early(
    start: Start, ask: Ask, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    whole = worker_pool.run

    def forgetful(shares: Any, **watched: Any) -> list[ShardResult]:
        shards = whole(shares, **watched)
        shards[0].results.pop()
        return shards

    replica = start(ttft_s=0.05)
    monkeypatch.setattr(worker_pool, "run", forgetful)
    found = ask(replica, warmup_requests=0, **asked)
    stage = found.of(StageSample)[0]
    assert stage.planned == 1 + len([request for request in found.requests if request.stage == 0])


def test_a_search_never_passes_what_the_law_of_the_server_forbids(
    start: Start, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue of one: what each request waits follows from the arrivals alone (Lindley), so a rate at which the law
    makes requests late must fail. At the 90th percentile fewer requests tell, which is enough for a test. The client of
    a busy machine is believed here: what it makes late may fail, and never pass."""
    service_s, limit_s = 0.01, 0.05
    monkeypatch.setattr(client_audit, "reasons", lambda facts: [])
    monkeypatch.setattr(loads, "PACED", 0.0)
    monkeypatch.setattr(loads, "PERCENTILE", 0.9)
    monkeypatch.setattr(loads, "LEAST_SEARCHED", early_stopping.requests_needed(0, 0.9))
    found = ask(
        start(service_s=service_s, itl_s=0.0),
        scenario="search",
        rate_per_s=60.0,
        ttft_limit_s=limit_s,
        tpot_limit_s=limit_s / 7,
        timeout_s=30.0,
    )
    rates: dict[Verdict, list[float]] = {told: [] for told in Verdict}
    for stage in found.of(StageSample):
        ours = sorted((r for r in found.requests if r.stage == stage.stage), key=lambda r: r.due_ns)
        late = [r.error is not None or _longest_ns(r) > limit_s * 1e9 for r in ours]
        told = early_stopping.verdict_of(len(ours), sum(late), 0.9)
        rates[told].append(stage.rate_per_s)
        forbidden = int((_waits([r.due_ns for r in ours], service_s) > limit_s * 1e9).sum())
        assert not (
            told is Verdict.PASSED and early_stopping.verdict_of(len(ours), forbidden, 0.9) is not Verdict.PASSED
        )
    assert rates[Verdict.FAILED]
    assert max(rates[Verdict.PASSED], default=0.0) < min(rates[Verdict.FAILED], default=math.inf)


def test_a_trial_ends_when_it_is_lost(start: Start, ask: Ask) -> None:
    """At a rate at which it would go on for two minutes, with an answer to every request that comes too late."""
    found = ask(start(ttft_s=0.05), scenario="search", rate_per_s=8.0, ttft_limit_s=0.001, timeout_s=90.0)
    (stage,) = found.of(StageSample)
    assert 1 <= stage.planned == len(found.requests) < 459
    assert {request.error for request in found.requests} == {None}
    assert found.evidence is not None
    # On a busy machine the client may say against itself that it was late.
    why = str(found.evidence.settings["search_ended_by"])
    assert "longer than what is left of timeout_s" in why or "this client cannot measure" in why


def _longest_ns(answer: RequestSample) -> int:
    """Until its first token, or from that to the last of the seven after it."""
    assert answer.first_ns is not None
    assert answer.last_ns is not None
    return max(answer.first_ns - answer.due_ns, answer.last_ns - answer.first_ns)


@pytest.mark.parametrize(
    ("ended", "late", "planned"),
    [
        (412, 1, 662),
        # 80 late ones want 10,328 requests, of which 200 are planned.
        (88, 80, 200),
        (600, 0, 7150),
    ],
)
def test_a_load_is_counted_by_what_is_needed_up_to_what_is_planned(
    ended: int, late: int, planned: int, golden: object
) -> None:
    load = loads.Load(scenario="server", requests=planned, seed=0, rate_per_s=4.0)
    tally = Progress(planned=planned, sent=ended, ended=ended, late=late, failed=0)
    assert progress_text(load, 0, Serving(scenario="server", rate_per_s=4.0), tally) == golden


def test_the_time_left_of_a_load_is_what_is_missing_at_its_rate() -> None:
    """62 of the 459 needed requests ended in 31 s: 397 are left at 2 per second."""
    load = loads.Load(scenario="server", requests=662, seed=0, rate_per_s=4.0)
    serving = Serving(scenario="server", rate_per_s=4.0)
    tally = Progress(planned=662, sent=62, ended=62, late=0, failed=0)
    assert progress_text(load, 0, serving, tally, 31.0).endswith("62 of 459 needed, 0 late, about 3 min 18 s left")
    few = dataclasses.replace(tally, ended=20)
    assert "left" not in progress_text(load, 0, serving, few, 31.0), "the start of the server would dominate"


def test_how_many_were_sent_by_when_the_last_was_due() -> None:
    def handled(number: int, due_ns: int, sent_ns: int | None) -> RequestResult:
        return RequestResult(number=number, replica=0, due_ns=due_ns, sent_ns=sent_ns)

    due = [0, 100, 200, 300, 400]
    assert paced_of([handled(n, at, at + 1) for n, at in enumerate(due)]) == 1.0
    # Each takes twice as long: those due at 0, 100 and 200 are sent at 0, 200 and 400.
    assert paced_of([handled(n, at, 2 * at) for n, at in enumerate(due)]) == 3 / 4
    assert paced_of([handled(0, 0, None), handled(1, 100, 100)]) == 0.0
    assert paced_of([handled(0, 0, 50), handled(1, 0, 50)]) == 0.0, "due all at once is no rate"


def _waits(due_ns: list[int], service_s: float) -> Any:
    """Nanoseconds from each arrival to its answer, in a queue of one."""
    free, waits = 0.0, []
    for due in due_ns:
        free = max(free, due) + service_s * 1e9
        waits.append(free - due)
    return np.array(waits)


def test_whoever_watches_sees_requests_end_and_how_many_are_needed(start: Start, ask: Ask, golden: object) -> None:
    found = ask(start(), scenario="constant", rate_per_s=40.0, ttft_limit_s=5.0)
    told = [phase for _, phase in found.moves if phase.startswith("timing: ")]
    # The 459 that would tell are never asked.
    assert told[-1] == golden
    assert f"{SAMPLES}" in told[-1]
    ended = [step for step, phase in found.moves if phase.startswith("timing: ")]
    assert ended == sorted(ended)
    assert ended[-1] == SAMPLES


def test_a_load_is_alive_until_the_time_out_of_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    told: list[Progress] = []
    pulse = Heartbeat(told.append, timeout_s=600.0)
    waiting = Progress(planned=9, sent=5, ended=4, late=0, failed=0)
    for clock[0], beats in ((1000.0, 1), (1299.0, 2), (1600.0, 3), (1601.0, 3), (9000.0, 3)):
        pulse(waiting)
        assert len(told) == beats
    # With nothing in flight there is nothing to wait for.
    idle = Progress(planned=9, sent=5, ended=5, late=0, failed=1)
    for _ in range(2):
        pulse(idle)
    assert told[-1] == idle
    assert len(told) == 4


def test_a_schedule_that_rests_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace with 400 s between two requests, longer than the 300 s after which a controller sees a hang."""
    clock, told = [0.0], []
    monkeypatch.setattr("paceline.workloads.inference.session.time.monotonic", lambda: clock[0])
    due = schedule.trace(np.array([0.0, 3.0, 403.0]))
    pulse = Heartbeat(told.append, 600.0, lambda sent: idle_s(due, sent))
    resting = Progress(planned=3, sent=2, ended=2, late=0, failed=0)
    for clock[0], beats in ((1000.0, 1), (1001.0, 2), (1399.0, 3), (1400.0, 4), (1401.0, 4), (9000.0, 4)):
        pulse(resting)
        assert len(told) == beats
    # All were asked and have ended: nobody waits for anything.
    for _ in range(2):
        pulse(Progress(planned=3, sent=3, ended=3, late=0, failed=0))
    assert len(told) == 5


@pytest.mark.parametrize(
    ("due", "sent", "seconds"),
    [
        (schedule.trace(np.array([7.0, 8.5])), 1, 1.5),
        (schedule.constant(0.01, 3), 0, 0.0),
        (schedule.constant(0.01, 3), 2, 100.0),
        (schedule.constant(0.01, 3), 3, 0.0),
        (schedule.poisson(0.001, 1, seed=1), 0, float(schedule.poisson(0.001, 1, seed=1)[0]) / 1e9),
        (schedule.closed_loop(3), 1, 0.0),
        (schedule.at_once(3), 1, 0.0),
    ],
)
def test_how_long_a_schedule_rests(due: Any, sent: int, seconds: float) -> None:
    assert idle_s(due, sent) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("asked", "tally"),
    [
        ({"scenario": "server", "rate_per_s": 1.0}, (412, 1, 0)),
        ({"scenario": "server", "rate_per_s": 1.0}, (412, 1, 1)),
        ({}, (1412, 0, 2)),
        ({"scenario": "server", "rate_per_s": 1.0}, (1900, 1800, 0)),
        ({"least_s": 5.0}, (1412, 0, 0)),
        ({"scenario": "search"}, (40, 0, 0)),
    ],
)
def test_where_a_load_is_in_words(asked: dict[str, Any], tally: tuple[int, int, int], golden: object) -> None:
    serving = Serving(**asked)
    plain = serving.scenario if serving.scenario != "search" else "server"
    load = loads.Load(scenario=plain, requests=9, seed=0, rate_per_s=1.5, least_s=serving.least_s)
    ended, late, failed = tally
    seen = Progress(planned=2000, sent=2000, ended=ended, late=late, failed=failed)
    assert progress_text(load, 2, serving, seen) == golden


def test_a_model_of_any_architecture_is_asked(start: Start, ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "phi3", "vocab_size": 32064}')
    found = ask(start(), model=str(tmp_path), requests=2)
    assert found.evidence is not None
    assert found.evidence.settings["shape"] == "not known"


# --- what cannot be ---


@pytest.mark.parametrize(
    "asked",
    [
        {"scenario": "server", "rate_per_s": 1.0, "partition": "paired"},
        {"scenario": "trace", "least_s": 5.0},
        {"loads": "1+2"},
        {"scenario": "sweep", "loads": "x"},
    ],
)
def test_what_does_not_fit_is_one_sentence(start: Start, ask: Ask, asked: dict[str, Any], golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        ask(start(), **asked)
    assert str(caught.value) == golden


def test_a_load_longer_than_its_run_may_take_is_refused(make_spec: Callable[..., RunSpec], golden: object) -> None:
    spec = make_spec(
        None,
        processes=1,
        workload="inference",
        engine=Choice("openai"),
        serving=Serving(scenario="server", rate_per_s=2.0, requests=1000),
        timeout_s=300.0,
    )
    text = inference.check(spec)
    assert text == golden
    assert "500" in text
    assert "timeout_s" in text
    assert "300" in text
    text = inference.outline(spec)
    assert text == golden
    assert "1,000" in text
    assert "20" in text


def test_a_plan_says_which_requests_are_too_few_for_their_limits(make_spec: Callable[..., RunSpec]) -> None:
    def told(**asked: Any) -> str:
        serving = Serving(**{"scenario": "server", "rate_per_s": 2.0, **asked})
        return inference.outline(
            make_spec(None, processes=1, workload="inference", engine=Choice("openai"), serving=serving)
        )

    words = "; too few requests to check the limits: at least 459 are needed"
    assert words in told(requests=458)
    enough: list[dict[str, Any]] = [{"requests": 459}, {"requests": 40, "least_s": 600.0}, {}]
    without: list[dict[str, Any]] = [{"requests": 40, "scenario": "search"}, {"requests": 40, "scenario": "offline"}]
    assert not any(words in told(**asked) for asked in (*enough, *without))
