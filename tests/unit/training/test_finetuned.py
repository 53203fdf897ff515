"""The fine-tuned module: what it computes, what it holds, and that it is the same wherever it is built."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from paceline.errors import MissingPackageError, UnsupportedError  # noqa: E402
from paceline.experiment.choices import Choice  # noqa: E402
from paceline.experiment.spec import Precision, RunSpec, Topology, Training, Tuning  # noqa: E402
from paceline.models.adapters import adapter_parameters, trained_parameters  # noqa: E402
from paceline.models.arithmetic import load  # noqa: E402
from paceline.training import finetuned, frozen_4bit  # noqa: E402
from paceline.training.data.packing import IGNORED_LABEL  # noqa: E402
from paceline.training.instruments import digest_parameters  # noqa: E402
from paceline.training.observation import Audit, RoutingWatch  # noqa: E402
from paceline.training.strategies._torch import whole_weights  # noqa: E402

PACKAGES = ("transformers", "peft", "bitsandbytes")
pytestmark = pytest.mark.skipif(not all(map(find_spec, PACKAGES)), reason="pip install 'paceline[finetune]'")
LENGTH, VOCAB = 12, 256


def spec(method: str = "qlora", compute: str = "fp32", **changes: Any) -> RunSpec:
    tuning = Tuning(method=method, optimizer="adamw", rank=4, targets=changes.pop("targets", "q+k+v+o"))
    training = Training(
        sequence_length=LENGTH,
        micro_batch=2,
        precision=Precision(compute=compute, reduce=compute if method == "full" else "fp32"),
        data=Choice.parse(changes.pop("data", "instructions")),
        checkpointing=changes.pop("checkpointing", "none"),
        compile=changes.pop("compile", False),
    )
    return RunSpec(
        experiment="x",
        workload=Choice("finetune"),
        model=Choice(changes.pop("model", "tiny-llama")),
        topology=Topology(device="cpu"),
        training=training,
        strategy=Choice("single"),
        tuning=tuning,
        steps=1,
        **changes,
    )


def rows(packed: bool = False) -> tuple[Any, Any]:
    """Two rows of LENGTH places, a third of them prompt; packed ones hold two documents each."""
    tokens = torch.randint(0, VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(7))
    positions = torch.arange(LENGTH).repeat(2, 1)
    if packed:
        positions[:, LENGTH // 2 :] -= LENGTH // 2
    labels = tokens[:, 1:].clone()
    labels[:, : LENGTH // 3] = IGNORED_LABEL
    return torch.stack([tokens[:, :-1], positions], dim=1), labels


def teach(module: Any) -> None:
    """Adapters begin as nothing (B is zero): give B values, so that they take part."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)


def loss_and_gradients(module: Any, packed: bool = False) -> tuple[float, dict[str, Any]]:
    inputs, labels = rows(packed)
    loss = module(inputs, labels, torch.tensor(float((labels != IGNORED_LABEL).sum())))
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in module.named_parameters() if p.requires_grad}


def dequantised(module: Any) -> Any:
    """The same model with plain products of the numbers that the 4-bit codes stand for."""
    import bitsandbytes as bnb

    for path, part in list(module.named_modules()):
        if getattr(part, "quant_state", None) is None:
            continue
        values = bnb.functional.dequantize_4bit(part.weight.data, part.quant_state).float()
        weight = torch.nn.Parameter(values, requires_grad=False)
        if values.dim() == 3:
            owner, _, name = path.rpartition(".")
            experts = module.get_submodule(owner)
            delattr(experts, name)
            setattr(experts, name, weight)
        else:
            plain = torch.nn.Linear(part.in_features, part.out_features, bias=False)
            plain.weight = weight
            module.set_submodule(path, plain)
    return module


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-moe"])
def test_4bit_training_equals_the_dequantised_model(model: str) -> None:
    packed_bits = finetuned.build(spec(model=model), "cpu")
    plain = dequantised(finetuned.build(spec(model=model), "cpu"))
    teach(packed_bits), teach(plain)
    loss, gradients = loss_and_gradients(packed_bits)
    wanted, expected = loss_and_gradients(plain)
    assert loss == pytest.approx(wanted, rel=1e-5)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, expected[name], rtol=1e-4, atol=1e-6), name


def test_a_mixture_in_4_bit_keeps_its_routers() -> None:
    """Codes take a quarter of the memory of 16 bits; what chooses the experts is not quantised."""
    module = finetuned.build(spec(compute="bf16", model="tiny-moe", targets="q+v"), "cpu")
    shape = load(Choice("tiny-moe"))
    codes = {n: p for n, p in module.named_parameters() if ".experts." in n}
    assert sum(p.numel() for p in codes.values()) * 2 == shape.layers * shape.experts * 3 * shape.hidden * shape.ffn
    assert {p.dtype for p in codes.values()} == {torch.uint8}
    assert module.dtypes["frozen_weights"] == "nf4"
    routers = [p for n, p in module.named_parameters() if ".router." in n]
    assert [(tuple(p.shape), p.dtype) for p in routers] == [((shape.experts, shape.hidden), torch.bfloat16)] * 2


def test_4bit_weights_are_not_the_16_bit_ones() -> None:
    """Quantisation costs something: a module that skipped it would pass every parity test."""
    exact, coarse = finetuned.build(spec("lora"), "cpu"), finetuned.build(spec("qlora"), "cpu")
    assert loss_and_gradients(exact)[0] != pytest.approx(loss_and_gradients(coarse)[0], rel=1e-6)
    products = [p for n, p in coarse.named_parameters() if n.endswith("q_proj.base_layer.weight")]
    assert products[0].dtype == torch.uint8
    assert products[0].numel() == 128 * 128 // 2


def test_codes_stored_as_floats_have_the_same_bits() -> None:
    """FSDP2 of torch 2.11 refuses a parameter of whole numbers, even one that does not learn."""
    module, plain = finetuned.build(spec(), "cpu"), finetuned.build(spec(), "cpu")
    names = module.hold_codes_as_floats()
    weights, wanted = dict(module.named_parameters()), dict(plain.named_parameters())
    assert all(weight.is_floating_point() for weight in weights.values())
    assert names == {name for name, weight in wanted.items() if not weight.is_floating_point()}
    assert all(torch.equal(frozen_4bit.codes_of(weights[name]), wanted[name]) for name in names)
    teach(module), teach(plain)
    loss, gradients = loss_and_gradients(module)
    expected_loss, expected = loss_and_gradients(plain)
    assert loss == expected_loss
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_loss_is_the_mean_over_learned_labels() -> None:
    module = finetuned.build(spec(), "cpu")
    inputs, labels = rows()
    with torch.no_grad():
        logits = module.model(input_ids=inputs[:, 0], position_ids=inputs[:, 1]).logits.double()
    places = (labels != IGNORED_LABEL).nonzero().tolist()
    by_hand = [torch.logsumexp(logits[b, t], 0) - logits[b, t, labels[b, t]] for b, t in places]
    assert len(by_hand) == 2 * (LENGTH - LENGTH // 3)
    assert loss_and_gradients(module)[0] == pytest.approx(float(sum(by_hand) / len(by_hand)), rel=1e-6)


def test_documents_of_a_packed_row_do_not_see_each_other() -> None:
    module = finetuned.build(spec("lora", data="instructions:packed=true"), "cpu")
    inputs, labels = rows(packed=True)
    labels[:, : LENGTH // 2] = IGNORED_LABEL
    learned = torch.tensor(float((labels != IGNORED_LABEL).sum()))
    with torch.no_grad():
        together = module(inputs, labels, learned)
        other = inputs.clone()
        other[:, 0, : LENGTH // 2] = 5
        assert module(other, labels, learned) == together
        alone = inputs[:, :, LENGTH // 2 :].contiguous(), labels[:, LENGTH // 2 :].contiguous()
        assert module(*alone, learned).item() == pytest.approx(together.item(), rel=1e-6)
        module.packed = False
        assert module(other, labels, learned) != module(inputs, labels, learned)


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
@pytest.mark.parametrize("method", ["full", "qlora"])
def test_checkpointing_changes_no_gradient(method: str, checkpointing: str) -> None:
    plain, recomputed = (finetuned.build(spec(method, checkpointing=c), "cpu") for c in ("none", checkpointing))
    teach(plain), teach(recomputed)
    loss, gradients = loss_and_gradients(plain)
    again, same = loss_and_gradients(recomputed)
    assert again == loss
    assert all(torch.equal(gradients[name], same[name]) for name in gradients)


@pytest.mark.parametrize("targets", ["q+k+v+o", "q+v", "gate+up+down"])
def test_adapters_are_as_many_as_arithmetic_says(targets: str) -> None:
    module = finetuned.build(spec("lora", targets=targets), "cpu")
    learned = {n: p for n, p in module.named_parameters() if p.requires_grad}
    assert sum(p.numel() for p in learned.values()) == adapter_parameters(load(Choice("tiny-llama")), 4, targets)
    assert {p.dtype for p in learned.values()} == {torch.float32}


def test_adapters_begin_as_nothing_and_within_pefts_bound() -> None:
    module = finetuned.build(spec("lora"), "cpu")
    values = dict(module.named_parameters())
    first = next(value for name, value in values.items() if "q_proj.lora_A" in name)
    assert 0.9 / math.sqrt(128) < first.abs().max() <= 1 / math.sqrt(128)
    assert all(not value.any() for name, value in values.items() if ".lora_B." in name)


def digests(module: Any, tuning: Tuning) -> tuple[str, str]:
    weights = list(whole_weights(module))
    parts = [[w for w in weights if finetuned.is_trainable(w[0], tuning) is learned] for learned in (True, False)]
    learned, frozen = (digest_parameters(part).digest for part in parts)
    return learned, frozen


def test_two_builds_are_the_same_and_reseeding_moves_adapters_alone() -> None:
    asked = spec(compute="bf16")
    assert asked.tuning is not None
    first, second, reseeded = (digests(finetuned.build(asked, "cpu", reseed), asked.tuning) for reseed in (0, 0, 1))
    assert first == second
    assert reseeded[1] == first[1]
    assert reseeded[0] != first[0]
    other = digests(finetuned.build(replace(asked, seed=1), "cpu"), asked.tuning)
    assert other[0] != first[0]
    assert other[1] != first[1]


@pytest.mark.parametrize("method", ["full", "lora"])
def test_reseeding_re_rounds_what_learns_of_a_directory(method: str, tmp_path: Path) -> None:
    """As of seeded weights, by no more than the last place; frozen weights stay as they are."""
    finetuned.build(spec("full", "bf16"), "cpu").model.save_pretrained(tmp_path)
    asked = spec(method, "bf16", model=str(tmp_path))
    assert asked.tuning is not None
    modules = [finetuned.build(asked, "cpu", reseed) for reseed in (0, 0, 1)]
    first, second, reseeded = (digests(module, asked.tuning) for module in modules)
    assert first == second
    assert reseeded[0] != first[0]
    assert reseeded[1] == first[1]
    before, after = (module.model.get_parameter("model.embed_tokens.weight") for module in modules[1:])
    assert torch.allclose(before, after, rtol=torch.finfo(torch.bfloat16).eps, atol=0)


def test_reseeded_references_round_differently_from_the_first_step_on() -> None:
    """Adapters alone would not show there: their product is zero. The noise is the same for every call, because
    checkpointing computes values again."""
    plain = loss_and_gradients(finetuned.build(spec(compute="bf16"), "cpu"))[0]
    for reseed in (1, 2, 3):
        changed = finetuned.build(spec(compute="bf16"), "cpu", reseed=reseed)
        losses = {loss_and_gradients(changed)[0] for _ in range(2)}
        assert len(losses) == 1
        assert 0 < abs(losses.pop() / plain - 1) < 1e-3
    exact = [loss_and_gradients(finetuned.build(spec(), "cpu", reseed=reseed))[0] for reseed in (0, 1)]
    assert exact[0] == exact[1]


def test_a_compiled_block_recomputes_itself_but_not_while_it_is_watched() -> None:
    """Watched, torch runs the plain code: it must compute what the reference's code with checkpointing does."""
    calls = {}
    for compiled in (False, True):
        module = finetuned.build(spec("lora", checkpointing="full", compile=compiled), "cpu")
        watch = Audit()
        with watch.watching():
            loss_and_gradients(module)
        calls[compiled] = watch.calls
    assert calls[True] == calls[False]
    layers = load(Choice("tiny-llama")).layers
    assert calls[True]["attention", "fp32"] == 2 * layers
    block, runs = torch.nn.Linear(2, 2), []
    block.register_forward_hook(lambda *_: runs.append(1))
    module.run_block(block, torch.ones(1, 2)).sum().backward()
    assert len(runs) == 1


def halved(module: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module with its blocks as `tuned_blocks` computes them on a GPU, not compiled."""
    monkeypatch.setattr(finetuned, "has_kernel", lambda device: True)
    monkeypatch.setattr(torch, "compile", lambda function, mode: function)
    assert module.compile_layers("default")
    return module


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize(
    ("targets", "packed"), [("q+k+v+o", False), ("q+v", True), ("gate+up+down", False), ("o+up", True)]
)
def test_halves_compute_what_the_layers_do(
    targets: str, packed: bool, checkpointing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = spec(targets=targets, checkpointing=checkpointing, data=f"instructions:packed={str(packed).lower()}")
    layers, halves = finetuned.build(asked, "cpu"), finetuned.build(asked, "cpu")
    teach(layers), teach(halved(halves, monkeypatch))
    loss, gradients = loss_and_gradients(halves, packed)
    wanted, expected = loss_and_gradients(layers, packed)
    assert loss == pytest.approx(wanted, rel=1e-6)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, expected[name], rtol=1e-4, atol=1e-6), name


def test_halves_round_where_the_layers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums kept in fp32 between layers would be better and different: a hundred times the difference allowed here."""
    layers, halves = finetuned.build(spec(compute="bf16"), "cpu"), finetuned.build(spec(compute="bf16"), "cpu")
    teach(layers), teach(halved(halves, monkeypatch))
    loss, gradients = loss_and_gradients(halves)
    wanted, expected = loss_and_gradients(layers)
    assert loss == pytest.approx(wanted, rel=1e-6)
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= 0.03 * expected[name].norm(), name


def test_halves_are_not_used_where_layers_are_different_or_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetuned, "has_kernel", lambda device: True)
    for asked, reseed in ((spec("lora"), 0), (spec(checkpointing="selective"), 0), (spec(compute="bf16"), 1)):
        assert not finetuned.build(asked, "cpu", reseed).compile_layers("default")
    sharded = finetuned.build(spec(), "cpu")
    sharded.hold_codes_as_floats()
    assert not sharded.compile_layers("default")
    watch = Audit()
    with watch.watching():
        loss_and_gradients(halved(finetuned.build(spec(checkpointing="full"), "cpu"), monkeypatch))
    assert watch.calls["attention", "fp32"] == 2 * load(Choice("tiny-llama")).layers


def test_frozen_digest_sees_a_scale() -> None:
    asked = spec()
    assert asked.tuning is not None
    module = finetuned.build(asked, "cpu")
    before = digests(module, asked.tuning)
    next(value for name, value in module.scales() if name.endswith("absmax")).view(-1)[3] ^= 1
    after = digests(module, asked.tuning)
    assert after[0] == before[0]
    assert after[1] != before[1]


@pytest.mark.parametrize(
    ("method", "compute", "held"),
    [("qlora", "bf16", ("fp32", "nf4")), ("lora", "bf16", ("fp32", "bf16")), ("full", "bf16", ("bf16", "none"))],
)
def test_dtypes_are_those_of_the_tensors(method: str, compute: str, held: tuple[str, str]) -> None:
    module = finetuned.build(spec(method, compute), "cpu")
    assert (module.dtypes["parameters"], module.dtypes["frozen_weights"]) == held
    assert module.facts == {"weights": "random"}


def test_a_directory_gives_its_own_weights(tmp_path: Path) -> None:
    saved = finetuned.build(spec("full"), "cpu").model
    with torch.no_grad():
        saved.model.embed_tokens.weight.mul_(2)
    saved.save_pretrained(tmp_path)
    read = finetuned.build(spec("full", model=str(tmp_path)), "cpu")
    assert read.facts == {"weights": "pretrained"}
    for name, value in saved.named_parameters():
        assert torch.equal(value, read.model.get_parameter(name)), name
    frozen = finetuned.build(spec("qlora", model=str(tmp_path)), "cpu")
    assert frozen.dtypes["frozen_weights"] == "nf4"


def test_the_first_layers_of_a_directory_are_a_model(tmp_path: Path) -> None:
    """What a proof trains of a model whose whole does not fit."""
    saved = finetuned.build(spec("full"), "cpu").model
    saved.save_pretrained(tmp_path)
    whole = spec("full", model=str(tmp_path))
    one = finetuned.build(replace(whole, model=Choice(str(tmp_path), {"layers": 1})), "cpu")
    own = dict(one.model.named_parameters())
    assert {name.split(".")[2] for name in own if ".layers." in name} == {"0"}
    for name, value in saved.named_parameters():
        assert ".layers.1." in name or torch.equal(value, own[name]), name


def test_a_directory_that_lacks_weights_is_refused(tmp_path: Path, golden: object) -> None:
    """Filled with chance they would differ from rank to rank, under the name of a trained model."""
    from safetensors.torch import load_file, save_file

    finetuned.build(spec("full"), "cpu").model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    kept = {name: value for name, value in load_file(file).items() if "layers.0.mlp.down_proj" not in name}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedError) as caught:
        finetuned.build(spec("full", model=str(tmp_path)), "cpu")
    assert str(caught.value) == golden
    assert "model.layers" in str(caught.value)
    assert "down_proj" in str(caught.value)


def test_a_model_that_is_built_otherwise_is_refused(tmp_path: Path, golden: object) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError) as caught:
        finetuned.build(spec(model=str(tmp_path)), "cpu")
    assert str(caught.value) == golden
    assert "GPT2LMHeadModel" in str(caught.value)


def test_a_missing_package_says_how_to_install_it(golden: object) -> None:
    with pytest.raises(MissingPackageError) as caught:
        frozen_4bit.package("no_such_package", "fine-tuning")
    assert str(caught.value) == golden
    assert str(caught.value) == golden


@pytest.mark.parametrize(("method", "checkpointing"), [("full", "none"), ("lora", "full"), ("qlora", "full")])
def test_a_mixture_from_a_directory(method: str, checkpointing: str, tmp_path: Path) -> None:
    """The loss is that of transformers and the balance term; the choices are observed, once with checkpointing too."""
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        router_aux_loss_coef=0.5,
        initializer_range=0.2,
    )
    theirs = transformers.MixtralForCausalLM(config)
    theirs.save_pretrained(tmp_path)
    asked = spec(method, checkpointing=checkpointing, targets="q+v", model=str(tmp_path))
    module = finetuned.build(asked, "cpu")
    watch = RoutingWatch(module, "cpu", steps=1)
    inputs, labels = rows()
    loss = module(inputs, labels, torch.tensor(1.0))
    loss.backward()
    watch.end_step(0)
    (sample,) = watch.samples(0, 0, 1, 0)
    assert sum(sample.assigned) == sum(sample.computed) == 2 * 2 * labels.numel()
    trained = [p for p in module.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == trained_parameters(load(asked.model), asked.tuning)
    assert all(p.grad is not None for p in trained)
    if method == "qlora":  # transformers has the weights before they were quantised
        return
    with torch.no_grad():
        logits = theirs(inputs[:, 0], position_ids=inputs[:, 1]).logits.flatten(0, 1)
    learned = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=IGNORED_LABEL)
    assert float(loss.detach()) == pytest.approx(float(learned) + 0.5 * sum(sample.balances) / 2, rel=1e-5)
