"""All findings about a set of runs, from their records alone: the same records give the same report, to the byte."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from itertools import groupby
from types import MappingProxyType
from typing import Any

import numpy as np
import yaml

from paceline import __version__
from paceline.analysis.compare import cells as compare
from paceline.analysis.compare import (
    checkpoints,
    comparable,
    compilation,
    effects,
    history,
    recommend,
    scaling,
    step_differences,
    tradeoffs,
)
from paceline.analysis.cost import claims, served, training
from paceline.analysis.cost.training import Costing
from paceline.analysis.findings import SHARED_GPU, Certificate, Measurement, Recipe, Report, RunFinding
from paceline.analysis.findings.training import RankStep
from paceline.analysis.grouping import grouped
from paceline.analysis.machine import ceilings, fabric, nodes
from paceline.analysis.served import accuracy, curves, equal_work, measurements, mlperf_verdict, paired, verdicts
from paceline.analysis.training import (
    bottleneck,
    gauge_summary,
    layouts,
    memory,
    metrics,
    predicted,
    routing,
    rules_of_thumb,
    time_spent,
    trust,
)
from paceline.analysis.training.certificate import certify_all
from paceline.analysis.training.metrics import Cell
from paceline.analysis.training.window import LAUNCH_COLUMNS, Window, first_and_last_loss, open_window, step_table
from paceline.errors import RequestError
from paceline.experiment import recipe
from paceline.experiment.spec import RunSpec
from paceline.host import machine
from paceline.models import arithmetic
from paceline.results.records import RunRecord, Status

LONGEST_DISTRIBUTION = 500


@dataclass(frozen=True, slots=True)
class Judged:
    """What follows from the runs of some works alone: certificates, windows and findings by run id, cells, and recipes
    by cell.

    Other runs of these works would change it."""

    works: frozenset[str]
    certificates: Mapping[str, Certificate]
    windows: Mapping[str, Window]
    runs: Mapping[str, RunFinding]
    cells: Sequence[Cell]
    recipes: Mapping[str, Recipe]


def judge(records: Sequence[RunRecord]) -> Judged:
    """Certify, open windows and measure, for all runs of some works. Most of the time of a report is spent here."""
    ordered = sorted(records, key=_by_start)
    certificates = certify_all(ordered)
    windows = {
        r.spec.run_id: replace(open_window(r), certificate=_graded(certificates.get(r.spec.run_id)))
        for r in ordered
        if r.steps and r.spec.is_certified and not r.proves_only
    }
    proved = {r.spec.work for r in ordered if (c := certificates.get(r.spec.run_id)) and c.valid and _is_proved(r, c)}
    runs = {
        r.spec.run_id: _finding(r, certificates, windows, r.is_reference and r.spec.work in proved) for r in ordered
    }
    trusted = (window for run, window in windows.items() if runs[run].status == Status.OK)
    # The work of other runs is not part of their cell.
    made = recipes(r for r in ordered if r.spec.is_trained)
    works = frozenset(r.spec.group_work for r in records)
    return Judged(works, certificates, windows, runs, metrics.gather(trusted), {recipe.cell: recipe for recipe in made})


def _graded(certificate: Certificate | None) -> Certificate | None:
    """The certificate if it has a level, which its cell then has."""
    return certificate if certificate is not None and certificate.level else None


def _by_start(record: RunRecord) -> tuple[float, str]:
    return record.started_at, record.spec.run_id


def build(
    records: Sequence[RunRecord],
    title: str,
    skipped: Sequence[str] = (),
    created_at: float | None = None,
    costing: training.Costing | None = None,
    earlier: Sequence[RunRecord] = (),
    baseline: nodes.Baseline | None = None,
    predictions: Sequence[Mapping[str, Any]] = (),
    judged: Sequence[Judged] = (),
) -> Report:
    """Certify, measure, compare and recommend. created_at defaults to the end of the last run.

    earlier are launches replaced by newer ones, used for histories only; baseline replaces the peers of nodes.
    predictions are stored ones (`prediction.stored.read`), shown beside the runs that measured them. judged: what
    `judge` found already, in processes that each read a part of the runs; it is not computed again. Only runs that
    ended ok with a valid certificate are measured; reference runs are listed, never measured or ranked.
    """
    costing = costing or training.Costing()
    basis = _basis(records, judged)
    report = Report(
        title=title,
        created_at=max((r.ended_at for r in basis.records), default=0.0) if created_at is None else created_at,
        paceline_version=__version__,
        machines=_machines(basis.records),
        runs=basis.runs,
        measurements=tuple(m for cell in basis.cells for m in cell.measurements),
        certificates=tuple(basis.certificates.values()),
        comparisons=(),
        recommendations=(),
        scaling=(),
        predictions=predicted.beside(predictions, basis.sound),
        recipes=recipes(basis.records, basis.recipes),
        skipped=tuple(skipped),
        time_spent=time_spent.analyse(basis.records, basis.windows),
    )
    report = replace(report, notes=(*_notes(basis, report.machines), *_replaced_notes(earlier)))
    report = _with_launches(_with_comparisons(report, basis), basis, earlier)
    report = _with_served(_with_machine_tests(report, basis, baseline, costing), basis.sound, costing)
    return _with_costs(gauge_summary.added_to(report, basis.sound, basis.windows), basis, costing)


# --- stages ---


@dataclass(frozen=True, slots=True)
class _Basis:
    """What all parts of a report start from, in the order in which runs were started. sound: the runs that ended ok,
    certified if they must be; trusted: their windows."""

    records: Sequence[RunRecord]
    certificates: Mapping[str, Certificate]
    windows: Mapping[str, Window]
    runs: tuple[RunFinding, ...]
    sound: Sequence[RunRecord]
    trusted: Sequence[Window]
    peaks: Sequence[Measurement]
    cells: Sequence[Cell]
    recipes: Mapping[str, Recipe]


def _basis(records: Sequence[RunRecord], judged: Sequence[Judged]) -> _Basis:
    ordered = sorted(records, key=_by_start)
    known = frozenset[str]().union(*(part.works for part in judged))
    parts = [*judged, judge([record for record in ordered if record.spec.group_work not in known])]
    certified = {run: found for part in parts for run, found in part.certificates.items()}
    # In the order in which one process finds them: by work.
    by_work = grouped((r for r in ordered if r.spec.run_id in certified), lambda record: record.spec.work)
    windows = {run: window for part in parts for run, window in part.windows.items()}
    findings = {run: found for part in parts for run, found in part.runs.items()}
    runs = tuple(findings[r.spec.run_id] for r in ordered)
    sound = [r for r, f in zip(ordered, runs, strict=True) if f.status == Status.OK and r.spec.reduction is None]
    trusted = [windows[f.run] for f in runs if f.status == Status.OK and f.run in windows]
    peaks = ceilings.analyse(sound)
    gathered = {cell.id: cell for part in parts for cell in part.cells}
    return _Basis(
        records=ordered,
        certificates={r.spec.run_id: certified[r.spec.run_id] for members in by_work.values() for r in members},
        windows=windows,
        runs=runs,
        sound=sound,
        trusted=trusted,
        peaks=peaks,
        cells=metrics.gather(trusted, ceilings.peaks_by_device(sound, peaks), gathered),
        recipes={cell: recipe for part in parts for cell, recipe in part.recipes.items()},
    )


def _with_comparisons(report: Report, basis: _Basis) -> Report:
    """The report with what cells say about each other."""
    cells, grown = basis.cells, scaling.analyse(basis.cells)
    everything = (*compare.compare_cells(cells), *grown.compared)
    unstable = {run for run, each in basis.certificates.items() if each.unstable_from is not None}
    return replace(
        report,
        measurements=(*report.measurements, *(point.efficiency for point in grown.points)),
        comparisons=tuple(c for each in everything for c in each.comparisons),
        recommendations=tuple(recommend.recommend(everything, basis.runs)),
        scaling=grown.points,
        layouts=layouts.analyse(basis.sound),
        step_differences=step_differences.analyse(everything),
        compilations=compilation.analyse(everything),
        tradeoffs=tradeoffs.analyse(cells, unstable),
        checkpoints=checkpoints.analyse(cells),
        bottlenecks=bottleneck.judge(cells, basis.sound, basis.peaks),
        effects=effects.analyse(cells, basis.records, basis.runs),
        distributions={cell.id: _distribution(cell) for cell in cells},
    )


def _with_launches(report: Report, basis: _Basis, earlier: Sequence[RunRecord]) -> Report:
    """The report with the history of each cell, and with what single runs recorded beside their speed."""
    before = history.judge(earlier, basis.records)
    asked = (*before.asked, *(record for record in basis.sound if record.requests))
    return replace(
        report,
        routings=routing.analyse(basis.sound),
        memory_advice=memory.all_advice(basis.records),
        histories=history.analyse((*before.windows, *basis.trusted), asked=asked),
        rules_of_thumb=rules_of_thumb.rules(basis.sound),
    )


def _with_machine_tests(report: Report, basis: _Basis, baseline: nodes.Baseline | None, costing: Costing) -> Report:
    """The report with network, memory and node tests, and with what the network explains."""
    # Machine runs with corrupted data.
    pairs = zip(basis.records, basis.runs, strict=True)
    invalid = [r for r, f in pairs if f.status == Status.INVALID and not r.spec.is_certified]
    network, memory_found = fabric.analyse(basis.sound, invalid), memory.analyse(basis.records, basis.runs)
    tested = nodes.analyse(basis.sound, baseline)
    return replace(
        report,
        measurements=(
            *report.measurements,
            *(m for load in measurements.reliable_loads(basis.sound) for m in measurements.measure(load)),
            *network.measurements,
            *memory_found.measurements,
            *basis.peaks,
        ),
        collectives=network.rows,
        fits=network.fits,
        overlaps=network.overlaps,
        suspects=network.suspects,
        pairs=network.pairs,
        explanations=scaling.explain(report.scaling, basis.cells, network.fits, basis.sound),
        memory=memory_found.rows,
        frontier=memory_found.frontier,
        nodes=training.of_nodes(tested.verdicts, costing),
        notes=(*report.notes, *network.notes, *tested.notes),
    )


def _with_costs(report: Report, basis: _Basis, costing: Costing) -> Report:
    """The report with what depends on other findings: costs and what they decide, and claims."""
    report = replace(report, recommendations=recommend.beside_designs(report.recommendations, report.effects))
    report = training.added_to(verdicts.added_to(report, basis.records), basis.cells, costing)
    report = replace(report, recommendations=(*report.recommendations, *recommend.by_cost(report)))
    report = replace(report, loadgen=mlperf_verdict.verdicts(basis.records))
    return curves.added_to(claims.added_to(report, basis.records), basis.records)


# --- one run ---


def _is_proved(record: RunRecord, certificate: Certificate) -> bool:
    """Whether a run of the whole was proved on less."""
    return record.spec.script is None and record.spec.reduction is None and certificate.level is not None


def _finding(
    record: RunRecord,
    certificates: Mapping[str, Certificate],
    windows: Mapping[str, Window],
    replaced: bool = False,
) -> RunFinding:
    """replaced: a reference that a proof group replaces."""
    run = record.spec.run_id
    window = windows.get(run)
    status, reason = comparable.status_of(record, certificates.get(run))
    columns = [LAUNCH_COLUMNS.index(name) for name in ("first", "last")]
    first, last = window.launch[0, columns].tolist() if window else first_and_last_loss(step_table(record))
    evidence = [o.evidence for o in record.outcomes if o.evidence]
    return RunFinding(
        run=run,
        cell=record.spec.cell,
        status=str(status),
        reason=reason,
        axes=claims.axes_of(record),
        repeat=record.spec.repeat,
        is_reference=record.is_reference,
        started_at=record.started_at,
        duration_s=record.ended_at - record.started_at,
        loss_first=first if np.isfinite(first) else None,
        loss_last=last if np.isfinite(last) else None,
        outlier_steps=window.outliers if window else 0,
        health=_health(record, window, certificates.get(run)),
        warmup=window.warmup if window else None,
        throttled_steps=window.throttling.steps if window and window.throttling else None,
        device_name=ceilings.device_names(record.spec.topology.device, record.machines) if record.machines else None,
        goodput=window.goodput if window else None,
        trust=trust.finding(record, window),
        traits=record.spec.traits,
        rank_steps=_rank_steps(record),
        trace=next((str(e.settings["trace"]) for e in evidence if "trace" in e.settings), None),
        proof=record.spec.reduction.text if record.spec.reduction else None,
        replaced=replaced,
    )


def _rank_steps(record: RunRecord) -> tuple[RankStep, ...]:
    """The profiled step of each rank; several profiles of a rank are averaged."""
    found = []
    for rank, traces in sorted(grouped(record.traces, lambda trace: trace.rank).items()):
        steps = sum(trace.steps for trace in traces) or 1
        wall, compute, exposed, sent = (
            sum(getattr(trace, name) for trace in traces) / steps
            for name in ("wall_s", "compute_s", "exposed_s", "communication_s")
        )
        idle = max(wall - compute - exposed, 0.0)
        hidden = max(sent - exposed, 0.0)
        found.append(
            RankStep(
                rank=rank,
                compute_s=compute,
                exposed_s=exposed,
                hidden_s=hidden,
                idle_s=idle,
                by_dimension=layouts.exposed_by_dimension(record, rank, exposed),
                **_timeline(record, rank),
            )
        )
    return tuple(found)


def _timeline(record: RunRecord, rank: int) -> dict[str, Any]:
    """The steps of a rank in order, by dimension if these were profiled; stretches of one kind are one part."""
    ours = [sample for sample in record.timelines if sample.rank == rank and sample.slots]
    if not ours:
        return {}
    found = max(ours, key=lambda sample: len(sample.kinds))
    names, each = (*found.kinds, "idle"), found.wall_s / len(found.slots)
    parts = tuple((names[kind], each * len(list(slots))) for kind, slots in groupby(found.slots))
    return {"timeline": parts, "steps": found.steps}


def _health(record: RunRecord, window: Window | None, certificate: Certificate | None) -> tuple[str, ...]:
    """What a reader should know before trusting the run."""
    evidence = [o.evidence for o in record.outcomes if o.evidence]
    switches = sorted({f"{key}={value}" for e in evidence for key, value in e.switches.items()})
    neighbours = max((e.neighbours or 0 for e in evidence), default=0)
    found = []
    if record.shares_gpu:
        found.append(SHARED_GPU)
    if switches:
        found.append(f"debug switches: {', '.join(switches)}")
    if neighbours:
        found.append(f"{neighbours} other process{'' if neighbours == 1 else 'es'} on the GPU")
    if window and window.throttling and window.throttling.steps:
        found.append(window.throttling.text)
    if window and not window.warmup.by_rule:
        found.append(f"warm-up: {window.warmup.text}")
    if window and window.goodput:
        found.append(window.goodput.text)
    if certificate and certificate.valid and certificate.level_text:
        found.append(f"equal work: {certificate.level_text}")
    if certificate and certificate.valid and certificate.compared_steps < certificate.steps:
        compared = f"only {certificate.compared_steps} of {certificate.steps} steps could be compared"
        if certificate.unstable_from is not None:
            compared += f": training is unstable from step {certificate.unstable_from} on; lower learning_rate"
        if certificate.level and not certificate.compared_steps and not record.spec.script:
            compared = "no step could be compared at full size: this is the only configuration of its work"
        found.append(compared)
    return tuple(found)


# --- the whole campaign ---


def _machines(records: Sequence[RunRecord]) -> tuple[Mapping[str, Any], ...]:
    """Each host once per distinct state, in order of appearance."""
    distinct = {json.dumps(m, sort_keys=True, default=str): m for r in records for m in r.machines}
    return tuple(distinct.values())


def _distribution(cell: Cell) -> tuple[float, ...]:
    """The step times of all windows; evenly spaced ones if there are more than 500, including first and last."""
    seconds = cell.seconds()
    chosen = np.linspace(0, len(seconds) - 1, min(len(seconds), LONGEST_DISTRIBUTION)).round().astype(int)
    return tuple(seconds[chosen].tolist())


def _beyond_context(spec: RunSpec) -> str | None:
    """A note if the sequence exceeds the context; None also if the model directory is not on this machine."""
    with contextlib.suppress(RequestError):
        return arithmetic.beyond_context(arithmetic.load(spec.model), spec.model_text, spec.training.sequence_length)
    return None


def _notes(basis: _Basis, machines: Sequence[Mapping[str, Any]]) -> list[str]:
    cells, measured = basis.cells, [run for run in basis.runs if not run.proves_only]
    notes = []
    evidence = [(c, c.windows[0].record.evidence) for c in cells]
    if shapes := sorted(
        {c.axes["model"] for c, e in evidence if e is not None and e.settings.get("weights") == "random"}, key=str
    ):
        notes.append(f"the weights of {', '.join(map(str, shapes))} are random: only the shape of the model was used")
    notes += sorted({note for cell in cells if not cell.spec.script and (note := _beyond_context(cell.spec))})
    data = {e.settings.get("data") for c, e in evidence if e is not None and c.spec.script}
    if "samples" in data:
        notes.append("a script has no token ids: its rates count samples, and in costs a sample is one token")
    if "unseen" in data:
        notes.append(
            "the forward passes of a script are inside compiled code, where its data cannot be seen: its rates count "
            "micro-batches, and in costs one is one token"
        )
    if not cells and any(run.is_certified for run in measured):
        sound = any(run.is_certified and run.status == Status.OK for run in measured)
        why = "no run has a step beyond its warm-up" if sound else "no run ended ok with a valid certificate"
        notes.append(f"{why}: nothing is measured, compared or recommended")
    if any(len(cell.windows) == 1 for cell in cells):
        notes.append("launches were not repeated in every cell: peak memory is compared only between repeated ones")
    if any(cell.shared_gpu for cell in cells):
        notes.append(f"{SHARED_GPU}; throughput and step time of such runs are shown, but not compared or ranked")
    if len({metrics.device_kind(cell) for cell in cells}) > 1:
        notes.append("the runs used several kinds of device; only runs on the same kind are compared")
    if invalid := sum(run.status == Status.INVALID for run in measured):
        notes.append(f"{invalid} of {len(measured)} runs are invalid: they are shown with the reason, but never ranked")
    notes += _start_notes(cells)
    # Facts of a host that changed, such as an upgrade between repeats or another power cap.
    first: dict[str, Mapping[str, Any]] = {}
    drift: dict[str, str] = {}
    for facts in machines:
        changed = machine.fingerprint_diff(first.setdefault(str(facts.get("host")), facts), facts).items()
        drift |= {path: f"{path} was {a}, then {b}" for path, (a, b) in changed if not path.startswith("environment.")}
    if drift:
        notes.append(f"a host changed during the campaign, which may affect its runs: {'; '.join(drift.values())}")
    return [*notes, *_proof_notes(basis.records, basis.certificates), *_reused_notes(basis.records)]


def _start_notes(cells: Sequence[Cell]) -> Iterator[str]:
    """Launches of one cell whose ranks were started in two ways: their spread includes the difference between these."""
    reasons, mixed = set[str](), list[str]()
    for cell in cells:
        settings = [evidence.settings for w in cell.windows if (evidence := w.record.evidence) is not None]
        reasons |= {str(own["not_forked"]) for own in settings if "not_forked" in own}
        if len({own.get("started") for own in settings}) > 1:
            mixed.append(str(cell.spec.strategy or cell.spec.workload))
    if mixed:
        names = ", ".join(dict.fromkeys(mixed))
        yield f"some launches of {names} have forked ranks and others new interpreters: their spread includes both"
    if reasons:
        yield f"ranks were started as new interpreters instead of forked, because {'; '.join(sorted(reasons))}"


def _proof_notes(records: Sequence[RunRecord], certificates: Mapping[str, Certificate]) -> list[str]:
    """What certificates of works without a reference rest on."""
    cells: dict[str, dict[str, None]] = {}
    for record in records:
        certificate = certificates.get(record.spec.run_id)
        if certificate is not None and certificate.valid and _is_proved(record, certificate):
            cells.setdefault(str(certificate.level), {})[record.spec.cell] = None
    return [
        f"{level}: the whole has no one-process reference. {_configurations(len(own))} against one process in this "
        f"reduced form{', and compared with each other at full size' if len(own) > 1 else ''}"
        for level, own in cells.items()
    ]


def _configurations(count: int) -> str:
    return "1 configuration was certified" if count == 1 else f"{count} configurations were certified"


def _reused_notes(records: Sequence[RunRecord]) -> list[str]:
    """The references and proofs that were not computed for these runs."""
    notes = []
    for noun, reused in (
        ("reference", [record for record in records if record.reused and record.is_reference]),
        ("proof", [record for record in records if record.reused and not record.is_reference]),
    ):
        if reused:
            days = sorted({f"{datetime.fromtimestamp(record.started_at, UTC):%Y-%m-%d}" for record in reused})
            many = f"1 {noun} was" if len(reused) == 1 else f"{len(reused)} {noun}s were"
            notes.append(
                f"{many} reused, computed on {' and '.join(days)} with equal request, data, software, variables and "
                f"class of machine (--no-cache computes {noun}s again)"
            )
    return notes


def _replaced_notes(earlier: Sequence[RunRecord]) -> list[str]:
    """How many launches were replaced by newer ones."""
    replaced = sum(not record.proves_only for record in earlier)
    if not replaced:
        return []
    many = f"{replaced} launches were" if replaced > 1 else "1 launch was"
    return [f"{many} replaced by newer or successful ones of the same runs and count only in histories"]


def _with_served(report: Report, records: Sequence[RunRecord], costing: Costing) -> Report:
    """The report with accuracy, comparisons and costs of inference runs; unchanged if there are none."""
    inference = [record for record in records if record.requests]
    if not inference:
        return report
    answers = accuracy.analyse(inference)
    costs = served.analyse(inference, costing)
    scores = (m for each in answers for m in (*each.scores, *(s for r in each.replicas for s in r.scores)))
    measured = (*scores, *served.measurements(costs), *served.energies(inference))
    return replace(
        report,
        accuracy=answers,
        paired=paired.analyse(inference, answers),
        served_pairs=equal_work.analyse(inference, answers),
        served_costs=costs,
        measurements=(*report.measurements, *measured),
        notes=(*report.notes, *_served_notes(inference, costs, costing)),
    )


def _served_notes(records: Sequence[RunRecord], costs: Sequence[object], costing: Costing) -> list[str]:
    """Why a requested cost is missing."""
    if costs or costing.prices is None:
        return []
    if any(record.shares_gpu for record in records):
        return ["--price: replicas share a GPU, so there is no inference cost"]
    if all(stage.replica is not None for record in records for stage in record.stages) and records[0].stages:
        return ["--price: replicas took turns to be compared, so there is no inference cost"]
    return ["--price: no load met its limits on a device that the price applies to, so there is no inference cost"]


def recipes(records: Iterable[RunRecord], known: Mapping[str, Recipe] = MappingProxyType({})) -> tuple[Recipe, ...]:
    """One per cell in the order of its first run; references follow from the cells that need them. known: by cell,
    those that were made already."""
    made = []
    for cell, specs in grouped((r.spec for r in records if not r.proves_only), lambda spec: spec.cell).items():
        if cell in known:
            made.append(known[cell])
            continue
        spec, repeats = specs[0], max(spec.repeat for spec in specs) + 1
        # A unique name: runs of the same name in the same folder are complete, so nothing would run.
        name = f"{spec.run_id.rpartition(f'-r{spec.repeat}-')[0]}-{spec.cell[:8]}"
        requested = {field: value for field, value in recipe.fields(spec).items() if value is not None}
        lines = (_base_line(field, json.dumps(value)) for field, value in requested.items())
        text = "".join((_yaml({"name": name, "repeats": repeats}), _BASE, *lines))
        made.append(Recipe(cell=spec.cell, file=f"{name}.yaml", experiment=text, command=f"paceline run {name}.yaml"))
    return tuple(made)


_BASE = "base:\n"


@lru_cache(maxsize=4096)
def _base_line(field: str, value: str) -> str:
    """A field of a recipe, with its value as JSON; cells have most of them in common."""
    return _yaml({"base": {field: json.loads(value)}}).removeprefix(_BASE)


def _yaml(document: Mapping[str, Any]) -> str:
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=10_000)
