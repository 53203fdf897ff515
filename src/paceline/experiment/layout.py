"""Which rank holds what: the degrees of a parallel layout and the arithmetic on them, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from paceline.errors import require
from paceline.experiment import plugins
from paceline.experiment.choices import Choice

# Schedules of `torch.distributed.pipelining` by the name users write: torch's name, stages per rank, and whether rank r
# holds stages r and 2P-1-r (the loss is then on rank 0) instead of r, r + P, r + 2P.
SCHEDULES: Mapping[str, tuple[str, int, bool]] = {
    "gpipe": ("GPipe", 1, False),
    "1f1b": ("1F1B", 1, False),
    "looped-bfs": ("LoopedBFS", 2, False),
    "interleaved-1f1b": ("Interleaved1F1B", 2, False),
    "interleaved-zero-bubble": ("InterleavedZeroBubble", 2, False),
    "zbv": ("ZBVZeroBubble", 2, True),
    "dualpipev": ("DualPipeV", 2, True),
}
# Schedules that compute gradients of inputs and of weights apart.
SPLIT_BACKWARD = ("interleaved-zero-bubble", "zbv", "dualpipev")
# Schedules that keep something for every micro batch of a step: all activations where the forward passes of all come
# first, and one tensor that is received early.
KEEP_FOR_EVERY = ("gpipe", "looped-bfs", "dualpipev")

# Dimensions of a layout in words.
DIMENSIONS: Mapping[str, str] = {
    "tp": "tensor parallel",
    "pp": "pipeline",
    "cp": "context parallel",
    "ep": "expert parallel",
    "shard": "sharding",
    "replicate": "replicas",
}
# Ranks that a picture shows.
MOST_DRAWN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees of parallelism. Ranks are numbered with tp fastest, then cp, dp and pp; ep consecutive dp x cp ranks.

    dp: replicas, each with its own samples. cp: ranks that share a replica's sequences. tp: ranks that share every
    layer. pp: ranks that share the layers, each with `virtual` stages. ep: how many of the dp x cp ranks share
    the experts of every layer. shard: how many of the dp x cp ranks share one copy of the weights; 1 replicates them.
    micro_batches: of a pipeline per step; None for the accumulation. split: layers of each stage; () for equal shares.
    gather_once: sharded weights are gathered for the first micro batch of a step and kept until its last backward pass.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    shard: int = 1
    virtual: int = 1
    v_shaped: bool = False
    sequence_parallel: bool = False
    loss_parallel: bool = False
    ring: bool = True
    schedule: str = ""
    micro_batches: int | None = None
    split: tuple[int, ...] = ()
    reshard_after_forward: bool = True
    reshard_to: int = 0
    sync_every_micro_batch: bool = False
    gather_once: bool = False

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Layout:
        """As spec.json stores it, without names that only another version of Paceline knows."""
        known = {field.name: raw[field.name] for field in fields(cls) if field.name in raw}
        for name in ("dp", "cp", "tp", "pp", "ep", "shard", "virtual"):
            valid = type(known.get(name, 1)) is int and known.get(name, 1) >= 1
            require(valid, f"layout.{name}", known.get(name), "a whole number from 1")
        return cls(**{**known, "split": tuple(known.get("split", ()))})

    @property
    def world_size(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def data_ranks(self) -> int:
        """Ranks over which the gradients of one weight are averaged."""
        return self.dp * self.cp

    @property
    def replicate(self) -> int:
        """Copies of a sharded group of weights."""
        return self.data_ranks // self.shard

    @property
    def expert_shard(self) -> int:
        """How many ranks share one copy of an expert's weights: what sharding splits further than ep does."""
        return max(1, self.shard // self.ep)

    @property
    def expert_replicate(self) -> int:
        """Copies of an expert's weights."""
        return self.data_ranks // (self.ep * self.expert_shard)

    def experts_of(self, rank: int, experts: int) -> range:
        """The experts of every layer whose weights a rank computes with, before sharding.

        >>> [list(Layout(dp=4, ep=2).experts_of(rank, 4)) for rank in range(4)]
        [[0, 1], [2, 3], [0, 1], [2, 3]]
        """
        at, own = self.coordinates(rank), experts // self.ep
        index = (at["dp"] * self.cp + at["cp"]) % self.ep
        return range(index * own, (index + 1) * own)

    @property
    def stages(self) -> int:
        return self.pp * self.virtual

    def sizes(self) -> dict[str, int]:
        """The dimensions of more than one rank."""
        sizes = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep}
        sizes |= {"shard": self.shard, "replicate": self.replicate}
        return {name: size for name, size in sizes.items() if size > 1}

    @property
    def splits_model(self) -> bool:
        """Whether several ranks work on the same samples."""
        return self.dp != self.world_size

    def coordinates(self, rank: int) -> dict[str, int]:
        """The position of a rank along each dimension.

        >>> Layout(dp=2, tp=2, pp=2).coordinates(5)
        {'pp': 1, 'dp': 0, 'cp': 0, 'tp': 1}
        """
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return {"pp": pp, "dp": dp, "cp": cp, "tp": tp}

    def leader(self, rank: int) -> int:
        """The rank that counts the samples of this rank's replica: its first."""
        return self.coordinates(rank)["dp"] * self.cp * self.tp

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The pipeline stages of a rank.

        >>> [Layout(pp=2, virtual=2, v_shaped=v).stages_of(1) for v in (False, True)]
        [(1, 3), (1, 2)]
        """
        first = self.coordinates(rank)["pp"]
        if self.v_shaped:
            return first, 2 * self.pp - 1 - first
        return tuple(range(first, self.stages, self.pp))

    def layers_of(self, stage: int, layers: int) -> range:
        """The consecutive layers of a stage. Earlier stages take the remainder: the last one also has the head.

        >>> [list(Layout(pp=2).layers_of(stage, 5)) for stage in (0, 1)]
        [[0, 1, 2], [3, 4]]
        >>> Layout(pp=2, split=(1, 4)).layers_of(1, 5)
        range(1, 5)
        """
        if self.split:
            begin = sum(self.split[:stage])
            return range(begin, begin + self.split[stage])
        size, more = divmod(layers, self.stages)
        begin = stage * size + min(stage, more)
        return range(begin, begin + size + (stage < more))

    def layer_count(self, rank: int, layers: int) -> int:
        return sum(len(self.layers_of(stage, layers)) for stage in self.stages_of(rank))

    def has_first(self, rank: int) -> bool:
        return 0 in self.stages_of(rank)

    def has_last(self, rank: int) -> bool:
        return self.stages - 1 in self.stages_of(rank)

    def factors(self) -> str:
        """The product that must be the number of processes."""
        degrees = {"dp": self.dp, "cp": self.cp, "tp": self.tp, "pp": self.pp}
        return " x ".join(f"{name} {degree}" for name, degree in degrees.items()) + f" = {self.world_size}"

    def bubble_ratio(self, micro_batches: int) -> float | None:
        """Share of a step in which a pipeline rank has nothing to do, if all stages take equally long.

        (P - 1) / (V * M + P - 1) with P ranks, V stages per rank and M micro batches (Narayanan et al., 2021). The
        zero-bubble schedules have another one, which depends on the times of their three kinds of work: None.

        >>> Layout(pp=4, schedule="1f1b").bubble_ratio(12)
        0.2
        """
        if self.pp == 1:
            return 0.0
        if self.schedule in ("gpipe", "1f1b", "looped-bfs", "interleaved-1f1b"):
            return (self.pp - 1) / (self.virtual * micro_batches + self.pp - 1)
        return None

    def picture(self, layers: int, experts: int = 0) -> list[str]:
        """A heading, then one line per rank with what it holds; of many ranks, the first and the last.

        `tensor` is the rank's part of every layer, `sequence` its part of every sequence.
        """
        rows = [{"rank": str(rank), **self._parts(rank, layers, experts)} for rank in range(self.world_size)]
        widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}

        def line(row: Mapping[str, str]) -> str:
            aligned = (
                f"{text:>{widths[name]}}" if name in ("rank", "replica") else f"{text:<{widths[name]}}"
                for name, text in row.items()
            )
            return "  ".join(aligned).rstrip()

        lines = [line(row) for row in rows]
        left_out = len(lines) - MOST_DRAWN
        if left_out > 0:
            lines = [*lines[: MOST_DRAWN - 1], f"... {left_out} more", lines[-1]]
        return [line({name: name for name in widths}), *lines]

    def _parts(self, rank: int, layers: int, experts: int) -> dict[str, str]:
        """What a rank holds, by heading; every rank has the same headings."""
        at = self.coordinates(rank)
        parts = {"replica": str(at["dp"])}
        if self.pp > 1:
            ends = ["embedding"] * self.has_first(rank) + ["head"] * self.has_last(rank)
            held = " and ".join(_span(self.layers_of(stage, layers)) for stage in self.stages_of(rank))
            parts["layers"] = " + ".join((held, *ends))
        if self.tp > 1:
            parts["tensor"] = f"{at['tp'] + 1} of {self.tp}"
        if self.cp > 1:
            parts["sequence"] = f"{at['cp'] + 1} of {self.cp}"
        if self.ep > 1:
            parts["experts"] = _span(self.experts_of(rank, experts))
        if self.shard > 1:
            parts["shard"] = f"{(at['dp'] * self.cp + at['cp']) % self.shard + 1} of {self.shard}"
        return parts


def _span(numbers: range) -> str:
    """
    >>> _span(range(4, 8)), _span(range(4, 5))
    ('4-7', '4')
    """
    return f"{numbers.start}-{numbers.stop - 1}" if len(numbers) > 1 else str(numbers.start)


def balanced_split(layers: int, stages: int, embedding: float, block: float, head: float) -> tuple[int, ...]:
    """Layers of each stage so that the slowest stage is as fast as possible, by the times of the parts of the model.

    >>> balanced_split(8, 2, embedding=0.0, block=1.0, head=2.0)
    (5, 3)
    """
    split = [1] * stages
    for _ in range(layers - stages):
        times = stage_times(split, embedding, block, head)
        split[times.index(min(times))] += 1
    return tuple(split)


def stage_times(split: Sequence[int], embedding: float, block: float, head: float) -> list[float]:
    """The time of each stage: its layers, and embedding or head at the ends.

    >>> stage_times((5, 3), embedding=0.5, block=1.0, head=2.0)
    [5.5, 5.0]
    """
    times = [count * block for count in split]
    times[0] += embedding
    times[-1] += head
    return times


class Planned(Protocol):
    """What of a `RunSpec` decides the layout."""

    @property
    def strategy(self) -> Choice | None: ...

    @property
    def topology(self) -> Any: ...

    def says(self, function: str) -> Any: ...


def layout_of(spec: Planned) -> Layout:
    """The layout of a run. A strategy that does not declare one has one replica per process."""
    return declared_layout(spec) or Layout(dp=spec.topology.world_size)


def layout_on(strategy: Choice | None, world_size: int) -> Layout:
    """The layout of a strategy on so many processes."""
    return _declared(strategy, world_size) or Layout(dp=world_size)


def declared_layout(spec: Planned) -> Layout | None:
    """The layout that the strategy of a run declares, if it does."""
    found: Layout | None = spec.says("layout")
    return found


def replicas_of(strategy: Choice | None, world_size: int) -> int:
    """Data parallel replicas: the global batch is split over these and not over all processes."""
    return layout_on(strategy, world_size).dp


def _declared(strategy: Choice | None, world_size: int) -> Layout | None:
    plugin = plugins.find("strategies", strategy.name) if strategy else None
    declare = getattr(plugin, "layout", None)
    if strategy is None or declare is None:
        return None
    layout: Layout = declare(strategy.options, world_size)
    return layout
