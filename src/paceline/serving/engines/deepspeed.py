"""A transformers model in DeepSpeed's inference engine, split over devices by AutoTP; runs eagerly.

On one device `deepspeed.init_inference` changes no arithmetic: the result is that of eager transformers. See
`replica/weights.py` for what is not used and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from paceline.contract import Endpoint, Seat
from paceline.experiment.plugins import parse_options
from paceline.experiment.spec import RunSpec
from paceline.serving.engines import _server

Options = _server.ReplicaOptions
# It starts servers on the devices of its rank: other processes there are counted before.
STARTS = True


def check(spec: RunSpec) -> str | None:
    return _server.refusal(spec, parse_options(Options, spec.engine))


def longest_request(spec: RunSpec) -> tuple[int, str]:
    return _server.longest_request(spec, parse_options(Options, spec.engine))


def nodes_per_replica(spec: RunSpec) -> int:
    return parse_options(Options, spec.engine).nodes


def open(spec: RunSpec, seat: Seat) -> AbstractContextManager[Sequence[Endpoint]]:
    return _server.opened(spec, seat, parse_options(Options, spec.engine))
