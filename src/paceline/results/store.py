"""Run directories: create, write, seal, read, iterate.

DIR/<experiment>/<run_id>/
  spec.json           the run spec (controller, first)
  job.json            how the job was started, so that a later controller finds it
  progress-<rank>     current position of the rank: step, phase, time (binary, overwritten in place)
  samples-<rank>.jsonl, outcome-<rank>.json, machine-<host>.json    written by ranks
  samples-gauges-<rank>.jsonl   readings of GPUs and host during the run (first rank of a host)
  samples-advice.jsonl    after an out-of-memory error: predictions for other settings (adviser)
  loadgen-*-<rank>.*  LoadGen's own logs, if it sent requests
  steps.npy, samples-all.jsonl    in a sealed run, instead of the samples of ranks: all steps as columns, all others
  log.txt             everything the processes printed
  clocks.json         clock offsets of other hosts, if some took part
  status.json         how it ended, with a digest of each file (controller, last): without it, not complete
  checkpoints/        the last two checkpoints; removed when the run ended ok
  samples-<rank>.<n>.jsonl, samples-attempts.jsonl, restarts/<n>/    lost attempts of this launch
  attempts/<n>/       files of earlier launches: interrupted, or repeated because their trust light was red
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import mmap
import os
import re
import shutil
import struct
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO, TypeVar

from paceline.errors import RequestError, StoreError, damaged
from paceline.experiment.spec import RunSpec
from paceline.host import redaction
from paceline.host.files import LARGEST_DOCUMENT_BYTES, document_of, write_atomically
from paceline.host.processes import forked_pool
from paceline.models.shape import Shape
from paceline.results import columns, safe_text, samples, sealing
from paceline.results.records import SAMPLE_TYPES, SCHEMA, End, Evidence, Outcome, RunRecord, Sample, Status, StepSample
from paceline.results.samples import StepSeries
from paceline.results.validity import Rule, machine_rule, rule_of

PHASES = (
    *("start", "setup", "data", "forward", "backward", "optimizer", "checkpoint"),
    *("warmup", "timing", "verify", "done"),
)
JOB, LOG = "job.json", "log.txt"
# The last part is a note: free text of the workload.
_PROGRESS = struct.Struct("<qqqddd120s")
CHECKPOINTS = "checkpoints"
EARLIER = "attempts"
# Files of ranks besides samples and progress, moved aside so that they do not pass for those of a later attempt.
LEFT_BY_RANKS = ("outcome-*.json", "machine-*.json", "stack-*.txt", "loadgen-*", "trace-*")
# With fewer runs, starting processes takes longer than it saves.
PARALLEL_FROM = 100
# With fewer in a share, handing it over takes longer.
LEAST_SHARE = 10
MOST_READERS = 8


# --- writing -------------------------------------------------------------------------------------------------------


def write_json(path: Path, value: object) -> None:
    """Write the file atomically."""
    write_atomically(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def create(out: Path, spec: RunSpec) -> Path:
    """Create the directory of a fresh launch; files of an interrupted one move to attempts/."""
    run_dir = out / spec.experiment / spec.run_id
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"--out: cannot create a directory in {str(out)!r} ({error.strerror}).") from None
    # Nothing continues from these checkpoints, and they are large.
    shutil.rmtree(run_dir / CHECKPOINTS, ignore_errors=True)
    set_aside(run_dir)
    write_json(run_dir / "spec.json", spec.to_dict())
    return run_dir


def set_aside(run_dir: Path) -> None:
    """Move the files of a launch to attempts/<n>, if there are any."""
    if left := [path for path in run_dir.iterdir() if path.name != EARLIER]:
        target = run_dir / EARLIER / str(last_set_aside(run_dir) + 1)
        target.mkdir(parents=True)
        # The seal first: without it, the directory is not complete.
        for path in sorted(left, key=lambda path: path.name != sealing.FILE):
            path.rename(target / path.name)


def last_set_aside(run_dir: Path) -> int:
    """The number of the newest launch in attempts/, 0 if there is none."""
    # Other names in there belong to users or to a scheduler.
    return max((int(path.name) for path in run_dir.glob(f"{EARLIER}/*") if path.name.isdecimal()), default=0)


def restore(run_dir: Path, number: int) -> None:
    """Exchange the launch in the directory for an earlier one: attempts/<number>."""
    set_aside(run_dir)
    source = run_dir / EARLIER / str(number)
    # The seal last: without it, the directory is not complete.
    for path in sorted(source.iterdir(), key=lambda path: path.name == sealing.FILE):
        path.rename(run_dir / path.name)
    source.rmdir()


def note_repeats(run_dir: Path, count: int) -> None:
    """Add to the seal how often the run was launched again because of its trust light."""
    sealing.amend(run_dir, repeated=count)


def note_verdict(run_dir: Path, status: Status, error: str | None) -> None:
    """Replace how a sealed run ended, after it was judged again."""
    sealing.amend(run_dir, status=status, error=error and redaction.clean_text(error))


def seal(
    run_dir: Path,
    status: Status,
    error: str | None,
    started_at: float,
    ended_at: float,
    lost: Sequence[int] = (),
    steps: Sequence[StepSample] = (),
) -> None:
    """Write the last file of a run. lost: nodes that were lost and that the run continued without. steps: those of the
    run if they were read already; they are stored as columns then, instead of the lines of the ranks."""
    error = error and redaction.clean_text(error)
    if (log := run_dir / LOG).is_file():
        redaction.mask_log(log, os.environ)
    body = {"schema": SCHEMA, "status": status, "error": error, "started_at": started_at, "ended_at": ended_at}
    body |= {"lost_nodes": list(lost)} if lost else {}
    if replaced := columns.write(run_dir, StepSeries.of(steps)):
        body[sealing.REPLACED] = replaced
    sealing.write(run_dir, body)


def is_sealed(run_dir: Path) -> bool:
    return (run_dir / sealing.FILE).is_file()


@contextlib.contextmanager
def exclusive(experiment_dir: Path) -> Iterator[None]:
    """Lock an experiment for one controller at a time; the lock ends with the process."""
    try:
        experiment_dir.mkdir(parents=True, exist_ok=True)
        handle = (experiment_dir / ".lock").open("a")
    except OSError as error:
        raise RequestError(f"--out: cannot write in {experiment_dir} ({error.strerror}).") from None
    with handle:
        _lock(handle, experiment_dir)
        yield


def require_free(experiment_dir: Path) -> None:
    """RequestError if a controller currently writes into the experiment. Creates nothing: if the lock cannot be opened,
    there is none yet, or `exclusive` reports the problem."""
    with contextlib.suppress(OSError), (experiment_dir / ".lock").open("r+") as handle:
        _lock(handle, experiment_dir)


def _lock(handle: TextIO, experiment_dir: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise RequestError(
            f"{experiment_dir} is in use by another `paceline run`. Wait for it, or use --out."
        ) from None


# --- progress ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Progress:
    """The last known position of a rank. beat: wall time of that mark. loss: the last one recorded. peak_bytes: the
    highest memory reported so far. note: free text of the workload."""

    rank: int
    pid: int
    step: int
    phase: str
    beat: float
    loss: float
    peak_bytes: int | None = None
    note: str = ""


class ProgressFile:
    """One rank's position in a memory-mapped file; a mark takes well under a microsecond."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        path = run_dir / f"progress-{rank}"
        self._pid = os.getpid()
        # NaN means not known yet: the binary format has no None.
        self.loss = self.peak_bytes = math.nan
        path.write_bytes(_PROGRESS.pack(self._pid, 0, 0, time.time(), self.loss, self.peak_bytes, b""))
        with path.open("r+b") as handle:
            self._map = mmap.mmap(handle.fileno(), _PROGRESS.size)

    def mark(self, step: int, phase: str) -> None:
        """phase: `timing`, or with a note of the workload: `timing: 412 of 662 needed`."""
        name, _, words = (phase, "", "") if phase in PHASES else phase.partition(": ")
        number, note = PHASES.index(name) if name in PHASES else 1, words.encode()
        _PROGRESS.pack_into(self._map, 0, self._pid, step, number, time.time(), self.loss, self.peak_bytes, note)


def read_progress(run_dir: Path) -> tuple[Progress, ...]:
    """The progress of every rank that has started, in rank order. Files that no rank can have written are ignored."""
    positions = []
    for rank in _ranks_with_progress(run_dir):
        # Not through Path: a run may have thousands of ranks, and they are read every second.
        try:
            descriptor = os.open(f"{run_dir}/progress-{rank}", os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            raw = os.read(descriptor, _PROGRESS.size + 1)
        except OSError:
            continue
        finally:
            os.close(descriptor)
        if len(raw) != _PROGRESS.size:
            continue
        pid, step, phase, beat, loss, peak, note = _PROGRESS.unpack(raw)
        if not 0 <= phase < len(PHASES) or pid < 1 or step < 0 or not math.isfinite(beat) or math.isinf(peak):
            continue
        words = note.rstrip(b"\0")
        text = safe_text.text(words.decode(errors="ignore")) if words else ""
        peak_bytes = None if math.isnan(peak) else int(peak)
        positions.append(Progress(rank, pid, step, PHASES[phase], beat, loss, peak_bytes, text))
    return tuple(positions)


def _ranks_with_progress(run_dir: Path) -> list[int]:
    """The numbers in the names of the progress files, in order."""
    with contextlib.suppress(FileNotFoundError), os.scandir(run_dir) as entries:
        names = [entry.name for entry in entries]
        numbers = [name.removeprefix("progress-") for name in names if name.startswith("progress-")]
        return sorted(int(number) for number in numbers if _RANK_NUMBER.fullmatch(number))
    return []


# --- reading -------------------------------------------------------------------------------------------------------


def read_run(run_dir: Path) -> RunRecord:
    """The record of a finished run; StoreError if it is not finished, DamagedRunError if it is not what was sealed."""
    if not is_sealed(run_dir):
        raise StoreError(f"{run_dir}: not finished (running or interrupted)")
    kept: dict[str, bytes] = {}

    def keep(name: str, content: bytes) -> None:
        # A document that is larger than any is rejected where it is read.
        if len(content) <= LARGEST_DOCUMENT_BYTES or not _DOCUMENTS.fullmatch(name):
            kept[name] = content

    # Lines of steps are parsed where they are read: kept, they would take as much memory as the run.
    seal = sealing.read(run_dir, keep, lambda body: sealing.READ if columns.replace_lines(body) else _DOCUMENTS)
    steps = columns.read(run_dir, seal, kept.pop(columns.FILE, None))
    record = _assemble(run_dir, _end_of(run_dir, seal), seal["files"], steps, kept)
    if run_dir.name != record.spec.run_id or run_dir.is_symlink():
        name = run_dir.resolve().name
        # Characters that were made safe to print count as they are.
        if record.spec.run_id != name and spec_of((run_dir / "spec.json").read_text(encoding="utf-8")).run_id != name:
            raise damaged(run_dir, f"the directory is not named {record.spec.run_id!r}, as its spec.json says")
    return record


_SAMPLES = re.compile(r"samples-.*\.jsonl", re.DOTALL)
_OUTCOME = re.compile(r"outcome-.*\.json", re.DOTALL)
_MACHINE = re.compile(r"machine-.*\.json", re.DOTALL)
_DOCUMENTS = re.compile(rf"spec\.json|{_OUTCOME.pattern}|{_MACHINE.pattern}", re.DOTALL)


def read_columns(run_dir: Path) -> StepSeries | None:
    """The steps of a finished run if they are stored as columns; DamagedRunError as in `read_run`."""
    return columns.read(run_dir, sealing.read(run_dir))


def read_end(run_dir: Path) -> End:
    """How a finished run ended; DamagedRunError if one of its files is not what was sealed."""
    return _end_of(run_dir, sealing.read(run_dir))


def _end_of(run_dir: Path, body: Mapping[str, Any]) -> End:
    with _naming(run_dir, sealing.FILE):
        own = {name: safe_text.value(body[name]) for name in _END_FIELDS if name in body}
        raw = _checked(own, rule_of(End))
        error = raw["error"] and redaction.clean_text(raw["error"])
        lost = tuple(raw.get("lost_nodes", ()))
        return End(**{**raw, "status": Status(raw["status"]), "error": error, "lost_nodes": lost})


_END_FIELDS = tuple(field.name for field in dataclasses.fields(End))


@contextlib.contextmanager
def _naming(run_dir: Path, name: str) -> Iterator[None]:
    """Turn what is wrong with the content of a file into damage that names the file."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, RequestError) as error:
        # One line, however much of the file the message repeats.
        raise damaged(run_dir, f"{name}: {' '.join(str(error)[:300].split())}") from None


def _checked(raw: dict[str, Any], rule: Rule) -> dict[str, Any]:
    if (problem := rule.problem(raw)) is not None:
        raise ValueError(problem)
    return raw


def read_unsealed(run_dir: Path, ended_at: float, started_at: float) -> RunRecord:
    """The record of a run without status.json, which the controller reads before it decides the status.

    DamagedRunError if a file that a rank left cannot be used.
    """
    end = End(status=Status.OK, error=None, started_at=started_at, ended_at=ended_at)
    # The columns are of a controller that was killed before it sealed the run: the lines are still there.
    names = {*os.listdir(run_dir)} - {columns.OTHERS}  # noqa: PTH208 - names are enough
    return _assemble(run_dir, end, names)


def _assemble(
    run_dir: Path,
    end: End,
    names: Iterable[str],
    steps: StepSeries | None = None,
    kept: Mapping[str, bytes] = MappingProxyType({}),
) -> RunRecord:
    """names: of the files of the run. steps: those of the run, if they need not be read from its lines. kept: the
    content of files that were read already."""
    paths = [run_dir / name for name in sorted(filter(_SAMPLES.fullmatch, names))]
    joined = samples.read(paths) if steps is None else samples.Joined([], [], samples.others_of(paths, kept))
    by_kind: dict[str, list[Sample]] = {}
    for sample in joined.others:
        by_kind.setdefault(sample.kind, []).append(sample)
    return RunRecord(
        **{name: getattr(end, name) for name in _END_FIELDS},
        spec=read_spec(run_dir, kept.get("spec.json")),
        path=str(run_dir),
        outcomes=_outcomes(run_dir, filter(_OUTCOME.fullmatch, names), kept),
        machines=_machines(run_dir, filter(_MACHINE.fullmatch, names), kept),
        steps=StepSeries(joined.steps) if steps is None else steps,
        redone=StepSeries(joined.redone) if joined.redone else (),
        **{field: tuple(by_kind.get(kind, ())) for field, kind in _FIELDS.items()},  # type: ignore[arg-type]
    )


# Fields of a record with samples, and their kind.
_FIELDS = {
    field.name: sample.kind
    for field in dataclasses.fields(RunRecord)
    for sample in SAMPLE_TYPES.values()
    if field.type == f"tuple[{sample.__name__}, ...]"
}


def read_spec(run_dir: Path, content: bytes | None = None) -> RunSpec:
    """content: of the file, if it was read already."""
    known = None if content is None else _specs.get(content)
    spec = _spec(run_dir, content) if known is None else known
    with _naming(run_dir, "spec.json"):
        # Computed here, an id that cannot be computed is damage, and processes that read for others send it with it.
        _ = spec.run_id, spec.cell, spec.work
    return spec


def _spec(run_dir: Path, content: bytes | None) -> RunSpec:
    raw = _current(read_json(run_dir / "spec.json", content), run_dir)
    with _naming(run_dir, "spec.json"):
        return RunSpec.from_dict(raw)


def spec_of(text: str) -> RunSpec:
    """A run spec from its JSON text."""
    return RunSpec.from_dict(_current(json.loads(text), "the spec"))


def _current(raw: Mapping[str, Any], run_dir: Path | str) -> Mapping[str, Any]:
    """Migrate an older schema. Schema 1 is the first, so there is nothing to migrate yet."""
    schema = raw.get("schema")
    if schema != SCHEMA:
        raise StoreError(
            f"{run_dir}: schema: got {schema!r}, expected {SCHEMA}. Another version of Paceline wrote this run."
        )
    return raw


def read_machines(run_dir: Path) -> tuple[dict[str, Any], ...]:
    """The recorded facts of every host, redacted by today's rules."""
    return _machines(run_dir, [path.name for path in run_dir.glob("machine-*.json")])


def _machines(
    run_dir: Path, names: Iterable[str], kept: Mapping[str, bytes] = MappingProxyType({})
) -> tuple[dict[str, Any], ...]:
    machines = []
    for name in sorted(names):
        with _naming(run_dir, name):
            facts = read_json(run_dir / name, kept.get(name))
            machines.append(_checked(redaction.clean_facts(facts)[0], machine_rule()))
    return tuple(machines)


def read_json(path: Path, content: bytes | None = None) -> dict[str, Any]:
    """A JSON object whose texts are safe to print. content: of the file, if it was read already."""
    try:
        text = (document_of(path) if content is None else content).decode()
        # A rank or a command that reads one document starts without the fast parser.
        value = safe_text.document(json.loads(text) if content is None else safe_text.fast_loads(text), text)
    except FileNotFoundError:
        raise damaged(path.parent, f"{path.name} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path.parent, f"{path.name} cannot be read ({error})") from None
    if not isinstance(value, dict):
        raise damaged(path.parent, f"{path.name} is a {type(value).__name__}, not an object")
    return value


def read_outcomes(run_dir: Path) -> tuple[Outcome, ...]:
    """How every rank ended; StoreError with the name of the file if one is damaged."""
    return _outcomes(run_dir, [path.name for path in run_dir.glob("outcome-*.json")])


def _outcomes(
    run_dir: Path, names: Iterable[str], kept: Mapping[str, bytes] = MappingProxyType({})
) -> tuple[Outcome, ...]:
    raws = {name: read_json(run_dir / name, kept.get(name)) for name in names}
    # All at once is faster; one by one names the file that does not fit.
    known = rule_of(Outcome).fits(list(raws.values()))
    outcomes = [_outcome(run_dir, name, raw, known) for name, raw in raws.items()]
    return tuple(sorted(outcomes, key=attrgetter("rank")))


def reported_outcomes(run_dir: Path) -> tuple[Outcome, ...]:
    """As `read_outcomes`, after the ranks have ended: a damaged file means that its rank failed, and says so."""
    outcomes = []
    for path in run_dir.glob("outcome-*.json"):
        try:
            outcomes.append(_read_outcome(path))
        except StoreError as damage:
            number, now = path.stem.removeprefix("outcome-"), time.time()
            outcomes.append(
                Outcome(
                    # Without a number in its name, no rank has this outcome, but the run still fails.
                    rank=int(number) if _RANK_NUMBER.fullmatch(number) else -1,
                    status=Status.FAILED,
                    error=str(damage),
                    host="",
                    pid=0,
                    started_at=now,
                    ended_at=now,
                )
            )
    return tuple(sorted(outcomes, key=lambda o: o.rank))


def sound_outcomes(run_dir: Path) -> tuple[Outcome, ...]:
    """As `read_outcomes`, while files may still be written: those that cannot be read yet are left out."""
    outcomes = []
    for path in run_dir.glob("outcome-*.json"):
        with contextlib.suppress(StoreError):
            outcomes.append(_read_outcome(path))
    return tuple(sorted(outcomes, key=lambda o: o.rank))


_RANK_NUMBER = re.compile(r"0|[1-9][0-9]{0,6}")
_MOST_TEXT = 65_536


def _read_outcome(path: Path) -> Outcome:
    return _outcome(path.parent, path.name, read_json(path))


def _outcome(run_dir: Path, name: str, raw: dict[str, Any], is_checked: bool = False) -> Outcome:
    with _naming(run_dir, name):
        evidence = (raw if is_checked else _checked(raw, rule_of(Outcome))).pop("evidence", None)
        error = raw["error"] and redaction.clean_text(raw["error"][:_MOST_TEXT])
        own = {**raw, "status": Status(raw["status"]), "error": error}
        outcome = Outcome(**own, evidence=Evidence(**evidence) if evidence else None)
        if name != f"outcome-{outcome.rank}.json":
            raise ValueError(f"rank: got {outcome.rank}, expected the number in the file's name")
        if outcome.pid >= 1 << 32:
            raise ValueError("a process id that cannot be")
        if outcome.evidence and outcome.evidence.shape:
            _checked(dict(outcome.evidence.shape), rule_of(Shape))
    return outcome


def write_outcome(run_dir: Path, outcome: Outcome) -> None:
    error = outcome.error and redaction.clean_text(outcome.error)
    write_json(run_dir / f"outcome-{outcome.rank}.json", {**dataclasses.asdict(outcome), "error": error})


def sample_line(sample: Sample) -> str:
    # Not asdict, which copies every number of a sample: that took four times as long as writing it down.
    values = {name: getattr(sample, name) for name in _NAMES[sample.kind]}
    return json.dumps({"kind": sample.kind, **values}, default=dataclasses.asdict) + "\n"


_NAMES = {name: tuple(field.name for field in dataclasses.fields(kind)) for name, kind in SAMPLE_TYPES.items()}


def sample_lines(record: RunRecord) -> Iterator[str]:
    """The samples of a run as lines like those that its ranks wrote, wherever they are stored: steps, then the others
    by kind. Of a restarted run, those that count."""
    for field in ("steps", *_FIELDS):
        yield from map(sample_line, getattr(record, field))


def run_dirs(directory: Path) -> list[Path]:
    """Every run directory at or below `directory`, sorted by path, without those of earlier launches.

    These are <run>/attempts/<n>. An experiment may be called `attempts`, but a run id is never a plain number. A run
    that lost its spec is still a run: it is damaged, not absent.
    """
    files = ("spec.json", sealing.FILE)
    if any((directory / name).is_file() for name in files):
        return [directory]
    paths = [
        Path(folder).relative_to(directory)
        for folder, *names in os.walk(directory)
        if any(name in own and os.path.exists(f"{folder}/{name}") for own in names for name in files)  # noqa: PTH110
    ]
    kept = [path for path in paths if not (path.parent.name == EARLIER and path.name.isdecimal())]
    return [directory / path for path in sorted(kept, key=lambda path: path.parts)]


def read_launches(directory: Path) -> tuple[list[RunRecord], list[str]]:
    """All finished launches below `directory`, repeated launches of a run included; and why others were skipped."""
    return read_judged(directory, unjudged)[:2]


def unjudged(launches: list[RunRecord]) -> None:
    """For launches that are only read."""


T = TypeVar("T")


def read_judged(directory: Path, judge: Callable[[list[RunRecord]], T]) -> tuple[list[RunRecord], list[str], list[T]]:
    """As `read_launches`, and what `judge`, a function of a module, says about parts of the launches.

    Many directories are read by a few processes, because that is CPU-bound, and judged by them, because records are
    large. All launches of one work are in one part, or in none if they are more than one process should read.
    """
    results, judged = _read_all(run_dirs(directory), judge)
    return *_sorted_out(results), judged


def read_each(folders: Sequence[Path]) -> list[RunRecord | StoreError]:
    """The record of each run directory, or why it cannot be read."""
    return _read_all(folders, unjudged)[0]


def _read_all(
    folders: Sequence[Path], judge: Callable[[list[RunRecord]], T]
) -> tuple[list[RunRecord | StoreError], list[T]]:
    readers = min(MOST_READERS, os.cpu_count() or 1)
    # Only forked processes do not import the calling program again; elsewhere one process reads all.
    if len(folders) < PARALLEL_FROM or readers < 2 or sys.platform != "linux":
        return list(map(_read_or_reason, folders)), []
    shares = _shares(folders, readers)
    # What this imports and keeps, forked processes have, too.
    _read_or_reason(folders[0])
    with forked_pool(readers - 1) as pool:
        futures = [pool.submit(_read_share, share, judge) for share in shares]
        # This process reads, too, from the end: those that no other has begun.
        own = {n: _read_share(shares[n], judge) for n in reversed(range(len(shares))) if futures[n].cancel()}
        parts = [own[n] if n in own else future.result() for n, future in enumerate(futures)]
    _specs.clear()
    by_folder = {folder: result for results, _ in parts for folder, result in results.items()}
    judged = [found for _, found in parts if found is not None]
    return [by_folder[folder] for folder in folders], judged


@dataclass(frozen=True, slots=True)
class _Share:
    """What one process reads at a time: all runs of some works, or some runs of a larger one, which are not judged."""

    folders: list[Path]
    is_whole: bool = True


# The specs of runs that are about to be read, by the content of their files; forked processes have them, too.
_specs: dict[bytes, RunSpec] = {}


def _read_share(
    share: _Share, judge: Callable[[list[RunRecord]], T]
) -> tuple[dict[Path, RunRecord | StoreError], T | None]:
    results = {folder: _read_or_reason(folder) for folder in share.folders}
    return results, judge(_sorted_out(results.values())[0]) if share.is_whole else None


def _shares(folders: Sequence[Path], readers: int) -> list[_Share]:
    """The largest first."""
    by_work: dict[str, list[Path]] = {}
    for folder in folders:
        work = ""
        # What is wrong with a run is said by its reader.
        with contextlib.suppress(StoreError, OSError), _naming(folder, "spec.json"):
            content = document_of(folder / "spec.json")
            work = _specs.setdefault(content, _spec(folder, content)).group_work
        by_work.setdefault(work, []).append(folder)
    shares: list[_Share] = []
    for members in sorted(by_work.values(), key=len, reverse=True):
        if len(members) > -(-len(folders) // readers):
            parts = (members[first : first + LEAST_SHARE] for first in range(0, len(members), LEAST_SHARE))
            shares += [_Share(part, is_whole=False) for part in parts]
        elif shares and shares[-1].is_whole and len(shares[-1].folders) < LEAST_SHARE:
            shares[-1].folders.extend(members)
        else:
            shares.append(_Share(members))
    return shares


def _sorted_out(results: Collection[RunRecord | StoreError]) -> tuple[list[RunRecord], list[str]]:
    records = [result for result in results if isinstance(result, RunRecord)]
    return records, [str(result) for result in results if isinstance(result, StoreError)]


def _read_or_reason(run_dir: Path) -> RunRecord | StoreError:
    try:
        return read_run(run_dir)
    except StoreError as error:
        return StoreError(safe_text.text(str(error)))


def newest(launches: Iterable[RunRecord]) -> tuple[list[RunRecord], list[RunRecord], list[str]]:
    """The launch of each run that counts, the other launches, and one sentence for each of those.

    The last launch that ended ok counts, so a later failure does not discard a measurement. If none did, the last one.
    """
    latest: dict[str, RunRecord] = {}
    earlier, passed_over = [], []
    for record in launches:
        known = latest.setdefault(record.spec.run_id, record)
        if known is not record:
            other, chosen = sorted((known, record), key=lambda r: (r.status is Status.OK, r.started_at))
            latest[record.spec.run_id] = chosen
            earlier.append(other)
            why = "is newer" if other.started_at <= chosen.started_at else f"ended ok (this one: {other.status})"
            passed_over.append(
                safe_text.text(f"{other.path}: not used, because {chosen.path} is the same run and {why}")
            )
    return list(latest.values()), earlier, passed_over


def read_runs(directory: Path) -> tuple[list[RunRecord], list[str]]:
    """The launch that counts of each finished run below `directory`, and one sentence for each skipped directory."""
    launches, unreadable = read_launches(directory)
    records, _, passed_over = newest(launches)
    return records, [*unreadable, *passed_over]
