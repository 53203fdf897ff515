"""Verbs about serving: a server of known law, and what the client of this host holds against it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from paceline.cli.verbs import OK, SOME_FAILED, add_verb, console, print_hanging

if TYPE_CHECKING:
    from paceline.results.served_samples import CeilingSample


def add_verbs(verbs: Any) -> None:
    verb = add_verb(verbs, "mock-replica", mock_replica, "serve an OpenAI-compatible endpoint of known law")
    verb.add_argument("--host", default="127.0.0.1", help="(default: %(default)s)")
    verb.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    verb.add_argument("--ttft", type=float, default=0.1, metavar="S", help="time to the first token (default: 0.1)")
    verb.add_argument("--itl", type=float, default=0.02, metavar="S", help="time between tokens (default: 0.02)")
    verb.add_argument(
        "--slots", type=int, default=0, metavar="N", help="answer N at once, the rest wait in line (default: no bound)"
    )
    verb.add_argument("--mode", default="plain", help="how it misbehaves; `--mode list` tells the ways")
    verb = add_verb(verbs, "selftest", selftest, "measure how much load the client of this host can be believed at")
    verb.add_argument("--streams", type=int, default=1000, help="answers under way at once (default: %(default)s)")
    verb.add_argument("--seconds", type=float, default=4.0, help="of each try (default: %(default)s)")
    verb.add_argument("--shards", type=int, default=1, help="processes of the client (default: %(default)s)")
    verb.add_argument("--json", action="store_true", help="one JSON document")


def mock_replica(arguments: argparse.Namespace) -> int:
    from paceline.errors import require
    from paceline.serving.mock.server import MODES, Law, serve_until_told

    screen = console()
    if arguments.mode == "list":
        for name, text in MODES.items():
            print_hanging(screen, f"{name:>10}  {text}", 12)
        return OK
    require(arguments.mode in MODES, "--mode", arguments.mode, ", ".join(MODES))
    require(arguments.ttft >= 0, "--ttft", arguments.ttft, "seconds from 0")
    require(arguments.itl >= 0, "--itl", arguments.itl, "seconds from 0")
    require(0 <= arguments.port <= 65_535, "--port", arguments.port, "0 to 65535, of which 0 takes a free one")
    require(arguments.slots >= 0, "--slots", arguments.slots, "a whole number from 0")
    law = Law(ttft_s=arguments.ttft, itl_s=arguments.itl, mode=arguments.mode, slots=arguments.slots)

    def tell(port: int) -> None:
        print_hanging(screen, f"http://{arguments.host}:{port} answers as {law.model!r} until Ctrl-C", 2)

    serve_until_told(law, arguments.host, arguments.port, tell)
    return OK


def selftest(arguments: argparse.Namespace) -> int:
    """What was found is kept for the runs on this host: their reports say which share of it they used."""
    import dataclasses
    import json

    from paceline.errors import require
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
    found = ceiling_of(rungs, arguments.shards)
    trouble = _kept(found) if found else None
    if arguments.json:
        told = {"ceiling": dataclasses.asdict(found) if found else None, "kept": bool(found) and trouble is None}
        print(json.dumps({**told, "tries": [rung.to_dict() for rung in rungs]}, indent=2))
    elif found is None:
        print_hanging(screen, "this host's client was believed at no load: other work keeps its processors busy", 2)
    else:
        print_hanging(screen, f"ceiling: {found.events_per_s:,.0f} events/s over {found.streams:,} streams", 2)
        print_hanging(screen, trouble or "kept: runs on this host say which share of it they used", 2)
    return SOME_FAILED if found is None else OK


def _kept(found: CeilingSample) -> str | None:
    """Why it was not; the measurement itself is none the worse for it."""
    from paceline.serving import client_ceiling

    try:
        client_ceiling.keep(found)
    except (OSError, RuntimeError) as error:
        return f"not kept for later runs: {error}"
    return None
