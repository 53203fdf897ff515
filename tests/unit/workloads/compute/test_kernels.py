"""The ceilings: work stated to the FLOP and byte, every result checked, and a row's trouble kept to the row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from faulty import wrong_product  # noqa: E402

from paceline.analysis.compare import comparable  # noqa: E402
from paceline.campaign.run.controller import verdict  # noqa: E402
from paceline.contract import Seat  # noqa: E402
from paceline.errors import RequestError  # noqa: E402
from paceline.experiment.choices import Choice  # noqa: E402
from paceline.experiment.plugins import parse_options  # noqa: E402
from paceline.experiment.spec import RunSpec  # noqa: E402
from paceline.models import arithmetic  # noqa: E402
from paceline.results.machine_samples import KernelSample  # noqa: E402
from paceline.results.records import Evidence, RunRecord, Status  # noqa: E402
from paceline.results.samples import read_samples  # noqa: E402
from paceline.training.instruments import HostClock  # noqa: E402
from paceline.workloads import compute  # noqa: E402
from paceline.workloads.compute import kernels  # noqa: E402
from paceline.workloads.compute.options import Options, Row  # noqa: E402

SEAT = Seat(rank=0, local_rank=0, world_size=1, device="cpu")
SMALL = "compute:iters=5,warmup=0,budget_s=0.05,largest_matmul=64,largest_copy_bytes=4096,longest_sequence=32,tokens=32"
LLAMA = arithmetic.load(Choice("llama-1b"))


def rows(**chosen: Any) -> dict[tuple[str, str, str, str], Row]:
    device = chosen.pop("device", "cuda")
    return {(r.kernel, r.dtype, r.label, r.variant): r for r in compute.plan(LLAMA, Options(**chosen), device)}


# --- work, by hand ---


def test_a_product_is_2mnk_flops() -> None:
    found = rows(dtypes="bf16")
    assert found["matmul", "bf16", "4096 x 4096 x 4096", "NT"].flops == 137_438_953_472
    sides = [r.size for r in found.values() if r.kernel == "matmul" and r.size]
    assert sides == [256, 512, 1024, 2048, 4096, 8192, 16384]


def test_the_models_products_are_those_of_its_layers_forward_and_backward() -> None:
    """llama-1b: hidden 2048, 32 heads and 8 kv heads of 64, ffn 8192 gated, vocab 128256; 8192 tokens."""
    found = list(compute.model_products(LLAMA, 8192, "bf16"))
    assert [(r.label, r.variant) for r in found[:3]] == [
        ("qkv forward, 8192 x 3072 x 2048", "NT"),
        ("qkv grad input, 8192 x 2048 x 3072", "NN"),
        ("qkv grad weight, 3072 x 2048 x 8192", "TN"),
    ]
    assert {r.flops for r in found[:3]} == {2 * 8192 * 3072 * 2048}
    assert found[6].label == "mlp in forward, 8192 x 16384 x 2048"
    assert found[12].label == "head forward, 8192 x 128256 x 2048"


@pytest.mark.parametrize("name", ["llama-1b", "gpt2-124m", "tiny"])
def test_the_products_add_up_to_the_flops_of_mfu(name: str) -> None:
    """3 * 2 * N_mm per token, with each layer's products once per layer and the head once."""
    shape = arithmetic.load(Choice(name))
    found = list(compute.model_products(shape, 1, "fp32"))
    blocks = sum(r.flops or 0 for r in found[:12])
    head = sum(r.flops or 0 for r in found[12:])
    assert shape.layers * blocks + head == 6 * arithmetic.matmul_parameters(shape)


def test_attention_counts_the_causal_flops_and_a_backward_as_two_forwards() -> None:
    """(s+1) * H * 2d per token: 2049 * 32 * 128 * 8192 tokens."""
    found = rows(kernels="attention")
    forward = found["attention_forward", "bf16", "sequence 2048, batch 4", "cudnn"]
    assert forward.flops == 2049 * 32 * 128 * 8192
    assert found["attention_backward", "bf16", "sequence 2048, batch 4", "cudnn"].flops == 2 * (forward.flops or 0)
    assert {r.variant for r in found.values()} == {"flash", "cudnn", "efficient"}
    assert sorted({r.size or 0 for r in found.values()}) == [512, 1024, 2048, 4096, 8192]


def test_a_memory_copy_counts_twice_and_the_bus_once() -> None:
    found = rows(kernels="copy+h2d+d2h")
    assert found["copy", "bytes", "64 MiB", ""].moved_bytes == 2 * 64 * 2**20
    assert found["h2d", "bytes", "1 GiB", "pinned"].moved_bytes == 2**30
    assert found["d2h", "bytes", "64 KiB", "pageable"].moved_bytes == 2**16


def test_fp8_has_one_layout_and_says_how_it_accumulates() -> None:
    assert {r.variant for r in rows(kernels="matmul", dtypes="fp8").values()} == {"NT, fast accumulation"}


@pytest.mark.parametrize(("largest", "sides"), [(100, [64, 100]), (128, [64, 128]), (32, [32]), (None, [64, 128, 256])])
def test_a_sweep_ends_at_its_limit(largest: int | None, sides: list[int]) -> None:
    assert compute._ladder((64, 256), largest, 2) == sides


# --- what a user may ask ---


@pytest.mark.parametrize(
    "option",
    [
        "kernels=matmul+convolution",
        "dtypes=int4",
        "iters=4",
        "warmup=-1",
        "budget_s=0",
        "tokens=0",
        "largest_matmul=1.5",
        "sizes=3",
    ],
)
def test_a_wrong_option_is_one_sentence(option: str, make_spec: Callable[..., RunSpec], golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        compute.check(make_spec(None, workload=f"compute:{option}"))
    assert str(caught.value) == golden
    assert "\n" not in str(caught.value)


def test_a_mixture_of_experts_is_refused_by_arithmetic(make_spec: Callable[..., RunSpec], golden: object) -> None:
    spec = make_spec(None, workload="compute", model="tiny:experts=4,experts_per_token=2")
    assert compute.check(spec) == golden


# --- rows on this machine ---


class Kept:
    """A recorder that keeps what it is given."""

    def __init__(self) -> None:
        self.samples: list[Any] = []
        self.evidence: Evidence | None = None

    def add(self, sample: Any) -> None:
        self.samples.append(sample)

    def progress(self, step: int, phase: str) -> None: ...

    def conclude(self, evidence: Evidence) -> None:
        self.evidence = evidence


@pytest.fixture(scope="module", autouse=True)
def group_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def measured(workload: Any, spec: RunSpec) -> RunRecord:
    kept = Kept()
    workload.run(spec, SEAT, kept)
    assert kept.evidence is not None
    return RunRecord(
        spec=spec, status=Status.OK, error=None, started_at=0.0, ended_at=1.0, path="", kernels=tuple(kept.samples)
    )


@pytest.fixture(scope="module")
def record(make_spec: Callable[..., RunSpec]) -> RunRecord:
    return measured(compute, make_spec(None, processes=1, workload=SMALL + ",dtypes=fp32+tf32"))


def by_status(record: RunRecord) -> dict[str, set[tuple[str, str]]]:
    found: dict[str, set[tuple[str, str]]] = {}
    for s in record.kernels:
        found.setdefault(s.status, set()).add((s.kernel, s.dtype))
    return found


def test_every_row_is_measured_or_says_why_not(record: RunRecord) -> None:
    found = by_status(record)
    assert found["unsupported"] == {("matmul", "tf32"), ("h2d", "bytes"), ("d2h", "bytes")}
    assert {("matmul", "fp32"), ("copy", "bytes"), ("attention_forward", "fp32")} <= found["ok"]
    assert set(found) <= {"ok", "unsupported", "skipped"}
    for s in record.kernels:
        if s.status == "ok":
            assert len(s.durations_s) >= 5
            assert all(duration > 0 for duration in s.durations_s)
            assert s.wrong == 0
            assert s.error is None
        else:
            assert s.error
            assert s.durations_s == ()


def test_right_results_make_a_valid_run(record: RunRecord) -> None:
    assert comparable.problems(record) == []
    assert verdict(record, None) == (Status.OK, None)


def test_a_wrong_product_makes_the_run_invalid(make_spec: Callable[..., RunSpec]) -> None:
    """One term of 64 left out of every sum: under any norm of the whole result it is small."""
    spec = make_spec(None, processes=1, workload=SMALL + ",kernels=matmul,dtypes=fp32")
    status, reason = verdict(measured(wrong_product, spec), None)
    assert status is Status.INVALID
    assert "matmul fp32 NT (64 x 64 x 64) on rank 0: " in (reason or "")
    assert "wrong elements" in (reason or "")
    assert "more rows" in (reason or "")


def bench(**chosen: Any) -> kernels.Bench:
    usual = {"iters": 5, "warmup": 0, "budget_s": 0.05}
    return kernels.Bench(SEAT, arithmetic.load(Choice("tiny")), Options(**usual | chosen), 1, 42)


def row(kernel: str = "matmul", **more: Any) -> Row:
    usual: dict[str, Any] = {"dtype": "fp32", "label": "x", "variant": "NT", "dims": (32, 32, 32), "needed_bytes": 0}
    return Row(kernel=kernel, flops=2 * 32**3, **usual | more)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
def test_every_layout_and_dtype_gives_the_right_product(dtype: str, layout: str) -> None:
    sample = bench().measure(row(dtype=dtype, variant=layout, dims=(16, 24, 40)))
    assert (sample.status, sample.wrong) == ("ok", 0)


def test_attention_that_sees_the_future_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(q: Any, k: Any, v: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=False)

    right = bench().measure(row("attention_backward", variant="flash", dims=(1, 32)))
    monkeypatch.setattr(kernels, "attend", careless)
    wrong = bench().measure(row("attention_backward", variant="flash", dims=(1, 32)))
    assert (right.status, right.wrong) == ("ok", 0)
    assert wrong.wrong
    assert wrong.wrong > 32


def test_a_copy_that_loses_a_byte_is_wrong() -> None:
    kernel = kernels._copy(kernels._random_bytes(4096, torch.device("cpu")), torch.device("cpu"))
    assert kernel.wrong() > 0, "nothing was copied yet"
    kernel.call()
    assert kernel.wrong() == 0


def test_tf32_cannot_pass_for_fp32() -> None:
    """Products of operands cut to 10 bits of mantissa, as TF32 does, against exact ones."""
    a, b = torch.randn(64, 1024), torch.randn(1024, 64)
    cut = [(t.view(torch.int32) & ~0x1FFF).view(torch.float32) for t in (a, b)]
    exact = a.double() @ b.double()
    assert kernels.count_wrong(cut[0] @ cut[1], exact, kernels.TOLERANCES["fp32"]) > 0
    assert kernels.count_wrong(cut[0] @ cut[1], exact, kernels.TOLERANCES["tf32"]) == 0
    assert kernels.count_wrong(a @ b, exact, kernels.TOLERANCES["fp32"]) == 0


def test_not_a_number_is_wrong() -> None:
    assert kernels.count_wrong(torch.tensor([1.0, float("nan")]), torch.ones(2).double(), 0.1) == 1


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB\nmore"), "oom"),
        (RuntimeError("No available kernel. Aborting execution."), "unsupported"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "failed"),
    ],
)
def test_what_a_first_call_meets_becomes_the_rows_status(
    error: Exception, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(kernels, "multiply", fail)
    sample = bench().measure(row())
    assert (sample.status, sample.error) == (status, str(error).partition("\n")[0])
    monkeypatch.undo()
    assert bench().measure(row()).status == "ok", "the sweep goes on"


def test_a_row_that_breaks_later_has_failed_and_makes_the_run_invalid(
    monkeypatch: pytest.MonkeyPatch, record: RunRecord, golden: object
) -> None:
    calls = iter([None])

    def breaks(*_: Any) -> None:
        if next(calls, "broken"):
            raise RuntimeError("lost the device")

    monkeypatch.setattr(kernels, "multiply", breaks)
    sample = bench().measure(row())
    assert (sample.status, sample.error) == ("failed", "lost the device")
    wrong = comparable.problems(dataclasses.replace(record, kernels=(*record.kernels, sample)))
    assert wrong == golden


def test_a_row_that_does_not_fit_is_oom_before_it_is_tried() -> None:
    sample = bench().measure(row(needed_bytes=2**60))
    assert sample.status == "oom"
    assert "needs 1073741824.00 GiB" in (sample.error or "")


def test_a_row_that_would_take_too_long_is_skipped_by_what_smaller_ones_took() -> None:
    one = bench()
    assert one.measure(row()).status == "ok"
    sample = one.measure(dataclasses.replace(row(), flops=10**18))
    assert sample.status == "skipped"
    assert "5 iterations would take about" in (sample.error or "")


@pytest.mark.parametrize(("seconds", "expected"), [(1.0, 5), (0.1, 20), (0.001, 100)])
def test_the_budget_reduces_iterations_but_never_below_five(
    seconds: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def timed(call: Any, clock: Any, flush: Any, count: int) -> tuple[float, ...]:
        counts.append(count)
        return (seconds,) * count

    monkeypatch.setattr(kernels, "timed", timed)
    bench(iters=100, warmup=10, budget_s=2.0).measure(row())
    estimate, warmup, measured = counts
    assert (estimate, measured) == (1, expected)
    assert 1 <= warmup <= 10


def test_flushing_stays_outside_the_clock() -> None:
    now = [0.0]

    class Clock(HostClock):
        def mark(self) -> float:
            return now[0]

    def pass_time(seconds: float) -> Callable[[], None]:
        return lambda: now.__setitem__(0, now[0] + seconds)

    assert kernels.timed(pass_time(1.0), Clock(), pass_time(100.0), 3) == (1.0, 1.0, 1.0)


def test_options_reach_the_plan_through_the_spec(make_spec: Callable[..., RunSpec]) -> None:
    chosen = parse_options(Options, make_spec(None, workload="compute:kernels=copy+h2d").workload)
    assert {r.kernel for r in compute.plan(LLAMA, chosen, "cuda")} == {"copy", "h2d"}


def test_samples_survive_the_folder(tmp_path: Path, record: RunRecord) -> None:
    from paceline.results import store

    path = tmp_path / "samples-0.jsonl"
    path.write_text("".join(map(store.sample_line, record.kernels)))
    back = tuple(read_samples(path))
    assert back == record.kernels
    assert all(isinstance(sample, KernelSample) for sample in back)


def test_the_head_is_padded_as_the_decoder_pads_it() -> None:
    from paceline.training.decoder import VOCAB_MULTIPLE

    assert compute.HEAD_MULTIPLE == VOCAB_MULTIPLE
    shape = arithmetic.load(Choice("gpt2-124m"))
    assert compute.linear_layers(shape)[-1] == ("head", 50257, 768)
    assert compute.linear_layers(shape, padded=True)[-1] == ("head", 50304, 768)
