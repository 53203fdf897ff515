"""A ledger of live tensor memory: the sum over all storages from creation to release, and its peak.

On a CPU it replaces the allocator's counter of a GPU. With fake tensors it shows what real ones would use. It sees the
results of operators, and not memory that a kernel allocates and frees inside one operator.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The sum is accepted once nothing was freed for QUIET_S; the longest wait for that.
QUIET_S = 0.1
LONGEST_WAIT_S = 5.0


class Ledger(TorchDispatchMode):
    """Counts storages that are created while it is entered, not those from before.

    granule: storages are rounded up to it, as by an allocator with fixed block sizes. yield_s: time to wait before a
    new peak is accepted, so that other threads can free what they no longer use (see `settled_bytes`).
    """

    def __init__(self, granule: int = 1, yield_s: float = 0.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.granule, self.yield_s = granule, yield_s
        self.live_bytes = self.peak_bytes = 0
        self._is_paused = False
        self._entries: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            # Its shards arrive here again, as plain tensors.
            return NotImplemented
        if self._is_paused:
            return func(*args, **(kwargs or {}))
        result = self.perform(func, args, kwargs or {})
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.enter(leaf)
        return result

    def perform(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def enter(self, tensor: torch.Tensor) -> None:
        """Add a tensor's storage, unless it is known already. Tensors on the meta device have no memory, nor has the
        wrapper of a collective's result, which is a tensor of its own."""
        if tensor.device.type == "meta" or isinstance(tensor, AsyncCollectiveTensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._entries:
            self._write(key, weakref.ref(storage, lambda _: self._remove(key)), storage.nbytes())

    def is_new(self, leaf: object) -> bool:
        """Whether this is a tensor whose storage is not known yet."""
        return isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self._entries

    def touch(self, size_bytes: int) -> None:
        """Account for memory that an operator used only while it ran."""
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + self._whole(size_bytes))

    def reset_peak(self) -> None:
        self.peak_bytes = self.live_bytes

    def settled_bytes(self) -> int:
        """Live bytes once nothing has been freed for QUIET_S.

        gloo's threads report a collective as done before they free its buffers, and need the interpreter lock for
        that. A sum read directly after a wait may still contain a bucket that nobody uses any more.
        """
        deadline = time.monotonic() + LONGEST_WAIT_S
        seen, since = self.live_bytes, time.monotonic()
        while (now := time.monotonic()) - since < QUIET_S and now < deadline:
            time.sleep(QUIET_S / 20)
            if self.live_bytes != seen:
                seen, since = self.live_bytes, time.monotonic()
        return self.live_bytes

    def _write(self, key: int, reference: weakref.ref[Any], size_bytes: int) -> None:
        size = self._whole(size_bytes)
        self._entries[key] = (reference, size)
        self.live_bytes += size
        if self.yield_s and self.live_bytes > self.peak_bytes:
            time.sleep(self.yield_s)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _remove(self, key: int) -> None:
        _, size = self._entries.pop(key)
        self.live_bytes -= size

    def _whole(self, size_bytes: int) -> int:
        return -(-size_bytes // self.granule) * self.granule

    @contextlib.contextmanager
    def counting(self) -> Iterator[Ledger]:
        """Enter the ledger. It also sees storages that FSDP2 resizes in place, which no operator reports, and ignores
        the tensors on which DTensor derives shapes, which have no memory."""
        resize = torch.UntypedStorage.resize_
        derive_shapes = ShardingPropagator._propagate_tensor_meta_non_cached

        def resized(storage: Any, size: int) -> Any:
            done = resize(storage, size)
            if storage._cdata in self._entries:
                reference, _ = self._entries[storage._cdata]
                self._remove(storage._cdata)
                self._write(storage._cdata, reference, size)
            return done

        def paused(*args: Any, **kwargs: Any) -> Any:
            before, self._is_paused = self._is_paused, True
            try:
                return derive_shapes(*args, **kwargs)
            finally:
                self._is_paused = before

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        ShardingPropagator._propagate_tensor_meta_non_cached = paused  # type: ignore[method-assign]
        try:
            with self:
                yield self
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
            ShardingPropagator._propagate_tensor_meta_non_cached = derive_shapes  # type: ignore[method-assign]
