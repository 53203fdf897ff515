"""Numbers of several steps, fetched together: each arrives at its own step."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from paceline.training import attachment  # noqa: E402


@pytest.fixture
def observer(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module of the observer, as a script imports it."""
    monkeypatch.syspath_prepend(str(Path(attachment.__file__).parent))
    import paceline_observer

    yield paceline_observer
    for name in [name for name in sys.modules if name.startswith("paceline_")]:
        del sys.modules[name]


def test_counts_and_digests_of_unlike_batches_arrive_at_their_steps(observer: ModuleType, tmp_path: Path) -> None:
    ids = torch.arange(8).reshape(2, 4)
    labels = torch.tensor([[-100, 1, 2, 3], [-100, -100, 6, 7]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
    # Tensors of one shape and dtype are copied at once, the others one by one; a long row is sampled.
    inputs = [
        {"input_ids": ids, "labels": labels, "attention_mask": mask},
        {"input_ids": ids, "labels": labels, "attention_mask": mask.bool()},
        {"input_ids": ids.flip(0), "attention_mask": mask},
        {"input_ids": ids},
        {"input_ids": ids, "labels": torch.tensor([3, 4])},
        {"input_ids": torch.zeros(1, 5000, dtype=torch.int64), "labels": torch.zeros(1, 5000, dtype=torch.int64)},
    ]
    own = observer.Observer(str(tmp_path), {})
    lines: list[str] = []
    own.readout = readout = sys.modules["paceline_steps"].Readout(lines.append)
    for number, kwargs in enumerate(inputs):
        step = sys.modules["paceline_steps"].Step(number, float(number), end=number + 0.5)
        step.batches = [own.batch_of(None, (), kwargs)]
        step.losses, step.norm = [torch.tensor(2.0 + number)], torch.tensor(0.5) if number else 0.25
        readout.add(step, own.clock)
    assert (readout.steps, readout.written) == (6, 2)
    readout.finish(own.clock)
    steps = [SimpleNamespace(**json.loads(line)) for text in lines for line in text.splitlines()]
    assert [s.step for s in steps] == list(range(6))
    assert [s.tokens for s in steps] == [7, 7, 7, 8, 8, 5000]
    assert [s.label_tokens for s in steps] == [5, 5, None, None, None, 5000]
    assert [s.positions for s in steps] == [8] * 5 + [5000]
    assert [s.loss for s in steps] == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert [s.grad_norm for s in steps] == [0.25] + [0.5] * 5
    # The same rows in any order, whatever comes with them.
    assert len({s.data_digest for s in steps[:5]}) == 1
    assert steps[5].data_digest not in (0, steps[0].data_digest)


def test_groups_end_by_their_number_of_steps_and_by_the_rows_they_hold(observer: ModuleType) -> None:
    steps = sys.modules["paceline_steps"]
    lines: list[str] = []
    readout, clock = steps.Readout(lines.append), sys.modules["paceline_clocks"].HostClock()

    def add(number: int, elements: int) -> int:
        rows = torch.zeros(1, elements, dtype=torch.int64)
        step = steps.Step(number, 0.0, end=1.0, batches=[steps.Batch(1, elements, elements, rows=rows)])
        readout.add(step, clock)
        return int(readout.written)

    # The first two are written at once; a host that is busy for half a second would end a group, too.
    steps.GROUP_S = 1e9
    assert [add(number, 4) for number in range(2 + steps.GROUP_STEPS)] == [1, 2, *[2] * 31, 34]
    assert add(34, steps.GROUP_ELEMENTS - 1) == 34
    assert add(35, 1) == 36


def test_a_loss_divided_by_the_labels_of_all_ranks_is_that_of_this_rank(observer: ModuleType) -> None:
    """Two ranks predict 6 and 2 labels: a mean loss of 4 over our 6 is 4 * 6 / 8 for the Trainer."""
    steps, lines = sys.modules["paceline_steps"], []
    readout, clock = steps.Readout(lines.append), sys.modules["paceline_clocks"].HostClock()
    batches = [steps.Batch(1, 5, 5, labels=count + 1, predicted=torch.tensor(count)) for count in (4, 2)]
    step = steps.Step(0, 0.0, end=1.0, batches=batches, adds_losses=True, divisor=torch.tensor(8))
    step.losses = [torch.tensor(2.0), torch.tensor(1.0)]
    readout.add(step, clock)
    assert json.loads(lines[0])["loss"] == 4.0
    assert json.loads(lines[0])["label_tokens"] == 8
    # In one tensor with the ids: of three labels the first is not predicted, so 1.5 * 4 is the loss of two.
    ids = torch.zeros(1, 4, dtype=torch.int64)
    labels = torch.tensor([[5, 5, -100, 5]])
    own = observer.Observer("", {})
    seen = own.batch_of(None, (), {"input_ids": ids, "labels": labels, "num_items_in_batch": 4})
    stacked = steps.Step(1, 1.0, end=2.0, batches=[seen], adds_losses=True, divisor=4, losses=[1.5])
    readout.add(stacked, clock)
    assert json.loads(lines[1])["loss"] == 3.0
    unknown = steps.Step(2, 1.0, end=2.0, batches=[steps.Batch(1, 4, 4)], adds_losses=True, divisor=8, losses=[3.0])
    readout.add(unknown, clock)
    readout.finish(clock)
    assert json.loads(lines[2])["loss"] == 3.0


def test_groups_that_step_one_by_one_have_the_rates_of_those_that_step_together(
    observer: ModuleType, tmp_path: Path
) -> None:
    """DeepSpeed's ZeRO-1 and 2 give the optimizer one group after the other."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    found = []
    for parts in ([[0, 1]], [[0], [1]], [[0, 1], [0]]):
        own = observer.Observer(str(tmp_path), {})
        step = own.open_step(0.0)
        optimizer = torch.optim.SGD([{"params": [weight], "lr": 0.1} for weight in weights], lr=0.1)
        groups = optimizer.param_groups
        groups[1]["lr"] = 0.2 if parts != [[0, 1], [0]] else 0.3
        for part in parts:
            optimizer.param_groups = [groups[number] for number in part]
            own.after_step(optimizer)
        own.note_rates(step.rates)
        found.append(own.rates.hexdigest())
        assert own.broken is None
    assert found[0] == found[1] != found[2]


def test_the_layout_of_a_batch_is_remembered_for_the_same_shapes_only(observer: ModuleType, tmp_path: Path) -> None:
    own = observer.Observer(str(tmp_path), {})
    looked: list[object] = []
    layouts = sys.modules["paceline_layouts"]
    look = layouts.digests.tensors_in
    layouts.digests = SimpleNamespace(
        tensors_in=lambda *given: looked.append(given) or look(*given), MOST_ELEMENTS=layouts.digests.MOST_ELEMENTS
    )
    ids = torch.arange(8).reshape(2, 4)
    # Arguments, the token ids that must be taken, and whether they have to be looked for.
    cases = [
        ((ids,), {}, ids, True),
        ((ids + 1,), {}, ids + 1, False),
        ((ids.T,), {}, ids.T, True),
        ((ids.float(), ids), {}, ids, True),
        ((ids, ids + 1), {}, ids, True),
        ((ids + 2, ids), {"input_ids": ids + 1}, ids + 1, True),
        ((ids + 2, ids.T), {"input_ids": ids + 3}, ids + 3, True),
        ((ids, None), {}, ids, True),
        ((None, ids), {}, ids, True),
    ]
    for args, kwargs, expected, is_new in cases:
        looked.clear()
        rows = own.batch_of(None, args, kwargs).rows
        assert torch.equal(rows, expected)
        assert rows.data_ptr() != expected.data_ptr()
        assert bool(looked) is is_new
    for number in range(2 * layouts.MOST_LAYOUTS):
        own.batch_of(None, (torch.zeros(1, number + 1, dtype=torch.int64),), {})
    assert len(own.layouts[id(None)]._known) <= layouts.MOST_LAYOUTS
