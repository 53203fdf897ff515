"""What compressed gradients lose, what error feedback returns, and the outer step of DiLoCo, on known numbers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.errors import RequestError
from paceline.experiment.choices import Choice
from paceline.experiment.plugins import expanded
from paceline.experiment.spec import RunSpec
from paceline.training.strategies import _compression, compressed


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as directory:
        init = Path(directory, "store").as_uri()
        dist.init_process_group("gloo", init_method=init, rank=0, world_size=1)
        yield
        dist.destroy_process_group()


@dataclass
class Bucket:
    """What a hook sees of DDP's bucket."""

    weights: list[nn.Parameter]
    values: list[Tensor]

    def __post_init__(self) -> None:
        self.flat = torch.cat([value.reshape(-1) for value in self.values])

    def buffer(self) -> Tensor:
        return self.flat

    def parameters(self) -> list[nn.Parameter]:
        return self.weights

    def gradients(self) -> list[Tensor]:
        parts = torch.split(self.flat, [value.numel() for value in self.values])
        return [part.view_as(value) for part, value in zip(parts, self.values, strict=True)]


def sent(hook: Any, weights: list[nn.Parameter], *values: Tensor) -> list[Tensor]:
    bucket = Bucket(weights, list(values))
    hook(bucket).wait()
    return bucket.gradients()


def weights_like(*values: Tensor) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros_like(value)) for value in values]


def test_powersgd_sends_a_matrix_of_low_rank_and_a_vector_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    thin = torch.randn(32, 2, generator=generator) @ torch.randn(2, 48, generator=generator)
    vector = torch.randn(7, generator=generator)
    matrix, same = sent(_compression.PowerSGD(2), weights_like(thin, vector), thin, vector)
    torch.testing.assert_close(matrix, thin, atol=1e-4, rtol=1e-4)
    assert torch.equal(same, vector)


def test_powersgd_returns_what_it_lost_in_later_steps() -> None:
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(16, 16, generator=generator)
    hook, weights = _compression.PowerSGD(1), weights_like(gradient)
    total = sum((sent(hook, weights, gradient.clone())[0] for _ in range(200)), torch.zeros(16, 16))
    # All that was ever added, except the error that is still kept.
    torch.testing.assert_close(total + hook.errors[id(weights[0])], 200 * gradient, atol=1e-2, rtol=1e-3)
    assert torch.linalg.matrix_rank(sent(hook, weights, gradient.clone())[0]) == 1


def test_signs_carry_the_mean_size_of_each_tensor_and_feed_errors_back() -> None:
    a, b = torch.tensor([3.0, -1.0, 2.0]), torch.tensor([[0.5, -0.5]])
    hook, weights = _compression.Signs(), weights_like(a, b)
    first, second = sent(hook, weights, a, b)
    assert first.tolist() == [2.0, -2.0, 2.0]
    assert second.tolist() == [[0.5, -0.5]]
    assert hook.errors[id(weights[0])].tolist() == [1.0, 1.0, 0.0]
    assert hook.errors[id(weights[1])].tolist() == [[0.0, 0.0]]


def test_sixteen_bits_round() -> None:
    value = torch.tensor([1.0 + 2**-12, 3.0])
    assert sent(_compression.CastHook("bf16"), weights_like(value), value)[0].tolist() == [1.0, 3.0]


@pytest.mark.parametrize(("bits", "octets"), [([1], [1]), ([0] * 8 + [1, 1], [0, 3])])
def test_bits_are_packed_and_unpacked(bits: list[int], octets: list[int]) -> None:
    packed = _compression.packed(torch.tensor(bits, dtype=torch.bool))
    assert packed.tolist() == octets
    assert _compression.unpacked(packed, len(bits)).tolist() == bits


def test_the_outer_step_of_diloco_is_nesterovs() -> None:
    """As torch's SGD with the same rate and momentum, on the distance from the common weights."""
    ours, theirs = (nn.Parameter(torch.tensor([1.0, 2.0])) for _ in range(2))
    outer = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    trainer: Any = SimpleNamespace(
        stepped=[ours],
        common=[ours.detach().clone()],
        velocity=[torch.zeros(2)],
        outer_rate=0.7,
        momentum=0.9,
    )
    for step in range(3):
        moved = torch.tensor([0.1 * (step + 1), -0.2])
        theirs.grad = moved.clone()
        outer.step()
        with torch.no_grad():
            ours.sub_(moved)
        _compression.LocalTrainer._outer_step(trainer)
        torch.testing.assert_close(ours.detach(), theirs.detach())


def test_options_of_other_methods_have_no_effect(make_spec: Callable[..., RunSpec]) -> None:
    refused = {
        "powersgd,every=3": "every is an option of localsgd and diloco and has no effect with powersgd; leave it out",
        "localsgd,start=3": "start is an option of powersgd and signsgd and has no effect with localsgd",
        "bf16,rank=2": "rank is an option of powersgd and has no effect with bf16",
        "localsgd,outer_rate=0.5": "outer_rate is an option of diloco",
    }
    for strategy, reason in refused.items():
        assert reason in (compressed.check(make_spec(f"compressed:method={strategy}")) or "")
    for strategy in ("powersgd,rank=2,start=3", "signsgd,start=2", "diloco,every=2,outer_rate=0.5"):
        assert compressed.check(make_spec(f"compressed:method={strategy}")) is None


def test_short_names_and_bad_options() -> None:
    assert str(expanded("strategies", Choice.parse("powersgd:rank=2"), 1, 2)) == "compressed:method=powersgd,rank=2"
    with pytest.raises(RequestError, match=r"compressed.method: got 'fp8', expected fp16"):
        compressed.Options(method="fp8")
    with pytest.raises(RequestError, match="diloco is the method"):
        compressed.expand("diloco", {"method": "fp16"}, 1, 2)
    assert "every 4 steps" in compressed.approximation({"method": "diloco", "every": 4})
