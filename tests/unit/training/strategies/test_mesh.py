"""Schedules of a pipeline and options of FSDP2 on two forked ranks: the loss and the norm of one process."""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from testbed import EXHAUSTIVE

from paceline.experiment.choices import Choice
from paceline.experiment.layout import replicas_of
from paceline.experiment.spec import RunSpec

pytestmark = pytest.mark.slow

MODEL = "tiny:layers=4,hidden=32,heads=2,vocab=63"
# Schedules by how stages lie on ranks: one each, several in turn, and there and back. Mechanisms of FSDP2.
FEW = (
    "mesh:tp=2",
    "mesh:pp=2,schedule=gpipe,micro_batches=2",
    "mesh:pp=2,schedule=interleaved-1f1b",
    "mesh:pp=2,schedule=zbv",
    "mesh:shard=2,offload=true",
    "mesh:shard=2,reshard_after_forward=false,sync_every_micro_batch=true",
    "mesh:shard=2,gather_once=true",
)
MORE = tuple(f"mesh:pp=2,schedule={name}" for name in ("gpipe", "looped-bfs", "interleaved-zero-bubble", "dualpipev"))
TWO_RANKS = (*FEW, *MORE) if EXHAUSTIVE else FEW


def train(spec: RunSpec, rank: int) -> tuple[float, float, list[str], list[str]]:
    """Loss and norm of the second step, and the digests of the weights before and after."""
    import torch

    from paceline.contract import Seat
    from paceline.experiment.plugins import load
    from paceline.models.arithmetic import load as load_shape
    from paceline.training import decoder
    from paceline.training.data.corpus import Partition, open_data
    from paceline.training.instruments import attention_backends, digest_parameters

    assert spec.strategy is not None
    plugin = load("strategies", spec.strategy.name)
    assert plugin.check(spec) is None
    if spec.topology.world_size > 1:
        # As on a GPU: 64 logits for 63 words where ranks do not share them.
        decoder._head = decoder.padded_head
    seat = Seat(rank=rank, local_rank=rank, world_size=spec.topology.world_size, device="cpu")
    corpus, partition = open_data(spec, load_shape(spec.model).vocab), Partition.of(spec, rank)
    with attention_backends("cpu"):
        trainer = plugin.wrap(spec, seat)
        start = digest_parameters(trainer.full_parameters())
        for step in range(2):
            batch = partition.step_batch(corpus, step)
            total = torch.zeros(())
            for number, micro in enumerate(batch.micro_batches):
                tokens, last = torch.from_numpy(micro), number + 1 == len(batch.micro_batches)
                loss = trainer.forward(tokens[:, :-1], tokens[:, 1:], torch.tensor(batch.normaliser), last)
                trainer.backward(loss, last)
                total += loss.detach()
            norm = trainer.update()
        end = digest_parameters(trainer.full_parameters())
    return float(total) / len(batch.micro_batches), float(norm), [start.digest], [end.digest]


def scaled_steps(rank: int) -> list[tuple[float, float]]:
    """Weight and loss scale after each of three steps with gradients of 3; in the first, that of rank 1 overflows."""
    import torch

    from paceline.training.strategies._mesh.scaler import AgreedScaler

    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), AgreedScaler("cpu", 1024.0)
    found = []
    for step in range(3):
        weight.grad = scaler.scale(torch.tensor(math.inf if rank == 1 and step == 0 else 3.0))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        found.append((weight.item(), scaler.state_dict()["scale"]))
    return found


def rank_main(rank: int) -> NoReturn:
    """One of two ranks, forked from the nursery: trains the specs of MESH_SPECS one after another."""
    import torch.distributed as dist

    file = Path(os.environ["MESH_SPECS"])
    dist.init_process_group("gloo")
    results: dict[str, Any] = {str(s.strategy): train(s, rank) for s in pickle.loads(file.read_bytes())}  # noqa: S301 (ours)
    results["scaler"] = scaled_steps(rank)
    file.with_name(f"rank-{rank}").write_bytes(pickle.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0)


@pytest.fixture(scope="module")
def trained(
    make_spec: Callable[..., RunSpec],
    tmp_path_factory: pytest.TempPathFactory,
    environment: Callable[..., dict[str, str]],
    nursery: None,
) -> dict[str, Any]:
    """Results of all ranks by strategy, and of one process under "single"."""
    common: dict[str, Any] = {"model": MODEL, "sequence_length": 8, "micro_batch": 1, "clip_norm": 0.1}
    single = make_spec("single", processes=1, accumulation=8, **common)
    specs = [
        make_spec(name, processes=2, accumulation=8 // replicas_of(Choice.parse(name), 2), **common)
        for name in TWO_RANKS
    ]
    assert {spec.work for spec in specs} == {single.work}
    folder = Path(tmp_path_factory.mktemp("mesh"))
    (folder / "specs").write_bytes(pickle.dumps(specs))
    (folder / "ranks.call").write_text("test_mesh rank_main 2")
    env = environment(PYTHONPATH=str(Path(__file__).parent), OMP_NUM_THREADS="1", MESH_SPECS=str(folder / "specs"))
    command = [sys.executable, "-m", "testbed.nursery", "run", "1", str(folder / "ranks.call")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [pickle.loads((folder / f"rank-{rank}").read_bytes()) for rank in range(2)]  # noqa: S301 (ours)
    names = (*TWO_RANKS, "scaler")
    return {name: [results[name] for results in ranks] for name in names} | {"single": train(single, 0)}


@pytest.mark.parametrize("strategy", TWO_RANKS)
def test_loss_norm_and_weights_are_those_of_one_process(trained: dict[str, Any], strategy: str) -> None:
    loss, norm, start, _ = trained["single"]
    ranks = trained[strategy]
    # Ranks of one replica report its loss; of two replicas, the mean counts.
    assert sum(result[0] for result in ranks) / 2 == pytest.approx(loss, rel=1e-5)
    for result in ranks:
        assert result[1] == pytest.approx(norm, rel=1e-5)
        assert result[2] == start
        assert result[3] == ranks[0][3] != start


def test_all_ranks_skip_a_step_in_which_one_overflows(trained: dict[str, Any]) -> None:
    assert trained["scaler"] == [[(0.0, 512.0), (-3.0, 512.0), (-6.0, 512.0)]] * 2
