"""The verb goodput: the best interval between checkpoints, and what failures and spot capacity cost."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from paceline.cli.overview import OK
from paceline.cli.verbs import add_verb, console, print_plain
from paceline.errors import RequestError, require

FORMATS = ("terminal", "json")


def add_verbs(verbs: Any) -> None:
    text = "find the best checkpoint interval at a failure rate, and what spot capacity would cost"
    verb = add_verb(verbs, "goodput", goodput, text)
    verb.add_argument("directory", type=Path, metavar="DIR", help="results with runs that wrote checkpoints")
    verb.add_argument(
        "--mtbf", required=True, metavar="TIME", help="mean time between failures of a node: 90m, 12h, 30d"
    )
    verb.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes of the job; one failure stops it (1)")
    verb.add_argument("--restart", metavar="TIME", help="time of a restart, instead of the measured one")
    verb.add_argument("--price", type=float, metavar="USD", help="on-demand price per hour of the job")
    verb.add_argument("--spot-price", type=float, metavar="USD", help="spot price per hour of the job")
    verb.add_argument(
        "--interruptions", type=float, metavar="PER_HOUR", help="how often spot capacity of the job is reclaimed"
    )
    verb.add_argument("--format", choices=FORMATS, default="terminal", help="default: %(default)s")


def goodput(arguments: argparse.Namespace) -> int:
    from paceline import report as reporting
    from paceline.analysis.compare import checkpoints
    from paceline.campaign.run.findings import report_of
    from paceline.campaign.run.stopping import parse_budget
    from paceline.report.exporters.json import plain
    from paceline.report.tables import checkpoints as table

    require(arguments.nodes >= 1, "--nodes", arguments.nodes, "a whole number from 1")
    mtbf_s = parse_budget(arguments.mtbf, "--mtbf") / arguments.nodes
    given_s = None if arguments.restart is None else parse_budget(arguments.restart, "--restart")
    spot = _spot_prices(arguments)
    found = report_of(arguments.directory)
    if not found.checkpoints:
        raise RequestError(
            f"{arguments.directory}: no certified run wrote a checkpoint, expected runs with checkpoint_every "
            "(docs/resume.md)."
        )
    measured = [cost.restart_s for cost in found.checkpoints if cost.restart_s is not None]
    if given_s is None and not measured:
        raise RequestError("--restart: got none and no run was restarted, expected the time of a restart, such as 5m.")
    rows, offers = [], []
    for cost in found.checkpoints:
        # A restart takes as long whoever wrote the checkpoint; cells that had none use those of the others.
        own_s = cost.restart_s if cost.restart_s is not None else max(measured, default=0.0)
        restart_s = own_s if given_s is None else given_s
        rows.append(checkpoints.at_failure_rate(cost, mtbf_s, restart_s))
        if spot is not None:
            prices, interruptions = spot
            offers.append(checkpoints.spot_offer(cost, restart_s, mtbf_s, prices, interruptions))
    answer = table.sentence(rows, offers)
    if arguments.format == "json":
        document = {"schema": 1, "answer": answer, "goodput": plain(rows), "spot": plain(offers)}
        print(json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False))
        return OK
    screen = console()
    print_plain(screen, answer)
    known = (*table.tables(found), table.expected(rows), table.spot(offers))
    screen.print(reporting.drawn([one for one in known if one is not None]))
    return OK


def _spot_prices(arguments: argparse.Namespace) -> tuple[tuple[float, float], float] | None:
    """Prices (on demand, spot) and interruptions per hour; None without these options, an error if one is missing."""
    given = {
        "--price": arguments.price,
        "--spot-price": arguments.spot_price,
        "--interruptions": arguments.interruptions,
    }
    if all(value is None for value in given.values()):
        return None
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise RequestError(f"{missing[0]}: got none, expected it together with {', '.join(set(given) - set(missing))}.")
    for name in ("--price", "--spot-price"):
        require(0 < given[name] < 1e9, name, given[name], "a positive number of USD per hour")
    rate = given["--interruptions"]
    require(0 <= rate <= 1000, "--interruptions", rate, "a number per hour from 0 to 1000")
    return (given["--price"], given["--spot-price"]), rate
