from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from paceline.analysis.compare.cells import compare_cells
from paceline.analysis.compare.recommend import GLOO, recommend
from paceline.analysis.findings import Recommendation
from paceline.analysis.training import metrics
from paceline.analysis.training.window import open_window
from paceline.results.records import RunRecord

Builder = Callable[..., Any]


def recommended(*groups: list[RunRecord]) -> dict[str, Recommendation]:
    cells = metrics.gather(open_window(r) for group in groups for r in group)
    return {r.category: r for r in recommend(compare_cells(cells))}


def test_one_winner_with_its_comparisons_and_numbers(make_cell: Builder, golden: object) -> None:
    found = recommended(
        make_cell(1.0, strategy="ddp"), make_cell(1.2, strategy="fsdp2"), make_cell(1.4, strategy="zero:stage=1")
    )["highest throughput"]
    assert found.choose == ("ddp",)
    assert found.over == ("fsdp2", "zero:stage=1")
    assert all("ddp" in (c.label, c.other_label) for c in found.because)
    assert found.text == golden
    assert found.text.startswith("ddp is 20 % faster than fsdp2, the next best")
    assert re.search(r"(499|50\d) ms .*(599|60\d) ms", found.text)
    assert "1.85 MB" in found.text
    assert found.group.startswith("tiny, 2 processes, fp32, sequence 64, global batch 8")


def test_nobody_is_chosen_alone_from_equal_cells(make_cell: Builder, golden: object) -> None:
    found = recommended(
        make_cell(1.0, strategy="ddp"), make_cell(1.002, strategy="fsdp2"), make_cell(1.4, strategy="zero:stage=1")
    )["highest throughput"]
    assert set(found.choose) == {"ddp", "fsdp2"}
    assert found.over == ("zero:stage=1",)
    assert found.text == golden


def test_one_launch_is_not_ranked(make_cell: Builder, golden: object) -> None:
    found = recommended(make_cell(1.0, 1, strategy="ddp"), make_cell(1.2, 1, strategy="fsdp2"))["highest throughput"]
    assert (found.choose, found.over, found.decisive) == (("ddp", "fsdp2"), (), None)
    assert found.text == golden


def test_noise_is_not_ranked(make_cell: Builder, golden: object) -> None:
    found = recommended(
        make_cell(1.0, strategy="ddp", spread=0.05),
        make_cell(1.01, strategy="fsdp2", spread=0.05),
        make_cell(3.0, strategy="zero:stage=1", spread=0.05),
    )["highest throughput"]
    assert (set(found.choose), found.over) == ({"ddp", "fsdp2"}, ("zero:stage=1",))
    assert found.text == golden


def test_all_are_equal(make_cell: Builder, golden: object) -> None:
    found = recommended(make_cell(1.0, strategy="ddp"), make_cell(1.002, strategy="fsdp2"))["shortest step"]
    assert set(found.choose) == {"ddp", "fsdp2"}
    assert found.over == ()
    assert found.text == golden


def test_lowest_memory_may_be_another_than_the_fastest(make_cell: Builder, golden: object) -> None:
    found = recommended(
        make_cell(1.0, strategy="ddp"),
        make_cell(1.2, strategy="fsdp2", record={"memory_bytes": 40 * 2**20}),
    )
    assert found["highest throughput"].choose == ("ddp",)
    assert found["lowest memory"].choose == ("fsdp2",)
    assert found["lowest memory"].text == golden


def test_caveats(make_cell: Builder, golden: object) -> None:
    once = recommended(make_cell(1.0, 1, strategy="ddp"), make_cell(1.2, 1, strategy="fsdp2"))["highest throughput"]
    assert once.caveats[0] == golden
    assert once.caveats[1] == GLOO
    thrice = recommended(make_cell(1.0, strategy="ddp"), make_cell(1.2, strategy="zero:stage=1"))["highest throughput"]
    assert thrice.caveats == ()
    busy = {"evidence": {"neighbours": 2}}
    crowded = recommended(
        make_cell(1.0, strategy="ddp", device="cuda", record=dict(busy)),
        make_cell(1.2, strategy="fsdp2", device="cuda", record=dict(busy)),
    )
    assert crowded["highest throughput"].caveats == golden
    assert crowded["lowest memory"].caveats == ()


def test_shared_gpu_is_never_ranked_for_speed(make_cell: Builder) -> None:
    shared = {"evidence": {"settings": {"shared_gpu": True}}}
    found = recommended(
        make_cell(1.0, strategy="ddp", device="cuda", record=dict(shared)),
        make_cell(2.0, strategy="fsdp2", device="cuda", record={**shared, "memory_bytes": 40 * 2**20}),
    )
    assert set(found) == {"lowest memory"}


# --- groups that differ in what a title leaves out ---


def titles(*groups: list[RunRecord]) -> list[str]:
    """Of the groups in which strategies were compared by throughput."""
    cells = metrics.gather(open_window(r) for group in groups for r in group)
    found = recommend(compare_cells(cells, ("strategy",)))
    assert len({r.group_key for r in found}) == len({r.group for r in found})
    return [r.group for r in found if r.metric == "tokens_per_s"]


def test_one_group_names_nothing_beyond_the_usual(make_cell: Builder) -> None:
    (title,) = titles(make_cell(1.0, strategy="ddp"), make_cell(1.2, strategy="fsdp2"))
    assert title == "tiny, 2 processes, fp32, sequence 64, global batch 8"


def test_titles_name_every_setting_that_varies_among_the_cells(make_cell: Builder, golden: object) -> None:
    cells = [
        make_cell(seconds, strategy=strategy, bucket_mb=bucket)
        for strategy, bucket, seconds in (
            ("ddp", None, 1.0),
            ("fsdp2", None, 1.2),
            ("ddp", 50, 1.3),
            ("fsdp2", 50, 1.1),
        )
    ]
    assert titles(*cells) == golden


def test_titles_name_the_split_of_a_batch_where_it_varies(make_cell: Builder, golden: object) -> None:
    splits = ({"micro_batch": 2, "accumulation": 2}, {"micro_batch": 4, "accumulation": 1})
    cells = [make_cell(1.0 + i / 10, strategy=s, **split) for split in splits for i, s in enumerate(("ddp", "fsdp2"))]
    assert [t.partition("global batch 8, ")[2] for t in titles(*cells)] == golden


def test_titles_name_the_device_where_there_are_several_kinds(make_cell: Builder) -> None:
    def on(gpu: str, seconds: float, strategy: str) -> list[RunRecord]:
        found: list[RunRecord] = make_cell(seconds, strategy=strategy, device="cuda", record={"gpus": [{"name": gpu}]})
        return found

    cells = [on("A100", 1.0, "ddp"), on("A100", 1.2, "fsdp2"), on("H200", 0.5, "zero:stage=2")]
    assert [t.rpartition(", ")[2] for t in titles(*cells, on("H200", 0.4, "zero:stage=3"))] == ["A100", "H200"]
