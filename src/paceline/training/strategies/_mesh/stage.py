"""A pipeline stage: consecutive layers of the reference decoder, with the embedding or the head at the ends.

Without pipeline parallelism there is one stage with everything. Its parameters keep the decoder's names, and its
arithmetic is the decoder's: each weight is cast to the compute dtype where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.shape import Shape
from paceline.training.decoder import (
    DTYPES,
    Block,
    Head,
    _norm,
    block_runner,
    initial_values,
    rotation,
    rounded,
    run_blocks,
)
from paceline.training.mixture import local


class Embedding(nn.Embedding):
    """Looks up token ids in the table, cast to the compute dtype first as the decoder does."""

    compute = torch.float32

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight.to(self.compute))


class Stage(nn.Module):
    """Maps token ids (the first stage) or activations to activations or (the last stage) logits.

    Stages of a mixture of experts also pass on the balance term of the layers so far.

    places_of, total_length: the positions of this rank's part of a sequence, and the length of the whole; set by
    context parallelism. enter: called with the embedded tokens; set by tensor parallelism. whole_length: from the
    length of activations to that of the sequences this rank works on, which differ with sequence parallelism.
    """

    def __init__(self, shape: Shape, compute: str, layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        self.shape, self.dtype, self.first, self.last = shape, DTYPES[compute], first, last
        self.tied_apart = last and not first and shape.tied
        if first:
            self.embedding = Embedding(shape.vocab, shape.hidden)
            self.embedding.compute = self.dtype
            self.positions = nn.Embedding(shape.context, shape.hidden) if shape.positions == "learned" else None
        self.blocks = nn.ModuleDict({str(layer): Block(shape, layer) for layer in layers})
        if last:
            self.norm = _norm(shape)
            self.head = Head(shape.hidden, shape.vocab, bias=False)
            self.tie()
        self.run_block: Callable[..., Tensor] = block_runner("none")
        self.enter: Callable[[Tensor], Tensor] = lambda x: x
        self.whole_length: Callable[[int], int] = lambda length: length
        self.places_of: Callable[[Any], Tensor | None] = lambda device: None
        self.total_length = 0

    def tie(self) -> None:
        """Make embedding and head one parameter where the model ties them and this stage has both."""
        if self.first and self.last and self.shape.tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, balance: Tensor | None = None) -> Any:
        if self.first:
            tokens, x = x, self.embedding(x)
            length = tokens.shape[1]
        else:
            length = self.whole_length(x.shape[1])
        places = self.places_of(x.device)
        turn: Tensor | None = None
        if self.shape.positions == "learned":
            if self.first:
                assert self.positions is not None
                table = local(self.positions.weight)
                x = x + (table[:length] if places is None else table[places]).to(self.dtype)
        elif places is None:
            turn = rotation(self.shape, length, x.device)
        else:
            turn = rotation(self.shape, self.total_length, x.device)[:, places]
        if self.first:
            x = self.enter(x)
        if self.shape.experts and self.first:
            balance = torch.zeros((), device=x.device)
        x, balance = run_blocks(self.blocks.values(), self.run_block, x, turn, balance)
        x = self.head(self.norm(x)) if self.last else x
        return x if balance is None else (x, balance)

    def decoder_names(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under the decoder's names: a head that is tied to an embedding elsewhere has that one's name."""
        for name, parameter in self.named_parameters():
            yield ("embedding.weight" if self.tied_apart and name == "head.weight" else name), parameter


def fill(stage: Stage, seed: int, compute: str, device: str, order: Callable[[str, torch.Size], Tensor | None]) -> None:
    """Allocate a stage from the meta device and give each parameter its part of the decoder's initial values.

    order(name, shape): the rows in the order in which ranks take them, or None for the decoder's own (see
    `row_dimension`).
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    stage.to_empty(device=device)
    stage.tie()
    with torch.no_grad():
        for name, parameter in stage.decoder_names():
            whole = expert_shape(stage, name, parameter.shape)
            value = initial_values(name, whole, stage.shape.layers, seed, torch.device(device))
            value = own_experts(stage, name, rounded(name, value, compute))
            rows = order(name, parameter.shape)
            value = value if rows is None else value.index_select(row_dimension(value), rows.to(value.device))
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                part = distribute_tensor(value, mesh, placements, src_data_rank=None)
                parameter.to_local().copy_(part.to_local())
            else:
                parameter.copy_(value)


def row_dimension(value: Tensor) -> int:
    """The dimension of the rows of a weight, of the weights of all experts, or of a bias."""
    return max(value.dim() - 2, 0)


def expert_shape(stage: Stage, name: str, shape: torch.Size) -> torch.Size:
    """The shape of a parameter over all ranks that share the experts of a layer."""
    experts = stage.shape.experts
    return torch.Size((experts, *shape[1:])) if experts and is_expert(name) else shape


def own_experts(stage: Stage, name: str, value: Tensor) -> Tensor:
    """Of the weights of all experts, those of this rank; other weights themselves."""
    if not is_expert(name):
        return value
    mixture: Any = stage.blocks[name.split(".")[1]].mlp
    return value[mixture.first : mixture.first + mixture.experts.count]


def is_expert(name: str) -> bool:
    return ".experts." in name


def loss_of(logits: Any, labels: Any, normaliser: Tensor, ignored: int) -> Tensor:
    """The decoder's loss: the sum over tokens, divided by `normaliser`."""
    flat = logits.flatten(0, 1).float()
    return F.cross_entropy(flat, labels.flatten(), reduction="sum", ignore_index=ignored) / normaliser


def parameters_of(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all parameters of the decoder, in its order, without allocating anything."""
    from paceline.training.decoder import Decoder

    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Decoder(shape).named_parameters()}
