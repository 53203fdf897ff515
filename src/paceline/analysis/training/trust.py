"""The trust light of one launch: what disturbed it while it was measured, by the readings of its hosts and GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from paceline.analysis.findings import LaunchTrust
from paceline.analysis.grouping import grouped
from paceline.analysis.training import gauges
from paceline.analysis.training.gauge_summary import measured_span
from paceline.analysis.training.window import Window, open_window
from paceline.host import trust
from paceline.host.trust import Check, Trust
from paceline.host.usage import HostUsage
from paceline.results.records import RunRecord, Status

# Grades of a client's headroom (`serving.headroom`).
HEADROOM = {"good": trust.GREEN, "tight": trust.AMBER, "insufficient": trust.RED}


def launch_trust(record: RunRecord, window: Window | None = None) -> Trust | None:
    """The light of a launch over its measured window; None if its speed is not measured.

    A check that several hosts, GPUs or loads fail is listed once, for the worst of them.
    """
    if record.proves_only or record.spec.traits.measures_memory:
        return None
    if window is None and record.steps and record.spec.is_certified:
        window = open_window(record)
    return Trust(trust.worst_of([*_host_checks(record, window), *_gpu_checks(record, window), *_client_checks(record)]))


def finding(record: RunRecord, window: Window | None = None) -> LaunchTrust | None:
    """The light as a report lists it; None if nothing is known about it, or the run did not end ok."""
    light = launch_trust(record, window) if record.status is Status.OK else None
    if light is None or (light.level == trust.UNKNOWN and not record.repeated):
        return None
    return LaunchTrust(level=light.level, reasons=light.reasons, repeated=record.repeated)


def _client_checks(record: RunRecord) -> Iterator[Check]:
    """How far each load was from the limit of its client. Another launch sends the same load."""
    for stage in record.stages:
        if stage.headroom is not None:
            level = HEADROOM.get(str(stage.headroom_grade), trust.UNKNOWN)
            yield Check("client headroom", level, stage.headroom, lasts=True)


# --- hosts ---


def _host_checks(record: RunRecord, window: Window | None) -> Iterator[Check]:
    """One set of grades for each running kernel: containers on one host count the same cores."""
    pairs: list[tuple[str, HostUsage, HostUsage]] = []
    readers = grouped((s for s in record.gauges if s.device is None and s.usage is not None), lambda s: s.rank)
    for rank, samples in readers.items():
        readings = sorted((HostUsage.from_dict(s.usage or {}) for s in samples), key=lambda usage: usage.at_s)
        if pair := covering(readings, _span(record, rank, window)):
            pairs.append((samples[0].host, *pair))
    by_kernel = grouped(pairs, lambda pair: pair[1].kernel or pair[0])
    engine, spec = record.spec.engine, record.spec
    for ours in by_kernel.values():
        host, first, last = ours[0]
        checks = trust.usage_checks(
            first,
            last,
            is_cpu_run=spec.topology.device == "cpu",
            own_s=_own_s(ours),
            serves_elsewhere=engine is not None and not spec.starts_servers,
        )
        where = f" on {host}" if len(by_kernel) > 1 else ""
        yield from (replace(check, text=f"{check.text}{where}") for check in checks)


def _own_s(pairs: Sequence[tuple[str, HostUsage, HostUsage]]) -> float | None:
    """CPU seconds of the run on one kernel between the first pair of readings.

    Readers of one process namespace see the same processes, so the largest count is right; those in different
    containers see different ones, so their counts are added.
    """
    elapsed_s = pairs[0][2].at_s - pairs[0][1].at_s
    by_namespace: dict[str | None, float] = {}
    for _, first, last in pairs:
        if first.own_s is None or last.own_s is None or last.own_s < first.own_s or last.at_s <= first.at_s:
            return None
        # Readers are up to an interval apart.
        own_s = (last.own_s - first.own_s) / (last.at_s - first.at_s) * elapsed_s
        by_namespace[first.namespace] = max(own_s, by_namespace.get(first.namespace, 0.0))
    return sum(by_namespace.values())


def _span(record: RunRecord, rank: int, window: Window | None) -> tuple[float, float] | None:
    """The measured time by the clock of a rank's host. Counters start over with a restart, so only the last attempt of
    a restarted launch is graded."""
    span = measured_span(record, rank, window)
    restarted_at = max((start.at_s for start in record.starts if start.rank == rank), default=None)
    if span is None or restarted_at is None or len(record.attempts) < 2:
        return span
    return max(span[0], restarted_at), span[1]


def covering(readings: Sequence[HostUsage], span: tuple[float, float] | None) -> tuple[HostUsage, HostUsage] | None:
    """The closest two readings around a span of time, or the first and last of all; None if there are not two.

    >>> at = [HostUsage(at_s=second) for second in (0.0, 1.0, 2.0, 3.0, 4.0)]
    >>> [usage.at_s for usage in covering(at, (1.5, 2.5))]
    [1.0, 3.0]
    """
    if span is not None and readings:
        begin = max((usage.at_s for usage in readings if usage.at_s <= span[0]), default=readings[0].at_s)
        end = min((usage.at_s for usage in readings if usage.at_s >= span[1]), default=readings[-1].at_s)
        readings = [usage for usage in readings if begin <= usage.at_s <= end]
    return (readings[0], readings[-1]) if len(readings) > 1 else None


# --- GPUs ---


def _gpu_checks(record: RunRecord, window: Window | None) -> Iterator[Check]:
    if record.spec.topology.device != "cuda":
        return
    known = {source: samples for source, samples in gauges.sources(record).items() if source.device is not None}
    if not record.shares_gpu:
        counts = [o.evidence.neighbours for o in record.outcomes if o.evidence and o.evidence.neighbours is not None]
        # The first reading is made before the ranks use their GPUs.
        busy = gauges.known(samples[0].utilisation_ratio for samples in known.values())
        yield trust.gpu_neighbours_check("a GPU", max(counts, default=None), max(busy, default=None))
    by_host = grouped(record.machines, lambda machine: machine.get("host"))
    has_others = len(gauges.hosts(record)) > 1
    for source, samples in known.items():
        gpus = [gpu for m in by_host.get(source.host, ()) for gpu in m.get("gpus") or ()]
        clock_max_hz = next((gpu.get("sm_clock_max_hz") for gpu in gpus if gpu.get("index") == source.device), None)
        measured = gauges.within(samples, _span(record, source.rank, window))
        where = f" on {source.host}" if has_others else ""
        yield from trust.clock_checks(f"GPU {source.device}{where}", measured, clock_max_hz)
