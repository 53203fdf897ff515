"""A model of transformers under DeepSpeed's inference engine, cut over devices by AutoTP; runs eagerly, no kernels.

On one device `deepspeed.init_inference` changes no arithmetic: its result is then that of eager transformers, and is to
be read so. See `replica/injection.py` for what is not used and why.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from paceline.engines import _replica, _server
from paceline.plugins import Endpoint, Seat, options
from paceline.spec import RunSpec

Options = _replica.ReplicaOptions
# It starts servers on the devices of its rank: what else runs there is counted before.
STARTS = True


def check(spec: RunSpec) -> str | None:
    assert spec.engine is not None
    return _replica.refusal(spec, options(Options, spec.engine))


@contextlib.contextmanager
def open(spec: RunSpec, seat: Seat) -> Iterator[Sequence[Endpoint]]:
    assert spec.engine is not None
    chosen = options(Options, spec.engine)
    first = seat.local_rank * chosen.tensor_parallel
    host = _server.own_address(spec.topology.nodes, os.environ)
    settings = _replica.settings_of(spec, chosen, first_device=first, host=host)
    patience_s = _server.patience_s(chosen.ready_s, spec.stall_s)
    with _replica.opened(spec, seat, settings, patience_s) as endpoints:
        yield endpoints
