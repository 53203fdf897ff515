"""What a replay runs: the specs stored in a capsule, or the same work on another launcher or for longer."""

from __future__ import annotations

import contextlib
import glob
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.campaign.run import copies
from paceline.campaign.run.controller import leads_on
from paceline.errors import RequestError, StoreError, require, shown
from paceline.experiment import expansion, foreign, plugins, recipe
from paceline.experiment.choices import Choice
from paceline.experiment.fields import Experiment
from paceline.experiment.plugins import load
from paceline.experiment.spec import RunSpec, WarmUp
from paceline.results import safe_text, store
from paceline.results.records import RunRecord, Status

# Where and how long, never what: any other change would be a different measurement.
SETTABLE = ("launcher", "steps", "warmup", "repeats", "reference_steps", "timeout_s", "stall_s", "telemetry_hz")
# Statuses that are a result; a failed or unsupported run left nothing to reproduce.
RESULTS = (Status.OK, Status.OOM)


@dataclass(frozen=True, slots=True)
class Request:
    """Specs in the order in which they start. origins: cell of each -> the stored cell that it repeats.

    dropped: one sentence for every setting of the capsule that only the user may decide, and that is not used.
    """

    specs: tuple[RunSpec, ...]
    origins: Mapping[str, str]
    left_out: tuple[str, ...]
    dropped: tuple[str, ...] = ()


def request(
    stored: Sequence[RunRecord],
    settings: Sequence[str] = (),
    launcher: str | None = None,
    only: Sequence[str] = (),
    *,
    allowed: Collection[str] = (),
) -> Request:
    """The runs to repeat. allowed: the modules and settings of the capsule that the user trusts (see `foreign`)."""
    changes = dict(expansion.parse_setting(text) for text in settings)
    addresses = _user_only(record.spec for record in stored)
    accepted = f"one value for {', '.join((*SETTABLE, *addresses))}, because a replay does the same work"
    for key, value in changes.items():
        known = key in addresses or (key.partition(".")[0] in SETTABLE and not isinstance(value, list))
        require(known, "--set", f"{key}={value}", accepted)
    if launcher is not None:
        changes["launcher"] = expansion.given_launcher(launcher, None)
    ours = [r for r in sorted(stored, key=lambda r: (r.started_at, r.spec.run_id)) if not r.proves_only]
    results = chosen = [r for r in ours if r.status in RESULTS]
    if only:
        # The first characters of the cell's hash or of a run id.
        cells = {
            r.spec.cell
            for r in results
            for w in only
            if w and (r.spec.cell.startswith(w) or r.spec.run_id.startswith(w))
        }
        runs = ", ".join(dict.fromkeys(r.spec.run_id for r in results))
        require(bool(cells), "--only", ", ".join(only), f"the beginning of a cell or of one of the runs {runs}")
        chosen = [r for r in results if r.spec.cell in cells]
    if not chosen and stored and not ours:
        accepted = "at least one measured run, whose replay also runs what proves it"
        raise RequestError(f"replay: got a capsule with only references and runs of proof groups, expected {accepted}.")
    if not chosen:
        raise RequestError("replay: got a capsule without runs that ended ok or out of memory, expected at least one.")
    choices = [(s, c) for s in (r.spec for r in chosen) for c in (s.workload, s.strategy, s.engine)]
    for spec, choice in choices:
        if choice is not None and "." in choice.name and not foreign.is_allowed(choice.name, allowed):
            raise RequestError(
                f"replay: {spec.run_id} uses the module {choice.name!r}, whose code would run here. "
                f"Add --allow-modules {choice.name} if you trust it."
            )
    stored_specs = _without_followers(chosen)
    originals, dropped = _stripped(stored_specs, changes, allowed)
    # Two stored runs may differ in nothing but what was dropped.
    cells_of = {spec.cell: before.cell for spec, before in zip(originals, stored_specs, strict=True)}
    originals = list({spec.run_id: spec for spec in originals}.values())
    specs = [] if changes else originals
    # The same cells with other settings, by the rules of any experiment.
    for name, device in dict.fromkeys((s.experiment, s.topology.device) for s in originals) if changes else ():
        group = [s for s in originals if (s.experiment, s.topology.device) == (name, device)]
        plan = Experiment.model_validate(recipe.recreate(group))
        repeats = changes.get("repeats", plan.repeats)
        require(type(repeats) is int and repeats >= 1, "--set repeats", repeats, "a whole number from 1")
        fields = {key: value for key, value in changes.items() if key != "repeats"}
        specs += expansion.order(expansion.expand(plan, fields, device), repeats, plan.order_seed)
    left_out = tuple(f"{r.spec.run_id}: it ended {r.status}" for r in ours if r not in results)
    alike = {_essence(spec): cells_of[spec.cell] for spec in reversed(originals)}
    origins = {spec.cell: cells_of.get(spec.cell) or alike[_essence(spec)] for spec in specs}
    return Request(tuple(specs), origins, left_out, dropped)


def _user_only(specs: Iterable[RunSpec]) -> list[str]:
    """The options of the stored engines that the user sets instead of the capsule: `engine.url`, ..."""
    engines = {spec.engine.name for spec in specs if spec.engine is not None}
    constants = [plugins.declared("engines", name) or {} for name in sorted(engines)]
    return [f"engine.{option}" for each in constants for option in each.get("USER_ONLY", {})]


def _stripped(
    specs: Sequence[RunSpec], changes: Mapping[str, Any], allowed: Collection[str]
) -> tuple[list[RunSpec], tuple[str, ...]]:
    """The specs without what only the user may decide, and one sentence for each distinct setting that was dropped."""
    kept, dropped = [], Counter[str]()
    for spec in specs:
        own, settings = foreign.stripped(spec, allowed)
        kept.append(own)
        for setting in settings:
            is_launcher = setting.name in ("launcher", spec.launcher.name)
            # What the user gives instead was never going to be used.
            if setting.name not in changes and not (is_launcher and "launcher" in changes):
                instead = "; local is used, choose another with --launcher" if is_launcher else ""
                name = "launcher" if is_launcher else setting.name
                dropped[f"{name} {safe_text.text(shown(setting.value))} ({setting.decides}){instead}"] += 1
    return kept, tuple(f"{text}, {count} run{'' if count == 1 else 's'}" for text, count in dropped.items())


def _without_followers(records: Sequence[RunRecord]) -> list[RunSpec]:
    """Specs without the runs that a search added itself: it will add its own, from what it measures here."""
    by_run = {record.spec.run_id: record for record in records}
    followed: set[str] = set()
    specs = []
    for record in records:
        if record.spec.run_id in followed:
            continue
        specs.append(record.spec)
        series = [record]
        while leads_on(record.spec):
            spec = load("workloads", record.spec.workload.name).follow(record.spec, series)
            if spec is None or spec.run_id in followed or spec.run_id not in by_run:
                break
            followed.add(spec.run_id)
            series.append(by_run[spec.run_id])
    return specs


def _essence(spec: RunSpec) -> str:
    """Equal for specs that differ only in what a replay may change."""
    only = (plugins.declared("engines", spec.engine.name) or {}).get("USER_ONLY", {}) if spec.engine else {}
    options = {key: value for key, value in spec.engine.options.items() if key not in only} if spec.engine else {}
    engine = Choice(spec.engine.name, options) if spec.engine else None
    return replace(spec, launcher=Choice("local"), engine=engine, steps=1, warmup=WarmUp()).cell


# --- where it runs ---


def refuse_originals(out: Path, stored: Sequence[RunRecord]) -> None:
    """RequestError if `out` contains the original runs or lies inside their directory: runs must not be compared with
    themselves, and a report of the originals must not find their replays."""
    started = {record.spec.run_id: record.started_at for record in stored}
    out = out.resolve()
    namesakes = [path for path in store.run_dirs(out) if path.name in started] if out.is_dir() else []
    # Run directories of the experiments and results directories that `out` lies in.
    for directory in out.parents:
        for name in started:
            namesakes += [directory / name, *directory.glob(f"*/{glob.escape(name)}")]
    for run_dir in namesakes:
        try:
            is_original = store.read_json(run_dir / "status.json")["started_at"] == started[run_dir.name]
        except (StoreError, KeyError):
            continue
        if is_original:
            raise RequestError(
                f"--out: got {str(out)!r}, which contains the original runs of this capsule or lies inside their "
                "directory; expected a separate directory."
            )


def require_directory(out: Path) -> None:
    """RequestError if results cannot be written to `out`, as far as that is visible without writing."""
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    require(existing.is_dir(), "--out", str(out), "a directory")


def known_runs(specs: Sequence[RunSpec], out: Path) -> int:
    """How many runs an earlier replay left in this directory; they are not repeated."""
    return sum(record.is_answer for record in replayed(specs, (), out))


def replayed(specs: Sequence[RunSpec], references: Collection[RunSpec], out: Path) -> list[RunRecord]:
    """The finished runs of these specs, of their references and of their proof groups."""
    finished = filter(None, (copies.read(spec, out) for spec in specs))
    whole = (record for spec in references for record in copies.references(spec, out))
    return [*finished, *whole, *_proofs(specs, out)]


def _proofs(specs: Sequence[RunSpec], out: Path) -> Iterator[RunRecord]:
    works = {spec.work for spec in specs}
    for experiment in sorted({spec.experiment for spec in specs}):
        for run_dir in store.run_dirs(out / experiment):
            with contextlib.suppress(StoreError):
                spec = store.read_spec(run_dir)
                if spec.reduction is not None and spec.group_work in works:
                    yield store.read_run(run_dir)
