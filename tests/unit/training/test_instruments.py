from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as functional  # noqa: E402

from paceline.training import instruments  # noqa: E402
from paceline.training.attachment import paceline_digests, paceline_wire  # noqa: E402
from paceline.training.instruments import HostClock, Stopwatch, WireCounter, digest_parameters, read_memory, reset_peak  # noqa: E402
from paceline.training.observation import Audit  # noqa: E402


def digest(**tensors: Any) -> str:
    return digest_parameters(tensors.items()).digest


def weights(*size: int) -> Any:
    """Values that bf16 holds exactly."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).float()


def test_a_digest_does_not_depend_on_the_dtype_of_equal_values() -> None:
    value = weights(13, 7)
    assert digest(a=value) == digest(a=value.to(torch.bfloat16)) == digest(a=value.double())


def test_a_digest_counts_and_does_not_depend_on_the_order_of_names() -> None:
    value = weights(3, 4)
    found = digest_parameters([("a", value), ("b", value + 1)])
    assert found.count == 24
    assert digest_parameters([("b", value + 1), ("a", value)]) == found
    other = digest_parameters([("a", value), ("b", value)])
    assert other.by_name["a"] == found.by_name["a"]
    assert other.by_name["b"] != found.by_name["b"], "which parameter differs can be told"


def test_a_digest_sees_one_flipped_bit() -> None:
    value = weights(1000)
    plain = digest(a=value)
    for position in (0, 1, 499, 999):
        for bit in (0, 13, 31):
            bits = value.clone().view(torch.int32)
            bits[position] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
            assert digest(a=bits.view(torch.float32)) != plain, (position, bit)


def test_a_digest_sees_swapped_values_names_and_shapes() -> None:
    value = weights(6, 4)
    swapped = value.clone()
    swapped[0], swapped[5] = value[5], value[0]
    assert not torch.equal(value, swapped)
    assert len({digest(a=value), digest(a=swapped), digest(b=value), digest(a=value.view(4, 6))}) == 4
    assert digest(a=value, b=value + 1) != digest(a=value + 1, b=value)


def test_a_digest_sees_zeros() -> None:
    assert digest(a=torch.zeros(4)) != digest(a=torch.zeros(5))
    assert digest(a=torch.zeros(4)) != digest(a=-torch.zeros(4)), "the bits differ"


def test_a_digest_does_not_depend_on_chunks_or_strides() -> None:
    value = weights(64, 32)
    assert paceline_digests.digest_values(value, chunk=100) == paceline_digests.digest_values(value)
    assert paceline_digests.digest_values(value.t().contiguous().t()) == paceline_digests.digest_values(value)


# --- clocks ---


class FakeClock:
    """A device that is behind the host: marks are counters of queued work, which has passed only after `drain`."""

    def __init__(self) -> None:
        self.queued_s = 0.0
        self.done_s = 0.0

    def work(self, seconds: float) -> None:
        self.queued_s += seconds

    def mark(self) -> float:
        return self.queued_s

    def elapsed_s(self, begin: float, end: float) -> float:
        assert self.passed(end), "read before the device was there"
        return end - begin

    def passed(self, mark: float) -> bool:
        return mark <= self.done_s

    def drain(self) -> None:
        self.done_s = self.queued_s


def test_a_stopwatch_sums_the_spans_of_a_phase() -> None:
    clock = FakeClock()
    watch = Stopwatch(clock)
    for seconds in (1.0, 2.0, 4.0):
        with watch.phase("forward"):
            clock.work(seconds)
        clock.work(100.0)
    with watch.phase("backward"):
        clock.work(0.5)
    clock.drain()
    assert watch.seconds("forward") == 7.0
    assert watch.seconds("backward") == 0.5
    assert watch.seconds("h2d") is None, "missing is None, never 0"


def test_work_queued_after_the_call_returned_is_seen() -> None:
    """Method, section 6 (4): the host has long moved on, the device has not; the phase lasts as the device's does."""
    clock = FakeClock()
    watch = Stopwatch(clock)
    with watch.phase("optimizer"):
        clock.work(3.0)
    assert not clock.passed(clock.mark())
    clock.drain()
    assert watch.seconds("optimizer") == 3.0


def test_the_host_clock_measures_seconds() -> None:
    import time

    clock = instruments.clock_for("cpu")
    assert isinstance(clock, HostClock)
    begin = clock.mark()
    time.sleep(0.02)
    end = clock.mark()
    assert clock.elapsed_s(begin, end) >= 0.02
    assert clock.passed(end)
    clock.drain()


def test_cuda_has_a_clock_of_its_own() -> None:
    assert isinstance(instruments.clock_for("cuda"), instruments.CudaClock)


# --- memory ---


def test_memory_on_a_cpu_is_the_resident_set() -> None:
    sample = read_memory(3, "setup", "cpu", peak=False)
    assert (sample.rank, sample.moment) == (3, "setup")
    assert sample.allocated_bytes is sample.reserved_bytes is sample.device_bytes is None
    assert sample.resident_bytes is not None
    assert sample.resident_bytes > 10 * 2**20


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel does not reset high-water marks")
def test_the_peak_starts_anew_at_a_reset() -> None:
    """With memory straight from the kernel: torch's allocator on aarch64 (mimalloc) does not hand pages back."""
    import mmap

    size = 128 * 2**20
    reset_peak("cpu")
    before = read_memory(0, "steps", "cpu", peak=True).resident_bytes
    block = mmap.mmap(-1, size)
    for start in range(0, size, 2**20):
        block[start : start + 2**20] = b"x" * 2**20
    during = read_memory(0, "steps", "cpu", peak=True).resident_bytes
    block.close()
    kept = read_memory(0, "steps", "cpu", peak=True).resident_bytes
    assert before is not None
    assert during is not None
    assert kept is not None
    assert during - before > 0.9 * size
    assert kept > 0.98 * during, "a high-water mark does not fall (the kernel counts per CPU, hence roughly)"
    reset_peak("cpu")
    after = read_memory(0, "steps", "cpu", peak=True).resident_bytes
    assert after is not None
    assert after < during - size / 2


# --- bytes on the wire ---


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def single(values: int = 6, dtype: Any = None) -> Any:
    return torch.zeros(values, dtype=dtype or torch.float32)


# Each call under its older name too: DeepSpeed still uses them.
CALLS: dict[str, tuple[Any, str, int]] = {
    "all_reduce": (lambda: dist.all_reduce(single()), "all_reduce", 24),
    "all_gather_into_tensor": (lambda: dist.all_gather_into_tensor(single(), single()), "all_gather", 24),
    "all_gather": (lambda: dist.all_gather([single()], single()), "all_gather", 24),
    "reduce_scatter_tensor": (lambda: dist.reduce_scatter_tensor(single(), single()), "reduce_scatter", 24),
    "reduce_scatter": (lambda: dist.reduce_scatter(single(), [single()]), "reduce_scatter", 24),
    "all_to_all_single": (lambda: dist.all_to_all_single(single(), single()), "all_to_all", 24),
    "broadcast": (lambda: dist.broadcast(single(), 0), "broadcast", 24),
    "reduce": (lambda: dist.reduce(single(), 0), "reduce", 24),
    "functional all_reduce": (lambda: functional.all_reduce(single(), "sum", [0]).sum(), "all_reduce", 24),
    "functional all_gather": (
        lambda: functional.all_gather_tensor(single(), 0, dist.group.WORLD).sum(),
        "all_gather",
        24,
    ),
    "functional reduce_scatter": (
        lambda: functional.reduce_scatter_tensor(single(), "sum", 0, dist.group.WORLD).sum(),
        "reduce_scatter",
        24,
    ),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", CALLS)
def test_every_collective_is_counted(group: Any, name: str) -> None:
    call, operation, size = CALLS[name]
    audit = Audit()
    with audit.watching():
        call()
    counter = audit.wire
    assert dict(counter.bytes) == {(operation, "fp32", 1, ""): size}
    assert dict(counter.calls) == {(operation, "fp32", 1, ""): 1}


def test_dtypes_are_kept_apart_and_calls_add_up(group: Any) -> None:
    audit = Audit()
    with audit.watching():
        for dtype in (torch.float32, torch.float32, torch.bfloat16, torch.int64):
            dist.all_reduce(single(10, dtype))
    counter = audit.wire
    assert {(s.dtype, s.calls, s.payload_bytes) for s in counter.samples(rank=2, step=9)} == {
        ("fp32", 2, 80),
        ("bf16", 1, 20),
        ("int64", 1, 80),
    }
    assert {(s.rank, s.step, s.operation, s.group_size) for s in counter.samples(2, 9)} == {(2, 9, "all_reduce", 1)}


def test_nothing_else_is_counted(group: Any) -> None:
    audit = Audit()
    dist.all_reduce(single())
    with audit.watching():
        (single() * 2).sum()
        dist.barrier()
    dist.all_reduce(single())
    assert audit.wire.samples(0, 0) == []


def test_a_coalesced_call_counts_all_its_tensors(group: Any) -> None:
    counter = WireCounter()
    counter.add("allreduce_coalesced_", ([single(2), single(3)],), None)
    assert counter.bytes["all_reduce", "fp32", 1, ""] == 20


@pytest.mark.parametrize(
    ("operator", "args", "result", "operation", "payload"),
    [
        ("all_reduce_", lambda: (single(6), "sum", "0"), None, "all_reduce", 24),
        ("all_reduce_coalesced_", lambda: ([single(2), single(3)], "sum", "0"), None, "all_reduce", 20),
        ("allgather_", lambda: ([[single(3), single(3)]], [single(3)]), None, "all_gather", 24),
        ("allgather_coalesced_", lambda: ([[single(3), single(3)]], [single(3)]), None, "all_gather", 24),
        ("all_gather_into_tensor_coalesced", lambda: ([single(3)], 2, "0"), [6], "all_gather", 24),
        ("reduce_scatter_tensor_coalesced", lambda: ([single(6), single(2)], "sum", 2, "0"), [3], "reduce_scatter", 32),
        ("reduce_scatter_tensor_out", lambda: (single(6), "sum", 2, "0"), [3], "reduce_scatter", 24),
        ("gather_", lambda: ([], [single(3)]), None, "gather", 4 * 12),
        ("scatter_", lambda: ([single(3)], []), None, "scatter", 4 * 12),
        ("isend", lambda: (single(5), 1, 0, "0"), None, "send", 20),
    ],
)
def test_each_operator_is_counted_by_hand(
    monkeypatch: pytest.MonkeyPatch, operator: str, args: Any, result: Any, operation: str, payload: int
) -> None:
    """In a group of four, once per call however many tensors it took; of gather and scatter all ranks' parts are S."""
    monkeypatch.setattr(paceline_wire, "group_of", lambda args: (4, ""))
    counter = WireCounter()
    counter.add(operator, args(), result and [single(n) for n in result])
    assert dict(counter.bytes) == {(operation, "fp32", 4, ""): payload}
    assert dict(counter.calls) == {(operation, "fp32", 4, ""): 1}


def test_an_unknown_operator_is_kept_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest would pass for the whole otherwise; what sends nothing makes nothing unknown."""
    monkeypatch.setattr(paceline_wire, "group_of", lambda args: (4, ""))
    counter = WireCounter()
    counter.add("all_reduce_sparsely_", (single(6), "sum", "0"), None)
    counter.add("signal_", ("0",), None)
    for silent in ("wait_tensor", "barrier", "monitored_barrier_", "check_for_nan", "recv_", "irecv"):
        counter.add(silent, (single(6), "0"), None)
    assert {(s.operation, s.dtype, s.payload_bytes) for s in counter.samples(0, 0)} == {
        ("all_reduce_sparsely_", "fp32", 24),
        ("signal_", "unknown", 0),
    }


def test_every_operator_of_this_torch_is_decided_on() -> None:
    """A new one shows here before it makes numbers unknown."""
    schemas = (schema.name.split("::") for schema in torch._C._jit_get_all_schemas())
    known = {name for namespace, name in schemas if namespace in ("c10d", "_c10d_functional")}
    assert "all_reduce" in known
    # A batch of sends and receives in one call: no count of ours tells them apart.
    assert known - set(paceline_wire._OPERATIONS) - set(paceline_wire._SILENT) <= {"batch_p2p_ops"}


def test_the_peak_for_a_look_follows_what_the_process_holds() -> None:
    from paceline.training.instruments import peak_bytes

    before = peak_bytes("cpu")
    held = bytearray(before + 32 * 2**20)
    held[::4096] = b"x" * len(held[::4096])  # memory is resident once it is touched
    assert peak_bytes("cpu") >= len(held)
