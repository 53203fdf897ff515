"""The loss scale of fp16 for layouts whose ranks hold different weights: all see an overflow that any of them had."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.training.strategies._optimizers import local

GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0, 0.5, 2000


class AgreedScaler:
    """What `TorchTrainer` uses of `torch.amp.GradScaler`, with its rule for the scale.

    torch's looks for overflows in the gradients of one rank, or of one mesh. Here weights lie on several meshes, and
    stages of a pipeline on different ranks.
    """

    def __init__(self, device: str, initial: float) -> None:
        self.device, self.value, self.good_steps, self.overflowed = device, initial, 0, False

    def is_enabled(self) -> bool:
        return True

    def get_scale(self) -> float:
        return self.value

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.value

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        bad = torch.zeros((), device=self.device)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = local(parameter.grad)
                gradient.mul_(1 / self.value)
                bad += (~gradient.isfinite().all()).to(bad)
        dist.all_reduce(bad)
        self.overflowed = bool(bad.item())

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.overflowed:
            optimizer.step()

    def update(self) -> None:
        self.good_steps = 0 if self.overflowed else self.good_steps + 1
        if self.overflowed:
            self.value *= BACKOFF
        elif self.good_steps == GROWTH_INTERVAL:
            self.value, self.good_steps = self.value * GROWTH, 0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.value, "_growth_tracker": self.good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value, self.good_steps = float(state["scale"]), int(state["_growth_tracker"])
