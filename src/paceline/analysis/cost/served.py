"""Cost of inference at the highest load that met its latency limits, in USD and in joules.

usd_per_output_mtok = price per device-hour * devices * 1e6 / (3600 * output tokens/s): output tokens carry the whole
cost, because prompts and answers are computed in the same batches. usd_per_mtok divides it by prompt and output tokens.
Busy counts the hours the load runs; reserved counts all hours of the day, of which a stated number is busy. A price is
taken as exact: intervals are those of the throughput.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from paceline.analysis.cost.training import Costing, usd_per_mtok
from paceline.analysis.findings import LOWER, Measurement
from paceline.analysis.findings.cost import HOURS_A_DAY, ServedCost
from paceline.analysis.grouping import grouped
from paceline.analysis.machine.ceilings import device_names
from paceline.analysis.served import estimates
from paceline.analysis.served import measurements as served
from paceline.analysis.served.estimates import JOULES, TOKENS_PER_S
from paceline.analysis.served.loads import Served
from paceline.analysis.statistics import intervals
from paceline.analysis.statistics.intervals import Bounded, Resampled, launches_note
from paceline.analysis.training import energy
from paceline.errors import Scalar
from paceline.host import prices
from paceline.host.prices import Price
from paceline.results.records import RunRecord

USD = ("USD/Mtoken", LOWER)
OUTPUT, ALL = "usd_per_output_mtok", "usd_per_mtok"
METRICS = {**dict.fromkeys((OUTPUT, f"reserved_{OUTPUT}", ALL, f"reserved_{ALL}"), USD), JOULES: ("J/token", LOWER)}


def analyse(records: Sequence[RunRecord], costing: Costing) -> tuple[ServedCost, ...]:
    """Every cell whose devices have a price; none for a paired run, whose replicas took turns."""
    whole = (load for load in served.reliable_loads(records) if load.replica is None)
    by_cell = grouped(whole, lambda load: load.cell)
    return tuple(row for loads in by_cell.values() for row in _costs(loads, costing))


def _costs(loads: Sequence[Served], costing: Costing) -> Iterator[ServedCost]:
    chosen = estimates.at_limits(loads)
    rate = estimates.estimate(chosen[0], TOKENS_PER_S) if chosen else None
    if chosen is None or rate is None or rate.value <= 0:
        return
    load, limits = chosen
    devices, asked = devices_of(load.records[0]), load.prompt_tokens()
    whole = None if asked is None else rate.times(1 + asked / load.output_tokens())
    spec = load.spec
    # As for training; an endpoint elsewhere has only prices that apply to any device.
    here = spec.topology.device == "cuda" and spec.starts_servers
    gpu = device_names("cuda", load.records[0].machines) if here else None
    offered = prices.table() if costing.prices is None else costing.prices
    usable = [] if any(record.shares_gpu for record in load.records) else [p for p in offered if p.holds_for(gpu)]
    share = costing.busy_hours / HOURS_A_DAY
    for price in sorted(usable, key=lambda p: (p.usd_per_gpu_hour, p.name)):
        yield ServedCost(
            cell=load.cell,
            axes=load.axes(),
            price=price,
            devices=devices,
            usd_per_hour=price.usd_per_gpu_hour * devices,
            load=load.name,
            kept=limits.text,
            is_kept=limits.ok,
            is_proved=limits.proved,
            busy_hours=costing.busy_hours,
            usd_per_output_mtok=_usd(load, price, OUTPUT, rate, 1.0),
            reserved_usd_per_output_mtok=_usd(load, price, f"reserved_{OUTPUT}", rate, share),
            usd_per_mtok=_usd(load, price, ALL, whole, 1.0) if whole else None,
            reserved_usd_per_mtok=_usd(load, price, f"reserved_{ALL}", whole, share) if whole else None,
        )


def devices_of(record: RunRecord) -> int:
    """Devices of all replicas; one that does not report them counts as one."""
    return sum(s.devices or s.tensor_parallel for s in record.replicas) or record.spec.topology.world_size


def _usd(load: Served, price: Price, metric: str, rate: Resampled, share: float) -> Measurement:
    """Cost as a measurement; share is the part of the paid hours in which the load runs."""
    devices = devices_of(load.records[0])
    value, *bounds = (
        None if each is None else usd_per_mtok(price.usd_per_gpu_hour, devices, each) / share
        for each in (rate.value, *rate.interval)
    )
    low, high = sorted(b for b in bounds if b is not None) if None not in bounds else (None, None)
    idle = f"assuming {share * HOURS_A_DAY:g} of 24 hours busy" if share < 1 else None
    note = "; ".join(filter(None, (price.origin, idle, launches_note(len(load.launches)))))
    own = {"price": price.name, "price_kind": price.kind}
    return _measurement(load, metric, (value, low, high), note, own)


def _measurement(
    load: Served, metric: str, bounds: Bounded, note: str | None, own: Mapping[str, Scalar] | None = None
) -> Measurement:
    return served.measurement(load, metric, bounds, n=len(load.answered), note=note, axes=own, about=METRICS[metric])


def measurements(rows: Sequence[ServedCost]) -> Iterator[Measurement]:
    for row in rows:
        yield row.usd_per_output_mtok
        yield row.reserved_usd_per_output_mtok
        yield from (m for m in (row.usd_per_mtok, row.reserved_usd_per_mtok) if m)


# --- energy ---


def energies(records: Sequence[RunRecord]) -> Iterator[Measurement]:
    """joules_per_output_token of every load: joules of all devices during the load over its output tokens."""
    for load in served.reliable_loads(records):
        if load.replica is not None:
            continue
        launches = [energy_of(launch) for launch in load.launches]
        missing = next((each for each in launches if each.joules is None), None)
        if missing or not load.output_tokens():
            note = missing.note if missing else "energy: no answer"
            yield _measurement(load, JOULES, (None, None, None), note)
            continue
        rows = [
            np.array([[each.joules or 0.0, float(launch.output_tokens())]])
            for each, launch in zip(launches, load.launches, strict=True)
        ]
        sums = intervals.resample_sums(rows, intervals.seed_of(load.cell, load.seed_text, JOULES))
        ratio = intervals.ratio_of_sums(rows, sums, 0, 1)
        assert ratio is not None
        hosts = {sample.host for record in load.records for sample in record.gauges}
        clocks = "assuming equal clocks on all hosts" if len(hosts) > 1 else None
        note = "; ".join(filter(None, (launches[0].note, clocks, launches_note(len(rows)))))
        yield _measurement(load, JOULES, (ratio.value, *ratio.interval), note)


def energy_of(launch: Served) -> energy.WindowEnergy:
    """Energy of all devices of all replicas, from the first request of the load to its last answer."""
    spec, (record,) = launch.spec, launch.records
    if not spec.starts_servers:
        return energy.unknown("the replicas run elsewhere, and their power was not read")
    windows = [(s.stage.began_at_s, s.stage.began_at_s + s.wall_s) for s in launch.stretches if s.stage]
    if len(windows) < len(launch.stretches):
        return energy.unknown("the time of the load was not recorded")
    cuda = spec.topology.device == "cuda"
    return energy.energy_within(record, windows, devices_of(record) if cuda else None)
