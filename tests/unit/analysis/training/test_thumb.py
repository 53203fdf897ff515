"""Rules of thumb: the arithmetic to the byte, measured peaks beside it, and names that are not guessed."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.report import build
from paceline.analysis.training import rules_of_thumb
from paceline.errors import RequestError
from paceline.experiment.choices import Choice
from paceline.models import arithmetic
from paceline.report.tables import verdicts

Builder = Callable[..., Any]
GIB = 2**30
MEASURED = Path(__file__).parents[4] / "docs" / "measured" / "h200-memory" / "metrics.csv"


def advised(model: str, gpu: str, gpus: int, **more: Any) -> dict[str, Any]:
    return {rule.strategy: rule for rule in rules_of_thumb.advise(Choice.parse(model), gpu, gpus, **more)}


def test_the_arithmetic_of_llama_8b() -> None:
    found = advised("llama-8b", "h100", 8)
    assert {name: rule.fits for name, rule in found.items()} == {
        "ddp": False,
        "zero:stage=1": True,
        "zero:stage=2": True,
        "zero:stage=3": True,
        "fsdp2": True,
    }
    count = arithmetic.parameters(arithmetic.load(Choice("llama-8b")))
    assert found["ddp"].state_bytes == 16 * count
    assert found["zero:stage=3"].state_bytes == 2 * count
    assert found["zero:stage=3"].text.startswith(
        "llama-8b: 16 B x 8.03e9 = 119.7 GiB of state; zero:stage=3 on 8 GPUs: 15.0 GiB of state + "
    )
    assert found["zero:stage=3"].usable_bytes == 0.9 * 80e9


def test_a_longer_sequence_or_fewer_gpus_may_not_fit() -> None:
    assert not any(rule.fits for rule in advised("llama-8b", "h100", 1).values())
    short, long = (advised("llama-8b", "h100", 8, sequence_length=n)["fsdp2"] for n in (2048, 4096))
    assert long.activation_bytes == 2 * short.activation_bytes


def test_nothing_is_said_about_speed(golden: object) -> None:
    table = verdicts.advice(rules_of_thumb.advise(Choice("llama-8b"), "h100", 8))
    words = " ".join((table.title, *table.notes, *(column.heading for column in table.columns)))
    assert words == golden
    assert not {"faster", "tokens/s", "fastest"} & set(words.split())


def test_a_full_gpu_name_is_that_gpu_and_a_short_one_the_smallest_of_all(golden: object) -> None:
    assert rules_of_thumb.find_gpu("NVIDIA H100 NVL") == ("H100 NVL", 94e9)
    found = rules_of_thumb.find_gpu("h100")
    assert found[0] == golden
    assert "H100" in found[0]
    assert "80" in found[0]
    assert "HBM3" in found[0]
    assert found[1] == 80e9
    assert rules_of_thumb.find_gpu("A100") == ("A100-SXM4-40GB", 40e9)
    assert rules_of_thumb.find_gpu("A10") == ("A10", 24e9), "A10G is another word"


@pytest.mark.parametrize("name", ["h1", "", "H1000", "Tesla V100-SXM2-32GB"])
def test_an_unknown_gpu_is_refused(name: str, golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        rules_of_thumb.find_gpu(name)
    assert str(caught.value) == golden
    assert "--gpu" in str(caught.value)
    assert "A10" in str(caught.value)


@pytest.mark.parametrize(("gpus", "length"), [(0, None), (8, 10**9)])
def test_wrong_numbers_are_refused(gpus: int, length: int | None, golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        rules_of_thumb.advise(Choice("llama-8b"), "h100", gpus, length)
    assert str(caught.value) == golden


def test_measured_peaks_lie_near_the_rule() -> None:
    """Every cell with full checkpointing that was measured on an H200."""
    rows = list(csv.DictReader(MEASURED.open()))
    peaks = [r for r in rows if r["metric"] == "peak_memory_bytes" and r["checkpointing"] == "full"]
    assert len(peaks) >= 3
    for row in peaks:
        shape = arithmetic.load(Choice.parse(row["model"]))
        sizes = int(row["sequence_length"]), int(row["micro_batch"])
        rule = rules_of_thumb.rule(shape, row["strategy"], "H200", 141e9, 1, *sizes)
        assert 0.95 < rule.needed_bytes / float(row["value"]) < 1.25


@pytest.fixture
def trained(make_cell: Builder, make_reference: Builder) -> Builder:
    def make(model: str, **more: Any) -> Any:
        cell = make_cell(1.0, 1, model=model, device="cuda", record={"gpus": [{"name": "NVIDIA H200"}]}, **more)
        return build([make_reference(cell[0].spec), *cell], "test")

    return make


def test_a_report_holds_rules_for_gpus_that_were_not_measured(trained: Builder) -> None:
    report = trained("llama-1b", sequence_length=4096)
    assert "H200" not in {name for rule in report.rules_of_thumb for name in rule.gpu.split(", ")}
    small = {rule.strategy: rule for rule in report.rules_of_thumb if rule.memory_bytes == 24e9}
    assert (small["ddp"].gpus, small["ddp"].fits) == (None, False)
    assert (small["fsdp2"].gpus, small["fsdp2"].fits) == (2, True)
    table = verdicts.rules_of_thumb(report.rules_of_thumb)
    assert table is not None
    assert table.notes[0] == verdicts.THUMB_NOTE
    assert all("no" in {cell.text for cell in row} for row in table.rows)


def test_a_model_that_fits_everywhere_needs_no_rule(trained: Builder) -> None:
    assert trained("tiny").rules_of_thumb == ()
