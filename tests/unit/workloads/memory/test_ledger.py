"""The ledger: storages once, until they end, and the highest sum."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")

from paceline.workloads.memory.ledger import Ledger  # noqa: E402

KIB = 1024


def test_a_storage_counts_once_and_until_its_last_view_is_gone() -> None:
    with Ledger().counting() as ledger:
        whole = torch.zeros(256)
        view = whole[:10].view(2, 5)
        assert ledger.live_bytes == KIB
        del whole
        assert ledger.live_bytes == KIB
        del view
        assert ledger.live_bytes == 0
    assert ledger.peak_bytes == KIB


def test_what_autograd_saves_is_live_until_backward_has_used_it() -> None:
    weight = torch.ones(256, requires_grad=True)
    with Ledger().counting() as ledger:
        total = (weight.exp() * 2).sum()
        assert ledger.live_bytes == KIB + 4  # exp keeps its result; the product by 2 keeps nothing
        total.backward()
        del total
        assert ledger.live_bytes == KIB  # the gradient
    assert ledger.peak_bytes > KIB + 4


def test_a_new_peak_begins_at_what_is_live() -> None:
    with Ledger().counting() as ledger:
        kept = torch.zeros(256)
        torch.zeros(1024)
        assert ledger.peak_bytes == 5 * KIB
        ledger.reset_peak()
        assert ledger.peak_bytes == ledger.live_bytes == kept.numel() * 4


def test_storages_resized_in_place_are_followed() -> None:
    """FSDP2 frees and allocates its gathered weights so."""
    with Ledger().counting() as ledger:
        tensor = torch.zeros(256)
        tensor.untyped_storage().resize_(0)
        assert ledger.live_bytes == 0
        tensor.untyped_storage().resize_(2 * KIB)
        assert ledger.live_bytes == 2 * KIB
        del tensor
        assert ledger.live_bytes == 0
    assert torch.UntypedStorage.resize_.__name__ == "resize_"


def test_blocks_are_whole() -> None:
    with Ledger(granule=512).counting() as ledger:
        kept = [torch.zeros(1), torch.zeros(129)]
        assert ledger.live_bytes == 512 + 1024
        ledger.touch(1)
        assert ledger.peak_bytes == 3 * 512 + 512
        del kept


def test_shadows_that_dtensor_derives_shapes_on_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, unsharded tensors of all parameters, anew at each step on torch 2.11: no memory stands behind them."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    name = "_propagate_tensor_meta_non_cached"
    monkeypatch.setattr(ShardingPropagator, name, lambda *_: torch.zeros(256))
    with Ledger().counting() as ledger:
        shadow = ShardingPropagator._propagate_tensor_meta_non_cached(None, None)
        assert ledger.peak_bytes == 0
        kept = torch.zeros(256)
        assert ledger.live_bytes == KIB
    assert shadow.shape == kept.shape


def test_a_buffer_that_another_thread_frees_a_moment_later_is_not_counted() -> None:
    """As gloo's threads do: the collective is done, its buffer not yet free."""
    with Ledger().counting() as ledger:
        kept = torch.zeros(256)
        held = [torch.zeros(512)]
        late = threading.Timer(0.03, held.clear)
        late.start()
        assert ledger.live_bytes == 3 * KIB
        assert ledger.settled_bytes() == kept.nbytes == KIB
        late.join()


def test_tensors_without_memory_are_not_counted() -> None:
    """DeepSpeed keeps the shapes of all weights as tensors on the meta device."""
    with Ledger().counting() as ledger:
        real = torch.zeros(100)
        shape = torch.zeros_like(real, device="meta")
        assert shape.numel() == 100
        assert ledger.live_bytes == 400
