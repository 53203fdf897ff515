"""The traffic of a mixture of experts that the model states is what our own layer moves."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.experiment.choices import Choice
from paceline.models import arithmetic
from paceline.prediction.predict import setup_of
from paceline.prediction.step_time import _mixture, columns
from paceline.training.mixture import Mixture


class Bytes(TorchDispatchMode):
    """Counts what operations read and write, without views and products."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        views = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        free = any(word in func.__name__ for word in ("empty", "detach", "mm.", "linear", "_unsafe_view", "ones_like"))
        if not views and not free:
            tensors = [one for one in tree_leaves((args, kwargs, found)) if isinstance(one, torch.Tensor)]
            self.total += sum(
                one.element_size()
                * (one.numel() if 0 not in one.stride() else one.untyped_storage().nbytes() // one.element_size())
                for one in tensors
            )
        return found


@pytest.mark.parametrize(("hidden", "experts", "chosen"), [(2048, 64, 8), (2048, 8, 2), (1024, 128, 8)])
def test_a_mixture_moves_the_bytes_that_are_predicted(hidden: int, experts: int, chosen: int) -> None:
    """Both passes of one layer without its experts, whose products and activations are counted elsewhere."""
    shape = dataclasses.replace(
        arithmetic.load(Choice("moe-3b")),
        hidden=hidden,
        experts=experts,
        experts_per_token=chosen,
        ffn=16,
        published_parameters=None,
    )
    layer = Mixture(shape, 0)
    layer.compute = lambda rows, counts: rows.view_as(rows)
    layer.start_tally("cpu")
    x = torch.randn(2, 64, hidden, dtype=torch.bfloat16, requires_grad=True)
    with Bytes() as moved:
        joined, balance = layer(x)
        torch.autograd.backward([joined, balance], [torch.ones_like(joined), torch.ones_like(balance)])
    c = columns([dataclasses.replace(setup_of("moe-3b", "h200", 1), shape=shape)])
    stated = float(_mixture(c, 128)[0])  # type: ignore[arg-type]
    assert moved.total == pytest.approx(stated, rel=0.06)
