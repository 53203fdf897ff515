"""Real runs of a model whose reference does not fit: layouts are proved on fewer layers, and mistakes are found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.campaign.run.findings import run_lines
from paceline.results.records import RunRecord

pytestmark = pytest.mark.slow

# Weights, gradients and moments of the whole take 98 MiB; those of half of its layers, with the rest of a step, fit.
LIMIT_GIB = 0.09
LEVEL = "proved on 4 of 8 layers"
HONEST = ("fsdp2", "mesh:tp=2", "mesh:pp=2")
# In the layers of the reduced form, and only in those that it does not have.
EVERYWHERE, DEEP = "faulty.wrong_layers", "faulty.wrong_layers:first=4"


@pytest.fixture(scope="module")
def proved(campaign: Callable[..., Any]) -> Any:
    return campaign(
        "proved",
        # Without a global batch, because strategies of other packages are not asked for their replicas.
        [
            {"strategy": [HONEST[0]], "accumulation": [2]},
            {"strategy": [*HONEST[1:], EVERYWHERE, DEEP], "accumulation": [4]},
        ],
        profiled=False,
        model="tiny:layers=8,hidden=256",
        sequence_length=16,
        micro_batch=1,
        global_batch=None,
        steps=3,
        proof={"limit_gib": LIMIT_GIB},
    )


def whole(proved: Any) -> dict[str, RunRecord]:
    return {str(r.spec.strategy): r for r in proved.records if not r.proves_only}


def proofs(proved: Any) -> dict[str, RunRecord]:
    return {str(r.spec.strategy): r for r in proved.records if r.spec.reduction and not r.is_reference}


def certificate(proved: Any, run: RunRecord) -> dict[str, Any]:
    found: dict[str, Any] = next(c for c in proved.report["certificates"] if c["run"] == run.spec.run_id)
    return found


def test_layouts_are_proved_on_fewer_layers_and_compared_at_full_size(proved: Any) -> None:
    (reference,) = [record for record in proved.records if record.is_reference]
    assert (reference.status, reference.shape.layers) == ("ok", 4), "the whole was not tried: it cannot fit"
    for strategy in HONEST:
        proof, full = proofs(proved)[strategy], whole(proved)[strategy]
        assert (proof.status, proof.shape.layers) == ("ok", 4), proof.error
        assert (full.status, full.shape.layers) == ("ok", 8), full.error
        assert proof.spec.training == full.spec.training
        assert proof.spec.topology == full.spec.topology
        found = certificate(proved, full)
        assert found["valid"], found["reasons"]
        assert (found["level"], found["reference"]) == (LEVEL, reference.spec.run_id)
        assert found["steps"] == found["compared_steps"] == 3
        names = {check["name"] for check in found["checks"]}
        assert names >= {"proof", "initial weights", "data", "optimizer steps", "matrix products", "loss trajectory"}


def test_a_mistake_is_found_in_the_proof_and_the_whole_is_not_started(proved: Any) -> None:
    proof, full = proofs(proved)[EVERYWHERE], whole(proved)[EVERYWHERE]
    assert proof.status == "invalid"
    assert "loss trajectory: expected within 0.0001 of the reference" in proof.error
    assert (full.status, full.outcomes, full.steps) == ("invalid", (), ())
    assert full.error.startswith(f"not started: not proved on 4 of 8 layers: {proof.spec.run_id} ended invalid: ")
    assert proved.code == 1


def test_a_mistake_that_only_the_whole_has_is_found_by_comparing_layouts(proved: Any) -> None:
    proof, full = proofs(proved)[DEEP], whole(proved)[DEEP]
    assert proof.status == "ok"
    found = certificate(proved, full)
    assert not found["valid"]
    assert any("of the median of 4 cells" in reason for reason in found["reasons"]), found["reasons"]
    assert proved.finding(full)["status"] == "invalid"


def test_every_text_says_on_what_it_was_proved(proved: Any) -> None:
    assert LEVEL in proved.stdout
    assert "5 configurations are certified on 4 of 8 layers" in " ".join(proved.stdout.split())
    for name in ("report.md", "report.html", "metrics.csv", "cells.csv"):
        assert LEVEL in (proved.directory / name).read_text(), name
    assert any(LEVEL in line for line in run_lines(Path(whole(proved)["fsdp2"].path)))
    assert any("it only proves others" in line for line in run_lines(Path(proofs(proved)["fsdp2"].path)))
    report = proved.report
    assert report["comparisons"]
    assert {comparison["level"] for comparison in report["comparisons"]} == {LEVEL}
    assert {measurement["equal_work"] for measurement in report["measurements"]} == {LEVEL}


def test_runs_of_a_proof_group_are_sealed_marked_and_never_measured(proved: Any) -> None:
    ours = {record.spec.run_id: record for record in (*proofs(proved).values(),)}
    for run in ours:
        stored = json.loads((proved.directory / run / "spec.json").read_text())
        assert stored["reduction"]["layers"], stored["reduction"]["of_layers"] == (4, 8)
        assert run.startswith("proof-")
    marked = {run["run"]: run["proof"] for run in proved.report["runs"]}
    assert {marked[run] for run in ours} == {"4 of 8 layers"}
    measured = {run for m in proved.report["measurements"] for run in m["runs"]}
    assert not measured & set(ours)
    cells = {record.spec.cell for record in ours.values()}
    for part in ("measurements", "recipes", "comparisons", "layouts", "bottlenecks"):
        assert not {row["cell"] for row in proved.report[part]} & cells, part
