"""predict and choose as users type them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from paceline import cli
from paceline.campaign.run import rehearsed
from paceline.campaign.run.rehearsed import Rehearsed
from paceline.host import prices
from paceline.prediction import memory, stored
from paceline.prediction.predict import Worth
from paceline.prediction.setup import Setup
from paceline.report.tables import predictions as tables

TABLE = Path(__file__).parents[3] / "benchmarks" / "data" / "training_throughput.csv"


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command prints; memory by arithmetic unless the words say otherwise, because rehearsals take seconds."""
    quick = [] if "--rehearse" in words else ["--rehearse", "0"]
    assert cli.main([*words, *quick]) == 0
    return capsys.readouterr().out


def test_predict_gives_every_quantity_with_its_interval(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    question = ["--model", "llama-70b", "--gpu", "h100", "--gpus", "256", "--layout", "dp=32,tp=8", "--seq", "8192"]
    words = ["predict", *question, "--global-batch", "1024", "--tokens", "2B", "--price", "2", "--json"]
    found = json.loads(answer(capsys, *words, "--save", "--out", str(tmp_path)))
    per_step = ("step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu_ratio", "joules_per_token")
    for name in (*per_step, "days", "usd", "joules"):
        assert 0 < found[name]["low"] < found[name]["value"] < found[name]["high"], name
    assert sum(found["parts_s"].values()) == pytest.approx(found["step_time_s"]["value"])
    assert found["tokens_per_s"]["value"] * found["step_time_s"]["value"] == pytest.approx(1024 * 8192)
    assert found["joules"]["high"] == pytest.approx(found["joules_per_token"]["high"] * 2e9)
    assert found["usd"]["value"] == pytest.approx(found["days"]["value"] * 24 * 256 * 2)
    assert [row["key"] for row in stored.read(tmp_path)] == [found["key"]]


def test_the_worth_of_anchors_of_a_table_is_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("internevo")][:2]
    path = tmp_path / "ours.csv"
    path.write_text("\n".join([lines[0], *rows]) + "\n", encoding="utf-8")
    text = answer(capsys, "predict", "--model", "llama-7b", "--gpu", "a100", "--gpus", "64", "--anchor", str(path))
    assert "What each anchor is worth" in text
    assert "internevo-0001" in text
    assert "What to measure next" in text


def test_a_contradicting_anchor_is_explained() -> None:
    near, far = Worth(name="near", without=0.2, with_it=0.1), Worth(name="far", without=0.1, with_it=0.2)
    assert not tables.narrowing([near]).notes
    assert "makes intervals wider" in tables.narrowing([near, far]).notes[0]


def test_all_layouts_are_ranked(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(
        answer(capsys, "predict", "--model", "llama-8b", "--gpu", "h200", "--gpus", "8", "--layout", "all", "--json")
    )
    assert all(row["fits"] for row in found)
    assert {row["layout"] for row in found} >= {"dp=8,zero1", "dp=8,zero3", "dp=4,tp=2"}


def test_choose_writes_files_that_can_be_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["choose", "--model", "llama-8b", "--gpu", "h200", "--gpus", "8", "--tokens", "10B", "--price", "3"]
    found = json.loads(answer(capsys, *words, "--out", str(tmp_path), "--json"))
    assert found["options"][0]["verdict"].startswith("best")
    assert found["recommendation"][0].startswith("Recommendation (predicted, nothing measured): 8 x h200")
    document = yaml.safe_load(Path(found["files"][0]).read_text(encoding="utf-8"))
    assert document["base"]["model"] == "llama-8b"
    assert (
        cli.main(
            ["plan", found["files"][0], "--commands", "--gpu", "h200", "--set", "device=cpu", "--out", str(tmp_path)]
        )
        == 0
    )
    assert "predicted: step" in capsys.readouterr().out
    assert len(stored.read(tmp_path)) >= len(found["files"])


def test_a_deadline_that_nothing_meets_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["choose", "--model", "llama-8b", "--gpu", "h200", "--gpus", "8", "--tokens", "1T", "--deadline", "1h"]
    assert cli.main([*words, "--out", str(tmp_path)]) == 1
    assert "No option meets the limits" in capsys.readouterr().out


def test_a_gpu_that_is_not_here_is_not_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["choose", "--model", "llama-8b", "--gpu", "v100", "--gpus", "8", "--measure", "--method", "qlora"]
    assert cli.main([*words, "--out", str(tmp_path), "--rehearse", "0"]) == 2
    assert "--measure: got 'v100', expected a machine with" in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "a refused command stores nothing"


def test_a_budget_is_above_zero(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["choose", "--model", "llama-8b", "--gpu", "h200", "--gpus", "8", "--tokens", "1B", "--budget", "-5"]
    assert cli.main(words) == 2
    assert "--budget: got -5.0, expected USD above 0." in capsys.readouterr().err


def test_scaling_and_serving_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    text = answer(capsys, "predict", "--model", "llama-8b", "--gpu", "h100", "--gpus", "8", "--up-to", "64")
    assert "The network" in text
    words = [
        "predict",
        "--model",
        "llama-70b",
        "--gpu",
        "h200",
        "--gpus",
        "8",
        "--precision",
        "fp8",
        "--serving",
        "1000/500",
    ]
    assert "8 x tp=1" in answer(capsys, *words)
    text = answer(capsys, *words, "--anchor", str(TABLE.with_name("inference.csv")))
    assert "What each anchor is worth for the fastest option" in text


def test_memory_is_rehearsed_where_the_program_is_ours(
    capsys: pytest.CaptureFixture[str], forking_python: None
) -> None:
    words = ["predict", "--model", "tiny", "--gpu", "h200", "--gpus", "2", "--seq", "32", "--global-batch", "4"]
    found = json.loads(answer(capsys, *words, "--layout", "fsdp", "--rehearse", "200", "--json"))
    assert found["memory_source"] == "rehearsal"
    rehearsed = found["rehearsed_memory_bytes"]
    assert rehearsed["optimizer"] > 0
    assert rehearsed["peak"] >= rehearsed["parameters"] + rehearsed["optimizer"]
    split = json.loads(answer(capsys, *words, "--layout", "tp=2", "--rehearse", "200", "--json"))
    assert split["memory_source"] == "rehearsal"
    # FSDP2 halves everything. tp halves all but positions, norms and the biases of outputs, with 8 bytes of state each.
    positions, norms, biases = 256 * 128, (2 * 2 + 1) * 2 * 128, 2 * 2 * 128
    whole = (positions + norms + biases) // 2
    assert split["rehearsed_memory_bytes"]["optimizer"] - rehearsed["optimizer"] == 8 * whole
    assert "By arithmetic: --rehearse is 0." in answer(capsys, *words)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--gpu", "cpu"], "--gpu: got cpu, expected --anchor with a `paceline run compute`"),
        (["--gpu", "a100", "--precision", "fp8"], "--precision: got 'fp8', expected bf16 or fp16: A100"),
        (["--layout", "none,offload"], "--layout: got 'none,offload', expected zero1, zero2 or zero3"),
        (["--layout", "tp=3"], "a product that divides 8 GPUs"),
        (["--layout", "tp=16"], "a product that divides 8 GPUs"),
        (["--precision", "int3"], "--precision: got 'int3'"),
        (["--interconnect", "carrier-pigeon"], "--interconnect: got 'carrier-pigeon'"),
        (["--anchor", "nowhere"], "--anchor: got 'nowhere'"),
        (["--serving", "many"], "--serving: got 'many'"),
        (["--global-batch", "7"], "a multiple of dp=8"),
        (["--seq", "-1"], "--seq: got -1, expected a whole number from 1"),
        (["--micro-batch", "0"], "--micro-batch: got 0, expected a whole number from 1"),
        (["--gpus", f"{10**12}"], f"--gpus: got {10**12}, expected a whole number from 1 to 1,000,000,000"),
        (["--checkpointing", "ful"], "--checkpointing: got 'ful', expected none, selective, full"),
        (["--tokens", "abc"], "--tokens: got 'abc', expected a whole number of tokens"),
        (["--price", "oci-a10"], "--price: got 'oci-a10', expected an on-demand price of H100"),
        (["--layout", "tp=16", "--gpus", "16"], "'tp=16', expected a divisor of the 8 heads of keys and values"),
        (["--layout", "cp=3", "--gpus", "3"], "'cp=3', expected a divisor of half of the sequence, 4096"),
        (["--model", "gpt2-124m", "--seq", "2048"], "--seq: got 2048, expected at most the 1024 learned positions"),
        (["--up-to", "4"], "--up-to: got 4, expected more than the 8 of --gpus"),
        (["--up-to", "16", "--json"], "--up-to: got 16, expected no --json, --save or --layout all"),
        (["--up-to", "16", "--layout", "all"], "--up-to: got 16, expected no --json, --save or --layout all"),
        (["--serving", "9/9", "--ttft", "-1"], "--ttft: got -1.0, expected seconds above 0"),
        (["--rehearse", "-1"], "--rehearse: got -1.0, expected seconds from 0 to 86,400"),
        (["--rehearse", "inf"], "--rehearse: got inf, expected seconds from 0 to 86,400"),
        (["--save", "--out", __file__], "test_predictions.py', which is not a directory"),
        (["--save", "--out", f"{__file__}/new"], "test_predictions.py/new', which is not a directory"),
        (["--serving", "99999999/9"], "expected enough for llama-8b. Use more GPUs, or --precision fp8."),
        (["--serving", "9/9", "--endpoint", "gpu=x9"], "--endpoint: got 'x9', expected one of"),
    ],
)
def test_a_wrong_question_is_one_sentence(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["predict", "--model", "llama-8b", "--gpu", "h100", "--gpus", "8", *words]) == 2
    text = capsys.readouterr().err
    assert told in text
    assert text.count("\n") == 1


def test_what_does_not_fit_says_so_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["predict", "--model", "llama-70b", "--gpu", "a10", "--gpus", "1", "--rehearse", "0"]) == 0
    text = capsys.readouterr().out
    assert 0 < text.index("this does not fit into the GPU's memory") < text.index("What the step consists of")


def stand_in(factor: float) -> Callable[..., Rehearsed]:
    """A rehearsal that finds so many times what the arithmetic says: a real one of this model takes a minute."""
    return lambda model, one, limit: Rehearsed(components={"peak": int(factor * memory.total(one))})


def test_a_setup_that_a_rehearsal_refuses_is_not_predicted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["predict", "--model", "llama-8b", "--gpu", "h100", "--gpus", "8"]
    assert "2 x 16 sequences per rank, no checkpointing" in " ".join(answer(capsys, *words).split())
    monkeypatch.setattr(rehearsed, "rehearse", stand_in(1.5))
    text = answer(capsys, *words, "--rehearse", "1")
    assert "1 x 32 sequences per rank" in " ".join(text.partition("quantity")[0].split())
    assert "usable: fits" in text
    assert "Too large by rehearsal, so not chosen: dp=8,zero3, micro batch 2, no checkpointing" in " ".join(
        text.split()
    )
    # What was asked for stays, and the first table says what that means.
    text = answer(
        capsys, *words, "--rehearse", "1", "--layout", "fsdp", "--micro-batch", "8", "--checkpointing", "none"
    )
    assert "By its rehearsal this does not fit" in " ".join(text.split())
    words += ["--micro-batch", "2", "--checkpointing", "none", "--layout", "dp=8,zero3"]
    found = json.loads(answer(capsys, *words, "--rehearse", "1", "--json"))
    assert (found["fits"], found["memory_source"]) == (False, "rehearsal")
    assert found["memory_bytes"]["total"] < found["memory_bytes"]["usable"] < found["rehearsed_memory_bytes"]["peak"]


def test_choose_recommends_only_what_a_rehearsal_accepts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rehearsals need 1.2 times the arithmetic: of the options without checkpointing only small ones are left."""
    words = ["choose", "--model", "llama-8b", "--gpu", "h100", "--gpus", "8", "--tokens", "10B", "--price", "2.5"]
    words += ["--out", str(tmp_path), "--rehearse", "1"]
    rehearsals = []

    def rehearse(model: str, one: Setup, limit_s: float) -> Rehearsed:
        rehearsals.append(one)
        return stand_in(1.2)(model, one, limit_s)

    monkeypatch.setattr(rehearsed, "rehearse", rehearse)
    found = json.loads(answer(capsys, *words, "--json"))
    usable = memory.usable_bytes(rehearsals[-1])
    assert usable is not None
    fits = [1.2 * memory.total(one) <= usable for one in rehearsals]
    assert fits == [False] * (len(fits) - 1) + [True]
    assert len(fits) > 1
    assert found["options"][0]["layout"] == rehearsals[-1].layout
    assert all(1.2 * option["memory_bytes"]["total"] <= usable for option in found["options"])
    # The nearest option that misses a limit is one that fits, too.
    assert cli.main([*words, "--deadline", "30h"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "No option meets the limits" in text
    refused = [line.split(":")[0] for line in text.split("Memory of ")[1:] if "is no option" in line]
    nearest = text.partition("The nearest is 8 x h100, ")[2].partition(", micro batch")[0]
    assert nearest not in refused
    # Nothing is left.
    monkeypatch.setattr(rehearsed, "rehearse", stand_in(30.0))
    assert cli.main(words) == 2
    assert (
        "No layout fits, not even with offload to the host (a rehearsal needed 30 times as much"
        in capsys.readouterr().err
    )


def test_a_budget_needs_a_price_and_numbers_count_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["choose", "--model", "llama-8b", "--gpu", "h100", "--out", str(tmp_path), "--gpus"]
    once, twice = (json.loads(answer(capsys, *words, gpus, "--json"))["options"] for gpus in ("8", "8,8"))
    assert len(once) == len(twice)
    monkeypatch.setattr(prices, "table", lambda: ())
    assert cli.main([*words, "8", "--rehearse", "0", "--tokens", "1M", "--budget", "5"]) == 2
    assert "--budget: got 5.0, expected --price as well: h100 has no known price" in capsys.readouterr().err
