"""CUDA events are recorded again only when nothing will read their times any more: with a stand-in for torch's events,
a device that lags behind, and scripts that do what scripts do in any order."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from paceline.training import attachment  # noqa: E402

MODEL, OTHER = torch.device("cuda", 1), torch.device("cuda", 2)


class Device:
    """Events in the order in which they were recorded. The device is `lag` events behind the host."""

    def __init__(self) -> None:
        self.recorded = self.created = self.lag = 0
        self.own: Any = None

    def event(self, enable_timing: bool = False) -> Event:
        self.created += 1
        return Event(self)

    def events_to_read(self) -> set[int]:
        """Those that closed steps or the open step will read, or that a step may yet get."""
        own = self.own
        steps = [*own.readout.held, *(step for group in own.readout.groups for step in group.steps), own.step]
        marks = [own.last_end, own.paused_at, own.pause_began, own.forward_began]
        for step in filter(None, steps):
            marks += [step.begin, step.end, *(mark for span in step.spans for mark in span[1:])]
        marks += [mark for span in own.pauses for mark in span[1:]]
        return {id(mark) for mark in marks if mark is not None}


class Event:
    """As torch's: it belongs to the device on which it was first recorded; its time is there once that passed it."""

    def __init__(self, device: Device) -> None:
        self.device, self.at = device, 0
        self.index: int | None = None

    def record(self, stream: int) -> None:
        assert self.index in (None, stream), "recorded on another device"
        assert self.at == 0 or id(self) not in self.device.events_to_read(), "recorded again before it was read"
        self.index = stream
        self.device.recorded += 1
        self.at = self.device.recorded

    def elapsed_time(self, later: Event) -> float:
        assert self.query(), "read before the device had passed it"
        assert later.query(), "read before the device had passed it"
        assert self.index == later.index == MODEL.index
        return 1000.0 * (later.at - self.at)

    def query(self) -> bool:
        return self.at <= self.device.recorded - self.device.lag

    def synchronize(self) -> None:
        self.device.lag = 0


class Script:
    """A script under an observer, which gets the calls of its hooks."""

    def __init__(self, observer: ModuleType, folder: Path, device: Device, reuses: bool) -> None:
        self.own = own = observer.Observer(str(folder), {})
        self.device, device.own = device, own
        self.lines: list[str] = []
        own.readout = sys.modules["paceline_steps"].Readout(self.lines.append)
        # A busy host would end groups at other steps.
        sys.modules["paceline_steps"].GROUP_S = 1e9
        own.use_clock_of(MODEL)
        if not reuses:
            own.clock.reuse = lambda steps: None
        own.open_file = own.write_facts = lambda: None
        own.root, own.facts = torch.nn.Linear(1, 1), {"device": "cpu", "parameters": 2}
        self.optimizers = [torch.optim.SGD(own.root.parameters(), lr=0.1) for _ in range(2)]
        own.stepped |= {id(each): (each, -1) for each in self.optimizers}
        self.ids = torch.zeros(1, 4, dtype=torch.int64)

    def forward(self) -> None:
        self.own.before_forward(self.own.root, (self.ids,), {})
        self.own.after_forward(self.own.root, (self.ids,), {}, None)

    def backward(self) -> None:
        begin = self.own.before_backward(None)
        self.own.backward_depth -= 1
        if begin is not None:
            self.own.after_backward(begin, None)

    def update(self) -> None:
        self.own.before_step(self.optimizers[0])
        self.own.after_step(self.optimizers[0])

    def update_two(self) -> None:
        for optimizer in self.optimizers:
            self.own.before_step(optimizer)
            self.own.after_step(optimizer)

    def update_with_closure(self) -> None:
        self.own.before_step(self.optimizers[0])
        self.forward()
        self.backward()
        self.own.after_step(self.optimizers[0])

    def update_that_fails(self) -> None:
        self.own.before_step(self.optimizers[0])

    def evaluate(self) -> None:
        self.own.root.eval()
        with torch.no_grad():
            self.forward()
        self.own.root.train()

    def begin_pause(self) -> None:
        self.own.begin_pause()

    def end_pause(self) -> None:
        self.own.end_pause()

    def begin_tracked(self) -> None:
        self.own.begin_tracked(None)

    def end_tracked(self) -> None:
        self.own.end_tracked()

    def lag_behind(self) -> None:
        self.device.lag = 100

    def catch_up(self) -> None:
        self.device.lag = 0

    def rows(self) -> list[dict[str, Any]]:
        self.own.close_step()
        self.own.readout.finish(self.own.clock)
        assert self.own.broken is None
        return [json.loads(line) for text in self.lines for line in text.splitlines()]


@pytest.fixture
def observer(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(Path(attachment.__file__).parent))
    import paceline_observer

    yield paceline_observer
    for name in [name for name in sys.modules if name.startswith("paceline_")]:
        del sys.modules[name]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    # A stream is the number of its device, and the script has made no device current.
    monkeypatch.setattr(torch.cuda, "current_stream", lambda number=0: number)
    return found


def run(observer: ModuleType, folder: Path, device: Device, calls: list[str], reuses: bool) -> list[dict[str, Any]]:
    device.recorded = device.created = device.lag = 0
    script = Script(observer, folder, device, reuses)
    for call in calls:
        getattr(script, call)()
        assert script.own.broken is None, script.own.broken
    return script.rows()


def test_an_ordinary_script_gets_the_times_of_new_events_from_few(
    observer: ModuleType, tmp_path: Path, device: Device
) -> None:
    """Two micro batches, an evaluation and a pause in each step. One more second passes with each event."""
    calls = [*["forward", "backward"] * 2, "update", "evaluate", "begin_pause", "end_pause"] * 100
    new = run(observer, tmp_path, device, calls, reuses=False)
    created = device.created
    assert run(observer, tmp_path, device, calls, reuses=True) == new
    assert device.created < created / 2
    assert len(new) == 100
    # A group that is copied between the marks of a forward pass has one of its own.
    assert {row["forward_s"] for row in new} <= {2.0, 3.0}
    assert {row["backward_s"] for row in new} == {2.0}


@pytest.mark.parametrize("seed", range(20))
def test_no_event_is_recorded_again_before_it_is_read(
    observer: ModuleType, tmp_path: Path, device: Device, seed: int
) -> None:
    chosen = random.Random(seed)
    rare = ["update_two", "update_with_closure", "update_that_fails", "evaluate", "begin_pause", "end_pause"]
    rare += ["begin_tracked", "end_tracked", "lag_behind", "catch_up", "backward", "forward"]
    calls: list[str] = []
    for _ in range(150):
        calls += ["forward", "backward", "update"] if chosen.random() < 0.7 else []
        calls += chosen.sample(rare, chosen.choice((0, 0, 1, 3)))
    # Marked steps end before the last ordinary one, so that there is something to compare.
    calls += ["end_tracked", "forward", "backward", "update", "forward"]
    new = run(observer, tmp_path, device, calls, reuses=False)
    created = device.created
    assert run(observer, tmp_path, device, calls, reuses=True) == new
    assert len(new) > 50
    assert device.created < created


def test_numbers_are_waited_for_on_each_device_that_has_some(
    observer: ModuleType, tmp_path: Path, device: Device
) -> None:
    """A model over two GPUs may return its loss on the second."""
    marks = sys.modules["paceline_clocks"].marks_on({MODEL, OTHER, torch.device("cpu")})
    assert {mark.index for mark in marks} == {1, 2}
    assert sys.modules["paceline_clocks"].HostClock().devices == frozenset()


def test_an_event_that_cannot_be_recorded_does_not_reach_the_script(
    observer: ModuleType, tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(observer, tmp_path, device, reuses=True)
    script.forward()

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(script.own.clock, "mark", fail)
    script.backward()
    assert script.own.broken == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert script.own.backward_depth == 0


def test_marks_of_the_host_are_forgotten_when_a_model_on_a_gpu_appears(
    observer: ModuleType, tmp_path: Path, device: Device
) -> None:
    own = observer.Observer(str(tmp_path), {})
    own.begin_pause()
    step = own.open_step(own.clock.mark())
    step.spans.append(("forward", 1.0, 2.0))
    device.own = own
    own.use_clock_of(MODEL)
    own.end_pause()
    step.end = own.clock.mark()
    assert step.seconds(own.clock) == {}
    assert own.clock.elapsed_s(step.begin, step.end) == 1.0
