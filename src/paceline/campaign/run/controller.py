"""The controller: the story of a campaign and of each run in it.

    campaign ── references, preflight, plan file ── for each run: execute
    execute  ── launch_once ── again if its trust light is red
    Proving  ── (`proofs`) a proof group for each work whose reference does not fit: it runs first and decides
    settle   ── more copies of the reference (`copies`) and a second verdict, if the certificate was refused narrowly
    launch_once ── check ── adopt or begin ── attempts (`supervision`) ── advise if out of memory ── verdict ── seal

Resuming a campaign means skipping the runs that are sealed.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.analysis.compare import comparable
from paceline.analysis.compare.precision import precision_of
from paceline.analysis.grouping import grouped
from paceline.analysis.training.certificate import certify
from paceline.analysis.training.trust import launch_trust
from paceline.campaign.run import checkpointing, copies, proofs, reference_cache, supervision
from paceline.campaign.run.references import runs_here, unsupported
from paceline.campaign.run.stopping import Stopping
from paceline.campaign.run.supervision import Observer
from paceline.contract import Launcher
from paceline.errors import LaunchError, RequestError, StoreError, UnsupportedError, require
from paceline.experiment import expansion, foreign, plugins
from paceline.experiment.plugins import load
from paceline.experiment.spec import RunSpec
from paceline.host import trust
from paceline.results import attempts, store
from paceline.results.campaign_file import write_plan
from paceline.results.records import RunRecord, Status, StepSample

POLL_S = 0.1
# Signals to stop that arrive within this time are one.
ONE_STOP_S = 2.0
# A large model takes some 15 s of one core for each of a dozen settings.
ADVICE_S = 300.0
# A disturbance that lasts through three launches will not end soon.
RED_REPEATS = 2
# The user is notified when an engine takes longer to say whether it can take the runs.
SLOW_S = 3.0
Notify = Callable[[str], None]


def campaign(
    specs: Sequence[RunSpec],
    out: Path,
    observer: Observer,
    *,
    retry: bool = False,
    keep_going: bool = False,
    notify: Notify = lambda _message: None,
    stopping: Stopping | None = None,
    partial: Callable[[Sequence[RunRecord]], str] = lambda _records: "",
    cache: bool = False,
    usd_per_hour: float | None = None,
) -> list[Status]:
    """Run every spec that is not sealed yet, references first, and return the status of each.

    RequestError, before anything is written, if an engine cannot take any of them. retry repeats runs that did not end
    ok. After a run that failed for a reason that would repeat, runs that would meet it too are left out,
    unless keep_going is true. notify gets messages about slow steps before the first run. With a stopping rule, cells
    are repeated until it is met; after each round notify gets the answer so far (`partial`) and what is still to come.
    cache: use references of earlier campaigns, and keep those of this one. usd_per_hour is the price of one device,
    for those who watch.
    """
    if stopping is not None:
        specs = stopping.planned(specs)
    proving = proofs.Proving(specs)
    # What an earlier command computed; which others will be needed, nobody knows yet.
    more = (copies.supplement_of(spec, copies.references(spec, out)) for spec in proving.references.values())
    supplements = [spec for spec in more if spec and store.is_sealed(out / spec.experiment / spec.run_id)]
    running = _Campaign(
        directory=out / specs[0].experiment,
        observer=observer,
        notify=notify,
        retry=retry,
        cache=cache,
        usd_per_hour=usd_per_hour,
        stopping=stopping,
        partial=partial,
        repeats=RedRepeats(red_repeats()),
        obstacles=Obstacles(keep_going),
        proving=proving,
        runs=[*proving.runs, *supplements, *specs],
    )
    # Checked first: over ssh, even preflight would disturb a run that another controller measures.
    store.require_free(running.directory)
    preflight(running.runs, out, retry, notify)
    ask_plugins([spec for spec in running.runs if running.is_left(spec)])
    if left := [spec for spec in specs if running.is_left(spec)]:
        notify(light_before(left))
        for line in proving.lines():
            notify(line)
    with store.exclusive(running.directory), closing(running.runs):
        running.carry_out()
    if running.obstacles.left_out:
        notify(running.obstacles.text())
    return running.statuses


@dataclass(kw_only=True)
class _Campaign:
    """A campaign while it runs. runs: what is planned, in order, and what followed from it. announced: what those who
    watch know of. statuses: of each run that ended."""

    directory: Path
    observer: Observer
    notify: Notify
    retry: bool
    cache: bool
    usd_per_hour: float | None
    stopping: Stopping | None
    partial: Callable[[Sequence[RunRecord]], str]
    repeats: RedRepeats
    obstacles: Obstacles
    proving: proofs.Proving
    runs: list[RunSpec]
    announced: list[RunSpec] = field(default_factory=list)
    statuses: list[Status] = field(default_factory=list)

    @property
    def out(self) -> Path:
        return self.directory.parent

    def is_left(self, spec: RunSpec) -> bool:
        return _is_left(spec, self.out, self.retry)

    def carry_out(self) -> None:
        self.announce(self.runs)
        for spec in self.proving.runs:
            self.reuse(spec)
        if self.stopping is not None:
            self.run_until(self.stopping)
            return
        for requested in tuple(self.runs):
            self.run(requested)

    def announce(self, planned: Sequence[RunSpec]) -> None:
        self.announced[:] = planned
        rule = None if self.stopping is None else self.stopping.text
        write_plan(self.directory, planned, rule, self.usd_per_hour)
        self.observer.begin(planned)

    def add(self, following: Sequence[RunSpec]) -> None:
        """Plan runs that follow from what was found."""
        self.runs.extend(following)
        self.announce([*self.announced, *following])

    def reuse(self, spec: RunSpec) -> None:
        """Copy a reference or a proof of an earlier campaign if there is one."""
        if self.cache and self.is_left(spec) and (kept := reference_cache.reuse(spec, self.out)) is not None:
            self.notify(reused_text(kept))

    def run(self, requested: RunSpec) -> float:
        """One planned run and, for a search, all that follow from it. Returns how long they took, in seconds."""
        series, took = [requested] if self.proving.is_current(requested) else [], 0.0
        for spec in series:
            begun = time.monotonic()
            found = self.launch(spec)
            took += time.monotonic() - begun
            if found is None:
                continue
            (status, is_new), reference = found, self.proving.references.get(spec.work)
            if status is Status.INVALID and reference is not None and spec.is_certified:
                status = self.settle(spec, reference)
            self.statuses.append(status)
            if self.cache and is_new and status is Status.OK and spec.proves_only:
                reference_cache.keep(spec, self.directory / spec.run_id)
            if status is Status.OOM and spec == reference:
                took += self.prove_on_less(spec)
            if not leads_on(requested):
                continue
            # A search: the workload derives the next run from the results, until it repeats itself.
            records = read_finished(self.directory / each.run_id for each in series)
            if len(records) < len(series):
                continue
            following = load("workloads", requested.workload.name).follow(requested, records)
            if following is not None and following not in series:
                series.append(following)
                self.add([following])
        return took

    def launch(self, spec: RunSpec) -> tuple[Status, bool] | None:
        """Launch the run if it is left: how it ended, and whether that was now; None if an obstacle blocks it."""
        sealed = _sealed_status(self.directory / spec.run_id, self.retry)
        refused = None if sealed else self.proving.refusal(spec, self.out)
        if sealed is None and refused is None and self.obstacles.block(spec):
            self.obstacles.left_out.append(spec)
            return None
        if refused is not None:
            status, error = refuse(spec, self.out, refused)
        else:
            reference = self.proving.references.get(spec.work)
            judges = functools.partial(self.proving.judges, spec, self.out)
            status, error = sealed or execute(
                spec, self.out, self.observer, reference, self.notify, self.repeats, self.obstacles, judges
            )
        self.observer.ended(spec, status, error, sealed is not None)
        return status, sealed is None

    def settle(self, spec: RunSpec, reference: RunSpec) -> Status:
        """The status of an invalid run after a second verdict with more copies of the reference, if it was refused
        narrowly."""
        known = copies.references(reference, self.out)
        refused = copies.narrow_refusal(copies.read(spec, self.out), known)
        supplement = copies.supplement_of(reference, known)
        if refused is None or supplement is None:
            return Status.INVALID
        is_new = not store.is_sealed(self.directory / supplement.run_id)
        if is_new:
            beyond = copies.refusal_text(refused, reference)
            self.notify(f"{spec.run_id}: {beyond}. Computing {copies.MORE} more to tell rounding from a mistake.")
            self.add([supplement])
            self.reuse(supplement)
            self.run(supplement)
        status, text = judge_again(spec, self.out, copies.references(reference, self.out))
        if is_new or status is Status.OK:
            self.notify(f"{spec.run_id}: {text}.")
        return status

    def prove_on_less(self, reference: RunSpec) -> float:
        """Run the proof group that follows because this reference ran out of memory. Returns how long it took."""
        following = self.proving.after_oom(reference)
        if following:
            self.notify(self.proving.groups[reference.group_work].text)
            self.announced[:] = filter(self.proving.is_current, self.announced)
            self.add(following)
            for spec in following:
                self.reuse(spec)
        return sum(map(self.run, following))

    def run_until(self, stopping: Stopping) -> None:
        """Carry out the planned runs and then rounds of repeats until the rule is met; `runs` is then what was run."""
        self.notify(stopping.text)
        began, planned = time.monotonic(), list(self.runs)
        self.runs.clear()
        took: dict[str, float] = {}
        while planned:
            for spec in planned:
                # The first launch of a cell is always made: nobody knows how long it takes.
                if stopping.affords(took.get(spec.cell, 0.0), time.monotonic() - began):
                    self.runs.append(spec)
                    took[spec.cell] = self.run(spec)
            records = read_finished(self.directory / spec.run_id for spec in self.runs)
            known, spent_s = precision_of(records), time.monotonic() - began
            # A launch takes longer than its steps: a rank imports torch, and the certificate is checked.
            known = {cell: replace(own, seconds=max(own.seconds, took.get(cell, 0.0))) for cell, own in known.items()}
            gpus = {spec.cell: spec.topology.world_size for spec in self.runs}
            for message in filter(None, (self.partial(records), stopping.outlook(known, spent_s, gpus))):
                self.notify(message)
            following = stopping.next_round([spec for spec in self.runs if not spec.proves_only], known, spent_s)
            planned = [spec for spec in following if not self.obstacles.block(spec)]
            self.announce([*self.runs, *planned])


@dataclass
class Obstacles:
    """Runs that failed for a reason that would repeat: no image, no nodes, no quota, no permission. Runs on the same
    launcher that need at least as many nodes are left out: each would wait, often for minutes, and fail the same way.
    """

    keep_going: bool
    met: list[RunSpec] = field(default_factory=list)
    left_out: list[RunSpec] = field(default_factory=list)

    def block(self, spec: RunSpec) -> bool:
        return not self.keep_going and any(
            spec.launcher == failed.launcher and spec.topology.nodes >= failed.topology.nodes for failed in self.met
        )

    def text(self) -> str:
        count = len(self.left_out)
        runs = "1 run was" if count == 1 else f"{count} runs were"
        return (
            f"{runs} not started: {self.met[0].run_id} failed for a reason that would repeat. Fix it and run "
            "the same command with --resume, or use --keep-going to start every run."
        )


def reused_text(record: RunRecord) -> str:
    """One line about a reference or a proof that is not computed again."""
    at, spec = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.started_at)), record.spec
    what = f"reference of {spec.model}" if record.is_reference else f"proof of {spec.strategy} on {spec.model}"
    return f"{what}: reused from {at}, with equal request, software and machine (--no-cache)"


def _is_reference(spec: RunSpec) -> bool:
    return spec.workload.name == "reference"


# --- before the first run ---


def preflight(specs: Sequence[RunSpec], out: Path, retry: bool, notify: Notify) -> None:
    """Ask each launcher once whether it can take the unfinished runs; RequestError if it cannot take any.

    One error for the whole request is better than a sealed failure for every run. A launcher that may still have a job
    from an earlier controller is not asked: what it would refuse today has already begun.
    """
    askable = [spec for spec in specs if hasattr(load("launchers", spec.launcher.name), "preflight")]
    left = [spec for spec in askable if _is_left(spec, out, retry)]
    for group in grouped(left, lambda spec: str(spec.launcher)).values():
        name = group[0].launcher.name
        if any(supervision.is_adoptable(load("launchers", name), out / s.experiment / s.run_id) for s in group):
            continue
        # Some launchers retry an unreachable engine for minutes.
        slow = threading.Timer(SLOW_S, notify, [f"waiting for {name} to accept these runs"])
        slow.daemon = True
        slow.start()
        try:
            load("launchers", name).preflight(group)
        except LaunchError as refusal:
            raise RequestError(f"launcher {name}: {refusal}") from None
        finally:
            slow.cancel()


def expect(specs: Sequence[RunSpec], out: Path) -> None:
    """Tell the launchers which runs will follow, as soon as that is known. RequestError if another controller runs in
    that directory, which must not be disturbed."""
    store.require_free(out / specs[0].experiment)
    left = [spec for spec in specs if not store.is_sealed(out / spec.experiment / spec.run_id)]
    for name, runs in grouped(left, lambda spec: spec.launcher.name).items():
        getattr(load("launchers", name), "expect", lambda _runs: None)(runs)


def light_before(specs: Sequence[RunSpec]) -> str:
    """One line: the trust light of this host, if these runs use it."""
    devices = {spec.topology.device for spec in specs if runs_here(spec)}
    if not devices:
        return "trust: unknown before the first run: other hosts run it. They are graded during each run."
    return trust.before(uses_cpu="cpu" in devices, uses_gpu="cuda" in devices).line()


def ask_plugins(specs: Sequence[RunSpec]) -> None:
    """Ask the engines and workloads that can be asked whether any of these runs can begin, if they would run here.

    RequestError if none can; a plugin that refuses only some of the runs appears in their records.
    """
    refusals = []
    groups = grouped(specs, lambda spec: str(spec.engine) if spec.engine else spec.cell)
    for spec in (group[0] for group in groups.values()):
        kind, choice = ("engines", spec.engine) if spec.engine else ("workloads", spec.workload)
        plugin = load(kind, choice.name)
        if not runs_here(spec) or not hasattr(plugin, "preflight"):
            return  # this one may begin
        try:
            plugin.preflight(spec)
            return
        except UnsupportedError as refusal:
            refusals.append(f"engine {choice.name}: {refusal}" if spec.engine else str(refusal))
    if refusals:
        raise RequestError(refusals[0])


def load_own(
    source: str,
    settings: Sequence[str] = (),
    launcher: str | None = None,
    benchmark: str = "all",
    counts: Mapping[str, int] | None = None,
    *,
    allow: Collection[str] = (),
    notify: Notify = lambda _message: None,
) -> list[RunSpec]:
    """The runs of an experiment, each checked by its plugins. notify gets what was chosen for the user.

    RequestError if it is somebody else's file and names modules or programs that the user does not allow.
    """
    allowed = foreign.allowed_names(allow)
    given = {expansion.parse_setting(text)[0] for text in settings} | ({"launcher"} if launcher is not None else set())
    # What the command line names is the user's own choice.
    own = launcher and expansion.given_launcher(launcher, None)
    named = set(re.findall(r"[\w.]+", " ".join((own or "", *settings))))

    def may_import(name: str) -> bool:
        return foreign.is_own(source) or foreign.is_allowed(name, allowed) or name in named

    with plugins.imports_limited(source, may_import):
        specs = expansion.load(source, settings, launcher, benchmark, counts)
        for spec in specs:
            unsupported(spec)
    foreign.require_own(source, specs, given, allowed)
    return checkpointing.chosen(specs, notify)


def leads_on(spec: RunSpec) -> bool:
    """Whether more runs may follow from the results of this one."""
    return hasattr(load("workloads", spec.workload.name), "follow")


def _is_left(spec: RunSpec, out: Path, retry: bool) -> bool:
    return unsupported(spec) is None and _sealed_status(out / spec.experiment / spec.run_id, retry) is None


def read_finished(run_dirs: Iterable[Path]) -> list[RunRecord]:
    """The records of the runs that are finished; a run that was damaged since is left out."""
    records = []
    for run_dir in run_dirs:
        with contextlib.suppress(StoreError):
            records.append(store.read_run(run_dir))
    return records


def _sealed_status(run_dir: Path, retry: bool) -> tuple[Status, str | None] | None:
    """Status and error of a finished run; None if it has to run (again), as a damaged one does."""
    if not store.is_sealed(run_dir):
        return None
    try:
        record = store.read_run(run_dir)
    except StoreError:
        return None
    return None if retry and not record.is_answer else (record.status, record.error)


@contextlib.contextmanager
def closing(specs: Sequence[RunSpec]) -> Iterator[None]:
    """Afterwards, close the launchers that keep something between jobs."""
    try:
        yield
    finally:
        for name in {spec.launcher.name for spec in specs}:
            getattr(load("launchers", name), "close", lambda: None)()


# --- one run ---


@dataclass(slots=True)
class RedRepeats:
    """How often a launch with a red trust light is repeated. After a run that stayed red in each launch, the next ones
    are launched once, until one of them is not red: a disturbance that lasts would triple the time of a campaign.
    reported: the user knows that it lasts."""

    most: int
    lasts: bool = False
    reported: bool = False


def execute(
    spec: RunSpec,
    out: Path,
    observer: Observer,
    reference: RunSpec | None,
    notify: Notify = lambda _message: None,
    repeats: RedRepeats | None = None,
    obstacles: Obstacles | None = None,
    judges: Callable[[], Sequence[RunRecord]] = tuple,
) -> tuple[Status, str | None]:
    """Launch a run, and launch it again while its trust light is red and repeats are left.

    The last launch counts, unless it did not end ok: a disturbed measurement is better than none. The others stay in
    attempts/ of its directory. A launch that was restarted is not repeated: another one would not measure what its
    restarts cost. Neither is one whose ranks share a GPU, which says nothing about speed. obstacles notes a run that
    failed for a reason that would repeat. judges: finished runs that judge this one beside the reference.
    """
    repeats = repeats or RedRepeats(red_repeats())
    run_dir, most = out / spec.experiment / spec.run_id, 0 if repeats.lasts else repeats.most
    status, error, light = launch_once(spec, out, observer, reference, obstacles, judges)
    restarted, repeated = attempts.restarts(run_dir) > 0, 0
    most = 0 if restarted or spec.launcher.options.get("shared_gpu") else most
    while light is not None and light.is_worth_repeating and repeated < most:
        repeated += 1
        notify(f"{light.line(f' during {spec.run_id}')} Launching it again (extra launch {repeated} of {most}).")
        earlier, again = store.last_set_aside(run_dir) + 1, None
        try:
            again = launch_once(spec, out, observer, reference, judges=judges)
        finally:
            if again is not None and again[0] is Status.OK:
                status, error, light = again
            elif (run_dir / store.EARLIER / str(earlier)).is_dir():
                store.restore(run_dir, earlier)
            store.note_repeats(run_dir, repeated)
    if light is not None:
        still = light.is_worth_repeating
        why = ""
        if still and repeats.lasts:
            why = " Not launched again, because the run before stayed red. The report lists further red runs."
        if light.disturbances and not (why and repeats.reported):
            # The same advice after every amber run would be noise.
            notify(f"{light.line(f' during {spec.run_id}', with_fix=light.level == trust.RED)}{why}")
        repeats.reported = bool(why)
        repeats.lasts = still and repeats.most > 0 and (repeats.lasts or not restarted)
    return status, error


def red_repeats() -> int:
    """How often a launch with a red light is repeated: RED_REPEATS, or the number in PACELINE_RED_REPEATS."""
    text = os.environ.get("PACELINE_RED_REPEATS", str(RED_REPEATS))
    require(text.isdecimal() and len(text) < 4, "PACELINE_RED_REPEATS", text, "a whole number, 0 or more")
    return int(text)


def launch_once(
    spec: RunSpec,
    out: Path,
    observer: Observer,
    reference: RunSpec | None,
    obstacles: Obstacles | None = None,
    judges: Callable[[], Sequence[RunRecord]] = tuple,
) -> tuple[Status, str | None, trust.Trust | None]:
    """One launch from an empty directory, or from where a dead controller left it, to its seal; and its trust light.

    An interrupted run leaves a directory without a seal. It is run again, or resumed if it writes checkpoints.
    """
    run_dir = out / spec.experiment / spec.run_id
    if (reason := unsupported(spec)) is not None:
        store.create(out, spec)
        store.seal(run_dir, Status.UNSUPPORTED, reason, time.time(), time.time())
        return Status.UNSUPPORTED, reason, None
    launcher: Launcher = load("launchers", spec.launcher.name)
    known = attempts.with_lineage(run_dir, spec)
    launch = supervision.adopt(launcher, known, run_dir)
    spec = known if launch is not None or attempts.can_continue(run_dir, known) else attempts.begin(out, spec)
    observer.started(spec, run_dir)
    requested_at = time.time()
    ended = supervision.run_attempts(launcher, launch, spec, run_dir, observer)
    status, error = ended.status, ended.error
    if ended.recurs and obstacles is not None:
        obstacles.met.append(spec)
    started_at, ended_at = attempts.started_at(run_dir) or requested_at, time.time()
    if status is Status.OOM and is_advised(spec):
        advise(spec, run_dir, observer)
    light: trust.Trust | None = None
    steps: Sequence[StepSample] = ()
    if status is Status.OK:
        try:
            record = store.read_unsealed(run_dir, started_at=started_at, ended_at=ended_at)
            status, error = verdict(record, [*copies.references(reference, out), *judges()])
            light, steps = (launch_trust(record) if status is Status.OK else None), record.steps
        except StoreError as damage:
            # A node may have left anything. The other runs of the campaign go on.
            status, error = Status.FAILED, str(damage).removeprefix(f"{run_dir}: ")
    store.seal(run_dir, status, error, started_at, ended_at, ended.lost, steps)
    return status, error, light


def refuse(spec: RunSpec, out: Path, reason: str) -> tuple[Status, str | None]:
    """The status of a run that is not started, because its work cannot be proved equal; sealed as invalid."""
    run_dir = store.create(out, spec)
    store.seal(run_dir, Status.INVALID, reason, time.time(), time.time())
    return Status.INVALID, reason


def is_advised(spec: RunSpec) -> bool:
    """Whether to look for fitting settings after an out-of-memory error: not for a probe, which has its answer, nor for
    an external strategy, whose behaviour on fake tensors is unknown."""
    known = spec.strategy is not None and "." not in spec.strategy.name
    return known and not spec.traits.probes_limit


def advise(spec: RunSpec, run_dir: Path, observer: Observer) -> None:
    """Try other settings in a separate process, for at most ADVICE_S seconds; what it found until then is kept."""
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


def verdict(record: RunRecord, references: Sequence[RunRecord]) -> tuple[Status, str | None]:
    """ok, or invalid with the reasons of the certificate; a reference only needs finite losses. references: of its
    work, or its proof group.

    Every report checks the agreement with the other runs of the group again, because it sees them all.
    """
    if not record.spec.is_certified and not record.is_reference:
        problems = comparable.problems(record)
        return (Status.INVALID, "; ".join(problems)) if problems else (Status.OK, None)
    if record.is_reference:
        finite = all(math.isfinite(sample.loss) for sample in record.steps)
        return (Status.OK, None) if finite else (Status.INVALID, "the reference's loss is not a number")
    certificate = certify(record, references[0] if references else None, (), references[1:])
    return (Status.OK, None) if certificate.valid else (Status.INVALID, "; ".join(certificate.reasons))


def judge_again(spec: RunSpec, out: Path, references: Sequence[RunRecord]) -> tuple[Status, str]:
    """Judge a sealed run with all references of its work, and change its seal if they decide otherwise. Returns the
    status, and what was decided in words."""
    run_dir = out / spec.experiment / spec.run_id
    record = store.read_run(run_dir)
    status, error = verdict(record, references)
    if (status, error) != (record.status, record.error):
        store.note_verdict(run_dir, status, error)
    if not any(one.is_supplement and one.status is Status.OK for one in references):
        return status, "still invalid, because no more re-seeded references could be computed"
    decided = "valid" if status is Status.OK else "still invalid"
    return status, f"{decided} with the limit of {copies.count(references)} re-seeded references"


# --- for the verbs ---


def interruptible(work: Callable[[], list[Status]]) -> list[Status]:
    """Call work; SIGTERM ends it like Ctrl-C.

    `timeout` and some shells signal a process and its group, so two arrive at once. The second must not interrupt the
    cancelling that the first began: it counts only after ONE_STOP_S, when someone does not want to wait any longer.
    """
    stopped_at = -math.inf

    def stop(*_: object) -> None:
        nonlocal stopped_at
        again_s = time.monotonic() - stopped_at
        if again_s > ONE_STOP_S:
            stopped_at = time.monotonic()
            raise KeyboardInterrupt

    # What the shell ignores, as Ctrl-C for a command in the background, stays ignored.
    numbers = [n for n in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(n) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, stop) for number in numbers}
    try:
        return work()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
