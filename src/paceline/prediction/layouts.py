"""Valid ways to train a model on a number of GPUs: enumerated, filtered by memory, ranked, and grouped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.prediction import memory, published
from paceline.prediction.hardware import CPU
from paceline.prediction.offsets import Anchor, Observation
from paceline.prediction.predict import Prediction, predict
from paceline.prediction.setup import CHECKPOINTING, Setup

MICRO_BATCHES = (1, 2, 4, 8, 16)
DEGREES = (1, 2, 4, 8, 16)
CONTEXT_FROM = 32_768
# A layout is equal to the best if its interval relative to the best contains no difference. Layouts on one cluster
# share its offsets, so their ratio is known better than each of them: this much of the half-width is their own.
OWN_SHARE = 0.35
# Variants of a layout whose predictions differ by less are the same: the one that recomputes least counts.
SAME = 0.005


def enumerate_layouts(
    base: Setup, global_batch: int, micro_batch: int | None = None, checkpointing: str | None = None
) -> Iterator[Setup]:
    """Every valid combination of degrees, sharding, offload, micro batch and checkpointing for this global batch.

    micro_batch and checkpointing: only this one. 4-bit weights are trained with data parallelism only, and not from the
    host: no published program splits or offloads them.
    """
    for one in _all_layouts(base, global_batch, (micro_batch,) if micro_batch else MICRO_BATCHES):
        if checkpointing in (None, one.checkpointing):
            yield one


def _all_layouts(base: Setup, global_batch: int, sizes: Sequence[int]) -> Iterator[Setup]:
    shape, gpus = base.shape, base.gpus
    degrees = (1,) if base.quantised else DEGREES
    for tp in (n for n in degrees if n <= base.per_node and shape.heads % n == 0 and shape.kv_heads % n == 0):
        for pp in (n for n in degrees if shape.layers % n == 0 and gpus % (tp * n) == 0):
            for cp in (1, 2, 4, 8) if base.sequence_length >= CONTEXT_FROM else (1,):
                ranks, left = divmod(gpus, tp * pp * cp)
                if not left and ranks and global_batch % ranks == 0:
                    for ep in _expert_degrees(base, ranks * cp):
                        degree = base.replaced(tp=tp, pp=pp, cp=cp, ep=ep)
                        yield from _of_degrees(degree, ranks, global_batch // ranks, sizes)


def _expert_degrees(base: Setup, ranks: int) -> tuple[int, ...]:
    """Among how many ranks the experts may be shared; no published program shares those of adapted models."""
    experts = base.shape.experts or 1
    return (1,) if base.has_adapters else tuple(n for n in DEGREES if experts % n == 0 and ranks % n == 0)


def _of_degrees(base: Setup, ranks: int, per_rank: int, sizes: Sequence[int]) -> Iterator[Setup]:
    pp, cp = base.pp, base.cp
    shards = ("none",) if ranks * cp == 1 else ("none", "zero1", "zero3") if pp == 1 else ("none", "zero1")
    # Interleaved stages where the layers of a rank divide by two.
    stages = 2 if pp > 1 and (base.shape.layers // pp) % 2 == 0 else 1
    ways = [(shard, False) for shard in shards] + [(shard, True) for shard in _offloaded(base)]
    for micro in (n for n in sizes if per_rank % n == 0):
        if per_rank // micro < pp and pp > 1:
            continue
        for shard, offload in ways:
            for recompute in ("none", "selective", "full"):
                yield base.replaced(
                    stages=stages,
                    shard=shard,
                    software=published.sharded(base.software, shard),
                    offload=offload,
                    micro_batch=micro,
                    micro_batches=per_rank / micro,
                    checkpointing=recompute,
                )


def _offloaded(base: Setup) -> tuple[str, ...]:
    """Stages that are tried with the state on the host: with data parallelism only, where DeepSpeed has it.

    Adapters have little state, so only their frozen weights are worth moving, and not in 4 bits.
    """
    if base.tp * base.pp * base.cp * base.ep > 1 or base.quantised or base.fp8 or base.gpu.name == CPU:
        return ()
    return ("zero3",) if base.has_adapters else ("zero2", "zero3")


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """Layouts that fit, fastest first. close: those that prediction alone cannot separate from the best."""

    best: Prediction
    close: tuple[Prediction, ...]
    rest: tuple[Prediction, ...]
    enumerated: int
    fitting: int

    @property
    def all(self) -> tuple[Prediction, ...]:
        return (self.best, *self.close, *self.rest)


def rank(
    setups: Sequence[Setup],
    anchors: Sequence[Anchor] = (),
    observations: Sequence[Observation] = (),
    memory_factor: float = 1.0,
) -> Ranked | None:
    """The layouts by predicted speed, one for each set of degrees and sharding; None if none fits.

    memory_factor: how much more memory than the arithmetic says a rehearsal needed.
    """
    fitting = [one for one in setups if memory.fits(one, memory_factor)]
    predictions = sorted(predict(fitting, anchors, observations), key=cost_of)
    # The best micro batch and checkpointing of each layout; the others are variants of it.
    variants: dict[tuple[object, ...], list[Prediction]] = {}
    for one in predictions:
        key = (one.setup.gpu.name, one.setup.gpus, one.setup.layout, one.setup.quantised)
        variants.setdefault(key, []).append(one)
    if not variants:
        return None
    best, *others = sorted(map(_simplest, variants.values()), key=cost_of)
    close = tuple(one for one in others if is_close(best, one))
    rest = tuple(one for one in others if one not in close)
    return Ranked(best=best, close=close, rest=rest, enumerated=len(setups), fitting=len(fitting))


def _simplest(variants: Sequence[Prediction]) -> Prediction:
    """Of the variants that are as fast as the first, which is the fastest, the one that recomputes least."""
    same = [one for one in variants if cost_of(one) <= cost_of(variants[0]) * (1 + SAME)]
    return min(same, key=lambda one: CHECKPOINTING.index(one.setup.checkpointing))


def cost_of(one: Prediction) -> float:
    """GPU-seconds per token, by which layouts of equal work compare."""
    return one.step_s * one.setup.gpus / one.setup.tokens_per_step


def is_close(best: Prediction, other: Prediction) -> bool:
    """Whether the two may be equal: their ratio is within what prediction can tell apart."""
    return cost_of(other) / cost_of(best) - 1 <= OWN_SHARE * (best.half_width + other.half_width) / 2
