"""A trainer that reads live bytes during one step, and the sizes of the tensors that the trainer keeps then."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.contract import Trainer
from paceline.results.memory_components import OwnedBytes


def _storages(tensors: Iterable[Any]) -> dict[int, Any]:
    """Distinct storages by address: views of one flat buffer are one storage."""
    detached = (tensor.detach() for tensor in tensors if isinstance(tensor, Tensor))
    local = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in detached)
    return {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in local)}


def _module(trainer: Any) -> torch.nn.Module:
    """The (wrapped) module: TorchTrainer and ZeroTrainer name it differently."""
    return trainer.module if hasattr(trainer, "module") else trainer.subject  # type: ignore[no-any-return]


def _parameters(trainer: Any) -> Iterator[Any]:
    for parameter in _module(trainer).parameters():
        yield parameter
        # ZeRO-3 keeps its shard here; the parameter itself is empty between uses.
        yield getattr(parameter, "ds_tensor", None)


def _gradients(trainer: Any) -> Iterator[Any]:
    for parameter in _module(trainer).parameters():
        yield parameter.grad
    sharded = getattr(getattr(trainer, "engine", None), "optimizer", None)
    yield getattr(sharded, "grad_partitions_flat_buffer", None)
    for group in (getattr(sharded, "averaged_gradients", None) or {}).values():
        yield from group or ()


class TracedTrainer:
    """Implements `contract.Trainer` around another trainer, and traces the memory of step number `step`.

    `start` is called just before that step, to reset the peak; `read(moment)` at each moment of it.
    """

    def __init__(self, trainer: Trainer, step: int, read: Callable[[str], None], start: Callable[[], None]) -> None:
        self._trainer, self._step, self._read, self._start = trainer, step, read, start
        self._steps = self._forwards = 0
        self._gradients: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.held: OwnedBytes | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    @property
    def updates(self) -> int:
        return self._trainer.updates

    @property
    def _interleaves(self) -> bool:
        return getattr(self._trainer, "interleaves", False)

    @property
    def _is_traced(self) -> bool:
        return self._steps == self._step

    def forward(self, tokens: Tensor, labels: Tensor, normaliser: Tensor, last: bool) -> Tensor:
        first = self._is_traced and self._forwards == 0
        self._forwards += 1
        if first:
            self._start()
            self._read("begin")
        loss = self._trainer.forward(tokens, labels, normaliser, last)
        if first and not self._interleaves:
            self._read("forward")
        return loss

    def backward(self, loss: Tensor, last: bool) -> None:
        if self._is_traced and self._interleaves:
            # A pipeline runs every forward pass in here.
            with self.at_first_backward(lambda: self._read("forward")):
                self._trainer.backward(loss, last)
        else:
            self._trainer.backward(loss, last)
        if last and self._is_traced:
            self._read("backward")
            storages = _storages(_gradients(self._trainer))
            self._gradients = {key: (weakref.ref(storage), storage.nbytes()) for key, storage in storages.items()}

    def update(self) -> Tensor | float:
        norm = self._trainer.update()
        if self._is_traced:
            self._read("update")
            parameters = _storages(_parameters(self._trainer))
            # The tensors that AdamW updates (master weights or the parameters themselves) and its moments.
            adamw: Any = self.optimizer
            updated = (tensor for group in adamw.param_groups for tensor in group["params"])
            moments = (tensor for key, state in adamw.state.items() for tensor in (key, *state.values()))
            optimizer = _storages((*updated, *moments))
            gradients = self._gradients.values()
            self.held = OwnedBytes(
                parameters=sum(storage.nbytes() for storage in parameters.values()),
                optimizer=sum(storage.nbytes() for key, storage in optimizer.items() if key not in parameters),
                gradients=sum(size for _, size in gradients),
                standing_gradients=sum(size for reference, size in gradients if reference() is not None),
            )
        self._steps, self._forwards = self._steps + 1, 0
        return norm

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return self._trainer.full_parameters()

    def declare(self) -> tuple[Mapping[str, str], Mapping[str, Any], Mapping[str, Any]]:
        return self._trainer.declare()
