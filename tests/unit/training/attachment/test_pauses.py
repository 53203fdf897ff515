"""Pauses and evaluations are left out of steps once, wherever they begin and end. The clock is one that tests set."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

from paceline.training import attachment  # noqa: E402


class Script:
    """The calls that a script makes, each with the seconds that it takes."""

    def __init__(self, observer: ModuleType, folder: Path) -> None:
        self.now = 0.0
        self.lines: list[str] = []
        self.own = own = observer.Observer(str(folder), {})
        own.clock = sys.modules["paceline_clocks"].HostClock()
        own.clock.mark = lambda: self.now
        own.readout = sys.modules["paceline_steps"].Readout(self.lines.append)
        own.open_file = own.write_facts = lambda: None
        own.root, own.facts = torch.nn.Linear(1, 1), {"device": "cpu", "parameters": 2}
        self.optimizer = torch.optim.SGD(own.root.parameters(), lr=0.1)
        own.stepped[id(self.optimizer)] = self.optimizer, -1
        self.ids = torch.zeros(1, 4, dtype=torch.int64)

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def forward(self, seconds: float) -> None:
        self.own.before_forward(self.own.root, (self.ids,), {})
        self.wait(seconds)
        self.own.after_forward(self.own.root, (self.ids,), {}, None)

    def train(self) -> None:
        """Four seconds: one for the forward pass, one for the optimizer, two in between."""
        self.own.root.train()
        self.forward(1)
        self.wait(2)
        self.own.before_step(self.optimizer)
        self.wait(1)
        self.own.after_step(self.optimizer)

    def evaluate(self) -> None:
        self.own.root.eval()
        with torch.no_grad():
            self.forward(32)
            self.forward(32)

    def evaluate_with_gradients(self) -> None:
        """As scripts do that forget `no_grad`."""
        self.own.root.eval()
        self.forward(32)
        self.forward(32)

    def pause(self, *work: Callable[[], None]) -> None:
        self.own.begin_pause()
        for each in work:
            each()
        self.own.end_pause()

    def tracked(self, *work: Callable[[], None]) -> None:
        self.own.begin_tracked(None)
        for each in work:
            each()
        self.own.end_tracked()

    def steps(self) -> list[tuple[float, float | None]]:
        """The duration and the wait for data of every step after the first."""
        self.own.close_step()
        self.own.readout.finish(self.own.clock)
        assert self.own.broken is None
        rows = [json.loads(line) for text in self.lines for line in text.splitlines()]
        return [(row["duration_s"], row["data_wait_s"]) for row in rows[1:]]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Script]:
    monkeypatch.syspath_prepend(str(Path(attachment.__file__).parent))
    import paceline_observer

    yield Script(paceline_observer, tmp_path)
    for name in [name for name in sys.modules if name.startswith("paceline_")]:
        del sys.modules[name]


def save(script: Script) -> None:
    script.wait(100)


@pytest.mark.parametrize(
    "between",
    [
        lambda s: None,
        lambda s: s.pause(lambda: save(s)),
        lambda s: s.evaluate(),
        lambda s: s.evaluate_with_gradients(),
        lambda s: s.pause(s.evaluate),
        lambda s: s.pause(lambda: save(s), s.evaluate, lambda: save(s)),
        lambda s: s.pause(lambda: save(s), s.evaluate_with_gradients, lambda: save(s)),
        lambda s: (s.evaluate_with_gradients(), s.pause(lambda: save(s)), s.evaluate()),
        lambda s: (s.evaluate(), s.pause(lambda: save(s))),
        lambda s: (s.pause(lambda: save(s)), s.evaluate()),
        # Hugging Face's callback begins a pause after each step, log, evaluation and checkpoint; the last does not end.
        lambda s: (s.own.begin_pause(), s.wait(100), s.evaluate(), s.own.end_pause(), s.own.begin_pause()),
    ],
)
def test_a_pause_between_steps_is_left_out_of_the_next(script: Script, between: Callable[[Script], object]) -> None:
    for _ in range(4):
        script.train()
        between(script)
    assert script.steps() == [(4, 0)] * 3


def test_waiting_for_data_after_a_pause_counts(script: Script) -> None:
    for _ in range(4):
        script.train()
        script.pause(lambda: save(script), script.evaluate)
        script.wait(8)
    assert script.steps() == [(12, 8)] * 3


@pytest.mark.parametrize("evaluates", [True, False], ids=["evaluation", "gradients of inputs"])
def test_evaluation_with_gradients_is_left_out_unless_its_inputs_learn(script: Script, evaluates: bool) -> None:
    """Adversarial training makes its examples in evaluation mode: that is work of the step, of the same samples."""
    for _ in range(4):
        script.train()
        plain = script.ids
        script.ids = plain if evaluates else torch.zeros(1, 4, requires_grad=True)
        script.evaluate_with_gradients()
        script.ids = plain
    assert script.steps() == [(4 if evaluates else 68, 0)] * 3
    rows = [json.loads(line) for text in script.lines for line in text.splitlines()]
    assert [(row["tokens"], row["micro_batches"]) for row in rows] == [(4, 1)] * 4


def test_pauses_between_micro_batches_are_left_out_of_their_step(script: Script) -> None:
    for _ in range(4):
        script.forward(1)
        script.pause(lambda: save(script), script.evaluate)
        script.own.root.train()
        script.train()
    assert script.steps() == [(5, 0)] * 3


@pytest.mark.parametrize(
    "between",
    [
        lambda s: None,
        lambda s: s.pause(lambda: save(s)),
        lambda s: s.evaluate(),
        lambda s: s.evaluate_with_gradients(),
        lambda s: s.pause(s.evaluate),
        lambda s: (s.own.begin_pause(), save(s)),
    ],
)
def test_what_is_between_marked_steps_is_in_none_of_them(script: Script, between: Callable[[Script], object]) -> None:
    for _ in range(4):
        script.tracked(lambda: script.wait(16), script.train)
        between(script)
    assert script.steps() == [(20, 16)] * 3


def test_a_pause_inside_a_marked_step_is_left_out_of_it(script: Script) -> None:
    for _ in range(4):
        script.tracked(script.train, lambda: script.pause(script.evaluate), lambda: script.wait(2))
    assert script.steps() == [(6, 0)] * 3
