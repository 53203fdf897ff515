"""The page about two QLoRA write-ups says what the code says, and the numbers that were wrong there are right here."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import seed_numbers as seed

from paceline.analysis.report import build
from paceline.results import store
from paceline.results.claims import import_table

PAGE = Path(__file__).parents[2] / "docs" / "seed-qlora.md"
MARKED = re.compile(r"<!-- generated: (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)


def test_the_page_says_what_the_code_says() -> None:
    blocks = seed.blocks()
    text = PAGE.read_text()
    written = MARKED.sub(lambda m: f"<!-- generated: {m[1]} -->\n{blocks[m[1]]}\n<!-- end -->", text)
    if os.environ.get("PACELINE_UPDATE_GOLDEN"):
        PAGE.write_text(written)
    assert {m[1] for m in MARKED.finditer(text)} == set(blocks)
    assert PAGE.read_text() == written


def test_computed_numbers_are_only_between_the_marks() -> None:
    prose = MARKED.sub("", PAGE.read_text())
    assert not re.search(r"\d+(\.\d+)?\s*(%|USD|ms|MB|times)", prose)
    assert not re.search(r"\d\.\d", prose)


def test_adapters_of_rank_16_on_grouped_heads() -> None:
    assert seed.adapter_parameters(seed.MISTRAL, 16, 8) == 13_631_488
    assert seed.adapter_parameters(seed.MISTRAL, 16, 32) == 16_777_216


def test_twice_the_samples_of_half_the_length_is_no_speed_up() -> None:
    assert round(100 * seed.per_token_gain(), 1) == 5.8
    sample, token = seed.savings()
    assert round(100 * sample) == 53
    assert round(100 * token, 1) == 5.5


def test_cost_per_sample_never_falls_with_the_nodes() -> None:
    """By hand: 0.60 USD * n * 1000 / (3600 * samples/s)."""
    found = [float(row[9]) for row in seed.scaling_rows()]
    assert found == pytest.approx([0.6 / 3.6 / 1.46, 1.2 / 3.6 / 2.8, 2.4 / 3.6 / 5.5], abs=5e-5)
    assert found == sorted(found)
    assert seed.slip_ratio("2") == pytest.approx(1 / 2)
    assert seed.slip_ratio("4") == pytest.approx(1 / 4)


def test_an_all_reduce_of_the_stated_size_by_hand() -> None:
    """2 (n - 1) / n * 33.6 MB over 1.25 GB/s: 26.88 ms between 2 nodes, 40.32 ms between 4."""
    rows = {(row[0], row[1]): row for row in seed.transfer_rows()}
    assert rows["as stated, 16 bit", "2"][3] == "26.9"
    assert rows["as stated, 16 bit", "4"][3] == "40.3"
    assert rows["counted, fp32", "4"][2] == "54.5"
    assert max(int(row[6]) for row in rows.values()) < 25, "it explains no quarter of what the rates lose"


def test_no_usual_spread_of_the_nodes_is_the_stated_one() -> None:
    assert all(round(value, 1) != seed.S["001", "node_variance", ""] for value in seed.spreads().values())
    assert seed.spreads()["(largest - smallest) / mean"] == pytest.approx(100 * 0.03 / 1.455)


def test_the_scaling_table_imports_as_claims(tmp_path: Path) -> None:
    directory, count = import_table(seed.FOLDER / "scaling.csv", tmp_path)
    assert count == 3
    report = build(store.read_runs(directory)[0], "seed")
    found = {c.axes["nodes"]: c for c in report.claims if c.metric == "scaling_efficiency_ratio"}
    assert {n: round(100 * (c.recomputed or 0), 1) for n, c in found.items()} == {1: 100.0, 2: 95.9, 4: 94.1}
    assert not report.measurements
