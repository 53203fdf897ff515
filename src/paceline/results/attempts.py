"""The attempts of one launch, managed by the controller in its run directory.

A launch that may be restarted has one directory. When an attempt is lost, the files of its ranks are renamed, and the
next attempt writes into the same directory. `samples` joins the attempts when the run is read.
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
from paceline.results import samples, store
from paceline.results.records import AttemptSample
from paceline.results.samples import number_of

FILE = samples.ATTEMPTS
JOB = store.JOB
INTERRUPTED = "interrupted"
RESTARTS = "restarts"
# Files of a lost attempt besides samples: kept to find the cause, and moved so that they are not taken for those of the
# next attempt.
_SET_ASIDE = (*store.LEFT_BY_RANKS, "log.txt", "exit.txt", "home.txt", "job.sh", JOB)


def begin(out: Path, spec: RunSpec) -> RunSpec:
    """Create the directory of a fresh launch, with a mark that identifies its checkpoints and job from any host.

    The mark is also the secret by which the nodes of the launch recognize each other.
    """
    marked = replace(spec, lineage=secrets.token_hex(16))
    store.create(out, marked)
    return marked


def with_lineage(run_dir: Path, spec: RunSpec) -> RunSpec:
    """The spec with the lineage of the unfinished launch in its directory, if there is one."""
    if store.is_sealed(run_dir):
        return spec
    with contextlib.suppress(StoreError, RequestError, KeyError, TypeError, ValueError):
        known = store.read_spec(run_dir)
        return replace(spec, lineage=known.lineage) if known.run_id == spec.run_id else spec
    return spec


def can_continue(run_dir: Path, spec: RunSpec) -> bool:
    """Whether a launch whose controller ended may continue from its checkpoints; its open attempt is then closed.

    Without checkpoints the launch starts over."""
    if not spec.checkpoint_every or spec.lineage is None or store.is_sealed(run_dir):
        return False
    if (run_dir / JOB).is_file():
        close(run_dir, INTERRUPTED, "the controller ended before the run")
    return True


def ended(run_dir: Path) -> list[AttemptSample]:
    """The attempts that have ended, in order."""
    path = run_dir / FILE
    lines = samples.read_samples(path) if path.is_file() else iter(())
    return [sample for sample in lines if isinstance(sample, AttemptSample)]


def restarts(run_dir: Path) -> int:
    """How often this launch was restarted; continuing under a new controller does not count."""
    return sum(attempt.status != INTERRUPTED for attempt in ended(run_dir))


def close(run_dir: Path, status: str, reason: str | None) -> None:
    """Record how the attempt ended, and move its files aside for the next one."""
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
    """Record the last of several attempts; a launch with one attempt needs no line.

    The machines of earlier attempts that contributed steps are restored. A host that contributed nothing is not part of
    the run."""
    if known := ended(run_dir):
        _note(run_dir, len(known) + 1, status, reason)
        contributing: tuple[int, ...] = ()
        # Reading the run will report samples that cannot be read.
        with contextlib.suppress(StoreError, KeyError, TypeError, ValueError):
            contributing = samples.read(sorted(run_dir.glob("samples-*.jsonl"))).contributing
        for number in reversed(contributing):
            for path in (run_dir / RESTARTS / str(number)).glob("machine-*.json"):
                if not (run_dir / path.name).exists():
                    shutil.copyfile(path, run_dir / path.name)


def started_at(run_dir: Path) -> float | None:
    """When the first attempt was submitted."""
    known = ended(run_dir)
    return known[0].submitted_at if known else _job_times(run_dir)[0]


def _note(run_dir: Path, number: int, status: str, reason: str | None) -> None:
    now = time.time()
    if status == INTERRUPTED:
        # An attempt without a controller ended before this is noticed: when a file was last written.
        own = [path for path in run_dir.glob("samples-*[0-9].jsonl") if number_of(path) is None]
        times = [path.stat().st_mtime for path in (*own, *run_dir.glob("progress-*"), run_dir / JOB)]
        now = min(max(times), now)
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
    with (run_dir / FILE).open("a", encoding="utf-8") as file:
        file.write(store.sample_line(line))


def _job_times(run_dir: Path) -> tuple[float | None, float | None]:
    try:
        job = store.read_json(run_dir / JOB)
    except StoreError:
        return None, None
    return job.get("submitted_at"), job.get("began_at")
