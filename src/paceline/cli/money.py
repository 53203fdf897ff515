"""The options about cost that every reporting verb takes."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from paceline.errors import RequestError

if TYPE_CHECKING:
    from paceline.analysis.cost import Costing

_SIZES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


def add_cost_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--price", metavar="USD|NAME|FILE", help="USD per GPU-hour, a name of `paceline list prices`, or a .toml file"
    )
    verb.add_argument("--train-tokens", metavar="N", help="also time and cost to train on N tokens: 300M, 1B, 15T")


def costing_of(arguments: argparse.Namespace) -> Costing:
    """What was asked about cost; wrong values are refused before anything is read or run."""
    from paceline import prices
    from paceline.analysis.cost import Costing

    asked = prices.chosen(arguments.price) if arguments.price is not None else None
    return Costing(asked, None if arguments.train_tokens is None else token_count(arguments.train_tokens))


def token_count(text: str) -> int:
    """`1.5B` is 1,500,000,000."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBGT]?)", text.strip().upper(), re.ASCII)
    count = round(float(found[1]) * _SIZES[found[2]]) if found else 0
    if not 1 <= count <= 10**18:
        raise RequestError(
            f"--train-tokens: {text!r} was given; accepted is a number of tokens such as 300M, 1B or 15T"
        )
    return count
