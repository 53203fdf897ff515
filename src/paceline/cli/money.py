"""The options about cost that every reporting verb takes."""

from __future__ import annotations

import argparse
import re
from fractions import Fraction
from typing import TYPE_CHECKING

from paceline.errors import RequestError

if TYPE_CHECKING:
    from paceline.analysis.cost import Costing

MOST_TOKENS = 10**18
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
    found = re.fullmatch(r"(\d{1,30}(?:\.\d{1,30})?)([KMBGT]?)", text.strip().upper(), re.ASCII)
    count = Fraction(found[1]) * _SIZES[found[2]] if found else Fraction(0)
    if not (count.denominator == 1 and 1 <= count <= MOST_TOKENS):
        raise RequestError(
            f"--train-tokens: {text!r} was given; "
            "accepted is a whole number of tokens up to 1,000,000T, such as 300M, 1.5B or 15T"
        )
    return int(count)
