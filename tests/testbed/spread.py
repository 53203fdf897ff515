"""The ranks of one replica that is spread over nodes: each in a thread of this process, with a store as in torchrun."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from paceline.contract import Endpoint, Engine, Seat
from paceline.errors import LaunchError
from paceline.experiment.spec import RunSpec
from paceline.launchers.node import torchrun
from paceline.serving.engines import vllm


@dataclass
class SpreadRanks:
    """served: what each rank provides, once it does. errors: why it does not, or did not to the end."""

    spec: RunSpec
    engine: Engine = vllm
    limit_s: float = 60.0
    served: dict[int, list[Endpoint]] = field(default_factory=dict)
    errors: dict[int, LaunchError] = field(default_factory=dict)
    _over: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def living(self, monkeypatch: Any) -> Iterator[None]:
        """From when every rank has begun, or has failed to, until the block ends."""
        from torch.distributed import HashStore

        # Real ranks have a connection each; threads that shared one would block each other.
        store, reachable = HashStore(), torchrun.serve(torchrun.listen())
        monkeypatch.setattr(torchrun, "launch_store", lambda _timeout_s: store)
        for name, value in {"MASTER_ADDR": reachable.host, "MASTER_PORT": str(reachable.port)}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        count = self.spec.topology.world_size
        # The first one last: the others wait for its word.
        threads = [threading.Thread(target=self._live, args=(rank,)) for rank in reversed(range(count))]
        for thread in threads:
            thread.start()
        try:
            end = time.monotonic() + self.limit_s
            while len(self.served) + len(self.errors) < count and time.monotonic() < end:
                time.sleep(0.02)
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join()

    def _live(self, rank: int) -> None:
        seat = Seat(rank=rank, local_rank=0, world_size=self.spec.topology.world_size, device="cpu")
        try:
            with self.engine.open(self.spec, seat) as endpoints:
                self.served[rank] = list(endpoints)
                self._over.wait(10 * self.limit_s)
        except LaunchError as error:
            self.errors[rank] = error
