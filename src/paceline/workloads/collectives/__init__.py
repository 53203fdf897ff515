"""Collectives, pairs of ranks and overlap by size and dtype, timed and verified as in nccl-tests."""

from __future__ import annotations

import os

from paceline.contract import Recorder, Seat
from paceline.errors import require
from paceline.experiment.plugins import Traits, parse_options
from paceline.experiment.spec import RunSpec
from paceline.launchers.node import placement
from paceline.results.records import Evidence
from paceline.workloads.collectives.operations import OPERATIONS
from paceline.workloads.collectives.options import ELEMENT_BYTES, Options

TRAITS = Traits(measures_network=True)


def check(spec: RunSpec) -> str | None:
    """Requested sizes must be usable unchanged; default sizes are rounded or skipped silently."""
    chosen, ranks = parse_options(Options, spec.workload), spec.topology.world_size
    element = max(ELEMENT_BYTES[dtype] for dtype in chosen.chosen_dtypes)
    for name, given, size in (
        ("min_bytes", chosen.min_bytes, chosen.least_bytes),
        ("max_bytes", chosen.max_bytes, chosen.most_bytes),
    ):
        multiple = f"a multiple of {element} bytes, the largest element of {'+'.join(chosen.chosen_dtypes)}"
        require(given is None or (size or 0) % element == 0, f"collectives.{name}", given, multiple)
    if chosen.most_bytes is None:
        return None
    accepted = f"at least min_bytes ({chosen.least_bytes})"
    require(chosen.most_bytes >= chosen.least_bytes, "collectives.max_bytes", chosen.max_bytes, accepted)
    shared = [name for name in chosen.swept_operations if OPERATIONS[name].is_divided]
    accepted = f"at least {element * ranks} bytes: one element for each of {ranks} ranks in {'+'.join(shared)}"
    fits = not shared or chosen.most_bytes >= element * ranks
    require(fits, "collectives.max_bytes", chosen.max_bytes, accepted)
    return None


def run(spec: RunSpec, seat: Seat, recorder: Recorder) -> None:
    import time

    from paceline.workloads.collectives.ensemble import Ensemble
    from paceline.workloads.collectives.overlap import measure_overlap
    from paceline.workloads.collectives.sweep import Sweep
    from paceline.workloads.collectives.tournament import Tournament

    chosen = parse_options(Options, spec.workload)
    ensemble, began = Ensemble(seat, recorder), time.perf_counter()
    ensemble.fence()
    number = Sweep(ensemble, chosen).run()
    if chosen.has_tournament and seat.world_size > 1:
        number = Tournament(ensemble, chosen, number).run()
    if chosen.overlap and seat.world_size > 1:
        measure_overlap(ensemble, chosen, number)
    ensemble.fence()
    recorder.conclude(evidence(seat, time.perf_counter() - began))


def evidence(seat: Seat, wall_s: float | None) -> Evidence:
    """Evidence without training: what could distort the times."""
    from paceline.host.machine import debug_switches, neighbours

    return Evidence(
        init_digest="",
        parameters=0,
        dtypes={},
        optimizer={},
        settings={"shared_gpu": True} if placement.shares_gpu(os.environ) else {},
        switches=debug_switches(os.environ),
        neighbours=neighbours(seat.local_rank) if seat.device == "cuda" else None,
        window_wall_s=wall_s,
    )
