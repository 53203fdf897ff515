"""ZeRO's import: what DeepSpeed would pull in for nothing is kept out, and only while it is imported."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.contract import Seat
from paceline.errors import RequestError, UnsupportedError
from paceline.experiment import plugins
from paceline.experiment.choices import Choice
from paceline.experiment.plugins import parse_options
from paceline.experiment.spec import RunSpec, Tuning
from paceline.training.strategies import zero
from paceline.training.strategies.zero import _hidden


def test_a_hidden_package_cannot_be_imported_until_it_is_shown_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with _hidden("colorsys"), pytest.raises(ImportError):
        importlib.import_module("colorsys")
    assert importlib.import_module("colorsys").rgb_to_hsv(0, 0, 0) == (0.0, 0.0, 0)


def test_a_package_in_use_is_not_taken_away() -> None:
    with _hidden("json"):
        assert importlib.import_module("json") is sys.modules["json"]
    assert "json" in sys.modules


def test_8_bit_moments_of_small_tensors_are_refused(make_spec: Callable[..., RunSpec]) -> None:
    eight_bit = replace(make_spec("zero:stage=2"), tuning=Tuning(optimizer="paged_adamw_8bit"))
    with pytest.raises(UnsupportedError, match="2,048 elements"):
        zero.require_large(eight_bit, [8192, 2048])
    zero.require_large(eight_bit, [8192, 4096])
    zero.require_large(replace(eight_bit, tuning=Tuning(optimizer="adamw")), [2048])


def test_an_own_configuration_is_read_into_the_options_and_merged(
    tmp_path: Path, make_spec: Callable[..., RunSpec]
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"wall_clock_breakdown": True, "zero_optimization": {"reduce_bucket_size": 20_000}}))
    choice = plugins.expanded("strategies", Choice("zero", {"stage": 2, "config": str(file)}), 1, 2)
    file.unlink()  # the record has its content
    chosen = parse_options(zero.Options, choice)
    config = zero.merged(zero.configuration(make_spec(str(choice)), chosen), chosen.config)
    assert config["wall_clock_breakdown"] is True
    assert config["zero_optimization"]["reduce_bucket_size"] == 20_000
    assert config["zero_optimization"]["stage"] == 2
    assert config["gradient_clipping"] == make_spec("ddp").training.clip_norm


@pytest.mark.parametrize(
    ("content", "refused"),
    [
        ({"gradient_clipping": 0.1}, "gradient_clipping 0.1"),
        ({"optimizer": {"type": "Lion"}}, "optimizer"),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel"),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, "zero_quantized_gradients true"),
        ({"zero_optimization": {"stage": 3}}, "stage 3"),
        (
            {"zero_optimisation": {}},
            "zero_optimisation, which DeepSpeed does not know. Did you mean 'zero_optimization'",
        ),
        ([], "a JSON object"),
    ],
)
def test_a_configuration_that_changes_the_work_is_refused(tmp_path: Path, content: Any, refused: str) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(content))
    with pytest.raises(RequestError, match=refused):
        plugins.expanded("strategies", Choice("zero", {"config": str(file)}), 1, 2)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(RequestError, match=r"zero.config: got 'nowhere.json', expected a JSON file"):
        plugins.expanded("strategies", Choice("zero", {"config": "nowhere.json"}), 1, 2)


def test_what_deepspeed_refuses_is_named() -> None:
    zero_config = pytest.importorskip("deepspeed.runtime.zero.config")
    expected = (
        r"^zero.config: reduce_bucket_sizes: got 1000, which DeepSpeed refuses: Extra inputs are not permitted\.$"
    )
    with pytest.raises(RequestError, match=expected), zero.refusals_as_requests():
        zero_config.DeepSpeedZeroConfig(reduce_bucket_sizes=1000)


def test_fp16_is_unsupported_where_deepspeed_has_none(make_spec: Callable[..., RunSpec]) -> None:
    device = SimpleNamespace(is_fp16_supported=lambda: False)
    deepspeed = SimpleNamespace(accelerator=SimpleNamespace(get_accelerator=lambda: device))
    zero.require_fp16(deepspeed, make_spec("zero:stage=2", precision="bf16"))
    with pytest.raises(UnsupportedError, match="DeepSpeed has no fp16 on this cpu; use precision bf16 or fp32"):
        zero.require_fp16(deepspeed, make_spec("zero:stage=2", precision="fp16"))


def test_a_key_that_occurs_twice_is_named(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"reduce_scatter": true, "reduce_scatter": false}}')
    with pytest.raises(RequestError, match=r"expected a JSON file \(reduce_scatter occurs twice\)"):
        plugins.expanded("strategies", Choice("zero", {"config": str(file)}), 1, 2)


@pytest.mark.parametrize("name", zero.OF_STAGE_3)
def test_options_of_stage_3_have_no_effect_below(make_spec: Callable[..., RunSpec], name: str) -> None:
    assert zero.check(make_spec(f"zero:stage=3,{name}=7")) is None
    expected = f"{name} is an option of stage 3 and has no effect at stage 2; leave it out"
    assert zero.check(make_spec(f"zero:stage=2,{name}=7")) == expected
    with pytest.raises(RequestError, match=f"zero.{name}: got -1, expected a number of elements from 0"):
        zero.Options(stage=3, **{name: -1})


def test_where_state_is_kept(make_spec: Callable[..., RunSpec]) -> None:
    def places(**options: Any) -> dict[str, Any]:
        return zero.offloading(zero.Options(**options), "cpu")

    assert places(stage=2) == {}
    assert places(stage=2, offload="cpu") == {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
    assert places(stage=3, offload="/scratch")["offload_param"]["nvme_path"] == "/scratch"
    assert "stage 3 only" in (zero.check(make_spec("zero:stage=2,offload=/scratch")) or "")
    with pytest.raises(RequestError, match=r"zero.offload: got 'gpu'"):
        zero.Options(offload="gpu")


@pytest.mark.parametrize(
    ("strategy", "fields", "reason"),
    [
        ("zero:stage=2,qwz=true", {"device": "cuda"}, "quantises what stage 3 sends, got stage 2 with qwz"),
        ("zero:stage=3,qwz=true,qgz=true", {}, "qwz and qgz: DeepSpeed quantises with CUDA kernels only"),
        (
            "zero:stage=3,qgz=true",
            {"device": "cuda", "precision": "bf16"},
            "reads fp16 gradients only, got reduce_dtype",
        ),
        ("zero:stage=3,qgz=true", {"device": "cuda", "precision": "fp16/fp16"}, None),
        ("zero:stage=3,qwz=true", {"device": "cuda", "precision": "bf16"}, None),
    ],
)
def test_quantised_traffic_is_refused_where_deepspeed_would_not_quantise(
    make_spec: Callable[..., RunSpec], strategy: str, fields: Any, reason: str | None
) -> None:
    found = zero.check(make_spec(strategy, **fields))
    assert found is None if reason is None else reason in str(found)


def test_quantised_traffic_is_configured_and_no_equal_work(make_spec: Callable[..., RunSpec]) -> None:
    spec = make_spec("zero:stage=3,qwz=true,qgz=true", 4, device="cuda", precision="fp16/fp16")
    config = zero.configuration(spec, parse_options(zero.Options, spec.strategy))["zero_optimization"]
    assert (config["zero_quantized_weights"], config["zero_quantized_gradients"]) == (True, True)
    assert spec.approximation == (
        "weights gathered in 8 bit and gradients of matrices reduced in 4 bit, inside and between nodes"
    )
    plain = make_spec("zero:stage=3", 4)
    assert plain.approximation is None
    assert (
        not {"zero_quantized_weights", "zero_quantized_gradients"}
        & zero.configuration(plain, parse_options(zero.Options, plain.strategy))["zero_optimization"].keys()
    )


@pytest.mark.parametrize(
    ("ranks", "devices", "reason"),
    [
        (8, 8, "8 ranks with 8 GPUs on this one would send them whole"),
        (2, 8, "would send them whole"),
        (16, 8, r"cannot compile its kernels that quantise \(no nvcc here\)"),
    ],
)
def test_gradients_are_quantised_between_nodes_only(
    monkeypatch: pytest.MonkeyPatch, ranks: int, devices: int, reason: str
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("deepspeed")

    class Builder:
        def load(self, verbose: bool) -> None:
            raise RuntimeError("a long log\nno nvcc here")

    package = SimpleNamespace(ops=SimpleNamespace(op_builder=SimpleNamespace(QuantizerBuilder=Builder)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    seat = Seat(rank=0, local_rank=0, world_size=ranks, device="cuda")
    with pytest.raises(UnsupportedError, match=reason):
        zero.require_quantisation(package, seat, zero.Options(stage=3, qgz=True))
    with pytest.raises(UnsupportedError, match="need CUDA"):
        zero.require_quantisation(package, replace(seat, device="cpu"), zero.Options(stage=3, qwz=True))


@pytest.mark.parametrize("has_libaio", [True, False])
def test_state_on_a_disk_needs_libaio(has_libaio: bool) -> None:
    builder = SimpleNamespace(is_compatible=lambda verbose: has_libaio)
    package = SimpleNamespace(ops=SimpleNamespace(op_builder=SimpleNamespace(AsyncIOBuilder=lambda: builder)))
    expected = contextlib.nullcontext() if has_libaio else pytest.raises(UnsupportedError, match="libaio-dev")
    with expected:
        zero.require_disk(package)


def test_a_hierarchical_partition_is_of_stage_3_and_divides_the_ranks(make_spec: Callable[..., RunSpec]) -> None:
    chosen = parse_options(zero.Options, Choice("zero", {"stage": 3, "hpz": 2}))
    spec = make_spec("zero:stage=3,hpz=2", 4)
    assert zero.check(spec) is None
    assert zero.configuration(spec, chosen)["zero_optimization"]["zero_hpz_partition_size"] == 2
    assert "got stage 2" in (zero.check(make_spec("zero:stage=2,hpz=2", 4)) or "")
    assert zero.check(make_spec("zero:stage=3,hpz=3", 4)) == "hpz=3 does not divide 4 ranks"
