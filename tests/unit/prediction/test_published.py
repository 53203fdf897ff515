"""Published rows as setups, and the calibration on rows that were made from known parameters."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import RequestError
from paceline.prediction import calibration, parameters, published, scoring
from paceline.prediction.offsets import apart
from paceline.prediction.parameters import Shared
from paceline.prediction.published import Row
from paceline.prediction.step_time import columns, step_time

TABLE = Path(__file__).parents[3] / "benchmarks" / "data" / "training_throughput.csv"
ROW = {
    "model": "GPT-22B", "hidden": "6144", "layers": "48", "heads": "64", "vocab": "51200", "seq_len": "2048",
    "gpu": "A100-80GB", "n_gpus": "8", "tp": "8", "micro_batch": "4", "global_batch": "4", "precision": "fp16",
    "activation_checkpointing": "full", "step_time_s": "1.42", "source_key": "korthikanti-2022", "row_id": "k1",
}  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return published.read(TABLE)


def test_a_row_becomes_a_setup() -> None:
    one = published.row(ROW)
    assert one is not None
    s = one.setup
    assert (s.tp, s.dp, s.micro_batch, s.micro_batches, s.checkpointing) == (8, 1, 4, 1, "full")
    assert not s.software.fused_attention
    assert one.step_s == 1.42


def test_throughput_per_gpu_gives_the_step_time() -> None:
    one = published.row({**ROW, "step_time_s": "", "tokens_per_s_per_gpu": "721.127"})
    assert one is not None
    assert one.step_s == pytest.approx(4 * 2048 / 8 / 721.127)


@pytest.mark.parametrize("missing", ["hidden", "step_time_s", "gpu"])
def test_a_row_that_lacks_something_is_left_out(missing: str) -> None:
    assert published.row({**ROW, missing: ""}) is None


def test_recomputation_that_is_not_stated_follows_from_memory() -> None:
    """175B on 128 GPUs with two sequences per micro batch does not fit without recomputation; 5B does."""
    where = {"gpu": "H100-SXM", "n_gpus": "128", "tp": "1", "fsdp": "128", "micro_batch": "2", "global_batch": "256"}
    big = {**ROW, **where, "hidden": "12288", "layers": "96", "heads": "96", "activation_checkpointing": "not stated"}
    found = published.row(big)
    assert found is not None
    assert found.setup.checkpointing == "full"
    small = published.row({**big, "hidden": "4096", "layers": "24", "heads": "32"})
    assert small is not None
    assert small.setup.checkpointing == "none"


def test_recomputation_that_is_not_stated_follows_from_the_configuration_of_the_model() -> None:
    """Pax repeats all of GPT3-126M, and the attention of GPT3-5B; nothing is known of its Llama."""
    where = {"gpu": "H100-SXM", "n_gpus": "8", "tp": "1", "fsdp": "8", "micro_batch": "4", "global_batch": "32"}
    pax = {**ROW, **where, "source_key": "jax-toolbox-pax", "activation_checkpointing": "not stated"}
    shape = {"hidden": "4096", "layers": "24", "heads": "32"}
    for name, expected in (("GPT3-126M", "full"), ("GPT3-5B", "attention"), ("Llama-2-7B", "none")):
        one = published.row({**pax, **shape, "model": name})
        assert one is not None
        assert one.setup.checkpointing == expected, name
    stated = published.row({**pax, **shape, "model": "GPT3-126M", "activation_checkpointing": "none"})
    assert stated is not None
    assert stated.setup.checkpointing == "none"


@pytest.mark.parametrize(
    ("changes", "dropped", "expected"),
    [
        ({}, ("vocab", "step_time_s"), "without vocab, step_time_s or tokens_per_s_per_gpu, expected the columns of"),
        ({}, ("micro_batch", "global_batch"), "without micro_batch or global_batch, expected the columns of"),
        ({"step_time_s": "-3"}, (), "with no usable row, expected in each hidden, layers"),
        ({"layers": "many"}, (), "with no usable row, expected in each hidden, layers"),
        ({"step_time_s": "inf"}, (), "with no usable row, expected in each hidden, layers"),
        ({"gpu": "x100"}, (), "rows.csv, line 2, gpu: got 'x100', expected one of v100"),
    ],
)
def test_a_table_without_a_usable_row_names_what_is_wrong(
    changes: dict[str, str], dropped: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    row = {name: value for name, value in {**ROW, **changes}.items() if name not in dropped}
    path = tmp_path / "rows.csv"
    path.write_text(f"{','.join(row)}\n{','.join(row.values())}\n", encoding="utf-8")
    with pytest.raises(RequestError, match=re.escape(expected)):
        published.read_given(path, "--anchor")


def test_a_table_of_a_spreadsheet_is_read_and_its_rows_are_named(tmp_path: Path) -> None:
    """Spreadsheets start a CSV with a byte order mark; a row without an identifier has its line."""
    row = {name: value for name, value in ROW.items() if name != "row_id"}
    path = tmp_path / "ours.csv"
    path.write_text(f"{','.join(row)}\n{','.join(row.values())}\n", encoding="utf-8-sig")
    (one,) = published.read_given(path, "--anchor")
    assert (one.row_id, one.step_s) == ("ours.csv, line 2", 1.42)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError, match="expected a CSV file"):
        published.read_given(path, "--anchor")


def test_a_collection_of_several_programs_is_read_by_its_folders() -> None:
    where = "NVIDIA/dgxc-benchmarking@v25.02:maxtext/README_70b.md"
    big = {"hidden": "8192", "layers": "80", "gpu": "H100-SXM", "n_gpus": "64", "tp": "1", "fsdp": "64"}
    one = published.row({**ROW, **big, "source_key": "dgxc", "source": where, "activation_checkpointing": "not stated"})
    assert one is not None
    assert (one.source, one.setup.software.name, one.setup.checkpointing) == ("dgxc/maxtext", "maxtext", "selective")
    assert calibration.source_of(one) == "dgxc"
    other = published.row({**ROW, "source_key": "dgxc", "source": where.replace("maxtext", "nemotron")})
    assert other is not None
    assert (other.source, other.setup.software.name) == ("dgxc", "nemo")


def test_later_rows_of_llm_foundry_stop_recomputing_early(rows: list[Row]) -> None:
    """Rows of torch 2.1 (amp in the table) and earlier ones (pure); other programs with amp are not meant."""
    software = [one.setup.software for one in rows if one.setup.software.name == "llm-foundry"]
    kinds = {(one.reduce_bytes, one.weight_bytes, one.stops_early) for one in software}
    assert kinds == {(4.0, 6.0, True), (2.0, 4.0, False)}
    others = [one.setup.software for one in rows if one.setup.software.name == "flash-attn-training"]
    assert {(one.reduce_bytes, one.stops_early) for one in others} == {(4.0, False)}


def test_a_pipeline_of_torchtitan_has_as_many_micro_batches_as_stages() -> None:
    row = {**ROW, "source_key": "torchtitan", "gpu": "H100-SXM", "n_gpus": "64", "pp": "8", "global_batch": ""}
    for notes, cut in (("1F1B", (4, 8)), ("Interleaved1F1B", (2, 16))):
        one = published.row({**row, "micro_batch": "32", "notes": notes})
        assert one is not None
        assert (one.setup.micro_batch, one.setup.micro_batches) == cut


def test_the_published_table_is_read(rows: list[Row]) -> None:
    counts = {name: sum(one.source == name for one in rows) for name in {one.source for one in rows}}
    assert counts["llm-foundry"] == 216
    assert counts["vtrain-single"] == 1440
    assert "seed-ddp-bench" not in counts  # its model has no published shape
    assert all(one.step_s > 0 for one in rows)


def test_the_shipped_fit_explains_the_published_rows(rows: list[Row]) -> None:
    """Not a measure of accuracy, which docs/prediction.md has: that the fit, the table and the code belong together."""
    fit = parameters.load()
    sample = [one for one in rows if one.source != "vtrain-single"][::5]
    predicted = step_time(columns([one.setup for one in sample]), fit.values)
    error = np.abs(predicted / np.array([one.step_s for one in sample]) - 1)
    assert float(np.median(error)) < 0.1
    assert fit.provenance["rows"] == len(calibration.usable(rows))


def test_a_fit_recovers_the_parameters_that_made_the_rows(rows: list[Row]) -> None:
    """Rows made by the model with two changed parameters give these back."""
    sample = [one for one in rows if one.source in ("llm-foundry", "korthikanti-2022")][::4]
    truth = {**parameters.starting_values()}
    truth["efficiency"] += 0.08
    truth["flash"] -= 0.2
    made = step_time(columns([one.setup for one in sample]), truth)
    fitted, estimate = calibration.fit([replace(one, step_s=float(t)) for one, t in zip(sample, made, strict=True)],
                                       parameters.OFFSET_PRIORS)  # fmt: skip
    assert np.median(np.abs(estimate.residuals)) < 0.01
    assert fitted.values["flash"] == pytest.approx(truth["flash"], abs=0.1)


def test_coverage_and_errors_are_counted() -> None:
    fit = replace(parameters.load(), scale={0: 1.0})
    one = published.row(ROW)
    assert one is not None
    exact = float(step_time(columns([one.setup]), fit.values)[0])
    rows = [replace(one, step_s=exact * factor) for factor in (1.0, 1.0, 1.1, 10.0)]
    found = calibration.score("x", fit, rows, 0)
    assert found is not None
    assert found.errors == pytest.approx([0, 0, 1 - 1 / 1.1, 0.9])
    assert found.coverage == 0.75
    assert calibration.conformal([found]) > 1


def left_out(residuals: list[float], **changes: list[int]) -> calibration.LeftOut:
    """Rows of one setup, with what differs between them."""
    one = published.row(ROW)
    assert one is not None
    setups = [
        one.setup.replaced(**{name: values[i] for name, values in changes.items()}) for i in range(len(residuals))
    ]
    nothing = np.zeros((len(residuals), len(residuals)))
    c = columns(setups)
    return calibration.LeftOut("x", apart(c, c), np.array(residuals), nothing, 1.0)


def test_the_likelihood_is_that_of_a_student_t() -> None:
    """With eight degrees of freedom and a scale of 1 the density at 0 is 0.3867, at 2 it is 0.0624."""
    shared = Shared(setup=math.sqrt(1 - 0.25 - 0.0009), kind=0.5, gpus=4.0)
    assert math.exp(calibration.log_likelihood(left_out([0.0]), shared)) == pytest.approx(0.3867, abs=1e-4)
    assert math.exp(calibration.log_likelihood(left_out([2.0]), shared)) == pytest.approx(0.0624, abs=1e-4)


def test_what_setups_share_is_as_large_and_as_wide_as_the_residuals_show() -> None:
    """Errors that stay over 8 to 512 GPUs make the length longer, and larger errors the part of alike setups larger.

    Errors that setups of one kind have in common, however unlike they are, make the part of the kind larger.
    """
    gpus, unlike = {"gpus": [8, 64, 512]}, {"sequence_length": [512, 8192, 131072]}
    same, other = (calibration.fit_shared([left_out([0.2, 0.2, sign * 0.2], **gpus)]) for sign in (1, -1))
    assert same.gpus > other.gpus
    small, large = (calibration.fit_shared([left_out([e, e, e], **gpus)]) for e in (0.01, 0.5))
    assert small.setup < Shared().setup < large.setup
    same, other = (calibration.fit_shared([left_out([0.2, 0.2, sign * 0.2], **unlike)]) for sign in (1, -1))
    assert same.kind > 2 * other.kind


def test_the_most_telling_rows_do_not_repeat_each_other() -> None:
    """Row 1 says most about row 0. Row 2 says nearly as much, but the same; row 3 adds something of its own."""
    covariance = np.array([
        [1.00, 0.90, 0.89, 0.30],
        [0.90, 1.00, 0.99, 0.00],
        [0.89, 0.99, 1.00, 0.00],
        [0.30, 0.00, 0.00, 1.00],
    ])  # fmt: skip
    assert calibration.most_telling(covariance, np.array([2, 3, 1]), 0, 2).tolist() == [1, 3]


def test_a_table_is_scored(tmp_path: Path, rows: list[Row]) -> None:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    kept = [lines[0], *(line for line in lines if line.startswith("korthikanti"))]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(kept) + "\n", encoding="utf-8")
    found = scoring.score_table(path)
    assert len(found.pairs) == 8
    right, total, regret = found.ordering()
    assert (right, total) == (4, 4)  # sequence parallelism with selective recomputation is faster in every pair
    assert regret == 0
    assert scoring.to_dict(found)["predictions"] == 8
