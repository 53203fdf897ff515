"""The processes of a replica (`python -m paceline.serving.replica front|model`), configured on standard input."""

from __future__ import annotations

import contextlib
import gc
import json
import socket
import sys

from paceline.errors import PacelineError
from paceline.host.processes import end_with_parent
from paceline.serving.replica.channel import Channel, ChannelClosed
from paceline.serving.replica.settings import Settings


def main(role: str) -> None:
    end_with_parent()
    message = json.loads(sys.stdin.readline())
    settings = Settings.from_line(message["settings"])
    if role == "front":
        import asyncio

        from paceline.serving.replica.front import run

        asyncio.run(run(settings, message["secret"]))
        return
    from paceline.serving.replica.model import run as compute

    channel = Channel(socket.socket(fileno=message["line"])) if message["line"] is not None else None
    try:
        with contextlib.suppress(ChannelClosed):
            compute(settings, message["rank"], channel, message["port"])
    except PacelineError as error:
        if channel is None:
            raise
        channel.put({"failed": str(error)})


if __name__ == "__main__":
    main(sys.argv[1])
    # Otherwise the interpreter searches all of torch for garbage before it ends.
    gc.freeze()
