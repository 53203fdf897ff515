"""Settings of a proof on the command line: what `plan` says, and wrong ones as one sentence with exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli import main

FILE = """
name: large
base: {model: "tiny:layers=16", device: cpu, precision: fp32, processes: 2, sequence_length: 64, global_batch: 8}
matrix: {strategy: [ddp, fsdp2]}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "large.yaml"
    path.write_text(FILE)
    return str(path)


def asked(file: str, *settings: str) -> int:
    words = [word for setting in settings for word in ("--set", setting)]
    return main(["plan", file, "--out", str(Path(file).parent / "out"), *words])


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("proof=sometimes", "proof: got 'sometimes', expected auto or never, or a mapping of sizes."),
        ("proof.layer=4", "large: got the field 'proof.layer', expected a known field. Did you mean 'layers'?"),
        ("proof.layers=four", "large: proof.layers: got 'four', expected a whole number."),
        ("proof.layers=0", "proof.layers: got 0, expected a whole number from 1."),
        ("proof.layers=17", "proof.layers: got 17, expected at most 16, that of the experiment."),
        ("proof.limit_gib=-1", "proof.limit_gib: got -1.0, expected a positive number of GiB."),
        (
            "proof=4",
            "large: proof: got 4, expected auto, never or a mapping with layers, sequence_length, "
            "global_batch, limit_gib.",
        ),
        ("proof={mode: never, layers: 4}", "proof: got 'never with layers', expected never or sizes, not both."),
        (
            "proof=[never, {layers: 4}]",
            "proof: got several values for the same cell, expected one value, because it is not part of the cell.",
        ),
        (
            "telemetry_hz=[1, 2]",
            "telemetry_hz: got 1 and 2 for the same cell, expected one value, because it is not part of the cell.",
        ),
        ("proof.global_batch=3", "proof.global_batch: got 3, expected a multiple of 2, which ddp needs."),
    ],
)
def test_a_wrong_setting_is_one_sentence(
    file: str, setting: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(file, setting) == 2
    assert capsys.readouterr().err.strip() == f"paceline: {said}"


def test_a_plan_says_that_a_proof_group_runs(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(file, "proof.layers=4", "proof.sequence_length=32") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "reference on 4 of 16 layers, sequence 32 of 64," in text
    assert text.count("proof on 4 of 16 layers, sequence 32 of 64:") == 2
    assert "2 configurations are certified on 4 of 16 layers, sequence 32 of 64, then compared with each other" in text
    assert "2 cells, 2 runs, 1 reference run, 2 proof runs" in text
    assert "proof run" not in plan_of(file, capsys)


def test_a_plan_says_that_nothing_can_be_proved(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(file, "proof.limit_gib=0.0001") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("not started") == 2
    assert "and no reduced form of it fits either; raise proof.limit_gib." in text


def test_repeats_among_the_fields_of_a_cell_are_said_to_belong_beside_them(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(file).write_text(FILE.replace("base: {", "base: {repeats: 3, "))
    assert asked(file) == 2
    said = "large: got repeats among the fields of a cell, expected it beside base and matrix."
    assert capsys.readouterr().err.strip() == f"paceline: {said}"


def test_configurations_of_one_work_have_the_same_proof(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    parts = "matrix: [{strategy: [ddp]}, {strategy: [fsdp2], proof: [{layers: 4}]}]"
    Path(file).write_text(FILE.replace("matrix: {strategy: [ddp, fsdp2]}", parts))
    assert asked(file) == 2
    text = capsys.readouterr().err.strip()
    assert text.startswith("paceline: proof: got 'another one for "), text
    assert text.endswith(
        "expected the same for all configurations of one work, because they share one reference or proof."
    )


def plan_of(file: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert asked(file) == 0
    return capsys.readouterr().out
