"""Verbs about serving: a server of known law, and what the client of this host holds against it."""

from __future__ import annotations

import argparse
from typing import Any

from paceline.cli.verbs import OK, SOME_FAILED, add_verb, console, print_hanging


def add_verbs(verbs: Any) -> None:
    verb = add_verb(verbs, "mock-replica", mock_replica, "serve an OpenAI-compatible endpoint of known law")
    verb.add_argument("--host", default="127.0.0.1", help="(default: %(default)s)")
    verb.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    verb.add_argument("--ttft", type=float, default=0.1, metavar="S", help="time to the first token (default: 0.1)")
    verb.add_argument("--itl", type=float, default=0.02, metavar="S", help="time between tokens (default: 0.02)")
    verb.add_argument("--mode", default="plain", help="how it misbehaves; `--mode list` tells the ways")
    verb = add_verb(verbs, "selftest", selftest, "measure how much load the client of this host can be believed at")
    verb.add_argument("--streams", type=int, default=1000, help="answers under way at once (default: %(default)s)")
    verb.add_argument("--seconds", type=float, default=4.0, help="of each try (default: %(default)s)")
    verb.add_argument("--shards", type=int, default=1, help="processes of the client (default: %(default)s)")


def mock_replica(arguments: argparse.Namespace) -> int:
    from paceline.mock_replica import MODES, Law, serve_until_told
    from paceline.spec import require

    screen = console()
    if arguments.mode == "list":
        for name, text in MODES.items():
            print_hanging(screen, f"{name:>10}  {text}", 12)
        return OK
    require(arguments.mode in MODES, "--mode", arguments.mode, ", ".join(MODES))
    require(arguments.ttft >= 0, "--ttft", arguments.ttft, "seconds from 0")
    require(arguments.itl >= 0, "--itl", arguments.itl, "seconds from 0")
    law = Law(ttft_s=arguments.ttft, itl_s=arguments.itl, mode=arguments.mode)

    def tell(port: int) -> None:
        print_hanging(screen, f"http://{arguments.host}:{port} answers as {law.model!r} until Ctrl-C", 2)

    serve_until_told(law, arguments.host, arguments.port, tell)
    return OK


def selftest(arguments: argparse.Namespace) -> int:
    from paceline.selftest import climb
    from paceline.spec import require

    for option in ("streams", "shards"):
        require(getattr(arguments, option) >= 1, f"--{option}", getattr(arguments, option), "a whole number from 1")
    require(arguments.seconds >= 1, "--seconds", arguments.seconds, "seconds from 1")
    screen = console()
    best = None
    for rung in climb(arguments.streams, arguments.seconds, arguments.shards):
        print_hanging(screen, rung.text, 2)
        best = rung if rung.is_valid else best
    if best is None:
        print_hanging(screen, "this host's client was believed at no load: other work keeps its processors busy", 2)
        return SOME_FAILED
    print_hanging(screen, f"ceiling: {best.events_per_s:,.0f} events/s over {best.streams:,} streams", 2)
    return OK
