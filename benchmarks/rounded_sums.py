"""Error of the gradient that the output layer passes back in bf16, by how its product is computed.

The gradient of each token's activation is a sum over the vocabulary whose parts nearly cancel. torch's default lets
cuBLAS split long sums and round the parts to bf16; ranks that share the vocabulary round their parts, too. The errors
are relative to fp64: of all values, and of their mean over tokens, which does not average out what all tokens share.

Run `python benchmarks/rounded_sums.py [--model gpt2-124m] [--tokens 4096] [--steps 2]`: the model trains that many
steps first, on synthetic tokens. On a CPU both settings are the same. Nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.contract import Seat
from paceline.experiment.choices import Choice
from paceline.experiment.spec import Precision, RunSpec, Topology, Training
from paceline.host import machine
from paceline.models import arithmetic
from paceline.training.data.corpus import Partition, open_corpus
from paceline.training.decoder import padded_head
from paceline.training.instruments import attention_backends
from paceline.training.precision import matrix_products, whole_sums
from paceline.training.strategies import single

LENGTH = 512
PARTS = (2, 4, 8)


def factors(asked: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """The gradient of the logits and the weight of the output layer in bf16, after some training."""
    device = "cuda" if machine.device_kind() == "cuda" else "cpu"
    training = Training(sequence_length=LENGTH, micro_batch=asked.tokens // LENGTH, precision=Precision(compute="bf16"))
    spec = RunSpec(
        experiment="rounded-sums",
        workload=Choice("pretrain"),
        model=Choice.parse(asked.model),
        strategy=Choice("single"),
        topology=Topology(device=device),
        steps=asked.steps + 1,
        training=training,
    )
    corpus = open_corpus(training.data, arithmetic.load(spec.model).vocab, LENGTH, spec.seed)
    partition, seen = Partition.of(spec, 0), {}
    with attention_backends(device), matrix_products(training.precision):
        trainer: Any = single.wrap(spec, Seat(rank=0, local_rank=0, world_size=1, device=device))
        model = trainer.module
        model.norm.register_forward_hook(lambda _, inputs, output: seen.update(x=output.detach().flatten(0, 1)))
        for step in range(asked.steps + 1):
            batch = partition.step_batch(corpus, step)
            tokens = torch.from_numpy(batch.micro_batches[0]).to(device)
            normaliser = torch.full((), batch.normaliser, dtype=torch.float32, device=device)
            head = (model.embedding if model.head is None else model.head).weight.detach().to(model.dtype)
            loss = trainer.forward(tokens[:, :-1], tokens[:, 1:], normaliser, True)
            trainer.backward(loss, True)
            trainer.update()
    gradient = F.linear(seen["x"], head).float().softmax(-1)
    gradient[torch.arange(len(gradient)), tokens[:, 1:].flatten()] -= 1
    return (gradient / len(gradient)).to(model.dtype), head


def products(gradient: Tensor, head: Tensor) -> Iterator[tuple[str, Tensor]]:
    padded, _ = padded_head(head)
    yield "padded", F.pad(gradient, (0, len(padded) - len(head))) @ padded
    yield "not padded", gradient @ head
    for count in PARTS:
        parts = zip(gradient.chunk(count, -1), head.chunk(count), strict=True)
        yield f"in {count} parts", functools.reduce(torch.add, (g @ words for g, words in parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2-124m")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=2)
    gradient, head = factors(parser.parse_args())
    exact = gradient.double() @ head.double()
    print(f"{len(gradient)} tokens x {len(head)} words; errors of all values, and of their mean over tokens")
    for setting, found in (("torch's default", list(products(gradient, head))), ("whole sums", whole(gradient, head))):
        for name, made in found:
            error = made.double() - exact
            mean = error.mean(0).norm() / exact.mean(0).norm()
            print(f"{setting:16} {name:12} {error.norm() / exact.norm():8.2%} {mean:8.2%}")


def whole(gradient: Tensor, head: Tensor) -> list[tuple[str, Tensor]]:
    with whole_sums():
        return list(products(gradient, head))


if __name__ == "__main__":
    main()
