"""The processes of a replica (`python -m paceline.serving.replica front|model`), each told on its standard input."""

from __future__ import annotations

import contextlib
import gc
import json
import socket
import sys

from paceline.errors import PacelineError
from paceline.host.processes import end_with_parent
from paceline.serving.replica.line import Hangup, Line
from paceline.serving.replica.settings import Settings


def main(role: str) -> None:
    end_with_parent()
    told = json.loads(sys.stdin.readline())
    settings = Settings.from_line(told["settings"])
    if role == "front":
        import asyncio

        from paceline.serving.replica.front import run

        asyncio.run(run(settings, told["secret"]))
        return
    from paceline.serving.replica.model import run as compute

    line = Line(socket.socket(fileno=told["line"])) if told["line"] is not None else None
    try:
        with contextlib.suppress(Hangup):
            compute(settings, told["rank"], line, told["port"])
    except PacelineError as error:
        if line is None:
            raise
        line.put({"failed": str(error)})


if __name__ == "__main__":
    main(sys.argv[1])
    # The interpreter would look through all of torch for garbage before it ends.
    gc.freeze()
