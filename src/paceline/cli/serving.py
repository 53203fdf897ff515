"""Verbs for testing the load generator: a mock server with known latencies, and a self-test of this host's client."""

from __future__ import annotations

import argparse
from typing import Any

from paceline.cli.overview import OK, SOME_FAILED
from paceline.cli.verbs import add_verb, console, print_hanging


def add_verbs(verbs: Any) -> None:
    verb = add_verb(verbs, "mock-replica", mock_replica, "run a mock OpenAI server with known latencies")
    verb.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: %(default)s)"
    )
    verb.add_argument("--port", type=int, default=8000, metavar="N", help="0 picks a free port (default: %(default)s)")
    verb.add_argument("--ttft", type=float, default=0.1, metavar="S", help="time to first token (default: %(default)s)")
    verb.add_argument("--itl", type=float, default=0.02, metavar="S", help="time between tokens (default: %(default)s)")
    verb.add_argument(
        "--slots",
        type=int,
        default=0,
        metavar="N",
        help="answer N requests at once, queue the rest (default: no limit)",
    )
    verb.add_argument("--mode", default="plain", metavar="NAME", help="inject a fault; `--mode list` lists the modes")
    verb = add_verb(
        verbs,
        "selftest",
        selftest,
        "measure the highest request rate at which this host's load generator stays accurate",
    )
    verb.add_argument(
        "--streams", type=int, default=1000, metavar="N", help="concurrent answers (default: %(default)s)"
    )
    verb.add_argument(
        "--seconds", type=float, default=4.0, metavar="S", help="length of each try (default: %(default)s)"
    )
    verb.add_argument("--shards", type=int, default=1, metavar="N", help="client processes (default: %(default)s)")
    verb.add_argument("--json", action="store_true", help="print one JSON document")


def mock_replica(arguments: argparse.Namespace) -> int:
    from paceline.errors import require
    from paceline.serving.mock import MODES, Latencies, serve_until_signalled

    screen = console()
    if arguments.mode == "list":
        for name, text in MODES.items():
            print_hanging(screen, f"{name:>10}  {text}", 12)
        return OK
    require(arguments.mode in MODES, "--mode", arguments.mode, ", ".join(MODES))
    require(arguments.ttft >= 0, "--ttft", arguments.ttft, "seconds from 0")
    require(arguments.itl >= 0, "--itl", arguments.itl, "seconds from 0")
    require(0 <= arguments.port <= 65_535, "--port", arguments.port, "0 to 65535, where 0 picks a free port")
    require(arguments.slots >= 0, "--slots", arguments.slots, "a whole number from 0")
    latencies = Latencies(ttft_s=arguments.ttft, itl_s=arguments.itl, mode=arguments.mode, slots=arguments.slots)

    def announce(port: int) -> None:
        print_hanging(
            screen, f"http://{arguments.host}:{port} serves the model {latencies.model!r}; stop it with Ctrl-C", 2
        )

    serve_until_signalled(latencies, arguments.host, arguments.port, announce)
    return OK


def selftest(arguments: argparse.Namespace) -> int:
    """Store the ceiling for later runs on this host: their reports say which share of it they used."""
    import dataclasses
    import json

    from paceline.errors import require
    from paceline.serving import client_ceiling
    from paceline.serving.selftest import ceiling_of, climb

    for option in ("streams", "shards"):
        require(getattr(arguments, option) >= 1, f"--{option}", getattr(arguments, option), "a whole number from 1")
    require(arguments.seconds >= 1, "--seconds", arguments.seconds, "seconds from 1")
    screen = console()
    rungs = []
    for rung in climb(arguments.streams, arguments.seconds, arguments.shards):
        rungs.append(rung)
        if not arguments.json:
            print_hanging(screen, rung.text, 2)
    ceiling = ceiling_of(rungs, arguments.shards)
    trouble = None
    if ceiling is not None:
        try:
            client_ceiling.keep(ceiling)
        except (OSError, RuntimeError) as error:
            trouble = f"not stored for later runs: {error}"
    if arguments.json:
        stored = {"ceiling": ceiling and dataclasses.asdict(ceiling), "kept": bool(ceiling) and trouble is None}
        print(json.dumps({**stored, "tries": [rung.to_dict() for rung in rungs]}, indent=2))
    elif ceiling is None:
        print_hanging(
            screen, "no accurate load: other work keeps this host's processors busy, try again when it is idle", 2
        )
    else:
        print_hanging(screen, f"ceiling: {ceiling.events_per_s:,.0f} events/s over {ceiling.streams:,} streams", 2)
        print_hanging(screen, trouble or "stored: reports of runs on this host say which share of it they used", 2)
    return SOME_FAILED if ceiling is None else OK
