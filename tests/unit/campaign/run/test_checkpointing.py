"""`checkpointing: auto`: which mode is chosen by arithmetic, by a rehearsal, and where nothing is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from paceline.campaign.run import checkpointing, controller
from paceline.campaign.run.rehearsed import Rehearsed
from paceline.errors import RequestError
from paceline.experiment.spec import RunSpec
from paceline.host.memory_limit import GIB

QLORA = ["device=cuda", "processes=1", "repeats=1"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, float], None]:
    """A machine with one such GPU. A rehearsal fails the test unless the test replaces it."""

    def use(name: str, gib: float) -> None:
        card = SimpleNamespace(name=name, memory_bytes=int(gib * GIB), capability="9.0")
        facts = SimpleNamespace(gpus=(card,), memory_bytes=64 * GIB)
        monkeypatch.setattr(checkpointing.machine, "probe", lambda: facts)

    monkeypatch.setattr(checkpointing.rehearsed, "rehearse_spec", lambda *_: pytest.fail("a rehearsal"))
    return use


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Replaces rehearsals: the peak of each mode in GiB. Returns the modes that are rehearsed."""

    def use(**gib: float) -> list[str]:
        rehearsed: list[str] = []

        def rehearse(spec: RunSpec, major: int, _limit_s: float) -> Rehearsed:
            mode = spec.training.checkpointing
            rehearsed.append(mode)
            assert major == (9 if spec.topology.device == "cuda" else 0)
            if mode not in gib:
                return Rehearsed(components=None, reason="it took too long")
            return Rehearsed(components={"peak": int(gib[mode] * GIB)})

        monkeypatch.setattr(checkpointing.rehearsed, "rehearse_spec", rehearse)
        return rehearsed

    return use


def modes(specs: list[RunSpec]) -> set[str]:
    return {spec.training.checkpointing for spec in specs}


def test_a_large_gpu_needs_no_rehearsal_and_recomputes_nothing(gpu: Callable[[str, float], None]) -> None:
    """QLoRA of a 7B model at 8 x 512: 22.6 GiB by arithmetic; 28 GiB in a rehearsal."""
    gpu("NVIDIA H200", 139.8)
    notes: list[str] = []
    specs = controller.load_own("finetune", QLORA, notify=notes.append)
    assert modes(specs) == {"none"}
    assert notes == ["checkpointing of mistral-7b: none (none needs 22.6 GiB of 140 GiB by arithmetic)"]


def test_what_is_close_is_rehearsed(gpu: Callable[[str, float], None], peaks: Callable[..., list[str]]) -> None:
    gpu("NVIDIA L4", 24.0)
    rehearsed = peaks(none=28.2)
    notes: list[str] = []
    assert modes(controller.load_own("finetune", QLORA, notify=notes.append)) == {"full"}
    assert rehearsed == ["none"], "fine-tuning has two modes, and the last one is not in question"
    assert notes == ["checkpointing of mistral-7b: full (none needs 28.2 GiB of 24 GiB in a rehearsal)"]
    peaks(none=22.7)
    assert modes(controller.load_own("finetune", QLORA)) == {"none"}
    peaks(none=22.9)
    assert modes(controller.load_own("finetune", QLORA)) == {"full"}, "5 % must stay free"


def test_what_is_far_too_large_is_not_rehearsed(gpu: Callable[[str, float], None]) -> None:
    gpu("NVIDIA L4", 10.0)
    notes: list[str] = []
    assert modes(controller.load_own("finetune", QLORA, notify=notes.append)) == {"full"}
    assert "none needs 22.6 GiB of 10 GiB by arithmetic" in notes[0]


def test_pretraining_tries_the_selective_mode_between(
    gpu: Callable[[str, float], None], peaks: Callable[..., list[str]]
) -> None:
    gpu("NVIDIA H200", 80.0)
    rehearsed = peaks(none=90.0, selective=60.0)
    settings = ["device=cuda", "processes=1", "model=llama-1b", "sequence_length=4096", "checkpointing=auto"]
    specs = controller.load_own("strategies", [*settings, "micro_batch=8"])
    assert modes(specs) == {"selective"}
    assert rehearsed == ["none", "selective"], "once each for all strategies, seeds and repeats"


def test_a_rehearsal_that_fails_chooses_what_needs_least(
    gpu: Callable[[str, float], None], peaks: Callable[..., list[str]]
) -> None:
    gpu("NVIDIA L4", 24.0)
    peaks()
    notes: list[str] = []
    assert modes(controller.load_own("finetune", QLORA, notify=notes.append)) == {"full"}
    assert notes == ["checkpointing of mistral-7b: full (none may not fit: it took too long)"]


def test_without_the_device_the_mode_that_needs_least_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing.machine, "probe", lambda: SimpleNamespace(gpus=(), memory_bytes=GIB))
    notes: list[str] = []
    assert modes(controller.load_own("finetune", QLORA, notify=notes.append)) == {"full"}
    assert notes == ["checkpointing of mistral-7b: full (the memory of the devices is not known before the runs)"]


def test_all_cells_of_a_model_get_the_mode_of_the_one_that_needs_most(
    gpu: Callable[[str, float], None], peaks: Callable[..., list[str]]
) -> None:
    gpu("NVIDIA H200", 60.0)
    settings = ["device=cuda", "processes=1", "strategy=ddp", "repeats=1", "checkpointing=auto"]
    assert modes(controller.load_own("strategies", [*settings, "micro_batch=1"])) == {"none"}
    peaks(none=100.0, selective=50.0)
    specs = controller.load_own("strategies", [*settings, "micro_batch=[1,64]"])
    assert {spec.training.micro_batch for spec in specs} == {1, 64}
    assert modes(specs) == {"selective"}, "64 sequences of 2048 tokens need 113 GiB by arithmetic"


def test_a_limit_of_memory_is_what_must_do(peaks: Callable[..., list[str]]) -> None:
    rehearsed = peaks(none=0.02, selective=0.02)
    settings = ["device=cpu", "processes=1", "model=small", "strategy=ddp", "repeats=1", "checkpointing=auto"]
    assert modes(controller.load_own("quick", [*settings, "workload=pretrain:limit_gib=0.01"])) == {"full"}
    assert set(rehearsed) <= {"none", "selective"}


def test_a_run_has_the_id_of_the_mode_that_was_chosen(gpu: Callable[[str, float], None]) -> None:
    gpu("NVIDIA H200", 139.8)
    (asked,) = controller.load_own("finetune", QLORA)
    (given,) = controller.load_own("finetune", [*QLORA, "checkpointing=none"])
    assert asked == given
    assert asked.run_id == given.run_id


def test_what_the_user_names_is_kept(gpu: Callable[[str, float], None]) -> None:
    gpu("NVIDIA H200", 139.8)
    notes: list[str] = []
    specs = controller.load_own("finetune", [*QLORA, "checkpointing=full"], notify=notes.append)
    assert modes(specs) == {"full"}
    assert notes == []
    (spec,) = specs
    with pytest.raises(RequestError, match="checkpointing: got 'some', expected none, full, selective, auto"):
        replace(spec.training, checkpointing="some")
