"""Calls of our Triton kernels (`triton_kernels`), with room for what their programs tell each other."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from paceline.serving.replica import triton_kernels
from paceline.serving.replica.plans import CONTEXT_MULTIPLE, Division, Tile

# What a kernel raises that a device cannot compile or run.
ERRORS = (RuntimeError, TritonError)
LOG2_E = 1.4426950408889634
# Rows that tensor cores multiply at least.
LEAST_ROWS = 16
GATE_BLOCK = 1024


def _start(early: bool) -> dict[str, bool]:
    """early: before the kernel before this one has ended."""
    return {"EARLY": early, **({"launch_pdl": True} if early else {})}


def multiply_one(
    given: Tensor,
    weight: Tensor,
    out: Tensor,
    tile: Tile,
    *,
    scales: Tensor | None = None,
    epsilon: float = 0.0,
    gated: bool = False,
    adds: bool = False,
    early: bool = False,
) -> None:
    """out = given @ weight.T for a single row. scales: the weights of an RMSNorm before it. gated: silu(first half) *
    second half of that. adds: to what out has."""
    outputs = out.shape[1]
    triton_kernels.multiply_one[(outputs // tile.block,)](
        given,
        weight,
        given if scales is None else scales,
        out,
        epsilon,
        OUTPUTS=outputs,
        INPUTS=given.shape[1],
        BLOCK=tile.block,
        DEPTH=tile.depth,
        NORMED=scales is not None,
        GATED=gated,
        ADDS=adds,
        num_warps=tile.warps,
        **_start(early),
    )


def normalise(given: Tensor, scales: Tensor, out: Tensor, epsilon: float, *, early: bool = False) -> None:
    """RMSNorm of every row."""
    rows, width = given.shape
    triton_kernels.normalise[(rows,)](
        given,
        scales,
        out,
        epsilon,
        WIDTH=width,
        WIDTH_2=triton.next_power_of_2(width),
        num_warps=8,
        **_start(early),
    )


def gate(given: Tensor, out: Tensor, *, early: bool = False) -> None:
    """silu(first half) * second half of every row."""
    rows, width = out.shape
    programs = rows * triton.cdiv(width, GATE_BLOCK)
    triton_kernels.gate[(programs,)](given, out, WIDTH=width, BLOCK=GATE_BLOCK, **_start(early))


class Choice:
    """The best token of each slot, read by many programs."""

    PARTS = 64

    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:
        self.vocabulary = vocabulary
        self.best = torch.empty((slots, self.PARTS), device=device)
        self.where = torch.empty((slots, self.PARTS), dtype=torch.int32, device=device)
        self.arrived = torch.zeros(slots, dtype=torch.int32, device=device)

    def __call__(self, logits: Tensor, tokens: Tensor, positions: Tensor, most: int, early: bool = False) -> None:
        block = triton.next_power_of_2(triton.cdiv(self.vocabulary, self.PARTS))
        triton_kernels.choose[(self.PARTS, len(logits))](
            logits,
            tokens,
            positions,
            self.best,
            self.where,
            self.arrived,
            most,
            VOCABULARY=self.vocabulary,
            PARTS=self.PARTS,
            BLOCK=block,
            **_start(early),
        )


class SplitAttention:
    """Attention of one token per slot to what its slot has cached, each key and value read once."""

    def __init__(
        self, slots: int, heads: int, group: int, width: int, division: Division, device: torch.device
    ) -> None:
        self.heads, self.group, self.width, self.division = heads, group, width, division
        splits = division.splits
        self.partial = torch.empty((slots, heads, splits, group, width), device=device)
        self.maxima, self.sums = (torch.empty((slots, heads, splits, group), device=device) for _ in range(2))
        self.arrived = torch.zeros((slots, heads), dtype=torch.int32, device=device)

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        out: Tensor,
        scale: float,
        *,
        new: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
        early: bool = False,
    ) -> None:
        """keys, values: (slots, length, heads, width), any strides but the last. new: key and value of this token and
        the tables of cosines and sines, if they are not in the cache yet and nothing is rotated."""
        key, value, cosines, sines = new or (query,) * 4
        division = self.division
        slot_stride, token_stride, head_stride, _ = keys.stride()
        triton_kernels.attend[(self.heads, division.splits, len(query))](
            query,
            key,
            value,
            cosines,
            sines,
            keys,
            values,
            positions,
            out,
            self.partial,
            self.maxima,
            self.sums,
            self.arrived,
            scale * LOG2_E,
            query.stride(0),
            key.stride(0),
            value.stride(0),
            slot_stride,
            token_stride,
            head_stride,
            HEADS=self.heads,
            GROUP=self.group,
            ROWS=max(LEAST_ROWS, triton.next_power_of_2(self.group)),
            FEW=triton.next_power_of_2(self.group),
            WIDTH=self.width,
            SPLITS=division.splits,
            SPLITS_2=triton.next_power_of_2(division.splits),
            MULTIPLE=CONTEXT_MULTIPLE,
            TILE=division.tile,
            STAGES=division.stages,
            STORES=new is not None,
            num_warps=division.warps,
            **_start(early),
        )
