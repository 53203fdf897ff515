"""What is looked for after a run out of memory: known changes of known specs, the least intrusive first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.experiment.choices import Choice
from paceline.experiment.spec import Precision, RunSpec, Topology, Training, Tuning
from paceline.workloads.memory import adviser
from paceline.workloads.memory.adviser import combined_changes, single_changes


def spec(strategy: str = "ddp", processes: int = 4, tuning: Tuning | None = None, **training: Any) -> RunSpec:
    return RunSpec(
        experiment="test",
        workload=Choice("pretrain"),
        model=Choice("tiny"),
        topology=Topology(device="cuda", processes_per_node=processes),
        training=Training(**{"sequence_length": 512, "micro_batch": 8, **training}),
        strategy=Choice.parse(strategy),
        tuning=tuning,
        steps=3,
    )


def changes(asked: RunSpec) -> list[str]:
    return [each.words(batch, asked)[0] for each in single_changes(asked) for batch in each.falling]


def test_one_setting_at_a_time_and_the_work_is_kept_as_long_as_it_can_be() -> None:
    assert changes(spec()) == [
        "",
        "micro batch 4 with accumulation 2",
        "micro batch 2 with accumulation 4",
        "micro batch 1 with accumulation 8",
        "checkpointing selective",
        "checkpointing full",
        "zero:stage=1",
        "zero:stage=2",
        "zero:stage=3",
        "fsdp2",
        "sequence length 256",
        "sequence length 128",
    ]
    assert [each.keeps_work for each in single_changes(spec())] == [True] * 8 + [False]


def test_a_layout_shards_more_without_other_replicas() -> None:
    asked = spec("mesh:dp=2,cp=2", checkpointing="full", micro_batch=1)
    assert changes(asked) == ["", "mesh:dp=2,cp=2,shard=4", "sequence length 256"]


@pytest.mark.parametrize(
    ("micro_batch", "accumulation", "smaller"),
    [(6, 1, [(3, 2), (2, 3), (1, 6)]), (4, 3, [(3, 4), (2, 6), (1, 12)]), (1, 4, []), (7, 1, [(1, 7)])],
)
def test_the_global_batch_stays(micro_batch: int, accumulation: int, smaller: list[tuple[int, int]]) -> None:
    asked = spec(micro_batch=micro_batch, accumulation=accumulation, checkpointing="full", sequence_length=64)
    settings = [each.words(batch, asked)[1] for each in single_changes(asked) for batch in each.falling]
    found = [text for text in settings if text.startswith("micro_batch")]
    assert found == [f"micro_batch={size} accumulation={count}" for size, count in smaller]
    for each in single_changes(asked):
        assert each.spec.global_batch == asked.global_batch


@pytest.mark.parametrize(
    ("strategy", "processes", "more"),
    [
        ("single", 1, []),
        ("ddp", 1, []),
        ("zero:stage=2", 2, ["zero:stage=3", "fsdp2"]),
        ("zero", 2, ["zero:stage=2", "zero:stage=3", "fsdp2"]),
        ("zero:stage=3", 2, []),
        ("fsdp2", 2, []),
    ],
)
def test_only_what_shards_more(strategy: str, processes: int, more: list[str]) -> None:
    found = [each for each in changes(spec(strategy, processes)) if each.startswith(("zero", "fsdp2"))]
    assert found == more


def test_a_fine_tune_may_take_a_smaller_optimizer_or_fewer_bits() -> None:
    asked = spec("single", 1, Tuning(method="lora", optimizer="adamw"), micro_batch=1, sequence_length=64)
    found = {each.change: each for each in single_changes(asked)}
    assert {"optimizer adamw_8bit", "method qlora"} <= set(found)
    assert found["method qlora"].spec.tuning == Tuning(method="qlora", optimizer="adamw")
    assert not found["method qlora"].keeps_work
    assert not any("method" in change for change in changes(spec(tuning=Tuning(method="qlora"))))


@pytest.mark.parametrize(("reduce", "more"), [("bf16", " reduce_dtype=fp32"), ("fp32", "")])
def test_adapters_are_reduced_in_fp32_and_the_settings_say_so(reduce: str, more: str) -> None:
    asked = spec("single", 1, Tuning(method="full"), precision=Precision(compute=reduce, reduce=reduce))
    found = {each.change: each for each in single_changes(asked) if each.change.startswith("method")}
    assert {change: each.settings for change, each in found.items()} == {
        "method lora": f"method=lora{more}",
        "method qlora": f"method=qlora{more}",
    }
    for each in found.values():
        assert each.spec.training.precision == Precision(compute=reduce, reduce="fp32")


def test_every_change_of_a_full_fine_tune_is_one_that_fine_tuning_runs() -> None:
    precision, data = Precision(compute="bf16", reduce="bf16"), Choice("instructions")
    asked = spec("fsdp2", 2, Tuning(method="full"), precision=precision, data=data)
    asked = replace(asked, workload=Choice("finetune"), model=Choice("tiny-llama"))
    assert [each.change for each in single_changes(asked) if not adviser.is_supported(each.spec)] == []


def test_what_the_workload_refuses_is_not_rehearsed() -> None:
    precision, data = Precision(compute="bf16", reduce="bf16"), Choice("instructions")
    asked = spec("single", 1, Tuning(method="lora"), precision=precision, data=data)
    asked = replace(asked, workload=Choice("finetune"), model=Choice("tiny-llama"))
    assert not adviser.is_supported(asked)


def test_combined_changes_keep_the_work_and_change_two_things_or_more(golden: object) -> None:
    asked = spec()
    first, second = combined_changes(asked)
    found = first.words(first.falling[-1], asked)
    assert found[0] == golden
    assert found[1] == "checkpointing=full micro_batch=1 accumulation=8"
    assert second.words(second.falling[0], asked)[1] == (
        "checkpointing=full strategy=fsdp2 micro_batch=4 accumulation=2"
    )
    assert second.spec.strategy == Choice("fsdp2")
    assert second.spec.training.checkpointing == "full"
    assert all(each.keeps_work and each.spec.global_batch == asked.global_batch for each in (first, second))
    assert not list(combined_changes(spec("fsdp2", micro_batch=1)))
