"""How a decode step is divided among the processors of a device: chosen by what was fastest on one H200."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# The products of a layer: queries, keys and values; the output of attention; gate and up; the output of the MLP.
PRODUCTS = ("attention_in", "attention_out", "mlp_in", "mlp_out")
# A split of a context is a multiple of this.
CONTEXT_MULTIPLE = 16
# A split has at least so many tokens of the longest context. One program puts all splits of a group together.
LEAST_SPLIT, MOST_SPLITS = 64, 32


@dataclass(frozen=True)
class Tile:
    """How the product of a single row is divided: outputs of a program, inputs per iteration, warps of a program."""

    block: int
    depth: int
    warps: int

    def fits(self, outputs: int, inputs: int) -> bool:
        return outputs % self.block == 0 and inputs % self.depth == 0


@dataclass(frozen=True)
class Division:
    """How attention is divided: splits of a context, tokens per iteration, iterations in flight, warps of a program."""

    splits: int
    tile: int
    stages: int
    warps: int

    @staticmethod
    def of(groups: int, processors: int, length: int) -> Division:
        """groups: slots times key heads. No more programs than processors, unless the groups alone are more."""
        most = min(processors // groups, length // LEAST_SPLIT, MOST_SPLITS)
        splits = 1
        while splits * 2 <= most:
            splits *= 2
        return Division(splits, 64, 3, 4) if splits > 1 else Division(1, 32, 4, 2)


@dataclass(frozen=True)
class Plan:
    """How a step is computed. tiles: of products that have a kernel of ours, which needs a single slot; the others are
    torch's. early: kernels start before the one before them has ended."""

    attention: Division
    tiles: Mapping[str, Tile]
    early: bool


def plan_of(
    sizes: Mapping[str, tuple[int, int]], slots: int, heads: int, length: int, processors: int, early: bool
) -> Plan:
    """sizes: outputs and inputs of every product. heads: key heads."""
    tile = Tile(4, 1024, 4)
    tiles = {name: tile for name in PRODUCTS if slots == 1 and tile.fits(*sizes[name])}
    return Plan(Division.of(slots * heads, processors, length), tiles, early)
