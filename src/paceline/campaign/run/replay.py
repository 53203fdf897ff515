"""What of a capsule shall be run again, and how: the stored specs, or the same work elsewhere or for longer."""

from __future__ import annotations

import glob
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.campaign.run.controller import leads_on
from paceline.errors import RequestError, StoreError, require
from paceline.experiment import expansion, recipe
from paceline.experiment.choices import Choice
from paceline.experiment.fields import Experiment
from paceline.experiment.plugins import load
from paceline.experiment.spec import RunSpec, WarmUp
from paceline.results import store
from paceline.results.records import RunRecord, Status

# Where and how long, never what: everything else would be another measurement, not this one again.
SETTABLE = ("launcher", "steps", "warmup", "repeats", "reference_steps", "timeout_s", "stall_s", "telemetry_hz")
# Ends that are a result; one that failed or could not be run left nothing to reproduce.
RESULTS = (Status.OK, Status.OOM)


@dataclass(frozen=True, slots=True)
class Request:
    """Specs in the order they shall be started; origins: cell of each -> the stored cell it repeats."""

    specs: tuple[RunSpec, ...]
    origins: Mapping[str, str]
    left_out: tuple[str, ...]


def request(
    stored: Sequence[RunRecord],
    settings: Sequence[str] = (),
    launcher: str | None = None,
    only: Sequence[str] = (),
    *,
    foreign: bool = False,
) -> Request:
    """The runs to make again; foreign lets specs name plugins by module, which runs code of that name."""
    given = _given(settings, launcher)
    ours = [r for r in sorted(stored, key=lambda r: (r.started_at, r.spec.run_id)) if not r.is_reference]
    results = [r for r in ours if r.status in RESULTS]
    chosen = _chosen(results, only)
    if not chosen:
        raise RequestError("replay: the capsule holds no run that ended ok or out of memory; accepted is one with some")
    if not foreign:
        _refuse_modules([r.spec for r in chosen])
    asked = _asked(chosen)
    specs = _changed(asked, given) if given else asked
    left_out = tuple(f"{r.spec.run_id}: it ended {r.status}" for r in ours if r not in results)
    return Request(tuple(specs), _origins(specs, asked), left_out)


def _given(settings: Sequence[str], launcher: str | None) -> dict[str, Any]:
    given = dict(expansion.parse_setting(text) for text in settings)
    accepted = f"one value for {', '.join(SETTABLE)}: a replay does the same work"
    for key, value in given.items():
        known = key.partition(".")[0] in SETTABLE and not isinstance(value, list)
        require(known, "--set", f"{key}={value}", accepted)
    return given | ({"launcher": launcher} if launcher is not None else {})


def _chosen(results: Sequence[RunRecord], only: Sequence[str]) -> list[RunRecord]:
    """Those of the cells that `--only` names by the beginning of the cell's hash or of a run's name."""
    if not only:
        return list(results)
    cells = {
        r.spec.cell for r in results if any(w and w in (r.spec.cell[: len(w)], r.spec.run_id[: len(w)]) for w in only)
    }
    known = ", ".join(dict.fromkeys(r.spec.run_id for r in results))
    require(bool(cells), "--only", ", ".join(only), f"the beginning of a cell or run out of {known}")
    return [r for r in results if r.spec.cell in cells]


def _refuse_modules(specs: Sequence[RunSpec]) -> None:
    for spec in specs:
        for choice in (spec.workload, spec.strategy, spec.engine, spec.launcher):
            if choice is not None and "." in choice.name:
                raise RequestError(
                    f"replay: {spec.run_id} names the module {choice.name!r}, whose code would run here; "
                    "accepted is a capsule without such, or --allow-modules"
                )


def _asked(records: Sequence[RunRecord]) -> list[RunSpec]:
    """Without the runs that a search asked for itself: it will ask again, by what it sees here."""
    by_run = {record.spec.run_id: record for record in records}
    followed: set[str] = set()
    found = []
    for record in records:
        if record.spec.run_id in followed:
            continue
        found.append(record.spec)
        series = [record]
        while leads_on(record.spec):
            spec = load("workloads", record.spec.workload.name).follow(record.spec, series)
            if spec is None or spec.run_id in followed or spec.run_id not in by_run:
                break
            followed.add(spec.run_id)
            series.append(by_run[spec.run_id])
    return found


def _changed(asked: Sequence[RunSpec], given: Mapping[str, Any]) -> list[RunSpec]:
    """The same cells with other circumstances, through the rules of any experiment."""
    given, specs = dict(given), []
    for name, device in dict.fromkeys((s.experiment, s.topology.device) for s in asked):
        group = [s for s in asked if (s.experiment, s.topology.device) == (name, device)]
        plan = Experiment.model_validate(recipe.recreate(group))
        repeats = given.get("repeats", plan.repeats)
        require(type(repeats) is int and repeats >= 1, "--set repeats", repeats, "a whole number from 1")
        fields = {key: value for key, value in given.items() if key != "repeats"}
        specs += expansion.order(expansion.expand(plan, fields, device), repeats, plan.order_seed)
    return specs


def _origins(specs: Sequence[RunSpec], asked: Sequence[RunSpec]) -> dict[str, str]:
    exact = {spec.cell for spec in asked}
    alike = {_essence(spec): spec.cell for spec in reversed(asked)}
    return {spec.cell: spec.cell if spec.cell in exact else alike[_essence(spec)] for spec in specs}


def _essence(spec: RunSpec) -> str:
    """Equal for specs that differ in what may be set for a replay only."""
    return replace(spec, launcher=Choice("local"), steps=1, warmup=WarmUp()).cell


# --- where it is run ---


def refuse_originals(out: Path, stored: Sequence[RunRecord]) -> None:
    """Runs must not be compared with themselves, nor may a report of the originals find their replays among them: a
    folder that holds them, or a part of it, is no place for a replay."""
    started = {record.spec.run_id: record.started_at for record in stored}
    for run_dir in _namesakes(out.resolve(), started):
        try:
            original = store.read_json(run_dir / "status.json")["started_at"] == started[run_dir.name]
        except (StoreError, KeyError):
            continue
        if original:
            raise RequestError(
                f"--out: {str(out)!r} holds the very runs of this capsule, or is a part of their folder; "
                "accepted is a folder apart from them"
            )


def _namesakes(out: Path, names: Collection[str]) -> Iterator[Path]:
    """Run folders of these names below `out`, and those of the experiments and results folders that it lies in."""
    if out.is_dir():
        yield from (path for path in store.run_dirs(out) if path.name in names)
    for folder in out.parents:
        for name in names:
            yield from (folder / name, *folder.glob(f"*/{glob.escape(name)}"))


def require_folder(out: Path) -> None:
    """Said before anything is planned: results can be written to `out`, as far as can be told without writing."""
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    require(existing.is_dir(), "--out", str(out), "a folder")


def known_runs(specs: Sequence[RunSpec], out: Path) -> int:
    """Runs that an earlier replay left in this folder, which will not be made again."""
    return sum(record.is_answer for record in _sealed(specs, out))


def _sealed(specs: Sequence[RunSpec], out: Path) -> list[RunRecord]:
    found = []
    for run_dir in (out / spec.experiment / spec.run_id for spec in specs):
        if store.is_sealed(run_dir):
            try:
                found.append(store.read_run(run_dir))
            except StoreError:
                continue
    return found


def replayed(specs: Sequence[RunSpec], references: Collection[RunSpec], out: Path) -> list[RunRecord]:
    """What the campaigns left of these runs and of the references that prove them."""
    return _sealed([*specs, *references], out)
