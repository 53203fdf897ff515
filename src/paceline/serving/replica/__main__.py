"""The processes of a replica (`python -m paceline.serving.replica front|model`), configured on standard input."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import socket
import sys

from paceline.errors import PacelineError
from paceline.host.processes import end_with_parent
from paceline.serving.replica.batching import Channel, ChannelClosed
from paceline.serving.replica.settings import Settings


def main(role: str) -> None:
    end_with_parent()
    message = json.loads(sys.stdin.readline())
    settings = Settings(**message["settings"])
    if role == "front":
        from paceline.serving.replica.front import run

        # A tokenizer needs no torch, but transformers imports it where it can: 3 s of CPU time and 300 MB.
        sys.modules["torch"] = None  # type: ignore[assignment]
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
        asyncio.run(run(settings, message["secret"], message["meeting"]))
        return
    from paceline.host.processes import collection_paused

    # Most of the start is the import of torch and transformers.
    with collection_paused():
        from paceline.serving.replica import model
    channel = Channel(socket.socket(fileno=message["line"])) if message["line"] is not None else None
    try:
        with contextlib.suppress(ChannelClosed):
            model.run(settings, message["rank"], channel, message["meeting"])
    except PacelineError as error:
        if channel is None:
            raise
        channel.put({"failed": str(error)})


if __name__ == "__main__":
    main(sys.argv[1])
    # Otherwise the interpreter searches all of torch for garbage before it ends.
    gc.freeze()
