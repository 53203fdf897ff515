"""Hugging Face Trainer and TRL: `trainer.add_callback(paceline.integrations.huggingface.Callback())`."""

from __future__ import annotations

import functools
from typing import Any

from paceline import track


@functools.cache
def _callback_class() -> type:
    from transformers import TrainerCallback

    class Callback(TrainerCallback):  # type: ignore[misc]
        """Leaves logging, evaluation and checkpoints out of the time of steps; loading data stays inside."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            track.begin_pause()

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            track.end_pause()
            track.begin_pause()

        on_evaluate = on_log
        on_save = on_log

    return Callback


def __getattr__(name: str) -> Any:
    if name == "Callback":
        return _callback_class()
    raise AttributeError(name)
