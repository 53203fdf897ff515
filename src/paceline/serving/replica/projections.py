"""Products of one input are made as one product: queries, keys and values; gate and up.

A decode step reads every weight once and does little with it. A product of few columns ends before it has the memory
at full speed, so three of them cost more than one over the same weights. The modules of the architecture keep their
names and places, and each gives out its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# The siblings that architectures of the llama family multiply one input with, each once in a pass.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Joined(nn.Module):
    """One weight over the outputs of all siblings. The first that is asked in a pass makes the product for all."""

    def __init__(self, siblings: Sequence[nn.Linear]) -> None:
        super().__init__()
        # Of a model that is cut, a module's own word for its width is that of the whole.
        self.widths = [int(part.weight.shape[0]) for part in siblings]
        self.weight = nn.Parameter(torch.cat([part.weight for part in siblings]), requires_grad=False)
        biases: list[Tensor] = [part.bias for part in siblings if part.bias is not None]
        self.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        self.given: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()
        self.asked = 0

    def part(self, number: int, given: Tensor) -> Tensor:
        # By the input and not by counting alone: a pass that broke off between siblings must not answer the next one.
        if given is not self.given:
            self.given, self.asked = given, 0
            self.parts = torch.split(F.linear(given, self.weight, self.bias), self.widths, dim=-1)
        found = self.parts[number]
        self.asked += 1
        if self.asked == len(self.widths):
            self.given, self.parts = None, ()
        return found


class Part(nn.Module):
    def __init__(self, joined: Joined, number: int) -> None:
        super().__init__()
        self.joined, self.number = joined, number

    def forward(self, given: Tensor) -> Tensor:
        return self.joined.part(self.number, given)


@torch.no_grad()
def join(model: Any) -> Any:
    """Every group of siblings in the model, in place. What has none is left as it is."""
    device = next(model.parameters()).device
    for owner in list(model.modules()):
        for names in SIBLINGS:
            siblings: list[Any] = [getattr(owner, name, None) for name in names]
            if _alike(siblings):
                joined = Joined(siblings)
                for number, name in enumerate(names):
                    setattr(owner, name, Part(joined, number))
    if device.type == "cuda":
        # The siblings' own weights, half of the model, would stay with torch where NCCL and graphs look for memory.
        torch.cuda.empty_cache()
    return model


def is_joined(model: Any) -> bool:
    return any(isinstance(part, Joined) for part in model.modules())


def _alike(siblings: Sequence[Any]) -> bool:
    """Plain products, all with a bias or all without: what a library put in their place is its own affair."""
    if any(type(part) is not nn.Linear for part in siblings):
        return False
    return len({part.bias is None for part in siblings}) == 1
