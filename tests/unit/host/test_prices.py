from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.errors import RequestError
from paceline.host import machine, prices
from paceline.host.prices import ON_DEMAND, SPOT, Price


def test_every_row_of_the_table_says_what_where_and_when() -> None:
    for price in prices.table():
        assert machine.gpu_row(price.gpu or ""), f"{price.name}: {price.gpu} is no GPU of gpus.toml"
        assert price.kind in (ON_DEMAND, SPOT)
        assert price.provider
        assert price.instance
        assert price.source
        assert re.fullmatch(r"20\d\d(-\d\d)?", price.date or ""), price.name
        assert "Check before use" in (price.note or ""), price.name


def test_the_seed_documents_prices_stand_in_the_table_and_their_disagreement_is_said(golden: object) -> None:
    a10 = {p.name: p for p in prices.table() if p.gpu == "A10" and p.provider == "OCI"}
    assert a10["oci-a10-0.60"].usd_per_gpu_hour == 0.60
    assert a10["oci-a10-1.50"].usd_per_gpu_hour == 1.50
    assert (a10["oci-a10-spot"].usd_per_gpu_hour, a10["oci-a10-spot"].kind) == (0.18, SPOT)
    for name in ("oci-a10-0.60", "oci-a10-1.50"):
        assert a10[name].note == golden
        assert "0.60" in a10[name].note
        assert "1.50" in a10[name].note


@pytest.mark.parametrize("gpu", ["A10", "A10G", "L4", "L40S", "A100-SXM4-80GB", "H100 80GB HBM3", "H200", "B200"])
def test_the_gpus_of_the_large_clouds_have_a_price(gpu: str) -> None:
    assert [p for p in prices.table() if p.holds_for(f"NVIDIA {gpu}")]


def test_a_price_holds_for_exactly_its_gpu() -> None:
    a10 = Price(name="x", usd_per_gpu_hour=1.0, gpu="A10")
    assert a10.holds_for("NVIDIA A10")
    assert not a10.holds_for("NVIDIA A10G")
    assert not a10.holds_for(None)
    assert Price(name="x", usd_per_gpu_hour=1.0, gpu="A100-SXM4-80GB").holds_for("NVIDIA A100-SXM-80GB"), "one row"
    assert Price(name="x", usd_per_gpu_hour=1.0, gpu="TPU v9").holds_for("tpu v9"), "a GPU that no table knows"
    assert Price(name="x", usd_per_gpu_hour=1.0).holds_for(None), "a price without a GPU holds for all"


def test_a_number_a_name_and_a_file_are_prices(tmp_path: Path, golden: object) -> None:
    (own,) = prices.chosen("2.5")
    assert (own.usd_per_gpu_hour, own.gpu) == (2.5, None)
    assert own.source == golden
    assert "--price" in own.source
    (named,) = prices.chosen("oci-h100")
    assert named.usd_per_gpu_hour == 10.0
    path = tmp_path / "ours.toml"
    path.write_text('[[price]]\nname = "rack"\nusd_per_gpu_hour = 1\ndate = 2026-01-31\n')
    (rack,) = prices.chosen(str(path))
    assert rack == Price(name="rack", usd_per_gpu_hour=1, date="2026-01-31")
    assert rack.origin == golden
    assert "GPU-hour" in rack.origin
    assert "2026-01-31" in rack.origin


@pytest.mark.parametrize(
    "text", ["0", "-1", "nan", "inf", "1e308", "1e5001", "0.00009", "100001", "oci-h10", "absent.toml"]
)
def test_what_is_no_price_is_refused(text: str, golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        prices.chosen(text)
    assert str(caught.value) == golden
    assert "--price" in str(caught.value)
    assert "GPU-hour" in str(caught.value)
    if text == "oci-h10":
        with pytest.raises(RequestError) as caught:
            prices.chosen(text)
        assert str(caught.value) == golden
        assert "oci-h100" in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "price = 3",
        "[[price]",
        '[[price]]\nname = "a"\n',
        "[[price]]\nusd_per_gpu_hour = 1\n",
        '[[price]]\nname = "a"\nusd_per_gpu_hour = true\n',
        '[[price]]\nname = "a"\nusd_per_gpu_hour = "1"\n',
        '[[price]]\nname = "a"\nusd_per_gpu_hour = 1e6\n',
        '[[price]]\nname = "a"\nusd_per_gpu_hour = 1\nkind = "free"\n',
        '[[price]]\nname = "a"\nusd_per_gpu_hour = 1\nsauce = "b"\n',
        '[[price]]\nname = "a"\nusd_per_gpu_hour = 1\n' * 2,
        '[[price]]\nname = "a"\nusd_per_gpu_hour = 1\ngpu = 4\n',
    ],
)
def test_a_price_file_at_fault_is_one_sentence(tmp_path: Path, content: str, golden: object) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(content)
    with pytest.raises(RequestError) as refused:
        prices.read(path)
    assert str(refused.value) == golden
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)
