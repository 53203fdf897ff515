"""How a decode step is divided among the processors of a device: chosen by what was fastest on one H200."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# The products of a layer: queries, keys and values; the output of attention; gate and up; the output of the MLP.
PRODUCTS = ("attention_in", "attention_out", "mlp_in", "mlp_out")
# A split of a context is a multiple of this.
CONTEXT_MULTIPLE = 16


@dataclass(frozen=True)
class Tile:
    """How a product is divided: outputs of a program, inputs per iteration, parts of these that are summed apart (0:
    plain loads and no tensor cores, for a single row), iterations in flight, warps of a program."""

    block: int
    depth: int
    parts: int
    stages: int
    warps: int

    def fits(self, rows: int, outputs: int, inputs: int) -> bool:
        return outputs % self.block == 0 and inputs % self.depth == 0 and (rows == 1 or self.parts > 0)


@dataclass(frozen=True)
class Division:
    """How attention is divided: splits of a context, tokens per iteration, iterations in flight, warps of a program."""

    splits: int
    tile: int
    stages: int
    warps: int

    @staticmethod
    def of(groups: int, processors: int, length: int) -> Division:
        """groups: slots times key heads. Two programs for each processor, where contexts are long enough."""
        splits = 1
        while groups * splits < 2 * processors and splits * 2 * CONTEXT_MULTIPLE <= length and splits < 32:
            splits *= 2
        return Division(splits, 64, 3, 4)


@dataclass(frozen=True)
class Plan:
    """How a step is computed. tiles: of products that have a kernel of ours; the others are torch's. early: kernels
    start before the one before them has ended. ahead: bytes of the next product's weight that the small kernels before
    it bring into the cache; around_attention: attention does, too."""

    attention: Division
    tiles: Mapping[str, Tile]
    early: bool
    ahead: int = 0
    around_attention: int = 0


def plan_of(
    sizes: Mapping[str, tuple[int, int]], slots: int, heads: int, length: int, processors: int, early: bool
) -> Plan:
    """sizes: outputs and inputs of every product. heads: key heads."""
    tiles = dict.fromkeys(PRODUCTS, Tile(4, 1024, 0, 0, 4)) if slots == 1 else {}
    fitting = {name: tile for name, tile in tiles.items() if tile.fits(slots, *sizes[name])}
    return Plan(Division.of(slots * heads, processors, length), fitting, early)
