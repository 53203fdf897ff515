"""Precisions of the matrix products: what is multiplied, what is refused, and what needs torchao."""

from __future__ import annotations

import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from paceline.contract import Seat  # noqa: E402
from paceline.errors import MissingPackageError, RequestError, UnsupportedError  # noqa: E402
from paceline.experiment.choices import Choice  # noqa: E402
from paceline.experiment.spec import Precision  # noqa: E402
from paceline.models.arithmetic import load  # noqa: E402
from paceline.training import float8, precision  # noqa: E402
from paceline.training.decoder import Decoder, Linear, fill  # noqa: E402
from paceline.training.observation import Audit  # noqa: E402
from paceline.training.strategies import single  # noqa: E402
from paceline.workloads import pretrain  # noqa: E402

MODEL = "tiny-llama:layers=1,hidden=32,heads=2,kv_heads=2,head_dim=16,ffn=32,vocab=64"
SHAPE = {"model": MODEL, "processes": 1, "sequence_length": 16, "micro_batch": 1, "accumulation": 1}
ALONE = Seat(rank=0, local_rank=0, world_size=1, device="cpu")
# 2 x 16 tokens x 3 products x 7,168 weights of linear layers; attention's are not counted here.
BLOCK, HEAD = 2 * 16 * 3 * 7168, 2 * 16 * 3 * 2048


def step(spec: Any) -> tuple[Audit, Any]:
    """One audited step of the plain loop."""
    trainer, tokens, audit = single.wrap(spec, ALONE), torch.arange(17).view(1, 17), Audit()
    with audit.watching():
        loss = trainer.forward(tokens[:, :-1], tokens[:, 1:], torch.tensor(16.0), True)
        trainer.backward(loss, True)
        trainer.update()
    return audit, trainer


def flops(audit: Audit, prefix: str) -> int:
    return sum(work for (kind, dtype), work in audit.work.items() if kind == "product" and dtype.startswith(prefix))


@pytest.mark.parametrize(
    ("name", "in_8_bit"), [("bf16", 0), ("float8", 1), ("float8_rowwise", 1), ("float8_rowwise_gw_hp", 2 / 3)]
)
def test_linear_layers_multiply_in_the_requested_precision(make_spec: Any, name: str, in_8_bit: float) -> None:
    pytest.importorskip("torchao")
    audit, trainer = step(make_spec("single", precision=name, **SHAPE))
    assert flops(audit, "float8") == in_8_bit * BLOCK
    assert flops(audit, "") - flops(audit, "float8") - (1 - in_8_bit) * BLOCK == pytest.approx(HEAD), "the head"
    assert trainer.declare()[0]["compute"] == name
    assert trainer.declare()[0]["parameters"] == "bf16"


def test_mxfp8_products_have_the_values_of_the_layer() -> None:
    """In torchao's emulation, which no run ever uses."""
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    plain, x = Linear(64, 32), torch.randn(2, 32, 64)
    expected = plain(x)
    layer = Linear(64, 32)
    layer.load_state_dict(plain.state_dict())
    layer.__class__ = type("Emulated", (precision.MXLinear,), {"kernels": "EMULATED"})
    observed = layer(x.bfloat16()).float()
    observed.square().sum().backward()
    expected.square().sum().backward()
    assert (observed - expected).norm() / expected.norm() < 0.06
    assert (layer.weight.grad - plain.weight.grad).norm() / plain.weight.grad.norm() < 0.1


def test_mxfp8_is_refused_on_a_cpu() -> None:
    with pytest.raises(UnsupportedError, match=r"mxfp8 needs a GPU of compute capability 10\.0 or later"):
        precision.require_products("mxfp8", "cpu")


def test_a_gpu_without_such_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    with pytest.raises(UnsupportedError, match=r"compute capability 8\.9 or later; .*A100 has 8\.0"):
        precision.require_products("float8", "cuda")


def test_without_torchao_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'paceline\[float8\]'"):
        precision.require_products("float8_rowwise", "cpu")


def test_tf32_sets_the_switch_and_resets_it() -> None:
    before, matmul = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul
    assert matmul.allow_bf16_reduced_precision_reduction
    with precision.matrix_products(Precision(compute="tf32")):
        assert torch.get_float32_matmul_precision() == "high"
        assert not matmul.allow_bf16_reduced_precision_reduction
        assert precision.compute_name(torch.nn.Linear(2, 2), "fp32") == "tf32"
    assert torch.get_float32_matmul_precision() == before
    assert matmul.allow_bf16_reduced_precision_reduction


@pytest.mark.parametrize(
    ("strategy", "fields", "reason"),
    [
        ("ddp", {"precision": "tf32"}, "a format of NVIDIA GPUs"),
        ("zero:stage=1", {"precision": "float8"}, "the strategy zero does not train in 8 bit"),
        ("ddp", {"precision": "float8", "model": "tiny:hidden=40,heads=4"}, "multiples of 16, got hidden = 40"),
        ("ddp", {"precision": "float8", "sequence_length": 8, "micro_batch": 1}, "sequence_length = 8"),
        ("ddp", {"precision": "float8"}, None),
    ],
)
def test_what_cannot_be_trained_has_a_reason(make_spec: Any, strategy: str, fields: Any, reason: str | None) -> None:
    found = pretrain.check(make_spec(strategy, **fields))
    assert found is None if reason is None else reason in str(found)


def test_float8_all_gather_needs_one_scale_per_tensor(make_spec: Any) -> None:
    from paceline.training.strategies import fsdp2

    strategy = "fsdp2:float8_all_gather=true"
    assert fsdp2.check(make_spec(strategy, precision="float8")) is None
    assert "precision float8; got bf16" in str(fsdp2.check(make_spec(strategy, precision="bf16")))


def test_gradients_of_8_bit_layers_are_reduced_in_16_or_32_bit() -> None:
    assert Precision(compute="float8", reduce="bf16").base == "bf16"
    with pytest.raises(RequestError, match="expected bf16 or fp32 with precision float8"):
        Precision(compute="float8", reduce="float8")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_compiled_code_rounds_weights_to_bf16_before_8_bit(backend: str) -> None:
    """torch's compiler drops the first of two casts. 3,777.7 is a scale that is no power of two, as those in use."""
    torch.manual_seed(0)
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0.0])
    weight = torch.cat([torch.randn(4096) * 0.02, ties]).requires_grad_()

    def cast(w: Any) -> Any:
        return (precision.rounded_weight(w, torch.bfloat16).float() * 3777.7).to(torch.float8_e4m3fn).float()

    compiled = torch.compile(cast, backend=backend)
    assert torch.equal(compiled(weight), (weight.to(torch.bfloat16).float() * 3777.7).to(torch.float8_e4m3fn).float())
    torch.compile(precision.rounded_weight, backend=backend)(weight, torch.bfloat16).sum().backward()
    assert torch.equal(weight.grad, torch.ones_like(weight))


def test_gathered_weights_are_rounded_to_bf16_before_8_bit() -> None:
    """torchao would round the fp32 shards to 8 bit directly, with a scale of their own."""
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    layers: Any = torch.nn.Sequential(Linear(32, 16, bias=False))
    whole = torch.randn(16, 32) * 0.02 + 3e-5
    layers[0].weight.data.copy_(whole)
    precision.convert(layers, Precision(compute="float8"), "cpu", float8_all_gather=True)
    shard = layers[0].weight
    shard._precomputed_scale = torch.tensor(3777.7)
    (gathered,), _ = shard.fsdp_pre_all_gather(None)
    expected = (whole.to(torch.bfloat16).float() * 3777.7).to(torch.float8_e4m3fn)
    assert torch.equal(gathered.float(), expected.float())
    assert not torch.equal(gathered.float(), (whole * 3777.7).to(torch.float8_e4m3fn).float()), "a test that tells"
    assert torch.equal(shard._tensor, whole), "the optimizer keeps fp32"


def losses_and_gradients(convert: Any, *, gated: bool, backend: str | None = None) -> list[Any]:
    """Of a decoder whose weights lie between the numbers of bf16, as after an update."""
    model = "tiny-llama" if gated else "tiny"
    shape = load(Choice.parse(f"{model}:layers=1,hidden=64,heads=4,kv_heads=4,head_dim=16,ffn=96,vocab=64"))
    decoder = Decoder(shape, "bf16")
    fill(decoder, shape.layers, 1, "bf16", lambda parameter, value: parameter.data.copy_(value + 3e-5))
    convert(decoder.blocks)
    if backend:
        decoder.compile(backend=backend)
    tokens = torch.arange(66).view(2, 33) % 64
    loss = decoder(tokens[:, :-1], tokens[:, 1:], torch.tensor(64.0))
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in decoder.parameters())]


def by_torchao(blocks: Any) -> None:
    precision.convert_by_torchao(blocks, "float8", precision.torchao("torchao.float8", "float8").Float8LinearConfig())


@pytest.mark.parametrize("gated", [True, False])
def test_our_layers_have_the_numbers_of_those_of_torchao(gated: bool) -> None:
    """Bit by bit: losses, and the gradients of all weights. Plain code, and traced for the compiler."""
    pytest.importorskip("torchao")
    expected = losses_and_gradients(by_torchao, gated=gated)
    for backend in (None, "aot_eager"):
        observed = losses_and_gradients(precision.convert_tensorwise, gated=gated, backend=backend)
        assert all(map(torch.equal, observed, expected))


def test_what_our_layers_keep_for_the_backward_pass_has_8_bit() -> None:
    kept: list[Any] = []
    layers: Any = torch.nn.Sequential(Linear(32, 16, bias=False))
    precision.convert(layers, Precision(compute="float8"), "cpu")
    x = torch.randn(4, 16, 32, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layers(x)
    matrices = [tensor for tensor in kept if tensor.dim()]
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in matrices] == [
        ((32, 64), torch.float8_e4m3fn),
        ((32, 16), torch.float8_e4m3fn),
    ]


def test_a_value_that_is_no_number_reaches_the_loss() -> None:
    layers: Any = torch.nn.Sequential(Linear(32, 16, bias=False))
    precision.convert(layers, Precision(compute="float8"), "cpu")
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    x[3, 5] = float("nan")
    assert layers(x).isnan().any()
    assert float8.rounded_to_bf16(torch.tensor(float("nan"))).isnan()


def test_compiled_code_rounds_the_largest_value_to_bf16() -> None:
    values = torch.cat([torch.rand(1000) * 10.0 ** torch.arange(-4, 1).repeat(200), torch.tensor([0.0, torch.inf])])
    assert torch.equal(float8.rounded_to_bf16(values), values.to(torch.bfloat16).float())
