"""What can be compared between folders: whether runs are valid, and the resampled quantities of each cell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.analysis.compare.cells import comparable_metrics, title_of, untitled_axes
from paceline.analysis.findings import HIGHER, Certificate, Measurement
from paceline.analysis.grouping import grouped
from paceline.analysis.machine import ceilings, sweep
from paceline.analysis.served import equal_work, estimates, measurements, rate_search
from paceline.analysis.statistics.intervals import Resampled, unbounded
from paceline.analysis.training import metrics
from paceline.analysis.training.certificate import certify_all
from paceline.analysis.training.metrics import BY_NAME
from paceline.analysis.training.window import open_window
from paceline.experiment.spec import RunSpec
from paceline.results.records import RunRecord, Status
from paceline.wording import format_size


def status_of(record: RunRecord, certificate: Certificate | None) -> tuple[Status, str | None]:
    """Status and reason. The current certificate decides between ok and invalid: its reference may be newer than
    the run.
    """
    if record.status not in (Status.OK, Status.INVALID) or record.is_reference:
        return record.status, record.error
    if not record.spec.is_certified:
        wrong = problems(record)
        return (Status.INVALID, "; ".join(wrong)) if wrong else (record.status, record.error)
    if certificate is None or not certificate.valid:
        reasons = "; ".join(certificate.reasons) if certificate else "the run has no certificate"
        return Status.INVALID, record.error or reasons
    return Status.OK, None


def problems(record: RunRecord) -> list[str]:
    """Why an uncertified run is rejected: corrupted data, or nothing recorded; empty if it is accepted.

    A node test that finds a wrong result has done its job.
    """
    if record.spec.traits.tests_nodes and record.kernels:
        return []
    if record.spec.serving:
        return measurements.problems(record)
    collectives = [
        f"{s.operation} of {s.size_bytes} bytes in {s.dtype}: {s.wrong} wrong elements on rank {s.rank}"
        for s in record.collectives
        if s.wrong
    ]
    kernels = [
        f"{' '.join(filter(None, (s.kernel, s.dtype, s.variant)))} ({s.label}) on rank {s.rank}: "
        + (f"{s.wrong} wrong elements" if s.wrong else f"failed: {s.error}")
        for s in record.kernels
        if s.wrong or s.status == "failed"
    ]
    reasons = []
    for rows in (collectives, kernels):
        reasons += [*rows[:3], *([f"and {len(rows) - 3} more rows"] if len(rows) > 3 else [])]
    if not (record.collectives or record.kernels or record.memory):
        reasons.append("nothing was recorded")
    return reasons


CELL, ROW = "cell", "row"


@dataclass(frozen=True, slots=True, eq=False)
class Quantity:
    """One number of a cell with its spread; row names the row of a sweep it belongs to, None for the whole cell.

    bracket: the result of a search, whose interval is not resampled. unbounded: why it has no spread, if so.
    """

    metric: str
    unit: str
    better: str
    row: str | None
    resampled: Resampled
    bracket: rate_search.Bracket | None = None
    unbounded: str = "launches were not repeated"

    @property
    def subject(self) -> str:
        return CELL if self.row is None else ROW


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """All valid launches of one cell and their quantities, by metric and row. level: on what it was proved, if its
    reference does not fit a device."""

    spec: RunSpec
    label: str
    records: tuple[RunRecord, ...]
    quantities: Mapping[tuple[str, str | None], Quantity]
    level: str | None = None

    @property
    def runs(self) -> tuple[str, ...]:
        return tuple(r.spec.run_id for r in self.records)

    @property
    def device(self) -> str:
        return ceilings.device_names(self.spec.topology.device, (m for r in self.records for m in r.machines))


@dataclass(frozen=True, slots=True)
class Judged:
    """One run as judged by the certificates of its folder; label distinguishes its cell from the others of that
    folder.
    """

    record: RunRecord
    label: str
    status: Status
    reason: str | None
    level: str | None = None

    @property
    def ok(self) -> bool:
        return self.status is Status.OK


def judge(records: Sequence[RunRecord]) -> dict[str, list[Judged]]:
    """Runs by cell. References, runs of proof groups and probes are not compared."""
    certificates = certify_all(records)
    ours = [r for r in records if not r.proves_only and not r.spec.traits.probes_limit]
    named = untitled_axes([r.axes() for r in ours])
    judged = (_judged(r, describe(r, named), certificates.get(r.spec.run_id)) for r in ours)
    return grouped(judged, lambda run: run.record.spec.cell)


def _judged(record: RunRecord, label: str, certificate: Certificate | None) -> Judged:
    level = None if certificate is None or record.spec.script else certificate.level
    return Judged(record, ", ".join(filter(None, (label, level))), *status_of(record, certificate), level)


def describe(record: RunRecord, named: Iterable[str] = ()) -> str:
    title, spec = title_of(record.axes(), named), record.spec
    return title if spec.is_certified else f"{spec.workload.name}, {title}"


def subject_of(judged: Iterable[Judged]) -> Subject | None:
    """None if no run is ok or it has nothing to compare."""
    valid = [j for j in judged if j.ok]
    if not valid:
        return None
    records = tuple(j.record for j in valid)
    found = {(q.metric, q.row): q for q in quantities_of(records)}
    return Subject(records[0].spec, valid[0].label, records, found, valid[0].level) if found else None


def quantities_of(records: Sequence[RunRecord]) -> Iterator[Quantity]:
    """Quantities of valid launches of one cell. An uncertified workload is compared by the samples it recorded."""
    spec = records[0].spec
    if spec.serving:
        yield from _served(records)
    elif spec.is_certified:
        for cell in metrics.gather(map(open_window, records)):
            for name in comparable_metrics((cell,)):
                if found := metrics.estimate(cell, name):
                    yield Quantity(name, metrics.unit_of(name, records[0]), BY_NAME[name].better, None, found)
    elif not spec.traits.tests_nodes:
        yield from _machine(records)


def _machine(records: Sequence[RunRecord]) -> Iterator[Quantity]:
    """Bus bandwidth of every row of a sweep, or the time of one without payload; the rate of every kernel."""
    for entry in sweep.entries(records):
        time, s = entry.resampled_time(), entry.first
        if time is None or entry.shared_gpu or not time.logarithmic:
            continue
        size = format_size(s.size_bytes) if s.size_bytes else ""
        row = " ".join(filter(None, (s.operation, s.dtype, size, s.mode, "in place" * s.in_place)))
        factor, metric = sweep.factor_of(s.operation, s.group_size), "busbw_bytes_per_s"
        if factor is None or not s.size_bytes:
            metric = "collective_time_s"
        else:
            # A rate has the relative error of its time.
            time = replace(time, value=s.size_bytes * factor / time.value)
        yield Quantity(metric, *sweep.METRICS[metric], row, time)
    for kernel in () if any(r.shares_gpu for r in records) else ceilings.rows_of(records):
        rate = kernel.rate()
        if rate is not None and rate.value > 0:
            metric, unit = ceilings.METRICS[kernel.key.kernel]
            name = " ".join(filter(None, (kernel.key.kernel, kernel.key.dtype, kernel.key.label, kernel.key.variant)))
            yield Quantity(metric, unit, HIGHER, name, rate)


def _served(records: Sequence[RunRecord]) -> Iterator[Quantity]:
    """For each load its rate, and its latencies unless all requests wait in one queue; for a search its result, because
    its loads differ each time and stop early.
    """
    if any(r.shares_gpu for r in records):
        return
    found_rate = rate_search.bracket(rate_searched(records))
    if found_rate is not None:
        whole = unbounded(found_rate.rate, found_rate.launches)
        about = measurements.METRICS[rate_search.METRIC]
        yield Quantity(rate_search.METRIC, *about, None, whole, bracket=found_rate)
    for load in () if is_search(records) else measurements.reliable_loads(records):
        for metric in equal_work.metrics_of(load):
            found = estimates.estimate(load, metric)
            if found is not None and found.value > 0:
                about, why = estimates.COMPARED[metric], estimates.why_unbounded(found, metric)
                yield Quantity(metric, *about, load.name, found, unbounded=why)


def rate_searched(records: Sequence[RunRecord]) -> Measurement | None:
    """The rate found by launches of one cell that searched; None if they did not, or found no rate."""
    return rate_search.max_rate(measurements.reliable_loads(records)) if is_search(records) else None


def is_search(records: Sequence[RunRecord]) -> bool:
    serving = records[0].spec.serving
    return serving is not None and serving.scenario == "search"
