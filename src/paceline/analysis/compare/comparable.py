"""What of a folder can be set beside another's: each cell's quantities, resampled, from runs that may be believed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.analysis.compare.cells import comparable_metrics, title_of, untitled_axes
from paceline.analysis.findings import HIGHER, Certificate, Measurement
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
    """The certificate of today decides between ok and invalid: its reference may have come after the run was sealed."""
    if record.status not in (Status.OK, Status.INVALID) or record.is_reference:
        return record.status, record.error
    if not record.spec.is_certified:
        wrong = problems(record)
        return (Status.INVALID, "; ".join(wrong)) if wrong else (record.status, record.error)
    if certificate is None or not certificate.valid:
        reasons = "; ".join(certificate.reasons) if certificate else "the run carries no certificate"
        return Status.INVALID, record.error or reasons
    return Status.OK, None


def problems(record: RunRecord) -> list[str]:
    """Why an uncertified run must not be believed: data that arrived wrong, or nothing; none for one that can be.

    A test of nodes that finds a wrong result has done what it is for."""
    if record.spec.traits.tests_nodes and record.kernels:
        return []
    if record.spec.serving:
        return measurements.problems(record)
    wrong = [s for s in record.collectives if s.wrong]
    found = [
        f"{s.operation} of {s.size_bytes} bytes in {s.dtype}: {s.wrong} wrong elements on rank {s.rank}"
        for s in wrong[:3]
    ]
    found += [f"and {len(wrong) - 3} more rows"] if len(wrong) > 3 else []
    found += _kernel_problems(record)
    if not (record.collectives or record.kernels or record.memory):
        found.append("nothing was recorded")
    return found


def _kernel_problems(record: RunRecord) -> list[str]:
    """A kernel whose result is wrong, or that broke down, says nothing about what the device can do."""
    bad = [s for s in record.kernels if s.wrong or s.status == "failed"]
    found = [
        f"{' '.join(filter(None, (s.kernel, s.dtype, s.variant)))} ({s.label}) on rank {s.rank}: "
        + (f"{s.wrong} wrong elements" if s.wrong else f"failed: {s.error}")
        for s in bad[:3]
    ]
    return [*found, f"and {len(bad) - 3} more rows"] if len(bad) > 3 else found


CELL, ROW = "cell", "row"


@dataclass(frozen=True, slots=True, eq=False)
class Quantity:
    """One number of a cell with its spread; row names the row of a sweep it belongs to, None for the whole cell.
    tells_alone: one launch supports an interval, because it holds many answers of the same load. bracket: of a search,
    whose interval is no resampled one. unbounded: why it has no spread, where it has none."""

    metric: str
    unit: str
    better: str
    row: str | None
    resampled: Resampled
    tells_alone: bool = False
    bracket: rate_search.Bracket | None = None
    unbounded: str = "launches were not repeated"

    @property
    def subject(self) -> str:
        return CELL if self.row is None else ROW


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """All believable launches of one cell, and what they say; quantities are by metric and row."""

    spec: RunSpec
    label: str
    records: tuple[RunRecord, ...]
    quantities: Mapping[tuple[str, str | None], Quantity]

    @property
    def runs(self) -> tuple[str, ...]:
        return tuple(r.spec.run_id for r in self.records)

    @property
    def device(self) -> str:
        return ceilings.device_names(self.spec.topology.device, (m for r in self.records for m in r.machines))


@dataclass(frozen=True, slots=True)
class Judged:
    """One run as the certificates of its folder see it; label tells its cell from the others of that folder."""

    record: RunRecord
    label: str
    status: Status
    reason: str | None

    @property
    def ok(self) -> bool:
        return self.status is Status.OK


def judge(records: Sequence[RunRecord]) -> dict[str, list[Judged]]:
    """Runs by cell. References prove others and probes look for a limit: neither is a subject of its own."""
    certificates = certify_all(records)
    found: defaultdict[str, list[Judged]] = defaultdict(list)
    ours = [r for r in records if not r.is_reference and not r.spec.traits.probes_limit]
    named = untitled_axes([r.spec.axes() for r in ours])
    for r in ours:
        judged = Judged(r, describe(r.spec, named), *status_of(r, certificates.get(r.spec.run_id)))
        found[r.spec.cell].append(judged)
    return dict(found)


def describe(spec: RunSpec, named: Iterable[str] = ()) -> str:
    title = title_of(spec.axes(), named)
    return title if spec.is_certified else f"{spec.workload.name}, {title}"


def subject_of(judged: Iterable[Judged]) -> Subject | None:
    """None where no run is ok or nothing of it can be compared."""
    believed = [j for j in judged if j.ok]
    if not believed:
        return None
    records = tuple(j.record for j in believed)
    found = {(q.metric, q.row): q for q in quantities_of(records)}
    return Subject(records[0].spec, believed[0].label, records, found) if found else None


def quantities_of(records: Sequence[RunRecord]) -> Iterator[Quantity]:
    """Of valid launches of one cell. An uncertified workload is compared by the samples it leaves, if any."""
    spec = records[0].spec
    if spec.serving:
        yield from _served(records)
    elif spec.is_certified:
        yield from _training(records)
    elif not spec.traits.tests_nodes:
        yield from _collectives(records)
        yield from _ceilings(records)


def _training(records: Sequence[RunRecord]) -> Iterator[Quantity]:
    for cell in metrics.gather(map(open_window, records)):
        for name in comparable_metrics((cell,)):
            if found := metrics.estimate(cell, name):
                yield Quantity(name, BY_NAME[name].unit, BY_NAME[name].better, None, found)


def _collectives(records: Sequence[RunRecord]) -> Iterator[Quantity]:
    """Bus bandwidth of every row; the time of one that moves no payload."""
    for entry in sweep.entries(records):
        time, s = entry.resampled_time(), entry.first
        if time is None or entry.shared_gpu or not time.logarithmic:
            continue
        row = " ".join(filter(None, (s.operation, s.dtype, _size(s.size_bytes), s.mode, "in place" * s.in_place)))
        factor, metric = sweep.factor_of(s.operation, s.group_size), "busbw_bytes_per_s"
        if factor is None or not s.size_bytes:
            metric = "collective_time_s"
        else:
            turned = None if time.deviations is None else -time.deviations
            time = Resampled(s.size_bytes * factor / time.value, turned, time.freedom, time.launches, True)
        yield Quantity(metric, *sweep.METRICS[metric], row, time)


def _size(size_bytes: int) -> str:
    return format_size(size_bytes) if size_bytes else ""


def _ceilings(records: Sequence[RunRecord]) -> Iterator[Quantity]:
    if any(r.shares_gpu for r in records):
        return
    for row in ceilings.rows_of(records):
        rate = row.rate()
        if rate is not None and rate.value > 0:
            metric, unit = ceilings.METRICS[row.key.kernel]
            name = " ".join(filter(None, (row.key.kernel, row.key.dtype, row.key.label, row.key.variant)))
            yield Quantity(metric, unit, HIGHER, name, rate)


def _served(records: Sequence[RunRecord]) -> Iterator[Quantity]:
    """Of each load its rate, and where requests did not all wait in one queue also its latencies; of a search what it
    found: its loads are other ones each time, and end as soon as they are lost."""
    if any(r.shares_gpu for r in records):
        return
    found_rate = rate_search.bracket(rate_searched(records))
    if found_rate is not None:
        whole = unbounded(found_rate.rate, found_rate.launches)
        about = measurements.METRICS[rate_search.METRIC]
        yield Quantity(rate_search.METRIC, *about, None, whole, tells_alone=True, bracket=found_rate)
    for load in () if is_search(records) else measurements.reliable_loads(records):
        for metric in equal_work.metrics_of(load):
            found = estimates.estimate(load, metric)
            if found is not None and found.value > 0:
                about, why = estimates.COMPARED[metric], estimates.why_unbounded(found, metric)
                yield Quantity(metric, *about, load.name, found, tells_alone=True, unbounded=why)


def rate_searched(records: Sequence[RunRecord]) -> Measurement | None:
    """What launches of one cell found that searched; None where they did not, or came no further than a guess."""
    return rate_search.max_rate(measurements.reliable_loads(records)) if is_search(records) else None


def is_search(records: Sequence[RunRecord]) -> bool:
    serving = records[0].spec.serving
    return serving is not None and serving.scenario == "search"
