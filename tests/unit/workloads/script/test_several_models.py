"""Scripts that train more than one model, evaluate the same samples again, or scale their loss."""

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
