"""Scripts that train more than one model, evaluate, or train another loss than the one that the model returns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from script_records import observe_code

from paceline.workloads.script.process import read_facts

pytestmark = pytest.mark.slow

START = """
import json, torch
from torch.nn import Embedding, Linear, Sequential, Tanh, functional
torch.manual_seed(0)
losses = []
"""
END = """
with open("truth.json", "w") as file:
    json.dump(losses, file)
"""
# An encoder that is called first and two larger parts behind it, in one optimizer.
PARTS = """
first, second, third = Embedding(50, 4), Linear(4, 96), Linear(96, 50)
optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters(), *third.parameters()])
for step in range(4):
    for micro in range(2):
        ids = torch.randint(0, 50, (3, 8))
        hidden = second(first(ids))
        loss = functional.cross_entropy(third(hidden).flatten(0, 1), ids.flatten()) / 2
        loss.backward()
    losses.append(2 * loss.item())
    optimizer.step()
    optimizer.zero_grad()
"""
# The smaller discriminator steps first; the generator is called with gradients only after that.
GAN = """
made, judged = Sequential(Linear(3, 64), Tanh(), Linear(64, 2)), Linear(2, 1)
optimizers = [torch.optim.Adam(model.parameters()) for model in (judged, made)]
for step in range(3):
    with torch.no_grad():
        false = made(torch.randn(4, 3))
    for optimizer in optimizers:
        loss = judged(false if optimizer is optimizers[0] else made(torch.randn(4, 3))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""
AGAIN = """
model, inputs = Sequential(Linear(8, 16), Tanh(), Linear(16, 1)), torch.randn(64, 8)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
def closure():
    optimizer.zero_grad()
    loss = ((model(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean()
    loss.backward()
    return loss
for step in range(3):
    losses.append(optimizer.step(closure).item())
"""
# A notebook as a script: it tries a small model first, then trains another one with an optimizer of its own.
NOTEBOOK = """
for width in (2, 64, 8):
    model = Sequential(Linear(5, width), Tanh(), Linear(width, 1))
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(3):
        loss = model(torch.randn(width, 5)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""
# DeepSpeed's stages 1 and 2 show the optimizer one group at a time.
ONE_BY_ONE = """
model = Sequential(Linear(5, 8), Tanh(), Linear(8, 1))
decayed, others = ([p for p in model.parameters() if (p.dim() > 1) == large] for large in (True, False))
optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
every = optimizer.param_groups
for step in range(3):
    loss = model(torch.randn(16, 5)).pow(2).mean()
    loss.backward()
    losses.append(loss.item())
    for group in every:
        optimizer.param_groups = [group]
        optimizer.step()
    optimizer.param_groups = every
    optimizer.zero_grad()
"""
# A model that is called once to look at its output, before it is wrapped and has an optimizer.
LOOKED_AT = """
import os
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = Sequential(Linear(5, 8), Tanh(), Linear(8, 1))
assert model(torch.zeros(3, 5)).shape == (3, 1)
model = torch.nn.parallel.DistributedDataParallel(model) if wrapped else model
optimizer = torch.optim.Adam(model.parameters())
for step in range(3):
    loss = model(torch.randn(16, 5)).pow(2).mean()
    loss.backward()
    losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
# What a loop gives by position, has the names of its forward pass, also in a wrapper.
POSITIONAL = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = Embedding(50, 4), Linear(4, 50)

    def forward(self, ids, attention_mask, labels):
        logits = self.head(self.embedding(ids) * attention_mask[:, :, None])
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

class Wrapper(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

model = Wrapper(Model())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    ids, mask = torch.randint(0, 50, (4, 10)), torch.ones(4, 10, dtype=torch.int64)
    mask[0, 3:] = 0
    labels = torch.where(mask.bool(), ids, -100)
    loss = model(ids, mask, labels)
    loss.backward()
    losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
"""
# Training of a model that the lines before made; what follows belongs to the loop.
TRAIN = """
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    loss = model(torch.randn(16, 5)).pow(2).mean()
    loss.backward()
    losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
"""
# A traced model does not say what its arguments are called. Tracing fails if hooks compute anything meanwhile.
TRACED = """
import warnings
warnings.simplefilter("error", torch.jit.TracerWarning)
model = torch.jit.trace(Sequential(Linear(5, 3), Linear(3, 1)), torch.zeros(1, 5))
"""
# Models that are called without values, before one is trained.
WITHOUT_VALUES = """
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    Linear(9, 9)(torch.zeros(2, 9))
model = Sequential(Linear(5, 8), Tanh(), Linear(8, 1))
parameters = {name: p.detach() for name, p in model.named_parameters()}
def apply(own, inputs):
    return torch.func.functional_call(model, own, (inputs,)).pow(2).mean()
torch.func.vmap(torch.func.grad(apply), in_dims=(None, 0))(parameters, torch.randn(4, 3, 5))
torch.fx.symbolic_trace(model)
torch.export.export(model, (torch.zeros(2, 5),))
"""
# A scripted model takes no hooks.
SCRIPTED = """
model = torch.jit.script(Linear(5, 1))
"""
SCALED = """
model, scaler = Linear(8, 1), torch.amp.GradScaler("cpu", init_scale=1024.0)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(4):
    loss = (model(torch.randn(16, 8)) ** 2).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
"""
# The first scales are too large: gradients are infinite, and the scaler leaves out the update.
SKIPPED = """
model, scaler = Linear(8, 1), torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=100)
optimizer, skipped = torch.optim.SGD(model.parameters(), 0.01), []
for step in range(10):
    for micro in range(2):
        with torch.autocast("cpu", torch.float16):
            loss = (model(torch.randn(16, 8)).float() ** 2).mean() / 2
        losses.append(loss.item())
        scaler.scale(loss).backward()
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    skipped.append(scaler.get_scale() < scale)
losses = [[a + b for a, b in zip(losses[::2], losses[1::2])], skipped]
"""
# Models whose forward pass returns their loss, trained with something more.
RETURNING = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = Sequential(Linear(5, 8), Tanh(), torch.nn.Dropout(0.1), Linear(8, 5))

    def forward(self, inputs):
        outputs = self.head(inputs)
        return outputs, (outputs - inputs).pow(2).mean()

model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""
PENALTY = """
for step in range(3):
    outputs, loss = model(torch.randn(16, 5))
    loss = 0.3 * loss + 0.7 * outputs.abs().mean()
    loss.backward()
    losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
"""
APART = """
for step in range(3):
    outputs, loss = model(torch.randn(16, 5))
    more = outputs.abs().mean()
    loss.backward(retain_graph=True)
    more.backward()
    losses.append((loss + more).item())
    optimizer.step()
    optimizer.zero_grad()
"""
PREFERENCE = """
for step in range(3):
    better, worse = model(torch.randn(16, 5))[1], model(torch.randn(16, 5))[1]
    loss = -functional.logsigmoid(worse - better)
    loss.backward()
    losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
"""
DIVIDED = """
for step in range(3):
    parts = []
    for micro in range(4):
        _, loss = model(torch.randn(16, 5))
        (loss / 4 * 0.5).backward()
        parts.append(loss.item())
    losses.append(sum(parts) / 4)
    optimizer.step()
    optimizer.zero_grad()
"""
# An evaluation that forgets `no_grad`: between updates, and between micro batches.
EVALUATED = """
def evaluate():
    model.eval()
    for _ in range(2):
        model(torch.randn(7, 5))
    model.train()

for step in range(3):
    parts = []
    for micro in range(2):
        if step > 0:
            evaluate()
        _, loss = model(torch.randn(16, 5))
        (loss / 2).backward()
        parts.append(loss.item())
    if step > 0:
        evaluate()
    losses.append(sum(parts) / 2)
    optimizer.step()
    optimizer.zero_grad()
"""
# Adversarial examples are made in evaluation mode, with gradients of the inputs: that is no evaluation.
ADVERSARIAL = """
for step in range(3):
    inputs = torch.randn(16, 5)
    change = torch.zeros(16, 5, requires_grad=True)
    model.eval()
    gradient, = torch.autograd.grad(model(inputs + change)[1], change)
    model.train()
    _, loss = model(inputs + 0.1 * gradient.sign())
    loss.backward()
    losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
"""
# A model that is never put into training mode, as transformers returns them.
NEVER_TRAINING = "model.eval()\n" + DIVIDED


@pytest.fixture
def seen(tmp_path: Path, nursery: None) -> Any:
    """The lines of the steps of a script, its facts, and the losses that it computed."""

    def observe(code: str) -> tuple[list[dict[str, Any]], dict[str, Any], list[float]]:
        observe_code(START + code + END, folder=tmp_path)
        lines = map(json.loads, (tmp_path / "rank-0.jsonl").read_text().splitlines())
        facts = read_facts(tmp_path, 0)
        assert facts["broken"] is None
        losses = json.loads((tmp_path / "truth.json").read_text())
        return [line for line in lines if line["kind"] == "step"], facts, losses

    return observe


def test_tokens_are_those_of_the_model_that_is_given_them(seen: Any) -> None:
    steps, facts, losses = seen(PARTS)
    assert [(s["tokens"], s["samples"], s["micro_batches"]) for s in steps] == [(48, 6, 2)] * 4
    assert len({s["data_digest"] for s in steps}) == 4
    assert [s["loss"] for s in steps] == pytest.approx(losses, rel=0.1), "of both micro batches, not of the last one"
    assert facts["parameters"] == 50 * 4 + 5 * 96 + 97 * 50
    assert len(facts["weights"]) == 5
    assert {name for name, text in facts["final_weights"].items() if text != facts["weights"][name]} == {
        *facts["weights"]
    }


def test_weights_of_both_models_of_a_gan_are_read_before_their_first_update(seen: Any) -> None:
    steps, facts, losses = seen(GAN)
    assert [s["loss"] for s in steps] == pytest.approx(losses)
    assert facts["parameters"] == 3 + 4 * 64 + 65 * 2
    assert len(facts["weights"]) == len(facts["final_weights"]) == 6
    # The generator as it was made, with this seed.
    import torch

    torch.manual_seed(0)
    first = torch.nn.Linear(3, 64).weight
    (shape,) = {text.partition(":")[0] for text in facts["weights"].values() if text.startswith("64x3")}
    assert shape == "x".join(map(str, first.shape))


def test_a_closure_that_is_called_again_has_no_further_samples(seen: Any) -> None:
    steps, _, losses = seen(AGAIN)
    assert [(s["samples"], s["micro_batches"]) for s in steps] == [(64, 1)] * 3
    assert len({s["data_digest"] for s in steps}) == 1
    assert [s["loss"] for s in steps] == pytest.approx(losses)


def test_the_scale_of_a_loss_is_not_recorded(seen: Any) -> None:
    steps, _, losses = seen(SCALED)
    assert [s["loss"] for s in steps] == pytest.approx(losses)


def test_an_update_that_a_scaler_leaves_out_ends_its_step(seen: Any) -> None:
    steps, facts, (losses, skipped) = seen(SKIPPED)
    assert 0 < sum(skipped) < 10, "the case that is tested"
    assert [s["updates"] for s in steps] == [int(not each) for each in skipped]
    assert [(s["samples"], s["micro_batches"]) for s in steps] == [(32, 2)] * 10
    assert [s["loss"] for s in steps] == pytest.approx(losses)
    assert len(facts["weights"]) == 2


@pytest.mark.parametrize("code", [PENALTY, APART, PREFERENCE], ids=["penalty", "apart", "preference"])
def test_the_loss_is_what_the_script_trains_not_what_the_model_returns(seen: Any, code: str) -> None:
    steps, facts, losses = seen(RETURNING + code)
    assert [s["loss"] for s in steps] == pytest.approx(losses)
    assert facts["sources"]["loss:backward"] == 3


@pytest.mark.parametrize("code", [DIVIDED, NEVER_TRAINING], ids=["training", "evaluation"])
def test_a_loss_that_is_divided_before_the_backward_pass_is_that_of_the_model(seen: Any, code: str) -> None:
    steps, facts, losses = seen(RETURNING + code)
    assert [(s["samples"], s["micro_batches"]) for s in steps] == [(64, 4)] * 3
    assert [s["loss"] for s in steps] == pytest.approx(losses)
    assert facts["sources"]["loss:output"] == 3


def test_an_evaluation_with_gradients_is_in_no_step(seen: Any) -> None:
    steps, _, losses = seen(RETURNING + EVALUATED)
    assert [(s["samples"], s["micro_batches"]) for s in steps] == [(32, 2)] * 3
    assert [s["loss"] for s in steps] == pytest.approx(losses)


def test_samples_whose_inputs_get_gradients_count_once(seen: Any) -> None:
    steps, _, losses = seen(RETURNING + ADVERSARIAL)
    assert [s["loss"] for s in steps] == pytest.approx(losses)
    assert [(s["samples"], s["micro_batches"]) for s in steps] == [(16, 1)] * 3


def test_a_model_that_a_later_optimizer_trains_is_seen(seen: Any) -> None:
    steps, facts, losses = seen(NOTEBOOK)
    assert [s["samples"] for s in steps] == [2, 2, 2, 64, 64, 64, 8, 8, 8]
    assert [s["loss"] for s in steps] == pytest.approx(losses)
    assert all(s["forward_s"] and s["micro_batches"] == 1 for s in steps)
    assert facts["parameters"] == sum(7 * width + 1 for width in (2, 64, 8))


def test_arguments_without_a_keyword_have_the_names_of_the_forward_pass(seen: Any) -> None:
    steps, _, losses = seen(POSITIONAL)
    assert [(s["tokens"], s["positions"], s["label_tokens"]) for s in steps] == [(33, 40, 33)] * 3
    assert [s["loss"] for s in steps] == pytest.approx(losses)


def test_a_traced_model_is_seen(seen: Any) -> None:
    steps, _, losses = seen(TRACED + TRAIN)
    assert [s["samples"] for s in steps] == [16] * 3
    assert [s["loss"] for s in steps] == pytest.approx(losses)


def test_calls_without_values_are_no_training(seen: Any) -> None:
    steps, facts, losses = seen(WITHOUT_VALUES + TRAIN)
    assert [(s["samples"], s["micro_batches"]) for s in steps] == [(16, 1)] * 3
    assert [s["loss"] for s in steps] == pytest.approx(losses)
    assert facts["parameters"] == 57


def test_steps_of_a_scripted_model_are_seen_without_their_data(seen: Any) -> None:
    steps, facts, losses = seen(SCRIPTED + TRAIN + '    torch.save(model.state_dict(), "model.pt")\n')
    assert [s["loss"] for s in steps] == pytest.approx(losses)
    assert facts["sources"] == {"unseen": 3, "loss:backward": 3}


@pytest.mark.parametrize(("wrapped", "wrapper"), [(True, "DDP"), (False, "none")])
def test_what_is_called_before_the_first_optimizer_is_no_training(seen: Any, wrapped: bool, wrapper: str) -> None:
    steps, facts, losses = seen(f"wrapped = {wrapped}\n{LOOKED_AT}")
    assert [(s["samples"], s["micro_batches"]) for s in steps] == [(16, 1)] * 3
    assert [s["loss"] for s in steps] == pytest.approx(losses)
    assert (facts["wrapper"], facts["sample"], facts["parameters"]) == (wrapper, "5", 57)
    assert facts["sources"] == {"samples": 3, "loss:backward": 3}


def test_groups_that_are_stepped_one_by_one_are_all_recorded(seen: Any) -> None:
    steps, facts, _ = seen(ONE_BY_ONE)
    assert len(steps) == 3
    assert [(group["weight_decay"], group["elements"]) for group in facts["groups"]] == [(0.1, 48), (0.0, 9)]
    assert facts["changed"] == ""
