"""The controller: check, prepare, submit, wait, judge, certify, seal. Resuming is skipping what is sealed."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.analysis.compare import comparable
from paceline.analysis.training.certificate import certify
from paceline.campaign.run import restarts, supervision
from paceline.campaign.run.supervision import Launch, Observer
from paceline.contract import Launcher
from paceline.errors import LaunchError, RequestError, StoreError, UnsupportedError, require
from paceline.experiment.choices import Choice
from paceline.experiment.plugins import load
from paceline.experiment.spec import RunSpec, Topology, WarmUp
from paceline.results import attempts, capsule, store
from paceline.results.campaign_file import write_plan
from paceline.results.records import RunRecord, Status

POLL_S = 0.1
# A large model takes some 15 s of one core for each of a dozen settings.
ADVICE_S = 300.0
# Re-seeded copies of a 16-bit reference: their spread is the tolerance of the certificate.
REFERENCE_VARIANTS = {"fp32": 1, "bf16": 4, "fp16": 4}
# Tokens of a reference's micro batch at most: the uncompiled loss holds their logits in fp32, several times.
REFERENCE_TOKENS = 8192
# An engine that takes longer to say whether it can take runs is told of.
SLOW_S = 3.0
Tell = Callable[[str], None]


def _untold(_words: str) -> None: ...


def references_of(specs: Sequence[RunSpec]) -> dict[str, RunSpec]:
    """The one-process reference of each group of equal work."""
    references: dict[str, RunSpec] = {}
    for spec in specs:
        if spec.is_certified and unsupported(spec) is None:
            known = references.get(spec.work)
            candidate = reference_of(spec)
            references[spec.work] = candidate if known is None else _gentler(known, candidate)
    return references


def reference_of(spec: RunSpec) -> RunSpec:
    """The plain loop that does this spec's work on one process, in micro batches that surely fit."""
    length, own = spec.training.sequence_length, spec.training.micro_batch
    fitting = [size for size in range(1, own + 1) if own % size == 0 and size * length <= REFERENCE_TOKENS]
    micro_batch = max(fitting, default=1)
    training = replace(
        spec.training,
        micro_batch=micro_batch,
        accumulation=spec.global_batch // micro_batch,
        compile=False,
        bucket_mb=None,
    )
    variants = REFERENCE_VARIANTS[training.precision.compute]
    return replace(
        spec,
        workload=Choice("reference", {"variants": variants}),
        strategy=None,
        topology=Topology(device=spec.topology.device),
        training=training,
        launcher=_reference_launcher(spec.launcher),
        steps=min(spec.reference_steps, spec.steps),
        timeout_s=spec.timeout_s * spec.topology.world_size * variants,
        warmup=WarmUp(),
        repeat=0,
        checkpoint_every=None,
    )


def _reference_launcher(launcher: Choice) -> Choice:
    """Where the runs are: a controller need not have their devices. On this host options that change the arithmetic
    stay, those that change how ranks share it do not."""
    if not getattr(load("launchers", launcher.name), "HERE", False):
        return launcher
    return Choice("local", {k: v for k, v in launcher.options.items() if k in ("threads", "warm")})


def _gentler(known: RunSpec, candidate: RunSpec) -> RunSpec:
    """The longer trajectory, in the smaller micro batches of the two: any that fits will do."""
    best = min(known, candidate, key=lambda s: s.training.micro_batch)
    return replace(best, steps=max(known.steps, candidate.steps))


def campaign(
    specs: Sequence[RunSpec], out: Path, observer: Observer, *, retry: bool = False, tell: Tell = _untold
) -> list[Status]:
    """Run every spec that is not sealed yet, references first; returns the status of each. RequestError, and nothing is
    written, where an engine is known to take none of them. tell: what takes long before the first run begins."""
    references = references_of(specs)
    everything = [*references.values(), *specs]
    # Before anybody is asked: over ssh the question alone would disturb the run that another controller measures.
    store.require_free(out / specs[0].experiment)
    preflight(everything, out, retry, tell)
    ask_engines([spec for spec in everything if _is_left(spec, out, retry)])
    observer.begin(everything)
    statuses = []
    with store.exclusive(out / specs[0].experiment), closing(everything):
        write_plan(out / specs[0].experiment, everything)
        for asked in tuple(everything):
            series = [asked]
            for spec in series:
                statuses.append(_settle(spec, out, observer, references.get(spec.work), retry))
                if (following := _following(series, out)) is not None:
                    series.append(following)
                    everything.append(following)
                    write_plan(out / specs[0].experiment, everything)
                    observer.begin(everything)
    return statuses


@contextlib.contextmanager
def closing(specs: Sequence[RunSpec]) -> Iterator[None]:
    """Afterwards, close the launchers that keep something between jobs."""
    try:
        yield
    finally:
        for name in {spec.launcher.name for spec in specs}:
            getattr(load("launchers", name), "close", lambda: None)()


def preflight(specs: Sequence[RunSpec], out: Path, retry: bool, tell: Tell) -> None:
    """Ask each engine once whether it could begin any of the runs that are left for it. What is wrong with a request as
    a whole is one sentence; sealed as the failure of every run, it would have to be cleared away first. An engine that
    may hold a job of theirs from an earlier controller is not asked: what it would refuse today has begun before."""
    left: dict[str, list[RunSpec]] = {}
    for spec in specs:
        asked = hasattr(load("launchers", spec.launcher.name), "preflight")
        if asked and _is_left(spec, out, retry):
            left.setdefault(str(spec.launcher), []).append(spec)
    for group in left.values():
        name = group[0].launcher.name
        if any(supervision.is_adoptable(load("launchers", name), out / s.experiment / s.run_id) for s in group):
            continue
        # An engine that is away for a moment is asked again: for minutes by some, by ssh and ray once.
        slow = threading.Timer(SLOW_S, tell, [f"asking {name} whether it can take these runs"])
        slow.daemon = True
        slow.start()
        try:
            load("launchers", name).preflight(group)
        except LaunchError as refusal:
            raise RequestError(f"launcher {name}: {refusal}") from None
        finally:
            slow.cancel()


def ask_engines(specs: Sequence[RunSpec]) -> None:
    """Ask the engines of served models whether any of these runs could begin, where their client runs on this host.
    RequestError where none could; what holds for some is left to their records."""
    groups: dict[str, RunSpec] = {}
    for spec in specs:
        here = getattr(load("launchers", spec.launcher.name), "HERE", False)
        if spec.engine is None or not here or not hasattr(load("engines", spec.engine.name), "preflight"):
            return  # one that nobody is asked about may begin
        groups.setdefault(str(spec.engine), spec)
    refusals = []
    for spec in groups.values():
        assert spec.engine is not None
        try:
            load("engines", spec.engine.name).preflight(spec)
            return
        except UnsupportedError as refusal:
            refusals.append(f"engine {spec.engine.name}: {refusal}")
    if refusals:
        raise RequestError(refusals[0])


def _is_left(spec: RunSpec, out: Path, retry: bool) -> bool:
    return unsupported(spec) is None and _sealed_status(out / spec.experiment / spec.run_id, retry) is None


def _settle(spec: RunSpec, out: Path, observer: Observer, reference: RunSpec | None, retry: bool) -> Status:
    known = _sealed_status(out / spec.experiment / spec.run_id, retry)
    status, error = known if known is not None else execute(spec, out, observer, reference)
    observer.ended(spec, status, error, known is not None)
    return status


def leads_on(spec: RunSpec) -> bool:
    """Whether more runs may follow from what this one shows."""
    return hasattr(load("workloads", spec.workload.name), "follow")


def _following(series: Sequence[RunSpec], out: Path) -> RunSpec | None:
    """The run that the workload asks for after those of its series; one that was made already ends the series."""
    asked = series[0]
    if not leads_on(asked):
        return None
    records = [store.read_run(out / spec.experiment / spec.run_id) for spec in series]
    found: RunSpec | None = load("workloads", asked.workload.name).follow(asked, records)
    return None if found in series else found


def _sealed_status(run_dir: Path, retry: bool) -> tuple[Status, str | None] | None:
    if not store.is_sealed(run_dir):
        return None
    try:
        record = store.read_run(run_dir)
    except StoreError:
        return None
    return None if retry and not record.is_answer else (record.status, record.error)


def unsupported(spec: RunSpec) -> str | None:
    """The first reason why this spec cannot run, by arithmetic alone; wrong options raise RequestError."""
    trains = spec.is_certified or spec.checkpoint_every is None
    accepted = f"null with the workload {spec.workload.name}, which has no trajectory to go on with"
    require(trains, "checkpoint_every", spec.checkpoint_every, accepted)
    plugins = [("workloads", spec.workload), ("strategies", spec.strategy), ("launchers", spec.launcher)]
    reasons = (load(kind, choice.name).check(spec) for kind, choice in plugins if choice is not None)
    return next((str(reason) for reason in reasons if reason), None)


def execute(spec: RunSpec, out: Path, observer: Observer, reference: RunSpec | None) -> tuple[Status, str | None]:
    """One run from an empty folder to its seal, or from where a dead controller left it. Interrupted, it leaves a
    folder without a seal, which is run again, or gone on with where it writes checkpoints."""
    run_dir = out / spec.experiment / spec.run_id
    if (reason := unsupported(spec)) is not None:
        store.create(out, spec)
        store.seal(run_dir, Status.UNSUPPORTED, reason, time.time(), time.time())
        return Status.UNSUPPORTED, reason
    launcher: Launcher = load("launchers", spec.launcher.name)
    spec, launch = _take_up(launcher, spec, out)
    observer.started(spec, run_dir)
    asked_at = time.time()
    status, error, lost = restarts.see_through(launcher, launch, spec, run_dir, observer)
    started_at, ended_at = attempts.started_at(run_dir) or asked_at, time.time()
    if status is Status.OOM and is_advised(spec):
        advise(spec, run_dir, observer)
    if status is Status.OK:
        record = store.read_unsealed(run_dir, started_at=started_at, ended_at=ended_at)
        status, error = verdict(record, None if reference is None else out / spec.experiment / reference.run_id)
    store.seal(run_dir, status, error, started_at, ended_at, lost)
    return status, error


def _take_up(launcher: Launcher, spec: RunSpec, out: Path) -> tuple[RunSpec, Launch | None]:
    """The job that an earlier controller started; else a folder for the next attempt, or for the first one."""
    run_dir = out / spec.experiment / spec.run_id
    known = attempts.standing(run_dir, spec)
    launch = supervision.adopt(launcher, known, run_dir)
    if launch is not None:
        return known, launch
    return known if attempts.goes_on(run_dir, known) else attempts.begin(out, spec), None


def is_advised(spec: RunSpec) -> bool:
    """Whether other settings are looked for when memory does not do: a probe has its answer, and what a strategy from
    elsewhere does on fake tensors is not known."""
    known = spec.strategy is not None and "." not in spec.strategy.name
    return known and not spec.traits.probes_limit


def advise(spec: RunSpec, run_dir: Path, observer: Observer) -> None:
    """Have other settings rehearsed by a process of its own; what was told when its time is up stays told."""
    command = [sys.executable, "-m", "paceline.workloads.memory.adviser", str(run_dir)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    began = time.monotonic()
    with (run_dir / "advice.txt").open("wb") as log:
        child = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            while child.poll() is None and time.monotonic() - began < ADVICE_S:
                observer.advising(spec, time.monotonic() - began)
                time.sleep(POLL_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def verdict(record: RunRecord, reference_dir: Path | None) -> tuple[Status, str | None]:
    """ok, or invalid with the reasons of the certificate; a reference needs only finite losses.

    Agreement with the other runs of the group is checked again by every report, which sees them all.
    """
    if not record.spec.is_certified and not record.is_reference:
        wrong = comparable.problems(record)
        return (Status.INVALID, "; ".join(wrong)) if wrong else (Status.OK, None)
    if record.is_reference:
        finite = all(math.isfinite(sample.loss) for sample in record.steps)
        return (Status.OK, None) if finite else (Status.INVALID, "the reference's loss is not a number")
    reference = None
    if reference_dir is not None:
        with contextlib.suppress(StoreError):
            reference = store.read_run(reference_dir)
    certificate = certify(record, reference, peers=())
    return (Status.OK, None) if certificate.valid else (Status.INVALID, "; ".join(certificate.reasons))


def interruptible(work: Callable[[], list[Status]]) -> list[Status]:
    """Let a polite end (SIGTERM) take the same way out as Ctrl-C."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        return work()
    finally:
        signal.signal(signal.SIGTERM, previous)


def read_experiment(directory: Path) -> tuple[list[RunRecord], list[str]]:
    """Runs of a results folder, or of a capsule, for analysis; one that holds none is the user's mistake."""
    launches, unreadable = read_launches(directory)
    records, _, passed_over = store.newest(launches)
    return records, [*unreadable, *passed_over]


def read_launches(directory: Path) -> tuple[list[RunRecord], list[str]]:
    """As `read_experiment`, with every launch of a run that was repeated on another day."""
    if not directory.exists():
        raise RequestError(
            f"{str(directory)!r} was given, which is no folder; accepted is a results folder, a run or a capsule"
        )
    launches, skipped = store.read_launches(directory) if directory.is_dir() else capsule.read_runs(directory)
    if (directory / "spec.json").is_file() and launches:
        launches += capsule.references_beside(directory, launches[0])
    if not launches and not skipped:
        raise RequestError(f"{str(directory)!r} holds no run; accepted is a folder that `paceline run` has written")
    return launches, skipped
