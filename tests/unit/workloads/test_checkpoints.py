"""Checkpoints by hand: written whole or not at all, found again, and refused where they are damaged or another's."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from paceline.contract import Seat  # noqa: E402
from paceline.errors import CheckpointError, InvalidRunError, RequestError, UnsupportedError  # noqa: E402
from paceline.experiment.spec import RunSpec  # noqa: E402
from paceline.results.records import CheckpointSample, StartSample  # noqa: E402
from paceline.training.instruments import Weights  # noqa: E402
from paceline.training.strategies import single  # noqa: E402
from paceline.workloads import _checkpoints  # noqa: E402
from paceline.workloads._checkpoints import MARKER, Checkpointer  # noqa: E402

Make = Callable[..., Any]


@pytest.fixture(scope="module", autouse=True)
def _group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Counter:
    """A trainer whose state is a number."""

    def __init__(self) -> None:
        self.state, self.fails = 0, False

    def save(self, folder: Path) -> None:
        (folder / "state").write_text(str(self.state))
        if self.fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def load(self, folder: Path) -> None:
        self.state = int((folder / "state").read_text())


class Notes:
    """A recorder that remembers."""

    def __init__(self) -> None:
        self.samples: list[Any] = []

    def add(self, sample: Any) -> None:
        self.samples.append(sample)

    def progress(self, step: int, phase: str) -> None: ...
    def conclude(self, evidence: Any) -> None: ...


@pytest.fixture
def spec(make_spec: Make) -> RunSpec:
    found: RunSpec = replace(make_spec("single", 1, steps=12), checkpoint_every=2, lineage="a1")
    return found


@pytest.fixture
def keep(tmp_path: Path, spec: RunSpec) -> Make:
    def make(trainer: Any = None, initial: str = "w0", **changes: Any) -> Any:
        seat = Seat(rank=0, local_rank=0, world_size=1, device="cpu", checkpoints=str(tmp_path))
        weights = Weights(digest=initial, by_name={}, count=1)
        return Checkpointer(replace(spec, **changes), seat, trainer or Counter(), Notes(), weights)

    return make


def saved(checkpoints: Any, *steps: int) -> Any:
    for step in steps:
        checkpoints.trainer.state = step
        checkpoints.save(step, 0.0)
    return checkpoints


def test_the_last_of_two_that_are_kept_is_gone_on_from(keep: Make) -> None:
    first = saved(keep(), 2, 4, 6)
    assert sorted(path.name for path in first.home.iterdir()) == ["step-00000004", "step-00000006"]
    second = keep()
    assert (second.resume(), second.trainer.state) == (6, 6)
    samples = first.recorder.samples
    assert [(s.step, s.bytes > 0) for s in samples if isinstance(s, CheckpointSample)] == [
        (2, True),
        (4, True),
        (6, True),
    ]


def test_nothing_to_go_on_from_is_step_0(keep: Make) -> None:
    checkpoints = keep()
    assert checkpoints.resume() == 0
    checkpoints.begin(0)
    (start,) = checkpoints.recorder.samples
    assert isinstance(start, StartSample)
    assert (start.step, start.setup_s >= 0) == (0, True)


def test_checkpoints_are_due_between_steps_alone(keep: Make) -> None:
    assert [step for step in range(1, 13) if keep().is_due(step)] == [2, 4, 6, 8, 10], "none after the last of 12"
    assert not any(keep(checkpoint_every=None, max_restarts=1).is_due(step) for step in range(1, 13))


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "state").write_text("7"),
        lambda folder: (folder / "state").write_text("66"),
        lambda folder: (folder / "state").unlink(),
        lambda folder: (folder / MARKER).unlink(),
        lambda folder: (folder / MARKER).write_text("{"),
    ],
    ids=["changed", "longer", "missing", "unfinished", "marker"],
)
def test_of_a_damaged_one_the_one_before_is_used(
    keep: Make, damage: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    home = saved(keep(), 4, 6).home
    damage(home / "step-00000006")
    checkpoints = keep()
    assert (checkpoints.resume(), checkpoints.trainer.state) == (4, 4)
    assert (home / "step-00000006" / MARKER).exists() == ("is damaged" in capfd.readouterr().err)


def test_both_damaged_is_starting_over(keep: Make) -> None:
    home = saved(keep(), 4, 6).home
    for folder in home.iterdir():
        (folder / "state").write_text("")
    assert keep().resume() == 0


def test_a_checkpoint_of_another_run_is_refused(keep: Make, spec: RunSpec, golden: object) -> None:
    """Somebody copied it there: the folder's name holds the run and its launch."""
    theirs = saved(keep(seed=7), 2)
    (theirs.home).rename(keep().home)
    with pytest.raises(RequestError) as caught:
        keep().resume()
    assert str(caught.value) == golden
    assert f"{spec.run_id}" in str(caught.value)


def test_another_launch_of_the_same_run_has_its_own(keep: Make) -> None:
    saved(keep(), 2)
    assert keep(lineage="b2").resume() == 0


def test_an_attempt_that_began_with_other_weights_is_invalid(keep: Make, golden: object) -> None:
    saved(keep(), 2)
    with pytest.raises(InvalidRunError) as caught:
        keep(initial="w1").resume()
    assert str(caught.value) == golden
    assert "w0" in str(caught.value)
    assert "w1" in str(caught.value)


def test_a_full_disk_keeps_the_old_one_and_leaves_no_part(keep: Make, golden: object) -> None:
    checkpoints = saved(keep(), 2)
    checkpoints.trainer.fails = True
    with pytest.raises(CheckpointError) as caught:
        saved(checkpoints, 4)
    assert str(caught.value) == golden
    assert "step-00000002" in str(caught.value)
    assert [path.name for path in checkpoints.home.iterdir()] == ["step-00000002"]
    assert keep().resume() == 2


def test_a_part_of_a_killed_rank_is_no_checkpoint_and_is_overwritten(keep: Make) -> None:
    home = saved(keep(), 2).home
    left = home / "step-00000004.partial"
    left.mkdir()
    (left / "rubbish").touch()
    checkpoints = keep()
    assert checkpoints.resume() == 2
    saved(checkpoints, 4)
    assert not left.exists()
    assert "rubbish" not in json.loads((home / "step-00000004" / MARKER).read_text())["files"]


def test_a_run_that_ended_leaves_none(keep: Make, tmp_path: Path) -> None:
    checkpoints = saved(keep(), 2, 4)
    checkpoints.remove()
    assert not checkpoints.home.exists()


def test_a_folder_that_another_node_does_not_see_is_refused(
    keep: Make, monkeypatch: pytest.MonkeyPatch, golden: object
) -> None:
    monkeypatch.setattr(_checkpoints, "_appears", lambda path: False)
    checkpoints = keep()
    with pytest.raises(UnsupportedError) as caught:
        checkpoints.resume()
    assert str(caught.value) == golden
    assert "PACELINE_CHECKPOINTS" in str(caught.value)
    assert list(checkpoints.home.iterdir()) == [], "nothing is left of the question"


def test_a_strategy_without_save_is_refused(keep: Make, golden: object) -> None:
    with pytest.raises(UnsupportedError) as caught:
        keep(trainer=object())
    assert str(caught.value) == golden
    assert keep(trainer=object(), checkpoint_every=None, max_restarts=1).resume() == 0


def trained(trainer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        tokens = torch.randint(0, 256, (1, 17), generator=torch.Generator().manual_seed(step))
        loss = trainer.forward(tokens[:, :-1], tokens[:, 1:], torch.tensor(16.0), True)
        trainer.backward(loss, True)
        losses += [float(loss.detach()), float(trainer.update())]
    return losses


@pytest.mark.parametrize("precision", ["fp32", "bf16/bf16", "fp16"])
def test_a_trainer_that_went_on_is_the_one_that_never_stopped(make_spec: Make, tmp_path: Path, precision: str) -> None:
    """To the last bit: weights, master weights, moments, loss scale and what was counted."""
    spec = make_spec("single", 1, model="tiny:layers=1,hidden=64", precision=precision, accumulation=1)
    seat = Seat(rank=0, local_rank=0, world_size=1, device="cpu")
    whole: Any = single.wrap(spec, seat)
    trained(whole, range(3))
    whole.save(tmp_path)
    later: Any = single.wrap(spec, seat)
    later.load(tmp_path)
    assert trained(later, range(3, 6)) == trained(whole, range(3, 6))
    assert later.updates == whole.updates
    pairs = zip(later.module.parameters(), whole.module.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_disk_that_is_full_under_torch_is_a_sentence(make_spec: Make, tmp_path: Path, golden: object) -> None:
    """torch's own exception is no Exception, and would end the rank without an outcome."""
    trainer: Any = single.wrap(
        make_spec("single", 1, model="tiny:layers=1,hidden=64"), Seat(rank=0, local_rank=0, world_size=1, device="cpu")
    )
    file = tmp_path / "no folder"
    file.touch()
    with pytest.raises(CheckpointError) as caught:
        trainer.save(file)
    assert str(caught.value) == golden
