"""The examples that presets run: what each needs, what it says where it cannot train, and that it trains."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from script_records import record_of

from paceline import examples
from paceline.analysis.findings import CERTIFIED
from paceline.analysis.training.certificate import certify_all
from paceline.campaign.run import controller
from paceline.cli import main
from paceline.contract import Recorder, Seat
from paceline.errors import MissingPackageError, RequestError, UnsupportedError
from paceline.examples import plain_loop, work
from paceline.experiment import expansion
from paceline.experiment.spec import RunSpec
from paceline.training import attachment
from paceline.workloads import script

PRESETS = ("accelerate", "deepspeed", "frameworks", "huggingface", "lightning", "plain-loop", "torchtitan", "trl")


def command_of(spec: RunSpec) -> tuple[str, ...]:
    assert spec.script is not None
    return script.command_of(spec.script, spec)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """As if one package was not installed, and every other one was."""

    def leave(absent: str | None) -> None:
        monkeypatch.setattr(examples, "is_installed", lambda package: package.partition("==")[0] != absent)

    return leave


def test_there_is_a_preset_for_every_example() -> None:
    used = {module for name in PRESETS for module in (command_of(s)[1] for s in expansion.load(name, ["device=cpu"]))}
    assert used == {f"paceline.examples.{name}" for name in examples.EXAMPLES}


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_preset_asks_for_what_its_example_does(
    name: str, device: str, without: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    without(None)
    specs = expansion.load(name, [f"device={device}"])
    for spec in specs:
        script.preflight(spec)
        module = importlib.import_module(command_of(spec)[1])
        trained: list[work.Work] = []
        monkeypatch.setattr(sys, "argv", ["example", *command_of(spec)[2:]])
        work.run(module.__name__.rpartition(".")[2], trained.append)
        assert (trained[0].device, trained[0].steps) == (device, spec.steps)
        assert spec.script is not None
        assert spec.script.code, "a changed example is another one"
    assert name == "frameworks" or len({spec.cell for spec in specs}) > 1


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in ("frameworks", "plain-loop")])
def test_a_missing_framework_is_one_sentence(
    name: str,
    without: Callable[[str | None], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    package = {"huggingface": "transformers", "torchtitan": "torchtitan==0.2.2"}.get(name, name)
    without(package.partition("==")[0])
    assert main(["run", name, "--set", "device=cpu", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    sentence = f"the example {name} needs the package {package}, which is not installed: run `pip install {package}`"
    assert error == f"paceline: {sentence}\n"
    assert list(tmp_path.iterdir()) == []


def test_strategies_that_miss_a_package_leave_the_others(without: Callable[[str | None], None]) -> None:
    without("deepspeed")
    specs = expansion.load("huggingface", ["device=cpu"])
    controller.ask_plugins(specs)
    seat = Seat(rank=0, local_rank=0, world_size=2, device="cpu")
    zero = next(spec for spec in specs if "zero3" in command_of(spec))
    with pytest.raises(MissingPackageError, match=r"run `pip install deepspeed`$"):
        script.run(zero, seat, cast(Recorder, None))


@pytest.mark.parametrize("name", ["accelerate", "huggingface", "trl", "lightning"])
def test_fsdp_that_would_not_be_fsdp_is_refused_on_a_cpu(
    name: str, without: Callable[[str | None], None], tmp_path: Path
) -> None:
    without(None)
    specs = expansion.load(name, ["device=cpu", "strategy=fsdp"])
    with pytest.raises(RequestError, match="the strategy fsdp needs a GPU"):
        controller.campaign(specs, tmp_path, cast(Any, None))
    with pytest.raises(UnsupportedError, match="got the strategy 'fsdp9', expected ddp, fsdp"):
        script.preflight(expansion.load(name, ["device=cpu", "strategy=fsdp9"])[0])


def test_commands_of_users_are_not_looked_at(without: Callable[[str | None], None]) -> None:
    without("torch")
    for command in (["train.py"], ["-m", "trl.scripts.sft"], ["-m"], ["-m", "trl"], ["python", "-m", "x"]):
        examples.require_runnable(command, "cpu")


def test_a_loop_takes_the_steps_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model of torch alone: importing one of transformers takes longer than everything else."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding = torch.nn.Embedding(512, 512)

        def forward(self, input_ids: Any, labels: Any) -> Any:
            logits = self.embedding(input_ids).flatten(0, 1)
            return SimpleNamespace(loss=torch.nn.functional.cross_entropy(logits, labels.flatten()))

    model, updates = Model(), []
    before = model.embedding.weight.detach().clone()
    monkeypatch.setattr(plain_loop, "build_model", lambda _: model)
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: updates.append(self.param_groups[0]["lr"]))
    plain_loop.train(work.work_of(3))
    assert updates == [work.LEARNING_RATE] * 3
    monkeypatch.undo()
    monkeypatch.setattr(plain_loop, "build_model", lambda _: model)
    plain_loop.train(work.work_of(1))
    moved = (model.embedding.weight != before).any(dim=1).nonzero().flatten().tolist()
    assert moved == sorted(set(work.Rows(work.work_of(1)).ids.flatten().tolist()))


LAUNCHES = [
    pytest.param("plain_loop", ("ddp", "fsdp"), id="plain_loop"),
    pytest.param("accelerate", ("ddp", "zero2", "zero3"), id="accelerate"),
    pytest.param("huggingface", ("ddp", "zero2", "zero3"), id="huggingface"),
    pytest.param("trl", ("ddp", "zero3"), id="trl"),
    pytest.param("lightning", ("ddp", "fsdp2"), id="lightning"),
    pytest.param("deepspeed", ("zero0", "zero1", "zero2", "zero3"), id="deepspeed"),
    pytest.param("torchtitan", ("fsdp",), id="torchtitan"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "strategies"), LAUNCHES)
def test_an_example_does_the_same_work_under_each_strategy(
    name: str, strategies: tuple[str, ...], tmp_path: Path
) -> None:
    """The real frameworks, each launch with two ranks of torchrun, as their users start them."""
    if missing := [each for each in examples.EXAMPLES[name].packages if not examples.is_installed(each)]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    records = []
    for number, strategy in enumerate(strategies):
        (folder := tmp_path / strategy).mkdir()
        ours = os.pathsep.join((str(Path(attachment.__file__).parent), os.environ.get("PYTHONPATH", "")))
        variables = {"PYTHONPATH": ours, "PACELINE_OBSERVE": str(folder), "HF_HUB_OFFLINE": "1"}
        words = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", f"paceline.examples.{name}"]
        command = [sys.executable, "-m", *words, "--strategy", strategy, "--steps", "4"]
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1", **variables}, cwd=tmp_path, check=True)
        records.append(record_of(folder, (0, 1), strategy, float(number)))
    for record in records:
        assert {(s.micro_batches, s.samples, s.tokens) for s in record.steps} == {(2, 8, 512)}
        assert [s.step for s in record.steps] == [0, 0, 1, 1, 2, 2, 3, 3]
    certified = certify_all(records)
    assert [(certified[r.spec.run_id].level, certified[r.spec.run_id].differs) for r in records] == [
        (CERTIFIED, ()) for _ in records
    ]
