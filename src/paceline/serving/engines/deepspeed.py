"""A model of transformers under DeepSpeed's inference engine, cut over devices by AutoTP; runs eagerly, no kernels.

On one device `deepspeed.init_inference` changes no arithmetic: its result is then that of eager transformers, and is to
be read so. See `replica/injection.py` for what is not used and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from paceline.contract import Endpoint, Seat
from paceline.experiment.plugins import parse_options
from paceline.experiment.spec import RunSpec
from paceline.serving.engines import _replica

Options = _replica.ReplicaOptions
# It starts servers on the devices of its rank: what else runs there is counted before.
STARTS = True


def check(spec: RunSpec) -> str | None:
    assert spec.engine is not None
    return _replica.refusal(spec, parse_options(Options, spec.engine))


def open(spec: RunSpec, seat: Seat) -> AbstractContextManager[Sequence[Endpoint]]:
    assert spec.engine is not None
    return _replica.opened(spec, seat, parse_options(Options, spec.engine))
