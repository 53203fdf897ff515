"""Served models as curves, from the raw requests: spreads of latency, loads beside each other, replicas over a run.

Every curve is of a fixed number of points at most: a run of a million requests makes no larger report.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace

import numpy as np

from paceline.analysis.findings import Report
from paceline.analysis.findings.served import (
    LATENCY,
    TPOT,
    TTFT,
    ClientAudit,
    LatencySpread,
    ServedLoad,
    ServedShapes,
)
from paceline.analysis.served import latency_bounds, measurements, traces
from paceline.analysis.served.loads import Served
from paceline.analysis.served.measurements import NS
from paceline.analysis.served.percentile_curve import QUOTED, spread
from paceline.experiment.serving import (
    MOST_CPU_RATIO,
    MOST_READ_LAG_S,
    MOST_SCHEDULE_LAG_OF_TTFT,
    MOST_SCHEDULE_LAG_S,
    OPEN,
    SCENARIOS,
    Serving,
)
from paceline.results.records import RunRecord, Status
from paceline.results.served_samples import ClientSample, RequestSample

QUANTITIES: dict[str, Callable[[RequestSample], float | None]] = {
    TTFT: measurements.ttft_s,
    TPOT: measurements.tpot_s,
    LATENCY: measurements.latency_s,
}


# All launches of one cell.
Launches = Sequence[RunRecord]


def added_to(report: Report, records: Sequence[RunRecord]) -> Report:
    """The report with the shapes of its served runs; the same report where none was served."""
    ended = {run.run: run.status for run in report.runs}
    asked = [record for record in records if record.requests]
    sound = [record for record in asked if ended.get(record.spec.run_id) == Status.OK]
    judged = [record for record in asked if record.clients]
    if not asked:
        return report
    believed = {record.spec.cell for record in sound}
    # As verdicts do: of a cell without a launch that is believed, those that are not.
    invalid = [r for r in asked if ended.get(r.spec.run_id) == Status.INVALID and r.spec.cell not in believed]
    cells = _in_order([*sound, *invalid])
    shapes = ServedShapes(
        loads=tuple(itertools.chain.from_iterable(_loads(cell, believed) for cell in cells)),
        traces=traces.traces(cells, believed),
        audits=tuple(map(_audit, _in_order(judged))),
    )
    return replace(report, served_shapes=shapes)


def _in_order(records: Sequence[RunRecord]) -> list[Launches]:
    """Cells by scenario, the smallest load first: runs are shuffled."""

    def place(cell: Launches) -> tuple[int, float, str]:
        asked = _asked(cell[0])
        load = asked.rate_per_s if asked.rate_per_s is not None else asked.concurrency or 0
        return SCENARIOS.index(asked.scenario), load, cell[0].spec.cell

    by_cell: dict[str, list[RunRecord]] = {}
    for record in sorted(records, key=lambda record: record.spec.repeat):
        by_cell.setdefault(record.spec.cell, []).append(record)
    return sorted(by_cell.values(), key=place)


def _asked(record: RunRecord) -> Serving:
    assert record.spec.serving is not None
    return record.spec.serving


# --- loads ---


def _loads(cell: Launches, believed: Container[str]) -> list[ServedLoad]:
    """In the order of their size."""
    found = sorted(measurements.gather(cell), key=_size)
    return [_served_load(load, load.cell in believed and not measurements.load_problems(load)) for load in found]


def _size(load: Served) -> tuple[float, int, int]:
    return load.rate_per_s or 0.0, load.concurrency or 0, load.replica or 0


def _served_load(load: Served, is_believed: bool) -> ServedLoad:
    wall, limits = load.wall_s(), load.limits
    return ServedLoad(
        cell=load.cell,
        axes=load.spec.axes(),
        runs=load.runs,
        scenario=load.serving.scenario,
        rate_per_s=load.rate_per_s,
        concurrency=load.concurrency,
        replica=load.replica,
        requests=len(load.requests),
        failed=len(load.requests) - len(load.answered),
        late=sum(not measurements.in_time(request, limits) for request in load.answered) if load.has_limits else None,
        output_tokens_per_s=load.output_tokens() / wall if wall > 0 else None,
        requests_per_s=len(load.answered) / wall if wall > 0 else None,
        spreads=tuple(_spreads(load)),
        is_believed=is_believed,
    )


def _spreads(load: Served) -> Iterable[LatencySpread]:
    for name, quantity in QUANTITIES.items():
        values = [value for request in load.answered if (value := quantity(request)) is not None]
        bounds = latency_bounds.of_answers(load, quantity, QUOTED)
        if (found := spread(name, values, load.limits.get(f"{name}_s"), bounds)) is not None:
            yield found


# --- the client ---


def _audit(cell: Launches) -> ClientAudit:
    """The bounds are those by which a run is judged; that of the schedule is the tightest of the launches."""
    spec = cell[0].spec
    clients = [client for record in cell for client in record.clients]
    return ClientAudit(
        cell=spec.cell,
        axes=spec.axes(),
        runs=tuple(record.spec.run_id for record in cell),
        processes=len({(client.rank, client.shard) for client in clients}),
        schedule_lag_s=_worst(c.schedule_lag_p99_ns for c in clients) if any(map(_is_open, cell)) else None,
        schedule_bound_s=min(map(_schedule_bound_s, cell)),
        read_lag_s=_worst(c.read_lag_p99_ns for c in clients),
        read_bound_s=MOST_READ_LAG_S,
        cpu_ratio=max((ratio for c in clients if (ratio := _cpu_ratio(c)) is not None), default=None),
        cpu_bound_ratio=MOST_CPU_RATIO,
        clock_drift_s=_worst(abs(c.clock_drift_ns) for c in clients),
        **_seen(cell),
    )


def _seen(cell: Launches) -> dict[str, float | None]:
    """Of all answers: the share without the kernel's times, and of their events that which shared a read."""
    came = [r for record in cell for r in record.requests if r.first_byte_ns is not None]
    pieces = sum(r.pieces for r in came)
    return {
        "unstamped_ratio": sum(not r.stamped for r in came) / len(came) if came else None,
        "coalesced_ratio": sum(r.coalesced for r in came) / pieces if pieces else None,
    }


def _is_open(record: RunRecord) -> bool:
    """Whether its requests were due by a schedule."""
    return _asked(record).scenario in OPEN or any(stage.rate_per_s is not None for stage in record.stages)


def _schedule_bound_s(record: RunRecord) -> float:
    first = [value for request in record.requests if (value := measurements.ttft_s(request)) is not None]
    return max(MOST_SCHEDULE_LAG_S, MOST_SCHEDULE_LAG_OF_TTFT * float(np.median(first)) if first else 0.0)


def _worst(lags_ns: Iterable[float | None]) -> float | None:
    return max((lag / NS for lag in lags_ns if lag is not None), default=None)


def _cpu_ratio(client: ClientSample) -> float | None:
    return client.cpu_s / client.wall_s if client.wall_s > 0 else None
