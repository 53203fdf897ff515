"""A ledger of live tensor memory: every storage from the operator that made it to its end, and the highest sum.

On a CPU it is what an allocator's counter is on a GPU. Over fake tensors it tells what real ones would hold. It sees
the results of operators; memory that a kernel takes and gives back inside one operator is not seen.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# How long nothing may end before the sum is believed, and the longest that is waited for that.
QUIET_S = 0.1
LONGEST_WAIT_S = 5.0


class Ledger(TorchDispatchMode):
    """Counts from the moment it is entered; what existed before is not in it.

    granule rounds every storage up, as an allocator does that hands out whole blocks. yield_s: so long a sum that would
    be a new peak waits for other threads to let go of what they no longer use (see `settled_bytes`).
    """

    def __init__(self, granule: int = 1, yield_s: float = 0.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.granule, self.yield_s = granule, yield_s
        self.live_bytes = self.peak_bytes = 0
        self._looks_away = False
        self._entries: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            # The shards inside come by again as plain tensors.
            return NotImplemented
        if self._looks_away:
            return func(*args, **(kwargs or {}))
        result = self.perform(func, args, kwargs or {})
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.enter(leaf)
        return result

    def perform(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def enter(self, tensor: torch.Tensor) -> None:
        """Write a tensor's storage down, unless it is there already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._entries:
            self._write(key, weakref.ref(storage, lambda _: self._strike(key)), storage.nbytes())

    def is_new(self, leaf: object) -> bool:
        """Whether this is a tensor whose storage is not written down yet."""
        return isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self._entries

    def touch(self, size_bytes: int) -> None:
        """Memory that an operator held only while it ran."""
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + self._whole(size_bytes))

    def reset_peak(self) -> None:
        self.peak_bytes = self.live_bytes

    def settled_bytes(self) -> int:
        """Live bytes once nothing has ended for a while.

        gloo's threads tell that a collective is done before they let go of its buffers, and need the interpreter for
        that: a sum read at once after a wait now and then still holds a bucket that nobody uses any more.
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

    def _strike(self, key: int) -> None:
        _, size = self._entries.pop(key)
        self.live_bytes -= size

    def _whole(self, size_bytes: int) -> int:
        return -(-size_bytes // self.granule) * self.granule

    @contextlib.contextmanager
    def counting(self) -> Iterator[Ledger]:
        """Enter the ledger, with an eye on storages that are resized in place, which no operator tells (FSDP2), and
        without one for the shadows of whole tensors on which DTensor works out shapes: they hold no memory."""
        resize = torch.UntypedStorage.resize_
        derive_shapes = ShardingPropagator._propagate_tensor_meta_non_cached

        def resized(storage: Any, size: int) -> Any:
            done = resize(storage, size)
            if storage._cdata in self._entries:
                reference, _ = self._entries[storage._cdata]
                self._strike(storage._cdata)
                self._write(storage._cdata, reference, size)
            return done

        def unseen(*args: Any, **kwargs: Any) -> Any:
            before, self._looks_away = self._looks_away, True
            try:
                return derive_shapes(*args, **kwargs)
            finally:
                self._looks_away = before

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        ShardingPropagator._propagate_tensor_meta_non_cached = unseen  # type: ignore[method-assign]
        try:
            with self:
                yield self
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
            ShardingPropagator._propagate_tensor_meta_non_cached = derive_shapes  # type: ignore[method-assign]
