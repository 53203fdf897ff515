"""Compiled code rounds where plain code does: else compiled models learn ahead of their reference."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from paceline.contract import Seat  # noqa: E402
from paceline.experiment.choices import Choice  # noqa: E402
from paceline.experiment.spec import Precision, RunSpec, Topology, Training  # noqa: E402
from paceline.training.strategies import _torch  # noqa: E402

pytestmark = pytest.mark.slow


def loss(compiled: bool) -> float:
    """Of a decoder in bf16 whose last norm has weights that bf16 rounds to 1, all of them."""
    spec = RunSpec(
        experiment="test",
        workload=Choice("pretrain"),
        model=Choice.parse("tiny:layers=1,hidden=64"),
        topology=Topology(device="cpu", processes_per_node=1),
        training=Training(
            sequence_length=64, micro_batch=1, precision=Precision(compute="bf16", reduce="fp32"), compile=compiled
        ),
        strategy=Choice("single"),
        steps=3,
    )
    decoder = _torch.whole_subject(spec, Seat(rank=0, local_rank=0, world_size=1, device="cpu"), "fp32")
    with torch.no_grad():
        decoder.embedding.weight *= 10
        decoder.norm.weight.fill_(1.0038)
    _torch.compile_subject(decoder, spec.training.compilation)
    tokens = torch.arange(65)[None] % 7
    with torch.no_grad():
        return float(decoder(tokens[:, :-1], tokens[:, 1:], torch.tensor(64.0)))


def test_a_compiled_decoder_rounds_the_weights_of_its_last_norm() -> None:
    assert loss(compiled=True) == pytest.approx(loss(compiled=False), rel=2e-5)
