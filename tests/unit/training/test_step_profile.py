from __future__ import annotations

import pytest

from paceline.training.instruments import HostClock
from paceline.training.step_profile import (
    SLOTS,
    DimensionProfile,
    Profile,
    Span,
    class_of,
    covered_by_slot,
    covered_s,
    divided_s,
    timeline,
)


@pytest.mark.parametrize(
    ("spans", "covered"),
    [
        ([], 0.0),
        ([(1.0, 2.0)], 1.0),
        ([(0.0, 1.0), (2.0, 4.0)], 3.0),
        ([(0.0, 2.0), (1.0, 3.0)], 3.0),
        ([(0.0, 10.0), (2.0, 3.0), (4.0, 5.0)], 10.0),
        ([(3.0, 4.0), (0.0, 1.0), (0.5, 3.5)], 4.0),
        ([(1.0, 1.0)], 0.0),
        ([(0.0, 1.0), (0.0, 1.0)], 1.0),
    ],
)
def test_the_union_of_spans_by_hand(spans: list[Span], covered: float) -> None:
    assert covered_s(spans) == pytest.approx(covered)


@pytest.mark.parametrize(
    ("compute", "communication", "exposed"),
    [
        ([(0.0, 4.0)], [(1.0, 2.0)], 0.0),
        ([(0.0, 1.0)], [(1.0, 3.0)], 2.0),
        ([(0.0, 2.0), (3.0, 4.0)], [(1.0, 5.0)], 2.0),
        ([], [(0.0, 1.0), (0.5, 2.0)], 2.0),
        ([(0.0, 1.0)], [], 0.0),
    ],
)
def test_exposed_is_communication_while_nothing_computes(
    compute: list[Span], communication: list[Span], exposed: float
) -> None:
    profile = Profile("cpu", HostClock())
    profile.computing["elementwise"], profile.communication, profile.wall_s = compute, communication, 5.0
    sample = profile.sample(rank=1, steps=2)
    assert sample.exposed_s == pytest.approx(exposed)
    assert sample.compute_s == pytest.approx(covered_s(compute))
    assert sample.communication_s == pytest.approx(covered_s(communication))
    assert sample.exposed_s <= sample.communication_s
    assert (sample.rank, sample.steps, sample.wall_s) == (1, 2, 5.0)
    assert sample.gap_s == pytest.approx(5.0 - sample.compute_s - sample.exposed_s)


def test_exposed_time_is_divided_by_dimension() -> None:
    """On a CPU a collective belongs to the range in which it starts, and waiting for a message counts."""
    profile = DimensionProfile("cpu", HostClock())
    profile.computing["elementwise"], profile.wall_s = [(0.0, 2.0)], 10.0
    profile.communication = [(1.0, 4.0), (3.5, 6.0), (9.0, 9.5)]
    profile.ranges = [((3.4, 3.6), "shard"), ((0.9, 1.1), "tp"), ((6.0, 8.0), "wait pp"), ((8.0, 8.1), "tp")]
    samples = {s.dimension: s for s in profile.samples(1, 2, ("tp", "pp", "shard"))}
    assert {name: s.communication_s for name, s in samples.items()} == pytest.approx(
        {"tp": 3.0, "pp": 2.0, "shard": 2.5}
    )
    # From 2 to 4 tensor parallel traffic is exposed, so that only what follows counts for sharding.
    assert {name: s.exposed_s for name, s in samples.items()} == pytest.approx({"tp": 2.0, "pp": 2.0, "shard": 2.0})


def test_a_real_profile_sees_compute() -> None:
    import torch

    profile = Profile("cpu", HostClock())
    with profile.recording():
        torch.ones(64, 64) @ torch.ones(64, 64)
    sample = profile.sample(0, 1)
    assert 0 < sample.compute_s <= sample.wall_s * 1.5
    assert sample.communication_s == sample.exposed_s == 0


class Event:
    """What torch's profiler hands over. call: the number of an operator or launch; linked: of a kernel's operator."""

    def __init__(self, name: str, device: str, begin: float, end: float, call: int = 0, linked: int = 0) -> None:
        self.correlation_id, self.linked_correlation_id = lambda: call, lambda: linked
        self.name, self.device_type = lambda: name, lambda: f"DeviceType.{device}"
        self.start_ns, self.duration_ns = lambda: round(begin * 1e9), lambda: round((end - begin) * 1e9)
        self.is_user_annotation = lambda: name.startswith(("nccl:", "paceline:"))


def test_waiting_on_the_host_is_not_compute_on_the_device() -> None:
    profile = Profile("cuda", HostClock())
    for event in (
        Event("cudaDeviceSynchronize", "CPU", 0.0, 10.0),
        Event("gemm", "CUDA", 0.0, 1.0),
        Event("ncclDevKernel_AllReduce", "CUDA", 0.5, 3.0),
        Event("Memcpy HtoD (Pinned -> Device)", "CUDA", 3.0, 3.25),
        Event("Memcpy HtoD (Pinned -> Device)", "CUDA", 3.5, 3.6),
    ):
        profile.add(event)
    sample = profile.sample(0, 1, batches=1, batch_bytes=100)
    assert sample.exposed_s == pytest.approx(2.0)
    assert (sample.h2d_s, sample.h2d_bytes) == (pytest.approx(0.25), 100)
    assert profile.sample(0, 1, batches=3, batch_bytes=100).h2d_s is None


# Two collectives and a message, as the host started them. Operators and launches have the same numbers.
STARTED = (
    Event("paceline:tp", "CPU", 0.0, 0.1, 1),
    Event("record_param_comms", "CPU", 0.05, 0.06, 2),
    Event("paceline:shard", "CPU", 0.2, 0.3, 3),
    Event("record_param_comms", "CPU", 0.25, 0.26, 4),
    Event("paceline:pp", "CPU", 0.4, 0.5, 5),
    Event("nccl:coalesced", "CPU", 0.6, 0.7, 6),
)
LAUNCHES = (
    Event("cuLaunchKernelEx", "CPU", 0.055, 0.056, 4),
    Event("cudaLaunchKernelExC", "CPU", 0.255, 0.256, 2),
    Event("cudaLaunchKernelExC", "CPU", 0.65, 0.66, 7),
    Event("cudaStreamSynchronize", "CPU", 0.7, 0.8, 3),
)


@pytest.mark.parametrize(
    ("host", "exposed"),
    [
        ((*STARTED, *LAUNCHES), {"tp": 1.0, "pp": 0.5, "shard": 1.0}),
        # Without the launches a message has no operator, which is too much of the communication.
        (STARTED, {}),
        (LAUNCHES, {}),
    ],
    ids=["launches", "operators", "no ranges"],
)
def test_kernels_belong_to_the_dimension_in_which_they_were_launched(
    host: tuple[Event, ...], exposed: dict[str, float]
) -> None:
    """Kernels run later than their launches, on other streams and in another order. A message is launched after its
    range, and by no operator. The device shows NCCL's own ranges once more."""
    profile = DimensionProfile("cuda", HostClock())
    for event in (
        *host,
        Event("nccl:_all_gather_base", "CUDA", 1.0, 3.0, 4),
        Event("ncclDevKernel_AllGather", "CUDA", 1.0, 3.0, 2, 4),
        Event("ncclDevKernel_AllReduce", "CUDA", 4.0, 5.0, 4, 2),
        Event("ncclDevKernel_SendRecv", "CUDA", 6.0, 6.5, 7),
        Event("gemm", "CUDA", 2.0, 4.0, 8, 9),
    ):
        profile.add(event)
    assert profile.communication == [(1.0, 3.0), (4.0, 5.0), (6.0, 6.5)]
    assert {s.dimension: s.exposed_s for s in profile.samples(0, 1, ("tp", "pp", "shard"))} == pytest.approx(exposed)


def test_without_launches_a_kernel_belongs_to_its_operator() -> None:
    profile = DimensionProfile("cuda", HostClock())
    for event in (*STARTED, Event("ncclDevKernel_AllReduce", "CUDA", 4.0, 5.0, 4, 2)):
        profile.add(event)
    assert profile.spans() == {"tp": [(4.0, 5.0)]}


def test_a_norm_over_all_ranks_is_known_to_belong_to_no_dimension() -> None:
    """It waits for the slowest rank, so it may be most of what is sent."""
    launch, norm = Event("cudaLaunchKernelExC", "CPU", 0.85, 0.86, 8), Event("paceline:", "CPU", 0.8, 0.9, 7)
    kernels = (
        Event("ncclDevKernel_AllReduce_Sum_bf16", "CUDA", 1.0, 2.0, 4, 2),
        Event("ncclDevKernel_AllReduce_Sum_f32", "CUDA", 4.0, 9.0, 8, 2),
    )
    exposed = []
    for known in ((), (norm,)):
        profile = DimensionProfile("cuda", HostClock())
        for event in (*STARTED, *LAUNCHES, launch, *known, *kernels):
            profile.add(event)
        exposed.append({s.dimension: s.exposed_s for s in profile.samples(0, 1, ("tp", "pp"))})
    assert exposed == [{}, pytest.approx({"tp": 1.0, "pp": 0.0})]


# --- classes of kernels ---


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "elementwise"),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopA_TNN", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "products"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_16", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>", "dequantisation"),
        ("void kOptimizerStatic8bit2StateBlockwise<float, 0, 256, 1>", "elementwise"),
        ("triton_poi_fused__scaled_dot_product_flash_attention_mm_3", "elementwise"),
        ("triton_tem_fused_mm_7", "products"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("Memset (Device)", "elementwise"),
    ],
)
def test_a_kernel_is_classed_by_its_name(name: str, kind: str) -> None:
    assert class_of(name, "cuda") == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", "products"),
        ("aten::linear", "products"),
        ("bitsandbytes::gemm_4bit", "products"),
        ("bitsandbytes::dequantize_4bit", "dequantisation"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::copy_", "copies"),
        ("aten::addcmul_", "elementwise"),
        ("aten::mmul", "elementwise"),
    ],
)
def test_an_operator_is_classed_by_its_name(name: str, kind: str) -> None:
    assert class_of(name, "cpu") == kind


def test_classes_add_up_to_compute_however_they_lie() -> None:
    classes: dict[str, list[Span]] = {
        "attention": [(0.0, 2.0)],
        "dequantisation": [(1.0, 3.0), (8.0, 9.0)],
        "products": [(2.5, 8.5)],
        "elementwise": [(0.0, 12.0)],
        "copies": [(11.0, 13.0)],
    }
    found = divided_s(classes)
    assert found == {"attention": 2.0, "dequantisation": 2.0, "products": 5.0, "elementwise": 3.0, "copies": 1.0}
    assert sum(found.values()) == pytest.approx(covered_s(span for spans in classes.values() for span in spans))


def test_operators_inside_others_count_once_on_a_cpu() -> None:
    """A 4-bit product: half of it dequantisation, with plain operators inside."""
    profile = Profile("cpu", HostClock())
    for event in (
        Event("MatMul4Bit", "CPU", 0.0, 10.0),
        Event("bitsandbytes::gemm_4bit", "CPU", 0.0, 9.0),
        Event("bitsandbytes::dequantize_4bit", "CPU", 1.0, 5.0),
        Event("aten::empty", "CPU", 1.5, 2.0),
        Event("aten::linear", "CPU", 5.0, 9.0),
        Event("aten::copy_", "CPU", 8.0, 8.5),
        Event("aten::add", "CPU", 9.0, 10.0),
    ):
        profile.add(event)
    sample = profile.sample(0, 1)
    assert (sample.dequantisation_s, sample.products_s) == (pytest.approx(4.0), pytest.approx(5.0))
    assert (sample.copies_s, sample.elementwise_s) == (pytest.approx(0.0), pytest.approx(1.0))
    assert sample.compute_s == pytest.approx(10.0)


def test_a_real_product_and_attention_are_seen_by_class() -> None:
    import torch

    x = torch.ones(1, 1, 64, 64)
    profile = Profile("cpu", HostClock())
    with profile.recording():
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
        x @ x
    sample = profile.sample(0, 1)
    assert sample.products_s is not None
    assert sample.attention_s is not None
    assert sample.products_s > 0
    assert sample.attention_s > 0
    assert sample.dequantisation_s == 0


def test_a_timeline_has_what_filled_most_of_each_slot() -> None:
    """Compute for 0.5 s, communication that overlaps it and goes on to 0.8 s, then nothing; it began at 2 s."""
    profile = Profile("cpu", HostClock())
    profile.computing["products"].append((2.0, 2.5))
    profile.communication.append((2.2, 2.8))
    profile.begin_s, profile.wall_s = 2.0, 1.0
    found = timeline(profile, rank=3, steps=2)
    assert (found.rank, found.steps, found.kinds) == (3, 2, ("compute", "communication"))
    assert [found.slots.count(kind) for kind in range(3)] == [50, 30, 20]
    assert list(found.slots) == sorted(found.slots)
    assert len(found.slots) == SLOTS


def test_slots_add_up_to_the_union_of_the_spans() -> None:
    spans = [(0.05, 0.31), (0.2, 0.47), (0.6, 0.61), (-1.0, 0.02)]
    found = covered_by_slot(spans, 0.0, 0.1, 7)
    assert sum(found) == pytest.approx(0.02 + 0.42 + 0.01)
    assert found[2] == pytest.approx(0.1)
    assert covered_by_slot(spans, 0.0, 0.0, 3) == [0.0, 0.0, 0.0]
