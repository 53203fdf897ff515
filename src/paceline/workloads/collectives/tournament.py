"""Pair tournament: all pairs of ranks exchange a buffer, disjoint pairs at the same time, to find slow ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.results.machine_samples import CollectiveSample
from paceline.workloads.collectives.ensemble import Ensemble, affordable
from paceline.workloads.collectives.operations import OPERATIONS, Segment, exchange
from paceline.workloads.collectives.options import Options
from paceline.workloads.collectives.payload import TORCH_DTYPES, Payload

TURNS = 2
DTYPE = "int8"
WARMUP = 2
Pair = tuple[int, int]


def rounds(ranks: int, turn: int) -> list[tuple[Pair, ...]]:
    """Rounds of disjoint pairs that contain every pair once. The second turn combines pairs differently.

    It uses another order of ranks. A round that occurred in the first turn (four ranks have only three ways to form two
    pairs) is played pair by pair.
    """
    first = list(_circle(range(ranks)))
    if turn == 0:
        return first
    # Rotations and reversals give the same rounds; squares do not.
    second = _circle(sorted(range(ranks), key=lambda rank: (rank * rank % ranks, rank)))
    known = set(first)
    return [part for pairs in second for part in ([(pair,) for pair in pairs] if pairs in known else [pairs])]


def _circle(order: Sequence[int]) -> Iterator[tuple[Pair, ...]]:
    """The circle method: one position stays and the others rotate; with an odd number of ranks, one rests per round."""
    seats: list[int | None] = [*order, None] if len(order) % 2 else [*order]
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield tuple(sorted((min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None))
        seats = [seats[0], seats[-1], *seats[1:-1]]


class Tournament:
    """Both turns on one rank. Each pair is a sample of both its ranks; a resting rank only takes part in fences."""

    def __init__(self, ensemble: Ensemble, options: Options, number: int) -> None:
        self.ensemble, self.options, self.number = ensemble, options, number
        self.count = options.exchanged_bytes // TORCH_DTYPES[DTYPE].itemsize
        self.payload = Payload(ensemble.place, DTYPE, False, ensemble.seat.torch_device)
        self.buffers, self.refusal = ensemble.allocate(OPERATIONS["ring"], DTYPE, self.count, False)

    def run(self) -> int:
        """Play every round; returns the number of progress steps."""
        for turn in range(TURNS):
            for pairs in rounds(self.ensemble.place.ranks, turn):
                self.ensemble.recorder.progress(self.number, "timing")
                self.play(pairs, turn)
                self.number += 1
        return self.number

    def play(self, pairs: tuple[Pair, ...], turn: int) -> None:
        """Play one round. Ranks synchronise before warm-up and timing, so that none starts while another is timed."""
        ensemble, rank = self.ensemble, self.ensemble.place.rank
        peer = next((b if a == rank else a for a, b in pairs if rank in (a, b)), None)
        if self.buffers is None:
            if peer is not None:
                self.record(peer, turn, (), None, "oom", self.refusal)
            return
        launch = exchange(self.buffers, peer, peer, None)
        ensemble.fence()
        for _ in range(WARMUP):
            estimate_s = ensemble.wall_s(launch)
        # All pairs of a round use the iterations of the slowest one, so that none ends long before the others.
        iterations = affordable(self.options.pair_iters, ensemble.largest([estimate_s])[0], self.options.budget_s)
        durations_s = ensemble.durations(launch, iterations)
        self.payload.fill(self.buffers)
        ensemble.wall_s(launch)
        if peer is not None:
            wrong = self.payload.count_wrong(self.buffers.receive, (Segment(0, self.count, peer),))
            self.record(peer, turn, durations_s, wrong)

    def record(
        self,
        peer: int,
        turn: int,
        durations_s: tuple[float, ...],
        wrong: int | None,
        status: str = "ok",
        error: str | None = None,
    ) -> None:
        self.ensemble.recorder.add(
            CollectiveSample(
                rank=self.ensemble.place.rank,
                operation="pair",
                dtype=DTYPE,
                size_bytes=self.count,
                count=self.count,
                group_size=2,
                in_place=False,
                mode="single",
                batch=1,
                durations_s=durations_s,
                wrong=wrong,
                status=status,
                error=error,
                peer=peer,
                turn=turn,
            )
        )
