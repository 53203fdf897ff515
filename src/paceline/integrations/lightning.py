"""Lightning: `Trainer(callbacks=[paceline.integrations.lightning.Callback()])`."""

from __future__ import annotations

import functools
from typing import Any

from paceline import track


@functools.cache
def _callback_class() -> type:
    from lightning.pytorch import Callback as Base

    class Callback(Base):  # type: ignore[misc]
        """Shows the data of a compiled training step, and leaves validation out of the time of steps."""

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            track.batch(batch)

        def on_validation_start(self, trainer: Any, module: Any) -> None:
            track.begin_pause()

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            track.end_pause()

    return Callback


def __getattr__(name: str) -> Any:
    if name == "Callback":
        return _callback_class()
    raise AttributeError(name)
