"""The physics of a step on numbers that can be worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from paceline.prediction import hardware, layouts, memory, parameters
from paceline.prediction.fitting import sensitivities
from paceline.prediction.predict import parse_layout, setup_of
from paceline.prediction.setup import Setup
from paceline.prediction.step_time import OFFSETS, PARTS, columns, parts, step_time

VALUES = parameters.load().values


def seconds(one: Setup, **changes: float) -> dict[str, float]:
    found = parts(columns([one]), {**VALUES, **changes})
    return {name: float(value[0]) for name, value in found.items()}


@pytest.fixture
def one_gpu() -> Setup:
    return setup_of("llama-8b", "h100", 1, global_batch=1, micro_batch=1, checkpointing="none")


def test_products_take_their_flops_over_the_reached_peak(one_gpu: Setup) -> None:
    """Without operand traffic, products are 6 FLOPs per weight and token at the fitted share of the peak."""
    found = seconds(one_gpu, kappa=-40.0)["products"]
    shape = one_gpu.shape
    block = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    flops = 6 * 4096 * (shape.layers * block + 4096 * shape.vocab)
    reached = math.exp(VALUES["efficiency"] + VALUES["hopper"]) * 0.92 * 989e12
    assert found == pytest.approx(flops / reached, rel=1e-9)


def test_parts_add_up_to_the_step(one_gpu: Setup) -> None:
    found = seconds(one_gpu)
    assert set(found) == set(PARTS)
    assert sum(found.values()) == pytest.approx(float(step_time(columns([one_gpu]), VALUES)[0]))


def test_one_gpu_has_no_traffic_and_no_bubble(one_gpu: Setup) -> None:
    found = seconds(one_gpu)
    assert found["tensor parallel"] == found["pipeline bubble"] == found["data parallel (exposed)"] == 0


def test_full_checkpointing_repeats_the_forward_of_the_blocks(one_gpu: Setup) -> None:
    plain, full = seconds(one_gpu), seconds(replace(one_gpu, checkpointing="full"))
    head = 3 * 2 * 4096 * 4096 * 128256 / (math.exp(VALUES["efficiency"] + VALUES["hopper"]) * 0.92 * 989e12)
    assert (full["products"] - head) / (plain["products"] - head) == pytest.approx(4 / 3, rel=0.01)


def test_recomputation_that_stops_early_leaves_out_the_last_product(one_gpu: Setup) -> None:
    """The backward pass reads the inputs of the projection to the hidden size, never its result."""
    full = replace(one_gpu, checkpointing="full")
    early = replace(full, software=replace(full.software, stops_early=True))
    plain, whole, less = (seconds(one, kappa=-40.0)["products"] for one in (one_gpu, full, early))
    block = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    assert (less - plain) / (whole - plain) == pytest.approx(1 - 4096 * 14336 / block)
    attention = [seconds(one)["attention"] for one in (full, early)]
    assert attention[0] == attention[1]


def test_stopping_early_leaves_out_one_of_six_reductions() -> None:
    full = setup_of("llama-8b", "h100", 2, tp=2, global_batch=1, micro_batch=1, checkpointing="full")
    early = full.replaced(software=replace(full.software, stops_early=True))
    assert seconds(early)["tensor parallel"] / seconds(full)["tensor parallel"] == pytest.approx(5 / 6)


def test_casts_and_gradients_move_bytes_of_every_trained_weight(one_gpu: Setup) -> None:
    """Six bytes of each weight of the blocks and the head, whatever the micro batch is."""
    small, large = (
        seconds(one, elementwise=-40.0, logit_bytes=-40.0, weight_traffic=0.0)["memory-bound"]
        for one in (one_gpu, replace(one_gpu, micro_batch=4))
    )
    weights = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336) + 4096 * 128256
    assert small == pytest.approx(6 * weights / 3.35e12, rel=1e-6)
    assert large == pytest.approx(small)
    lora = setup_of("llama-8b", "h100", 1, global_batch=1, micro_batch=1, checkpointing="none", method="lora")
    assert seconds(lora, elementwise=-40.0, logit_bytes=-40.0)["memory-bound"] == pytest.approx(0, abs=1e-9)


def test_repeating_the_attention_adds_its_forward(one_gpu: Setup) -> None:
    """Fused attention has two products forward and five backward: 3.5 forwards, then 4.5."""
    plain, repeated = seconds(one_gpu), seconds(replace(one_gpu, checkpointing="attention"))
    assert repeated["attention"] / plain["attention"] == pytest.approx(4.5 / 3.5)
    assert repeated["products"] == plain["products"]


@pytest.mark.parametrize(("split", "norms"), [(False, 40960), (True, 20480)])
def test_norms_and_residuals_are_split_by_sequence_parallelism_only(split: bool, norms: int) -> None:
    """Per token and layer: 10 x 4096 of norms and residuals, and on two ranks half of 2 x 28672 + 2 x 6144."""
    one = setup_of("llama-8b", "h100", 2, tp=2, global_batch=1, micro_batch=1, checkpointing="none")
    one = one.replaced(software=replace(one.software, sequence_parallel=split))
    found = seconds(one, elementwise=0.0, logit_bytes=-40.0, weight_traffic=-40.0)["memory-bound"]
    assert found == pytest.approx(2 * 4096 * (norms + 34816) * 2.5 * 32 / 3.35e12, rel=1e-6)


def test_the_bubble_is_the_textbook_share() -> None:
    """(pp - 1) / micro batches of the busy time, if transfers are free and the head is left out."""
    one = setup_of("llama-8b", "h100", 4, pp=4, global_batch=16, micro_batch=1, checkpointing="none", shard="none")
    found = seconds(one, pp_overlap=40.0, logit_bytes=-40.0)
    layers = sum(found[name] for name in ("attention", "memory-bound", "tensor parallel", "launch"))
    bubble_of_layers = 3 / 16
    assert found["pipeline bubble"] > bubble_of_layers * layers
    assert found["pipeline bubble"] < bubble_of_layers * (layers + found["products"])


def test_a_slower_network_exposes_more_traffic() -> None:
    fast = setup_of("llama-8b", "h100", 16, shard="zero3", interconnect="ib-ndr", micro_batch=1, global_batch=16)
    slow = setup_of("llama-8b", "h100", 16, shard="zero3", interconnect="25gbe", micro_batch=1, global_batch=16)
    ratio = seconds(slow)["data parallel (exposed)"] / seconds(fast)["data parallel (exposed)"]
    assert ratio > 10
    assert seconds(slow)["products"] == seconds(fast)["products"]


def test_adapters_save_the_gradient_of_frozen_weights() -> None:
    full = setup_of("llama-8b", "h100", 1, global_batch=1, micro_batch=1, checkpointing="none")
    lora = setup_of(
        "llama-8b", "h100", 1, global_batch=1, micro_batch=1, checkpointing="none", method="lora", software="paceline"
    )
    assert seconds(lora)["products"] < seconds(full)["products"] * 0.72
    assert seconds(lora)["optimizer"] < seconds(full)["optimizer"] / 50


def test_compiled_blocks_expand_4_bit_weights_twice_whether_they_recompute_or_not() -> None:
    """2.5 bytes per weight of the blocks, 1.5 times what the memory would take at least, forward and backward."""
    lora, qlora = (
        setup_of("llama-8b", "h100", 1, micro_batch=1, global_batch=1, method=method, software="paceline")
        for method in ("lora", "qlora")
    )
    weights = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)
    for checkpointing, eager in (("none", 2), ("full", 3)):
        for compiled in (True, False):
            pair = (
                one.replaced(checkpointing=checkpointing, software=replace(one.software, compiled=compiled))
                for one in (lora, qlora)
            )
            plain, quantised = (seconds(one)["memory-bound"] for one in pair)
            factor = 2 * 1.5 if compiled else eager * math.exp(VALUES["expand"])
            assert quantised - plain == pytest.approx(factor * 2.5 * weights / 3.35e12, rel=1e-6)


def test_plain_pytorch_moves_more_and_a_compiler_less() -> None:
    fused = setup_of("llama-8b", "h100", 1, global_batch=1, micro_batch=1, checkpointing="none")
    plain = replace(fused, software=replace(fused.software, fused_elementwise=False))
    compiled = replace(plain, software=replace(plain.software, compiled=True))
    moved = [seconds(one, weight_traffic=-40.0)["memory-bound"] for one in (plain, fused, compiled)]
    assert moved[0] / moved[1] == pytest.approx(math.exp(VALUES["unfused"]))
    assert moved[2] < moved[1]


def test_a_host_that_queues_steps_adds_no_time(one_gpu: Setup) -> None:
    queued = replace(one_gpu, software=replace(one_gpu.software, queued=True))
    assert seconds(one_gpu)["other"] == pytest.approx(math.exp(VALUES["constant"]))
    assert seconds(queued)["other"] == 0


def test_memory_of_data_parallelism_is_sixteen_bytes_per_parameter() -> None:
    one = setup_of("llama-8b", "h100", 8, shard="none", micro_batch=1, global_batch=8, checkpointing="full")
    found = memory.components(one)
    state = found["weights"] + found["gradients"] + found["optimizer"]
    assert state == pytest.approx(16 * 8_030_261_248)
    assert not memory.fits(one)
    sharded = memory.components(one.replaced(shard="zero3"))
    assert sharded["weights"] + sharded["gradients"] + sharded["optimizer"] == pytest.approx(state / 8)


def test_an_interleaved_pipeline_keeps_more_in_flight() -> None:
    """1F1B on 4 ranks: 4 micro batches of a quarter of the layers. Two virtual stages: 2 x 3 + 4 + 1 of an eighth."""
    plain, interleaved = (
        setup_of("llama-8b", "h100", 4, pp=4, vp=vp, global_batch=32, micro_batch=1, checkpointing="none")
        for vp in (1, 2)
    )
    assert memory.activations(interleaved) / memory.activations(plain) == pytest.approx(11 / 8)
    few = setup_of("llama-8b", "h100", 4, pp=4, vp=2, global_batch=2, micro_batch=1, checkpointing="none")
    assert memory.activations(few) / memory.activations(plain) == pytest.approx(2 * 2 / 8)


def test_gradients_of_several_micro_batches_are_added_up_in_fp32() -> None:
    """6 + 12 / group bytes per parameter with ZeRO-1, as Megatron-LM documents; 2 bytes less without accumulation."""
    for batch, size in ((8, 2), (16, 4)):
        one = setup_of("llama-8b", "h200", 8, shard="zero1", global_batch=batch, micro_batch=1)
        assert memory.components(one)["gradients"] == size * one.parameters
    sharded = setup_of("llama-8b", "h200", 8, shard="zero3", global_batch=16, micro_batch=1)
    assert memory.components(sharded)["gradients"] == 2 * sharded.parameters / 8


def test_layouts_are_read_and_refused() -> None:
    assert parse_layout("dp=4,tp=2,fsdp") == {"dp": 4, "tp": 2, "shard": "zero3"}
    for text in ("dp", "tp=0", "xp=2", "dp=x"):
        with pytest.raises(Exception, match="--layout: got"):
            parse_layout(text)
    with pytest.raises(Exception, match="got 'dp=16 x tp=2 x pp=1 x cp=1 = 32', expected a product of 64"):
        setup_of("llama-8b", "h100", 64, tp=2, dp=16)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("tp=8,tp=2", "one value of tp"),
        ("zero1,zero3", "one kind of sharding"),
        ("pp=4,vp=3", "stages that divide 32 layers"),
        ("vp=2", "virtual stages of a pipeline"),
    ],
)
def test_degrees_that_contradict_each_other_are_refused(text: str, wanted: str) -> None:
    with pytest.raises(Exception, match=wanted):
        setup_of("llama-8b", "h100", 8, **parse_layout(text))


@pytest.mark.parametrize(
    ("text", "link", "node"),
    [
        ("nvlink4+ib-ndr", 450e9, 400e9),
        ("NVLink3 + 1600Gbps RoCE/node", 300e9, 200e9),
        ("NVLink4 + IB NDR 8x400Gbps (DGX reference; README does not restate)", 450e9, 400e9),
        ("Selene (NVLink3 + 8x HDR200 IB)", 300e9, 200e9),
        ("25gbe", None, 3.125e9),
        ("", None, None),
    ],
)
def test_networks_are_read_by_name(text: str, link: float | None, node: float | None) -> None:
    assert hardware.network(text) == (link, node)


def test_every_gpu_has_what_the_model_needs() -> None:
    for name in hardware.names():
        gpu = hardware.accelerator(name)
        numbers = (gpu.flops, gpu.memory_bytes_per_s, gpu.link_bytes_per_s, gpu.node_bytes_per_s, gpu.power_w)
        assert np.all(np.array(numbers) > 0), name
    assert hardware.accelerator("NVIDIA H200").name == "h200"


@pytest.mark.parametrize(
    ("offset", "part"), [("attention", "attention"), ("memory", "memory-bound"), ("eight_bit", "products")]
)
def test_an_offset_of_one_kind_of_kernel_slows_these_only(one_gpu: Setup, offset: str, part: str) -> None:
    """With the gain of 8-bit products halved, or one kind of kernel twice as slow, no other part of the GPU changes."""
    eight = one_gpu.replaced(fp8=True)
    normal, slower = (
        {name: float(value[0]) for name, value in parts(columns([eight]), VALUES, {offset: shift}).items()}
        for shift in (0.0, math.log(2))
    )
    # Launches hide behind the GPU's time, so their share may change too.
    changed = {name for name in PARTS if slower[name] != pytest.approx(normal[name], rel=1e-9)} - {"launch"}
    assert changed == {part}
    assert slower[part] > 1.2 * normal[part]


def test_slopes_are_those_of_single_changes(one_gpu: Setup) -> None:
    """All derivatives at once agree with the difference that one change makes."""
    setups = [one_gpu, one_gpu.replaced(gpus=64, tp=8, shard="zero1"), one_gpu.replaced(fp8=True, micro_batch=2)]
    c, nothing = columns(setups), dict.fromkeys(OFFSETS, 0.0)
    by_parameter, by_offset = sensitivities(c, VALUES, nothing)
    base, small = np.log(step_time(c, VALUES)), 1e-4
    for k, name in enumerate(VALUES):
        moved = np.log(step_time(c, {**VALUES, name: VALUES[name] + small}))
        assert by_parameter[:, k] == pytest.approx((moved - base) / small, abs=1e-9)
    for k, name in enumerate(OFFSETS):
        moved = np.log(step_time(c, VALUES, {name: small}))
        assert by_offset[:, k] == pytest.approx((moved - base) / small, abs=1e-9)


def test_tokens_travel_to_the_ranks_of_their_experts_and_back() -> None:
    """2 of 8 experts per token, 4,096 tokens of 4,096 numbers in 16 bit, 32 layers, both passes."""
    sent = 2 * 4096 * 2 * 4096
    shared = setup_of("mixtral-8x7b", "h100", 8, ep=8, sequence_length=4096, micro_batch=1, checkpointing="none")
    instant = {"alpha_link": -60.0, "alpha_node": -60.0}
    link = 450e9 * math.exp(VALUES["link"])
    assert seconds(shared.replaced(micro_batches=1.0), **instant)["expert parallel"] == pytest.approx(
        32 * 4 * 7 / 8 * sent / link, rel=1e-6
    )
    assert seconds(shared.replaced(ep=1))["expert parallel"] == 0
    # On two nodes of four GPUs half of the tokens leave the node, which takes longer than the others' way.
    apart = shared.replaced(micro_batches=1.0, gpus_per_node=4)
    nic = apart.node_network * math.exp(VALUES["nic"]) / 4
    found = seconds(apart, **instant, jitter=-60.0)["expert parallel"]
    assert found == pytest.approx(32 * 4 * 4 / 8 * sent / nic, rel=1e-6)
    recomputed = shared.replaced(checkpointing="full")
    assert seconds(recomputed)["expert parallel"] == pytest.approx(1.5 * seconds(shared)["expert parallel"])


def test_a_rank_holds_its_experts_only() -> None:
    whole = setup_of("mixtral-8x7b", "h100", 8, shard="none", micro_batch=1, global_batch=8, checkpointing="full")
    shared = whole.replaced(ep=8)
    # 7 of 8 experts of 32 layers, with three matrices of 4,096 x 14,336 each.
    away = 32 * 7 * 3 * 4096 * 14336
    assert whole.held - shared.held == away
    states = [memory.components(one) for one in (whole, shared)]
    for name, size in (("weights", 2), ("gradients", 2), ("optimizer", 12)):
        assert states[0][name] - states[1][name] == pytest.approx(size * away)
    assert shared.layout == "dp=8,ep=8"


def test_experts_are_shared_where_they_can_be() -> None:
    for model, gpus, wanted in (
        ("llama-8b", 8, "no ep: llama-8b has no experts"),
        ("mixtral-8x7b", 16, "a divisor of the 8 experts"),
        ("mixtral-8x7b", 2, "a divisor of dp=2 x cp=1"),
    ):
        with pytest.raises(Exception, match=wanted):
            setup_of(model, "h100", gpus, **parse_layout("ep=16" if gpus == 16 else "ep=4"))
    base = setup_of("mixtral-8x7b", "h100", 16, micro_batch=1)
    degrees = {one.ep for one in layouts.enumerate_layouts(base, 64)}
    assert degrees == {1, 2, 4, 8}
    dense = setup_of("llama-8b", "h100", 16, micro_batch=1)
    assert {one.ep for one in layouts.enumerate_layouts(dense, 64)} == {1}
