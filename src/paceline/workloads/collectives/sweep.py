"""The sweep: every operation, dtype, size and way, warmed up together, then timed and verified row by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.results.machine_samples import CollectiveSample
from paceline.workloads.collectives.ensemble import Ensemble, affordable, first_line
from paceline.workloads.collectives.operations import OPERATIONS, Buffers, Launch, Operation
from paceline.workloads.collectives.payload import TORCH_DTYPES, Payload
from paceline.workloads.collectives.schedule import sizes

if TYPE_CHECKING:
    from paceline.workloads.collectives.options import Options


@dataclass(frozen=True, slots=True)
class Row:
    """What one row measures; refusal says why it cannot be."""

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
        """Records every row; returns their number."""
        self.ensemble.recorder.progress(0, "setup")
        rows = list(self.rows())
        estimates_s = self.warm_up(rows)
        for number, (row, estimate_s) in enumerate(zip(rows, estimates_s, strict=True)):
            if row.refusal is None:
                self.measure(number, row, estimate_s)
            else:
                self.record(row, (), None, "unsupported", row.refusal)
        return len(rows)

    # --- which rows ---

    def rows(self) -> Iterator[Row]:
        # A smallest size beyond the limit is still visited, and ends as a row: asked for, it may not vanish.
        limit = max(self.ensemble.size_limit_bytes(), self.options.least_bytes)
        visited = sizes(self.options.least_bytes, self.options.most_bytes or limit, self.options.factor)
        for name in self.options.swept_operations:
            operation = OPERATIONS[name]
            for dtype in self.options.chosen_dtypes if operation.has_payload else ("none",):
                yield from self.rows_of(operation, dtype, visited if operation.has_payload else (0,))

    def rows_of(self, operation: Operation, dtype: str, visited: Sequence[int]) -> Iterator[Row]:
        """Sizes by ways; sizes too small for an element per rank are left out. One row says what is unsupported."""
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
        """Agreed: what the backend says to a tiny launch, or None when all ranks could.

        Asked of the backend itself, because a table of its types would age; in a group of its own, replaced after
        every refusal, because a failed collective may leave a group unusable.
        """
        if self.probe_group is None:
            self.probe_group = dist.new_group()
            # A first batch of sends among a few ranks only is undefined in NCCL.
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
        return error or "another rank's backend refused it"

    # --- one row ---

    def warm_up(self, rows: Sequence[Row]) -> list[float]:
        """Launch every row before any is timed: connections, channels and algorithm choices then exist for all sizes.

        Returns the slowest rank's time of one launch of each, which decides how many iterations are affordable.
        """
        estimates_s = []
        for number, row in enumerate(rows):
            self.ensemble.recorder.progress(number, "setup")
            buffers = launch = None  # the row before must not take this one's room
            buffers = None if row.refusal else self.prepare(row)[0]
            if buffers is None:
                estimates_s.append(0.0)
                continue
            launch = self.bind(row, buffers)
            launch()
            # The quicker of two: one that was disturbed would cost the row most of its iterations.
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
        """What one duration covers: a launch, several back to back, or a graph of several."""
        if self.options.mode == "single":
            return launch
        launches = _repeated(launch, self.options.batch)
        return launches if self.options.mode == "batch" else _captured(launches)

    def verify(self, row: Row, buffers: Buffers, launch: Launch) -> int:
        """Elements that arrived wrong in one more launch, on payloads written afresh."""
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


def _repeated(launch: Launch, times: int) -> Launch:
    def launches() -> None:
        for _ in range(times):
            launch()

    return launches


def _captured(launches: Launch) -> Launch:
    """The launches as one CUDA graph. NCCL's watchdog thread asks for events meanwhile, which only this mode allows."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        launches()
    return graph.replay
