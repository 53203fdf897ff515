"""Calls of our Triton kernels (`triton_kernels`), with room for what their programs tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from paceline.serving.replica import triton_kernels
from paceline.serving.replica.plans import CONTEXT_MULTIPLE, Division, Tile

LOG2_E = 1.4426950408889634
# Rows that tensor cores multiply at least.
LEAST_ROWS = 16
GATE_BLOCK = 1024
# What one program brings into the cache for the next kernel, and the unit in which it does.
PROGRAM_LINES, LINE_BYTES = 512, 128


@dataclass(frozen=True)
class Ahead:
    """A weight whose first columns a kernel brings into the cache for the next one. rows: of one program."""

    weight: Tensor
    columns: int
    rows: int

    @staticmethod
    def of(weight: Tensor, most: int) -> Ahead | None:
        """As much as `most` bytes hold."""
        outputs, inputs = weight.shape
        lines = min(most // (outputs * LINE_BYTES), inputs * weight.itemsize // LINE_BYTES)
        if lines < 1:
            return None
        lines = 1 << (lines.bit_length() - 1)
        rows = 1
        while rows * lines < PROGRAM_LINES and outputs % (2 * rows) == 0:
            rows *= 2
        return Ahead(weight, lines * LINE_BYTES // weight.itemsize, rows)

    @property
    def programs(self) -> int:
        return int(self.weight.shape[0]) // self.rows


def _options(ahead: Ahead | None, early: bool) -> dict[str, Any]:
    outputs, inputs = ahead.weight.shape if ahead else (0, 0)
    known = {"AHEAD_OUTPUTS": outputs, "AHEAD_INPUTS": inputs}
    known |= {"AHEAD_COLUMNS": ahead.columns if ahead else 0, "AHEAD_ROWS": ahead.rows if ahead else 0}
    return {**known, "EARLY": early, **({"launch_pdl": True} if early else {})}


def multiply(
    given: Tensor,
    weight: Tensor,
    out: Tensor,
    tile: Tile,
    *,
    gated: bool = False,
    adds: bool = False,
    early: bool = False,
) -> None:
    """out = given @ weight.T for few rows. gated: silu(first half) * second half of that. adds: to what out has."""
    (rows, inputs), outputs = given.shape, out.shape[1]
    triton_kernels.multiply[(outputs // tile.block,)](
        given,
        weight,
        out,
        rows,
        OUTPUTS=outputs,
        INPUTS=inputs,
        ROWS=max(LEAST_ROWS, triton.next_power_of_2(rows)),
        BLOCK=tile.block,
        DEPTH=tile.depth,
        PARTS=tile.parts,
        STAGES=tile.stages,
        GATED=gated,
        ADDS=adds,
        EARLY=early,
        num_warps=tile.warps,
        **({"launch_pdl": True} if early else {}),
    )


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
    """`multiply` for a single row. scales: the weights of an RMSNorm before it."""
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
        EARLY=early,
        num_warps=tile.warps,
        **({"launch_pdl": True} if early else {}),
    )


def normalise(
    given: Tensor, scales: Tensor, out: Tensor, epsilon: float, *, early: bool = False, ahead: Ahead | None = None
) -> None:
    """RMSNorm of every row."""
    rows, width = given.shape
    triton_kernels.normalise[(rows + (ahead.programs if ahead else 0),)](
        given,
        scales,
        out,
        ahead.weight if ahead else given,
        rows,
        epsilon,
        WIDTH=width,
        WIDTH_2=triton.next_power_of_2(width),
        num_warps=8,
        **_options(ahead, early),
    )


def gate(given: Tensor, out: Tensor, *, early: bool = False, ahead: Ahead | None = None) -> None:
    """silu(first half) * second half of every row."""
    rows, width = out.shape
    programs = rows * triton.cdiv(width, GATE_BLOCK)
    triton_kernels.gate[(programs + (ahead.programs if ahead else 0),)](
        given,
        out,
        ahead.weight if ahead else given,
        programs,
        WIDTH=width,
        BLOCK=GATE_BLOCK,
        **_options(ahead, early),
    )


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
        more: dict[str, Any] = {"launch_pdl": True} if early else {}
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
            EARLY=early,
            **more,
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
        ahead: Ahead | None = None,
    ) -> None:
        """keys, values: (slots, length, heads, width), any strides but the last. new: key and value of this token and
        the tables of cosines and sines, if they are not in the cache yet and nothing is rotated."""
        key, value, cosines, sines = new or (query,) * 4
        division = self.division
        slot_stride, token_stride, head_stride, _ = keys.stride()
        slots, together = len(query), self.heads * division.splits
        extra = triton.cdiv(ahead.programs, together) if ahead else 0
        triton_kernels.attend[(self.heads, division.splits, slots + extra)](
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
            ahead.weight if ahead else query,
            slots,
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
            **_options(ahead, early),
        )
