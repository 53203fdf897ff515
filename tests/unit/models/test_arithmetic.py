"""The arithmetic of models against counts other people published and numbers worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.errors import RequestError
from paceline.experiment.choices import Choice
from paceline.models import arithmetic


def load(text: str) -> arithmetic.Shape:
    return arithmetic.load(Choice.parse(text))


PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-350m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama-1b": 1_235_814_400,
    "llama-7b": 6_738_415_616,
    "llama-8b": 8_030_261_248,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
}


# --- named shapes ---


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameters_equal_the_published_count(name: str, count: int) -> None:
    assert arithmetic.parameters(load(name)) == count


def test_every_published_count_in_the_table_is_tested() -> None:
    assert {n: load(n).published_parameters for n in arithmetic.names() if load(n).published_parameters} == PUBLISHED


@pytest.mark.parametrize(
    ("name", "billions"), [("gpt3-1.3b", 1.3), ("gpt3-2.7b", 2.7), ("gpt3-6.7b", 6.7), ("gpt3-175b", 175)]
)
def test_gpt3_rounds_to_what_the_paper_prints(name: str, billions: float) -> None:
    assert round(arithmetic.parameters(load(name)) / 1e9, 1 if billions < 10 else 0) == billions


def test_the_seed_model_called_117m_is_counted_honestly() -> None:
    assert arithmetic.parameters(load("tinygpt")) == 125_226_240
    assert arithmetic.parameters(load("tinygpt-as-run")) == 236_406_784


def test_parameters_of_the_tiny_models_by_hand() -> None:
    # gpt: 2 layers of 12*128^2 + 13*128, embedding 256*128, positions 256*128, final norm 2*128
    assert arithmetic.parameters(load("tiny")) == 2 * (196_608 + 1_664) + 32_768 + 32_768 + 256
    # llama: q and o 128*128, k and v 128*64, mlp 3*128*256, two norms; embedding and head apart; final norm
    assert arithmetic.parameters(load("tiny-llama")) == 2 * (32_768 + 16_384 + 98_304 + 256) + 2 * 32_768 + 128


def test_cpu_models_stay_cpu_sized() -> None:
    assert 200_000 < arithmetic.parameters(load("tiny-llama")) < arithmetic.parameters(load("tiny")) < 500_000
    assert 2_000_000 < arithmetic.parameters(load("small")) < 5_000_000


# --- options and user errors ---


def test_options_override_the_shape_and_drop_the_published_count() -> None:
    whole, cut = load("gpt2-124m"), load("gpt2-124m:layers=2")
    assert cut == dataclasses.replace(whole, layers=2, published_parameters=None)
    assert arithmetic.parameters(whole) - arithmetic.parameters(cut) == 10 * 7_087_872


def test_derived_fields_follow_the_overridden_ones() -> None:
    shape = load("tiny:heads=8,hidden=256")
    assert (shape.kv_heads, shape.head_dim, shape.ffn) == (8, 32, 1024)


def test_a_family_can_be_reshaped_by_its_flags() -> None:
    tied, untied = load("gpt2-124m"), load("gpt2-124m:tied=false")
    assert arithmetic.parameters(untied) - arithmetic.parameters(tied) == 50257 * 768
    assert arithmetic.matmul_parameters(untied) == arithmetic.matmul_parameters(tied)


def test_an_unknown_name_is_answered_with_close_matches(golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        load("gpt2-124M")
    assert str(caught.value) == golden
    assert "gpt2" in str(caught.value)
    assert "124" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "tiny:layer=2",
        "tiny:layers=0",
        "tiny:layers=true",
        "tiny:layers=2.5",
        "tiny:tied=1",
        "tiny:family=bert",
        "tiny:heads=3",
        "tiny:kv_heads=3",
        "tiny-llama:head_dim=33",
        "tiny:experts=4",
        "tiny:experts=2,experts_per_token=3",
        "tiny:norm_eps=0",
        "tiny:published_parameters=1",
    ],
)
def test_a_shape_that_cannot_be_is_refused_in_one_sentence(text: str, golden: object) -> None:
    with pytest.raises(RequestError) as refusal:
        load(text)
    assert str(refusal.value) == golden
    assert "\n" not in str(refusal.value)


# --- FLOPs ---


def test_matmul_parameters_by_hand() -> None:
    assert arithmetic.matmul_parameters(load("gpt2-124m")) == 12 * 12 * 768**2 + 768 * 50257 == 123_532_032
    per_layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert arithmetic.matmul_parameters(load("llama-8b")) == 32 * per_layer + 4096 * 128256 == 7_504_658_432


def test_a_mixture_multiplies_only_the_chosen_experts() -> None:
    per_layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 4096 * 8 + 2 * 3 * 4096 * 14336
    assert arithmetic.matmul_parameters(load("mixtral-8x7b")) == 32 * per_layer + 4096 * 32000 == 12_748_587_008


def test_flops_per_token_by_hand() -> None:
    shape = load("gpt2-124m")
    assert arithmetic.attention_flops_per_token(shape, 1024, "causal") == 12 * 1025 * 12 * 128 == 18_892_800
    assert arithmetic.attention_flops_per_token(shape, 1024, "full") == 12 * 2 * 1024 * 12 * 128 == 37_748_736
    assert arithmetic.flops_per_token(shape, 1024) == 3 * (2 * 123_532_032 + 18_892_800) == 797_870_592
    assert arithmetic.flops_per_token(shape, 1024, "full") == 3 * (2 * 123_532_032 + 37_748_736) == 854_438_400


def test_causal_attention_is_the_mean_over_positions() -> None:
    shape = load("tiny")
    by_position = sum(2 * 2 * keys * shape.heads * shape.head_dim for keys in range(1, 65)) * shape.layers
    assert arithmetic.attention_flops_per_token(shape, 64, "causal") * 64 == by_position


@pytest.mark.parametrize(("sequence_length", "ratio"), [(8192, 1.13), (32768, 1.36)])
def test_the_two_conventions_differ_as_the_method_says(sequence_length: int, ratio: float) -> None:
    shape = load("llama-8b")
    full = arithmetic.flops_per_token(shape, sequence_length, "full")
    assert round(full / arithmetic.flops_per_token(shape, sequence_length, "causal"), 2) == ratio


def test_full_checkpointing_repeats_the_blocks_but_not_the_head() -> None:
    shape = load("gpt2-124m")
    forward = arithmetic.flops_per_token(shape, 1024) // 3
    assert arithmetic.recomputed_flops_per_token(shape, 1024, "full") == forward - 2 * 768 * 50257
    assert arithmetic.recomputed_flops_per_token(shape, 1024, "selective") == 0
    assert arithmetic.recomputed_flops_per_token(shape, 1024, "none") == 0


def test_unknown_words_are_refused(golden: object) -> None:
    shape = load("tiny")
    with pytest.raises(RequestError) as caught:
        arithmetic.flops_per_token(shape, 64, "half")
    assert str(caught.value) == golden
    with pytest.raises(RequestError) as caught:
        arithmetic.recomputed_flops_per_token(shape, 64, "some")
    assert str(caught.value) == golden


# --- state bytes ---


@pytest.mark.parametrize("compute", ["bf16", "fp16", "fp32"])
def test_state_of_one_rank_is_16_bytes_per_parameter_for_all(compute: str) -> None:
    for strategy in ("ddp", "zero:stage=1", "zero:stage=2", "zero:stage=3", "fsdp2"):
        assert arithmetic.state_bytes(Choice.parse(strategy), 1000, 1, compute) == 16_000


@pytest.mark.parametrize(
    ("strategy", "per_parameter"),
    [("ddp", 16), ("zero", 4 + 12 / 8), ("zero:stage=2", 2 + 14 / 8), ("zero:stage=3", 2), ("fsdp2", 2)],
)
def test_state_is_sharded_as_the_method_says(strategy: str, per_parameter: float) -> None:
    assert arithmetic.state_bytes(Choice.parse(strategy), 1000, 8) == pytest.approx(1000 * per_parameter)


def test_fp32_state_has_no_master_copy_to_shard() -> None:
    assert arithmetic.state_bytes(Choice("zero"), 1000, 8, "fp32") == pytest.approx(1000 * (8 + 8 / 8))


def test_state_of_an_unknown_strategy_is_unknown() -> None:
    assert arithmetic.state_bytes(Choice("mesh"), 1000, 8) is None
    assert arithmetic.state_bytes(Choice("zero", {"stage": 4}), 1000, 8) is None


# --- wire bytes ---


@pytest.mark.parametrize(("ranks", "ring", "half_ring"), [(2, 1.0, 0.5), (3, 4 / 3, 2 / 3), (8, 1.75, 0.875)])
def test_wire_factors_are_those_of_nccl_tests(ranks: int, ring: float, half_ring: float) -> None:
    assert arithmetic.wire_factor("all_reduce", ranks) == pytest.approx(ring)
    for operation in ("all_gather", "reduce_scatter", "all_to_all"):
        assert arithmetic.wire_factor(operation, ranks) == pytest.approx(half_ring)
    for operation in ("broadcast", "reduce", "send", "recv"):
        assert arithmetic.wire_factor(operation, ranks) == 1


def test_a_group_of_one_sends_nothing() -> None:
    assert [arithmetic.wire_factor(name, 1) for name in ("all_reduce", "all_gather", "broadcast", "send")] == [
        0,
        0,
        0,
        0,
    ]
    assert arithmetic.wire_bytes(Choice("ddp"), 1000, 1, 4, 4, 4) == 0


def test_an_unknown_collective_is_refused(golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        arithmetic.wire_factor("allreduce", 2)
    assert str(caught.value) == golden
    assert "all_reduce" in str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "per_parameter"),
    # G = 4 micro batches, r = 4 bytes per reduced gradient, p = 2 bytes per gathered weight; before (n-1)/n
    [
        ("ddp", 2 * 4),
        ("fsdp2", 2 * 4 * 2 + 4),
        ("fsdp2:sync_every_micro_batch=true", 4 * (2 * 2 + 4)),
        ("fsdp2:reshard_after_forward=false", 4 * 2 + 4),
        ("zero:stage=1", 2 * 4 + 2),
        ("zero:stage=2", 2 * 4 * 4 + 2),
        ("zero", 2 * 4 + 2),
        ("single", 0),
        ("zero:stage=3", 4 * (2 + 4)),
        ("zero:stage=3,max_live_parameters=0", 4 * (2 * 2 + 4)),
    ],
)
def test_wire_bytes_by_hand(strategy: str, per_parameter: int) -> None:
    observed = arithmetic.wire_bytes(Choice.parse(strategy), 1000, 8, 4, 4, 2)
    assert observed == pytest.approx(1000 * per_parameter * 7 / 8)


def test_fsdp2_keeps_its_root_from_forward_to_backward() -> None:
    shape = load("gpt2-124m")
    whole, root = arithmetic.parameters(shape), arithmetic.root_parameters(shape)
    assert root == (50257 + 1024) * 768 + 2 * 768
    observed = arithmetic.wire_bytes(Choice("fsdp2"), whole, 2, 4, 4, 2, root)
    assert observed == (4 * (2 * (whole - root) + root) * 2 + whole * 4) / 2


def test_fsdp2_gathers_linear_layers_in_one_byte_if_asked() -> None:
    """As counted on two ranks: 7,168 weights of linear layers, 64 of norms in the block; 4,096 + 32 of the root."""
    shape = load("tiny-llama:layers=1,hidden=32,heads=2,kv_heads=2,head_dim=16,ffn=32,vocab=64")
    parts = arithmetic.root_parameters(shape), (), arithmetic.block_matrices(shape)
    strategy = Choice("fsdp2", {"float8_all_gather": True})
    observed = arithmetic.wire_bytes(strategy, arithmetic.parameters(shape), 2, 1, 4, 2, *parts)
    assert observed == (8256 + 14592 + 45440) / 2


def test_zero3_beyond_its_reuse_window_gathers_twice() -> None:
    billions = 8 * 10**9
    assert arithmetic.wire_bytes(Choice("zero", {"stage": 3}), billions, 8, 1, 4, 2) == pytest.approx(
        billions * 8 * 7 / 8
    )


def test_small_tensors_of_zero3_are_gathered_once_per_step() -> None:
    """Counted with DeepSpeed 0.19.8: 600 of 1000 parameters in tensors above the threshold, accumulation 4."""
    tensors, half = (600, 300, 100), 1 / 2
    choice = Choice("zero", {"stage": 3, "persistence_threshold": 300})
    assert arithmetic.wire_bytes(choice, 1000, 2, 4, 4, 4, 0, tensors) == (400 * 4 + 4 * 600 * 4 + 4 * 1000 * 4) * half
    whole = Choice("zero", {"stage": 3, "persistence_threshold": 0, "max_live_parameters": 0})
    assert arithmetic.wire_bytes(whole, 1000, 2, 4, 4, 4, 0, tensors) == 4 * (2 + 1) * 1000 * 4 * half
    default = Choice("zero", {"stage": 3})
    assert arithmetic.wire_bytes(default, 1000, 2, 4, 4, 4, 0, tensors) == (1 + 4) * 1000 * 4 * half


def test_wire_bytes_of_an_unknown_strategy_are_unknown() -> None:
    assert arithmetic.wire_bytes(Choice("mesh"), 1000, 8, 4, 4, 2) is None
    assert arithmetic.wire_bytes(Choice("zero", {"stage": 4}), 1000, 8, 4, 4, 2) is None


def test_active_parameters_of_mixtures() -> None:
    """Mixtral 8x7B has 46.7 B parameters, of which 12.9 B compute a token (Jiang et al., 2024); a dense model all."""
    mixtral = load("mixtral-8x7b")
    assert arithmetic.active_parameters(mixtral) == 46_702_792_704 - 32 * 6 * 3 * 4096 * 14336 == 12_879_925_248
    assert arithmetic.active_parameters(load("llama-1b")) == arithmetic.parameters(load("llama-1b"))
    # MFU counts what computes a token: all but the embedding and the norms.
    assert arithmetic.matmul_parameters(mixtral) == 12_879_925_248 - 32000 * 4096 - 65 * 4096
    assert load("tiny-moe:experts=8,top_k=3").experts_per_token == 3
