"""Options of the collectives workload: what is accepted, what is refused with a sentence, and sizes as asked."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.errors import RequestError
from paceline.experiment.choices import Choice
from paceline.experiment.plugins import parse_options
from paceline.experiment.spec import RunSpec
from paceline.models.arithmetic import wire_factor
from paceline.workloads import collectives
from paceline.workloads.collectives.operations import OPERATIONS
from paceline.workloads.collectives.options import Options


def chosen(text: str) -> Options:
    return parse_options(Options, Choice.parse(f"collectives:{text}"))


@pytest.mark.parametrize(
    "text",
    [
        "operations=all_reduce+gossip",
        "dtypes=fp64",
        "mode=burst",
        "in_place=maybe",
        "factor=1",
        "iters=0",
        "iters=many",
        "warmup=-1",
        "budget_s=0",
        "pair_bytes=4MB",
        "max_bytes=true",
        "max_bytes=0",
        "min_bytes=1.3KiB",
        "sizes=3",
        "min_bytes=2KiB,max_bytes=1KiB",
        "max_bytes=4",
        "min_bytes=2",
        "dtypes=bf16,min_bytes=9",
        "max_bytes=8",
    ],
)
def test_a_wrong_option_is_one_sentence(make_spec: Callable[..., RunSpec], text: str, golden: object) -> None:
    spec = make_spec(None, processes=3, workload=f"collectives:{text}")
    with pytest.raises(RequestError) as caught:
        collectives.check(spec)
    assert str(caught.value) == golden
    assert "\n" not in str(caught.value)


def test_a_size_too_small_for_shares_is_fine_where_nothing_is_shared(make_spec: Callable[..., RunSpec]) -> None:
    spec = make_spec(None, processes=3, workload="collectives:operations=all_reduce+barrier,max_bytes=8")
    assert collectives.check(spec) is None


def test_words_come_in_the_order_of_the_table() -> None:
    picked = chosen("operations=barrier+all_gather+pairs,dtypes=int8+fp32,tournament=false")
    assert picked.swept_operations == ("all_gather", "barrier")
    assert picked.chosen_dtypes == ("fp32", "int8")
    assert picked.has_tournament, "the word asks for it"
    assert not chosen("operations=barrier,tournament=false").has_tournament
    assert chosen("iters=3").swept_operations == tuple(OPERATIONS)


@pytest.mark.parametrize(
    ("text", "size"), [("8", 8), ("64KiB", 65536), ("16MiB", 1 << 24), ("1GiB", 1 << 30), ("0.5MiB", 1 << 19)]
)
def test_sizes_are_numbers_or_texts(text: str, size: int) -> None:
    assert chosen(f"max_bytes={text}").most_bytes == size


def test_the_seed_defaults() -> None:
    plain = Options()
    assert (plain.warmup, plain.iters, plain.least_bytes, plain.most_bytes, plain.factor) == (10, 100, 8, None, 2)


@pytest.mark.parametrize(
    ("text", "operation", "dtype", "ranks"),
    [
        ("iters=1", "send_recv", "fp32", 1),
        ("iters=1", "reduce_scatter", "fp8", 2),
        ("in_place=out", "all_reduce", "fp32", 2),
        ("in_place=in", "all_to_all", "fp32", 2),
        ("mode=graph", "all_reduce", "fp32", 2),
    ],
)
def test_refusals_before_any_backend_is_asked(
    text: str, operation: str, dtype: str, ranks: int, golden: object
) -> None:
    reason = chosen(text).refusal(OPERATIONS[operation], dtype, ranks, "cpu")
    assert reason is not None
    assert reason == golden


def test_what_can_be_measured_is_not_refused(golden: object) -> None:
    assert chosen("in_place=both").refusal(OPERATIONS["all_gather"], "fp8", 2, "cpu") is None
    assert chosen("mode=graph").refusal(OPERATIONS["all_gather"], "fp8", 2, "cuda") is None
    assert str(chosen("mode=graph").refusal(OPERATIONS["barrier"], "none", 2, "cuda")) == golden


@pytest.mark.parametrize("name", [name for name, operation in OPERATIONS.items() if operation.has_payload])
def test_every_operation_has_its_bandwidth_factor(name: str) -> None:
    assert wire_factor(name, 4) > 0
