"""Numbers of cells that fine-tune: tokens that are no padding, learned ones, and FLOPs of weights that do not learn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from paceline.analysis.compare.cells import comparable_metrics, compare_cells, comparison, why_not_compared
from paceline.analysis.findings import SHARED_GPU, Measurement
from paceline.analysis.report import build
from paceline.analysis.statistics.intervals import Ratio
from paceline.analysis.training import metrics, rules_of_thumb
from paceline.analysis.training.certificate.observed import observe
from paceline.analysis.training.metrics import Cell
from paceline.analysis.training.window import open_window
from paceline.errors import RequestError
from paceline.experiment.choices import Choice
from paceline.experiment.spec import Tuning
from paceline.models import adapters, arithmetic
from paceline.report.answer import answer
from paceline.report.summary import headline
from paceline.report.tables import finetuning
from paceline.results.records import RunRecord

Builder = Callable[..., Any]
LORA = Tuning(method="lora", optimizer="adamw")
# Per rank and step: 4 rows of 64 places, of which 160 hold a token.
HELD = {"tokens": 160, "positions": 256, "label_tokens": 96, "attended_keys": 160 * 11, "samples": 5}


def tuned(make_spec: Builder, make_steps: Builder, make_record: Builder, **more: Any) -> RunRecord:
    held = {**HELD, **more.pop("held", {})}
    record = more.pop("record", {})
    values = {"workload": "finetune", "model": "tiny-llama", "tuning": LORA, "data": Choice("instructions"), **more}
    spec = make_spec(**values)
    return make_record(spec, steps=make_steps(spec, 2.0, **held), **record)  # type: ignore[no-any-return]


def measured(record: RunRecord) -> dict[str, Measurement]:
    (cell,) = metrics.gather([open_window(record)])
    return {m.metric: m for m in cell.measurements}


@pytest.fixture
def make_tuned(make_spec: Builder, make_steps: Builder, make_record: Builder) -> Builder:
    return lambda **more: tuned(make_spec, make_steps, make_record, **more)


def test_rates_count_no_padding(make_tuned: Builder) -> None:
    found = measured(make_tuned())
    assert found["tokens_per_s"].value == pytest.approx(2 * 160 / 2.0)
    assert found["label_tokens_per_s"].value == pytest.approx(2 * 96 / 2.0)
    assert found["samples_per_s"].value == pytest.approx(2 * 5 / 2.0)
    assert found["padding_ratio"].value == pytest.approx(1 - 160 / 256)
    assert found["packing_efficiency_ratio"].value is None, "nothing was packed"


def test_packing_efficiency_is_of_packed_data(make_tuned: Builder) -> None:
    found = measured(make_tuned(data=Choice("instructions", {"packed": True})))
    assert found["packing_efficiency_ratio"].value == pytest.approx(160 / 256)
    full = measured(make_tuned(held={"tokens": 256}))
    assert full["padding_ratio"].value == 0.0, "no padding was counted, which is not the same as not counted"


def test_training_from_scratch_has_no_such_numbers(make_spec: Builder, make_record: Builder) -> None:
    found = measured(make_record(make_spec()))
    for metric in ("label_tokens_per_s", "padding_ratio", "packing_efficiency_ratio"):
        assert found[metric].value is None


def test_mfu_counts_frozen_weights_twice_and_the_keys_that_were_seen(
    make_tuned: Builder, h200: Mapping[str, Any], golden: object
) -> None:
    more: dict[str, Any] = {"device": "cuda", "precision": "bf16/fp32", "record": {"gpus": [h200]}}
    found = measured(make_tuned(**more, checkpointing="full"))
    shape = arithmetic.load(Choice("tiny-llama"))
    products, count = arithmetic.matmul_parameters(shape), adapters.adapter_parameters(shape, 16, "q+k+v+o")
    attention = 2 * 4 * 11 * 4 * 32
    per_gpu = 160 / 2.0 / 989e12
    needed = 4 * products + 6 * count + 3 * attention
    assert found["mfu_ratio"].value == pytest.approx(needed * per_gpu)
    again = 2 * (products - 128 * 256) + 2 * count + attention
    assert found["hfu_ratio"].value == pytest.approx((needed + again) * per_gpu)
    whole_rows = 2 * 4 * 64 * 4 * 32
    full_attention = 4 * products + 6 * count + 3 * whole_rows
    assert found["mfu_full_attention_ratio"].value == pytest.approx(full_attention * per_gpu)
    assert (found["mfu_ratio"].note or "") == golden
    unknown = measured(make_tuned(**more, held={"attended_keys": None}))
    assert unknown["mfu_ratio"].value == pytest.approx((needed + 3 * attention * (32.5 / 11 - 1)) * per_gpu)


def test_the_wire_formula_is_of_the_adapters(make_tuned: Builder) -> None:
    count = adapters.adapter_parameters(arithmetic.load(Choice("tiny-llama")), 16, "q+k+v+o")
    assert measured(make_tuned())["wire_bytes_formula_per_step"].value == 2 * count * 4 / 2


def test_a_target_the_model_lacks_has_no_formula_and_says_why(make_tuned: Builder, golden: object) -> None:
    found = measured(make_tuned(model="tiny", tuning=Tuning(method="lora", targets="gate")))
    assert found["wire_bytes_formula_per_step"].value is None
    assert found["wire_bytes_formula_per_step"].note == golden
    assert "gate" in found["wire_bytes_formula_per_step"].note


def test_the_loss_of_a_step_is_the_mean_over_learned_tokens(make_tuned: Builder, make_step: Builder) -> None:
    """Rank 0 learned 30 tokens at a loss of 1, rank 1 ten at 5: the mean is 2, whatever they read."""
    record = make_tuned()
    steps = tuple(
        make_step(rank, step, tokens=100, label_tokens=labels, loss=loss)
        for step in range(3)
        for rank, labels, loss in ((0, 30, 1.0), (1, 10, 5.0))
    )
    changed = dataclasses.replace(record, steps=steps)
    assert observe(changed).losses == {0: 2.0, 1: 2.0, 2: 2.0}
    assert measured(changed)["loss_first"].value == 2.0
    plain = dataclasses.replace(changed, steps=tuple(dataclasses.replace(s, label_tokens=None) for s in changed.steps))
    assert observe(plain).losses[0] == 3.0


# --- what may be compared ---


def cells_of(*records: RunRecord) -> list[Cell]:
    return metrics.gather(map(open_window, records))


@pytest.mark.parametrize("metric", ["samples_per_s", "usd_per_1k_samples", "step_time_s"])
def test_samples_of_different_lengths_or_data_are_never_compared(
    make_tuned: Builder, metric: str, golden: object
) -> None:
    """The trap: 1,024-token samples against 512-token samples once were "2.11 times faster"; by token it was 6 %."""
    one, same = make_tuned(), make_tuned(strategy="fsdp2")
    longer, packed = make_tuned(sequence_length=128), make_tuned(data=Choice("instructions", {"packed": True}))
    assert why_not_compared(metric, [one.spec, same.spec]) is None
    text = why_not_compared(metric, [one.spec, longer.spec])
    assert text == golden
    assert "tokens_per_s" in text
    text = why_not_compared(metric, [one.spec, packed.spec])
    assert text == golden
    assert "tokens_per_s" in text
    assert why_not_compared("tokens_per_s", [one.spec, longer.spec]) is None
    a, b = cells_of(one, longer)
    assert comparable_metrics((a, b)) == ("tokens_per_s", "peak_memory_bytes")
    with pytest.raises(RequestError) as caught:
        comparison(metric, "higher", (a, b), ("a", "b"), Ratio(1.1, 1.0, 1.2, 0.01), {})
    assert str(caught.value) == golden


def test_packed_and_padded_are_compared_by_token_only(make_tuned: Builder) -> None:
    packed = make_tuned(data=Choice("instructions", {"packed": True}), held={"tokens": 250})
    (compared,) = compare_cells(cells_of(make_tuned(), packed))
    assert compared.group.axis == "data"
    assert {c.metric for c in compared.comparisons} <= {"tokens_per_s", "peak_memory_bytes"}
    assert compared.group.cells[0].spec.training.data.options == {"packed": True}


@pytest.mark.parametrize(
    ("axis", "other"),
    [
        ("method", Tuning(method="qlora", optimizer="adamw")),
        ("rank", Tuning(method="lora", rank=8, alpha=16.0, optimizer="adamw")),
        ("optimizer", Tuning(method="lora", optimizer="adamw_8bit")),
        ("targets", Tuning(method="lora", targets="q+v", optimizer="adamw")),
    ],
)
def test_cells_that_differ_in_one_setting_of_tuning_meet(make_tuned: Builder, axis: str, other: Tuning) -> None:
    (compared,) = compare_cells(cells_of(make_tuned(), make_tuned(tuning=other)))
    assert compared.group.axis == axis


def test_training_from_scratch_is_not_grouped_by_what_it_does_not_have(
    make_spec: Builder, make_record: Builder
) -> None:
    records = [make_record(make_spec(precision=p)) for p in ("bf16/fp32", "bf16/bf16")]
    assert [c.group.axis for c in compare_cells(cells_of(*records))] == ["reduce_dtype"]


# --- the table ---


def test_the_table_shows_what_learns_and_every_rate(make_tuned: Builder, golden: object) -> None:
    records = [
        make_tuned(),
        make_tuned(tuning=Tuning(method="qlora", rank=8), data=Choice("instructions", {"packed": True})),
    ]
    measurements = tuple(m for cell in cells_of(*records) for m in cell.measurements)
    report = dataclasses.replace(build([], title="test", created_at=0.0), measurements=measurements)
    (table,) = finetuning.tables(report)
    assert [c.heading for c in table.columns] == [
        *("what", "method", "rank", "optimizer"),
        *("tokens/s", "samples/s", "padding, %", "label tokens/s", "packing, %"),
    ]
    rows = {row[1].text: [cell.text for cell in row] for row in table.rows}
    assert rows["qlora"][2:4] == ["8", "paged_adamw_8bit"]
    assert rows["lora"][2:4] == ["16", "adamw"]
    assert [rows["lora"][i] for i in (4, 5, 7)] == ["160", "5.00", "96.0"]
    assert table.notes[0] == "All rows: targets q+k+v+o, tiny-llama, 2 processes.", "what all share is said once"
    assert not any("tiny-llama" in row[0].text for row in table.rows)
    assert rows["qlora"][-1].startswith("62.5")
    assert table.notes == golden


def test_no_table_without_a_cell_that_fine_tunes(make_spec: Builder, make_record: Builder) -> None:
    measurements = tuple(m for cell in cells_of(make_record(make_spec())) for m in cell.measurements)
    assert (
        finetuning.tables(dataclasses.replace(build([], title="test", created_at=0.0), measurements=measurements)) == ()
    )


# --- the answer ---


def test_a_single_fine_tune_is_answered_by_its_rate(
    make_tuned: Builder, make_reference: Builder, golden: object
) -> None:
    record = make_tuned()
    report = build([make_reference(record.spec), record], title="test", created_at=0.0)
    # The steps are made by hand and prove no work of a fine-tune: what they cannot pass is left out.
    valid = tuple(
        dataclasses.replace(c, checks=tuple(check for check in c.checks if check.ok)) for c in report.certificates
    )
    runs = tuple(dataclasses.replace(run, status="ok") for run in report.runs)
    measurements = tuple(m for cell in cells_of(record) for m in cell.measurements)
    report = dataclasses.replace(report, certificates=valid, runs=runs, measurements=measurements)
    text = answer(report)[0]
    assert text == golden
    assert "160" in text
    on_one_gpu = tuple(dataclasses.replace(run, health=(SHARED_GPU,)) for run in runs)
    shared = dataclasses.replace(report, runs=on_one_gpu)
    assert finetuning.sentence(shared) == ""
    assert "160" not in headline(shared)


def test_no_rule_of_thumb_of_a_fine_tune(make_tuned: Builder) -> None:
    assert rules_of_thumb.rules([make_tuned(model="mistral-7b")]) == (), "16 bytes per weight is not its state"
