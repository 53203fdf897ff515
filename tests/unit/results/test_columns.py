"""Columns of a sealed run: the same steps as its lines, used only while they belong to these lines."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import DamagedRunError
from paceline.results import columns, samples, sealing, store
from paceline.results.records import MemorySample, RunRecord, Status

Make = Callable[..., Any]
MEMORY = MemorySample(
    rank=1, moment="steps", allocated_bytes=None, reserved_bytes=None, device_bytes=None, resident_bytes=2**28
)


@pytest.fixture
def run_dir(tmp_path: Path, make_spec: Make, make_run: Make) -> Path:
    """A run that the controller has read and sealed."""
    folder: Path = make_run(tmp_path, make_spec("ddp", 2))
    with (folder / "samples-1.jsonl").open("a") as lines:
        lines.write(store.sample_line(MEMORY))
    seal_with_columns(folder)
    return folder


def seal_with_columns(folder: Path) -> None:
    steps = store.read_unsealed(folder, started_at=0.0, ended_at=1.0).steps
    store.seal(folder, Status.OK, None, 0.0, 1.0, steps=steps)


def from_lines(folder: Path) -> RunRecord:
    return store.read_unsealed(folder, started_at=0.0, ended_at=1.0)


def test_columns_are_read_instead_of_the_lines(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = from_lines(run_dir)
    monkeypatch.setattr(samples, "collect", lambda *_: pytest.fail("a step was parsed"))
    record = store.read_run(run_dir)
    assert list(record.steps) == list(expected.steps)
    assert len(record.steps) == 2 * record.spec.steps
    assert record.memory == expected.memory == (MEMORY,)


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
def test_a_run_with_lost_attempts_has_no_columns(run_dir: Path, name: str) -> None:
    steps = from_lines(run_dir).steps
    (run_dir / name).write_text("")
    assert not columns.write(run_dir, samples.StepSeries.of(steps))


def test_lines_that_were_sealed_again_count(run_dir: Path, reseal: Make) -> None:
    lines = run_dir / "samples-0.jsonl"
    lines.write_text(lines.read_text().replace('"duration_s": 0.5', '"duration_s": 0.25'))
    reseal(run_dir)
    assert store.read_run(run_dir).steps[0].duration_s == 0.25


def test_columns_that_were_added_or_changed_are_damage(run_dir: Path, reseal: Make) -> None:
    content = (run_dir / columns.FILE).read_bytes()
    (run_dir / columns.FILE).write_bytes(content[:-1] + b"\x01")
    with pytest.raises(DamagedRunError, match=r"steps\.npy was changed after the run ended"):
        store.read_run(run_dir)
    (run_dir / columns.FILE).unlink()
    reseal(run_dir)
    assert store.read_run(run_dir).status is Status.OK
    (run_dir / columns.FILE).write_bytes(content)
    with pytest.raises(DamagedRunError, match=r"steps\.npy was added"):
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
    """Under a seal that says that they belong to the lines."""
    raw = (run_dir / columns.FILE).read_bytes()
    body = {key: value for key, value in sealing.read(run_dir).items() if key not in ("files", "seal")}
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
