"""What `compressed` sends instead of gradients: hooks of DDP, and a trainer that averages weights every few steps.

A hook gets one bucket of gradients and returns a future with their mean over all ranks. Hooks with error feedback add
to each gradient what its compression lost in the step before. torch's own PowerSGD hook reduces in callbacks, which
aborts with several buckets on gloo; here every collective starts in the hook itself, in the same order on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.contract import Seat
from paceline.experiment.spec import RunSpec
from paceline.training.decoder import DTYPES
from paceline.training.strategies._torch import Subject, TorchTrainer

# From DDP's bucket of gradients to the future with their mean.
Hook: TypeAlias = Callable[[Any], "torch.futures.Future[Tensor]"]


def after_start(hook: Hook) -> Callable[[Callable[[], bool], Any], torch.futures.Future[Tensor]]:
    """The hook as DDP calls it; until its state, a function, returns true, whole gradients are reduced."""

    def reduce(has_started: Callable[[], bool], bucket: Any) -> torch.futures.Future[Tensor]:
        return hook(bucket) if has_started() else whole_mean(bucket)

    # DDP requires these annotations as types, not as text.
    reduce.__annotations__ = {"bucket": cast(Any, dist).GradBucket, "return": torch.futures.Future[torch.Tensor]}
    return reduce


def whole_mean(bucket: Any) -> torch.futures.Future[Tensor]:
    """The plain mean, as DDP computes it without a hook."""
    buffer: Tensor = bucket.buffer().div_(dist.get_world_size())
    return reduced(buffer, lambda mean: mean)


def reduced(buffer: Tensor, then: Callable[[Tensor], Tensor]) -> torch.futures.Future[Tensor]:
    """The sum over ranks, then what `then` makes of it, without waiting for either."""
    future = cast(Any, dist.all_reduce(buffer, async_op=True)).get_future()
    return cast("torch.futures.Future[Tensor]", future.then(lambda done: then(done.value()[0])))


class CastHook:
    """The mean in 16 bit, which may overlap with backward; torch's bf16 hook does the same but refuses gloo."""

    def __init__(self, dtype: str) -> None:
        self.dtype = DTYPES[dtype]

    def __call__(self, bucket: Any) -> torch.futures.Future[Tensor]:
        buffer: Tensor = bucket.buffer()
        small = buffer.to(self.dtype).div_(dist.get_world_size())
        return reduced(small, buffer.copy_)


class PowerSGD:
    """Each gradient matrix M as P Qᵀ with `rank` columns: one power iteration, warm-started with the last Q.

    P = MQ and Q = MᵀP are means over all ranks, P made orthogonal between them (Vogels et al., 2019). Vectors, and
    matrices for which P and Q would not be smaller, are reduced whole.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.factors: dict[int, Tensor] = {}
        self.errors: dict[int, Tensor] = {}

    def __call__(self, bucket: Any) -> torch.futures.Future[Tensor]:
        buffer, world = bucket.buffer(), dist.get_world_size()
        thin: list[tuple[int, Tensor]] = []
        whole: list[Tensor] = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if self.pays(gradient):
                thin.append((id(parameter), gradient.view(gradient.shape[0], -1)))
            else:
                whole.append(gradient)
        for key, matrix in thin:
            if key in self.errors:
                matrix.add_(self.errors[key])
        columns = [self._factor(key, matrix) for key, matrix in thin]
        left = [matrix @ q for (_, matrix), q in zip(thin, columns, strict=True)]
        summed([*left, *whole])
        for gradient in whole:
            gradient.div_(world)
        # The columns of P span the same space whatever their length, so the sum needs no division.
        left = [torch.linalg.qr(p)[0] for p in left]
        right = [matrix.T @ p for (_, matrix), p in zip(thin, left, strict=True)]
        summed(right)
        for (key, matrix), p, q in zip(thin, left, right, strict=True):
            self.factors[key] = q.div_(world)
            approximate = p @ q.T
            self.errors[key] = matrix - approximate
            matrix.copy_(approximate)
        return done(buffer)

    def pays(self, gradient: Tensor) -> bool:
        """Whether two thin matrices are smaller than the gradient."""
        if gradient.dim() < 2:
            return False
        rows = gradient.shape[0]
        return (rows + gradient.numel() // rows) * self.rank < gradient.numel()

    def _factor(self, key: int, matrix: Tensor) -> Tensor:
        """The last Q, at first a random one that is the same on every rank: hooks run in the same order on all."""
        if key not in self.factors:
            seed = torch.Generator().manual_seed(len(self.factors))
            self.factors[key] = torch.randn(matrix.shape[1], self.rank, generator=seed).to(matrix)
        return self.factors[key]


class Signs:
    """One bit per gradient, and the mean absolute value of each tensor; the means over ranks are of what each sent.

    Signs cannot be added on the way, so they are gathered: a rank receives those of all others. That is 32 times less
    than an all-reduce in fp32 with 2 ranks, 8 times less with 8, and nothing is gained from about 64 on.
    """

    def __init__(self) -> None:
        self.errors: dict[int, Tensor] = {}

    def __call__(self, bucket: Any) -> torch.futures.Future[Tensor]:
        gradients: Sequence[Tensor] = bucket.gradients()
        keys = [id(parameter) for parameter in bucket.parameters()]
        for key, gradient in zip(keys, gradients, strict=True):
            if key in self.errors:
                gradient.add_(self.errors[key])
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        scales = torch.stack([gradient.abs().mean() for gradient in gradients]).float()
        sent = torch.cat([packed(flat >= 0), scales.view(torch.uint8)])
        received = sent.new_empty(dist.get_world_size() * sent.numel())
        dist.all_gather(list(received.chunk(dist.get_world_size())), sent)
        sizes = [gradient.numel() for gradient in gradients]
        total, rank = torch.zeros_like(flat), dist.get_rank()
        for other, message in enumerate(received.view(dist.get_world_size(), -1)):
            bits, others_scales = message[: -4 * len(sizes)], message[-4 * len(sizes) :].clone().view(torch.float32)
            values = unpacked(bits, flat.numel()).to(flat.dtype).mul_(2).sub_(1)
            for part, scale in zip(torch.split(values, sizes), others_scales, strict=True):
                part.mul_(scale)
            total.add_(values)
            if other == rank:
                lost = torch.split(flat - values, sizes)
                self.errors |= {k: e.view_as(g) for k, e, g in zip(keys, lost, gradients, strict=True)}
        for gradient, part in zip(gradients, torch.split(total.div_(dist.get_world_size()), sizes), strict=True):
            gradient.copy_(part.view_as(gradient))
        return done(bucket.buffer())


def packed(bits: Tensor) -> Tensor:
    """Eight bits per byte; the last byte is filled with zeros.

    >>> packed(torch.tensor([True, False, True])).tolist()
    [5]
    """
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.numel() % 8)).view(-1, 8)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (padded * weights).sum(1, dtype=torch.uint8)


def unpacked(octets: Tensor, count: int) -> Tensor:
    """The inverse of `packed`, as 0 and 1.

    >>> unpacked(torch.tensor([5], dtype=torch.uint8), 3).tolist()
    [1, 0, 1]
    """
    places = torch.arange(8, dtype=torch.uint8, device=octets.device)
    return (octets[:, None] >> places & 1).view(-1)[:count]


def summed(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors, each replaced by its sum over ranks, in one all-reduce."""
    if not tensors:
        return tensors
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
    return tensors


def done(value: Tensor) -> torch.futures.Future[Tensor]:
    """A future that has its value; on a GPU, DDP waits for the work queued so far."""
    devices: Any = [value.device] if value.is_cuda else None
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    future.set_result(value)
    return future


class LocalTrainer(TorchTrainer):
    """Every rank trains its own copy. After every `every` updates, the weights become those of the outer step.

    The outer gradient is the distance from the last common weights to the mean of all ranks; outer holds the rate and
    Nesterov momentum of its step. (1, 0) is the plain mean.
    """

    def __init__(
        self, subject: Subject, spec: RunSpec, seat: Seat, *, every: int, outer: tuple[float, float], **more: Any
    ) -> None:
        super().__init__(subject, spec, seat, **more)
        # Steps after which its communication repeats.
        self.period = every
        self.outer_rate, self.momentum = outer
        self.common = [weights.detach().clone() for weights in self.stepped] if outer != (1.0, 0.0) else None
        self.velocity = [torch.zeros_like(weights) for weights in self.common or ()]

    def update(self) -> Tensor:
        norm = super().update()
        if self.updates % self.period == 0:
            with torch.no_grad():
                self._outer_step()
            if self.masters:
                self.masters.give_weights()
        return norm

    def _outer_step(self) -> None:
        weights = [parameter.detach() for parameter in self.stepped]
        summed(weights)
        torch._foreach_div_(weights, float(dist.get_world_size()))
        if self.common is None:
            return
        moved = torch._foreach_sub(self.common, weights)
        torch._foreach_mul_(self.velocity, self.momentum)
        torch._foreach_add_(self.velocity, moved)
        # Nesterov: the gradient plus the momentum of the next step.
        torch._foreach_add_(moved, self.velocity, alpha=self.momentum)
        torch._foreach_sub_(self.common, moved, alpha=self.outer_rate)
        torch._foreach_copy_(weights, self.common)
