"""The arithmetic of layouts: who holds what, what short names stand for, and what is refused in one sentence."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from paceline.errors import RequestError
from paceline.experiment import plugins
from paceline.experiment.choices import Choice
from paceline.experiment.layout import SCHEDULES, Layout, layout_of
from paceline.experiment.spec import RunSpec


def refusal(spec: RunSpec) -> str | None:
    assert spec.strategy is not None
    reason: str | None = plugins.load("strategies", spec.strategy.name).check(spec)
    return reason


def test_every_rank_has_its_own_place() -> None:
    layout = Layout(dp=2, cp=2, tp=2, pp=2)
    places = [tuple(layout.coordinates(rank).values()) for rank in range(layout.world_size)]
    assert len(set(places)) == 16
    assert [layout.coordinates(rank)["tp"] for rank in range(4)] == [0, 1, 0, 1], "tp is the fastest"
    assert [layout.leader(rank) for rank in range(16)] == [0, 0, 0, 0, 4, 4, 4, 4] * 2


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("layers", [8, 11])
def test_stages_cover_all_layers_once(name: str, layers: int) -> None:
    _, virtual, v_shaped = SCHEDULES[name]
    layout = Layout(pp=4, virtual=virtual, v_shaped=v_shaped, schedule=name)
    stages = [stage for rank in range(4) for stage in layout.stages_of(rank)]
    assert sorted(stages) == list(range(4 * virtual))
    assert [layer for stage in range(layout.stages) for layer in layout.layers_of(stage, layers)] == list(range(layers))
    assert layout.has_last(0 if v_shaped else 3)


@pytest.mark.parametrize(
    ("short", "processes", "expected"),
    [
        ("hsdp", 8, "mesh:shard=4"),
        ("tp", 4, "mesh:tp=4"),
        ("tp:tp=2,sequence=false", 4, "mesh:tp=2,sequence=false"),
        ("pp:schedule=zbv", 2, "mesh:pp=2,schedule=zbv"),
        ("cp", 2, "mesh:cp=2"),
        ("3d", 8, "mesh:tp=2,pp=2,shard=2"),
        # The rest is sharded, whatever is left for it.
        ("3d:tp=8,pp=4", 64, "mesh:tp=8,pp=4,shard=2"),
        ("3d:cp=2", 16, "mesh:cp=2,tp=2,pp=2,shard=4"),
        ("3d:shard=1", 8, "mesh:tp=2,pp=2"),
        ("3d:tp=many", 8, "mesh:tp=many,pp=2,shard=4"),
        ("ddp", 8, "ddp"),
    ],
)
def test_short_names(short: str, processes: int, expected: str) -> None:
    assert str(plugins.expanded("strategies", Choice.parse(short), 1, processes)) == expected


def test_hsdp_shards_inside_a_node() -> None:
    assert str(plugins.expanded("strategies", Choice("hsdp"), 4, 8)) == "mesh:shard=8"


def test_ranks_that_split_a_model_share_their_samples(make_spec: Callable[..., RunSpec]) -> None:
    spec = make_spec("mesh:tp=2,pp=2", processes=8, micro_batch=2, accumulation=4)
    assert layout_of(spec).dp == 2
    assert spec.global_batch == 2 * 4 * 2
    assert make_spec("ddp", processes=8, micro_batch=2, accumulation=1).work == spec.work, "the same work"


@pytest.mark.parametrize(
    ("strategy", "fields", "reason"),
    [
        ("mesh:dp=2,tp=2,pp=2", {"processes": 4}, "dp 2 x cp 1 x tp 2 x pp 2 = 8 processes, got 4"),
        ("mesh:tp=3", {"processes": 8}, "dp 2 x cp 1 x tp 3 x pp 1 = 6 processes, got 8"),
        ("mesh:tp=4", {"processes": 4}, "tp 4 does not divide the 2 KV heads of tiny-llama"),
        ("mesh:shard=3", {"processes": 4}, "shard 3 does not divide dp 4 x cp 1 = 4"),
        ("mesh:cp=4,attention=ulysses", {"processes": 4}, "cp 4 does not divide the 2 KV heads"),
        ("mesh:cp=2", {"processes": 2, "sequence_length": 30}, "needs a sequence length that 4 divides, got 30"),
        ("mesh:pp=4", {"processes": 4, "accumulation": 4}, "= 4 stages exceed the 2 layers"),
        ("mesh:pp=2", {"processes": 2, "accumulation": 1}, "needs at least 2 micro batches, got 1"),
        (
            "mesh:pp=2,virtual=1,schedule=interleaved-1f1b",
            {"processes": 2, "accumulation": 4},
            "needs at least 2 stages per rank, got virtual=1",
        ),
        (
            "mesh:pp=2,virtual=2",
            {"processes": 2, "accumulation": 4},
            "the schedule 1f1b needs 1 stage per rank, got virtual=2; leave out virtual",
        ),
        ("mesh:tp=2", {"processes": 2, "precision": "float8"}, "tp 2 splits the matrices that an 8-bit scale belongs"),
        (
            "mesh:cp=2",
            {"processes": 2, "precision": "float8", "micro_batch": 1, "sequence_length": 24},
            "got 12 (1 seq",
        ),
        ("mesh:tp=2,async_tp=true", {"processes": 2}, "symmetric memory"),
        ("mesh:schedule=zbv", {"processes": 2}, "schedule=zbv has no effect with pp 1; leave it out"),
        *(
            (
                f"mesh:pp=2,schedule={schedule}",
                {"processes": 2, "accumulation": 4, "model": "tiny:layers=4", "checkpointing": checkpointing},
                f"the schedule {schedule} splits the backward pass, which activation checkpointing does not support",
            )
            for schedule, checkpointing in (("zbv", "full"), ("interleaved-zero-bubble", "selective"))
        ),
        ("ddp:static_graph=true", {"processes": 2, "accumulation": 2}, "cannot accumulate gradients without reducing"),
        ("ddp:static_graph=true,find_unused_parameters=true", {"processes": 2}, "leave out find_unused_parameters"),
        ("mesh:ep=2,micro_batches=3", {"processes": 2, "model": "tiny-moe"}, "micro_batches=3 has no effect with pp 1"),
        ("mesh:attention=ulysses", {"processes": 2}, "attention=ulysses has no effect with cp 1"),
        ("mesh:sequence=false", {"processes": 2}, "sequence=false has no effect with tp 1"),
        ("mesh:reshard_after_forward=false", {"processes": 2}, "reshard_after_forward=false has no effect with shard"),
        ("mesh:shard=2,reshard_to=2", {"processes": 2}, "reshard_to 2 is shard itself, so it has no effect"),
        (
            "mesh:shard=4,reshard_to=2,reshard_after_forward=false",
            {"processes": 4},
            "reshard_after_forward=false has no effect with reshard_to; leave it out",
        ),
        (
            "mesh:pp=2,shard=2,reshard_after_forward=false",
            {"processes": 4, "accumulation": 2},
            "reshard_after_forward=false has no effect with a pipeline",
        ),
        ("mesh:tp=2,sync_every_micro_batch=true", {"processes": 2}, "dp x cp ranks, of which there is 1; leave it out"),
        ("mesh:ep=2", {"processes": 2}, "ep 2 needs a mixture of experts, which tiny-llama is not"),
        ("mesh:ep=3", {"processes": 3, "model": "tiny-moe"}, "ep 3 does not divide the 4 experts of tiny-moe"),
        ("mesh:dp=2,cp=2,ep=8", {"processes": 4, "model": "tiny-moe:experts=8"}, "does not divide dp 2 x cp 2 = 4"),
        ("mesh:ep=2,shard=3", {"processes": 6, "model": "tiny-moe"}, "one of them must divide the other"),
        ("mesh:tp=3", {"processes": 3, "model": "tiny-moe"}, "tp 3 does not divide the 4 query heads of tiny-moe"),
    ],
)
def test_refused_in_one_sentence(
    make_spec: Callable[..., RunSpec], strategy: str, fields: dict[str, Any], reason: str
) -> None:
    spec = make_spec(strategy, **{"model": "tiny-llama", "sequence_length": 32} | fields)
    assert reason in (refusal(spec) or "")


@pytest.mark.parametrize("strategy", ["mesh:pp=1,schedule=zbv", "mesh:cp=1,attention=ulysses", "mesh:prefetch=2"])
def test_one_process_is_a_baseline_whatever_the_options(make_spec: Callable[..., RunSpec], strategy: str) -> None:
    assert refusal(make_spec(strategy, processes=1, model="tiny-llama", sequence_length=32)) is None


def test_memory_by_component_is_predicted_for_layouts(make_spec: Callable[..., RunSpec]) -> None:
    spec = make_spec("mesh:tp=2", processes=2, workload="memory")
    assert plugins.load("workloads", "memory").check(spec) is None


@pytest.mark.parametrize(
    ("layers", "reason"),
    [("1+1", None), ("2", "layers=2 is 2 layers in 1 stage; tiny has 2"), ("1+2", "tiny has 2 layers, for 2 stages")],
)
def test_an_uneven_pipeline_has_all_layers(make_spec: Callable[..., RunSpec], layers: str, reason: str | None) -> None:
    spec = make_spec("mesh:pp=2", processes=2, accumulation=2, model="tiny")
    options = {**spec.strategy.options, "layers": layers} if spec.strategy else {}
    asked = dataclasses.replace(spec, strategy=Choice("mesh", options))
    found = plugins.load("strategies", "mesh").check(asked)
    assert found is None if reason is None else reason in str(found)


def test_unknown_options_are_named() -> None:
    with pytest.raises(RequestError, match=r"mesh.schedule: got '1f2b', expected gpipe, 1f1b"):
        plugins.load("strategies", "mesh").Options(schedule="1f2b")
    with pytest.raises(RequestError, match=r"mesh.tp: got 0"):
        plugins.load("strategies", "mesh").Options(tp=0)
    with pytest.raises(RequestError, match="option of mesh: got 'mesh:tp=2,tp=4', expected tp once"):
        Choice.parse("mesh:tp=2,tp=4")


def test_the_picture_says_which_rank_holds_what() -> None:
    layout = Layout(dp=2, tp=2, pp=2, shard=2, schedule="1f1b")
    assert layout.picture(4) == [
        "rank  replica  layers           tensor  shard",
        "   0        0  0-1 + embedding  1 of 2  1 of 2",
        "   1        0  0-1 + embedding  2 of 2  1 of 2",
        "   2        1  0-1 + embedding  1 of 2  2 of 2",
        "   3        1  0-1 + embedding  2 of 2  2 of 2",
        "   4        0  2-3 + head       1 of 2  1 of 2",
        "   5        0  2-3 + head       2 of 2  1 of 2",
        "   6        1  2-3 + head       1 of 2  2 of 2",
        "   7        1  2-3 + head       2 of 2  2 of 2",
    ]


def test_a_picture_of_every_dimension_fits_a_terminal() -> None:
    layout = Layout(dp=2, cp=2, tp=2, pp=2, ep=2, shard=4, virtual=2, schedule="interleaved-1f1b")
    lines = layout.picture(16, 16)
    assert lines[0] == "rank  replica  layers                    tensor  sequence  experts  shard"
    assert lines[1] == "   0        0  0-3 and 8-11 + embedding  1 of 2  1 of 2    0-7      1 of 4"
    assert max(map(len, lines)) <= 76, "with the indent, 80 columns"


def test_the_bubble_of_a_pipeline() -> None:
    assert Layout(pp=4, schedule="gpipe").bubble_ratio(4) == pytest.approx(3 / 7)
    assert Layout(pp=4, virtual=2, schedule="interleaved-1f1b").bubble_ratio(8) == pytest.approx(3 / 19)
    assert Layout(pp=4, virtual=2, schedule="zbv").bubble_ratio(8) is None


def test_experts_are_spread_over_data_parallel_ranks() -> None:
    layout = Layout(dp=4, ep=2, shard=4)
    assert (layout.expert_shard, layout.expert_replicate, layout.sizes()) == (2, 1, {"ep": 2, "shard": 4})
    assert layout.picture(2, 8)[2] == "   1        1  4-7      2 of 4"
    assert Layout(dp=4, ep=4).picture(2, 4)[4] == "   3        3  3"


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A strategy of another package, as a module that is imported; call the result to be where it is not installed."""
    module: Any = types.ModuleType("elsewhere.halves")
    module.check = lambda spec: None
    module.wrap = lambda spec, seat: None
    module.layout = lambda options, world_size: Layout(dp=world_size // 2, pp=2, split=(3, 1))
    module.approximation = lambda options: f"{options['bits']} bits"
    module.averages_every = lambda options: 4
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return lambda: monkeypatch.delitem(sys.modules, module.__name__)


def test_a_strategy_of_another_package_is_known_where_it_is_not_installed(
    make_spec: Callable[..., RunSpec], elsewhere: Callable[[], None]
) -> None:
    spec = make_spec("elsewhere.halves:bits=2", processes=4, accumulation=4)
    stored, work = json.dumps(spec.to_dict()), spec.work
    elsewhere()
    read = RunSpec.from_dict(json.loads(stored))
    assert layout_of(read) == Layout(dp=2, pp=2, split=(3, 1))
    assert (read.approximation, read.says("averages_every"), read.says("reductions_per_step")) == ("2 bits", 4, None)
    assert (read.global_batch, read.work) == (4 * 2 * spec.training.micro_batch, work)
    assert json.dumps(read.to_dict()) == stored
    without = {key: value for key, value in json.loads(stored).items() if key != "declared"}
    assert layout_of(RunSpec.from_dict(without)) == Layout(dp=4), "as in runs stored before"
    stored = stored.replace('"dp": 2', '"dp": 0')
    with pytest.raises(RequestError, match=r"layout.dp: got 0, expected a whole number from 1"):
        RunSpec.from_dict(json.loads(stored))
