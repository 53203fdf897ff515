from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.analysis.report import recipes
from paceline.experiment import expansion
from paceline.experiment.spec import RunSpec
from paceline.results import store
from paceline.results.records import RunRecord

Spec = Callable[..., RunSpec]


@pytest.fixture
def record(make_run: Callable[..., Path], tmp_path: Path) -> Callable[[RunSpec], RunRecord]:
    return lambda spec: store.read_run(make_run(tmp_path, spec))


def loaded(text: str, tmp_path: Path) -> list[RunSpec]:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return expansion.load(str(path))


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("ddp", {}),
        ("zero:stage=2,overlap=false", {"precision": "bf16/bf16", "checkpointing": "full", "compile": True}),
        ("fsdp2", {"bucket_mb": 12.5, "learning_rate": 3e-7, "clip_norm": 0.3, "seed": 7}),
        (None, {"workload": "collectives:most=64,operations=all_reduce"}),
    ],
)
def test_the_experiment_loads_back_to_the_cell(
    make_spec: Spec,
    record: Callable[[RunSpec], RunRecord],
    tmp_path: Path,
    strategy: str | None,
    more: dict[str, object],
) -> None:
    spec = make_spec(strategy, **more)
    (recipe,) = recipes([record(spec)])
    (again,) = loaded(recipe.experiment, tmp_path)
    assert again.cell == recipe.cell == spec.cell
    assert again.experiment != spec.experiment, "the same name in the same folder would be found sealed"
    assert recipe.command == f"paceline run {recipe.file}"


def test_repeats_are_asked_again(make_spec: Spec, record: Callable[[RunSpec], RunRecord], tmp_path: Path) -> None:
    specs = [make_spec("ddp", repeat=repeat) for repeat in range(3)]
    (recipe,) = recipes(map(record, specs))
    assert [spec.repeat for spec in loaded(recipe.experiment, tmp_path)] == [0, 1, 2]


def test_references_have_none(make_spec: Spec, record: Callable[[RunSpec], RunRecord]) -> None:
    reference = record(make_spec(None, 1, workload="reference"))
    assert reference.is_reference
    assert recipes([reference]) == ()
