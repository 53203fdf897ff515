"""Serving by memory and compute limits, and scaling beyond the measured, on numbers that can be worked out by hand."""

from __future__ import annotations

import math
import tarfile
from pathlib import Path

import pytest
from answered_records import build_record, build_replica, build_request, build_spec, build_stage

from paceline.campaign.run.measured_setups import read_known
from paceline.errors import RequestError
from paceline.experiment.choices import Choice
from paceline.models import arithmetic
from paceline.prediction import hardware, scaling, served_anchors, serving
from paceline.prediction.predict import setup_of
from paceline.prediction.serving import Served

MEASURED = Path(__file__).parents[3] / "docs" / "measured" / "h200-inference" / "runs.tar.gz"


def served(model: str = "llama-8b", gpu: str = "h100", **more: object) -> Served:
    usual: dict[str, object] = {"input_tokens": 1000, "output_tokens": 200}
    return Served(shape=arithmetic.load(Choice(model)), gpu=hardware.accelerator(gpu), **usual | more)  # type: ignore[arg-type]


def test_one_sequence_decodes_at_the_memory_bandwidth() -> None:
    p = {"bandwidth": math.log(0.5), "prefill": 0.0, "step_s": -40.0, "layer_s": -40.0}
    _, step = serving.times(served(batch=1), 1, p)
    cache = 1100 * 2 * 2 * 32 * 8 * 128
    assert step == pytest.approx((2 * 8_030_261_248 + cache) / (0.5 * 3350e9))


def test_the_cache_limits_the_batch() -> None:
    one = served()
    room = 0.88 * 80e9 - 2 * 8_030_261_248
    assert one.most_sequences() == int(room / (1200 * 2 * 2 * 32 * 8 * 128))
    assert served("llama-70b").most_sequences() == 0
    with pytest.raises(Exception, match="at least 3 GPUs"):
        serving.predict(served("llama-70b"))


def test_an_anchor_scales_the_prediction_and_narrows_it() -> None:
    one = served(batch=16)
    before = serving.predict(one)
    after = serving.predict(one, [(one, 0.5 * before.tokens_per_s)])
    assert after.tokens_per_s == pytest.approx(0.5 * before.tokens_per_s, rel=0.15)
    assert after.factor < before.factor
    low, high = after.interval(after.tokens_per_s)
    assert low < after.tokens_per_s < high


def test_a_limit_on_tpot_is_met_and_splits_are_ranked() -> None:
    found = serving.partitions(served("llama-70b", "h200", precision="fp8"), 8, tpot_s=0.04)
    assert found
    assert all(one.tpot_s <= 0.04 for one in found)
    assert all(one.served.gpus == 8 for one in found)
    rates = [one.tokens_per_s for one in found]
    assert rates == sorted(rates, reverse=True)
    assert serving.partitions(served("llama-70b", "h200"), 8, tpot_s=1e-4) == []


def test_a_fit_recovers_what_made_the_rows() -> None:
    truth = {**serving.starting_values(), "bandwidth": math.log(0.85), "prefill": math.log(0.35)}
    setups = [
        served(model, "h200", precision="fp8", tp=tp, input_tokens=prompt, output_tokens=answer)
        for model, tp in (("llama-8b", 1), ("llama-70b", 2))
        for prompt, answer in ((128, 2048), (2048, 128), (500, 500))
    ]
    rows = [(one, serving.throughput(one, one.most_sequences(), truth)) for one in setups]
    found = serving.fit_rows(rows)
    assert found.sd < 0.05
    assert found.values["prefill"] == pytest.approx(truth["prefill"], abs=0.1)


def test_scaling_finds_where_a_slow_network_limits() -> None:
    slow = setup_of("llama-8b", "h100", 8, shard="zero3", interconnect="25gbe", micro_batch=1, global_batch=8)
    found = scaling.extrapolate(slow, 64)
    assert [one.prediction.setup.gpus for one in found] == [8, 16, 32, 64]
    assert found[0].efficiency == 1
    assert not found[0].is_limited
    assert found[1].is_limited
    assert scaling.limit_text(found).startswith("The network limits from 16 GPUs on")
    fast = scaling.extrapolate(setup_of("llama-8b", "h100", 8, shard="zero1", global_batch=256), 64)
    assert scaling.limit_text(fast).startswith("The network does not limit up to 64 GPUs")


def test_stored_served_runs_are_anchors(tmp_path: Path) -> None:
    with tarfile.open(MEASURED) as archive:
        archive.extractall(tmp_path, filter="data")
    found = read_known([str(tmp_path)]).served
    assert [(one.served.batch, one.served.precision, one.served.gpu.name) for one in found] == [
        (128, "bf16", "h200"),
        (32, "bf16", "h200"),
        (1, "bf16", "h200"),
    ]
    # As docs/measured/h200-inference says: tokens/s of the means of three launches.
    assert found[0].tokens_per_s == pytest.approx(3960, rel=0.02)
    one = served("llama-8b", "h200", input_tokens=515, output_tokens=128, batch=32)
    anchors = [(each.name, each.served, each.tokens_per_s) for each in found]
    worth = {each.name: each.without - each.with_it for each in serving.worth(one, anchors)}
    # The load with the same batch tells most.
    assert max(worth, key=lambda name: worth[name]) == found[1].name
    near = serving.predict(one, [(found[1].served, found[1].tokens_per_s)])
    assert near.tokens_per_s == pytest.approx(found[1].tokens_per_s, rel=0.1)


def test_runs_against_a_url_are_anchors_once_the_server_is_described() -> None:
    """Two answers of 5 tokens at once, in 2 s, by each of two servers: 10 tokens/s."""
    requests = [build_request(number, 0.0, 2.0, replica=number % 2) for number in range(4)]
    replicas = (build_replica(0, "gpu-1"), build_replica(1, "gpu-2"))
    stages = (build_stage(0, 0.0, 2.0, concurrency=4),)
    record = build_record(build_spec(), requests, stages=stages, replicas=replicas)
    assert served_anchors.of_records([record]) == []
    endpoint = served_anchors.parse_endpoint("gpu=h200,tp=2,precision=fp8,model=llama-8b")
    (anchor,) = served_anchors.of_records([record], endpoint)
    one = anchor.served
    assert (one.shape.name, one.gpu.name, one.tp, one.replicas, one.precision) == ("llama-8b", "h200", 2, 2, "fp8")
    assert (one.batch, one.input_tokens, one.output_tokens, anchor.tokens_per_s) == (2, 15, 5, 10.0)
    assert "tiny behind a URL, taken as llama-8b" in anchor.name


@pytest.mark.parametrize(
    "text", ["h200", "gpu=h200,tp=0", "tp=2", "gpu=h200,precision=int3", "gpu=h200,node=1", "gpu=x9"]
)
def test_an_endpoint_that_is_not_described_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="--endpoint: got"):
        served_anchors.parse_endpoint(text)


def test_rows_of_a_table_are_anchors(tmp_path: Path) -> None:
    path = tmp_path / "ours.csv"
    head = "model,gpu,n_gpus,tp,precision,input_len,output_len,batch,output_tokens_per_s"
    rows = [
        "llama-8b,h200,2,1,fp8,1000,500,,20000",
        "no-such-model,h200,1,1,fp8,1,1,,5",
        "llama-8b,h200,x,1,fp8,1,1,,5",
    ]
    path.write_text("\n".join([head, *rows]) + "\n", encoding="utf-8")
    (anchor,) = read_known([str(path)]).served
    assert (anchor.served.replicas, anchor.served.tp, anchor.tokens_per_s) == (2, 1, 20000.0)
    assert anchor.name == "ours.csv, line 2: llama-8b"
    far = served("llama-70b", "a100", input_tokens=1000, output_tokens=500, tp=4)
    alone = serving.predict(far).factor
    # A small model on another GPU in another precision says little.
    assert 0.85 * alone < serving.predict(far, [(anchor.served, anchor.tokens_per_s)]).factor < alone
