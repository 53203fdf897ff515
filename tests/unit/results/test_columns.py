"""Columns of a sealed run: the same samples as the lines that they replace."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import DamagedRunError
from paceline.results import columns, samples, sealing, store
from paceline.results.records import GaugeSample, MemorySample, RunRecord, Status

Make = Callable[..., Any]
MEMORY = MemorySample(
    rank=1, moment="steps", allocated_bytes=None, reserved_bytes=None, device_bytes=None, resident_bytes=2**28
)


@pytest.fixture
def unsealed(tmp_path: Path, make_spec: Make, make_run: Make) -> Path:
    folder: Path = make_run(tmp_path, make_spec("ddp", 2))
    (folder / sealing.FILE).unlink()
    with (folder / "samples-1.jsonl").open("a") as lines:
        lines.write(store.sample_line(MEMORY))
    return folder


@pytest.fixture
def run_dir(unsealed: Path) -> Path:
    """A run that the controller has read and sealed."""
    seal(unsealed)
    return unsealed


def seal(folder: Path) -> None:
    store.seal(folder, Status.OK, None, 0.0, 1.0, steps=from_lines(folder).steps)


def from_lines(folder: Path) -> RunRecord:
    return store.read_unsealed(folder, started_at=0.0, ended_at=1.0)


def test_columns_replace_the_lines(unsealed: Path) -> None:
    expected = from_lines(unsealed)
    seal(unsealed)
    assert not {path.name for path in unsealed.iterdir()} & {"samples-0.jsonl", "samples-1.jsonl"}
    record = store.read_run(unsealed)
    assert list(record.steps) == list(expected.steps)
    assert len(record.steps) == 2 * record.spec.steps
    assert record.memory == expected.memory == (MEMORY,)


def test_samples_can_be_written_as_lines_again(unsealed: Path) -> None:
    written = [line for name in ("samples-0.jsonl", "samples-1.jsonl") for line in (unsealed / name).open()]
    seal(unsealed)
    assert sorted(store.sample_lines(store.read_run(unsealed))) == sorted(written)


@pytest.mark.parametrize("seals_again", [True, False])
def test_a_controller_that_was_killed_while_it_sealed(
    unsealed: Path, monkeypatch: pytest.MonkeyPatch, seals_again: bool
) -> None:
    """Before the seal was written the lines count; afterwards those that it did not remove any more are ignored."""
    expected = from_lines(unsealed)
    lines = {path: path.read_text() for path in unsealed.glob("samples-*.jsonl")}
    if seals_again:
        with monkeypatch.context() as patch:
            patch.setattr(sealing, "write_atomically", lambda *_, **__: pytest.fail("killed"))
            with pytest.raises(pytest.fail.Exception):
                seal(unsealed)
        assert (unsealed / columns.OTHERS).exists()
        again = from_lines(unsealed)
        assert (list(again.steps), again.memory) == (list(expected.steps), expected.memory)
    seal(unsealed)
    for path, text in lines.items():
        path.write_text(text)
    record = store.read_run(unsealed)
    assert (list(record.steps), record.memory) == (list(expected.steps), expected.memory)


def test_a_line_that_came_while_the_run_was_sealed_is_damage(unsealed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = unsealed / "samples-1.jsonl"

    def write_late(path: Path, text: str, durable: bool) -> None:
        path.write_text(text)
        with late.open("a") as lines:
            lines.write(store.sample_line(MEMORY))

    monkeypatch.setattr(sealing, "write_atomically", write_late)
    seal(unsealed)
    with pytest.raises(DamagedRunError, match=r"samples-1\.jsonl was added after the run ended"):
        store.read_run(unsealed)


def test_a_line_that_was_cut_off_stays(unsealed: Path) -> None:
    with (unsealed / "samples-1.jsonl").open("a") as lines:
        lines.write('{"kind": "st')
    seal(unsealed)
    assert (unsealed / "samples-1.jsonl").exists()
    assert len(store.read_run(unsealed).steps) == len(from_lines(unsealed).steps)


def test_a_reading_that_was_cut_off_is_left_out(unsealed: Path) -> None:
    """A host's gauges end when their thread is stopped."""
    gauge = GaugeSample(rank=0, host="a", at_s=1.0, device=None)
    (unsealed / "samples-gauges-0.jsonl").write_text(store.sample_line(gauge) + '{"kind": "gau')
    seal(unsealed)
    assert store.read_run(unsealed).gauges == (gauge,)


def test_a_series_is_handed_over_without_what_was_derived(run_dir: Path) -> None:
    steps = store.read_run(run_dir).steps
    assert isinstance(steps, samples.StepSeries)
    steps.derived["large",] = [0] * 1000
    received = pickle.loads(pickle.dumps(steps))  # noqa: S301 (ours)
    assert received == steps
    assert received.derived == {}


def test_numpy_reads_the_file(run_dir: Path) -> None:
    loaded = np.load(run_dir / columns.FILE)
    steps = store.read_run(run_dir).steps
    assert loaded["duration_s"].tolist() == [step.duration_s for step in steps]
    assert loaded["rank"].tolist() == [step.rank for step in steps]
    assert "leader" not in loaded.dtype.names, "no step has a leader"


def test_values_are_kept_exactly(tmp_path: Path, make_step: Make) -> None:
    """The largest digest, a tiny duration, a loss that is not a number."""
    steps = [
        make_step(0, 0, data_digest=2**64 - 1, duration_s=5e-324),
        make_step(0, 1, data_digest=0, loss=float("inf")),
    ]
    (tmp_path / "samples-0.jsonl").write_text("".join(map(store.sample_line, steps)))
    (tmp_path / "spec.json").write_text("{}")
    store.seal(tmp_path, Status.OK, None, 0.0, 1.0, steps=steps)
    assert list(columns.read(tmp_path, sealing.read(tmp_path)) or ()) == steps


def test_a_value_that_some_steps_lack_stays_in_the_lines(tmp_path: Path, make_step: Make) -> None:
    steps = samples.StepSeries.of([make_step(0, 0, grad_norm=1.0), make_step(0, 1, grad_norm=None)])
    (tmp_path / "samples-0.jsonl").write_text("".join(map(store.sample_line, steps)))
    assert not columns.write(tmp_path, steps)
    assert not (tmp_path / columns.FILE).exists()


STEP = b'{"kind": "step", "rank": 0}'


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", b""),
        (STEP, b""),
        (STEP + b"\n", b""),
        (STEP + b"\n" + STEP + b"\na\n" + STEP + b"\nb\nc\n" + STEP + b"\n", b"a\nb\nc"),
        (b"a\n" + STEP + b"\nb\ncut o", b"a\nb"),
        (b"cut off", b""),
        (STEP + b"\n\na\n", b"\na"),
    ],
)
def test_the_lines_of_a_file_that_are_not_steps(content: bytes, expected: bytes) -> None:
    assert samples.without_steps(content) == expected


@pytest.mark.parametrize("name", ["samples-0.1.jsonl", "samples-attempts.jsonl"])
def test_a_run_with_lost_attempts_has_no_columns(unsealed: Path, name: str) -> None:
    steps = from_lines(unsealed).steps
    (unsealed / name).write_text("")
    assert not columns.write(unsealed, samples.StepSeries.of(steps))


def test_a_step_beside_the_columns_is_damage(run_dir: Path, make_step: Make, reseal: Make) -> None:
    (run_dir / columns.OTHERS).write_text(store.sample_line(make_step(0, 0)))
    reseal(run_dir)
    with pytest.raises(DamagedRunError, match="a step is not among the columns"):
        store.read_run(run_dir)


def test_columns_that_were_changed_or_removed_are_damage(run_dir: Path, reseal: Make) -> None:
    content = (run_dir / columns.FILE).read_bytes()
    (run_dir / columns.FILE).write_bytes(content[:-1] + b"\x01")
    with pytest.raises(DamagedRunError, match=r"steps\.npy was changed after the run ended"):
        store.read_run(run_dir)
    (run_dir / columns.FILE).unlink()
    reseal(run_dir)
    with pytest.raises(DamagedRunError, match=r"steps\.npy cannot be read"):
        store.read_run(run_dir)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda raw: raw[:-8], "cannot be read"),
        (lambda raw: raw + b"\0", "1 bytes too many"),
        (lambda raw: b"PK" + raw[2:], "not a file of NumPy"),
        (lambda raw: raw.replace(b"'rank'", b"'tank'"), "the field 'tank'"),
        (lambda raw: raw.replace(b"<f8", b"<O8", 1), "cannot be read"),
        (lambda raw: raw.replace(np.float64(0.5).tobytes(), np.float64(-0.5).tobytes(), 1), "duration_s has a value"),
    ],
)
def test_forged_columns_are_damage(run_dir: Path, change: Callable[[bytes], bytes], what: str) -> None:
    """Under a new seal."""
    raw = (run_dir / columns.FILE).read_bytes()
    body = sealing.read(run_dir)
    (run_dir / columns.FILE).write_bytes(change(raw))
    sealing.write(run_dir, body)
    with pytest.raises(DamagedRunError, match=what):
        store.read_run(run_dir)


@pytest.mark.parametrize(
    ("content", "others"),
    [
        (b'{"kind": "step", "rank": 0}\n{"kind": "wire"}\n', b'{"kind": "wire"}'),
        (b'{"kind": "memory"}\n{"kind": "step"}\n{"kind": "steps"}\n', b'{"kind": "memory"}\n{"kind": "steps"}'),
        (b'{"kind": "step"}\n{"kind": "wire"}', b""),
        (b'{"kind": "step"}\n\n{"kind": "step"}\n', b""),
        (b"", b""),
    ],
)  # fmt: skip
def test_lines_that_are_not_steps_are_kept_wherever_they_are(content: bytes, others: bytes) -> None:
    assert samples.without_steps(content) == others
