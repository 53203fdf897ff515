"""References and proofs of earlier campaigns, kept for the next one: `paceline run` computes none of them twice.

A kept run is the run directory of one that ended ok, under a name that is the digest of everything its numbers
depend on (`ingredients`). It is used only if all of these are equal and the directory is what was sealed. Only
references that run on this host are kept: of another host nobody knows the class before the run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from paceline.errors import StoreError
from paceline.experiment import plugins
from paceline.experiment.plugins import load
from paceline.experiment.spec import NO_RUN, RunSpec
from paceline.host import machine
from paceline.host.files import state_directory
from paceline.results import sealing, store
from paceline.results.records import RunRecord, Status

# The oldest are removed: each takes some kilobytes per step.
MOST_KEPT = 200
# Parts of Paceline that decide what a reference computes and records.
SOURCES = ("models", "results", "training", "workloads")
_INGREDIENTS = ".ingredients.json"


def ingredients(spec: RunSpec) -> dict[str, Any]:
    """All that the numbers of a reference depend on: the request, the software, the class of machine, variables."""
    facts = _machine_class()
    request = {name: value for name, value in spec.to_dict().items() if name not in NO_RUN}
    return {"request": request, "source": _source(), **facts}


@cache
def _machine_class() -> dict[str, Any]:
    facts = machine.probe()
    uses = [f"{gpu.name} {gpu.capability}" for gpu in facts.gpus]
    return {
        "versions": dict(facts.versions),
        "environment": dict(facts.environment),
        "machine": [platform.machine(), facts.cpu, uses, facts.driver, facts.cuda],
    }


@cache
def _source() -> str:
    """A digest of Paceline's own code, which changes between releases too."""
    digest = hashlib.sha256()
    for package in SOURCES:
        root = Path(str(resources.files("paceline").joinpath(package)))
        for file in sorted(root.rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def is_kept_here(spec: RunSpec) -> bool:
    """Whether this run may be kept or reused: it only proves others, on this host, by code that is part of the name."""
    is_ours = spec.strategy is None or plugins.is_shipped("strategies", spec.strategy.name)
    is_ours &= plugins.is_shipped("workloads", spec.workload.name)
    return spec.proves_only and is_ours and bool(getattr(load("launchers", spec.launcher.name), "HERE", False))


def directory(environ: Mapping[str, str] = os.environ) -> Path:
    return state_directory(environ) / "references"


def find(spec: RunSpec) -> RunRecord | None:
    """The kept reference with these ingredients; None if there is none, or if it is damaged."""
    if not is_kept_here(spec):
        return None
    wanted = _plain(ingredients(spec))
    with contextlib.suppress(OSError, ValueError, RecursionError, RuntimeError, StoreError):
        run_dir = directory() / _key(wanted) / spec.run_id
        if json.loads((run_dir / _INGREDIENTS).read_bytes()) == wanted:
            record = store.read_run(run_dir)
            return record if record.status is Status.OK and record.spec.run_id == spec.run_id else None
    return None


def reuse(spec: RunSpec, out: Path) -> RunRecord | None:
    """Put the kept reference into the results directory as a finished run that says where it is from; None if there is
    none. The files of an interrupted launch move to attempts/."""
    if (kept := find(spec)) is None:
        return None
    run_dir = store.create(out, spec)
    source = Path(kept.path)
    for path in source.iterdir():
        if path.is_file() and path.name not in (sealing.SPEC, sealing.FILE, _INGREDIENTS):
            shutil.copyfile(path, run_dir / path.name)
    body = json.loads((source / sealing.FILE).read_bytes())
    sealing.write(run_dir, {**body, "reused": True})
    return kept


def keep(spec: RunSpec, run_dir: Path) -> None:
    """Keep a reference that has just ended ok. A state directory that is full or read-only costs only the next
    campaign its time."""
    with contextlib.suppress(OSError, StoreError, RuntimeError):
        if not is_kept_here(spec) or store.read_end(run_dir).status is not Status.OK:
            return
        wanted = _plain(ingredients(spec))
        target = directory() / _key(wanted)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.rmtree(temporary, ignore_errors=True)
        copy = temporary / spec.run_id
        copy.mkdir(parents=True)
        for path in run_dir.iterdir():
            if path.is_file() and not path.name.startswith("progress-"):
                shutil.copyfile(path, copy / path.name)
        (copy / _INGREDIENTS).write_text(json.dumps(wanted))
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        _prune(target.parent)


def _prune(kept: Path) -> None:
    ages = sorted((path.stat().st_mtime, path) for path in kept.iterdir() if not path.name.startswith("."))
    for _, path in ages[:-MOST_KEPT]:
        shutil.rmtree(path, ignore_errors=True)


def _plain(values: Mapping[str, Any]) -> Any:
    """As JSON reads it back."""
    return json.loads(json.dumps(values, sort_keys=True))


def _key(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]
