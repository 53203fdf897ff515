from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.contract import Seat
from paceline.errors import InvalidRunError, MissingPackageError, RequestError, UnsupportedError
from paceline.experiment.choices import Choice
from paceline.experiment.spec import RunSpec
from paceline.host.usage import HostUsage
from paceline.results import store
from paceline.results.records import Status
from paceline.results.samples import read_samples
from paceline.workloads import worker

Make = Callable[..., Any]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), Status.OOM),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"),
            Status.OOM,
        ),
        (RuntimeError("std::bad_alloc"), Status.OOM),
        (OSError(12, "Cannot allocate memory"), Status.OOM),
        (RuntimeError("can't start new thread"), Status.OOM),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: tried"),
            Status.OOM,
        ),
        (RuntimeError("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY"), Status.OOM),
        (RuntimeError("NCCL Error 1: unhandled cuda error; Out of Memory"), Status.OOM),
        (MemoryError(), Status.OOM),
        (RuntimeError("shape mismatch"), Status.FAILED),
        (KeyError("memory"), Status.FAILED),
        (ValueError(""), Status.FAILED),
    ],
)
def test_an_exception_becomes_a_status(error: Exception, status: Status) -> None:
    found, sentence = worker.classify(error)
    assert found is status
    assert sentence.startswith(type(error).__name__)


def test_torchs_own_out_of_memory_is_recognised() -> None:
    torch = pytest.importorskip("torch")
    assert worker.classify(torch.OutOfMemoryError("CUDA out of memory."))[0] is Status.OOM
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert worker.classify(caught.value)[0] is Status.OOM


def test_a_sentence_is_one_line(golden: object) -> None:
    text = worker.classify(RuntimeError("first\nsecond"))[1]
    assert text == golden
    assert "RuntimeError" in text


@pytest.fixture
def seated(
    tmp_path: Path, make_spec: Make, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Status, str | None]]:
    """`attempt` of one rank whose workload raises; the process group is left out."""

    def attempt(error: BaseException | None, world_size: str = "1") -> tuple[Status, str | None]:
        spec: RunSpec = make_spec("ddp", 1)
        run_dir = store.create(tmp_path, spec)

        class Workload:
            def run(self, *_: object) -> None:
                if error is not None:
                    raise error

        monkeypatch.setenv("WORLD_SIZE", world_size)
        monkeypatch.setattr(worker, "join", lambda *_: None)
        monkeypatch.setattr(worker, "leave", lambda: None)
        monkeypatch.setattr(worker, "load", lambda *_: Workload())
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        recorder = worker.FolderRecorder(run_dir, 0)
        try:
            return worker.attempt(run_dir, 0, recorder)
        finally:
            recorder.close()

    return attempt


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (None, Status.OK, None),
        (UnsupportedError("not here"), Status.UNSUPPORTED, "not here"),
        (RequestError("line 151 is no JSON"), Status.UNSUPPORTED, "line 151 is no JSON"),
        (MissingPackageError("deepspeed", "the strategy zero", "'paceline[zero]'"), Status.UNSUPPORTED, "pip install"),
        (InvalidRunError("the loss is nan at step 3"), Status.INVALID, "the loss is nan"),
        (ZeroDivisionError("division by zero"), Status.FAILED, "ZeroDivisionError"),
        (MemoryError("full"), Status.OOM, "MemoryError"),
    ],
)
def test_whatever_a_workload_raises_is_an_outcome(seated: Make, error: Any, status: Status, words: str | None) -> None:
    found, sentence = seated(error)
    assert found is status
    assert (sentence is None) == (words is None)
    assert words is None or words in sentence


def test_ctrl_c_is_not_an_outcome(seated: Make) -> None:
    with pytest.raises(KeyboardInterrupt):
        seated(KeyboardInterrupt())


def test_a_wrong_number_of_processes_is_refused(seated: Make, golden: object) -> None:
    found = seated(None, world_size="3")
    assert found[0] == Status.UNSUPPORTED
    assert found[1] == golden


def test_a_shared_gpu_has_host_names_of_its_own(make_spec: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "PACELINE_SHARED_GPU": "1", "NCCL_HOSTID": ""}.items():
        monkeypatch.setenv(name, value)
    seat = worker.take_seat(make_spec("ddp", 2), rank=1)
    assert (seat.rank, seat.local_rank, seat.world_size) == (1, 0, 2)
    import os

    assert os.environ["NCCL_HOSTID"] == "paceline-rank-1"
    assert os.environ["LOCAL_RANK"] == "0"


def test_samples_and_position_reach_the_folder(tmp_path: Path, make_step: Make) -> None:
    recorder = worker.FolderRecorder(tmp_path, 3)
    recorder.add(make_step(3, 0, loss=2.5))
    recorder.progress(1, "forward")
    assert [s.loss for s in read_samples(tmp_path / "samples-3.jsonl")] == [2.5], "before the file is closed"
    (position,) = store.read_progress(tmp_path)
    assert (position.rank, position.step, position.phase, position.loss) == (3, 1, "forward", 2.5)
    recorder.close()


def test_the_live_peak_is_read_once_a_second(tmp_path: Path, make_step: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    readings, now = iter((5_000, 3_000)), 100.0
    monkeypatch.setattr(worker, "peak_bytes", lambda device: next(readings))
    monkeypatch.setattr(worker.time, "monotonic", lambda: now)
    recorder = worker.FolderRecorder(tmp_path, 0)

    def told() -> int | None:
        recorder.add(make_step(0, 1))
        recorder.progress(1, "data")
        return store.read_progress(tmp_path)[0].peak_bytes

    assert told() is None, "no device is known yet"
    recorder.device = "cpu"
    assert (told(), told()) == (5_000, 5_000)
    now += 2
    assert told() == 5_000, "the counter is set back once per run, the peak so far is not"
    recorder.close()


# --- gauges ---


def gauges_of(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.glob("samples-gauges-*"))


@pytest.mark.usefixtures("no_gpu")
def test_the_first_rank_of_a_host_leaves_gauges_from_set_up_to_the_end(tmp_path: Path, make_spec: Make) -> None:
    spec = make_spec("ddp", 2, nodes=2)
    for rank, local_rank in ((2, 0), (3, 1)):
        with worker.gauged(tmp_path, spec, Seat(rank=rank, local_rank=local_rank, world_size=4, device="cpu")):
            pass
    assert gauges_of(tmp_path) == ["samples-gauges-2.jsonl"]
    first, last = read_samples(tmp_path / "samples-gauges-2.jsonl")
    assert (first.kind, first.rank, first.host, first.device) == ("gauge", 2, socket.gethostname(), None)
    assert first.memory_used_bytes > 0
    assert first.at_s <= last.at_s
    assert 0 < first.usage["own_s"] <= last.usage["own_s"] < last.usage["busy_s"]
    assert HostUsage.from_dict(last.usage).cores == len(os.sched_getaffinity(0))


@pytest.mark.usefixtures("no_gpu")
def test_gauges_are_kept_of_a_run_that_breaks(tmp_path: Path, make_spec: Make) -> None:
    seat = Seat(rank=0, local_rank=0, world_size=1, device="cpu")
    with pytest.raises(ZeroDivisionError), worker.gauged(tmp_path, make_spec("ddp", 1), seat):
        raise ZeroDivisionError
    assert len(list(read_samples(tmp_path / "samples-gauges-0.jsonl"))) == 2


def test_no_gauges_where_none_are_wanted(tmp_path: Path, make_spec: Make) -> None:
    seat = Seat(rank=0, local_rank=0, world_size=1, device="cpu")
    with worker.gauged(tmp_path, make_spec("ddp", 1, telemetry_hz=0.0), seat):
        pass
    assert gauges_of(tmp_path) == []


def test_ranks_that_share_a_gpu_read_it_once(
    tmp_path: Path, make_spec: Make, fake_nvml: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_SHARED_GPU", "1")
    for rank in (0, 1):
        with worker.gauged(
            tmp_path, make_spec("ddp", 2, device="cuda"), Seat(rank=rank, local_rank=0, world_size=2, device="cuda")
        ):
            pass
    assert gauges_of(tmp_path) == ["samples-gauges-0.jsonl"]
    assert {s.device for s in read_samples(tmp_path / "samples-gauges-0.jsonl")} == {None, 0}
    assert fake_nvml.opened == 0


@pytest.mark.parametrize(("engine", "read"), [("vllm:tensor_parallel=2", {None, 0, 1}), ("vllm", {None, 0})])
@pytest.mark.usefixtures("fake_nvml")
def test_all_gpus_of_a_replica_are_read(tmp_path: Path, make_spec: Make, engine: str, read: set[int | None]) -> None:
    spec = dataclasses.replace(make_spec("ddp", 1, device="cuda"), engine=Choice.parse(engine))
    with worker.gauged(tmp_path, spec, Seat(rank=0, local_rank=0, world_size=1, device="cuda")):
        pass
    assert {s.device for s in read_samples(tmp_path / "samples-gauges-0.jsonl")} == read


def test_checkpoints_stand_in_the_run_folder_or_where_the_launcher_says(
    make_spec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: object
) -> None:
    monkeypatch.delenv("PACELINE_CHECKPOINTS", raising=False)
    monkeypatch.delenv("PACELINE_SPEC", raising=False)
    plain, kept = make_spec("ddp"), make_spec("ddp", checkpoint_every=2)
    assert worker.checkpoint_folder(kept, tmp_path) == str(tmp_path / "checkpoints")
    monkeypatch.setenv("PACELINE_SPEC", "{}")
    assert worker.checkpoint_folder(plain, tmp_path) == str(tmp_path / "checkpoints"), "nothing is written there"
    with pytest.raises(UnsupportedError) as caught:
        worker.checkpoint_folder(kept, tmp_path)
    assert str(caught.value) == golden
    assert "PACELINE_CHECKPOINTS" in str(caught.value)
    monkeypatch.setenv("PACELINE_CHECKPOINTS", "/volume")
    assert worker.checkpoint_folder(kept, tmp_path) == "/volume"
