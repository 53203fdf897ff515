from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from paceline.analysis import metrics
from paceline.analysis.compare import compare_cells
from paceline.analysis.recommend import GLOO, recommend
from paceline.analysis.window import open_window
from paceline.findings import Recommendation
from paceline.records import RunRecord

Builder = Callable[..., Any]


def recommended(*groups: list[RunRecord]) -> dict[str, Recommendation]:
    cells = metrics.gather(open_window(r) for group in groups for r in group)
    return {r.category: r for r in recommend(compare_cells(cells))}


def test_one_winner_with_its_comparisons_and_numbers(make_cell: Builder) -> None:
    found = recommended(
        make_cell(1.0, strategy="ddp"), make_cell(1.2, strategy="fsdp2"), make_cell(1.4, strategy="zero:stage=1")
    )["highest throughput"]
    assert found.choose == ("ddp",)
    assert found.over == ("fsdp2", "zero:stage=1")
    assert all("ddp" in (c.label, c.other_label) for c in found.because)
    assert re.match(
        r"ddp is 1\.(19|20)\d times as fast as fsdp2, the next best \(95 % interval 1\.1\d\d to 1\.2\d\d\)\.",
        found.text,
    )
    assert re.search(r"the phase that differs most is backward, (499|50\d) ms against (599|60\d) ms", found.text)
    assert "the same 1.85 MB on the wire per step" in found.text
    assert found.group.startswith("tiny, 2 processes, fp32, sequence 64, global batch 8")


def test_nobody_is_chosen_alone_from_a_tie(make_cell: Builder) -> None:
    found = recommended(
        make_cell(1.0, strategy="ddp"), make_cell(1.002, strategy="fsdp2"), make_cell(1.4, strategy="zero:stage=1")
    )["highest throughput"]
    assert set(found.choose) == {"ddp", "fsdp2"}
    assert found.over == ("zero:stage=1",)
    assert found.text.startswith("Tie between ")


def test_all_tied(make_cell: Builder) -> None:
    found = recommended(make_cell(1.0, strategy="ddp"), make_cell(1.002, strategy="fsdp2"))["shortest step"]
    assert set(found.choose) == {"ddp", "fsdp2"}
    assert found.over == ()
    assert "cannot tell them apart" in found.text


def test_lowest_memory_may_be_another_than_the_fastest(make_cell: Builder) -> None:
    found = recommended(
        make_cell(1.0, strategy="ddp"),
        make_cell(1.2, strategy="fsdp2", record={"memory_bytes": 40 * 2**20}),
    )
    assert found["highest throughput"].choose == ("ddp",)
    assert found["lowest memory"].choose == ("fsdp2",)
    assert "peak memory" in found["lowest memory"].text


def test_caveats(make_cell: Builder) -> None:
    once = recommended(make_cell(1.0, 1, strategy="ddp"), make_cell(1.2, 1, strategy="fsdp2"))["highest throughput"]
    assert once.caveats == ("launches were not repeated", GLOO)
    thrice = recommended(make_cell(1.0, strategy="ddp"), make_cell(1.2, strategy="zero:stage=1"))["highest throughput"]
    assert thrice.caveats == ()
    busy = {"evidence": {"neighbours": 2}}
    crowded = recommended(
        make_cell(1.0, strategy="ddp", device="cuda", record=dict(busy)),
        make_cell(1.2, strategy="fsdp2", device="cuda", record=dict(busy)),
    )
    assert crowded["highest throughput"].caveats == ("other processes ran on the GPU",)
    assert crowded["lowest memory"].caveats == ()


def test_shared_gpu_is_never_ranked_for_speed(make_cell: Builder) -> None:
    shared = {"evidence": {"settings": {"shared_gpu": True}}}
    found = recommended(
        make_cell(1.0, strategy="ddp", device="cuda", record=dict(shared)),
        make_cell(2.0, strategy="fsdp2", device="cuda", record={**shared, "memory_bytes": 40 * 2**20}),
    )
    assert set(found) == {"lowest memory"}
