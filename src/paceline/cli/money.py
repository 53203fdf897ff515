"""The options about cost that every reporting verb takes."""

from __future__ import annotations

import argparse
import math
import re
from fractions import Fraction
from typing import TYPE_CHECKING

from paceline.errors import RequestError

if TYPE_CHECKING:
    from paceline.analysis.cost.training import Costing

MOST = 10**18
_SIZES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


def add_cost_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--price", metavar="USD|NAME|FILE", help="USD per GPU-hour, a name of `paceline list prices`, or a .toml file"
    )
    verb.add_argument("--train-tokens", metavar="N", help="also time and cost to train on N tokens: 300M, 1B, 15T")
    verb.add_argument("--train-samples", metavar="N", help="also time and cost of a fine-tune on N samples: 10K, 1M")
    verb.add_argument(
        "--busy-hours",
        metavar="H",
        help="hours of a day in which reserved devices serve, for the cost of served tokens (8 unless given)",
    )


def costing_of(arguments: argparse.Namespace) -> Costing:
    """What was asked about cost; wrong values are refused before anything is read or run."""
    from paceline.analysis.cost.training import Costing
    from paceline.host import prices

    asked = prices.chosen(arguments.price) if arguments.price is not None else None
    tokens, samples = arguments.train_tokens, arguments.train_samples
    return Costing(
        asked,
        None if tokens is None else token_count(tokens),
        None if samples is None else sample_count(samples),
        *(() if arguments.busy_hours is None else (hours(arguments.busy_hours),)),
    )


def hours(text: str) -> float:
    """Of a day."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found <= 24:
        raise RequestError(f"--busy-hours: {text!r} was given; accepted is a number of hours above 0, up to 24")
    return found


def token_count(text: str) -> int:
    """`1.5B` is 1,500,000,000."""
    return _count(text, "--train-tokens", "a whole number of tokens up to 1,000,000T, such as 300M, 1.5B or 15T")


def sample_count(text: str) -> int:
    return _count(text, "--train-samples", "a whole number of samples up to 1,000,000T, such as 10000, 50K or 1M")


def _count(text: str, option: str, accepted: str) -> int:
    found = re.fullmatch(r"(\d{1,30}(?:\.\d{1,30})?)([KMBGT]?)", text.strip().upper(), re.ASCII)
    count = Fraction(found[1]) * _SIZES[found[2]] if found else Fraction(0)
    if not (count.denominator == 1 and 1 <= count <= MOST):
        raise RequestError(f"{option}: got {text!r}, expected {accepted}.")
    return int(count)
