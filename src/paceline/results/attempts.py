"""The attempts of one launch, kept by the controller in its run folder.

A launch that may be restarted is one folder: when an attempt is lost, what its ranks left is renamed so that the next
one writes into the same place. `trajectory` joins them again when the run is read.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import time
from dataclasses import replace
from pathlib import Path

from paceline.errors import RequestError, StoreError
from paceline.experiment.spec import RunSpec
from paceline.host import redaction
from paceline.results import joined_attempts, sample_lines, store
from paceline.results.attempt_samples import AttemptSample
from paceline.results.joined_attempts import number_of

FILE = "samples-attempts.jsonl"
JOB = store.JOB
INTERRUPTED = "interrupted"
RESTARTS = "restarts"
# What a lost attempt leaves besides samples: kept for whoever looks for the cause. Left where it is, what an engine
# wrote of its job would be taken for the next one's.
_SET_ASIDE = (*store.LEFT_BY_RANKS, "log.txt", "exit.txt", "home.txt", "job.sh", JOB)


def begin(out: Path, spec: RunSpec) -> RunSpec:
    """A folder for a fresh launch, with a mark by which it knows its own: its checkpoints, and its job with the
    engine, from whichever host and path a later controller looks."""
    marked = replace(spec, lineage=secrets.token_hex(8))
    store.create(out, marked)
    return marked


def standing(run_dir: Path, spec: RunSpec) -> RunSpec:
    """The spec with the mark of the launch that stands in its folder unsealed, where there is one."""
    if store.is_sealed(run_dir):
        return spec
    with contextlib.suppress(StoreError, RequestError, KeyError, TypeError, ValueError):
        known = store.read_spec(run_dir)
        return replace(spec, lineage=known.lineage) if known.run_id == spec.run_id else spec
    return spec


def goes_on(run_dir: Path, spec: RunSpec) -> bool:
    """Whether a launch that nobody follows any more may have left something to go on from; what it had under way is
    closed then. Without checkpoints there is nothing, and it starts over."""
    if not spec.checkpoint_every or spec.lineage is None or store.is_sealed(run_dir):
        return False
    if (run_dir / JOB).is_file():
        close(run_dir, INTERRUPTED, "the controller ended before the run")
    return True


def ended(run_dir: Path) -> list[AttemptSample]:
    """Those that are over, in order."""
    path = run_dir / FILE
    found = sample_lines.read_samples(path) if path.is_file() else iter(())
    return [sample for sample in found if isinstance(sample, AttemptSample)]


def restarts(run_dir: Path) -> int:
    """How often this launch was started again by itself: being told to go on by a new controller does not count."""
    return sum(attempt.status != INTERRUPTED for attempt in ended(run_dir))


def close(run_dir: Path, status: str, reason: str | None) -> None:
    """Write down how the attempt ended and make room for the next one."""
    number = len(ended(run_dir)) + 1
    _note(run_dir, number, status, reason)
    for path in sorted(run_dir.glob("samples-*[0-9].jsonl")):
        if number_of(path) is None:
            path.rename(path.with_name(f"{path.stem}.{number}.jsonl"))
    aside = run_dir / RESTARTS / str(number)
    aside.mkdir(parents=True, exist_ok=True)
    for pattern in _SET_ASIDE:
        for path in run_dir.glob(pattern):
            path.rename(aside / path.name)
    for path in run_dir.glob("progress-*"):
        path.unlink()


def conclude(run_dir: Path, status: str, reason: str | None) -> None:
    """Write down the last of several attempts; a launch of one needs no line. The machines of an earlier one come back
    where steps of it stand, as those before a checkpoint do: a host that contributed nothing is no part of the run."""
    if known := ended(run_dir):
        _note(run_dir, len(known) + 1, status, reason)
        for number in reversed(_standing_attempts(run_dir)):
            for path in (run_dir / RESTARTS / str(number)).glob("machine-*.json"):
                if not (run_dir / path.name).exists():
                    shutil.copyfile(path, run_dir / path.name)


def _standing_attempts(run_dir: Path) -> tuple[int, ...]:
    """Those of which a step stands; none where samples cannot be read, which whoever reads the run will say."""
    with contextlib.suppress(StoreError, KeyError, TypeError, ValueError):
        return joined_attempts.read(sorted(run_dir.glob("samples-*.jsonl"))).standing
    return ()


def started_at(run_dir: Path) -> float | None:
    """When the first attempt was handed to the engine."""
    known = ended(run_dir)
    return known[0].submitted_at if known else _job_times(run_dir)[0]


def _note(run_dir: Path, number: int, status: str, reason: str | None) -> None:
    # An attempt that nobody followed ended long before somebody says so.
    now = _last_sign(run_dir) if status == INTERRUPTED else time.time()
    submitted_at, began_at = _job_times(run_dir)
    line = AttemptSample(
        rank=0,
        attempt=number,
        submitted_at=now if submitted_at is None else submitted_at,
        began_at=began_at,
        ended_at=now,
        status=status,
        reason=reason and redaction.clean_text(reason),
    )
    with (run_dir / FILE).open("a") as file:
        file.write(store.sample_line(line))


def _last_sign(run_dir: Path) -> float:
    """When the attempt under way, or its controller, last wrote something."""
    own = [path for path in run_dir.glob("samples-*[0-9].jsonl") if number_of(path) is None]
    signs = [path.stat().st_mtime for path in (*own, *run_dir.glob("progress-*"), run_dir / JOB)]
    return min(max(signs), time.time())


def _job_times(run_dir: Path) -> tuple[float | None, float | None]:
    try:
        job = store.read_json(run_dir / JOB)
    except StoreError:
        return None, None
    return job.get("submitted_at"), job.get("began_at")
