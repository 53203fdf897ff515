"""The sweep: all operations, dtypes and sizes, warmed up together, then timed and verified row by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from paceline.results.machine_samples import CollectiveSample
from paceline.workloads.collectives.ensemble import Ensemble, affordable, first_line
from paceline.workloads.collectives.operations import OPERATIONS, Buffers, Launch, Operation
from paceline.workloads.collectives.options import Options
from paceline.workloads.collectives.payload import TORCH_DTYPES, Payload


def sizes(min_bytes: int, max_bytes: int, factor: int) -> tuple[int, ...]:
    """min, min x factor, ... up to max.

    >>> sizes(8, 100, 2)
    (8, 16, 32, 64)
    """
    steps = [min_bytes]
    while steps[-1] * factor <= max_bytes:
        steps.append(steps[-1] * factor)
    return tuple(steps) if min_bytes <= max_bytes else ()


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the sweep; refusal says why it cannot be measured."""

    operation: Operation
    dtype: str
    count: int
    in_place: bool
    refusal: str | None = None

    @property
    def size_bytes(self) -> int:
        return self.count * TORCH_DTYPES[self.dtype].itemsize


class Sweep:
    """All rows of one run on one rank."""

    def __init__(self, ensemble: Ensemble, options: Options) -> None:
        self.ensemble, self.options = ensemble, options
        self.probe_group: Any = None

    def run(self) -> int:
        """Record every row; returns their number."""
        self.ensemble.recorder.progress(0, "setup")
        rows = list(self.rows())
        estimates_s = self.warm_up(rows)
        for number, (row, estimate_s) in enumerate(zip(rows, estimates_s, strict=True)):
            if row.refusal is None:
                self.measure(number, row, estimate_s)
            else:
                self.record(row, (), None, "unsupported", row.refusal)
        return len(rows)

    def rows(self) -> Iterator[Row]:
        # A requested smallest size beyond the limit is still tried, and appears as a row that failed.
        limit = max(self.ensemble.size_limit_bytes(), self.options.least_bytes)
        visited = sizes(self.options.least_bytes, self.options.most_bytes or limit, self.options.factor)
        for name in self.options.swept_operations:
            operation = OPERATIONS[name]
            for dtype in self.options.chosen_dtypes if operation.has_payload else ("none",):
                yield from self.rows_of(operation, dtype, visited if operation.has_payload else (0,))

    def rows_of(self, operation: Operation, dtype: str, visited: Sequence[int]) -> Iterator[Row]:
        """All sizes in and out of place, without those too small for one element per rank. If unsupported, one row."""
        ranks, element_bytes = self.ensemble.place.ranks, TORCH_DTYPES[dtype].itemsize
        counts = [operation.count(size, element_bytes, ranks) for size in visited]
        counts = [count for count in counts if count or not operation.has_payload]
        refusal = self.options.refusal(operation, dtype, ranks, self.ensemble.seat.device)
        refusal = refusal or self.backend_refusal(operation, dtype)
        if refusal is not None:
            yield Row(operation, dtype, min(counts, default=0), operation.in_place[0], refusal)
            return
        for count in counts:
            for in_place in self.options.ways(operation):
                yield Row(operation, dtype, count, in_place)

    def backend_refusal(self, operation: Operation, dtype: str) -> str | None:
        """Collective: the backend's error for a tiny launch, or None if it worked on all ranks.

        A launch is tried because a table of supported types would become outdated. It uses a separate group, replaced
        after every error, because a failed collective may leave a group unusable.
        """
        if self.probe_group is None:
            self.probe_group = dist.new_group()
            # In NCCL, a first batch of sends between only some ranks is undefined.
            dist.barrier(group=self.probe_group)
        ensemble, error = self.ensemble, None
        count = operation.count(1 << 10, 1, ensemble.place.ranks) or ensemble.place.ranks
        buffers = operation.buffers(ensemble.place, count, operation.in_place[0], lambda n: ensemble.empty(n, dtype))
        try:
            operation.bind(buffers, ensemble.place, self.probe_group, False)()
            ensemble.clock.drain()
        except (RuntimeError, ValueError, TypeError) as caught:
            error = first_line(caught)
        if ensemble.all_true(error is None):
            return None
        self.probe_group = None
        return error or "the backend of another rank rejected it"

    def warm_up(self, rows: Sequence[Row]) -> list[float]:
        """Launch every row before any is timed, so that connections, channels and algorithms exist for all sizes.

        Returns the slowest rank's time of one launch of each row, which limits the number of iterations.
        """
        estimates_s = []
        for number, row in enumerate(rows):
            self.ensemble.recorder.progress(number, "setup")
            buffers = launch = None  # free the memory of the previous row
            buffers = None if row.refusal else self.prepare(row)[0]
            if buffers is None:
                estimates_s.append(0.0)
                continue
            launch = self.bind(row, buffers)
            launch()
            # The faster of two: a disturbed one would cost the row most of its iterations.
            estimates_s.append(min(self.ensemble.wall_s(launch) for _ in range(2)))
        return self.ensemble.largest(estimates_s) if rows else []

    def measure(self, number: int, row: Row, estimate_s: float) -> None:
        recorder, options = self.ensemble.recorder, self.options
        recorder.progress(number, "warmup")
        buffers, reason = self.prepare(row)
        if buffers is None:
            self.record(row, (), None, "oom", reason)
            return
        launch = self.bind(row, buffers)
        timed = self.timed(launch)
        each_s = estimate_s * options.launches_per_duration
        for _ in range(affordable(options.warmup, each_s, options.budget_s / 4)):
            timed()
        recorder.progress(number, "timing")
        durations_s = self.ensemble.durations(timed, affordable(options.iters, each_s, options.budget_s))
        recorder.progress(number, "verify")
        wrong = self.verify(row, buffers, launch) if row.operation.has_payload else None
        self.record(row, durations_s, wrong)

    def prepare(self, row: Row) -> tuple[Buffers | None, str]:
        buffers, reason = self.ensemble.allocate(row.operation, row.dtype, row.count, row.in_place)
        if buffers is not None:
            self.payload(row).fill(buffers)
        return buffers, reason

    def payload(self, row: Row) -> Payload:
        seat = self.ensemble.seat
        return Payload(self.ensemble.place, row.dtype, row.operation.is_sum, seat.torch_device)

    def bind(self, row: Row, buffers: Buffers) -> Launch:
        return row.operation.bind(buffers, self.ensemble.place, None, False)

    def timed(self, launch: Launch) -> Launch:
        """What one duration covers: one launch, several back to back, or a CUDA graph of several."""
        if self.options.mode == "single":
            return launch

        def launches() -> None:
            for _ in range(self.options.batch):
                launch()

        if self.options.mode == "batch":
            return launches
        # NCCL's watchdog thread queries events during the capture, which only this error mode allows.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            launches()
        return graph.replay

    def verify(self, row: Row, buffers: Buffers, launch: Launch) -> int:
        """Number of wrong elements after one more launch on fresh payloads."""
        payload = self.payload(row)
        payload.fill(buffers)
        launch()
        self.ensemble.clock.drain()
        return payload.count_wrong(buffers.receive, row.operation.expect(self.ensemble.place, row.count))

    def record(
        self, row: Row, durations_s: tuple[float, ...], wrong: int | None, status: str = "ok", error: str | None = None
    ) -> None:
        place, members = self.ensemble.place, row.operation.members(self.ensemble.place.ranks)
        if place.rank >= members:
            return
        sample = CollectiveSample(
            rank=place.rank,
            operation=row.operation.name,
            dtype=row.dtype,
            size_bytes=row.size_bytes,
            count=row.count,
            group_size=members,
            in_place=row.in_place,
            mode=self.options.mode,
            batch=self.options.launches_per_duration,
            durations_s=durations_s,
            wrong=wrong,
        )
        self.ensemble.recorder.add(replace(sample, status=status, error=error))
