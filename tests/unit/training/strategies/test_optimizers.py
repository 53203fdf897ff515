"""Moments in 8 bit: which tensors have them is the same on every rank, however the tensors were sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from paceline.experiment.spec import Tuning  # noqa: E402
from paceline.training.strategies._optimizers import SMALLEST_8BIT, LocalShards, optimizer_of, state_dtypes  # noqa: E402

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
