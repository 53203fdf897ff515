"""torch's pipeline stage, with buffers for received tensors only while a micro batch needs them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.pipelining import PipelineStage

if TYPE_CHECKING:
    from collections.abc import Iterator


class LeanStage(PipelineStage):
    """A stage that receives each tensor into memory of its own, freed after the backward pass of its micro batch.

    torch allocates what all micro batches of a step receive at once, and keeps it and the gradients until the next
    step: with 64 micro batches of a large model that is more than the state of its weights.
    """

    def _prepare_forward_infra(self, *args: Any, **named: Any) -> Any:
        with self._without_memory():
            return super()._prepare_forward_infra(*args, **named)

    def _prepare_backward_infra(self, *args: Any, **named: Any) -> Any:
        with self._without_memory():
            return super()._prepare_backward_infra(*args, **named)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        _move(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        _move(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **named: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **named)
        for received in (self.args_recv_info, self.grad_recv_info):
            _move(received[bwd_chunk_id], torch.device("meta"))

    @contextmanager
    def _without_memory(self) -> Iterator[None]:
        """Buffers that are made here have shapes only."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device


def _move(received: Iterable[Any], device: torch.device) -> None:
    """Give each received tensor an empty buffer on this device. The input of the first stage has none."""
    for one in received:
        buffer = getattr(one, "buffer", None)
        if buffer is not None:
            one.buffer = torch.empty_like(buffer, device=device, requires_grad=buffer.requires_grad)
