"""A transformers model served here: static key-value cache, compiled decode step, continuous or static batching.

Requests are batched in slots (see `replica/settings.py`), which is stated with every result. To measure transformers'
own continuous batching, run `transformers serve --continuous-batching` and use `engine: openai`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from paceline.contract import Endpoint, Seat
from paceline.errors import require
from paceline.experiment.plugins import parse_options
from paceline.experiment.spec import RunSpec
from paceline.serving.engines import _server

# It starts servers on the devices of its rank: other processes there are counted before.
STARTS = True


@dataclass(frozen=True)
class Options(_server.ReplicaOptions):
    """compile: the layers of a decode step use torch.compile; graph: a decode step is one CUDA graph. Both default to
    on for GPUs and off for CPUs. Prompts are read eagerly, as their lengths differ."""

    compile: bool | None = None
    graph: bool | None = None

    def __post_init__(self) -> None:
        _server.ReplicaOptions.__post_init__(self)
        for name in ("compile", "graph"):
            value = getattr(self, name)
            require(value in (None, True, False), f"transformers.{name}", value, "true or false")


def check(spec: RunSpec) -> str | None:
    chosen = parse_options(Options, spec.engine)
    if chosen.graph and spec.topology.device == "cpu":
        return "transformers.graph needs a GPU, but the device is cpu"
    return _server.refusal(spec, chosen)


def longest_request(spec: RunSpec) -> tuple[int, str]:
    return _server.longest_request(spec, parse_options(Options, spec.engine))


def nodes_per_replica(spec: RunSpec) -> int:
    return parse_options(Options, spec.engine).nodes


def open(spec: RunSpec, seat: Seat) -> AbstractContextManager[Sequence[Endpoint]]:
    chosen = parse_options(Options, spec.engine)
    on_gpu = seat.device == "cuda"
    compiled, graph = (on_gpu if option is None else option for option in (chosen.compile, chosen.graph))
    return _server.opened(spec, seat, chosen, compiled=compiled, graph=graph)
