"""Known products: exact in every dtype, whatever the order of summation, and one flipped bit is found where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

torch = pytest.importorskip("torch")

from paceline.contract import Seat  # noqa: E402
from paceline.errors import RequestError  # noqa: E402
from paceline.experiment.choices import Choice  # noqa: E402
from paceline.experiment.plugins import parse_options  # noqa: E402
from paceline.experiment.spec import RunSpec  # noqa: E402
from paceline.training.precision import whole_sums  # noqa: E402
from paceline.workloads import nodes  # noqa: E402
from paceline.workloads.nodes import plan, proof, stages  # noqa: E402

SEAT = Seat(rank=2, local_rank=0, world_size=4, device="cpu")
DTYPES = {"fp32": torch.int32, "bf16": torch.int16, "fp16": torch.int16}


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_the_known_result_is_the_exact_one(dtype: str) -> None:
    a, b, expected = proof.known_product(24, dtype, torch.device("cpu"), 7)
    assert torch.equal(expected.double(), a.double() @ b.double())
    assert (expected != 0).all()
    assert torch.isfinite(expected).all()


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_sound_products_are_right_and_change_with_the_repeat(dtype: str) -> None:
    found = [proof.prove_product(SEAT, repeat, 48, dtype, 42) for repeat in range(3)]
    assert [(s.rank, s.repeat, s.wrong, s.place) for s in found] == [(2, i, 0, None) for i in range(3)]
    values = [proof.known_product(48, dtype, torch.device("cpu"), 42 + i)[2] for i in range(2)]
    assert not torch.equal(*values)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("bit", [0, 9, 15])
def test_every_flipped_bit_is_found_and_placed(monkeypatch: pytest.MonkeyPatch, dtype: str, bit: int) -> None:
    sound = proof.multiply

    def corrupt(a: Any, b: Any) -> Any:
        found = sound(a, b)
        found.view(DTYPES[dtype])[11, 30] ^= torch.tensor(1 << bit).to(DTYPES[dtype])
        return found

    monkeypatch.setattr(proof, "multiply", corrupt)
    sample = proof.prove_product(SEAT, 0, 48, dtype, 42)
    assert (sample.wrong, sample.place) == (1, (11, 30))
    assert sample.found != sample.expected


def test_settings_are_put_back() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    with whole_sums(), proof.deterministic():
        assert torch.are_deterministic_algorithms_enabled()
        # Else fused attention keeps its backward whose sums have no order.
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not matmul.allow_bf16_reduced_precision_reduction
    assert matmul.allow_bf16_reduced_precision_reduction == before
    assert not torch.are_deterministic_algorithms_enabled()


class Proved:
    """A training of which a kernel has no order of sums, or which fails for another reason."""

    error = "cumsum_cuda_kernel does not have a deterministic implementation, but you set ..."

    def __init__(self, *_: Any) -> None:
        self.strict: bool | None = None

    def prove(self, turn: int, strict: bool) -> None:
        if strict:
            raise RuntimeError(self.error)
        self.strict = strict


@pytest.fixture
def acceptance(monkeypatch: pytest.MonkeyPatch, make_spec: Callable[..., RunSpec]) -> stages.Acceptance:
    monkeypatch.setattr(stages, "OwnTraining", Proved)
    monkeypatch.setattr(stages.Acceptance, "_synchronise", lambda *_: None)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    spec = make_spec(None, workload="nodes")
    return stages.Acceptance(spec, SEAT, Mock())


def test_where_a_kernel_is_lacking_the_steps_are_taken_without_it(acceptance: stages.Acceptance) -> None:
    proved = acceptance._proved_training(turn=0)
    assert proved is not None
    assert proved.strict is False  # type: ignore[attr-defined]


def test_another_error_is_not_hidden(acceptance: stages.Acceptance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Proved, "error", "CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        acceptance._proved_training(turn=0)


# --- what is asked ---


@pytest.mark.parametrize(
    "wrong",
    [
        "node=rack",
        "training=dance",
        "repeats=1",
        "side=0",
        "speed_ratio=1.5",
        "temperature_c=0",
        "pair_bytes=many",
        "speed=0.1",
    ],
)
def test_a_wrong_option_is_one_sentence(wrong: str, golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        parse_options(plan.Options, Choice.parse(f"nodes:{wrong}"))
    assert str(caught.value) == golden


def test_each_process_trains_alone_whatever_the_topology(make_spec: Callable[..., RunSpec]) -> None:
    spec = make_spec(None, workload="nodes:side=64,copy_bytes=4096")
    own = plan.alone(spec)
    assert (own.topology.world_size, str(own.strategy), own.workload.name) == (1, "single", "pretrain")
    assert nodes.check(spec) is None
    assert [(row.kernel, row.size) for row in plan.plan(spec)] == [("matmul", 64), ("copy", 4096)]


def test_a_gpu_is_measured_both_ways_over_its_bus(make_spec: Callable[..., RunSpec]) -> None:
    rows = plan.plan(make_spec(None, workload="nodes", device="cuda"))
    assert [(r.kernel, r.size, r.variant) for r in rows] == [
        ("matmul", 8192, "NT"),
        ("copy", 2**30, ""),
        ("h2d", 2**30, "pinned"),
        ("d2h", 2**30, "pinned"),
    ]
