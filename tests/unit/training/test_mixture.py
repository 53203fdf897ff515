"""Mixture of experts: the arithmetic of Mixtral, a balance term that no partition changes, and what is observed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from paceline.experiment.choices import Choice  # noqa: E402
from paceline.models import arithmetic  # noqa: E402
from paceline.training.decoder import Decoder, fill  # noqa: E402
from paceline.training.mixture import Mixture, grouped_product, inverse_of, mixtures_of, prepare_compiler  # noqa: E402
from paceline.training.observation import RoutingWatch  # noqa: E402
from paceline.workloads import pretrain  # noqa: E402

SHAPE = arithmetic.load(Choice.parse("tiny-moe:hidden=32,ffn=48,experts=6,top_k=2"))


def built(checkpointing: str = "none", **changes: Any) -> Decoder:
    shape = dataclasses.replace(SHAPE, **changes)
    model = Decoder(shape, "fp32", checkpointing)
    # Larger than usual, so that experts differ visibly.
    fill(model, shape.layers, 42, "fp32", lambda p, value: p.data.copy_(value if p.dim() == 1 else 4 * value))
    return model


def tokens(rows: int = 4, length: int = 16) -> Any:
    return torch.randint(0, SHAPE.vocab, (rows, length + 1), generator=torch.Generator().manual_seed(rows))


def loss_of(model: Decoder, batch: Any) -> Any:
    labels = batch[:, 1:]
    return model(batch[:, :-1], labels, torch.tensor(float(labels.numel())))


def test_it_computes_what_transformers_computes() -> None:
    """The loss without the auxiliary one equals that of Mixtral in transformers with the same weights."""
    transformers = pytest.importorskip("transformers")
    model, batch = built(aux_loss=0.0), tokens()
    shape = model.shape
    config = transformers.MixtralConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.experts_per_token,
        max_position_embeddings=shape.context,
        rms_norm_eps=shape.norm_eps,
        rope_theta=shape.rope_theta,
        attn_implementation="eager",
    )
    theirs = transformers.MixtralForCausalLM(config)
    own, sizes = dict(model.named_parameters()), [shape.heads * shape.head_dim, *[shape.kv_heads * shape.head_dim] * 2]
    weights = {"model.embed_tokens.weight": own["embedding.weight"], "lm_head.weight": own["head.weight"]}
    weights["model.norm.weight"] = own["norm.weight"]
    for layer in range(shape.layers):
        here, there = f"blocks.{layer}.", f"model.layers.{layer}."
        parts = own[f"{here}attention.inputs.weight"].split(sizes)
        weights |= {f"{there}self_attn.{name}_proj.weight": part for name, part in zip("qkv", parts, strict=True)}
        weights[f"{there}self_attn.o_proj.weight"] = own[f"{here}attention.output.weight"]
        weights[f"{there}input_layernorm.weight"] = own[f"{here}attention_norm.weight"]
        weights[f"{there}post_attention_layernorm.weight"] = own[f"{here}mlp_norm.weight"]
        weights[f"{there}mlp.gate.weight"] = own[f"{here}mlp.router.weight"]
        weights[f"{there}mlp.experts.gate_up_proj"] = own[f"{here}mlp.experts.inputs"]
        weights[f"{there}mlp.experts.down_proj"] = own[f"{here}mlp.experts.output"]
    theirs.load_state_dict(weights)
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(theirs(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
        assert float(loss_of(model, batch)) == pytest.approx(float(expected), rel=1e-5)


def test_the_auxiliary_loss_is_the_same_however_sequences_are_grouped() -> None:
    """The mean of the losses and gradients of single sequences is that of the whole batch."""
    whole, parts, batch = built(), built(), tokens()
    loss_of(whole, batch).backward()
    losses = [loss_of(parts, row) / len(batch) for row in batch.split(1)]
    sum(losses).backward()
    for (name, a), b in zip(whole.named_parameters(), parts.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-6), name
    with torch.no_grad():
        term = float(loss_of(whole, batch) - loss_of(built(aux_loss=0.0), batch))
    assert term == pytest.approx(0.02 * 2, rel=0.2), "2 if all experts are chosen equally often"


def test_balance_by_hand() -> None:
    """Two sequences of two tokens, two experts, one choice: 2 * sum of share * mean probability, then the mean."""
    mixture = Mixture(dataclasses.replace(SHAPE, experts=2, experts_per_token=1), 0)
    assigned = torch.tensor([[2, 0], [1, 1]])
    scores = torch.tensor([[1.6, 0.4], [1.0, 1.0]])
    assert float(mixture.balance(assigned, scores, 2)) == pytest.approx((2 * 0.8 + 2 * 0.5) / 2)


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_every_decision_is_observed_once(checkpointing: str) -> None:
    model, batch = built(checkpointing), tokens()
    watch = RoutingWatch(model, "cpu", steps=1)
    loss_of(model, batch).backward()
    watch.end_step(0)
    (sample,) = watch.samples(rank=0, step=0, micro_batches=1, variant=0)
    assert sample.layers == (0, 1)
    assigned = torch.tensor(sample.assigned).view(2, 2, 6)
    assert assigned.sum(-1).tolist() == [[64, 64], [64, 64]], "each token chooses twice in each layer"
    assert torch.tensor(sample.computed).view(2, 6).tolist() == assigned.sum(1).tolist()
    assert sum(sample.positions) == 2 * 2 * 4 * sum(range(16))
    assert sum(sample.weights) == pytest.approx(2 * 64)
    assert all(2 <= balance < 3 for balance in sample.balances)
    assert watch.products("fp32") == {"expert_products": "loop"}
    watch.end_step(0)
    assert sum(watch.samples(0, 0, 1, 0)[0].assigned) == 0, "the next step starts at nothing"


@pytest.mark.parametrize(
    "checkpointing", ["none", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("full", "selective"))]
)
def test_compiled_blocks_make_the_same_decisions_and_gradients(checkpointing: str) -> None:
    """With another batch in each step: no graph depends on the number of tokens of an expert."""
    from torch._dynamo.utils import counters

    plain, compiled = built(checkpointing, layers=1), built(checkpointing, layers=1)
    prepare_compiler(compiled)
    torch.compiler.reset()
    counters.clear()
    for block in compiled.blocks:
        block.compile(backend="aot_eager")
    found = []
    for model in (plain, compiled):
        watch = RoutingWatch(model, "cpu", steps=2)
        for step, batch in enumerate((tokens(), tokens().flip(0))):
            loss_of(model, batch).backward()
            watch.end_step(step)
        found.append([watch.samples(rank=0, step=step, micro_batches=1, variant=0) for step in (0, 1)])
    assert found[0] == found[1]
    for (name, a), b in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-6, atol=1e-8), name
    assert counters["stats"]["unique_graphs"] >= 3, "around what is observed, and around the experts"


@pytest.mark.parametrize(
    ("strategy", "fields", "reason"),
    [
        ("ddp", {"compile": True}, None),
        ("ddp", {"compile": "default:scope=block"}, None),
        ("ddp", {"compile": "default:scope=model"}, "plain code between the graphs of each block; got compile"),
        ("ddp", {"compile": "reduce-overhead", "device": "cuda"}, "needs fixed shapes"),
        ("mesh:tp=2", {"compile": True}, None),
        ("mesh:tp=2", {"compile": True, "checkpointing": "full"}, "skips stages with checkpointing"),
    ],
)
def test_how_mixtures_are_compiled(make_spec: Any, strategy: str, fields: Any, reason: str | None) -> None:
    found = pretrain.check(make_spec(strategy, model="tiny-moe", **fields))
    assert found is None if reason is None else reason in str(found)


def test_of_equal_scores_the_lower_expert_is_chosen() -> None:
    mixture = next(mixtures_of(built()))
    experts, weights = mixture.choose(torch.full((3, 6), 1 / 6))
    assert experts.tolist() == [[0, 1]] * 3
    assert weights.tolist() == [[0.5, 0.5]] * 3


def test_a_product_of_an_expert_without_tokens() -> None:
    rows, weights = torch.randn(3, 4, requires_grad=True), torch.randn(3, 5, 4, requires_grad=True)
    made = grouped_product(rows, weights, torch.tensor([2, 0, 1]))
    assert torch.allclose(made, torch.cat((rows[:2] @ weights[0].T, rows[2:] @ weights[2].T)))
    made.sum().backward()
    assert float(weights.grad[1].abs().sum()) == 0


def test_the_inverse_of_a_permutation() -> None:
    order = torch.randperm(9)
    assert order[inverse_of(order)].tolist() == list(range(9))
