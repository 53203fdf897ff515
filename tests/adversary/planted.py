"""A strategy with one mistake that a careless author might make, chosen by name: `planted:mistake=stale_gradients`.

It is DDP, for those in ON_ZERO ZeRO-2.

Each function changes the trainer that `wrap` of the real strategy returns. LATE mistakes begin after the first steps,
PERIODIC ones happen in every third step.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.contract import Seat, Trainer
from paceline.experiment.choices import Choice
from paceline.experiment.plugins import parse_options
from paceline.experiment.spec import RunSpec
from paceline.training.strategies import _torch, ddp, zero

LATE = 4
PERIOD = 3
MISTAKES: dict[str, Callable[[Any, RunSpec, Seat], None]] = {}
ON_ZERO = ("a_master_weight_stays",)


@dataclass(frozen=True)
class Options:
    mistake: str = ""


def check(spec: RunSpec) -> str | None:
    return None


def wrap(spec: RunSpec, seat: Seat) -> Trainer:
    assert spec.strategy is not None
    mistake = parse_options(Options, spec.strategy).mistake
    with BEFORE.get(mistake, contextlib.nullcontext)():
        if mistake in ON_ZERO:
            trainer: Any = zero.wrap(dataclasses.replace(spec, strategy=Choice("zero", {"stage": 2})), seat)
        else:
            trainer = ddp.wrap(dataclasses.replace(spec, strategy=Choice("ddp")), seat)
    trainer.number = 0  # of the step that is being computed
    MISTAKES[mistake](trainer, spec, seat)
    update = trainer.update

    def counted() -> Tensor | float:
        norm: Tensor | float = update()
        trainer.number += 1
        return norm

    trainer.update = counted
    return trainer  # type: ignore[no-any-return]


def mistake(function: Callable[[Any, RunSpec, Seat], None]) -> Callable[[Any, RunSpec, Seat], None]:
    MISTAKES[function.__name__] = function
    return function


def is_late(trainer: Any) -> bool:
    return bool(trainer.number >= LATE)


def is_periodic(trainer: Any) -> bool:
    return bool(trainer.number % PERIOD == PERIOD - 1)


def change_inputs(trainer: Any, change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]) -> None:
    forward = trainer.forward
    trainer.forward = lambda t, y, n, last: forward(*change(t, y, n), last)


def change_gradients(trainer: Any, change: Callable[[], None]) -> None:
    """Called after the last backward, before clipping."""
    update = trainer.update

    def changed() -> Tensor | float:
        change()
        result: Tensor | float = update()
        return result

    trainer.update = changed


def parameters(trainer: Any) -> dict[str, Tensor]:
    return {name.removeprefix("module."): p for name, p in trainer.module.named_parameters()}


def gradients(trainer: Any) -> Iterator[Tensor]:
    return (p.grad for p in parameters(trainer).values() if p.grad is not None)


# --- data ---


@mistake
def half_of_the_batch_late(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    change_inputs(trainer, lambda t, y, n: (t[:1], y[:1], n / 2) if is_late(trainer) else (t, y, n))


@mistake
def shorter_sequences_late(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    def change(t: Tensor, y: Tensor, n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        half = t.shape[1] // 2
        return (t[:, :half], y[:, :half], n / 2) if is_late(trainer) else (t, y, n)

    change_inputs(trainer, change)


@mistake
def stale_tokens(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    last: list[Any] = []

    def change(t: Tensor, y: Tensor, n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        old = last.pop() if last else (t, y)
        last.append((t, y))
        return (*(old if is_periodic(trainer) else (t, y)), n)

    change_inputs(trainer, change)


@mistake
def rolled_tokens_late(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    change_inputs(trainer, lambda t, y, n: (t.roll(1, 1), y, n) if is_late(trainer) else (t, y, n))


@mistake
def unshifted_labels(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    change_inputs(trainer, lambda t, y, n: (t, t, n))


@mistake
def one_rank_repeats_its_batch(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    first: list[Any] = []

    def change(t: Tensor, y: Tensor, n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first[:] = first or [(t, y)]
        return (*(first[0] if seat.rank == 1 and is_late(trainer) else (t, y)), n)

    change_inputs(trainer, change)


# --- model ---


@mistake
def fewer_layers_late(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    block = trainer.module.module.blocks[-1]
    forward = block.forward
    block.forward = lambda x, turn: x + 0 * forward(x, turn) if is_late(trainer) else forward(x, turn)


@mistake
def a_little_dropout(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    for block in trainer.module.module.blocks:
        block.mlp.register_forward_hook(lambda module, args, out: torch.nn.functional.dropout(out, 0.1))


@mistake
def no_causal_mask(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    attention = torch.nn.functional.scaled_dot_product_attention

    def full(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Tensor:
        return attention(q, k, v, **{**named, "is_causal": False})

    forward = trainer.forward

    def changed(*args: Any) -> Tensor:
        torch.nn.functional.scaled_dot_product_attention = full
        try:
            return forward(*args)  # type: ignore[no-any-return]
        finally:
            torch.nn.functional.scaled_dot_product_attention = attention

    trainer.forward = changed


# --- gradients ---


@mistake
def no_reduction_late(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    sync = trainer.sync
    trainer.sync = lambda last: sync(last and not is_late(trainer))


@mistake
def no_reduction_periodic(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    sync = trainer.sync
    trainer.sync = lambda last: sync(last and not is_periodic(trainer))


@contextlib.contextmanager
def ignored_by_ddp() -> Iterator[None]:
    real = _torch.whole_subject

    def subject(*args: Any, **named: Any) -> Any:
        module = real(*args, **named)
        name = next(n for n, p in module.named_parameters() if p.dim() == 1)
        module._ddp_params_and_buffers_to_ignore = [name]
        return module

    _torch.whole_subject = subject
    try:
        yield
    finally:
        _torch.whole_subject = real


@mistake
def one_tensor_never_reduced(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    """See `ignored_by_ddp`."""


@mistake
def stale_gradients_late(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    old: list[Tensor] = []

    def change() -> None:
        new = [g.clone() for g in gradients(trainer)]
        if is_late(trainer):
            for gradient, before in zip(gradients(trainer), old, strict=True):
                gradient.copy_(before)
        old[:] = new

    change_gradients(trainer, change)


def scaled(trainer: Any, factor: float) -> None:
    for gradient in gradients(trainer):
        gradient.mul_(factor)


@mistake
def sum_instead_of_mean(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    change_gradients(trainer, lambda: scaled(trainer, seat.world_size))


@mistake
def not_divided_by_accumulation(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    change_gradients(trainer, lambda: scaled(trainer, spec.training.accumulation))


@mistake
def last_micro_batch_only(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    forward = trainer.forward

    def changed(t: Tensor, y: Tensor, n: Tensor, last: bool) -> Tensor:
        if last:
            trainer.optimizer.zero_grad(set_to_none=False)
        return forward(t, y, n, last)  # type: ignore[no-any-return]

    trainer.forward = changed


@mistake
def gradients_kept_late(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    """Forgets to clear them."""
    clear = trainer.optimizer.zero_grad
    trainer.optimizer.zero_grad = lambda **named: None if is_late(trainer) else clear(**named)


@mistake
def one_rank_scales_its_loss(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    backward = trainer.backward
    trainer.backward = lambda loss, last: backward(loss * (1.05 if seat.rank == 1 and is_late(trainer) else 1), last)


@mistake
def sparse_gradients_periodic(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    def change() -> None:
        for gradient in gradients(trainer) if is_periodic(trainer) else ():
            gradient[gradient.abs() < gradient.abs().median()] = 0

    change_gradients(trainer, change)


@mistake
def compressed_reduction(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    trainer.module.register_comm_hook(None, fp16_compress_hook)


@mistake
def frozen_bias(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    """One tensor goes back to its value after each update."""
    tensor = next(p for p in parameters(trainer).values() if p.dim() == 1)
    kept, update = tensor.detach().clone(), trainer.update

    def changed() -> Tensor:
        norm: Tensor = update()
        with torch.no_grad():
            tensor.copy_(kept)
        return norm

    trainer.update = changed


@mistake
def one_tensor_stops_late(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    tensor = next(p for p in parameters(trainer).values() if p.dim() == 1)
    update = trainer.update

    def changed() -> Tensor:
        kept = tensor.detach().clone()
        norm: Tensor = update()
        if is_late(trainer):
            with torch.no_grad():
                tensor.copy_(kept)
        return norm

    trainer.update = changed


@mistake
def a_master_weight_stays(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    """The fp32 copy of one tensor goes back to its value after each update: the model is always one update old."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

    tensor = next(p for p in trainer.subject.parameters() if p.dim() == 1)
    kept, update = safe_get_full_fp32_param(tensor).clone(), trainer.update

    def changed() -> Tensor | float:
        norm: Tensor | float = update()
        safe_set_full_fp32_param(tensor, kept)
        return norm

    trainer.update = changed


# --- optimizer ---


def regroup(trainer: Any, choose: Callable[[str, Tensor], bool], **changes: Any) -> None:
    """A second parameter group with other settings, as many training scripts have."""
    group = trainer.optimizer.param_groups[0]
    names = {id(p): name for name, p in parameters(trainer).items()}
    other = [p for p in group["params"] if choose(names.get(id(p), ""), p)]
    group["params"] = [p for p in group["params"] if all(p is not o for o in other)]
    trainer.optimizer.param_groups.append({**group, "params": other, **changes})


@mistake
def another_eps_for_vectors(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    regroup(trainer, lambda name, p: p.dim() == 1, eps=1e-6)


@mistake
def no_decay_for_vectors(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    regroup(trainer, lambda name, p: p.dim() == 1, weight_decay=0.0)


@mistake
def a_tensor_without_optimizer(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    trainer.optimizer.param_groups[0]["params"].pop()


@mistake
def learning_rate_halved_late(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    def change() -> None:
        trainer.optimizer.param_groups[0]["lr"] = spec.training.learning_rate * (0.5 if is_late(trainer) else 1)

    change_gradients(trainer, change)


@mistake
def other_betas(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    trainer.optimizer.param_groups[0]["betas"] = (0.9, 0.95)


@mistake
def decay_added_to_gradients(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    """Adam instead of AdamW."""
    trainer.optimizer = torch.optim.Adam(trainer.stepped, lr=spec.training.learning_rate, weight_decay=0.01, fused=True)
    trainer.optimizer.register_step_post_hook(lambda *_: setattr(trainer, "updates", trainer.updates + 1))


@mistake
def two_updates_periodic(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    def change() -> None:
        if is_periodic(trainer):
            trainer.optimizer.step()

    change_gradients(trainer, change)


@mistake
def skipped_updates_periodic(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    update = trainer.update

    def changed() -> Tensor:
        if not is_periodic(trainer):
            return update()  # type: ignore[no-any-return]
        norm = torch.nn.utils.get_total_norm(list(gradients(trainer)))
        trainer.optimizer.zero_grad()
        trainer.updates += 1
        return norm

    trainer.update = changed


@mistake
def moments_in_16_bit(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    def shorten(optimizer: Any, *_: object) -> None:
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].bfloat16().float()

    trainer.optimizer.register_step_post_hook(shorten)


@mistake
def rate_of_one_step(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    def change() -> None:
        trainer.optimizer.param_groups[0]["lr"] = spec.training.learning_rate * (0.5 if trainer.number == LATE else 1)

    change_gradients(trainer, change)


@mistake
def moments_lost_late(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    change_gradients(trainer, lambda: trainer.optimizer.state.clear() if trainer.number == LATE else None)


# --- clipping ---


@mistake
def clipped_per_rank(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    """Each rank clips its own gradients before they are averaged; the norm that it reports is that of all."""
    trainer.sync = lambda last: setattr(trainer.module, "require_backward_grad_sync", False)

    def average(tensors: list[Tensor]) -> list[Tensor]:
        for tensor in tensors:
            torch.distributed.all_reduce(tensor)
            tensor.div_(seat.world_size)
        return tensors

    def clip() -> Tensor:
        norm = torch.nn.utils.get_total_norm(average([g.clone() for g in gradients(trainer)]))
        torch.nn.utils.clip_grad_norm_(trainer.module.parameters(), spec.training.clip_norm)
        average(list(gradients(trainer)))
        return norm

    trainer.clip = clip


@mistake
def lost_clipping(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    training = dataclasses.replace(spec.training, clip_norm=1e9)
    update, own = trainer.update, trainer.training

    def changed() -> Tensor:
        trainer.training = training
        try:
            return update()  # type: ignore[no-any-return]
        finally:
            trainer.training = own

    trainer.update = changed


# --- precision ---


@mistake
def fast_products_late(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    change_gradients(trainer, lambda: torch.set_float32_matmul_precision("high") if is_late(trainer) else None)


@mistake
def autocast_to_another_dtype(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    forward = trainer.forward
    dtype = torch.float16 if spec.training.precision.compute == "bf16" else torch.bfloat16

    def changed(*args: Any) -> Tensor:
        with torch.autocast(seat.device, dtype=dtype):
            return forward(*args)  # type: ignore[no-any-return]

    trainer.forward = changed


@mistake
def operands_in_8_bit(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    def round_input(module: Any, args: Any) -> Any:
        return (args[0] + (args[0].to(torch.float8_e4m3fn).to(args[0].dtype) - args[0]).detach(), *args[1:])

    for block in trainer.module.module.blocks:
        block.mlp.register_forward_pre_hook(round_input)


@mistake
def weights_rounded_late(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    update = trainer.update

    def changed() -> Tensor:
        norm: Tensor = update()
        with torch.no_grad():
            for p in parameters(trainer).values() if is_late(trainer) else ():
                p.copy_(p.to(torch.float8_e5m2).to(p.dtype))
        return norm

    trainer.update = changed


# --- accumulation and checkpointing ---


@mistake
def merged_micro_batches(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    """Stores micro batches and computes all of them in one pass at the last."""
    forward, waiting = trainer.forward, list[Any]()
    backward = trainer.backward

    def changed(t: Tensor, y: Tensor, n: Tensor, last: bool) -> Tensor:
        waiting.append((t, y))
        if not last:
            return torch.zeros((), device=t.device, requires_grad=True)
        tokens, labels = (torch.cat(parts) for parts in zip(*waiting, strict=True))
        waiting.clear()
        return forward(tokens, labels, n, last)  # type: ignore[no-any-return]

    trainer.forward = changed
    trainer.backward = lambda loss, last: backward(loss, last) if last else None


@mistake
def no_checkpointing(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    trainer.module.module.run_block = lambda block, *args: block(*args)


@mistake
def checkpoints_half_of_the_layers(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    module = trainer.module.module
    real, first = module.run_block, module.blocks[0]
    module.run_block = lambda block, *args: block(*args) if block is first else real(block, *args)


# --- weights ---


@mistake
def one_rank_drifts_late(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    """A broadcast that one rank misses."""
    update = trainer.update

    def changed() -> Tensor:
        norm: Tensor = update()
        if seat.rank == 1 and trainer.number == LATE:
            with torch.no_grad():
                next(iter(parameters(trainer).values())).add_(1e-6)
        return norm

    trainer.update = changed


@mistake
def averaged_weights_late(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    """An exponential average is trained instead of the weights."""
    update = trainer.update

    def changed() -> Tensor:
        before = [p.detach().clone() for p in parameters(trainer).values()]
        norm: Tensor = update()
        with torch.no_grad():
            for p, old in zip(parameters(trainer).values(), before, strict=True):
                if is_late(trainer):
                    p.lerp_(old, 0.3)
        return norm

    trainer.update = changed


@mistake
def other_initial_weights(trainer: Any, spec: RunSpec, seat: Seat) -> None:
    with torch.no_grad():
        next(iter(parameters(trainer).values())).mul_(1.01)


BEFORE: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {"one_tensor_never_reduced": ignored_by_ddp}
