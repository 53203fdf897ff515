"""Valid ways to train a model on a number of GPUs: enumerated, filtered by memory, ranked, and grouped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.prediction import memory
from paceline.prediction.offsets import Anchor, Observation
from paceline.prediction.predict import Prediction, predict
from paceline.prediction.setup import Setup

MICRO_BATCHES = (1, 2, 4, 8, 16)
DEGREES = (1, 2, 4, 8, 16)
CONTEXT_FROM = 32_768
# A layout is equal to the best if its interval relative to the best contains no difference. Layouts on one cluster
# share its offsets, so their ratio is known better than each of them: this much of the half-width is their own.
OWN_SHARE = 0.35


def enumerate_layouts(base: Setup, global_batch: int) -> Iterator[Setup]:
    """Every valid combination of degrees, sharding, micro batch and checkpointing for this model and global batch.

    4-bit weights are trained with data parallelism only: no published program splits them otherwise.
    """
    shape, gpus = base.shape, base.gpus
    degrees = (1,) if base.quantised else DEGREES
    for tp in (n for n in degrees if n <= base.per_node and shape.heads % n == 0 and shape.kv_heads % n == 0):
        for pp in (n for n in degrees if shape.layers % n == 0 and gpus % (tp * n) == 0):
            for cp in (1, 2, 4, 8) if base.sequence_length >= CONTEXT_FROM else (1,):
                ranks, left = divmod(gpus, tp * pp * cp)
                if not left and ranks and global_batch % ranks == 0:
                    yield from _of_degrees(base, tp, pp, cp, ranks, global_batch // ranks)


def _of_degrees(base: Setup, tp: int, pp: int, cp: int, ranks: int, per_rank: int) -> Iterator[Setup]:
    shards = ("none",) if ranks * cp == 1 else ("none", "zero1", "zero3") if pp == 1 else ("none", "zero1")
    # Interleaved stages where the layers of a rank divide by two.
    stages = 2 if pp > 1 and (base.shape.layers // pp) % 2 == 0 else 1
    for micro in (n for n in MICRO_BATCHES if per_rank % n == 0):
        if per_rank // micro < pp and pp > 1:
            continue
        for shard in shards:
            for recompute in ("none", "selective", "full"):
                yield base.replaced(
                    tp=tp,
                    pp=pp,
                    cp=cp,
                    stages=stages,
                    shard=shard,
                    micro_batch=micro,
                    micro_batches=per_rank / micro,
                    checkpointing=recompute,
                )


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """Layouts that fit, fastest first. close: those that cannot be told apart from the best by prediction alone."""

    best: Prediction
    close: tuple[Prediction, ...]
    rest: tuple[Prediction, ...]
    enumerated: int
    fitting: int

    @property
    def all(self) -> tuple[Prediction, ...]:
        return (self.best, *self.close, *self.rest)


def rank(
    setups: Sequence[Setup], anchors: Sequence[Anchor] = (), observations: Sequence[Observation] = ()
) -> Ranked | None:
    """The layouts by predicted speed, one for each set of degrees and sharding; None if none fits."""
    fitting = [one for one in setups if memory.fits(one)]
    predictions = sorted(predict(fitting, anchors, observations), key=cost_of)
    # The best micro batch and checkpointing of each layout; the others are variants of it.
    first: dict[tuple[object, ...], Prediction] = {}
    for one in predictions:
        first.setdefault((one.setup.gpu.name, one.setup.gpus, one.setup.layout, one.setup.quantised), one)
    if not first:
        return None
    best, *others = first.values()
    close = tuple(one for one in others if is_close(best, one))
    rest = tuple(one for one in others if one not in close)
    return Ranked(best=best, close=close, rest=rest, enumerated=len(setups), fitting=len(fitting))


def cost_of(one: Prediction) -> float:
    """GPU-seconds per token, by which layouts of equal work compare."""
    return one.step_s * one.setup.gpus / one.setup.tokens_per_step


def is_close(best: Prediction, other: Prediction) -> bool:
    """Whether the two may be equal: their ratio is within what prediction can tell apart."""
    return cost_of(other) / cost_of(best) - 1 <= OWN_SHARE * (best.half_width + other.half_width) / 2
