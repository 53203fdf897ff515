"""Moments in 8 bit: which tensors have them is the same on every rank, however the tensors were sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from paceline.experiment.spec import Tuning  # noqa: E402
from paceline.training.strategies._optimizers import (  # noqa: E402
    SMALLEST_8BIT,
    Joined,
    LocalShards,
    optimizer_of,
    state_dtypes,
)

pytestmark = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="pip install 'paceline[finetune]'")
Builder = Callable[..., Any]
RANKS = 3


@pytest.fixture(params=range(RANKS))
def mesh(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Every rank of three in turn, whose collectives do nothing."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=request.param, world_size=RANKS, store=FakeStore())
    yield init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()


def moments(spec: Any, mesh: Any, size: int) -> str:
    """Dtype of the moments of one vector of `size` elements after a step on this rank's part of it."""
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.nn.Parameter(distribute_tensor(torch.ones(size), mesh, [Shard(0)], src_data_rank=None))
    shards = LocalShards([whole])
    optimizer = optimizer_of(spec, shards.parts, shards.whole_sizes)
    for part in shards.parts:
        part.grad = torch.ones_like(part)
    optimizer.step()
    return state_dtypes(optimizer)["optimizer_state"]


@pytest.mark.parametrize(("size", "held"), [(SMALLEST_8BIT, "8bit"), (SMALLEST_8BIT - 1, "fp32"), (4 * 4096, "8bit")])
def test_the_whole_decides_on_every_rank(size: int, held: str, mesh: Any, make_spec: Builder) -> None:
    """4096 elements on three ranks are 1366, 1366 and 1364: the last part is smaller than a third."""
    spec = replace(make_spec("fsdp2"), tuning=Tuning(optimizer="adamw_8bit"))
    assert moments(spec, mesh, size) == held


def test_one_optimizer_does_not_decide_for_the_next(mesh: Any, make_spec: Builder) -> None:
    spec = replace(make_spec("fsdp2"), tuning=Tuning(optimizer="adamw_8bit"))
    assert moments(spec, mesh, SMALLEST_8BIT) == "8bit"
    small = torch.nn.Parameter(torch.ones(64))
    plain = optimizer_of(spec, [small])
    small.grad = torch.ones_like(small)
    plain.step()
    assert state_dtypes(plain)["optimizer_state"] == "fp32"


def parameters(*sizes: tuple[int, ...]) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]


def test_joined_parameters_learn_the_same_numbers(make_spec: Builder) -> None:
    spec = replace(make_spec("single"), tuning=Tuning(optimizer="adamw_8bit"))
    sizes = (16, 256), (4096, 16), (256, 17)
    apart, parts = parameters(*sizes), parameters(*sizes)
    assert Joined.suits(spec, parts)
    joined = Joined(parts)
    plain, one = optimizer_of(spec, apart), optimizer_of(spec, [joined.whole])
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        for first, second in zip(apart, parts, strict=True):
            first.grad = torch.randn(first.shape, generator=generator)
            second.grad = first.grad.clone()
        joined.take_gradients()
        plain.step(), one.step()
        assert all(part.grad is None for part in parts)
        assert all(torch.equal(first, second) for first, second in zip(apart, parts, strict=True))


def test_parameters_that_bitsandbytes_treats_differently_are_not_joined(make_spec: Builder) -> None:
    spec = replace(make_spec("single"), tuning=Tuning(optimizer="adamw_8bit"))
    for size in ((SMALLEST_8BIT - 256,), (SMALLEST_8BIT + 1,)):
        assert not Joined.suits(spec, parameters((64, 256), size))
    assert not Joined.suits(spec, [each.to(torch.bfloat16) for each in parameters((64, 256))])
    assert not Joined.suits(replace(spec, tuning=Tuning(optimizer="adamw")), parameters((64, 256)))
