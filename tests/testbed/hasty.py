"""The strategy ddp, with imports that start a thread: ranks cannot be forked from a process that has made them."""

from __future__ import annotations

import threading

from paceline.training.strategies.ddp import check, wire_bytes, wrap

__all__ = ["check", "preload", "wire_bytes", "wrap"]


def preload(device: str) -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
