from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from paceline.errors import UnsupportedError  # noqa: E402
from paceline.experiment.choices import Choice  # noqa: E402
from paceline.models import arithmetic  # noqa: E402
from paceline.models.shape import Shape  # noqa: E402
from paceline.training import decoder  # noqa: E402
from paceline.training.decoder import Decoder, fill, initial_values  # noqa: E402

GPT, LLAMA = "tiny", "tiny-llama"


def shape_of(text: str) -> Shape:
    return arithmetic.load(Choice.parse(text))


def built(text: str = GPT, seed: int = 42, checkpointing: str = "none", compute: str = "fp32") -> Decoder:
    shape = shape_of(text)
    model = Decoder(shape, compute, checkpointing)
    fill(model, shape.layers, seed, compute, lambda parameter, value: parameter.data.copy_(value))
    return model


def batch(rows: int = 2, length: int = 12, vocab: int = 256) -> Any:
    return torch.randint(0, vocab, (rows, length + 1), generator=torch.Generator().manual_seed(rows * 100 + length))


def loss_of(model: Decoder, tokens: Any, normaliser: float | None = None) -> Any:
    labels = tokens[:, 1:]
    return model(tokens[:, :-1], labels, torch.tensor(normaliser or float(labels.numel())))


def logits_of(model: Decoder, tokens: Any) -> Any:
    """What the model hands to its loss."""
    seen = []
    model._loss = lambda logits, labels, normaliser: seen.append(logits) or logits.sum()
    model(tokens, tokens, torch.tensor(1.0))
    del model._loss
    return seen[0]


@pytest.mark.parametrize("name", arithmetic.names())
def test_the_module_holds_the_parameters_the_arithmetic_says(name: str) -> None:
    """Method, section 6 (7): counted parameters equal the config."""
    shape = shape_of(name)
    with torch.device("meta"):
        model = Decoder(shape)
    sizes = [parameter.numel() for parameter in model.parameters()]
    assert sum(sizes) == arithmetic.parameters(shape)
    assert sorted(sizes) == sorted(arithmetic.tensor_sizes(shape))
    assert sum(p.numel() for p in model.blocks.parameters()) == shape.layers * arithmetic.block_parameters(shape)


@pytest.mark.parametrize("name", [GPT, LLAMA])
def test_a_later_token_does_not_reach_an_earlier_prediction(name: str) -> None:
    model, tokens = built(name), batch()[:, :-1]
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 256
    before, after = logits_of(model, tokens), logits_of(model, changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


@pytest.mark.parametrize("name", [GPT, LLAMA])
def test_a_prefix_alone_has_the_same_loss(name: str) -> None:
    model, tokens = built(name), batch(1, 12)
    labels = tokens[:, 1:].clone()
    labels[:, 6:] = decoder.IGNORED_LABEL
    masked = model(tokens[:, :-1], labels, torch.tensor(6.0))
    assert masked.item() == pytest.approx(loss_of(model, tokens[:, :7]).item(), rel=1e-6)


@pytest.mark.parametrize("name", [GPT, LLAMA])
def test_positions_matter(name: str) -> None:
    model = built(name)
    tokens = batch(1, 12)[:, :-1]
    last = logits_of(model, tokens)[:, -1]
    swapped = tokens.clone()
    swapped[:, [0, 1]] = tokens[:, [1, 0]]
    assert not torch.allclose(last, logits_of(model, swapped)[:, -1])


def test_grouped_keys_equal_repeated_ones() -> None:
    grouped = built(LLAMA)
    shape = grouped.shape
    assert shape.kv_heads < shape.heads
    full = Decoder(shape_of(f"{LLAMA}:kv_heads={shape.heads}"))
    state = dict(grouped.state_dict())
    times, d = shape.heads // shape.kv_heads, shape.head_dim
    for name, value in state.items():
        if name.endswith("attention.inputs.weight"):
            q, k, v = value.split((shape.heads * d, shape.kv_heads * d, shape.kv_heads * d))
            spread = [part.view(-1, d, shape.hidden).repeat_interleave(times, 0).flatten(0, 1) for part in (k, v)]
            state[name] = torch.cat((q, *spread))
    full.load_state_dict(state)
    tokens = batch()
    assert loss_of(full, tokens).item() == pytest.approx(loss_of(grouped, tokens).item(), rel=1e-6)


def test_a_tied_head_is_the_embedding() -> None:
    tied, untied = built(GPT), built(f"{GPT}:tied=false")
    assert tied.head is None
    assert untied.head is not None
    untied.head.weight.data.copy_(untied.embedding.weight.data)
    tokens = batch()
    assert torch.equal(loss_of(tied, tokens), loss_of(untied, tokens))
    loss_of(tied, tokens).backward()
    loss_of(untied, tokens).backward()
    both = untied.embedding.weight.grad + untied.head.weight.grad
    assert torch.allclose(tied.embedding.weight.grad, both, atol=1e-6)


def test_the_first_loss_is_that_of_knowing_nothing() -> None:
    for name in (GPT, LLAMA):
        assert loss_of(built(name), batch(4, 32)).item() == pytest.approx(math.log(256), rel=0.02)


def test_it_learns() -> None:
    model, tokens = built(), batch(2, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = loss_of(model, tokens).item()
    for _ in range(20):
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        optimizer.step()
    assert loss_of(model, tokens).item() < first / 2


@pytest.mark.parametrize("name", [GPT, LLAMA])
@pytest.mark.parametrize("how", ["full", "selective"])
def test_checkpointing_changes_neither_loss_nor_gradients(name: str, how: str) -> None:
    plain, again, tokens = built(name), built(name, checkpointing=how), batch()
    losses = [loss_of(model, tokens) for model in (plain, again)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for (label, one), other in zip(plain.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), label


def test_accumulating_equals_one_large_batch() -> None:
    whole, parts, tokens = built(), built(), batch(4, 16)
    loss_of(whole, tokens).backward()
    total = 0.0
    for row in tokens:
        loss = loss_of(parts, row[None])
        (loss / 4).backward()
        total += loss.item() / 4
    assert total == pytest.approx(loss_of(whole, tokens).item(), rel=1e-6)
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-7)


def test_ignored_labels_count_for_nothing() -> None:
    model, tokens = built(), batch(1, 8)
    labels = tokens[:, 1:].clone()
    labels[0, 3] = decoder.IGNORED_LABEL
    kept = [i for i in range(8) if i != 3]
    every = model(tokens[:, :-1], labels, torch.tensor(7.0)).item()
    logits = logits_of(model, tokens[:, :-1])[0, kept].float()
    assert every == pytest.approx(torch.nn.functional.cross_entropy(logits, labels[0, kept]).item(), rel=1e-5)


# --- initial values ---


def test_initial_values_are_exact() -> None:
    """Frozen numbers: another value here means that old and new runs did not start alike."""
    first = initial_values("blocks.0.mlp.inputs.weight", torch.Size((2, 3)), 2, 42, torch.device("cpu"))
    again = initial_values("blocks.0.mlp.inputs.weight", torch.Size((6,)), 2, 42, torch.device("cpu"))
    assert torch.equal(first.flatten(), again)
    assert first.flatten().tolist() == [by_hand(i, "42/blocks.0.mlp.inputs.weight") for i in range(6)]


def by_hand(index: int, name: str) -> float:
    """lowbias32 in plain integers, then float32 rounding."""
    import zlib

    import numpy as np

    mask = 0xFFFFFFFF
    x = (index * 0x9E3779B1 + zlib.crc32(name.encode())) & mask
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask
    x = ((x ^ (x >> 15)) * 0x846CA68B) & mask
    x ^= x >> 16
    uniform = np.float32(x >> 8) * np.float32(2.0 / (1 << 24)) - np.float32(1.0)
    return float(uniform * np.float32(0.02 * math.sqrt(3)))


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_initial_values_do_not_depend_on_the_chunking(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    size = torch.Size((5, 13))
    whole = initial_values("embedding.weight", size, 2, 1, torch.device("cpu"))
    monkeypatch.setattr(decoder, "INIT_CHUNK", chunk)
    assert torch.equal(initial_values("embedding.weight", size, 2, 1, torch.device("cpu")), whole)


def test_initial_values_have_their_spread_and_their_own_streams() -> None:
    size, cpu = torch.Size((512, 512)), torch.device("cpu")
    plain = initial_values("blocks.0.mlp.inputs.weight", size, 8, 0, cpu)
    last = initial_values("blocks.0.mlp.output.weight", size, 8, 0, cpu)
    assert plain.std().item() == pytest.approx(0.02, rel=0.02)
    assert last.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.02)
    assert abs(plain.mean().item()) < 2e-4
    for other in (("blocks.1.mlp.inputs.weight", 0), ("blocks.0.mlp.inputs.weight", 1)):
        value = initial_values(other[0], size, 8, other[1], cpu)
        correlation = torch.corrcoef(torch.stack((plain.flatten(), value.flatten())))[0, 1]
        assert abs(correlation.item()) < 0.02
    assert torch.equal(initial_values("blocks.0.mlp_norm.weight", torch.Size((3,)), 8, 0, cpu), torch.ones(3))
    assert torch.equal(initial_values("blocks.0.mlp_norm.bias", torch.Size((3,)), 8, 0, cpu), torch.zeros(3))


def test_master_weights_of_16_bit_runs_equal_their_16_bit_copies() -> None:
    model = built(compute="bf16")
    for parameter in model.parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, parameter.to(torch.bfloat16).float())


def test_16_bit_weights_compute_what_fp32_weights_compute() -> None:
    """The decoder casts where it uses: DDP's fp32 weights and FSDP2's bf16 copies run the same kernels."""
    kept, cast, tokens = built(compute="bf16"), built(compute="bf16").to(torch.bfloat16), batch()
    assert torch.equal(loss_of(kept, tokens), loss_of(cast, tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_padding_of_the_head_changes_neither_loss_nor_gradient(dtype: torch.dtype) -> None:
    """Run as on a GPU, where the head is padded: 100 words to 128 rows."""
    torch.manual_seed(0)
    weight = torch.randn(100, 16).to(dtype).requires_grad_()
    x, labels = torch.randn(32, 16).to(dtype), torch.randint(0, 100, (32,))
    found = []
    for head in (decoder.padded_head(weight), (weight, None)):
        weight.grad = None
        loss = torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, *head).float(), labels, reduction="sum")
        loss.backward()
        assert weight.grad is not None
        found.append((loss.detach(), weight.grad.clone()))
    assert decoder.padded_head(weight)[0].shape == (128, 16)
    torch.testing.assert_close(*(loss for loss, _ in found), rtol=1e-6, atol=0)
    torch.testing.assert_close(*(grad for _, grad in found))


def test_a_head_in_parts_rounds_each_part_of_its_inputs_gradient() -> None:
    torch.manual_seed(0)
    head, x = torch.randn(100, 16).bfloat16(), torch.randn(2, 8, 16).bfloat16().requires_grad_()
    model, upstream = built(compute="bf16"), torch.randn(2, 8, 100).bfloat16()
    whole = model._logits(x, head)
    model.head_parts = 3
    assert torch.equal(model._logits(x, head), whole)
    model._logits(x, head).backward(upstream)
    # Three parts of consecutive words, the last one smaller; each product and each sum is rounded.
    parts = [g @ w for g, w in zip(upstream.split(34, -1), head.split(34), strict=True)]
    orders = [parts[a] + parts[b] + parts[c] for a, b, c in ((0, 1, 2), (2, 1, 0))]
    assert any(torch.equal(x.grad, total) for total in orders)
    assert not torch.equal(x.grad, upstream @ head)


def test_a_head_that_needs_no_padding_gets_none() -> None:
    weight = torch.randn(128, 4)
    assert decoder.padded_head(weight) == (weight, None)


def test_compiling_without_a_compiler_is_unsupported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from paceline.experiment.compilation import Compilation
    from paceline.training.strategies._torch import compile_subject

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    module: Any = torch.nn.Linear(2, 2)
    compile_subject(module, None)
    with pytest.raises(UnsupportedError, match=r"needs a C compiler .* --set compile=false"):
        compile_subject(module, Compilation("default"))
