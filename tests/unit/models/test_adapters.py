"""The arithmetic of fine-tuning against numbers worked out by hand and published ones."""

from __future__ import annotations

import pytest

from paceline.errors import RequestError
from paceline.experiment.choices import Choice
from paceline.experiment.spec import Tuning
from paceline.models import adapters, arithmetic

FULL, LORA, QLORA = (Tuning(method=method, optimizer="adamw") for method in ("full", "lora", "qlora"))
MISTRAL = arithmetic.load(Choice("mistral-7b"))
TINY = arithmetic.load(Choice("tiny-llama"))
# tiny-llama: 2 layers, hidden 128, 4 heads and 2 kv heads of 32, ffn 256, vocab 256.
TINY_BLOCK = 128 * 128 + 2 * 128 * 64 + 128 * 128 + 3 * 128 * 256
TINY_ADAPTERS = 2 * 16 * ((128 + 128) + 2 * (128 + 64) + (128 + 128))


def test_adapter_parameters_are_the_published_ones() -> None:
    """Mistral-7B, rank 16 on q, k, v and o, as PEFT prints it; rank 8 has half."""
    assert adapters.adapter_parameters(MISTRAL, 16, "q+k+v+o") == 13_631_488
    assert adapters.adapter_parameters(MISTRAL, 8, "q+k+v+o") == 13_631_488 // 2
    assert adapters.adapter_parameters(MISTRAL, 16, "q+k+v+o+gate+up+down") == 41_943_040
    assert adapters.adapter_parameters(TINY, 16, "q+k+v+o") == TINY_ADAPTERS
    assert adapters.trained_parameters(TINY, FULL) == arithmetic.parameters(TINY)


def test_a_mixture_has_adapters_on_every_expert_and_computes_with_few() -> None:
    mixture = arithmetic.load(Choice("mixtral-8x7b"))
    dense = adapters.adapter_parameters(MISTRAL, 16, "up")
    assert adapters.adapter_parameters(mixture, 16, "up") == 8 * dense
    tuning = Tuning(method="lora", targets="up")
    frozen = 4 * arithmetic.matmul_parameters(mixture)
    assert adapters.flops_per_token(mixture, tuning, 0) == frozen + 6 * 2 * dense


def test_a_target_the_model_lacks_is_refused(golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        adapters.adapter_parameters(arithmetic.load(Choice("tiny")), 16, "q+gate")
    assert str(caught.value) == golden
    assert "gate" in str(caught.value)


@pytest.mark.parametrize("length", [64, 512])
def test_full_training_with_full_rows_is_what_training_from_scratch_is(length: int) -> None:
    keys = (length + 1) / 2
    assert adapters.flops_per_token(MISTRAL, FULL, keys) == arithmetic.flops_per_token(MISTRAL, length)
    recomputed = adapters.recomputed_flops_per_token(MISTRAL, FULL, keys, "full")
    assert recomputed == arithmetic.recomputed_flops_per_token(MISTRAL, length, "full")


def test_lora_flops_by_hand(golden: object) -> None:
    products = 2 * TINY_BLOCK + 128 * 256
    attention = 2 * 4 * 10 * 4 * 32
    for tuning in (LORA, QLORA):
        expected = 4 * products + 6 * TINY_ADAPTERS + 3 * attention
        assert adapters.flops_per_token(TINY, tuning, 10) == expected
        again = adapters.recomputed_flops_per_token(TINY, tuning, 10, "full")
        assert again == 2 * (2 * TINY_BLOCK + TINY_ADAPTERS) + attention
        assert adapters.recomputed_flops_per_token(TINY, tuning, 10, "none") == 0
    with pytest.raises(RequestError) as caught:
        adapters.recomputed_flops_per_token(TINY, LORA, 10, "some")
    assert str(caught.value) == golden


def test_lora_tends_to_two_thirds_of_full_training() -> None:
    full = adapters.flops_per_token(MISTRAL, FULL, 1)
    ratios = [adapters.flops_per_token(MISTRAL, Tuning(method="lora", rank=r), 1) / full for r in (512, 64, 1)]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] == pytest.approx(2 / 3, rel=1e-3)


def test_a_frozen_weight_in_four_bits() -> None:
    assert adapters.NF4_BYTES == pytest.approx(0.5 + 1 / 64 + 4 / (64 * 256)) == pytest.approx(0.5159, abs=1e-4)


def test_frozen_bytes_by_hand() -> None:
    blocks, ends = 2 * TINY_BLOCK, 2 * 128 * 256 + 5 * 128
    assert adapters.quantised_parameters(TINY) == blocks
    assert arithmetic.parameters(TINY) == blocks + ends
    assert adapters.frozen_bytes(TINY, FULL, "bf16") == 0
    assert adapters.frozen_bytes(TINY, LORA, "bf16") == 2 * (blocks + ends)
    assert adapters.frozen_bytes(TINY, QLORA, "bf16") == blocks * adapters.NF4_BYTES + 2 * ends
    assert adapters.frozen_bytes(TINY, QLORA, "fp32") == blocks * adapters.NF4_BYTES + 4 * ends


@pytest.mark.parametrize(
    ("method", "optimizer", "compute", "per_parameter"),
    [
        ("full", "adamw", "bf16", 16),
        ("full", "adamw", "fp32", 16),
        ("full", "paged_adamw_8bit", "bf16", 10),
        ("full", "adamw_8bit", "fp32", 10),
        ("lora", "adamw", "bf16", 16),
        ("qlora", "adamw", "bf16", 16),
        ("qlora", "paged_adamw_8bit", "bf16", 4 + 4 + 2),
    ],
)
def test_bytes_of_what_learns(method: str, optimizer: str, compute: str, per_parameter: int) -> None:
    tuning = Tuning(method=method, optimizer=optimizer)
    frozen = adapters.frozen_bytes(TINY, tuning, compute)
    state = adapters.state_bytes(TINY, tuning, Choice("ddp"), 8, compute)
    assert state == frozen + per_parameter * adapters.trained_parameters(TINY, tuning)


def test_state_is_sharded_as_the_strategy_shards() -> None:
    frozen = adapters.frozen_bytes(TINY, QLORA, "bf16")
    scales = 2 * TINY_BLOCK * (1 / 64 + 4 / (64 * 256))
    sharded = scales + (frozen - scales) / 4
    for strategy, expected in (
        ("zero", frozen + TINY_ADAPTERS * (8 / 4 + 8)),
        ("zero:stage=2", frozen + TINY_ADAPTERS * (12 / 4 + 4)),
        ("zero:stage=3", sharded + TINY_ADAPTERS * 16 / 4),
        ("fsdp2", sharded + TINY_ADAPTERS * 16 / 4),
    ):
        assert adapters.state_bytes(TINY, QLORA, Choice.parse(strategy), 4, "bf16") == pytest.approx(expected)
    assert adapters.state_bytes(TINY, QLORA, Choice("mesh"), 4, "bf16") is None
    full = adapters.state_bytes(TINY, FULL, Choice("zero", {"stage": 2}), 4, "bf16")
    assert full == arithmetic.state_bytes(Choice("zero", {"stage": 2}), arithmetic.parameters(TINY), 4)


@pytest.mark.parametrize(
    ("strategy", "times_adapters"),
    [("ddp", 2 * 4), ("zero:stage=1", 2 * 4 + 4), ("zero:stage=2", 2 * 3 * 4 + 4)],
)
def test_only_adapters_are_communicated(strategy: str, times_adapters: int) -> None:
    for tuning in (LORA, QLORA):
        sent = adapters.wire_bytes(TINY, tuning, Choice.parse(strategy), 2, 3, "fp32", "bf16")
        assert sent == times_adapters * TINY_ADAPTERS / 2


def test_strategies_that_shard_weights_gather_the_frozen_ones_in_their_storage_dtype() -> None:
    root = 2 * (2 * 128 * 256 + 128)
    norms = 2 * 2 * 2 * 128
    blocks = 2 * TINY_BLOCK / 2 + norms + 4 * TINY_ADAPTERS
    sent = adapters.wire_bytes(TINY, QLORA, Choice("fsdp2"), 2, 3, "fp32", "bf16")
    assert sent == pytest.approx((3 * (2 * blocks + root) + 4 * TINY_ADAPTERS) / 2)
    kept = Choice("fsdp2", {"reshard_after_forward": False, "sync_every_micro_batch": True})
    sent = adapters.wire_bytes(TINY, QLORA, kept, 2, 3, "fp32", "bf16")
    assert sent == pytest.approx((3 * (blocks + root) + 3 * 4 * TINY_ADAPTERS) / 2)
    whole = Choice("zero", {"stage": 3, "persistence_threshold": 0, "max_live_parameters": 0})
    sent = adapters.wire_bytes(TINY, LORA, whole, 2, 3, "fp32", "bf16")
    frozen = 2 * arithmetic.parameters(TINY)
    assert sent == pytest.approx(3 * (2 * (frozen + 4 * TINY_ADAPTERS) + 4 * TINY_ADAPTERS) / 2)
    default = adapters.wire_bytes(TINY, LORA, Choice("zero", {"stage": 3}), 2, 3, "fp32", "bf16")
    # Every tensor of this model is under 1e5 elements, so all stay and are gathered once.
    assert default == pytest.approx((frozen + 4 * TINY_ADAPTERS + 3 * 4 * TINY_ADAPTERS) / 2)


def test_the_formulas_are_what_two_real_ranks_sent() -> None:
    """Counted payloads of tiny-llama in fp32 with 4-bit frozen weights, two micro batches of two processes each."""
    counted = {
        "ddp": 2 * 114_688,
        "fsdp2": 525_312 + 1_056_768 + 114_688,
        "zero:stage=3": 379_392 + 147_456 + 229_376,
    }
    for strategy, payload in counted.items():
        sent = adapters.wire_bytes(TINY, QLORA, Choice.parse(strategy), 2, 2, "fp32", "fp32")
        assert sent == payload / 2, strategy


@pytest.mark.parametrize(
    ("ranks", "padded"), [(2, TINY_ADAPTERS), (3, 123_648 // 4), (32, 2 * (4 * 32 * 128 + 16 * (2 * 128 + 2 * 64)))]
)
def test_fsdp2_pads_the_rows_of_every_adapter(ranks: int, padded: int) -> None:
    """Three ranks reduced 123,648 bytes. Of 32 ranks half hold no row of the 16 x 128 matrices."""
    assert adapters.sharded_adapter_parameters(TINY, QLORA, ranks) == padded
    strategy, share = Choice("fsdp2"), (ranks - 1) / ranks
    sent = adapters.wire_bytes(TINY, QLORA, strategy, ranks, 1, "fp32", "fp32")
    frozen = 4 * arithmetic.root_parameters(TINY) + 2 * (2 * TINY_BLOCK / 2 + 4 * 2 * 2 * 128)
    assert sent == pytest.approx((frozen + (2 + 1) * 4 * padded) * share)


def test_tensors_hold_every_weight_once() -> None:
    for shape in (TINY, MISTRAL, arithmetic.load(Choice("tiny")), arithmetic.load(Choice("mixtral-8x7b"))):
        tensors = adapters.weight_tensors(shape, FULL, "bf16")
        assert sum(n for n, _ in tensors) == arithmetic.parameters(shape)
        assert sum(held for _, held in tensors) == 2 * arithmetic.parameters(shape)


def test_full_fine_tuning_communicates_as_training_from_scratch_does() -> None:
    count = arithmetic.parameters(TINY)
    assert adapters.wire_bytes(TINY, FULL, Choice("ddp"), 2, 3, "fp32", "bf16") == 2 * count * 4 / 2
    whole = Choice("zero", {"stage": 3, "persistence_threshold": 0})
    for strategy in (Choice("zero", {"stage": 2}), Choice("fsdp2"), whole):
        root = arithmetic.root_parameters(TINY)
        expected = arithmetic.wire_bytes(strategy, count, 2, 3, 2, 2, root, arithmetic.tensor_sizes(TINY))
        assert adapters.wire_bytes(TINY, FULL, strategy, 2, 3, "bf16", "bf16") == expected
    assert adapters.wire_bytes(TINY, FULL, Choice("mesh"), 2, 3, "fp32", "bf16") is None
