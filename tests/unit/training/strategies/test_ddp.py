from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from paceline.contract import Seat
from paceline.experiment.choices import Choice
from paceline.experiment.spec import Precision, RunSpec, Topology, Training
from paceline.training.strategies import _torch, ddp


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(processes: int, bucket_mb: float = 1.0) -> RunSpec:
    precision = Precision(compute="fp32", reduce="fp32")
    return RunSpec(
        experiment="test",
        workload=Choice("pretrain"),
        model=Choice.parse("tiny:layers=6"),
        topology=Topology(device="cpu", processes_per_node=processes),
        training=Training(sequence_length=16, micro_batch=1, precision=precision, compile=True, bucket_mb=bucket_mb),
        strategy=Choice("ddp"),
        steps=3,
    )


@pytest.mark.parametrize(("processes", "whole"), [(1, True), (2, False)])
def test_one_process_compiles_one_graph(
    processes: int, whole: bool, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch splits the graph at its buckets if there is something to reduce while the backward pass goes on."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(_torch, "compile_subject", lambda subject, _: subject.compile(backend=backend))
    spec = compiled(processes)
    torch.compiler.reset()
    with torch._dynamo.config.patch(optimize_ddp=True):
        trainer = ddp.wrap(spec, Seat(rank=0, local_rank=0, world_size=processes, device="cpu"))
        tokens = torch.zeros((1, 17), dtype=torch.int64)
        trainer.forward(tokens[:, :-1], tokens[:, 1:], torch.tensor(16.0), True)
    torch.compiler.reset()
    assert (len(graphs) == 1) is whole


def test_a_bucket_below_the_first_of_torch_is_refused_before_torch_fails_at_it() -> None:
    assert ddp.check(compiled(1, 0.5)) is None
    assert ddp.check(compiled(2, 1.0)) is None
    assert "0.5 MB" in (ddp.check(compiled(2, 0.5)) or "")
