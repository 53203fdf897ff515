"""Rehearsals on fake tensors: what can be told by arithmetic must come out exactly."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from testbed import EXHAUSTIVE

from paceline.errors import UnsupportedError
from paceline.experiment.choices import Choice
from paceline.experiment.spec import Precision, RunSpec, Topology, Training
from paceline.models import arithmetic

pytest.importorskip("torch")

from paceline.workloads import memory
from paceline.workloads.memory.rehearsal import Answer, Question, rehearse, rehearsed_counts

pytestmark = pytest.mark.slow

# One layer: rehearsing takes its time for every operator.
MODEL = "tiny:layers=1"
SHAPE = arithmetic.load(Choice.parse(MODEL))
COUNT = arithmetic.parameters(SHAPE)
GPIPE = "mesh:pp=2,schedule=gpipe"
TENSORS = len(arithmetic.tensor_sizes(SHAPE))


def spec(strategy: str = "single", processes: int = 1, model: str = MODEL, device: str = "cpu", **more: Any) -> RunSpec:
    precision = Precision(compute=more.pop("compute", "fp32"), reduce=more.pop("reduce", "fp32"))
    return RunSpec(
        experiment="test",
        workload=Choice("memory"),
        model=Choice.parse(model),
        topology=Topology(device=device, processes_per_node=processes),
        training=Training(**{"sequence_length": 64, "micro_batch": 2, "precision": precision, **more}),
        strategy=Choice.parse(strategy),
        steps=3,
    )


CASES: dict[str, Question] = {
    "single": Question(spec()),
    "bf16 reduced": Question(spec(compute="bf16", reduce="bf16")),
    "ddp": Question(spec("ddp", 4)),
    "fsdp2": Question(spec("fsdp2", 4)),
    "full": Question(spec(checkpointing="full")),
    "selective": Question(spec(checkpointing="selective")),
    "llama cpu": Question(spec(model="tiny-llama:layers=1", compute="bf16")),
    "llama gpu": Question(spec(model="tiny-llama:layers=1", compute="bf16", device="cuda"), workspace_bytes=1 << 20),
    "tensor": Question(spec("mesh:tp=2", 2)),
    "context": Question(spec("mesh:cp=2", 2)),
    "sharded": Question(spec("mesh:shard=4", 4)),
    "resharded to two": Question(spec("mesh:shard=4,reshard_to=2", 4)),
    "pipeline": Question(spec("mesh:pp=2", 2, "tiny", accumulation=2)),
    "many": Question(spec("mesh:pp=2", 2, "tiny", accumulation=12)),
    # What is asked beside the components is rehearsed with all micro batches.
    "all of many": Question(spec("mesh:pp=2", 2, "tiny", accumulation=12), falling=((1, 64),), goal_bytes=1 << 40),
    "gpipe": Question(spec(GPIPE, 2, "tiny", accumulation=15)),
    "all of gpipe": Question(spec(GPIPE, 2, "tiny", accumulation=15), falling=((1, 64),), goal_bytes=1 << 40),
    "search": Question(spec(), capacity_bytes=20 << 20, most=512),
}


if EXHAUSTIVE:  # tests/end_to_end/test_memory_runs.py compares accumulating runs with real ones
    CASES["ddp accumulating"] = Question(spec("ddp", 4, accumulation=3))
    CASES["fsdp2 accumulating"] = Question(spec("fsdp2", 4, accumulation=3))


def rehearse_all(_: int) -> NoReturn:
    """All cases one after another in a process forked from the nursery: the first of a kind takes longest."""
    import torch.distributed as dist

    memory.begin_rehearsals()
    answers = {}
    for name, question in CASES.items():
        answers[name] = rehearse(question)
        if dist.is_initialized():
            dist.destroy_process_group()
    Path(os.environ["REHEARSED"]).write_bytes(pickle.dumps(answers))
    sys.exit(0)


@pytest.fixture(scope="module")
def answers(
    tmp_path_factory: pytest.TempPathFactory, environment: Callable[..., dict[str, str]], nursery: None
) -> dict[str, Answer]:
    folder = tmp_path_factory.mktemp("rehearsed")
    (folder / "cases.call").write_text("test_rehearsal rehearse_all 1")
    env = environment(PYTHONPATH=str(Path(__file__).parent), OMP_NUM_THREADS="1", REHEARSED=str(folder / "answers"))
    command = [sys.executable, "-m", "testbed.nursery", "run", "1", str(folder / "cases.call")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Answer] = pickle.loads((folder / "answers").read_bytes())  # noqa: S301 (ours)
    return found


@pytest.mark.parametrize(
    ("name", "parameters", "optimizer", "gradients"),
    [
        ("single", 4 * COUNT, 8 * COUNT, 4 * COUNT),
        ("bf16 reduced", 2 * COUNT, 12 * COUNT, 2 * COUNT),
        ("ddp", 4 * COUNT, 8 * COUNT, 4 * COUNT),
        ("fsdp2", COUNT, 2 * COUNT, COUNT),
    ],
)
def test_state_is_exact(answers: dict[str, Answer], name: str, parameters: int, optimizer: int, gradients: int) -> None:
    """Every dimension of tiny divides by 4, so a quarter is a quarter. Adam's step counts are fp32 scalars."""
    found = answers[name].components
    assert found["parameters"] == parameters
    assert found["optimizer"] == optimizer + 4 * TENSORS
    assert found["gradients"] is not None
    assert gradients <= found["gradients"] <= gradients + 64  # and the loss


def test_weights_resharded_to_a_smaller_group_take_memory_between_the_passes(answers: dict[str, Answer]) -> None:
    """After the forward pass each of two ranks keeps half of the block instead of a quarter."""
    sharded, resharded = (answers[name].components for name in ("sharded", "resharded to two"))
    block = COUNT - arithmetic.root_parameters(SHAPE)
    assert resharded["parameters"] == sharded["parameters"] == COUNT
    assert (resharded["peak"] or 0) >= (sharded["peak"] or 0) + 4 * block // 2


@pytest.mark.parametrize("strategy", ["zero:stage=3,offload=cpu", "mesh:shard=2,offload=true"])
def test_what_is_offloaded_is_not_predicted_as_memory_of_the_gpu(strategy: str) -> None:
    with pytest.raises(UnsupportedError, match="offloaded"):
        rehearse(Question(spec(strategy, 2, device="cuda"), 0))


def test_layouts_split_what_they_say(answers: dict[str, Answer]) -> None:
    """Tensor parallelism leaves norms, positions and biases of row-parallel layers whole; context parallelism all."""
    single, tensor, context, pipeline = (answers[n].components for n in ("single", "tensor", "context", "pipeline"))
    whole = single["parameters"] or 0
    assert context["parameters"] == whole
    assert whole / 2 < (tensor["parameters"] or 0) < 0.6 * whole
    positions, norms, biases = 256 * 128, (2 + 1) * 2 * 128, 2 * 128
    assert tensor["optimizer"] == 8 * (COUNT + positions + norms + biases) // 2 + 4 * TENSORS
    # Of two layers the first stage has one, with embedding and positions and without the last norm, and two micro
    # batches in flight.
    assert pipeline["parameters"] == whole - 8 * SHAPE.hidden
    assert 1.5 < (pipeline["activations"] or 0) / (single["activations"] or 1) < 2
    # FSDP2 keeps a gathered copy of the weights from the forward pass on.
    own = (context["activations"] or 0) - whole
    assert 0.45 < own / (single["activations"] or 1) < 0.65


def test_a_pipeline_keeps_nothing_for_more_micro_batches_but_their_tokens(answers: dict[str, Answer]) -> None:
    """torch's own stages would also keep what each of them receives: 2 x 64 x 128 fp32 numbers, 64 KiB."""
    assert rehearsed_counts(CASES["many"]) == (6,)
    assert rehearsed_counts(CASES["all of many"]) == (12,)
    few, whole = (answers[name].components["peak"] or 0 for name in ("many", "all of many"))
    assert 0 <= whole - few <= 6 * (2 * 64) * (8 + 8)  # inputs and labels of six more micro batches


def test_a_schedule_that_keeps_all_micro_batches_is_extrapolated_exactly(answers: dict[str, Answer]) -> None:
    assert rehearsed_counts(CASES["gpipe"]) == (6, 8)
    assert answers["gpipe"].components == answers["all of gpipe"].components
    assert (answers["gpipe"].components["peak"] or 0) > 1.5 * (answers["many"].components["peak"] or 0)


@pytest.mark.exhaustive
def test_ddp_holds_gradients_twice_while_it_accumulates(answers: dict[str, Answer]) -> None:
    """Gradients that wait for the last micro batch are not in the buckets yet, which stand all the time."""
    once, twice = (answers[name].components["peak"] for name in ("ddp", "ddp accumulating"))
    assert once is not None
    assert twice is not None
    assert 3.5 * COUNT < twice - once < 4.5 * COUNT


@pytest.mark.exhaustive
def test_fsdp2_holds_whole_gradients_while_it_accumulates(answers: dict[str, Answer]) -> None:
    once, twice = (answers[name].components["peak"] for name in ("fsdp2", "fsdp2 accumulating"))
    assert once is not None
    assert twice is not None
    assert twice - once > 3 * COUNT


def test_checkpointing_trades_activations(answers: dict[str, Answer]) -> None:
    full, selective, none = (answers[n].components["activations"] or 0 for n in ("full", "selective", "single"))
    assert 0 < full < selective < none


def test_a_gpu_norm_keeps_less_than_a_cpu_norm(answers: dict[str, Answer]) -> None:
    on_cpu, on_gpu = (answers[name].components["activations"] or 0 for name in ("llama cpu", "llama gpu"))
    assert 0 < on_gpu < on_cpu


def test_the_search_ends_at_the_largest_that_fits(answers: dict[str, Answer]) -> None:
    peaks = answers["search"].peaks
    fitting = max(size for size, peak in peaks.items() if peak <= 20 << 20)
    slope = peaks[2] - peaks[1]
    assert peaks[fitting] + 2 * slope > 20 << 20
    assert len(peaks) <= 6
