"""Mistakes planted into a training script with two ranks: the observer and the grades must notice each of them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from script_records import observe_code, record_of

from paceline.analysis.findings import CERTIFIED, Certificate
from paceline.analysis.training.certificate import certify_all

pytestmark = pytest.mark.slow

MISTAKES = (
    *("none", "again", "fewer micro batches", "other order", "frozen layer", "no reduction", "one group"),
    *("other data", "other rate", "rate of one step", "fewer updates", "other seed", "fewer layers", "other optimizer"),
    *("same data on both ranks", "dropout", "averaged weights", "autocast", "half gradients", "stale gradients"),
    *("other clip", "lost momentum", "skipped step", "empty update", "double step", "swapped steps", "other labels"),
    *("label smoothing", "more updates", "one weight more decayed", "decay of late steps", "no last reduction"),
)
# One interpreter for all: each mistake gets two forked ranks, which average their gradients through shared memory.
TRAIN = """
import atexit, gc, multiprocessing, os, sys
import torch, torch._dynamo  # the first step of an optimizer imports it: once here, not in every rank
gc.freeze()  # nor does every rank look through it for garbage, here or at its end

mistakes = sys.argv[1].split(",")
steps, ranks = 6, 2 * len(mistakes)
shared = torch.zeros(ranks, 1000).share_memory_()
barriers = [multiprocessing.Barrier(2) for _ in mistakes]
children = []
for rank in range(ranks):
    children.append(os.fork())
    if children[-1] == 0:
        break
else:
    sys.exit(sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(ranks)
torch.set_num_threads(1)
mistake, barrier, part = mistakes[rank // 2], barriers[rank // 2], rank % 2
torch.manual_seed(1 if mistake == "other seed" else 0)
layers = torch.nn.Embedding(20, 4), torch.nn.Flatten(), torch.nn.Linear(16, 8), torch.nn.Linear(8, 20)
model = torch.nn.Sequential(*(layers[:2] + (torch.nn.Linear(16, 20),) if mistake == "fewer layers" else layers))
weights, biases = ([p for p in model.parameters() if (p.dim() > 1) == large] for large in (True, False))
groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
if mistake == "one group":
    groups = [{"params": weights + biases, "weight_decay": 0.1}]
if mistake == "one weight more decayed":
    groups[0]["params"].append(groups[1]["params"].pop(0))
rate = 0.011 if mistake == "other rate" else 0.01
optimizer = (torch.optim.Adam if mistake == "other optimizer" else torch.optim.AdamW)(groups, lr=rate)
data = torch.randint(0, 20, (steps + 1, 2, 2, 3, 4), generator=torch.Generator().manual_seed(1))
if mistake == "other order":
    data = data.flip(0)
if mistake == "swapped steps":
    data[[3, 4]] = data[[4, 3]]
if mistake == "other data":
    data[4, 0, 0, 0, 0] = (data[4, 0, 0, 0, 0] + 1) % 20
for step in range(steps + (mistake == "more updates") - (mistake == "fewer updates")):
    if mistake == "decay of late steps" and step == 4:
        optimizer.param_groups[0]["weight_decay"] = 0.05
    if mistake == "rate of one step":
        for group in optimizer.param_groups:
            group["lr"] = 0.02 if step == 3 else 0.01
    micro_batches = data[step, :, 0 if mistake == "same data on both ranks" else part]
    if mistake == "fewer micro batches" and step == 4:
        micro_batches = micro_batches[:1]
    for ids in micro_batches:
        with torch.autocast("cpu", enabled=mistake == "autocast"):
            logits = model(ids)
        if mistake == "dropout":
            logits = torch.nn.functional.dropout(logits, 0.1)
        smoothing = 0.01 * (mistake == "label smoothing")
        labels = ids[:, int(mistake == "other labels")]
        torch.nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    if (mistake, step) not in (("no reduction", 3), ("no last reduction", steps - 1)):
        shared[rank, : len(gradient)] = gradient
        barrier.wait()
        gradient = shared[rank - part : rank - part + 2, : len(gradient)].mean(0)
        barrier.wait()
    for p, g in zip(model.parameters(), gradient.split([p.numel() for p in model.parameters()])):
        p.grad = g.reshape(p.shape).clone()
        if mistake == "half gradients":
            p.grad /= 2
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.9 if mistake == "other clip" else 1.0)
    if mistake == "frozen layer":
        model[2].weight.grad = None
    if mistake == "lost momentum" and step == 3:
        optimizer.state.clear()
    if mistake == "empty update" and step == 3:
        optimizer.zero_grad()
    if mistake != "skipped step" or step != 3:
        optimizer.step()
    if mistake == "double step" and step == 3:
        optimizer.step()
    if mistake == "averaged weights" and step == 3:
        for p, older in zip(model.parameters(), before):
            p.data.lerp_(older, 0.5)
    before = [p.detach().clone() for p in model.parameters()]
    if mistake != "stale gradients" or step != 3:
        optimizer.zero_grad()
atexit._run_exitfuncs()
os._exit(0)
"""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory, nursery: None) -> Mapping[str, Certificate]:
    """By mistake, the certificate beside the run without one."""
    folder = tmp_path_factory.mktemp("observed")
    observe_code(TRAIN, ",".join(MISTAKES), folder=folder)
    records = {
        mistake: record_of(folder, (2 * number, 2 * number + 1), mistake, float(number))
        for number, mistake in enumerate(MISTAKES)
    }
    found = certify_all(list(records.values()))
    return {mistake: found[record.spec.run_id] for mistake, record in records.items()}


def test_the_same_work_is_certified(certificates: Mapping[str, Certificate]) -> None:
    assert certificates["again"].level == CERTIFIED
    assert certificates["again"].valid
    assert not certificates["again"].differs


@pytest.mark.parametrize(
    ("mistake", "what"),
    [
        ("fewer micro batches", "tokens per step: 24 instead of 48 at step 4"),
        ("other order", "data: other samples at step 0"),
        ("frozen layer", "trained tensors: 4 instead of 5"),
        ("no reduction", "losses: "),
        ("one group", "optimizer: elements 396 instead of 368"),
        ("other data", "data: other samples at step 4"),
        ("other rate", "optimizer: lr 0.011 instead of 0.01"),
        ("rate of one step", "optimizer: another schedule of learning rates"),
        ("fewer updates", "updates: 5 instead of 6"),
        ("other seed", "initial weights"),
        ("fewer layers", "parameters"),
        ("other optimizer", "optimizer: class Adam instead of AdamW"),
        ("same data on both ranks", "data: other samples at step 0"),
        ("dropout", "losses: "),
        ("averaged weights", "losses: "),
        ("autocast", "compute dtype: bf16 instead of fp32"),
        ("half gradients", "gradient norms: "),
        ("stale gradients", "gradient norms: "),
        ("other clip", "optimizer: clip norm 0.9 instead of 1.0"),
        ("lost momentum", "losses: "),
        ("skipped step", "updates: 5 instead of 6"),
        ("empty update", "losses: "),
        ("double step", "losses: "),
        ("swapped steps", "data: other samples at step 3"),
        ("other labels", "losses: "),
        ("label smoothing", "losses: "),
        ("more updates", "updates: 7 instead of 6"),
        ("one weight more decayed", "optimizer: elements "),
        ("decay of late steps", "optimizer: during training, weight_decay 0.1 to 0.05 instead of no change"),
    ],
)
def test_each_mistake_is_different(certificates: Mapping[str, Certificate], mistake: str, what: str) -> None:
    assert certificates[mistake].level_text is not None
    assert any(difference.startswith(what) for difference in certificates[mistake].differs), certificates[mistake]
    assert str(certificates[mistake].level_text).startswith("different")


@pytest.mark.parametrize("mistake", ["no reduction", "no last reduction"])
def test_a_step_without_reduction_is_invalid(certificates: Mapping[str, Certificate], mistake: str) -> None:
    assert not certificates[mistake].valid
    assert "ranks ended with different weights" in certificates[mistake].reasons[0]
