"""Weights and bytes of each rank by formula; `end_to_end/test_layouts.py` counts the same bytes in real runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.experiment.choices import Choice
from paceline.experiment.layout import Layout
from paceline.experiment.spec import Precision, Training
from paceline.models import arithmetic, parallel

GPT = arithmetic.load(Choice("tiny", {"hidden": 64}))
MOE = arithmetic.load(Choice("tiny-moe"))
LLAMA = arithmetic.load(Choice("tiny-llama", {"hidden": 64, "layers": 4}))


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=2, shard=2), Layout(pp=2), Layout(pp=2, dp=3)])
def test_a_pipeline_holds_every_weight_once(layout: Layout) -> None:
    column = layout.world_size // layout.pp
    for shape in (GPT, LLAMA):
        held = sum(parallel.held(shape, layout, rank).total for rank in range(0, layout.world_size, column))
        assert held == arithmetic.parameters(shape) + parallel.twice_held(shape, layout)


def test_tensor_parallel_ranks_hold_norms_and_output_biases_whole() -> None:
    layout = Layout(tp=2)
    llama = [parallel.held(LLAMA, layout, rank) for rank in (0, 1)]
    assert sum(each.total for each in llama) - llama[0].norms == arithmetic.parameters(LLAMA)
    gpt = [parallel.held(GPT, layout, rank) for rank in (0, 1)]
    whole = gpt[0].norms + GPT.layers * 2 * GPT.hidden + GPT.context * GPT.hidden
    assert sum(each.total for each in gpt) - whole == arithmetic.parameters(GPT)


def test_bytes_by_hand() -> None:
    """One sequence of 32 tokens in fp32: A = 32 * 64 * 4 = 8,192 bytes."""
    training = Training(sequence_length=32, micro_batch=1, precision=Precision(compute="fp32", reduce="fp32"))
    both = Layout(tp=2, sequence_parallel=True, loss_parallel=True)
    norms = (2 * 4 + 1) * 64 * 4
    expected = 0.5 * 8192 * (8 * 4 + 2 + 2) + 3 * 2 * 0.5 * 32 * 4 + 2 * 0.5 * norms
    assert parallel.sent_bytes(LLAMA, both, training, 0) == {"tp": expected}
    assert parallel.sent_bytes(LLAMA, Layout(pp=2, schedule="1f1b"), training, 0) == {"pp": 8192}
    # K and V of 16 tokens, 2 heads, 16 wide; forward and backward once around, their gradients a whole turn.
    ring = parallel.sent_bytes(LLAMA, Layout(cp=2), training, 0)
    assert ring is not None
    assert ring["cp"] == 4 * (16 * 2 * LLAMA.head_dim) * (4 * 4 + 2 * 2 * 4)
    assert ring["replicate"] == arithmetic.parameters(LLAMA) * 4
    hsdp = parallel.sent_bytes(LLAMA, Layout(dp=4, shard=2), training, 0)
    count, root = arithmetic.parameters(LLAMA), arithmetic.root_parameters(LLAMA)
    assert hsdp == {"shard": 0.5 * 4 * (root + 2 * (count - root) + count), "replicate": count / 2 * 4}


def test_what_a_rank_holds_and_sends_of_experts() -> None:
    """tiny-moe: two layers, 4 experts of 3 * 64 * 64 weights; 2 sequences of 8 tokens, 2 choices of 64 fp32 numbers."""
    layout, precision = Layout(dp=4, ep=2, shard=4), Precision(compute="fp32", reduce="fp32")
    training = Training(sequence_length=8, micro_batch=2, precision=precision)
    own = parallel.held(MOE, layout, 0)
    assert own.experts == 2 * 2 * 3 * 64 * 64
    assert own.total == arithmetic.parameters(MOE) - own.experts
    sent = parallel.sent_bytes(MOE, layout, training, 0) or {}
    assert sent["ep"] == 1 / 2 * 2 * (4 * (2 * 8 * 2) * 64 * 4 + 4 * 8)
    dense = 3 / 4 * 4 * (own.root + 2 * own.blocks + own.root + own.blocks)
    assert sent["shard"] == dense + 1 / 2 * 4 * 3 * own.experts, "experts over the two ranks that have them"
    assert parallel.reduced(MOE, Layout(dp=2, ep=2), 0) == own.total - own.experts, "one copy of each expert"


def test_blocks_are_gathered_again_from_as_many_ranks_as_they_were_resharded_to() -> None:
    """FSDP2 gathers a block from all four ranks for the forward pass, and from all, two or none for the backward."""
    training = Training(
        sequence_length=8, micro_batch=1, accumulation=2, precision=Precision(compute="fp32", reduce="fp32")
    )
    own = parallel.held(LLAMA, Layout(dp=4, shard=4), 0)
    once = 3 / 4 * 4 * (2 + 1) * (own.root + own.blocks)
    for layout, again in ((Layout(), 3 / 4), (Layout(reshard_to=2), 1 / 2), (Layout(reshard_to=1), 0.0)):
        sent = parallel.sent_bytes(LLAMA, replace(layout, dp=4, shard=4), training, 0) or {}
        assert sent["shard"] == once + again * 2 * 4 * own.blocks
    kept = parallel.sent_bytes(LLAMA, Layout(dp=4, shard=4, gather_once=True), training, 0) or {}
    assert kept["shard"] == 3 / 4 * 4 * (1 + 1) * (own.root + own.blocks), "one gather for both micro batches"


def test_no_formula_for_stages_that_are_gathered_again() -> None:
    """torch keeps the weights of three stages gathered. With four it gathers some again, how often differs by schedule:
    with looped-bfs two ranks sent 12.2 MB, with interleaved-1f1b 25.8, and each weight once would be 10.8."""
    layout = Layout(dp=2, pp=2, shard=2, schedule="looped-bfs", virtual=3)
    training, shape = Training(sequence_length=8, micro_batch=1, accumulation=2), replace(LLAMA, layers=8)
    assert set(parallel.sent_bytes(shape, layout, training, 0) or {}) == {"pp", "shard"}
    assert parallel.predicted_total(shape, layout, training) is not None
    more = replace(layout, virtual=4)
    assert set(parallel.sent_bytes(shape, more, training, 0) or {}) == {"pp"}
    assert parallel.predicted_total(shape, more, training) is None


def test_state_of_the_rank_that_keeps_most() -> None:
    """A pipeline's ends have embedding or head; experts are split by ep, and then by what sharding adds to it."""
    ends = [parallel.held(LLAMA, Layout(pp=2), rank).total for rank in (0, 1)]
    assert parallel.state_bytes(LLAMA, Layout(pp=2), "bf16") == 16 * max(ends)
    assert ends[1] - ends[0] == LLAMA.hidden, "the norm before the head"
    dense, experts = arithmetic.parameters(MOE) - 2 * 4 * 3 * 64 * 64, 2 * 4 * 3 * 64 * 64
    assert parallel.state_bytes(MOE, Layout(dp=4, ep=2), "fp32") == 16 * (dense + experts / 2)
    assert parallel.state_bytes(MOE, Layout(dp=4, ep=2, shard=4), "fp32") == 16 * (dense + experts) / 4


def test_tensor_parallel_ranks_have_the_whole_router() -> None:
    """tiny-moe: in each of two layers 64 x 4 weights of the router, and two norms of 64; one norm at the end."""
    precision = Precision(compute="fp32", reduce="fp32")
    training = Training(sequence_length=8, micro_batch=2, accumulation=3, precision=precision)
    layout = Layout(dp=2, tp=2, ep=2)
    parts = [parallel.held(MOE, layout, rank) for rank in range(4)]
    experts = 2 * 4 * 3 * 64 * 64
    assert (parts[0].routers, parts[0].norms, parts[0].experts) == (2 * 64 * 4, 5 * 64, experts // 4)
    dense, whole = arithmetic.parameters(MOE) - experts, parts[0].norms + parts[0].routers
    assert sum(each.total for each in parts) == 2 * (dense + whole) + experts
    assert parallel.optimised(MOE, layout) == 4 * (dense + experts // 2)
    # Forward and two backward products of 2 * 2 * 3 * 8 tokens, once too often.
    assert parallel.repeated_flops(MOE, layout, training) == 3 * 2 * (2 * 2 * 3 * 8) * 2 * 64 * 4
    assert parallel.repeated_flops(MOE, Layout(dp=2, ep=2), training) == 0
    sums = parallel.sent_bytes(MOE, Layout(tp=2), training, 0) or {}
    exchanged = 0.5 * (3 * 2 * 8 * 64 * 4) * (8 * 2 + 4) + 0.5 * (3 * 2 * 8) * MOE.vocab * 4
    assert sums["tp"] == exchanged + 2 * 0.5 * 2 * 64 * 4 * 4, "gradients of routers, which two ranks add up"
