"""Fused steps beside a plain loop. Triton has no CPU: plain torch computes what the kernels do (see tests/gpu)."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.serving import replica
from paceline.serving.replica import decoding as decoding_module
from paceline.serving.replica import fused, plans, weights
from paceline.serving.replica.decoding import Decoding, join_projections
from paceline.serving.replica.plans import PRODUCTS, Division, Plan, Tile
from paceline.serving.replica.settings import Settings

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="pip install 'paceline[finetune]'")
LLAMA = Settings(engine="transformers", model="tiny-llama", max_batch=4, max_length=64)
PROMPTS = [[5, 6, 7, 8, 9], [3], [11] * 11, [1, 2]]
SIZES = {"attention_in": (6144, 4096), "attention_out": (4096, 4096), "mlp_in": (14336, 4096), "mlp_out": (4096, 14336)}


def opened(settings: Settings, joins: bool = True) -> Decoding:
    """Larger weights than drawn ones, which would give nearly the same token for ever."""
    model = weights.open_model(settings, 0, torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    shape = settings.shape
    model = join_projections(model) if joins else model
    return Decoding(model, slots=4, length=64, reaches=(64,), heads=shape.kv_heads, width=shape.head_dim)


class Attention:
    def __init__(self, _slots: int, heads: int, group: int, width: int, _division: Division, _device: Any) -> None:
        self.size = heads, group, width

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, out: Tensor, scale: float, **more: Any
    ) -> None:
        heads, group, width = self.size
        key, value, cosines, sines = more["new"]
        for slot, position in enumerate(positions.tolist()):

            def rotated(part: Tensor, position: int = position) -> Tensor:
                low, high = part.chunk(2, dim=-1)
                return part * cosines[position] + torch.cat((-high, low), dim=-1) * sines[position]

            keys[slot, position] = rotated(key[slot].view(heads, width))
            values[slot, position] = value[slot].view(heads, width)
            asked = rotated(query[slot].view(heads, group, width))
            scores = torch.einsum("hgd,nhd->hgn", asked, keys[slot, : position + 1]) * scale
            mixed = torch.einsum("hgn,nhd->hgd", scores.softmax(dim=-1), values[slot, : position + 1])
            out[slot] = mixed.flatten()


class Choice:
    def __init__(self, *_sizes: Any) -> None: ...

    def __call__(self, logits: Tensor, tokens: Tensor, positions: Tensor, most: int, early: bool) -> None:
        tokens.copy_(logits.argmax(dim=-1, keepdim=True))
        positions.add_(1).clamp_(max=most)


def normalise(given: Tensor, scales: Tensor, out: Tensor, epsilon: float, **_more: Any) -> None:
    out.copy_(F.rms_norm(given, given.shape[1:], scales, epsilon))


def gate(given: Tensor, out: Tensor, **_more: Any) -> None:
    first, second = given.chunk(2, dim=1)
    out.copy_(F.silu(first) * second)


def multiply_one(given: Tensor, weight: Tensor, out: Tensor, tile: Tile, **more: Any) -> None:
    if more.get("scales") is not None:
        given = F.rms_norm(given, given.shape[1:], more["scales"], more["epsilon"])
    found = given @ weight.t()
    if more.get("gated"):
        gate(found.clone(), found := torch.empty_like(out))
    out.copy_(out + found if more.get("adds") else found)


STAND_IN = SimpleNamespace(
    SplitAttention=Attention,
    Choice=Choice,
    normalise=normalise,
    gate=gate,
    multiply_one=multiply_one,
)


def plain(decoding: Decoding, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            decoding.current.rows = torch.tensor([0])
            padded = torch.tensor([tokens])
            tokens.append(int(decoding.model(input_ids=padded, use_cache=False).logits[0, -1].argmax()))
    decoding.current.rows = None
    return tokens[len(prompt) :]


@pytest.mark.parametrize("ours", [(), PRODUCTS])
def test_fused_steps_answer_as_a_plain_loop_does(ours: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's products and with ours; slots are filled while others go on, so that steps become wider."""
    plan = Plan(Division(1, 16, 2, 4), dict.fromkeys(ours, Tile(16, 32, 4)), early=False)
    monkeypatch.setattr(replica, "kernels", STAND_IN, raising=False)
    monkeypatch.setattr(fused, "plan_for", lambda *_sizes: plan)
    monkeypatch.setattr(decoding_module, "is_fusible", lambda model: True)
    decoding = opened(LLAMA)
    expected = [plain(decoding, prompt, 8) for prompt in PROMPTS]
    assert len({token for answer in expected for token in answer}) > 8
    assert decoding.fuse()
    # What is beyond the width of a step stays as it is.
    decoding.positions.fill_(60)
    found = {0: decoding.read([0], PROMPTS[:1])}
    for used, width in ((1, 1), (2, 2), (3, 4), (4, 4), (4, 4), (2, 2), (1, 1)):
        if used not in (1, len(found)) and len(found) < 4:
            found[used - 1] = decoding.read([used - 1], [PROMPTS[used - 1]])
        said = decoding.step(used, 64)
        assert len(said) == width
        assert decoding.positions[max(width, len(found)) :].tolist() == [60] * (4 - max(width, len(found)))
        for row in range(used):
            found[row].append(said[row])
    assert {row: len(answer) for row, answer in found.items()} == {0: 8, 1: 6, 2: 4, 3: 3}
    assert found == {row: expected[row][: len(answer)] for row, answer in found.items()}


def test_other_layers_keep_their_own_code() -> None:
    decoding = opened(LLAMA)
    assert fused.has_known_layers(decoding.model)
    assert not decoding.fuse(), "this is no GPU"
    assert not fused.has_known_layers(opened(LLAMA, joins=False).model)
    assert not fused.has_known_layers(opened(replace(LLAMA, model="tiny")).model)
    # As tensor parallelism sums over processes.
    decoding.layers[1].mlp.down_proj.register_forward_hook(lambda _module, _inputs, output: output)
    assert not fused.has_known_layers(decoding.model)


@pytest.mark.parametrize(
    ("slots", "length", "division"),
    [
        (1, 640, Division(8, 64, 3, 4)),
        (8, 640, Division(2, 64, 3, 4)),
        (32, 640, Division(1, 32, 4, 2)),
        (128, 640, Division(1, 32, 4, 2)),
        (1, 2048, Division(16, 64, 3, 4)),
        (8, 8192, Division(2, 64, 3, 4)),
    ],
)
def test_attention_is_divided_as_was_fastest_on_an_h200(slots: int, length: int, division: Division) -> None:
    """132 processors and 8 key heads. One request, and the longer contexts, follow from the rule alone."""
    assert plans.plan_of(SIZES, slots, 8, length, 132, True).attention == division


def test_short_contexts_are_not_divided_below_a_tile_nor_long_ones_without_end() -> None:
    assert Division.of(8, 132, 127).splits == 1
    assert Division.of(8, 132, 128).splits == 2
    assert Division.of(1, 132, 131_072).splits == 32


def test_a_product_that_no_tile_divides_is_left_to_torch() -> None:
    assert set(plans.plan_of(SIZES, 1, 8, 640, 132, True).tiles) == set(PRODUCTS)
    odd = {**SIZES, "mlp_in": (14336, 4100), "mlp_out": (4100, 14336 + 8)}
    assert set(plans.plan_of(odd, 1, 8, 640, 132, True).tiles) == {"attention_in", "attention_out"}
