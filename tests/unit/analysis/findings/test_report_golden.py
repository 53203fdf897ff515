"""Reading and reducing samples may become faster, never different: a varied store against what it always gave."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.findings import Certificate, Comparison, Measurement, Report, RunFinding
from paceline.analysis.report import build
from paceline.results import store
from paceline.results.records import RunRecord, Status, StepSample

GOLDEN = Path(__file__).parents[3] / "golden" / "analysis" / "varied.txt"
METRICS = (
    "step_time_s", "step_time_p50_s", "step_time_p99_s", "tokens_per_s", "tokens_per_s_per_gpu", "samples_per_s",
    "peak_memory_bytes", "comm_exposed_ratio", "wire_bytes_per_step", "data_wait_s", "h2d_s", "forward_s",
    "optimizer_s", "loss_first", "loss_last", "scaling_efficiency_ratio",
)  # fmt: skip
Build = Callable[..., Any]


def altered(record: RunRecord, where: Callable[[StepSample], bool], **fields: Any) -> RunRecord:
    steps = tuple(dataclasses.replace(s, **fields) if where(s) else s for s in record.steps)
    return dataclasses.replace(record, steps=steps)


@pytest.fixture
def records(make_spec: Build, make_record: Build, make_reference: Build, make_cell: Build) -> list[RunRecord]:
    """Every kind of sample that the reductions treat apart, and every reason of the certificate that reads steps."""
    ddp = make_cell(1.0)
    late = altered(make_cell(0.9, repeats=1, steps=25)[0], lambda s: s.rank == 1 and s.step % 3 == 0, duration_s=1.4)
    sound = [
        *ddp,
        *make_cell(1.1, strategy="fsdp2", repeats=2),
        *make_cell(0.55, world_size=4, micro_batch=1),
        late,
        altered(make_cell(1.2, strategy="zero:stage=1", repeats=1)[0], lambda s: s.rank == 1, h2d_s=0.25),
        altered(make_cell(1.3, strategy="zero:stage=2", repeats=1)[0], lambda s: True, data_wait_s=0, h2d_bytes=2**40),
    ]
    return [
        make_reference(ddp[0].spec),
        *sound,
        *_unequal(make_cell),
        *_reduced(make_spec, make_record, make_reference),
    ]


def _unequal(make_cell: Build) -> list[RunRecord]:
    """Runs that must not pass, one for each reason, in cells of their own."""
    changes: list[tuple[Callable[[StepSample], bool], dict[str, Any]]] = [
        (lambda s: s.step == 5 and s.rank == 1, {"loss": float("nan")}),
        (lambda s: s.step in (4, 20), {"data_digest": 2**64 - 1}),
        (lambda s: s.step == 3, {"tokens": 100}),
        (lambda s: s.rank == 0, {"micro_batches": 1}),
        (lambda s: s.step in (2, 6, 7, 9), {"updates": 2}),
        (lambda s: s.step == 8 and s.rank == 1, {"grad_norm": None}),
        (lambda s: s.step == 1, {"loss": 4.0}),
        (lambda s: s.step == 29 and s.rank == 1, {"variant": 1}),
    ]
    cells = (make_cell(1.0, repeats=1, bucket_mb=20 + n)[0] for n in range(len(changes)))
    return [altered(record, *change[:1], **change[1]) for record, change in zip(cells, changes, strict=True)]


def _reduced(make_spec: Build, make_record: Build, make_reference: Build) -> Iterator[RunRecord]:
    """16 bit: re-seeded references, and an overflow that the fp16 reference skipped too; one failed run."""
    bf16 = make_spec(precision="bf16/fp32")
    yield make_reference(bf16, (0.0, 1e-3, -2e-3, 5e-4))
    yield make_record(bf16, 0.7)
    yield altered(make_record(dataclasses.replace(bf16, repeat=1), 0.72), lambda s: s.step < 3, loss=5.1)
    fp16 = make_spec(precision="fp16/fp32")
    overflow: dict[str, Any] = {"updates": 0, "grad_norm": None}
    yield altered(make_reference(fp16), lambda s: s.step == 0, **overflow)
    yield altered(make_record(fp16, 0.8), lambda s: s.step == 0, **overflow)
    yield make_record(make_spec(sequence_length=32), 0.5)
    yield make_record(make_spec("fsdp2", sequence_length=16), status=Status.OOM, error="no room", steps=(), outcomes=())


def write(out: Path, record: RunRecord) -> Path:
    run_dir = store.create(out, record.spec)
    rows = [*record.steps, *record.memory, *record.wire, *record.traces]
    for rank in range(record.spec.topology.world_size):
        lines = "".join(store.sample_line(s) for s in rows if s.rank == rank)
        (run_dir / f"samples-{rank}.jsonl").write_text(lines)
    for outcome in record.outcomes:
        store.write_outcome(run_dir, outcome)
    for number, facts in enumerate(record.machines):
        store.write_json(run_dir / f"machine-{number}.json", facts)
    store.seal(run_dir, record.status, record.error, record.started_at, record.ended_at)
    return run_dir


@pytest.fixture
def folder(tmp_path: Path, records: list[RunRecord], reseal: Build) -> Path:
    """The records as files, some of which a killed process, an older Paceline or an accident have touched."""
    folders = [write(tmp_path, record) for record in records]
    for run_dir, change in zip(folders[1:], (_cut, _other_layout, _interleaved), strict=False):
        change(run_dir / "samples-0.jsonl")
        reseal(run_dir)
    damaged = write(tmp_path, dataclasses.replace(records[1], spec=dataclasses.replace(records[1].spec, repeat=7)))
    path = damaged / "samples-1.jsonl"
    path.write_text(path.read_text().replace('"rank"', '"ra', 1))
    return tmp_path


def _cut(path: Path) -> None:
    path.write_text(path.read_text() + '{"kind": "step", "rank": 0, "st')


def _other_layout(path: Path) -> None:
    """Keys in another order, without spaces, without a field that has a default, whole numbers for seconds."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row.pop("variant", None)
        if row["kind"] == "step":
            row["optimizer_s"] = 0
    reordered = [dict(reversed(row.items())) for row in rows]
    path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in reordered))


def _interleaved(path: Path) -> None:
    """Other samples between the steps, and the steps themselves backwards."""
    path.write_text("".join(line + "\n" for line in reversed(path.read_text().splitlines())))


# --- what is held fast ---


def _number(value: float | None) -> str:
    """12 digits: the last ones of a logarithm differ between processors."""
    return "-" if value is None else f"{value:.12g}"


def _line(found: RunFinding | Certificate | Measurement | Comparison) -> str:
    if isinstance(found, RunFinding):
        ends = f"{_number(found.loss_first)} {_number(found.loss_last)}"
        return f"run {found.run} {found.status} {ends} {found.outlier_steps} {found.warmup} {found.health}"
    if isinstance(found, Certificate):
        return "\n  ".join([f"certificate {found.run}", *(f"{c.name}: {c.ok}; {c.observed}" for c in found.checks)])
    if isinstance(found, Measurement):
        numbers = " ".join(map(_number, (found.value, found.low, found.high)))
        return f"{found.metric} {found.cell} n={found.n} {numbers} {found.note}"
    numbers = " ".join(map(_number, (found.ratio, found.low, found.high, found.detectable_ratio)))
    return f"{found.metric} {found.cell} / {found.other} {numbers} {found.verdict}: {found.reason}"


def told(report: Report) -> str:
    """The findings that stand on step samples, one line each; others may be added without a change here."""
    measured = [m for m in report.measurements if m.metric in METRICS]
    compared = [c for c in report.comparisons if c.metric in METRICS]
    lines = [_line(found) for found in (*report.runs, *report.certificates, *measured, *compared)]
    return "\n".join((*lines, *(text.rpartition("/")[2] for text in report.skipped), ""))


def test_a_varied_store_gives_what_it_always_gave(folder: Path) -> None:
    """PACELINE_UPDATE_GOLDEN=1 writes what is produced now; read the difference before you commit it."""
    text = told(build(*_read(folder)))
    if os.environ.get("PACELINE_UPDATE_GOLDEN") == "1":
        GOLDEN.parent.mkdir(parents=True, exist_ok=True)
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text(), "set PACELINE_UPDATE_GOLDEN=1 if the change is meant"


def _read(folder: Path) -> tuple[list[RunRecord], str, list[str]]:
    records, skipped = store.read_runs(folder)
    return records, "varied", skipped


def test_samples_from_files_and_from_memory_give_the_same_findings(tmp_path: Path, records: list[RunRecord]) -> None:
    for record in records:
        write(tmp_path, record)
    read, title, _ = _read(tmp_path)
    assert told(build(read, title)) == told(build(records, title))
